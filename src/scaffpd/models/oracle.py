r"""What clients can compute, for all clients at once: the ground floor under every runtime.

A model (`Linear`, `Module`) is a description; bound to the clients' data it becomes an `Oracle`. Client-side numerics
exist here exactly once: a simulated cohort holds an oracle over N clients, a real silo an oracle over one.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data.table import Selection
from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Vector


class Seen(NamedTuple):
    """What all clients see of their losses in the span of V = [v_1 … v_k], to second order.

    Attributes:
        slopes: g_i = Vᵀc_i, (N, k).
        curvature: Q = Σ w_i VᵀH_iV, (k, k).
        sizes: ‖c_i‖² in the metric D⁻¹, (N,).
    """

    slopes: Tensor
    curvature: Tensor
    sizes: Tensor


class Point(Protocol):
    """Losses, gradients and second derivatives of all clients at one x."""

    losses: Tensor

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i c_i."""

    def project(self, direction: Tensor) -> Tensor:
        """⟨c_i, v⟩ per client."""

    def norms(self) -> Tensor:
        """‖c_i‖² per client."""

    def each(self) -> Tensor:
        """The c_i themselves, (N, d)."""

    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> Seen:
        """Slopes, curvature and sizes along the columns of V, (d, k), for weights w and the diagonal D."""

    def diagonal(self, weights: Tensor) -> Tensor:
        """Σ_i w_i diag H_i; an `InputError` where that is not known."""

    def diagonals(self) -> Tensor:
        """Every client's diag H_i, (N, d); an `InputError` where that is not known."""

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bounds on the rounding errors of L_i and of c_i (its norm); infinite where nobody knows."""


class Displacements(Protocol):
    """d_i = x − u_{i,J} of all clients after one batch of local steps."""

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i d_i."""

    def each(self) -> Tensor:
        """The d_i themselves, (N, d)."""


class Stack:
    """The d_i of all clients as one (N, d) tensor."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i d_i."""
        return weights @ self.vectors

    def each(self) -> Tensor:
        """The d_i themselves."""
        return self.vectors


def shift(at: Point | Tensor | None, correction: Tensor | None) -> Tensor | float:
    """What local steps add to g_i(u), c − c_i: (N, d), or a single row or number where clients agree."""
    c = 0.0 if correction is None else correction
    return c if at is None else c - (at if isinstance(at, Tensor) else at.each())


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two points are one."""
    return a is b or torch.equal(a, b)


class Oracle(Protocol):
    """Losses, gradients, second derivatives and local steps of N clients.

    Attributes:
        dimension: d, the length of x.
        most_rows: of a client's samples a pass over the data reads at most so many; `None` where work is elsewhere.
    """

    dimension: int
    most_rows: float | None

    def start(self) -> Tensor:
        """x⁰."""

    def contents(self) -> list[Tensor]:
        """Everything that the losses depend on, besides the model's description."""

    def constants(self) -> Constants:
        """L_i and μ_i."""

    def only(self, clients: list[int]) -> Oracle:
        """The same for some of the clients, in the order given."""

    def losses(self, x: Tensor, batch_size: int | None, key: tuple[int, ...]) -> Tensor:
        """f_i(x) without the gradients."""

    def evaluate(self, x: Tensor, batch_size: int | None, key: tuple[int, ...]) -> Point:
        """All clients at x."""

    def local_updates(self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan) -> Displacements:
        """All clients' local steps u ← u − η_i (g_i(u) − c_i + correction + μ(u − x)) from x.

        `at` is what this oracle's own `evaluate` returned, the c_i as an (N, d) tensor, or `None` for c_i = 0.
        """

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> Displacements:
        """d_i ≈ argmin ½dᵀH_i d + (β/2)‖d‖²_D − ⟨correction, d⟩ at the point `at` of this oracle's own `evaluate`."""

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """f_i(x) and accuracy per client."""


Arrays = list[NDArray[np.generic]]
Features = list[NDArray[np.generic] | Selection]  # of each client: an array, or rows of a table
