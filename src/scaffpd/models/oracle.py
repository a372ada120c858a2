"""Computations of clients, for all clients at once.

A model (`Linear`, `Module`) is a description; bound to the clients' data it becomes an `Oracle`:
over N clients for a cohort, over one at a silo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation import Constants, LocalPlan, Vector
from scaffpd.federation.questions import Displacements, EvaluatedPoint
from scaffpd.models.arrays import Array


class StackedDisplacements:
    """The d_i of all clients as one (N, d) tensor."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def sum(self, weights: Tensor) -> Tensor:
        return weights @ self.vectors

    def each(self) -> Tensor:
        return self.vectors


def refuse_curvature(*_: object) -> NoReturn:
    raise InputError(
        "no-second-derivatives",
        "Networks and private clients provide no second derivatives: use ScaffPD or another method "
        "that needs only gradients.",
    )


class StackedPoint(StackedDisplacements):
    """Losses at one x and the c_i as one (N, d) tensor, without curvature and error bounds."""

    restriction = curvatures = hessian = diagonal = diagonals = refuse_curvature

    def __init__(self, x: Tensor, losses: Tensor, gradients: Tensor) -> None:
        super().__init__(gradients)
        self.x = x
        self.losses = losses
        self.gradients = gradients

    def norms(self) -> Tensor:
        return torch.einsum("nd,nd->n", self.gradients, self.gradients)

    def rounding(self) -> tuple[Tensor, Tensor]:
        unbounded = torch.full_like(self.losses, float("inf"))
        return unbounded, unbounded


# The c_i: of a point of the same oracle's `evaluate`, as an (N, d) tensor, or all zero.
Held = EvaluatedPoint | Tensor | None


def shift(at: Held, correction: Tensor | None) -> Tensor | float:
    """Return c − c_i, which local steps add to g_i(u): (N, d), or one row or number for all."""
    c = 0.0 if correction is None else correction
    return c if at is None else c - (at if isinstance(at, Tensor) else at.each())


def step_sizes(
    plan: LocalPlan, clients: int, smoothness: Callable[[], Vector], x: Tensor
) -> Tensor:
    """Return η_i, (N, 1): the plan's, or its share of 1/L_i; 0 if the loss is flat."""
    if plan.rate is not None:
        return x.new_full((clients, 1), plan.rate)
    L = torch.from_numpy(smoothness()).to(x)[:, None]
    return torch.where(L > 0, plan.scale / L, 0)


def stepped(
    x: Tensor,
    pull: Tensor | float,
    rates: Tensor,
    plan: LocalPlan,
    slopes: Callable[[Tensor], Tensor],
) -> StackedDisplacements:
    """Take J steps u ← u − η_i (g_i(u) + pull + μ(u − x)) from x, all clients at once.

    `slopes` are the g_i at every client's own u_i, (N, d), and `pull` is c − c_i (`shift`).
    """
    d = x.new_zeros(len(rates), len(x))
    for _ in range(plan.steps):
        d = d + rates * (slopes(x - d) + pull - plan.prox * d)
    return StackedDisplacements(d)


class Oracle(Protocol):
    """Losses, gradients, second derivatives and local steps of N clients.

    Attributes:
        dimension: d, the length of x.
        most_rows: most rows of a client that a pass over the data reads; `None` if the work is
            elsewhere.
    """

    dimension: int
    most_rows: float | None

    def start(self) -> Tensor:
        """Return x⁰."""

    def contents(self) -> list[Tensor]:
        """Return all data that the losses depend on."""

    def constants(self) -> Constants:
        """Return L_i and μ_i."""

    def only(self, clients: list[int]) -> Oracle:
        """Select some of the clients, in the order given."""

    def losses(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> Tensor:
        """Return f_i(x) without the gradients."""
        return self.evaluate(x, batch_size, key).losses

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> EvaluatedPoint:
        """Evaluate all clients at x."""

    def local_updates(
        self, x: Tensor, at: Held, correction: Tensor | None, plan: LocalPlan
    ) -> Displacements:
        """Take all local steps u ← u − η_i (g_i(u) − c_i + correction + μ(u − x)) from x."""

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return f_i(x) and accuracy per client."""


@dataclass(frozen=True)
class ClientData:
    """Checked arrays and names of the clients; `columns` names the features of data frames."""

    features: list[Array]
    labels: list[Array]
    names: list[str]
    device: torch.device
    dtype: torch.dtype | None
    columns: list[str] | None = None
