r"""Personal linear models: F_i(x) = min_u f_i(u) + (γ_i/2)‖u − x‖² of N clients, with u_i and ∇F_i.

With u = ζ_i x + v, ζ_i = γ_i/(l2 + γ_i), the two quadratic terms separate, and v is a penalised
correction to the shrunken shared model:

    F_i(x) = min_v (1/m_i) Σ_j ℓ(ζ_i⟨a_j, x⟩ + ⟨a_j, v⟩, y_j) + ((l2 + γ_i)/2)‖v‖² + (ζ_i l2/2)‖x‖²
    ∇F_i   = ζ_i A_iᵀ r_i/m_i + ζ_i l2 x,    r = ∂ℓ/∂z at the client's own predictions p = A_i u_i
    ∇²F_i  = ζ_i² A_iᵀ S_i A_i + ζ_i l2 I,   W = ∂²ℓ/∂z²/m_i,
    S_i    = W − W A_i (A_iᵀW A_i + (l2 + γ_i)I)⁻¹ A_iᵀW

so that F_i is a function of A_i x like f_i. If only some columns P are personal, v lives on P, and
the others have ζ = 1 and l2. v is found by Newton's method, started at u = x, so that an answer
depends on the question alone (`newton.py`). A residual ε = ‖∇_v‖ of the inner problem gives
0 ≤ F̂ − F ≤ ε²/(2(l2 + γ)) and ‖∇F̂ − ∇F‖ ≤ 2ζε. ∇F_i is computed as ∇f_i(u_i): γ_i(x − u_i) would
cancel for large γ_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from scaffpd.models.layout import PaddedBlock
from scaffpd.models.losses import Loss
from scaffpd.models.numerics import SAFE, SINGLE, UNIT, gamma, norm_above
from scaffpd.models.point import LinearPoint
from scaffpd.models.samples import StackedSamples, product, transposed
from scaffpd.models.threads import parallel_map


@dataclass(frozen=True)
class Anchor:
    """What ties clients to x: l2 of f_i, γ_i, and the personal features (`own`; `None`: all)."""

    l2: float
    gamma: Tensor
    own: Tensor | None = None

    @cached_property
    def stiffness(self) -> Tensor:
        """l2 + γ_i, the penalty on v."""
        return self.l2 + self.gamma

    @cached_property
    def keep(self) -> Tensor:
        """ζ_i = γ_i/(l2 + γ_i)."""
        return torch.where(self.gamma > 0, self.gamma / self.stiffness, 0)

    def only(self, who: list[int]) -> Anchor:
        """Select some of the clients."""
        return Anchor(self.l2, self.gamma[who], self.own)

    @cached_property
    def fine(self) -> Anchor:
        """Convert to double precision."""
        if self.gamma.dtype == torch.float64:
            return self
        return Anchor(self.l2, self.gamma.double(), self.own)

    def per_feature(self, personal: Tensor, shared: float | Tensor) -> Tensor:
        """Return `personal` at personal features, `shared` at others, (N, features or 1, 1)."""
        if self.own is None:
            return personal[:, None, None]
        return torch.where(self.own, personal[:, None], shared)[..., None]

    @cached_property
    def factors(self) -> Tensor:
        """Factor of each feature: ζ_i, or 1."""
        return self.per_feature(self.keep, 1.0)

    @cached_property
    def ridges(self) -> Tensor:
        """Remaining l2 of each feature: ζ_i l2, or l2."""
        return self.per_feature(self.keep * self.l2, self.l2)

    def part(self, A: Tensor) -> Tensor:
        """Return the personal columns."""
        return A if self.own is None else A[..., self.own]

    def along(self, rows: StackedSamples, X: Tensor, fine: bool = False) -> Tensor:
        """Return A_i D_i X, D_i = diag(ζ_i or 1), for X (features, k); `fine` in float64."""
        times = rows.products.times if fine else rows.A.__matmul__
        keep = self.keep[rows.layout.owner][:, None]
        if self.own is None:
            return keep * times(X)
        own = torch.where(self.own[:, None], X, 0)
        both = times(torch.cat([X - own, own], 1))
        return both[:, : X.shape[1]] + keep * both[:, X.shape[1] :]

    def back(self, rows: StackedSamples, R: Tensor, fine: bool = False) -> Tensor:
        """Return Σ_i D_i A_iᵀ R_i, (features, k)."""
        scaled = self.keep[rows.layout.owner][:, None] * R
        pulled = rows.products.transposed if fine else partial(transposed, rows.A)
        if self.own is None:
            return pulled(scaled)
        both = pulled(torch.cat([R, scaled], 1))
        return torch.where(self.own[:, None], both[:, R.shape[1] :], both[:, : R.shape[1]])


class PersonalPoint(LinearPoint):
    """All clients at one x, or each at its own, (N, d); `NewtonPoint` solves for v, r and S.

    With `fine` rows, which have the same losses, everything is in double precision.
    """

    v: Tensor

    def __init__(
        self,
        rows: StackedSamples,
        loss: Loss,
        anchor: Anchor,
        x: Tensor,
        outputs: int,
        fine: StackedSamples | None,
    ) -> None:
        self.rows = rows
        self.loss = loss
        self.anchor = anchor
        self.x = x
        self.outputs = outputs
        self.fine = fine
        self.l2 = anchor.l2
        self.X = x.view(*x.shape[:-1], -1, outputs)
        self.tie = anchor if fine is None else anchor.fine

    def shrunk(self) -> Tensor:
        """Return A_i D_i x, the predictions of the shrunken shared model."""
        if self.fine is not None:
            return self.tie.along(self.fine, self.X.to(self.fine.A.dtype), fine=True)
        if self.X.ndim == 2:
            return self.anchor.along(self.rows, self.X)
        return own_predictions(self.rows, self.anchor.factors * self.X)

    def ridge(self) -> Tensor:
        """Half of xᵀ diag(ζ_i l2 or l2) x, per client."""
        ridges = self.tie.ridges
        squares = self.X.to(self.tie.gamma.dtype).square()
        if self.tie.own is None:
            return ridges[:, 0, 0] * squares.sum((-2, -1)) / 2
        return (ridges * squares).sum((1, 2)) / 2

    def _weighted(self, weights: Tensor) -> Tensor:
        return (weights[self.rows.layout.owner] * self.rows.share)[:, None]

    def _ridge(self, weights: Tensor) -> Tensor:
        return (weights[:, None, None] * self.anchor.ridges).sum(0)

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i c_i by one matrix product, for any N."""
        if self.fine is None:
            out = self.anchor.back(self.rows, self._weighted(weights) * self.residual)
            return (out + self._ridge(weights) * self.X).flatten()
        weights = weights.double()
        scale = (weights[self.fine.layout.owner] * self.fine.exact[1])[:, None]
        out = self.tie.back(self.fine, scale * self.slopes, fine=True)
        ridge = (weights[:, None, None] * self.tie.ridges).sum(0)
        return (out + ridge * self.X.double()).flatten().to(self.x.dtype)

    def _along(self, V: Tensor) -> Tensor:
        """Return T = A D V, the change of shrunken predictions along V: (rows, outputs, k)."""
        k = V.shape[1]
        features = self.rows.A.shape[1]
        T = self.anchor.along(self.rows, V.reshape(features, self.outputs * k))
        return T.view(*self.residual.shape, k)

    def _slopes(self, V: Tensor, T: Tensor) -> Tensor:
        slope = (self.residual[..., None] * T).sum(1) * self.rows.share[:, None]
        ridges = self.anchor.ridges.expand(-1, *self.X.shape[-2:]).flatten(1)
        pull = (ridges * self.x) @ V
        return self.rows.layout.segment_sum(slope) + pull

    def _ridged(self, weights: Tensor, V: Tensor) -> Tensor:
        """Return the last term of Σ w_i VᵀH_iV = Σ w_i T_iᵀS_iT_i + Vᵀ(Σ w_i ridges)V."""
        ridge = self._ridge(weights).expand(*self.X.shape).flatten()
        return V.mT @ (ridge[:, None] * V)

    def curvatures(self, V: Tensor) -> Tensor:
        """Return every client's VᵀH_iV = T_iᵀS_iT_i + Vᵀ(ridges)V, (N, k, k)."""
        T = self._along(V)
        bent = self.bend(T)
        ridges = self.anchor.ridges.expand(-1, *self.X.shape).flatten(1)
        out = V.mT @ (ridges[..., None] * V)
        for block in self.rows.blocks:
            some = (block.weight[..., None, None] * block.of(bent)).flatten(1, 2)
            out[block.clients] += block.of(T).flatten(1, 2).mT @ some
        return out

    def diagonal(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i diag H_i."""
        return weights @ self.diagonals()

    def each(self) -> Tensor:
        """Return the c_i themselves, (N, d)."""
        if self.fine is None:
            return self._vectors(self.residual)
        pulled = self.tie.factors * self.fine.each(self.fine.exact[1][:, None] * self.slopes)
        return (pulled + self.tie.ridges * self.X.double()).flatten(1).to(self.x.dtype)

    def _vectors(self, residual: Tensor) -> Tensor:
        pulled = self.anchor.factors * self.rows.each(self.rows.share[:, None] * residual)
        return (pulled + self.anchor.ridges * self.X).flatten(1)

    def models(self) -> Tensor:
        """Return u_i = D_i x + v_i, (N, d)."""
        shape = len(self.anchor.gamma), *self.X.shape[-2:]
        u = (self.anchor.factors * self.X).expand(shape).clone()
        u[:, slice(None) if self.anchor.own is None else self.anchor.own] += self.v
        return u.flatten(1)

    def enveloped(self, size: Tensor) -> tuple[Tensor, Tensor]:
        """Bound the error of arithmetic, if the rows multiply vectors of length `size`.

        ζ_i and γ_i = κ/n_i, as they are stored, carry a few roundings themselves.
        """
        loss, gradient = self.arithmetic(size)
        n = self.x.numel() + max(self.rows.layout.lengths)
        unit = UNIT if self._format() == 0 else SINGLE
        loss = loss + SAFE * (gamma(n + 16) + 4 * unit) * self.losses.abs()
        return loss, gradient + self.scalings(self.l2 * norm_above(self.x, 0))


def own_predictions(rows: StackedSamples, U: Tensor) -> Tensor:
    """Return A_i u_i of every client, (M, k), for U (N, features, k)."""
    out = U.new_zeros(len(rows.layout.owner), U.shape[2])

    def work(block: PaddedBlock) -> None:
        block.put(out, product(rows.of(block)[0], U[block.clients]))

    parallel_map(work, rows.blocks, U.device)
    return out
