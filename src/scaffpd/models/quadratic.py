r"""Squared loss: J local steps for the price of one, on data that each client rotates once.

A client replaces its (A, y) by (UᵀA, Uᵀy) from the thin SVD A = U S Vᵀ. That changes nothing about f_i,

    (1/m)‖A x − y‖² = (1/m)‖Ã x − ỹ‖² + (1/m)‖y − U ỹ‖²,    Ã = S Vᵀ,  ỹ = Uᵀy,

but leaves at most min(m, d) rows, and they are orthogonal: 2ÃᵀÃ/m = Σ_j w_j v_j v_jᵀ. Full-gradient local steps started
at x see the corrected gradient c first, so after J of them (the paper's Algorithm 2, H = 2AᵀA/m + l2 I)

    d_i = x − u_{i,J} = ϕ(H_i) c,   ϕ(h) = (1 − (1 − η h)^J) / h
        = ϕ(l2) c + Ãᵀ diag( (ϕ(w_j + l2) − ϕ(l2)) / ‖ã_j‖² ) Ã c,

and Σ_i λ_i d_i is two matrix products on the stack of all clients, whatever N and J are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from scaffpd.federation import Constants, LocalPlan, ProximalPlan
from scaffpd.models.full_batches import Span
from scaffpd.models.glm import LinearOracle, LinearPoint
from scaffpd.models.losses import Loss
from scaffpd.models.oracle import Displacements, Stack, same, shift
from scaffpd.models.ragged import Ragged
from scaffpd.models.rows import Rows, product, transposed


@dataclass(frozen=True)
class Rotated:
    """The rotated stack: orthogonal rows per client, what y has outside their span, and the eigenvalues w_j.

    `noise` bounds the decomposition's own rounding: Ã is the rotation of A + E with ‖E‖ ≤ noise·‖A‖, and so for y.
    """

    rows: Rows
    constant: Tensor
    eigenvalues: Tensor
    norms: Tensor
    noise: Tensor

    @cached_property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """S = ‖A‖/√m and ‖y‖/√m of every client."""
        rows, layout = self.rows, self.rows.layout
        squares = layout.segment_sum(rows.share * rows.y.square().sum(1)) + self.constant
        return (layout.segment_max(self.eigenvalues) / 2).sqrt(), squares.sqrt()

    def only(self, clients: list[int]) -> Rotated:
        """The same for some of the clients."""
        picked = self.rows.layout.rows_of(clients)
        rows = self.rows.only(clients)
        return Rotated(rows, self.constant[clients], self.eigenvalues[picked], self.norms[picked], self.noise[clients])


def rotate(rows: Rows) -> Rotated:
    """Rotate every client's rows to orthogonal ones (once, when the data is bound)."""
    sizes, epsilon = rows.layout.sizes.tolist(), torch.finfo(rows.A.dtype).eps
    A, y, rest = [], [], []
    for a, b in zip(torch.split(rows.A, sizes), torch.split(rows.y, sizes), strict=True):
        U, S, Vh = torch.linalg.svd(a, full_matrices=False)
        projected = U.T @ b
        A.append(torch.where(epsilon * S[0] < S, S, 0)[:, None] * Vh)
        y.append(projected)
        rest.append((b - U @ projected).square().sum() / len(a))
    layout = Ragged([len(a) for a in A], rows.A.device, rows.A.dtype)
    share = 1 / rows.layout.sizes[layout.owner].to(rows.A.dtype)
    stack = Rows(torch.cat(A), torch.cat(y), layout, share)
    norms = stack.A.square().sum(1)
    noise = 4 * epsilon * rows.layout.sizes.clamp_min(rows.A.shape[1]).to(norms).sqrt()
    return Rotated(stack, torch.stack(rest), 2 * share * norms, norms, noise)


def local_gain(h: Tensor, rate: Tensor, steps: int) -> Tensor:
    """ϕ(h) = (1 − (1 − η h)^J)/h, accurate for small ηh, and ηJ at h = 0."""
    e = rate * h
    small = e < 0.5
    smooth = -torch.expm1(steps * torch.log1p(-torch.where(small, e, 0)))
    shrink = torch.where(small, smooth, 1 - (1 - e) ** steps)
    return torch.where(h > 0, shrink / torch.where(h > 0, h, 1), rate * steps)


class RotatedPoint(LinearPoint):
    """All clients at one x, from the rotated data."""

    def __init__(self, data: Rotated, loss: Loss, l2: float, x: Tensor, outputs: int) -> None:
        super().__init__(data.rows, loss, l2, x, outputs, data.constant)
        self.data = data

    def rounding(self) -> tuple[Tensor, Tensor]:
        """What arithmetic adds, and what the rotation has added before.

        With ρ = ‖A x − y‖/√m, S = ‖A‖/√m and δ = noise·(S‖x‖ + ‖y‖/√m), the rotation is off by at most
        2ρδ + δ² in L_i and by 2 noise S ρ + 2 S δ in c_i.
        """
        loss, gradient = super().rounding()
        data, size = self.data, self.x.norm()
        rho = (self.losses - self.l2 / 2 * size.square()).clamp_min(0).sqrt()
        top, y = data.sizes
        delta = data.noise * (top * size + y)
        return loss + (2 * rho + delta) * delta, gradient + 2 * top * (data.noise * rho + delta)


class Gain:
    """ϕ_i(H_i) = ϕ_i(l2) I + Ã_iᵀ diag(gain) Ã_i of all clients (with H_i + μI where steps are pulled back by μ)."""

    def __init__(self, data: Rotated, l2: float, rate: Tensor, plan: LocalPlan) -> None:
        owner, norms, least = data.rows.layout.owner, data.norms, l2 + plan.prox
        self.rows, self.base = data.rows, local_gain(torch.full_like(rate, least), rate, plan.steps)
        gain = local_gain(data.eigenvalues + least, rate[owner], plan.steps) - self.base[owner]
        self.gain = torch.where(norms > 0, gain / torch.where(norms > 0, norms, 1), 0)

    def each(self, c: Tensor) -> Tensor:
        """ϕ_i(H_i) c_i for every client's own c_i, (N, d, k)."""
        out = torch.empty_like(c, memory_format=torch.contiguous_format)
        for block in self.rows.blocks:
            A, _ = self.rows.of(block)
            own = c[block.clients]
            along = block.of(self.gain)[..., None] * product(A, own)
            along = torch.where(block.weight[..., None] > 0, along, 0)
            out[block.clients] = self.base[block.clients, None, None] * own + product(A.mT, along)
        return out


class QuadraticDisplacements:
    """d_i = ϕ_i(H_i) c of all clients for one common c; summed over clients by two matrix products."""

    def __init__(self, gain: Gain, c: Tensor) -> None:
        self.gain, self.c = gain, c

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i d_i = (Σ w_i ϕ_i(l2)) c + Ãᵀ (w ∘ gain ∘ Ã c)."""
        rows = self.gain.rows
        scale = (weights[rows.layout.owner] * self.gain.gain)[:, None]
        return ((weights @ self.gain.base) * self.c + transposed(rows.A, scale * (rows.A @ self.c))).flatten()

    def each(self) -> Tensor:
        """The d_i themselves."""
        return self.gain.each(self.c.expand(len(self.gain.base), *self.c.shape)).flatten(1)


class QuadraticOracle(LinearOracle):
    """A `LinearOracle` whose full-gradient local steps are in closed form."""

    _last: tuple[LocalPlan, Gain] | None = None

    @cached_property
    def rotated(self) -> Rotated:
        """The rotated data, built at first use."""
        return rotate(self.rows)

    @cached_property
    def smoothness(self) -> Tensor:
        """L_i = max_j w_j + l2, exactly."""
        return self.rotated.rows.layout.segment_max(self.rotated.eigenvalues) + self.l2

    def constants(self) -> Constants:
        """L_i and μ_i = λ_min(H_i): l2, and more where a client has at least d independent samples."""
        w, layout = self.rotated.eigenvalues, self.rotated.rows.layout
        # Rounding must not enter a certificate: √w_min is known to within a share of √w_max only.
        known = layout.segment_min(w).sqrt() - self.rotated.noise * layout.segment_max(w).sqrt()
        full = layout.sizes == self.rows.A.shape[1]
        smallest = torch.where(full, known.clamp_min(0).square(), 0)
        return self._known(smallest + self.l2)

    def only(self, clients: list[int]) -> QuadraticOracle:
        """The same for some of the clients, without another decomposition."""
        chosen = QuadraticOracle(
            self.rows.only(clients), self.loss, self.l2, self.outputs, [self.names[i] for i in clients]
        )
        chosen.rotated = self.rotated.only(clients)
        return chosen

    def evaluate(self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)) -> LinearPoint:
        """Losses and gradients from the rotated data; minibatches need the samples themselves."""
        if batch_size is not None:
            return super().evaluate(x, batch_size, key)
        return RotatedPoint(self.rotated, self.loss, self.l2, x, self.outputs)

    def local_updates(
        self, x: Tensor, at: LinearPoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> Displacements:
        """ϕ_i(H_i) applied to the first corrected gradient; minibatch steps go one by one."""
        if plan.batch_size is not None:
            return super().local_updates(x, at, correction, plan)
        gain = self._gain(replace(plan, key=(), snapshot=None))
        if isinstance(at, LinearPoint) and at.rows is self.rotated.rows and same(at.x, x) and correction is not None:
            c = correction.view(-1, self.outputs)
            if plan.steps == 1:
                return Span(self.rotated.rows, c, gain.base, None)
            return QuadraticDisplacements(gain, c)
        first = self.evaluate(x).each() + shift(at, correction)
        return Stack(gain.each(first.view(len(first), -1, self.outputs)).flatten(1))

    def _gain(self, plan: LocalPlan) -> Gain:
        """ϕ_i for a plan; that of the last one is remembered, for rounds are alike."""
        if self._last is None or self._last[0] != plan:
            self._last = plan, Gain(self.rotated, self.l2, self.rates(plan).flatten(), plan)
        return self._last[1]

    def proximal_steps(self, at: LinearPoint, correction: Tensor, plan: ProximalPlan) -> Displacements:
        """(H_i + βD)⁻¹c exactly: by Cholesky in the smaller of rows and features."""
        c = correction.view(-1, self.outputs)
        e = self.l2 + plan.pull * plan.metric.view(-1, self.outputs)[:, 0]
        each = c.new_empty(len(self.names), *c.shape)
        for block in at.rows.blocks:
            A, _ = at.rows.of(block)
            R = A * (2 * block.weight).sqrt()[..., None]
            if R.shape[1] >= R.shape[2]:
                H = R.mT @ R
                H.diagonal(dim1=-2, dim2=-1).add_(e)
                each[block.clients] = torch.cholesky_solve(c.expand(len(R), *c.shape), torch.linalg.cholesky(H))
            else:
                inside = torch.eye(R.shape[1], dtype=R.dtype, device=R.device) + (R / e) @ R.mT
                b = c / e[:, None]
                each[block.clients] = (
                    b - (R.mT @ torch.cholesky_solve(R @ b, torch.linalg.cholesky(inside))) / e[:, None]
                )
        return Stack(each.flatten(1))
