r"""How the clients of a secure sum are reached, and what each of them does.

A client scales its vector by its own weight, encodes it and masks it; what leaves it is a `Masked`. Everything else
that leaves is a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation import Clients, ClientScores, LocalPlan, ProximalPlan, Vector
from scaffpd.masking import Aggregator, FixedPoint, Opened, Party, Terms
from scaffpd.masking.fixed_point import Ring, exponent_of
from scaffpd.secure.company import Company

Rounding = tuple[Vector, Vector]


@dataclass(frozen=True)
class Masked:
    """What a client answers to a question for its masked vector.

    Attributes:
        exponent: e, with |w_i v_i| ≤ 2ᵉ.
        vector: y_i; `None` where the clip of the question is smaller than that, or where it has none.
    """

    exponent: int
    vector: Ring | None


@dataclass(frozen=True)
class Wanted:
    """A sum that is asked for.

    Attributes:
        held: which vector of every client; the reach knows what it means.
        weights: w_i, by the clients' names; each is told its own.
        numbers: the format; `None` asks for the sizes of vectors alone.
    """

    held: Any
    weights: Mapping[str, float]
    numbers: FixedPoint | None

    @property
    def total(self) -> float:
        """Σ |w_i|."""
        return float(sum(abs(w) for w in self.weights.values()))


class Point(Protocol):
    """Clients at one x: their scalars, and handles of what they keep."""

    losses: Vector

    @property
    def rounding(self) -> Rounding:
        """Bounds on the errors of L_i and c_i."""

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per client."""

    def norms(self) -> Vector:
        """‖c_i‖² per client."""

    def slopes(self, V: Tensor, metric: Tensor) -> tuple[NDArray[np.float64], Vector]:
        """Vᵀc_i and ‖c_i‖² in the metric D⁻¹."""

    def held(self, what: str, V: Tensor | None = None, metric: Tensor | None = None) -> Any:
        """A handle of "c", of the "diagonal" of the Hessian, or of its "curvature" VᵀH_iV."""


class Work(Protocol):
    """Local steps that clients have made, or make when they are asked for them."""

    def norms(self) -> Vector:
        """‖d_i‖² per client."""

    def held(self, what: str) -> Any:
        """A handle of "d", or of the "snapshot"."""


class Masking(Protocol):
    """Clients that mask what they send."""

    def open(self, terms: Terms) -> dict[str, Opened]:
        """Everybody opens an exchange."""

    def mask(self, aggregator: Aggregator | None, wanted: Wanted, length: int) -> dict[str, Masked]:
        """Everybody's masked vector, of those who answer; or its size, where no exchange is open."""

    def reveal(
        self, terms: Terms, survivors: Sequence[str], following: Terms
    ) -> tuple[dict[str, dict[str, int]], dict[str, Opened]]:
        """Shares that open a sum, and, with the same message, the opening of the exchange that follows."""


class Reach(Masking, Protocol):
    """Clients that answer the questions of the waist, and keep their vectors."""

    def gradients(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> Point:
        """Losses at x; every client keeps its c_i."""

    def local_updates(self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan, clients: Clients) -> Work:
        """Local steps; every client keeps its d_i."""

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> Work:
        """Local models; every client keeps its d_i."""

    def losses(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> Vector:
        """L_i."""

    def evaluate(self, x: Any, split: str) -> ClientScores:
        """Scores per client."""


class TooLarge(InputError):
    """A sum would nearly be a client's own vector."""


class Part(NamedTuple):
    """A client's part in a sum.

    Attributes:
        weight: w_i.
        total: Σ |w_i| over all clients.
        share: the largest share of a sum that this client agrees to.
    """

    weight: float
    total: float
    share: float

    def check(self, name: str) -> None:
        """Refuse a sum that would nearly be this client's own vector."""
        if abs(self.weight) > self.share * self.total:
            raise TooLarge(
                f"Client {name!r} would make up {abs(self.weight) / self.total:.0%} of a sum, more than the "
                f"{self.share:.0%} that it agrees to: the sum would show its vector. Use an objective that caps "
                "weights (CVaR, or a cap), or allow a larger share."
            )


class Member(NamedTuple):
    """A client in secure sums.

    Attributes:
        party: its keys and secrets.
        company: the sums that its vectors have been in.
    """

    party: Party
    company: Company

    def answer(
        self, part: Part, terms: Terms | None, around: Mapping[str, Opened], numbers: FixedPoint | None, vector: Any
    ) -> Masked:
        """Its masked vector; without a number format, or where the vector does not fit it, the vector's size alone."""
        part.check(self.party.name)
        own = np.asarray(vector, dtype=np.float64).ravel()
        scaled = part.weight * own
        exponent = exponent_of(scaled)
        if numbers is None or terms is None or exponent > numbers.exponent:
            return Masked(exponent, None)
        self.company.check(own, part.weight, part.total, terms)
        return Masked(exponent, self.party.mask(terms.exchange, around, numbers, scaled))


def quantised(losses: Vector, quantum: float) -> Vector:
    """The nearest multiples of the quantum."""
    return losses if quantum == 0 else np.rint(losses / quantum) * quantum
