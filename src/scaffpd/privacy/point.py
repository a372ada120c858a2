"""What private clients have released at one point, and what the server can make of it."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.models.oracle import Seen

SECOND_ORDER = (
    "Private clients release clipped gradients and losses, no second derivatives: use ScaffPD, AcceleratedPrimalDual "
    "or another method of gradients and local steps."
)


class PrivatePoint:
    """What all clients have released at one x; everything asked of it is made of that."""

    def __init__(self, x: Tensor, losses: Tensor, gradients: Tensor, whole: bool) -> None:
        self.x, self.losses, self.gradients, self.whole = x, losses, gradients, whole

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i c_i."""
        return weights @ self.gradients

    def project(self, direction: Tensor) -> Tensor:
        """⟨c_i, v⟩ per client."""
        return self.gradients @ direction

    def norms(self) -> Tensor:
        """‖c_i‖² per client, noise included."""
        return self.gradients.square().sum(1)

    def each(self) -> Tensor:
        """The c_i themselves."""
        return self.gradients

    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> Seen:
        """Not released."""
        self._refuse()

    def diagonal(self, weights: Tensor) -> Tensor:
        """Not released."""
        self._refuse()

    def diagonals(self) -> Tensor:
        """Not released."""
        self._refuse()

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Noise has no bound, so nothing can be proven."""
        unbounded = torch.full_like(self.losses, float("inf"))
        return unbounded, unbounded

    def _refuse(self) -> NoReturn:
        raise InputError(SECOND_ORDER)
