r"""Squared loss with many features: the data is stored once, and local steps happen in the space of a client's samples.

As in `scaffpd.models.quadratic`, J full-gradient steps are a function of H_i = 2A_iᵀA_i/m + l2 I. But A_i is neither
copied nor rotated: with the eigenvectors U of the small matrix K_i = A_iA_iᵀ = U diag(s) Uᵀ, w = 2s/m,

    ϕ(H_i) g = ϕ(l2) g + A_iᵀ U diag( (ϕ(w + l2) − ϕ(l2)) / s ) Uᵀ A_i g.

So a displacement is d_i = A_iᵀB_i + p_i x + q_i c with B_i of the size of the predictions, and Σ λ_i d_i takes one pass
over the data. For corrected steps (g = c) a second one gives A c; for plain steps (g = A_iᵀr/m + l2 x, FedAvg's) none
does, because A_i g = K_i r/m + l2 A_i x is known already.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from scaffpd.data.table import Selection
from scaffpd.errors import InputError
from scaffpd.federation import Constants, LocalPlan, ProximalPlan
from scaffpd.federation.clients import Displacements
from scaffpd.models.glm import LinearOracle, LinearPoint
from scaffpd.models.layout import Ragged, StackedSamples
from scaffpd.models.losses import Loss
from scaffpd.models.numerics import (
    SAFE,
    GraphReplay,
    gamma,
    norm_above,
    skewness,
    tensor_cores,
    unexplained,
)
from scaffpd.models.oracle import StackedDisplacements, dtype_name
from scaffpd.models.quadratic import ClosedSteps, Profile
from scaffpd.models.tables import StoredMatrix

RECENT = 2
NOISE = 4  # eigenvalues below this many ε of the largest are rounding


class Spectrum:
    """Eigenvectors U of every client's K_i, and the eigenvalues s of all of them in one stack."""

    def __init__(self, parts: Sequence[StoredMatrix], layout: Ragged) -> None:
        self.layout = layout
        self.vectors = []
        values = []
        for part in parts:
            s, U = torch.linalg.eigh(part.gram())
            values.append(torch.where(s > NOISE * torch.finfo(s.dtype).eps * s[-1], s, 0))
            self.vectors.append(U)
        self.values = torch.cat(values)
        share = 1 / layout.sizes[layout.owner].to(self.values)
        self.curvature = 2 * share * self.values
        self._errors: Tensor | None = None

    def only(self, clients: list[int], layout: Ragged) -> Spectrum:
        """Select some of the clients."""
        chosen = object.__new__(Spectrum)
        picked = self.layout.rows_of(clients)
        chosen.layout = layout
        chosen.vectors = [self.vectors[i] for i in clients]
        chosen.values = self.values[picked]
        chosen.curvature = self.curvature[picked]
        chosen._errors = None if self._errors is None else self._errors[clients]
        return chosen

    def errors(self, rows: StackedSamples) -> Tensor:
        """Bound ‖K_i − U' diag(s) U'ᵀ‖ for U' with orthonormal columns, by multiplying out; computed once."""
        if self._errors is None:
            self._errors = torch.stack([self._error(*three) for three in self._triples(rows)])
        return self._errors

    def _triples(self, rows: StackedSamples) -> list[tuple[StoredMatrix, Tensor, Tensor]]:
        wide = rows.products.wide if isinstance(rows.products.wide, StoredMatrix) else store(rows)
        return list(
            zip(
                wide.clients(rows.layout.lengths),
                self.vectors,
                self._split(self.values),
                strict=True,
            )
        )

    def _error(self, A: StoredMatrix, U: Tensor, s: Tensor) -> Tensor:
        K = A.gram()
        unit = torch.finfo(s.dtype).eps
        U = U.double()[None]
        s = s.double()
        terms = gamma(A.shape[1] + 8) * K.diagonal().sum()
        made = norm_above(unexplained(K[None], U * s, U.mT)[0], 0)
        return SAFE * (made + terms + (3 * skewness(U)[0] + 4 * unit) * norm_above(s, 0))

    def within(self, V: Tensor) -> Tensor:
        """Return UᵀV, client by client."""
        if self.layout.equal and V.is_cuda:
            return torch.bmm(
                self._together.mT, V.reshape(len(self.vectors), -1, V.shape[1])
            ).view_as(V)
        return torch.cat([U.T @ v for U, v in zip(self.vectors, self._split(V), strict=True)])

    def back(self, V: Tensor) -> Tensor:
        """Return U V, client by client."""
        if self.layout.equal and V.is_cuda:
            return torch.bmm(self._together, V.reshape(len(self.vectors), -1, V.shape[1])).view_as(
                V
            )
        return torch.cat([U @ v for U, v in zip(self.vectors, self._split(V), strict=True)])

    @cached_property
    def _together(self) -> Tensor:
        """Stack the eigenvectors of clients of equal size in one tensor, and make theirs views of it."""
        together = torch.stack(self.vectors)
        self.vectors = list(together.unbind())
        return together

    def _split(self, V: Tensor) -> tuple[Tensor, ...]:
        return torch.split(V, self.layout.lengths)


class SpectralFunction:
    """ϕ(H_i) of all clients: ϕ(l2) and, per eigenvalue, (ϕ(w + l2) − ϕ(l2)) / s."""

    def __init__(self, spectrum: Spectrum, least: float, phi: Profile, rough: bool = False) -> None:
        self.rough = rough
        n = len(spectrum.layout)
        owner = spectrum.layout.owner
        s = spectrum.values
        everyone = torch.arange(n, device=s.device)
        self.spectrum, self.base = spectrum, phi(s.new_full((n,), least), everyone)
        gain = phi(spectrum.curvature + least, owner) - self.base[owner]
        self.gain = torch.where(s > 0, gain / torch.where(s > 0, s, 1), 0)[:, None]
        self.inner = GraphReplay(self._inner)
        self.sums: GraphReplay | None = None

    def _inner(self, T: Tensor) -> Tensor:
        """Return U diag(gain) UᵀT, for T = A g."""
        with tensor_cores(T.device, True) if self.rough else nullcontext():
            return self.spectrum.back(self.gain * self.spectrum.within(T))

    def plain(self, rho: Tensor, T: Tensor | float) -> Tensor:
        """Return B with A_iᵀB = ϕ(H_i) A_iᵀρ + A_iᵀ (U diag(gain) Uᵀ T), without a pass over the data."""
        inside = self.spectrum.values[:, None] * self.spectrum.within(rho)
        if isinstance(T, Tensor):
            inside = inside + self.spectrum.within(T)
        return self.base[self.spectrum.layout.owner][:, None] * rho + self.spectrum.back(
            self.gain * inside
        )


class WideDisplacements:
    """d_i = A_iᵀB_i + p_i x + q_i c of all clients."""

    def __init__(
        self, rows: StackedSamples, B: Tensor, common: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self.rows, self.B, self.common = rows, B, list(common)

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i d_i by one pass over the data."""
        out = (self.rows.A.T @ (weights[self.rows.layout.owner][:, None] * self.B)).flatten()
        for factor, vector in self.common:
            out = torch.addcmul(out, weights @ factor, vector)
        return out

    def each(self) -> Tensor:
        """Return the d_i themselves."""
        out = spread(self.rows, self.B)
        for factor, vector in self.common:
            out.addcmul_(factor[:, None], vector)
        return out


class CommonDisplacements(WideDisplacements):
    """d_i = ϕ(H_i) c of all clients; on a GPU their sum is recorded as a whole."""

    def __init__(self, rows: StackedSamples, phi: SpectralFunction, c: Tensor) -> None:
        self.rows = rows
        self.phi = phi
        self.c = c
        self.common = [(phi.base, c)]

    @cached_property
    def B(self) -> Tensor:  # type: ignore[override]  # noqa: N802
        """U diag(gain) Uᵀ A c."""
        return cast(Tensor, self.phi.inner(self.rows.A @ self.c.view(self.rows.A.shape[1], -1)))

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i d_i by two passes over the data."""
        if not self.rows.products.halves:
            return super().sum(weights)
        if self.phi.sums is None:
            self.phi.sums = GraphReplay(partial(common_sum, self.rows, self.phi))
        return cast(Tensor, self.phi.sums(self.c, weights))


def common_sum(rows: StackedSamples, phi: SpectralFunction, c: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_i w_i ϕ(H_i) c, by operations on the device alone."""
    B = phi._inner(rows.A @ c.view(rows.A.shape[1], -1))
    return WideDisplacements(rows, B, [(phi.base, c)]).sum(weights)


class WidePoint(LinearPoint):
    """All clients at one x, in one recorded graph on a GPU: then L_i and their bounds are on the host."""

    @classmethod
    def recorded(cls, oracle: WideOracle, x: Tensor) -> WidePoint:
        """Construct a point by a recorded graph."""
        point = object.__new__(cls)
        point.rows = point.fine = oracle.rows
        point.loss = oracle.loss
        point.l2 = oracle.l2
        point.x = x
        point.outputs = oracle.outputs
        point.z, point.residual, numbers = oracle.answers(x)
        point.losses, *point.bounds = numbers.cpu()
        point.oracle = oracle
        return point

    bounds: Sequence[Tensor] = ()
    oracle: WideOracle | None = None

    @cached_property
    def predictions(self) -> Tensor:  # type: ignore[override]
        """Predictions z in double precision."""
        return self.z.double()

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Return the bounds computed with the losses, or compute them."""
        return (self.bounds[0], self.bounds[1]) if self.bounds else super().rounding()

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i c_i, by a recorded graph too."""
        if self.oracle is None:
            return super().sum(weights)
        return cast(Tensor, self.oracle.sums(self.residual, self.x, weights))

    def each(self) -> Tensor:
        """Return the c_i themselves, (N, d)."""
        if self.fine is None or self.fine.products.single:
            return self._vectors(self.residual)
        A = cast(StoredMatrix, self.rows.products.wide)
        share = self.rows.exact[1]
        each = A.transposed_each(share[:, None] * self.slopes, self.rows.layout.lengths).flatten(1)
        return each.add_(self.l2 * self.x.double()).to(self.x.dtype)

    def _vectors(self, residual: Tensor) -> Tensor:
        return spread(self.rows, self.rows.share[:, None] * residual).add_(self.l2 * self.x)

    def diagonal(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i diag H_i."""
        scale = (weights[self.rows.layout.owner] * self.rows.share)[:, None]
        bends = scale * self.loss.bends(self.z, self.rows.y)
        return store(self.rows).squares(bends).flatten() + self.l2 * weights.sum()

    def diagonals(self) -> Tensor:
        """Return every client's diag H_i, (N, d)."""
        bends = torch.split(
            self.rows.share[:, None] * self.loss.bends(self.z, self.rows.y),
            self.rows.layout.lengths,
        )
        parts = clients(self.rows)
        return (
            torch.stack([A.squares(b).flatten() for A, b in zip(parts, bends, strict=True)])
            + self.l2
        )


class WideOracle(ClosedSteps, LinearOracle):
    """N clients with a linear model, squared loss and features in a table; bound to the data at first use."""

    def __init__(
        self,
        features: list[Selection],
        y: Tensor,
        loss: Loss,
        l2: float,
        outputs: int,
        names: list[str],
        device: torch.device,
        dtype: torch.dtype,
        rough: bool = False,
    ) -> None:
        self.features = features
        self.y = y
        self.device = device
        self.dtype = dtype
        self.rough = rough
        self.loss = loss
        self.l2 = l2
        self.outputs = outputs
        self.names = names
        self.dimension = features[0].shape[1] * outputs
        self.recent: list[tuple[WidePoint, int]] = []
        self.answers, self.sums = GraphReplay(self._answers), GraphReplay(self._sums)

    def _answers(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return predictions, residuals, and L_i with the bounds on rounding."""
        point = WidePoint(self.rows, self.loss, self.l2, x, self.outputs, self.rows)
        return point.z, point.residual, torch.stack([point.losses, *point.rounding()])

    def _sums(self, residual: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Return Σ_i w_i c_i at x."""
        point = object.__new__(WidePoint)
        point.rows = point.fine = self.rows
        point.x = x
        point.l2 = self.l2
        point.residual = residual
        return point.sum(weights)

    @cached_property
    def rows(self) -> StackedSamples:  # type: ignore[override]
        """The data, on the device, in the table's own format."""
        layout = Ragged([len(x) for x in self.features], self.device, self.dtype)
        share = 1 / layout.sizes[layout.owner].to(self.dtype)
        A = load_rows(self.features, self.names, self.device, self.dtype)
        return StackedSamples(cast(Tensor, A), self.y, layout, share)

    @cached_property
    def spectrum(self) -> Spectrum:
        """The eigenvectors of every client's K_i, at first use."""
        return Spectrum(clients(self.rows), self.rows.layout)

    def start(self) -> Tensor:
        """Return x⁰ = 0."""
        return torch.zeros(self.dimension, dtype=self.dtype, device=self.device)

    def contents(self) -> list[Tensor]:
        """Return the table's fingerprint, the row numbers and the targets."""
        numbers = np.concatenate([x.numbers for x in self.features])
        table = np.frombuffer(repr(self.features[0].table.identity).encode(), dtype=np.uint8).copy()
        sizes = torch.tensor([len(x) for x in self.features])
        return [torch.from_numpy(table), torch.from_numpy(numbers), self.y, sizes]

    @cached_property
    def smoothness(self) -> Tensor:
        """L_i = max_j w_j + l2."""
        return self.rows.layout.segment_max(self.spectrum.curvature) + self.l2

    @cached_property
    def steepest(self) -> Tensor:
        """max_j L_ij per client."""
        return (
            self.loss.curvature * self.rows.layout.segment_max(self.rows.norms.square()) + self.l2
        )

    def constants(self) -> Constants:
        """Return L_i, and μ_i = l2: a client rarely has as many samples as there are features."""
        return self._known(torch.full_like(self.smoothness, self.l2, dtype=torch.float64))

    def only(self, clients: list[int]) -> WideOracle:
        """Select some of the clients, as parts of the same data."""
        owner = np.repeat(np.arange(len(self.features)), [len(x) for x in self.features])
        picked = torch.from_numpy(np.concatenate([np.flatnonzero(owner == i) for i in clients])).to(
            self.device
        )
        names = [self.names[i] for i in clients]
        chosen = WideOracle(
            [self.features[i] for i in clients],
            self.y[picked],
            self.loss,
            self.l2,
            self.outputs,
            names,
            self.device,
            self.dtype,
            self.rough,
        )
        parts = store(self.rows).clients(self.rows.layout.lengths)
        layout = self.rows.layout
        mine = StoredMatrix([parts[i].parts[0] for i in clients], parts[0].scale, self.dtype)
        own = Ragged([layout.lengths[i] for i in clients], self.device, self.dtype)
        chosen.rows = StackedSamples(cast(Tensor, mine), chosen.y, own, self.rows.share[picked])
        chosen.spectrum = self.spectrum.only(clients, own)
        return chosen

    def samples(self, x: Tensor, fine: bool = True) -> WidePoint:
        """Evaluate every sample of every client at x; cache the last points, for rounds ask about one x repeatedly."""
        for point, version in self.recent:
            if point.x is x and version == x._version:
                return point
        if self.rows.products.halves:
            point = WidePoint.recorded(self, x)
        else:
            point = WidePoint(self.rows, self.loss, self.l2, x, self.outputs, self.rows)
        self.recent = [(point, x._version), *self.recent[: RECENT - 1]]
        return point

    def double(self) -> WideOracle:
        """Return the same clients and stored values, in double precision."""
        other = WideOracle(
            self.features,
            self.y.double(),
            self.loss,
            self.l2,
            self.outputs,
            self.names,
            self.device,
            torch.float64,
        )
        rows = self.rows
        layout = Ragged(rows.layout.lengths, self.device, torch.float64)
        other.rows = StackedSamples(
            cast(Tensor, store(rows).double()),
            other.y,
            layout,
            1 / layout.sizes[layout.owner].double(),
        )
        return other

    def local_updates(
        self, x: Tensor, at: LinearPoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> Displacements:
        """Take local steps in closed form; plain steps (FedAvg's) without a second pass over the data."""
        if at is None and plan.batch_size is None:
            return self._plain(self.samples(x), correction, self._phi(plan))
        steps: Displacements = super().local_updates(x, at, correction, plan)
        return steps

    @property
    def _whole(self) -> StackedSamples:
        return self.rows

    def _function(self, phi: Profile) -> SpectralFunction:
        return SpectralFunction(self.spectrum, self.l2, phi, self.rough)

    def _common(self, phi: SpectralFunction, c: Tensor) -> Displacements:
        """Return ϕ_i(H_i) c for one c."""
        return CommonDisplacements(self._local, phi, c)

    @cached_property
    def _local(self) -> StackedSamples:
        """Rows as local steps multiply them."""
        if not self.rough:
            return self.rows
        return replace(self.rows, A=cast(Tensor, store(self.rows).roughly()))

    def _plain(self, here: WidePoint, c: Tensor | None, phi: SpectralFunction) -> Displacements:
        """Take steps that begin with g_i = A_iᵀr/m + l2 x, plus a common c if there is one."""
        rho = self.rows.share[:, None] * here.residual
        T: Tensor | float = self.l2 * here.z if self.l2 else 0.0
        common = [(phi.base * self.l2, here.x)]
        if c is not None:
            T = T + self._along(c)
            common = [*common, (phi.base, c)]
        return WideDisplacements(self.rows, phi.plain(rho, T), common)

    def _general(self, phi: SpectralFunction, first: Tensor) -> Displacements:
        """Take steps that begin with each client's own vector, (N, d)."""
        T = store(self.rows).each(
            first.view(len(first), -1, self.outputs), self.rows.layout.lengths
        )
        out = spread(self.rows, phi.inner(T))
        return StackedDisplacements(out.addcmul_(phi.base[:, None], first))

    def _along(self, c: Tensor) -> Tensor:
        return self.rows.A @ c.view(-1, self.outputs)

    def proximal_steps(
        self, at: LinearPoint, correction: Tensor, plan: ProximalPlan
    ) -> Displacements:
        """Return (H_i + βD)⁻¹c exactly: by the spectrum if D is constant, else by Cholesky in the space of samples."""
        D = plan.metric.view(-1, self.outputs)[:, 0]
        if at.rows is self.rows and bool((D[0] == D).all()):
            pull = float(plan.pull * D[0])
            phi = SpectralFunction(self.spectrum, self.l2 + pull, lambda h, _: 1 / h)
            return WideDisplacements(
                self.rows, phi.inner(self._along(correction)), [(phi.base, correction)]
            )
        n = len(self.names)
        c = correction.view(-1, self.outputs)
        return self.metric_steps(
            at.rows, c.expand(n, *c.shape), (self.l2 + plan.pull * D).expand(n, -1)
        )

    def metric_steps(self, rows: StackedSamples, C: Tensor, E: Tensor) -> Displacements:
        """Solve with E = diag(l2 + βD): (E + RᵀR)⁻¹c = E⁻¹c − E⁻¹Rᵀ(I + R E⁻¹Rᵀ)⁻¹R E⁻¹c, R = √(2/m) A."""
        each = []
        for A, share, c, e in zip(
            clients(rows), torch.split(rows.share, rows.layout.lengths), C, E, strict=True
        ):
            b = c / e[:, None]
            root = (2 * share).sqrt()
            inside = root[:, None] * A.gram(1 / e) * root
            inside.diagonal().add_(1)
            solved = torch.cholesky_solve(root[:, None] * (A @ b), torch.linalg.cholesky(inside))
            each.append((b - (A.T @ (root[:, None] * solved)) / e[:, None]).flatten())
        return StackedDisplacements(torch.stack(each))


def load_rows(
    features: Sequence[Selection], names: Sequence[str], device: torch.device, dtype: torch.dtype
) -> StoredMatrix:
    """Copy the rows of all clients to the device, one client after the other, in the table's own format."""
    table = features[0].table
    limit = torch.finfo(dtype).max ** 0.5 * 1e-4
    table.check()
    kind = torch.from_numpy(np.empty(0, dtype=table.values.dtype)).dtype
    values = torch.empty(sum(map(len, features)), features[0].shape[1], dtype=kind, device=device)
    start = 0
    for name, x in zip(names, features, strict=True):
        for numbers in x.pieces():
            piece = torch.from_numpy(table.values[numbers]).to(device)
            largest = float(piece.abs().amax()) * abs(table.scale)
            if not np.isfinite(largest):
                raise InputError(
                    "client-nan-infinite",
                    f"Client {name!r} has a NaN or infinite value in its rows of the table of features.",
                )
            if largest > limit:
                raise InputError(
                    "client-feature-beyond",
                    f"Client {name!r} has a feature beyond ±{limit:.0e}, too large for {dtype_name(dtype)}: scale the "
                    "data first.",
                )
            values[start : start + len(numbers)] = piece
            start += len(numbers)
    return StoredMatrix([values], table.scale, dtype)


def store(rows: StackedSamples) -> StoredMatrix:
    """Return the matrix behind rows that are bound to a table."""
    return cast(StoredMatrix, rows.A)


def clients(rows: StackedSamples) -> list[StoredMatrix]:
    """Return the matrices of all clients."""
    A: Tensor | StoredMatrix = rows.A
    sizes = rows.layout.lengths
    if isinstance(A, StoredMatrix):
        return A.clients(sizes)
    return [
        StoredMatrix([part], 1.0, part.dtype) for part in torch.split(A, sizes)
    ]  # a minibatch, in the format of x


def spread(rows: StackedSamples, B: Tensor) -> Tensor:
    """Return A_iᵀB_i of every client, (N, d)."""
    return store(rows).transposed_each(B, rows.layout.lengths).flatten(1)
