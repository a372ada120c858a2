"""Values that pass the waist: plans of local work, what clients report of themselves, traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vector = NDArray[np.float64]
Clients = Sequence[int] | NDArray[np.int64] | None  # clients that a question goes to; `None`: all
Key = tuple[int, ...]  # seeds random choices: the same key, the same choice
Array = TypeVar("Array", Tensor, NDArray[np.float64])


def same_point(a: Tensor, b: Tensor) -> bool:
    """Return whether two points are equal."""
    return a is b or torch.equal(a, b)


@dataclass(frozen=True)
class LocalPlan:
    """Local work between two exchanges: J steps u ← u − η_i (g_i(u) − c_i + c + μ(u − x)) from u =
    x.

    Algorithm 2 of the paper has μ = 0; without c_i and c these are the plain local steps of FedAvg.

    Attributes:
        steps: J, the number of local steps.
        rate: η_ℓ; `None` lets each client take its own `scale`/L_i.
        scale: the factor on 1/L_i when `rate` is `None`.
        batch_size: samples per local gradient; `None` for all of them.
        key: seeds the choice of minibatches: the same key, the same batches.
        prox: μ, the pull back to x (FedProx).
        snapshot: t', a step whose iterate is sent up as well (DRFA).
        each: J_i of the clients that are asked, in their order (FedNova); `steps` is the largest of
            them.
    """

    steps: int
    rate: float | None = None
    scale: float = 1.0
    batch_size: int | None = None
    key: Key = (0,)
    prox: float = 0.0
    snapshot: int | None = None
    each: tuple[int, ...] | None = None

    def of(self, client: int) -> int:
        """Return J of one client, by its place among those that are asked."""
        return self.steps if self.each is None else self.each[client]

    def up_to(self, steps: int) -> LocalPlan:
        """Return the plan of the first steps."""
        return replace(
            self, steps=steps, each=self.each and tuple(min(own, steps) for own in self.each)
        )

    def counts(self, like: Tensor) -> Tensor | int:
        """Return J, or every J_i as a tensor beside `like`."""
        return self.steps if self.each is None else torch.tensor(self.each, device=like.device)

    def makes(self, step: int, like: Tensor) -> Tensor | float:
        """Return 1 for clients that make this step, counted from 0, and 0 for the others, to
        multiply (n, d).
        """
        return 1.0 if self.each is None else (torch.tensor(self.each)[:, None] > step).to(like)


@dataclass(frozen=True)
class ProximalPlan:
    """Local model to solve: d_i ≈ argmin ½dᵀH_i d + (β/2)‖d‖²_D − ⟨c, d⟩, in place of a number of
    local steps.

    Attributes:
        pull: β.
        metric: D, the diagonal of a matrix.
        limit: most local steps if the model is not solved in closed form.
        steepest: the largest L_i of all participants. All take the same number of steps, and a
            client that computes by itself does not know the others.
    """

    pull: float
    metric: Tensor
    limit: int = 30
    steepest: float = 0.0


@dataclass(frozen=True)
class Constants:
    """Constants of the clients' losses, known before the first round (N scalars each).

    Attributes:
        smoothness: L_i, the Lipschitz constant of ∇f_i (an estimate if the loss is not convex).
        strong_convexity: μ_i with f_i μ_i-strongly convex; 0 if it is not.
        convex: whether every f_i is convex.
        steepest: max_j L_ij, the smoothness of a client's steepest sample; minibatches need shorter
            steps.
        samples: n_i, the number of samples of a client.
        quadratic: whether every f_i is a quadratic function, with one Hessian everywhere.
        noisy: whether clients clip their answers and add noise to them, for privacy.
        first_order: whether clients refuse questions about curvature, because their vectors are
            masked.
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
        """Return L_i + (max_j L_ij − L_i)/b, the smoothness of the mean of b random samples (all
        samples: L_i).
        """
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


class Restriction(NamedTuple, Generic[Array]):
    """Second-order expansion of the clients' losses at one point, restricted to the span of V =
    [v_1 … v_k].

    Clients compute with tensors, the server with arrays.

    Attributes:
        slopes: g_i = Vᵀc_i, (N, k).
        curvature: Q = Σ w_i VᵀH_iV, (k, k).
        sizes: ‖c_i‖² in the metric D⁻¹, (N,).
    """

    slopes: Array
    curvature: Array
    sizes: Array


@dataclass
class Traffic:
    """Communication since the start, summed over clients, as the method needs it; evaluation is not
    counted.
    """

    exchanges: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def add(self, *, up: int = 0, down: int = 0, exchanges: int = 0) -> None:
        """Count one message pattern: bytes from clients, bytes to clients, request-reply turns."""
        self.exchanges += exchanges
        self.bytes_up += up
        self.bytes_down += down

    def snapshot(self) -> Traffic:
        """Return a copy that later traffic does not change."""
        return replace(self)

    def restore(self, earlier: Traffic) -> None:
        """Go back to `earlier` (a resumed or interrupted run)."""
        vars(self).update(vars(earlier))
