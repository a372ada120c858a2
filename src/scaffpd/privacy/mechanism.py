r"""Sums over records to which each contributes a bounded amount: what noise is added to.

    Σ_j ∇ℓ_j min(1, C/‖∇ℓ_j‖)   and   Σ_j clip(ℓ_j, 0, B),

so that a record that is there or not moves the first by at most C and the second by at most B. A record whose gradient
is no number contributes nothing, one whose loss is none contributes B.

What noise is added to is counted in whole units, of C/2ᶠ and of B/2ᶠ, and every record's part is rounded towards zero
to whole units by itself. Then all sums are exact, in whatever order they are made, and a record moves them by at most
2ᶠ units: floating point has no part in the sensitivity. A linear model's part is the product of two vectors,

    ∇ℓ_j = a_j ⊗ r_j   →   ⌊2ᵃ a_j/‖a_j‖⌋ ⊗ ⌊2ᵇ r_j min(1/‖r_j‖, ‖a_j‖/C)⌋,   a + b = f,

whose lengths are at most 2ᵃ and 2ᵇ. All whole numbers stay below 2⁵³, so that a matrix product in double precision is
exact: m 2ᶠ ≤ 2⁵² for clients of m records. Predictions and losses of single records are in floating point; they depend
on that record and on public numbers alone, and on nothing that another record could change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import grad, vmap

from scaffpd.errors import InputError
from scaffpd.models.glm import LinearOracle
from scaffpd.models.losses import Loss
from scaffpd.models.network_oracle import ModuleOracle
from scaffpd.models.samples import StackedSamples, product

# most binary digits of a record's part, and of a sum
FINEST = 40
EXACT = 52
LARGEST_NOISE = 2.0**32
SPARE = 1 + 2.0**-20  # by so much the noise is larger than it is accounted for
TOGETHER = 2**22  # numbers in the gradients of single records that are held at a time


@dataclass(frozen=True)
class Clip:
    """Bound on the influence of a record in a sum."""

    most: float  # C, or B
    # f; sums are counted in units of C/2ᶠ. `None` where there is no noise: sums are plain numbers
    bits: int | None = None

    @classmethod
    def of(cls, most: float, noise: float, samples: int) -> Clip:
        """Take as many digits as sums of that many records, with noise up to z times the clip, leave room for."""
        if noise == 0:
            return cls(most)
        room = EXACT - 3 - max(0, math.ceil(math.log2(noise)))  # σ stays below 2⁵⁰
        return cls(most, min(FINEST, EXACT - math.ceil(math.log2(samples)), room))

    @property
    def unit(self) -> float:
        """The size of a unit."""
        return 1.0 if self.bits is None else math.ldexp(self.most, -self.bits)

    def sigma(self, noise: float) -> int:
        """Return σ of the noise in units, rounded up: z 2ᶠ, and a little more (see `accountant`)."""
        return math.ceil(noise * SPARE * 2.0 ** (self.bits or 0))


@dataclass(frozen=True)
class LinearSums:
    """Linear models: ∇ℓ_j = a_j ⊗ r_j has the norm ‖a_j‖‖r_j‖, so that clipping scales residuals.

    Sums are those of all clients, in units; `drawn` says which rows of the stack take part, `None` all of them.
    """

    rows: StackedSamples  # the samples, each with the weight 1
    whole: StackedSamples  # the same with ⌊2ᵃ a_j/‖a_j‖⌋ in the place of a_j, where sums are counted in units
    loss: Loss  # ℓ
    outputs: int  # k
    clips: tuple[Clip, Clip]  # of gradients and of losses

    @classmethod
    def of(cls, oracle: LinearOracle, clips: tuple[Clip, Clip], radius: float | None) -> LinearSums:
        """Take the oracle's records; those longer than R are scaled to the length R."""
        rows = oracle.rows
        A = rows.A if radius is None else rows.A * (radius / rows.norms).clamp_max(1)[:, None]
        rows = whole = StackedSamples(A, rows.y, rows.layout, torch.ones_like(rows.share))
        if (bits := clips[0].bits) is not None:
            long = A.double()
            units = floored(long, 1 / long.norm(dim=1), bits // 2)
            whole = StackedSamples(units, rows.y, rows.layout, rows.share.double())
        return cls(rows, whole, oracle.loss, oracle.outputs, clips)

    def losses(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """Return Σ_j clip(ℓ_j(x), 0, B) per client, by one product for all."""
        values = bounded(self.loss.value(self._predictions(x), self.rows.y), self.clips[1])
        return self.rows.layout.segment_sum(values if drawn is None else values * drawn)

    def gradients(self, at: Tensor, drawn: Tensor | None) -> Tensor:
        """Return A_iᵀ (s ∘ r)_i, (N, d), s_j = min(1, C/(‖a_j‖‖r_j‖)), at one x for all or every client's own u_i."""
        r = torch.nan_to_num(
            self.loss.residual(self._predictions(at), self.rows.y), posinf=0.0, neginf=0.0
        )
        clip = self.clips[0]
        norms = self.rows.norms
        if clip.bits is None:
            parts = shrink(norms * r.norm(dim=1), clip.most)[:, None] * r
        else:
            r = r.double()
            norms = norms.double()
            scale = torch.minimum(1 / r.norm(dim=1), norms / clip.most)
            parts = floored(r, scale, clip.bits - clip.bits // 2)
        parts = parts if drawn is None else parts * drawn[:, None]
        return self.whole.each(parts).flatten(1)

    def only(self, clients: list[int]) -> LinearSums:
        """Keep the rows of some clients."""
        return replace(self, rows=self.rows.only(clients), whole=self.whole.only(clients))

    def _predictions(self, at: Tensor) -> Tensor:
        """Return ⟨a_j, x⟩, or ⟨a_j, u_i⟩ with every client's own u_i."""
        if at.ndim == 1:
            return self.rows.A @ at.view(-1, self.outputs)
        z = at.new_empty(len(self.rows.A), self.outputs)
        own = at.view(len(at), -1, self.outputs)
        for block in self.rows.blocks:
            inside = block.weight > 0
            z[block.rows[inside]] = product(self.rows.of(block)[0], own[block.clients])[inside]
        return z


@dataclass(frozen=True)
class ModuleSums:
    """Networks: the same sums from gradients of single records, by vectorised differentiation, some at a time.

    Which records are computed together does not depend on the sample that is drawn: a network rounds differently in
    other company. So a sample costs as much as all records, but for pieces of which no record is drawn.
    """

    oracle: ModuleOracle  # the network and its data
    clips: tuple[Clip, Clip]  # of gradients and of losses

    def losses(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """Add them up client by client."""
        with torch.no_grad():
            return torch.stack([self._sum(self._one, x, part, ()) for part in self._parts(drawn)])

    def gradients(self, at: Tensor, drawn: Tensor | None) -> Tensor:
        """Add them up client by client."""
        points = at.expand(len(self.oracle.names), at.shape[-1])
        pairs = zip(points, self._parts(drawn), strict=True)
        return torch.stack([self._sum(grad(self._one), u, part, u.shape) for u, part in pairs])

    def only(self, clients: list[int]) -> ModuleSums:
        """Keep the samples of some clients."""
        return replace(self, oracle=self.oracle.only(clients))

    def _parts(self, drawn: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the records of every client, and which of them take part."""
        sizes = self.oracle.rows.sizes
        everyone = torch.ones(sum(sizes), dtype=torch.bool, device=self.oracle.device)
        masks = torch.split(everyone if drawn is None else drawn, sizes)
        for (X, y), mask in zip(self.oracle.rows.each(), masks, strict=True):
            yield X, y, mask

    def _one(self, x: Tensor, X: Tensor, y: Tensor) -> Tensor:
        output = self.oracle.function.outputs(x, X[None])
        return self.oracle.function.loss(output, y[None]).squeeze()

    def _sum(
        self,
        one: Callable[..., Tensor],
        x: Tensor,
        part: tuple[Tensor, Tensor, Tensor],
        shape: tuple[int, ...],
    ) -> Tensor:
        """Add up what is clipped, over pieces of the records."""
        bits = self.clips[0 if shape else 1].bits
        total = x.new_zeros(shape, dtype=x.dtype if bits is None else torch.float64)
        for X, y, mask in zip(
            *(torch.split(t, max(1, TOGETHER // len(x))) for t in part), strict=True
        ):
            if mask.any():
                total = total + self._clipped(self._each(one, x, X, y))[mask].sum(0)
        return total

    def _each(self, one: Callable[..., Tensor], x: Tensor, X: Tensor, y: Tensor) -> Tensor:
        try:
            return vmap(one, in_dims=(None, 0, 0))(x.detach(), X, y)
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise InputError(
                "network-differentiated-record",
                f"The network cannot be differentiated record by record: {reason}.",
            ) from None

    def _clipped(self, each: Tensor) -> Tensor:
        """Return what every record counts, (m,) or (m, d)."""
        if each.ndim == 1:
            return bounded(each, self.clips[1])
        each = torch.where(torch.isfinite(each).all(1, keepdim=True), each, 0)
        clip = self.clips[0]
        if clip.bits is None:
            return shrink(each.norm(dim=1), clip.most)[:, None] * each
        each = each.double()
        return floored(each, (1 / each.norm(dim=1)).clamp_max(1 / clip.most), clip.bits)


ClippedSums = LinearSums | ModuleSums


def shrink(norms: Tensor, clip: float) -> Tensor:
    """Return min(1, C/‖·‖)."""
    return torch.ones_like(norms) if clip == float("inf") else (clip / norms).clamp_max(1)


def bounded(values: Tensor, clip: Clip) -> Tensor:
    """Return clip(ℓ, 0, B), in units."""
    values = torch.nan_to_num(values, nan=clip.most, posinf=clip.most).clamp(0, clip.most)
    return values if clip.bits is None else floored(values.double(), 1 / clip.most, clip.bits)


def floored(values: Tensor, scale: Tensor | float, bits: int) -> Tensor:
    """Return ⌊2ᵇ s_j v_j⌋ towards zero, whole numbers in double precision, at most 2ᵇ long where ‖s_j v_j‖ ≤ 1.

    Norms and products are off by less than 2⁻⁵² per number of a row, which is taken off before.
    """
    length = values.shape[1] if values.ndim == 2 else 1
    scale = scale[:, None] if isinstance(scale, Tensor) else scale
    return torch.nan_to_num(values * scale * (2.0**bits * (1 - (length + 8) * 2.0**-52))).trunc()
