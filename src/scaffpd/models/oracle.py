r"""What clients can compute, for all clients at once: the ground floor under every runtime.

A model (`Linear`, `Module`) is a description; bound to the clients' data it becomes an `Oracle`. Client-side numerics
exist here exactly once: a simulated cohort holds an oracle over N clients, a real silo an oracle over one.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.federation import Constants, LocalPlan, Vector


class Point(Protocol):
    """Losses and gradients of all clients at one x."""

    losses: Tensor

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i c_i."""

    def project(self, direction: Tensor) -> Tensor:
        """⟨c_i, v⟩ per client."""

    def norms(self) -> Tensor:
        """‖c_i‖² per client."""

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bounds on the rounding errors of L_i and of c_i (its norm); infinite where nobody knows."""


class Displacements(Protocol):
    """d_i = x − u_{i,J} of all clients after one batch of local steps."""

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i d_i."""


class Oracle(Protocol):
    """Losses, gradients and local steps of N clients."""

    dimension: int

    def start(self) -> Tensor:
        """x⁰."""

    def contents(self) -> list[Tensor]:
        """Everything that the losses depend on, besides the model's description."""

    def constants(self) -> Constants:
        """L_i and μ_i."""

    def evaluate(self, x: Tensor, batch_size: int | None, key: tuple[int, ...]) -> Point:
        """All clients at x."""

    def local_updates(self, x: Tensor, at: Any, correction: Tensor, plan: LocalPlan) -> Displacements:
        """All clients' corrected local steps from x; `at` is what this oracle's own `evaluate` returned."""

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """f_i(x) and accuracy per client."""


Arrays = list[NDArray[np.generic]]
