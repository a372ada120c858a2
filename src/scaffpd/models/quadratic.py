r"""Squared loss: J local steps at the cost of one, on data that each client compresses and rotates once.

A client with many samples replaces them by d others: from the QR decomposition [A y] = Q [[R ỹ], [0 ρ]],

    (1/m)‖A x − y‖² = (1/m)‖R x − ỹ‖² + (1/m)‖ρ‖²

for every x, with R of d rows. Losses and their errors depend on [A y]ᵀ[A y] alone: no entry of it differs from that of
RᵀR, multiplied out again, by more than noise ‖b_j‖‖b_k‖ for its columns b, which the bounds on rounding errors take
into account.

The rows have the thin SVD A = U S Vᵀ, so that 2AᵀA/m = Σ_j w_j v_j v_jᵀ with orthogonal rows Ã = S Vᵀ. Full-gradient
local steps started at x use the corrected gradient c first, so after J of them (the paper's Algorithm 2,
H = 2AᵀA/m + l2 I)

    d_i = x − u_{i,J} = ϕ(H_i) c,   ϕ(h) = (1 − (1 − η h)^J) / h
        = ϕ(l2) c + Ãᵀ diag( (ϕ(w_j + l2) − ϕ(l2)) / ‖ã_j‖² ) Ã c,

and Σ_i λ_i d_i is two matrix products on the stack of all clients, for any N and J.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Vector, same_point
from scaffpd.federation.clients import Displacements
from scaffpd.models import numerics
from scaffpd.models.batches import SpanDisplacements
from scaffpd.models.glm import LinearOracle, LinearPoint
from scaffpd.models.layout import PaddedBlock, Ragged, StackedSamples, product, transposed
from scaffpd.models.local_steps import stepping
from scaffpd.models.losses import Loss
from scaffpd.models.numerics import SAFE, UNIT
from scaffpd.models.oracle import StackedDisplacements, shift
from scaffpd.models.tables import MappedMatrix

WORTH = 1.2  # compress clients with more samples than this many times the features
FEW = (
    2**15
)  # numbers in all features up to which a pass over them takes no longer than one over fewer rows
KEPT = 2**22  # numbers in all RᵀR up to which they are stored
TOGETHER = (
    4  # times as many rows as columns are decomposed at a time if rows are read piece by piece
)


@dataclass(frozen=True)
class Compressed:
    """Equal losses on fewer rows.

    Attributes:
        rows: R and ỹ in the format of x, or the samples themselves if those are few.
        fine: the same in double precision; the samples themselves if nothing is compressed.
        constant: ‖ρ‖²/m per client.
        noise: bound on the error of [A y]ᵀ[A y], relative to the norms of two columns, per client.
        fewer: whether anything is compressed; else constant and noise are zero.
        grams: RᵀR of blocks of clients, if eigenvalues have needed it and it is not large.
    """

    rows: StackedSamples
    fine: StackedSamples
    constant: Tensor
    noise: Tensor
    fewer: bool = True
    grams: dict[int | None, Tensor] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """Bounds on S = ‖A‖/√m and ‖y‖/√m of every client."""
        y, share = self.fine.exact
        targets = (
            self.fine.layout.segment_sum(share * numerics.norm_above(y, 1).square()) + self.constant
        )
        return self.fine.levers[2].sqrt(), SAFE * targets.sqrt()

    def off(self, size: Tensor | float) -> tuple[Tensor, Tensor]:
        """Bound the errors of L_i and c_i, if rows multiply a vector of length `size`."""
        top, y = self.sizes
        delta = top * size + y
        return SAFE * self.noise * delta.square(), 2 * SAFE * self.noise * top * delta

    def only(self, clients: list[int]) -> Compressed:
        """Select some of the clients."""
        rows = self.rows.only(clients)
        fine = rows if self.fine is self.rows else self.fine.only(clients)
        return Compressed(rows, fine, self.constant[clients], self.noise[clients], self.fewer)


def compress(rows: StackedSamples) -> Compressed:
    """Compress every client with more rows than needed (once, when the data is bound)."""
    features = rows.A.shape[1]
    sizes = rows.layout.sizes
    constant = torch.zeros(len(rows.layout), dtype=torch.float64, device=sizes.device)
    enough = rows.stored or sum(rows.layout.lengths) * features > FEW
    tall = [block for block in rows.blocks if enough and block.rows.shape[1] >= WORTH * features]
    if not tall:
        return Compressed(rows, rows, constant, torch.zeros_like(constant), fewer=False)
    everyone = len(tall) == len(rows.blocks)
    noise = torch.zeros_like(constant)
    shorter = torch.full_like(sizes, everyone, dtype=torch.bool)
    for block in () if everyone else tall:
        shorter[block.clients] = True
    short = zip(rows.layout.lengths, shorter.tolist(), strict=True)
    layout = Ragged(
        [min(m, features) if cut else m for m, cut in short], rows.A.device, torch.float64
    )
    A, y = (constant.new_empty(sum(layout.lengths), width) for width in (features, rows.y.shape[1]))
    if not everyone:
        own = ~shorter[layout.owner]
        given = ~shorter[rows.layout.owner]
        A[own], y[own] = rows.A[given].double(), rows.y[given].double()

    def work(block: PaddedBlock) -> None:
        if (large := rows.large(block)) is not None:
            R, noise[block.clients] = triangle(large.double(), block.of(rows.y)[0].double())
        else:
            R, noise[block.clients] = numerics.triangle_of(torch.cat(rows.alone(block), -1))
        layout.put(A, block.clients, R[:, :features, :features])
        layout.put(y, block.clients, R[:, :features, features:])
        constant[block.clients] = (
            R[:, features:, features:].square().sum((1, 2)) / sizes[block.clients]
        )

    numerics.parallel_map(work, tall, A.device)
    fine = StackedSamples(A, y, layout, 1 / sizes[layout.owner].double())
    return Compressed(in_format(fine, rows.A.dtype), fine, constant, noise)


def in_format(fine: StackedSamples, dtype: torch.dtype) -> StackedSamples:
    """Convert the rows to another number format."""
    if dtype == torch.float64:
        return fine
    layout = Ragged(fine.layout.lengths, fine.A.device, dtype)
    rows = StackedSamples(fine.A.to(dtype), fine.y.to(dtype), layout, fine.share.to(dtype))
    vars(rows)["exact"] = fine.exact  # shares are no longer 1/(number of rows)
    return rows


def triangle(A: MappedMatrix, y: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `triangle_of` [A y] in one pass: the triangle of a part is stacked on the next part."""
    width = A.shape[1] + y.shape[1]
    R = A.new_zeros(1, 0, width)
    G = A.new_zeros(1, width, width)
    waiting: list[Tensor] = []
    rows = parts = longest = 0
    for at, values in A.stream():
        waiting.append(torch.cat([values, y[at]], 1))
        rows += len(values)
        if rows >= TOGETHER * width:
            R, G = taken_in(R, G, waiting)
            rows, parts, longest, waiting = 0, parts + 1, max(rows, longest), []
    if waiting:
        R, G = taken_in(R, G, waiting)
    return numerics.triangle_of(R, G, max(rows, longest) + parts + 1)


def taken_in(R: Tensor, G: Tensor, more: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Update the triangle and the products of columns with more rows."""
    new = torch.cat(more)[None]
    return torch.geqrf(torch.cat([R, new], 1))[0][:, : new.shape[2]].triu(), G + numerics.gram(new)[
        0
    ]


class CompressedPoint(LinearPoint):
    """All clients at one x, from compressed rows."""

    def __init__(self, data: Compressed, loss: Loss, l2: float, x: Tensor, outputs: int) -> None:
        super().__init__(
            data.rows, loss, l2, x, outputs, data.fine, data.constant if data.fewer else None
        )
        self.data = data

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the errors of arithmetic and of the decomposition.

        With S = ‖A‖/√m and δ = S‖x‖ + ‖y‖/√m, the latter are at most noise δ² in L_i and 2 noise S δ in c_i.
        """
        loss, gradient = super().rounding()
        if not self.data.fewer:
            return loss, gradient
        more = self.data.off(self.size)
        return loss + numerics.gamma(self.outputs**2 + 8) * self.data.constant + more[
            0
        ], gradient + more[1]

    def curvatures(self, V: Tensor) -> Tensor:
        """Return VᵀH_iV; for V = I the Hessians themselves, without a product."""
        k = V.shape[1]
        eye = torch.eye(V.shape[1], dtype=V.dtype, device=V.device)
        if self.outputs > 1 or self.rows.stored or V.shape != eye.shape or not torch.equal(V, eye):
            return super().curvatures(V)
        out = V.new_empty(len(self.rows.layout), k, k)
        for block in self.rows.blocks:
            if V.dtype == torch.float64 and (G := self.data.grams.get(block.number)) is not None:
                out[block.clients] = (2 * self.rows.shares[block.clients])[:, None, None] * G
            else:
                out[block.clients] = numerics.squared(
                    self.rows.of(block)[0] * (2 * block.weight).sqrt()[..., None]
                )
        out.diagonal(dim1=1, dim2=2).add_(self.l2)
        return out


Profile = Callable[[Tensor, Tensor], Tensor]  # ϕ of eigenvalues h, for clients numbered by owner


@dataclass(frozen=True)
class Rotated:
    """Orthogonal rows Ã of every client, their eigenvalues w_j and their squared norms."""

    rows: StackedSamples
    eigenvalues: Tensor
    norms: Tensor

    def only(self, clients: list[int]) -> Rotated:
        """Select some of the clients."""
        picked = self.rows.layout.rows_of(clients)
        return Rotated(self.rows.only(clients), self.eigenvalues[picked], self.norms[picked])


def rotate(rows: StackedSamples) -> Rotated:
    """Rotate every client's rows to orthogonal ones."""
    features = rows.A.shape[1]
    epsilon = torch.finfo(rows.A.dtype).eps
    layout = Ragged(
        [min(size, features) for size in rows.layout.lengths], rows.A.device, rows.A.dtype
    )
    A = rows.A.new_zeros(len(layout.owner), features)

    def work(block: PaddedBlock) -> None:
        _, S, V = torch.linalg.svd(rows.alone(block)[0], full_matrices=False)
        layout.put(A, block.clients, torch.where(epsilon * S[:, :1] < S, S, 0)[..., None] * V)

    numerics.parallel_map(work, rows.blocks, A.device)
    share = rows.layout.segment_max(rows.share)[layout.owner]
    norms = A.square().sum(1)
    return Rotated(StackedSamples(A, A[:, :0], layout, share), 2 * share * norms, norms)


class Gain:
    """ϕ_i(H_i) = ϕ_i(l2) I + Ã_iᵀ diag(gain) Ã_i of all clients, for ϕ of eigenvalues and their clients."""

    def __init__(self, data: Rotated, least: float, phi: Profile) -> None:
        owner = data.rows.layout.owner
        norms = data.norms
        everyone = torch.arange(len(data.rows.layout))
        everyone = everyone.to(norms.device)
        self.rows, self.base = data.rows, phi(norms.new_full((len(everyone),), least), everyone)
        gain = phi(data.eigenvalues + least, owner) - self.base[owner]
        self.gain = torch.where(norms > 0, gain / torch.where(norms > 0, norms, 1), 0)

    def each(self, c: Tensor) -> Tensor:
        """Return ϕ_i(H_i) c_i for every client's own c_i, (N, d, k)."""
        out = torch.empty_like(c, memory_format=torch.contiguous_format)
        for block in self.rows.blocks:
            A, _ = self.rows.of(block)
            own = c[block.clients]
            along = block.of(self.gain)[..., None] * product(A, own)
            along = torch.where(block.weight[..., None] > 0, along, 0)
            out[block.clients] = self.base[block.clients, None, None] * own + product(A.mT, along)
        return out


class ClosedSteps:
    """Full-gradient local steps of all clients in closed form: ϕ_i(H_i) applied to the first corrected gradient.

    An oracle defines how ϕ(H_i) is built from a profile ϕ (`_function`), applied to one vector for all (`_common`) or
    to one for each client (`_general`), and which points it knows by their rows (`_whole`).
    """

    _made: tuple[LocalPlan, Any] | None = (
        None  # ϕ_i of the last plan is cached, because rounds repeat it
    )

    def local_updates(
        self: Any, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan
    ) -> Any:
        """Apply ϕ_i(H_i) to the first corrected gradient; take minibatch steps one by one."""
        if plan.batch_size is not None:
            return super().local_updates(x, at, correction, plan)  # type: ignore[misc]
        if self._knows(at, x):
            return self._common(
                self._phi(plan), torch.zeros_like(x) if correction is None else correction
            )
        return self._general(self._phi(plan), self.evaluate(x).each() + shift(at, correction))

    def _knows(self: Any, at: Any, x: Tensor) -> bool:
        """Return whether clients have answered at x, with all of their rows."""
        return isinstance(at, LinearPoint) and at.rows is self._whole and same_point(at.x, x)

    def _phi(self: Any, plan: LocalPlan) -> Any:
        """Return ϕ_i for a plan; its minibatches and snapshot do not matter with full gradients."""
        plan = replace(plan, key=(), snapshot=None)
        if self._made is None or self._made[0] != plan:
            phi = stepping(self.rates(plan).flatten(), plan)
            self._made = plan, self._function(lambda h, i: phi(h + plan.prox, i))
        return self._made[1]


class QuadraticDisplacements:
    """d_i = ϕ_i(H_i) c of all clients for one common c; summed over clients by two matrix products."""

    def __init__(self, gain: Gain, c: Tensor) -> None:
        self.gain = gain
        self.c = c

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i d_i = (Σ w_i ϕ_i(l2)) c + Ãᵀ (w ∘ gain ∘ Ã c)."""
        rows = self.gain.rows
        along = (rows.A @ self.c).mul_(self.gain.gain[:, None])
        return (
            (weights @ self.gain.base) * self.c
            + transposed(rows.A, rows.layout.scaled(along, weights))
        ).flatten()

    def each(self) -> Tensor:
        """Return the d_i themselves."""
        return self.gain.each(self.c.expand(len(self.gain.base), *self.c.shape)).flatten(1)


class RotatedSteps(ClosedSteps):
    """Closed-form steps from orthogonal rows."""

    outputs: int

    def _common(self, phi: Gain, c: Tensor) -> Displacements:
        return QuadraticDisplacements(phi, c.view(-1, self.outputs))

    def _general(self, phi: Gain, first: Tensor) -> Displacements:
        return StackedDisplacements(phi.each(first.view(len(first), -1, self.outputs)).flatten(1))


class QuadraticOracle(RotatedSteps, LinearOracle):
    """A `LinearOracle` whose full-gradient local steps are in closed form."""

    _part: tuple[QuadraticOracle, list[int]] | None = (
        None  # the oracle and the clients that these were selected from
    )

    @property
    def most_rows(self) -> float:  # type: ignore[override]
        """Most rows of a client after compression."""
        return self.rows.A.shape[1]

    @cached_property
    def compressed(self) -> Compressed:
        """The compressed rows, computed at first use."""
        return compress(self.rows)

    @cached_property
    def rotated(self) -> Rotated:
        """The compressed rows, rotated for local steps."""
        if self._part is not None:
            whole, clients = self._part
            return whole.rotated.only(clients)
        return rotate(self.compressed.rows)

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Largest eigenvalue of every H_i − l2 I, and a lower bound on the smallest."""
        rows = self.compressed.fine
        d = self.rows.A.shape[1]
        share = rows.layout.segment_max(rows.exact[1])
        top = torch.zeros_like(share)
        bottom = torch.zeros_like(share)

        def work(block: PaddedBlock) -> None:
            who = block.clients
            A = rows.alone(block)[0].double()
            G = numerics.squared(A) if A.shape[1] >= d else None
            largest, smallest = numerics.extreme_values(A, self.compressed.noise[who], G)
            if G is not None and len(rows.layout) * d**2 <= KEPT and not rows.stored:
                self.compressed.grams[block.number] = G
            top[who] = 2 * share[who] * largest
            bottom[who] = torch.where(
                rows.layout.sizes[who] >= d, (1 - 8 * UNIT) * 2 * share[who] * smallest, 0
            )

        numerics.parallel_map(work, rows.blocks, top.device)
        return top.to(self.rows.A.dtype), bottom

    @cached_property
    def smoothness(self) -> Tensor:
        """L_i = max_j w_j + l2."""
        return self.spectrum[0] + self.l2

    def constants(self) -> Constants:
        """Return L_i and μ_i = λ_min(H_i): l2, and more if a client has at least d independent samples."""
        return self._known(self.spectrum[1] + self.l2)

    def only(self, clients: list[int]) -> QuadraticOracle:
        """Select some of the clients, without another decomposition."""
        names = [self.names[i] for i in clients]
        chosen = QuadraticOracle(self.rows.only(clients), self.loss, self.l2, self.outputs, names)
        chosen.compressed = self.compressed.only(clients)
        chosen.spectrum = self.spectrum[0][clients], self.spectrum[1][clients]
        chosen._part = self, clients
        return chosen

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> LinearPoint:
        """Evaluate losses and gradients from compressed rows; minibatches need the samples themselves."""
        if batch_size is not None:
            return super().evaluate(x, batch_size, key)
        return CompressedPoint(self.compressed, self.loss, self.l2, x, self.outputs)

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """Score by the compressed rows if they exist and accuracy is not needed."""
        if self.outputs > 1 or "compressed" not in vars(self):
            return super().scores(x)
        return self.evaluate(x).losses.double().cpu().numpy(), np.full(len(self.names), np.nan)

    def local_updates(
        self, x: Tensor, at: LinearPoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> Displacements:
        """Take local steps in closed form; a single step needs no decomposition."""
        if (
            plan.batch_size is None
            and plan.steps == 1
            and correction is not None
            and self._knows(at, x)
        ):
            c = correction.view(-1, self.outputs)
            return SpanDisplacements(self.compressed.rows, c, self.rates(plan).flatten(), None)
        steps: Displacements = super().local_updates(x, at, correction, plan)
        return steps

    @property
    def _whole(self) -> StackedSamples:
        return self.compressed.rows

    def _function(self, phi: Profile) -> Gain:
        return Gain(self.rotated, self.l2, phi)

    def proximal_steps(
        self, at: LinearPoint, correction: Tensor, plan: ProximalPlan
    ) -> Displacements:
        """Return (H_i + βD)⁻¹c exactly: by Cholesky in the smaller of rows and features."""
        c = correction.view(-1, self.outputs)
        e = self.l2 + plan.pull * plan.metric.view(-1, self.outputs)[None, :, :1]
        each = c.new_empty(len(self.names), *c.shape)

        def work(block: PaddedBlock) -> None:
            A, _ = at.rows.of(block)
            R = A * (2 * block.weight).sqrt()[..., None]
            each[block.clients] = numerics.regularised(R, e, raises=True)(
                c.expand(len(R), *c.shape)
            )

        numerics.parallel_map(work, at.rows.blocks, c.device)
        return StackedDisplacements(each.flatten(1))
