r"""The narrow waist: what a server may ask of its clients, and nothing else.

Algorithms are written against `Federation` once; runtimes (a `Cohort` in this process, real silos elsewhere) implement
it. Algorithms ask for vectors only as weighted sums (`.sum(weights)`), so that secure aggregation can take the place of
plain sums; per client they see scalars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Constants:
    """What is known of the clients' losses before the first round (N scalars each).

    Attributes:
        smoothness: L_i, the Lipschitz constant of ∇f_i (an estimate where the loss is not convex).
        strong_convexity: μ_i with f_i μ_i-strongly convex; 0 where there is none.
        convex: whether every f_i is convex.
    """

    smoothness: Vector
    strong_convexity: Vector
    convex: bool


@dataclass(frozen=True)
class LocalPlan:
    """What every client does between two exchanges (Algorithm 2 of the paper).

    Attributes:
        steps: J, the number of local steps.
        rate: η_ℓ; `None` lets each client take its own `scale`/L_i.
        scale: the factor on 1/L_i when `rate` is `None`.
        batch_size: samples per local gradient; `None` for all of them.
        key: seeds the choice of minibatches: the same key, the same batches.
    """

    steps: int
    rate: float | None = None
    scale: float = 1.0
    batch_size: int | None = None
    key: tuple[int, ...] = (0,)


@dataclass
class Traffic:
    """Communication since the start, summed over clients; evaluation for the logs is not counted."""

    exchanges: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def add(self, *, up: int = 0, down: int = 0, exchanges: int = 0) -> None:
        """Count one message pattern: bytes from clients, bytes to clients, request-reply turns."""
        self.exchanges += exchanges
        self.bytes_up += up
        self.bytes_down += down

    def snapshot(self) -> Traffic:
        """A copy that later traffic does not change."""
        return replace(self)

    def restore(self, earlier: Traffic) -> None:
        """Go back to `earlier` (a resumed or interrupted run)."""
        self.exchanges, self.bytes_up, self.bytes_down = (
            earlier.exchanges,
            earlier.bytes_up,
            earlier.bytes_down,
        )


@dataclass(frozen=True)
class ClientScores:
    """How one model does on every client.

    Attributes:
        names: the clients.
        loss: f_i(x) on the chosen split, regulariser included.
        accuracy: share of right labels; NaN for regression.
        counts: number of samples.
    """

    names: tuple[str, ...]
    loss: Vector
    accuracy: Vector
    counts: NDArray[np.int64] = field(repr=False)


@runtime_checkable
class Gradients(Protocol):
    """The clients' answers at one point x; each keeps its c_i = ∇f_i(x) to itself."""

    @property
    def losses(self) -> Vector:
        """L_i = f_i(x)."""

    def sum(self, weights: Vector) -> torch.Tensor:
        """Σ_i w_i c_i."""

    def project(self, direction: torch.Tensor) -> Vector:
        """⟨c_i, v⟩ per client, for a direction v that the clients can form from what they were sent."""

    def norms(self) -> Vector:
        """‖c_i‖² per client."""

    @property
    def rounding(self) -> tuple[Vector, Vector]:
        """Bounds on the rounding errors of L_i and, in norm, of c_i: two scalars that come with the losses."""


@runtime_checkable
class Updates(Protocol):
    """The clients' local work d_i = x − u_{i,J} = η_i J Δu_i."""

    def sum(self, weights: Vector) -> torch.Tensor:
        """Σ_i w_i d_i."""


@runtime_checkable
class Federation(Protocol):
    """N clients that keep their data and answer questions about a common parameter vector x ∈ R^d."""

    @property
    def names(self) -> Sequence[str]:
        """The clients, in a fixed order."""

    @property
    def traffic(self) -> Traffic:
        """Everything sent so far."""

    @property
    def fingerprint(self) -> str:
        """Identifies model, clients and data, so that a checkpoint is never resumed on another problem."""

    def constants(self) -> Constants:
        """Smoothness and convexity of the clients' losses."""

    def start(self) -> torch.Tensor:
        """The default x⁰ (zero for linear models, the module's own parameters otherwise)."""

    def gradients(self, x: torch.Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)) -> Gradients:
        """Losses and gradients at x, over all samples or over a seeded minibatch."""

    def local_updates(self, x: torch.Tensor, at: Gradients, correction: torch.Tensor, plan: LocalPlan) -> Updates:
        """J local steps u ← u − η_i (g_i(u) − c_i + correction) from x, with c_i as answered in `at`."""

    def evaluate(self, x: torch.Tensor, split: str = "train") -> ClientScores:
        """Per-client scores of x on the "train" or "test" samples."""
