"""The parts of a `Federation`: a `Channel` to its clients, a `Summer` of their vectors, and what clients report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.federation.questions import ClientSelection, Question, Reply, Vector, Vectors


class Channel(Protocol):
    """Access to the clients, wherever they are.

    Attributes:
        names: the clients, in a fixed order.
        keeps: whether vectors that clients store from round to round are accessible.
        here: whether clients are in this process, and not at other organisations.
    """

    names: tuple[str, ...]
    keeps: bool
    here: bool

    @property
    def work(self) -> float:
        """Number of numbers that a pass over the training features reads; infinite if unknown."""

    @property
    def absent(self) -> int:
        """Number of clients that do not answer at present."""

    @property
    def account(self) -> Any:
        """Account of private clients' releases; `None` if they are not private, or keep their own privacy ledger."""

    @property
    def fingerprint(self) -> str:
        """Identify model, clients and data, so that a checkpoint is never resumed on another problem."""

    def constants(self) -> Constants:
        """Return smoothness and convexity of the clients' losses."""

    def start(self) -> Tensor:
        """Return the default x⁰ (zero for linear models, the module's own parameters otherwise)."""

    def own(self, x: Tensor) -> Tensor | None:
        """Return every client's own model u_i(x), (N, d), if the model is `Personal` and the clients are here."""

    def ask(self, question: Question, chosen: Sequence[int]) -> Reply:
        """Return the answers of the chosen clients, in that order."""


class Summer(Protocol):
    """Sums of the clients' vectors.

    Attributes:
        hides: whether no single vector leaves its client.
        projections: whether clients reveal their gradients along directions that the server chooses.
        twice: whether clients allow sums of the same vectors with two different weights.
        silent: whether losses stay with their clients too.
    """

    hides: bool
    projections: bool
    twice: bool
    silent: bool

    def shown(self, question: Question, reply: Reply) -> Reply:
        """Return what clients reveal of their numbers."""

    def sum(self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector) -> Tensor:
        """Return Σ_i w_i v_i over the clients that were asked; `part` names the summed vectors."""

    def error(self, length: int, weights: Vector) -> float:
        """Bound the error of the last sum due to its number format, in norm and per unit of weight."""


@dataclass(frozen=True)
class Constants:
    """Constants of the clients' losses, known before the first round (N scalars each).

    Attributes:
        smoothness: L_i, the Lipschitz constant of ∇f_i (an estimate if the loss is not convex).
        strong_convexity: μ_i with f_i μ_i-strongly convex; 0 if it is not.
        convex: whether every f_i is convex.
        steepest: max_j L_ij, the smoothness of a client's steepest sample; minibatches need shorter steps.
        samples: n_i, the number of samples of a client.
        quadratic: whether every f_i is a quadratic function, with one Hessian everywhere.
        noisy: whether clients clip their answers and add noise to them, for privacy.
        first_order: whether clients refuse questions about curvature, because their vectors are masked.
    """

    smoothness: Vector
    strong_convexity: Vector
    convex: bool
    steepest: Vector
    samples: NDArray[np.int64]
    quadratic: bool = False
    noisy: bool = field(
        default=False, metadata={"transient": True}
    )  # known before a run is resumed
    first_order: bool = field(default=False, metadata={"transient": True})

    def only(self, clients: list[int]) -> Constants:
        """Select some of the clients."""
        names = ("smoothness", "strong_convexity", "steepest", "samples")
        return replace(self, **{name: getattr(self, name)[clients] for name in names})

    def expected_smoothness(self, batch_size: int | None) -> Vector:
        """Return L_i + (max_j L_ij − L_i)/b, the smoothness of the mean of b random samples (all samples: L_i)."""
        if batch_size is None:
            return self.smoothness
        mixed = self.smoothness + np.maximum(self.steepest - self.smoothness, 0) / batch_size
        return np.where(self.samples <= batch_size, self.smoothness, mixed)


@dataclass(frozen=True)
class ClientScores:
    """Scores of one model on every client.

    Attributes:
        names: the clients.
        loss: f_i(x) on the chosen split, regulariser included.
        accuracy: share of correct labels; NaN for regression.
        counts: number of samples.
    """

    names: tuple[str, ...]
    loss: Vector
    accuracy: Vector
    counts: NDArray[np.int64] = field(repr=False)


class Restriction(NamedTuple):
    """Second-order expansion of the clients' losses at one point, restricted to the span of V = [v_1 … v_k].

    Clients compute with tensors, the server with arrays.

    Attributes:
        slopes: g_i = Vᵀc_i, (N, k).
        curvature: Q = Σ w_i VᵀH_iV, (k, k).
        sizes: ‖c_i‖² in the metric D⁻¹, (N,).
    """

    slopes: Any
    curvature: Any
    sizes: Any
