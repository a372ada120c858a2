"""Values that pass the waist: plans of local work, and what clients report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError

Vector = NDArray[np.float64]
Clients = Sequence[int] | NDArray[np.int64] | None  # clients that a question goes to; `None`: all
Key = tuple[int, ...]  # seeds random choices: the same key, the same choice
Strength = float | Sequence[float]  # one number, or one per feature and for the intercept
Array = TypeVar("Array", Tensor, NDArray[np.float64])


@dataclass(frozen=True)
class LocalPlan:
    """J local steps u ← u − η_i (g_i(u) − c_i + c + μ(u − x)) from u = x, between two exchanges.

    Algorithm 2 of the paper has μ = 0; without c_i and c these are the plain local steps of FedAvg.

    Attributes:
        steps: J, the number of local steps.
        rate: η_ℓ; `None` lets each client take its own `scale`/L_i.
        scale: the factor on 1/L_i when `rate` is `None`.
        batch_size: samples per local gradient; `None` for all of them.
        key: seeds the choice of minibatches: the same key, the same batches.
        prox: μ, the pull back to x (FedProx).
        snapshot: t', a step whose iterate is sent up as well (DRFA).
    """

    steps: int
    rate: float | None = None
    scale: float = 1.0
    batch_size: int | None = None
    key: Key = (0,)
    prox: float = 0.0
    snapshot: int | None = None


@dataclass(frozen=True)
class ProximalPlan:
    """Local model to solve, in place of local steps: argmin ½dᵀH_i d + (β/2)‖d‖²_D − ⟨c, d⟩."""

    pull: float  # β
    metric: Tensor  # D, the diagonal of a matrix, the same for all outputs of a feature


@dataclass(frozen=True)
class Constants:
    """Constants of the clients' losses, known before the first round (N scalars each).

    Attributes:
        smoothness: L_i, the Lipschitz constant of ∇f_i (an estimate if the loss is not convex).
        strong_convexity: μ_i with f_i μ_i-strongly convex; 0 if it is not.
        convex: whether every f_i is convex.
        steepest: max_j L_ij, of a client's steepest sample; minibatches need shorter steps.
        samples: n_i, the number of samples of a client.
        quadratic: whether every f_i is a quadratic function, with one Hessian everywhere.
        noisy: whether clients clip their answers and add noise to them, for privacy.
        first_order: whether clients refuse questions about curvature, because their vectors are
            masked.
        ridge: of every coordinate, public: every f_i minus ½ Σ_j (μ_i + ridge_j − min ridge) x_j²
            is convex, and errors e of gradients are Σ_j e_j²/ridge_j · min ridge. `None` if it is
            one number for all.
    """

    smoothness: Vector
    strong_convexity: Vector
    convex: bool
    steepest: Vector
    samples: NDArray[np.int64]
    quadratic: bool = False
    # these are known before a run is resumed
    noisy: bool = field(default=False, metadata={"transient": True})
    first_order: bool = field(default=False, metadata={"transient": True})
    ridge: Vector | None = field(default=None, metadata={"transient": True})

    def only(self, clients: list[int]) -> Constants:
        names = ("smoothness", "strong_convexity", "steepest", "samples")
        return replace(self, **{name: getattr(self, name)[clients] for name in names})

    def expected_smoothness(self, batch_size: int | None) -> Vector:
        """Return L_i + (max_j L_ij − L_i)/b, the smoothness of the mean of b random samples."""
        if batch_size is None:
            return self.smoothness
        mixed = self.smoothness + np.maximum(self.steepest - self.smoothness, 0) / batch_size
        return np.where(self.samples <= batch_size, self.smoothness, mixed)


@dataclass(frozen=True)
class ClientScores:
    """Scores of one model on every client.

    Attributes:
        names: the clients.
        loss: f_i(x) on the chosen split, regulariser included; for a `Personal` model the mean loss
            of the client's own u_i, without one.
        score: share of correct labels, concordance of times to an event; NaN for numbers.
        counts: number of samples.
    """

    names: tuple[str, ...]
    loss: Vector
    score: Vector
    counts: NDArray[np.int64] = field(repr=False)


class Restriction(NamedTuple, Generic[Array]):
    """The clients' losses at one point to second order, in the span of V = [v_1 … v_k].

    Clients compute with tensors, the server with arrays.
    """

    slopes: Array  # g_i = Vᵀc_i, (N, k)
    curvature: Array  # Q = Σ w_i VᵀH_iV, (k, k)
    sizes: Array  # ‖c_i‖² in the metric D⁻¹, (N,)


@dataclass(frozen=True)
class Spent:
    """Privacy cost of every client's answers so far, for each single one of its records.

    Attributes:
        names: the clients.
        epsilon: ε_i.
        delta: δ, the same for all.
    """

    names: tuple[str, ...]
    epsilon: Vector
    delta: float

    @property
    def worst(self) -> float:
        return float(self.epsilon.max())

    def __str__(self) -> str:
        return f"(ε, δ) = ({self.worst:.2f}, {self.delta:g})"


@dataclass(frozen=True)
class ReleaseCounts:
    """The most releases of a client, each over all of its records.

    A method states them before the first round, and the noise of private runs is solved from them.

    Attributes:
        gradients: of gradients; a local step is one.
        losses: of losses.
    """

    gradients: int = 0
    losses: int = 0

    @classmethod
    def over(cls, batch_size: int | None, gradients: int = 0, losses: int = 0) -> ReleaseCounts:
        """Count so many over all records; refuse minibatches."""
        if batch_size is not None:
            raise InputError(
                "private-minibatch",
                "Private clients answer with all of their records: leave batch_size out.",
            )
        return cls(gradients, losses)

    @classmethod
    def points(cls, n: int, batch_size: int | None = None) -> ReleaseCounts:
        """Count losses and gradients at n points."""
        return cls.over(batch_size, n, n)

    def __add__(self, other: ReleaseCounts) -> ReleaseCounts:
        """Add up two plans that share one budget."""
        return ReleaseCounts(self.gradients + other.gradients, self.losses + other.losses)
