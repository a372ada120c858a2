r"""Personal linear models: F_i(x) = min_u f_i(u) + (γ_i/2)‖u − x‖² of N clients at one x, with u_i and ∇F_i.

With u = ζ_i x + v, ζ_i = γ_i/(l2 + γ_i), the two quadratic terms separate, and v is a penalised correction to the
shrunken shared model:

    F_i(x) = min_v (1/m_i) Σ_j ℓ(ζ_i⟨a_j, x⟩ + ⟨a_j, v⟩, y_j) + ((l2 + γ_i)/2)‖v‖² + (ζ_i l2/2)‖x‖²
    ∇F_i   = ζ_i A_iᵀ r_i/m_i + ζ_i l2 x,    r = ∂ℓ/∂z at the client's own predictions p = A_i u_i
    ∇²F_i  = ζ_i² A_iᵀ S_i A_i + ζ_i l2 I,   S_i = W − W A_i (A_iᵀW A_i + (l2 + γ_i)I)⁻¹ A_iᵀW,   W = ∂²ℓ/∂z²/m_i

so that F_i is a function of A_i x like f_i, and no vector of length d is stored per client. If only some columns P are
personal, v lives on P, and the others have ζ = 1 and l2. For squared loss, with H_i = 2A_iᵀA_i/m + l2 I, r is known in
the eigenvectors of A_iA_iᵀ (eigenvalues s, w = 2s/m): r = 2g(ζ_i z − y), g = (l2 + γ_i)/(w + l2 + γ_i), which turns an
eigenvalue h of H_i into hγ_i/(h + γ_i). Other losses take Newton's method, started at u = x, so that an answer depends
on the question alone (`newton.py`). A residual ε = ‖∇_v‖ of the inner problem gives 0 ≤ F̂ − F ≤ ε²/(2(l2 + γ)) and
‖∇F̂ − ∇F‖ ≤ 2ζε.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.models.glm import LinearPoint
from scaffpd.models.layout import PaddedBlock, Ragged, StackedSamples, product, transposed
from scaffpd.models.losses import Loss, Squared
from scaffpd.models.numerics import (
    SAFE,
    SINGLE,
    UNDERFLOW,
    UNIT,
    gamma,
    norm_above,
    parallel_map,
    skewness,
    unexplained,
)
from scaffpd.models.quadratic import Compressed, Rotated, in_format
from scaffpd.models.tables import StoredMatrix
from scaffpd.models.wide import Spectrum, WideOracle, clients, spread, store

NO_DIAGONAL = (
    "The diagonal of a personal Hessian is known for squared loss only; take D = I instead."
)


@dataclass(frozen=True)
class Anchor:
    """Parameters that tie clients to x: l2 of f_i, γ_i, and which features are personal (`own`; `None`: all)."""

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
        return (
            self
            if self.gamma.dtype == torch.float64
            else Anchor(self.l2, self.gamma.double(), self.own)
        )

    def per_feature(self, personal: Tensor, shared: float | Tensor) -> Tensor:
        """Return `personal` at each client's personal features and `shared` at the others, (N, features or 1, 1)."""
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
        """Return A_i D_i X, D_i = diag(ζ_i or 1), for X (features, k); `fine` in double precision."""
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
    """All clients at one x, or each at its own, (N, d); subclasses solve for the residuals r and know S.

    With `fine` rows, which have the same losses, everything is in double precision.
    """

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
        self.l2, self.X = anchor.l2, x.view(*x.shape[:-1], -1, outputs)
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
        return (
            ridges[:, 0, 0] * squares.sum((-2, -1))
            if self.tie.own is None
            else (ridges * squares).sum((1, 2))
        ) / 2

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
        """Return T = A D V, the change of the shrunken predictions along the columns of V: (rows, outputs, k)."""
        k = V.shape[1]
        features = self.rows.A.shape[1]
        return self.anchor.along(self.rows, V.reshape(features, self.outputs * k)).view(
            *self.residual.shape, k
        )

    def _slopes(self, V: Tensor, T: Tensor) -> Tensor:
        slope = (self.residual[..., None] * T).sum(1) * self.rows.share[:, None]
        flat = (
            self.anchor.ridges.expand(-1, *self.X.shape[-2:]).flatten(1)
            if self.anchor.own is not None
            else None
        )
        pull = self.anchor.ridges[:, 0] * (self.x @ V) if flat is None else (flat * self.x) @ V
        return self.rows.layout.segment_sum(slope) + pull

    def _ridged(self, weights: Tensor, V: Tensor) -> Tensor:
        """Return the last term of Σ_i w_i VᵀH_iV = Σ_i w_i T_iᵀS_iT_i + Vᵀ(Σ w_i ridges)V with T = A D V."""
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

    def diagonals(self) -> Tensor:
        """Refuse: this diagonal is not available."""
        raise InputError("diagonals", NO_DIAGONAL)

    def each(self) -> Tensor:
        """Return the c_i themselves, (N, d)."""
        if self.fine is None or self.fine.products.single:
            return self._vectors(self.residual)
        pulled = self.tie.factors * self.pulled(self.slopes) + self.tie.ridges * self.X.double()
        return pulled.flatten(1).to(self.x.dtype)

    def _vectors(self, residual: Tensor) -> Tensor:
        return (self.anchor.factors * self.pulled(residual) + self.anchor.ridges * self.X).flatten(
            1
        )

    def pulled(self, R: Tensor) -> Tensor:
        """Return A_iᵀR_i/m_i of every client, (N, features, k)."""
        rows = self.rows if self.fine is None or R.dtype == self.rows.A.dtype else self.fine
        return rows.each(R).mT

    def corrections(self) -> Tensor:
        """Return v_i = −A_iᵀr_i/(m_i(l2 + γ_i)), (N, personal features, k)."""
        return (
            -self.anchor.part(self.pulled(self.residual).mT).mT
            / self.anchor.stiffness[:, None, None]
        )

    def models(self) -> Tensor:
        """Return u_i = D_i x + v_i, (N, d)."""
        u = (
            (self.anchor.factors * self.X)
            .expand(len(self.anchor.gamma), *self.X.shape[-2:])
            .clone()
        )
        u[:, slice(None) if self.anchor.own is None else self.anchor.own] += self.corrections()
        return u.flatten(1)

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the errors of F_i and of ∇F_i; subclasses add the error of their solution."""
        return self.enveloped(norm_above(self.x, 0).expand_as(self.losses))

    def enveloped(self, size: Tensor) -> tuple[Tensor, Tensor]:
        """Bound the error of arithmetic, if the rows multiply vectors of length `size`.

        ζ_i and γ_i = κ/n_i, as they are stored, carry a few roundings themselves.
        """
        loss, gradient = self.arithmetic(size)
        n = self.x.numel() + max(self.rows.layout.lengths)
        unit = UNIT if self._format() == 0 else SINGLE
        loss = loss + SAFE * (gamma(n + 16) + 4 * unit) * self.losses.abs()
        return loss, gradient + self.scalings(self.l2 * norm_above(self.x, 0))

    def reach(self) -> Tensor:
        """Bound ‖u_i‖: γ/2 ‖u − x‖² and l2/2 ‖u‖² are parts of F_i."""
        twice = 2 * SAFE * self.losses.clamp_min(0)
        infinite = torch.full_like(self.losses, float("inf"))
        by_x = (
            norm_above(self.x, 0)
            + torch.where(self.anchor.gamma > 0, twice / self.anchor.gamma, infinite).sqrt()
        )
        return by_x if self.anchor.l2 == 0 else torch.minimum(by_x, (twice / self.anchor.l2).sqrt())


@dataclass(frozen=True)
class RotatedTargets:
    """Squared loss in each client's own basis: orthogonal rows S Vᵀ and targets Uᵀy, from A = U S Vᵀ.

    `fine` has the same rows in double precision, `constant` is the loss that no model explains, and `noise` bounds
    ‖E‖/‖A‖ and ‖e‖/‖y‖ if the rotated rows and targets are those of A + E and y + e.
    """

    before: Compressed
    data: Rotated
    fine: Rotated
    constant: Tensor
    noise: Tensor

    def only(self, who: list[int]) -> RotatedTargets:
        """Select some of the clients."""
        data = self.data.only(who)
        fine = data if self.fine is self.data else self.fine.only(who)
        return RotatedTargets(
            self.before.only(who), data, fine, self.constant[who], self.noise[who]
        )


def rotate_targets(compressed: Compressed) -> RotatedTargets:
    """Rotate every client's rows and targets, once, in double precision.

    With U', V' the nearest matrices with orthonormal columns, A = U' S V'ᵀ + E: E comes from A − U (S Vᵀ) and from the
    distance of U and V to orthonormal columns.
    """
    rows = compressed.fine
    features = compressed.rows.A.shape[1]
    layout = Ragged(
        [min(size, features) for size in rows.layout.lengths], rows.A.device, torch.float64
    )
    A, y = (
        compressed.constant.new_zeros(len(layout.owner), width)
        for width in (features, rows.y.shape[1])
    )
    rest = torch.zeros_like(compressed.constant)
    noise = torch.zeros_like(compressed.constant)
    share = rows.layout.segment_max(rows.exact[1])

    def work(block: PaddedBlock) -> None:
        own, targets = (t.double() for t in rows.alone(block))
        U, S, V = torch.linalg.svd(own, full_matrices=False)
        turned = torch.where(2 * UNIT * S[:, :1] < S, S, 0)[..., None] * V
        within = U.mT @ targets
        layout.put(A, block.clients, turned)
        layout.put(y, block.clients, within)
        inside = torch.arange(S.shape[1], device=S.device) < layout.sizes[block.clients, None]
        outside = torch.where(inside[..., None], 0, within)
        left = (targets - U @ within).square().sum((1, 2)) + outside.square().sum((1, 2))
        rest[block.clients] = share[block.clients] * left
        skew = (skewness(U) + skewness(V.mT)) * SAFE
        size = norm_above(own, (1, 2))
        off = norm_above(unexplained(own, U, turned), 1) + (
            skew + gamma(features + 8)
        ) * SAFE * norm_above(S, 1)
        sums = gamma(sum(own.shape[1:]) + targets.shape[2] + 16) * S.shape[1] ** 0.5
        noise[block.clients] = torch.maximum(off / (size + UNDERFLOW), 3 * skew + 4 * sums)

    parallel_map(work, rows.blocks, A.device)
    shares = share[layout.owner]
    norms = A.square().sum(1)
    fine = Rotated(StackedSamples(A, y, layout, shares), 2 * shares * norms, norms)
    data = fine
    dtype = compressed.rows.A.dtype
    if dtype != torch.float64:
        data = Rotated(
            in_format(fine.rows, dtype), fine.eigenvalues.to(dtype), fine.norms.to(dtype)
        )
    return RotatedTargets(compressed, data, fine, compressed.constant + rest, noise)


class SquaredPoint(PersonalPoint):
    """Squared loss: r = 2g(ζ z − y) in the eigenvectors of A_iA_iᵀ; each row has its eigenvalue w."""

    def __init__(
        self,
        rows: StackedSamples,
        fine: StackedSamples,
        anchor: Anchor,
        x: Tensor,
        eigenvalues: Tensor,
        constant: Tensor | float,
    ) -> None:
        super().__init__(rows, Squared(), anchor, x, rows.y.shape[1], fine)
        stiff = self.tie.stiffness[rows.layout.owner]
        self.gains = torch.where(eigenvalues > 0, stiff / (eigenvalues.double() + stiff), 1)[
            :, None
        ]
        self.gain = self.gains.to(x.dtype)
        difference = self.shrunk() - fine.exact[0]
        self.slopes = 2 * self.gained(difference)
        value = (self.slopes * difference).sum(1) / 2 * fine.exact[1]
        self.losses = fine.layout.total(value) + constant + self.ridge()

    def gained(self, V: Tensor) -> Tensor:
        """Multiply by g, which is one number per row in this basis."""
        return (self.gains if V.dtype == torch.float64 else self.gain) * V

    def bend(self, T: Tensor) -> Tensor:
        """Return 2g T."""
        return 2 * self.gained(T.flatten(1)).view_as(T)

    def diagonals(self) -> Tensor:
        """Return every client's diag H_i, (N, d)."""
        each = self.anchor.keep[:, None, None] ** 2 * self.squares()[..., None] + self.anchor.ridges
        return each.expand(-1, -1, self.outputs).flatten(1)

    def squares(self) -> Tensor:
        """Return (2/m) Σ_j g_j a_j² of every client, (N, features)."""
        return replace(self.rows, A=self.rows.A.square()).each(2 * self.gain)[:, 0]


class RotatedPoint(SquaredPoint):
    """Squared loss in rows that are rotated to that basis."""

    def __init__(self, targets: RotatedTargets, anchor: Anchor, x: Tensor) -> None:
        fine = targets.fine
        super().__init__(
            targets.data.rows, fine.rows, anchor, x, fine.eigenvalues, targets.constant
        )
        self.targets = targets

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the errors of arithmetic and of the decomposition, which has F_i of A + E, y + e.

        With ρ² ≤ F_i and δ = noise·(S‖u‖ + ‖y‖/√m) the latter is 2ρδ + δ² in F_i and 2 noise S ρ + 2 S δ in ∇F_i;
        earlier errors add as much to F_i as to f_i, and twice as much to ∇F_i.
        """
        loss, gradient = super().rounding()
        before = self.targets.before
        noise = self.targets.noise
        rho = self.losses.clamp_min(0).sqrt()
        reach, (top, y) = self.reach(), before.sizes
        delta = noise * (top * reach + y)
        more = before.off(reach)
        loss = (
            loss
            + SAFE * (2 * rho + delta) * delta
            + more[0]
            + gamma(self.outputs**2 + 8) * self.targets.constant
        )
        return loss, gradient + 2 * SAFE * (top * (noise * rho + delta) + more[1])


class SpectralPoint(SquaredPoint):
    """Squared loss in a table's wide rows as they are."""

    def __init__(self, inner: WideOracle, anchor: Anchor, x: Tensor) -> None:
        self.spectrum: Spectrum = inner.spectrum
        super().__init__(inner.rows, inner.rows, anchor, x, inner.spectrum.curvature, 0.0)

    def gained(self, V: Tensor) -> Tensor:
        """U g UᵀV."""
        if V.dtype == self.spectrum.values.dtype:
            return self.spectrum.back(
                (self.gains if V.dtype == torch.float64 else self.gain) * self.spectrum.within(V)
            )
        parts = (torch.split(t, self.rows.layout.lengths) for t in (self.gains, V))
        wide = (U.double() for U in self.spectrum.vectors)
        return torch.cat([U @ (g * (U.mT @ v)) for U, g, v in zip(wide, *parts, strict=True)])

    def pulled(self, R: Tensor) -> Tensor:
        """Return A_iᵀR_i/m_i of every client."""
        if R.dtype == self.rows.A.dtype:
            return spread(self.rows, self.rows.share[:, None] * R).view(
                len(self.losses), -1, R.shape[1]
            )
        A = cast(StoredMatrix, self.rows.products.wide)
        share = self.rows.exact[1]
        return A.transposed_each(share[:, None] * R, self.rows.layout.lengths)

    def squares(self) -> Tensor:
        """Return (2/m) Σ_j g_j (UᵀA)_j², some columns at a time."""
        out = []
        gains = torch.split(self.gain, self.rows.layout.lengths)
        for A, U, g in zip(clients(self.rows), self.spectrum.vectors, gains, strict=True):
            pieces = torch.split(A.parts[0], max(1, 2**24 // len(U)), 1)
            sums = [((U.mT @ piece.to(U.dtype)).square() * g).sum(0) for piece in pieces]
            out.append(2 * A.scale**2 / len(U) * torch.cat(sums))
        return torch.stack(out)

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the errors of arithmetic and of the decomposition of K + E in place of K = A_iA_iᵀ.

        With e = 2‖E‖/(m(l2 + γ)), R² = ‖r‖²/m the latter changes F_i by at most eR²/4, ∇F_i by (‖A‖/√m)eR. Products
        with U and Uᵀ change r by h = 2γ_m √m (1 + √m γ_m)·2‖ζz − y‖, F_i by hR and ∇F_i by (‖A‖/√m)h.
        """
        loss, gradient = super().rounding()
        _, _, aa = self.rows.levers
        share = self.rows.exact[1]
        m = max(self.rows.layout.lengths)
        e = (
            2
            * SAFE
            * self.spectrum.errors(self.rows)
            / (self.rows.layout.sizes * self.tie.stiffness)
        )
        square = self.rows.layout.segment_sum((norm_above(self.slopes, 1)).square() * share)
        before = self.rows.layout.segment_sum(
            norm_above(self.shrunk() - self.rows.exact[0], 1).square() * share
        )
        h = 8 * SAFE * gamma(m + 8) * (m**0.5) * before.sqrt()
        wrong = e * square.sqrt() * (1 + e) + h
        return loss + wrong * (square.sqrt() + before.sqrt() + wrong), gradient + aa.sqrt() * wrong


def put(block: PaddedBlock, stack: Tensor, values: Tensor) -> None:
    """Write a block's (n, m, …) to its part of a stack."""
    if block.first is not None:
        block.of(stack).copy_(values)
    else:
        inside = block.weight > 0
        stack[block.rows[inside]] = values[inside]


def own_predictions(rows: StackedSamples, U: Tensor) -> Tensor:
    """Return A_i u_i of every client, (M, k), for U (N, features, k)."""
    if rows.stored and hasattr(rows.A, "each"):
        return store(rows).each(U, rows.layout.lengths)
    out = U.new_zeros(len(rows.layout.owner), U.shape[2])

    def work(block: PaddedBlock) -> None:
        large = rows.large(block)
        if large is not None:
            put(block, out, (large @ U[block.clients[0]])[None])
        else:
            put(block, out, product(rows.of(block)[0], U[block.clients]))

    parallel_map(work, rows.blocks, U.device)
    return out
