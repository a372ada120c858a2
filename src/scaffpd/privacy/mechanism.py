r"""Sums over records to which each contributes a bounded amount: what noise is added to.

    Σ_j ∇ℓ_j min(1, C/‖∇ℓ_j‖)   and   Σ_j clip(ℓ_j, 0, B),

so that a record that is present or not moves the first by at most C and the second by at most B. A
record whose gradient is no number contributes nothing, one whose loss is none contributes B.

Sums are counted in whole units, of C/2ᶠ and of B/2ᶠ, and every record's part is rounded towards
zero to whole units by itself. Then all sums are exact, in whatever order they are made, and a
record moves them by at most 2ᶠ units: floating point has no part in the sensitivity. A linear
model's part is the product of two vectors,

    ∇ℓ_j = a_j ⊗ r_j   →   ⌊2ᵃ a_j/‖a_j‖⌋ ⊗ ⌊2ᵇ (r_j/‖r_j‖) min(1, ‖r_j‖‖a_j‖/C)⌋,   a + b = f,

whose lengths are at most 2ᵃ and 2ᵇ, whatever underflows or overflows on the way: directions are
those of a vector over its largest entry, and a factor is at most one. All whole numbers stay below
2⁵³, so that a matrix product in double precision is exact: m 2ᶠ ≤ 2⁵² for clients of m records.
Predictions and losses of single records are in floating point; they depend on that record and on
public numbers alone, and on nothing that another record could change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.func import grad, vmap

from scaffpd.errors import InputError, first_line
from scaffpd.models.glm import LinearOracle
from scaffpd.models.losses import Loss
from scaffpd.models.network_oracle import ModuleOracle
from scaffpd.models.samples import Ragged, StackedSamples

FINEST = 40  # most binary digits of a record's part
EXACT = 52  # most binary digits of a sum
LARGEST_NOISE = 2.0**32
SPARE = 1 + 2.0**-20  # by so much the noise is larger than it is accounted for
TOGETHER = 2**22  # numbers in the gradients of single records that are held at a time


@dataclass(frozen=True)
class Clip:
    """Bound on the influence of a record in a sum."""

    most: float  # C, or B
    bits: int  # f; sums are counted in units of C/2ᶠ

    @classmethod
    def of(cls, most: float, noise: float, samples: int) -> Clip:
        """Take as many digits as sums of so many records, with noise, leave room for."""
        room = EXACT - 3 - max(0, math.ceil(math.log2(noise)))  # σ stays below 2⁵⁰
        return cls(most, min(FINEST, EXACT - math.ceil(math.log2(samples)), room))

    @property
    def unit(self) -> float:
        return math.ldexp(self.most, -self.bits)

    def sigma(self, noise: float) -> int:
        """Return σ of the noise in units, rounded up: z 2ᶠ and a little more (`accountant`)."""
        return math.ceil(noise * SPARE * 2.0**self.bits)


@dataclass(frozen=True)
class LinearSums:
    """Linear models: ∇ℓ_j = a_j ⊗ r_j has the norm ‖a_j‖‖r_j‖: clipping scales residuals."""

    rows: StackedSamples  # the samples, each with the weight 1
    whole: StackedSamples  # the same with ⌊2ᵃ a_j/‖a_j‖⌋ in the place of a_j
    loss: Loss
    outputs: int
    clips: tuple[Clip, Clip]  # of gradients and of losses

    @classmethod
    def of(cls, oracle: LinearOracle, clips: tuple[Clip, Clip], radius: float | None) -> Self:
        """Take the oracle's records; those longer than R are scaled to the length R."""
        rows = oracle.rows
        A = rows.A if radius is None else rows.A * (radius / rows.norms).clamp_max(1)[:, None]
        rows = StackedSamples(A, rows.y, rows.layout, torch.ones_like(rows.share))
        long = A.double()
        units = floored(directions(long)[0], 1.0, clips[0].bits // 2)
        whole = StackedSamples(units, rows.y, rows.layout, rows.share.double())
        return cls(rows, whole, oracle.loss, oracle.outputs, clips)

    def losses(self, x: Tensor) -> Tensor:
        """Return Σ_j clip(ℓ_j(x), 0, B) per client, in units."""
        values = bounded(self.loss.value(self._predictions(x), self.rows.y), self.clips[1])
        return self.rows.layout.segment_sum(values)

    def gradients(self, at: Tensor) -> Tensor:
        """Return the clipped sums, (N, d), in units, at one x for all or every client's own u_i."""
        r = self.loss.residual(self._predictions(at), self.rows.y).double()
        r = torch.nan_to_num(r, posinf=0.0, neginf=0.0)
        clip = self.clips[0]
        unit, sizes = directions(r)
        scale = (sizes * (self.rows.norms.double() / clip.most)).clamp_max(1)
        parts = floored(unit, scale, clip.bits - clip.bits // 2)
        return self.whole.each(parts).flatten(1)

    def only(self, clients: list[int]) -> LinearSums:
        return replace(self, rows=self.rows.only(clients), whole=self.whole.only(clients))

    def _predictions(self, at: Tensor) -> Tensor:
        """Return ⟨a_j, x⟩, or ⟨a_j, u_i⟩ with every client's own u_i."""
        if at.ndim == 1:
            return self.rows.A @ at.view(-1, self.outputs)
        return self.rows.along(at.view(len(at), -1, self.outputs))


@dataclass(frozen=True)
class PersonSums(LinearSums):
    """Persons with a row for each of K periods, of zeros where they are not at risk.

    A record is a person: its losses and its gradients are added up before they are clipped.
    """

    periods: int = 1  # K

    def losses(self, x: Tensor) -> Tensor:
        each = self.loss.value(self._predictions(x), self.rows.y) * self.rows.A.any(1)
        return self._added(bounded(self._by_person(each), self.clips[1]))

    def gradients(self, at: Tensor) -> Tensor:
        r = self.loss.residual(self._predictions(at), self.rows.y)
        return self._added(clipped(self._by_person(r * self.rows.A), self.clips[0]))

    def _by_person(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self.periods, *rows.shape[1:]).sum(1)

    def _added(self, parts: Tensor) -> Tensor:
        layout = self.rows.layout
        persons = [rows // self.periods for rows in layout.lengths]
        return Ragged(persons, parts.device, parts.dtype).segment_sum(parts)


@dataclass(frozen=True)
class ModuleSums:
    """Networks: the same sums from gradients of single records, by vectorised differentiation."""

    oracle: ModuleOracle
    clips: tuple[Clip, Clip]

    def losses(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self._sums(self._one, x, lambda each: bounded(each, self.clips[1]))

    def gradients(self, at: Tensor) -> Tensor:
        return self._sums(grad(self._one), at, lambda each: clipped(each, self.clips[0]))

    def only(self, clients: list[int]) -> ModuleSums:
        return replace(self, oracle=self.oracle.only(clients))

    def _one(self, x: Tensor, X: Tensor, y: Tensor) -> Tensor:
        output = self.oracle.function.outputs(x, X[None])
        return self.oracle.function.loss(output, y[None]).squeeze()

    def _sums(
        self, one: Callable[..., Tensor], at: Tensor, units: Callable[[Tensor], Tensor]
    ) -> Tensor:
        points = at.detach().expand(len(self.oracle.names), at.shape[-1])
        size = max(1, TOGETHER // at.shape[-1])
        totals = []
        for x, rows in zip(points, self.oracle.rows.each(), strict=True):
            pieces = zip(*(torch.split(part, size) for part in rows), strict=True)
            sums = [units(_each(one, x, X, y)).sum(0) for X, y in pieces]
            totals.append(torch.stack(sums).sum(0))
        return torch.stack(totals)


ClippedSums = LinearSums | ModuleSums


def _each(one: Callable[..., Tensor], x: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """Return a function of single records, for many of them at once."""
    try:
        return vmap(one, in_dims=(None, 0, 0))(x, X, y)
    except RuntimeError as error:
        raise InputError(
            "network-not-per-record",
            f"The network cannot be differentiated record by record: {first_line(error)}.",
        ) from None


def directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return r_j/‖r_j‖, zero where r_j is, and ‖r_j‖, of numbers of any size."""
    largest = rows.abs().amax(1, keepdim=True)
    scaled = rows / torch.where(largest > 0, largest, 1)
    norms = scaled.norm(dim=1, keepdim=True)  # from 1 to √d, or 0
    sizes = (largest * norms)[:, 0].clamp_max(torch.finfo(rows.dtype).max)
    return scaled / torch.where(norms > 0, norms, 1), sizes


def clipped(each: Tensor, clip: Clip) -> Tensor:
    """Return g_j min(1, C/‖g_j‖), in units."""
    each = torch.where(torch.isfinite(each).all(1, keepdim=True), each, 0).double()
    unit, sizes = directions(each)
    return floored(unit, (sizes / clip.most).clamp_max(1), clip.bits)


def bounded(values: Tensor, clip: Clip) -> Tensor:
    """Return clip(ℓ, 0, B), in units."""
    values = torch.nan_to_num(values, nan=clip.most, posinf=clip.most).clamp(0, clip.most)
    return floored(values.double(), 1 / clip.most, clip.bits)


def floored(values: Tensor, scale: Tensor | float, bits: int) -> Tensor:
    """Return ⌊2ᵇ s_j v_j⌋ towards zero, in double precision, at most 2ᵇ long where ‖s_j v_j‖ ≤ 1.

    Norms and products are off by less than 2⁻⁵² per number of a row, which is taken off before.
    """
    length = values.shape[1] if values.ndim == 2 else 1
    scale = scale[:, None] if isinstance(scale, Tensor) else scale
    return torch.nan_to_num(values * scale * (2.0**bits * (1 - (length + 8) * 2.0**-52))).trunc()
