r"""Sums over records to which each contributes a bounded amount: what noise is added to.

    Σ_j ∇ℓ_j min(1, C/‖∇ℓ_j‖)   and   Σ_j clip(ℓ_j, 0, B),

so that a record that is there or not moves the first by at most C and the second by at most B. A record whose gradient
is no number contributes nothing, one whose loss is none contributes B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from scaffpd.errors import InputError
from scaffpd.models.glm import LinearOracle
from scaffpd.models.layout import StackedSamples, product
from scaffpd.models.losses import Loss
from scaffpd.models.module import ModuleOracle

TOGETHER = 2**22  # numbers in the gradients of single records that are held at a time


class ClippedSums(Protocol):
    """Clipped sums of all clients; `drawn` says which rows of the stack take part, `None` all of them."""

    def losses(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """Σ_j clip(ℓ_j(x), 0, B) per client."""

    def gradients(self, at: Tensor, drawn: Tensor | None) -> Tensor:
        """Σ_j of the clipped gradients, (N, d), at one point for all, (d,), or at every client's own, (N, d)."""

    def only(self, clients: list[int]) -> ClippedSums:
        """The same for some of the clients."""


@dataclass(frozen=True)
class LinearSums:
    """Linear models: ∇ℓ_j = a_j ⊗ r_j has the norm ‖a_j‖‖r_j‖, so that clipping scales residuals.

    Attributes:
        rows: the samples, each with the weight 1.
        loss: ℓ.
        outputs: k.
        clip: C.
        loss_clip: B.
    """

    rows: StackedSamples
    loss: Loss
    outputs: int
    clip: float
    loss_clip: float

    @classmethod
    def of(cls, oracle: LinearOracle, clip: float, loss_clip: float, radius: float | None) -> LinearSums:
        """Take the oracle's records; those longer than R are scaled to the length R."""
        rows = oracle.rows
        if rows.stored:
            raise InputError("Private needs features that fit into memory.")
        A = rows.A if radius is None else rows.A * (radius / rows.norms).clamp_max(1)[:, None]
        return cls(
            StackedSamples(A, rows.y, rows.layout, torch.ones_like(rows.share)),
            oracle.loss,
            oracle.outputs,
            clip,
            loss_clip,
        )

    def losses(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """One product for all clients."""
        values = bounded(self.loss.value(self._predictions(x), self.rows.y), self.loss_clip)
        return self.rows.layout.segment_sum(values if drawn is None else values * drawn)

    def gradients(self, at: Tensor, drawn: Tensor | None) -> Tensor:
        """A_iᵀ (s ∘ r)_i with s_j = min(1, C/(‖a_j‖‖r_j‖)): batched products."""
        r = torch.nan_to_num(self.loss.residual(self._predictions(at), self.rows.y), posinf=0.0, neginf=0.0)
        scale = shrink(self.rows.norms * r.norm(dim=1), self.clip)
        scale = scale if drawn is None else scale * drawn
        return self.rows.each(scale[:, None] * r).mT.flatten(1)

    def only(self, clients: list[int]) -> LinearSums:
        """The rows of some clients."""
        return replace(self, rows=self.rows.only(clients))

    def _predictions(self, at: Tensor) -> Tensor:
        """⟨a_j, x⟩, or ⟨a_j, u_i⟩ with every client's own u_i."""
        if at.ndim == 1:
            return self.rows.A @ at.view(-1, self.outputs)
        z, own = at.new_empty(len(self.rows.A), self.outputs), at.view(len(at), -1, self.outputs)
        for block in self.rows.blocks:
            inside = block.weight > 0
            z[block.rows[inside]] = product(self.rows.of(block)[0], own[block.clients])[inside]
        return z


@dataclass(frozen=True)
class ModuleSums:
    """Networks: the gradients of single records by vectorised differentiation, some records at a time.

    Attributes:
        oracle: the network and its data.
        clip: C.
        loss_clip: B.
    """

    oracle: ModuleOracle
    clip: float
    loss_clip: float

    def losses(self, x: Tensor, drawn: Tensor | None) -> Tensor:
        """Client by client."""
        with torch.no_grad():
            return torch.stack([self._sum(self._one, x, part, ()) for part in self._parts(drawn)])

    def gradients(self, at: Tensor, drawn: Tensor | None) -> Tensor:
        """Client by client."""
        points = at.expand(len(self.oracle.X), at.shape[-1])
        pairs = zip(points, self._parts(drawn), strict=True)
        return torch.stack([self._sum(grad(self._one), u, part, u.shape) for u, part in pairs])

    def only(self, clients: list[int]) -> ModuleSums:
        """The samples of some clients."""
        return replace(self, oracle=self.oracle.only(clients))

    def _parts(self, drawn: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The records of every client that take part."""
        if drawn is None:
            yield from zip(self.oracle.X, self.oracle.y, strict=True)
            return
        masks = torch.split(drawn, [len(X) for X in self.oracle.X])
        yield from ((X[mask], y[mask]) for X, y, mask in zip(self.oracle.X, self.oracle.y, masks, strict=True))

    def _one(self, x: Tensor, X: Tensor, y: Tensor) -> Tensor:
        output = functional_call(self.oracle.network, self.oracle.unflatten(x), (X[None],))
        return self.oracle.loss(output, y[None]).squeeze()

    def _sum(
        self, one: Callable[..., Tensor], x: Tensor, part: tuple[Tensor, Tensor], shape: tuple[int, ...]
    ) -> Tensor:
        """Σ_j of what is clipped, over pieces of the records."""
        total = x.new_zeros(shape)
        for X, y in zip(*(torch.split(t, max(1, TOGETHER // len(x))) for t in part), strict=True):
            if len(X):
                total = total + self._clipped(self._each(one, x, X, y))
        return total

    def _each(self, one: Callable[..., Tensor], x: Tensor, X: Tensor, y: Tensor) -> Tensor:
        try:
            return vmap(one, in_dims=(None, 0, 0))(x.detach(), X, y)
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise InputError(f"The network cannot be differentiated record by record: {reason}.") from None

    def _clipped(self, each: Tensor) -> Tensor:
        if each.ndim == 1:
            return bounded(each, self.loss_clip).sum()
        each = torch.where(torch.isfinite(each).all(1, keepdim=True), each, 0)
        return shrink(each.norm(dim=1), self.clip) @ each


def shrink(norms: Tensor, clip: float) -> Tensor:
    """min(1, C/‖·‖)."""
    return torch.ones_like(norms) if clip == float("inf") else (clip / norms).clamp_max(1)


def bounded(values: Tensor, most: float) -> Tensor:
    """clip(ℓ, 0, B)."""
    return torch.nan_to_num(values, nan=most, posinf=most).clamp(0, most)
