r"""Squared loss: J local steps at the cost of one, on data that clients compress and rotate once.

A client with many samples replaces them by d others: from the QR decomposition
[A y] = Q [[R ỹ], [0 ρ]],

    (1/m)‖A x − y‖² = (1/m)‖R x − ỹ‖² + (1/m)‖ρ‖²

for every x, with R of d rows. Losses and their errors depend on [A y]ᵀ[A y] alone: no entry of it
differs from that of RᵀR, multiplied out again, by more than noise ‖b_j‖‖b_k‖ for its columns b,
which the bounds on rounding errors take into account.

With orthogonal rows Ã = UᵀA of the same span, 2AᵀA/m = Σ_j w_j v_j v_jᵀ. Full-gradient local steps
started at x use the corrected gradient c first, so after J of them (the paper's Algorithm 2,
H = 2AᵀA/m + l2 I)

    d_i = x − u_{i,J} = ϕ(H_i) c,   ϕ(h) = (1 − (1 − η h)^J) / h
        = ϕ(l2) c + Ãᵀ diag( (ϕ(w_j + l2) − ϕ(l2)) / ‖ã_j‖² ) Ã c,

and Σ_i λ_i d_i is two matrix products on the stack of all clients, for any N and J, with more
samples than features or fewer. If l2 differs between features, what exceeds the least l2 becomes
more samples: rows √(m (l2_k − l2)/2) e_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation import Constants, LocalPlan, Vector
from scaffpd.federation.questions import Displacements
from scaffpd.models import numerics
from scaffpd.models.execution import GraphReplay, parallel_map
from scaffpd.models.glm import LinearOracle
from scaffpd.models.local_steps import Path, SpanDisplacements, cheapest_path, local_gain
from scaffpd.models.losses import Loss
from scaffpd.models.numerics import SAFE, UNIT
from scaffpd.models.oracle import Held
from scaffpd.models.point import LinearPoint, Ridge
from scaffpd.models.samples import PaddedBlock, Ragged, Reach, StackedSamples, table

# Compress clients with more samples than this many times the features.
WORTH = 1.2
# Numbers in all features up to which a pass over them takes no longer than one over fewer rows.
FEW = 2**15
# Eigenvalues below this many ε of the largest are rounding.
NOISE = 4
# Numbers that are converted to double precision at a time.
PIECE = 2**24


@dataclass(frozen=True)
class Compressed:
    """Equal losses on fewer rows.

    Attributes:
        rows: R and ỹ in the format of x, or the samples themselves if those are few.
        fine: the same in double precision; the samples themselves if nothing is compressed.
        constant: ‖ρ‖²/m per client.
        noise: bound on the error of [A y]ᵀ[A y], relative to the norms of two columns, per client.
        fewer: whether anything is compressed; else constant and noise are zero.
    """

    rows: StackedSamples
    fine: StackedSamples
    constant: Tensor
    noise: Tensor
    fewer: bool = True

    @cached_property
    def targets(self) -> Tensor:
        """Bound on ‖y‖/√m of every client."""
        y, share = self.fine.exact
        squares = share * numerics.norm_above(y, 1).square()
        return SAFE * (self.fine.layout.segment_sum(squares) + self.constant).sqrt()

    def off(self, reach: Sequence[Reach]) -> tuple[Tensor, Tensor]:
        """Bound the errors of L_i and c_i, if rows multiply vectors that reach so far.

        With S = ‖A‖/√m and δ = Σ S·size + ‖y‖/√m these are at most noise δ² and 2 noise S δ, where
        the last S is of columns as they are summed.
        """
        delta = sum((levers.flat.sqrt() * size for size, levers in reach), self.targets)
        last = reach[0].levers.square.sqrt()
        return SAFE * self.noise * delta.square(), 2 * SAFE * self.noise * last * delta

    def only(self, clients: list[int]) -> Compressed:
        rows = self.rows.only(clients)
        fine = rows if self.fine is self.rows else self.fine.only(clients)
        return Compressed(rows, fine, self.constant[clients], self.noise[clients], self.fewer)


def compress(rows: StackedSamples) -> Compressed:
    """Compress every client with more rows than needed (once, when the data is bound)."""
    features = rows.A.shape[1]
    sizes = rows.layout.sizes
    constant = torch.zeros(len(rows.layout), dtype=torch.float64, device=sizes.device)
    noise = torch.zeros_like(constant)
    enough = len(rows.A) * features > FEW
    tall = [block for block in rows.blocks if enough and block.rows.shape[1] >= WORTH * features]
    if not tall:
        return Compressed(rows, rows, constant, noise, fewer=False)
    shorter = torch.zeros_like(sizes, dtype=torch.bool)
    for block in tall:
        shorter[block.clients] = True
    short = zip(rows.layout.lengths, shorter.tolist(), strict=True)
    lengths = [min(m, features) if cut else m for m, cut in short]
    layout = Ragged(lengths, rows.A.device, torch.float64)
    A, y = (constant.new_empty(sum(lengths), width) for width in (features, rows.y.shape[1]))
    if len(tall) < len(rows.blocks):
        own = ~shorter[layout.owner]
        given = ~shorter[rows.layout.owner]
        A[own] = rows.A[given].double()
        y[own] = rows.y[given].double()

    def work(block: PaddedBlock) -> None:
        who = block.clients
        R, noise[who] = numerics.triangle_of(torch.cat(rows.alone(block), -1))
        layout.put(A, who, R[:, :features, :features])
        layout.put(y, who, R[:, :features, features:])
        constant[who] = R[:, features:, features:].square().sum((1, 2)) / sizes[who]

    parallel_map(work, tall, A.device)
    fine = StackedSamples(A, y, layout, 1 / sizes[layout.owner].double())
    return Compressed(in_format(fine, rows.share.dtype), fine, constant, noise)


def in_format(fine: StackedSamples, dtype: torch.dtype) -> StackedSamples:
    if dtype == torch.float64:
        return fine
    layout = Ragged(fine.layout.lengths, fine.A.device, dtype)
    rows = StackedSamples(fine.A.to(dtype), fine.y.to(dtype), layout, fine.share.to(dtype))
    vars(rows)["exact"] = fine.exact  # shares are no longer 1/(number of rows)
    return rows


class CompressedPoint(LinearPoint):
    """All clients at one x, from compressed rows."""

    def __init__(self, data: Compressed, loss: Loss, ridge: Ridge, x: Tensor, outputs: int) -> None:
        constant = data.constant if data.fewer else None
        super().__init__(data.rows, loss, ridge, x, outputs, data.fine, constant)
        self.data = data

    def rounding(self) -> tuple[Tensor, Tensor]:
        loss, gradient = super().rounding()
        if not self.data.fewer:
            return loss, gradient
        more = self.data.off(self.reach)
        constant = numerics.gamma(self.outputs**2 + 8) * self.data.constant
        return loss + constant + more[0], gradient + more[1]


@dataclass(frozen=True)
class Rotated:
    """Orthogonal rows Ã of every client, their eigenvalues w_j and their squared norms."""

    rows: StackedSamples
    eigenvalues: Tensor
    norms: Tensor

    def only(self, clients: list[int]) -> Rotated:
        picked = self.rows.layout.rows_of(clients)
        return Rotated(self.rows.only(clients), self.eigenvalues[picked], self.norms[picked])


def rotate(rows: StackedSamples, ridge: Ridge, outputs: int) -> Rotated:
    """Rotate every client's rows to orthogonal ones; with them goes l2 above its least."""
    features = rows.A.shape[1]
    shares = rows.layout.segment_max(rows.share)
    more = ridge.vector()
    above = None if more is None else torch.from_numpy(more[::outputs] - ridge.least).to(rows.share)
    lengths = [features if more is not None else min(m, features) for m in rows.layout.lengths]
    layout = Ragged(lengths, rows.A.device, rows.share.dtype)
    A = table(len(layout.owner), features, rows.A.dtype, rows.A.device)

    def work(block: PaddedBlock) -> None:
        who = block.clients
        own = rows.alone(block)[0]
        if above is not None:
            extra = torch.diag_embed((above / (2 * shares[who, None])).sqrt())
            own = torch.cat([own, extra], 1)
        layout.put(A, who, orthogonal_rows(own))

    parallel_map(work, rows.blocks, A.device)
    share = shares[layout.owner]
    turned = StackedSamples(A, A[:, :0], layout, share)
    norms = turned.norms.square()
    return Rotated(turned, 2 * share * norms, norms)


def orthogonal_rows(A: Tensor) -> Tensor:
    """Return Ã with orthogonal rows, longest first, and ÃᵀÃ = AᵀA, of n matrices.

    By the eigenvectors of the smaller of AAᵀ and AᵀA, in double precision, which takes a few times
    less than a singular value decomposition. Squaring loses singular values below 1e-8 of the
    largest, which does not matter here: an error of ε‖H‖ in H changes J steps by Jε, as rounding in
    the steps themselves would.
    """
    n, m, features = A.shape
    wide = m < features
    B = A.mT if wide else A
    size = max(1, PIECE // (n * B.shape[2]))
    G = sum(piece.mT @ piece for piece in map(Tensor.double, torch.split(B, size, 1)))
    s, U = torch.linalg.eigh(G)
    s = s.flip(1)
    U = U.flip(2)
    clear = s > NOISE * torch.finfo(s.dtype).eps * s[:, :1]
    turned = U.to(A.dtype).mT @ A if wide else (s.clamp_min(0).sqrt()[..., None] * U.mT).to(A.dtype)
    return torch.where(clear[..., None], turned, 0)


@dataclass(frozen=True)
class RecordedSpan:
    """Displacements of which a GPU is asked for sums."""

    oracle: QuadraticOracle
    c: Tensor
    base: Tensor
    gain: Tensor

    def sum(self, weights: Tensor) -> Tensor:
        return self.oracle.moved(weights, self.c, self.base, self.gain)

    def each(self) -> Tensor:
        return self.oracle._span(self.c, self.base, self.gain).each()


class QuadraticOracle(LinearOracle):
    """A `LinearOracle` whose full-gradient local steps are in closed form."""

    # The oracle and the clients that these were selected from.
    _part: tuple[QuadraticOracle, list[int]] | None = None
    # The last plan, which rounds repeat, and what it does to c.
    _gains: tuple[LocalPlan, Tensor, Tensor] | None = None

    @property
    def most_rows(self) -> float:  # type: ignore[override]
        return self.rows.A.shape[1]

    @cached_property
    def compressed(self) -> Compressed:
        return compress(self.rows)

    @cached_property
    def rotated(self) -> Rotated:
        if self._part is not None:
            whole, clients = self._part
            return whole.rotated.only(clients)
        return rotate(self.compressed.rows, self.ridge, self.outputs)

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Largest eigenvalue of every H_i − diag(l2), and a lower bound on the smallest."""
        rows = self.compressed.fine
        share = rows.layout.segment_max(rows.exact[1])
        top = torch.zeros_like(share)
        bottom = torch.zeros_like(share)

        def work(block: PaddedBlock) -> None:
            who = block.clients
            A = rows.alone(block)[0].double()
            largest, smallest = numerics.extreme_values(A, self.compressed.noise[who])
            # A client with fewer rows than features is padded, and has no curvature somewhere.
            full = rows.layout.sizes[who] >= A.shape[2]
            top[who] = 2 * share[who] * largest
            bottom[who] = torch.where(full, (1 - 8 * UNIT) * 2 * share[who] * smallest, 0)

        parallel_map(work, rows.blocks, top.device)
        return top.to(self.rows.share.dtype), bottom

    @property
    def smoothness(self) -> Tensor:
        """L_i = max_j w_j + max l2."""
        return self.spectrum[0] + self.ridge.most

    def constants(self) -> Constants:
        """Return L_i and μ_i = min_j w_j + min l2: above l2 with d independent samples."""
        return self._constants(self.spectrum[1])

    def only(self, clients: list[int]) -> QuadraticOracle:
        names = [self.names[i] for i in clients]
        rows = self.rows.only(clients)
        chosen = QuadraticOracle(rows, self.loss, self.ridge, self.outputs, names)
        chosen.compressed = self.compressed.only(clients)
        chosen.spectrum = self.spectrum[0][clients], self.spectrum[1][clients]
        chosen._part = self, clients
        return chosen

    def using(self, ridge: Ridge) -> Self:
        self.compressed, self.spectrum  # noqa: B018  # computed once for all
        other = super().using(ridge)
        other._gains = None
        vars(other).pop("moved", None)
        if not (ridge.even and self.ridge.even):
            vars(other).pop("rotated", None)
            other._part = None
        return other

    def _rows(self) -> StackedSamples:
        return self.compressed.rows

    def _point(self, x: Tensor) -> LinearPoint:
        return CompressedPoint(self.compressed, self.loss, self.ridge, x, self.outputs)

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        if self.outputs > 1 or "compressed" not in vars(self):
            return super().scores(x)
        return self.evaluate(x).losses.double().cpu().numpy(), np.full(len(self.names), np.nan)

    def local_updates(
        self, x: Tensor, at: Held, correction: Tensor | None, plan: LocalPlan
    ) -> Displacements:
        """Take local steps in closed form; a single step needs no decomposition."""
        closed = cheapest_path(self.rows, self.loss, self.outputs, plan) is Path.CLOSED
        if plan.steps == 1 or not closed:
            return super().local_updates(x, at, correction, plan)
        _, c = self._first(x, at, correction)
        base, gain = self._closed_form(plan)
        if c.is_cuda and c.ndim == 2:
            return RecordedSpan(self, c, base, gain)
        return self._span(c, base, gain)

    def _span(self, c: Tensor, base: Tensor, gain: Tensor) -> SpanDisplacements:
        rows = self.rotated.rows
        along = rows.times(c) if c.ndim == 2 else rows.along(c)
        return SpanDisplacements(rows, c, base, along.mul_(gain[:, None]))

    @cached_property
    def moved(self) -> GraphReplay:
        """Sums of displacements, of whose products a GPU records a graph."""
        return GraphReplay(self._moved)

    def _moved(self, weights: Tensor, *steps: Tensor) -> Tensor:
        return self._span(*steps).sum(weights)

    def _closed_form(self, plan: LocalPlan) -> tuple[Tensor, Tensor]:
        """Return ϕ_i(l2), (N,), and (ϕ_i(w + l2) − ϕ_i(l2))/‖ã‖² of every rotated row."""
        key = replace(plan, key=(), snapshot=None)  # full gradients draw nothing
        if self._gains is None or self._gains[0] != key:
            data = self.rotated
            owner = data.rows.layout.owner
            rates = self.rates(plan).flatten()
            least = self.ridge.least + plan.prox
            base = local_gain(torch.full_like(rates, least), rates, plan.steps)
            gain = local_gain(data.eigenvalues + least, rates[owner], plan.steps) - base[owner]
            norms = data.norms
            gain = torch.where(norms > 0, gain / torch.where(norms > 0, norms, 1), 0)
            self._gains = key, base, gain
        return self._gains[1:]
