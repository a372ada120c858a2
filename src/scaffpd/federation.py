r"""The narrow waist: what a server may ask of its clients, and nothing else.

Algorithms are written against `Federation` once; runtimes (a `Cohort` in this process, real silos elsewhere) implement
it. Algorithms ask for vectors only as weighted sums (`.sum(weights)`), so that secure aggregation can take the place of
plain sums; per client they see scalars. Those that need more say so: `gram`, `each` and `diagonals` of `Gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Clients = Sequence[int] | NDArray[np.int64] | None  # which clients a question goes to; `None` is all of them


def same_point(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two points are one."""
    return a is b or torch.equal(a, b)


@dataclass(frozen=True)
class Constants:
    """What is known of the clients' losses before the first round (N scalars each).

    Attributes:
        smoothness: L_i, the Lipschitz constant of ∇f_i (an estimate where the loss is not convex).
        strong_convexity: μ_i with f_i μ_i-strongly convex; 0 where there is none.
        convex: whether every f_i is convex.
        steepest: max_j L_ij, the smoothness of a client's steepest sample; minibatches need shorter steps.
        samples: n_i, how many samples a client has.
        quadratic: whether every f_i is a quadratic function, with one Hessian everywhere.
        noisy: whether clients clip their answers and add noise to them, for privacy.
        first_order: whether clients answer no questions about curvature, for their vectors are masked.
    """

    smoothness: Vector
    strong_convexity: Vector
    convex: bool
    steepest: Vector
    samples: NDArray[np.int64]
    quadratic: bool = False
    noisy: bool = field(default=False, metadata={"transient": True})  # known before a run is resumed
    first_order: bool = field(default=False, metadata={"transient": True})

    def expected_smoothness(self, batch_size: int | None) -> Vector:
        """L_i + (max_j L_ij − L_i)/b: how steep the mean of b random samples is (all samples: L_i itself)."""
        if batch_size is None:
            return self.smoothness
        mixed = self.smoothness + np.maximum(self.steepest - self.smoothness, 0) / batch_size
        return np.where(self.samples <= batch_size, self.smoothness, mixed)


@dataclass(frozen=True)
class LocalPlan:
    """What every client does between two exchanges: J steps u ← u − η_i (g_i(u) − c_i + c + μ(u − x)) from u = x.

    Algorithm 2 of the paper has μ = 0; without c_i and c these are the plain local steps of FedAvg.

    Attributes:
        steps: J, the number of local steps.
        rate: η_ℓ; `None` lets each client take its own `scale`/L_i.
        scale: the factor on 1/L_i when `rate` is `None`.
        batch_size: samples per local gradient; `None` for all of them.
        key: seeds the choice of minibatches: the same key, the same batches.
        prox: μ, the pull back to x (FedProx).
        snapshot: t', a step whose iterate is handed up as well (DRFA).
    """

    steps: int
    rate: float | None = None
    scale: float = 1.0
    batch_size: int | None = None
    key: tuple[int, ...] = (0,)
    prox: float = 0.0
    snapshot: int | None = None


@dataclass(frozen=True)
class ProximalPlan:
    """A local model to be solved: d_i ≈ argmin ½dᵀH_i d + (β/2)‖d‖²_D − ⟨c, d⟩, in place of a number of local steps.

    Attributes:
        pull: β.
        metric: D, the diagonal of a matrix.
        limit: the most local steps where the model is not solved in closed form.
        steepest: the largest L_i of all who take part. All make the same number of steps, and a client that computes
            by itself does not know the others.
    """

    pull: float
    metric: torch.Tensor
    limit: int = 30
    steepest: float = 0.0


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
class Restriction:
    """The clients' losses at one point to second order, seen in the span of V = [v_1 … v_k].

    Attributes:
        slopes: g_i = Vᵀc_i, (N, k).
        curvature: Q = Σ w_i VᵀH_iV, (k, k).
        sizes: ‖c_i‖² in the metric D⁻¹, (N,).
    """

    slopes: NDArray[np.float64]
    curvature: NDArray[np.float64]
    sizes: Vector


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
class Vectors(Protocol):
    """One vector per client, each kept by its client; the server may ask for weighted sums."""

    def sum(self, weights: Vector) -> torch.Tensor:
        """Σ_i w_i v_i; clients that have no v_i must have weight zero."""


@runtime_checkable
class Gradients(Vectors, Protocol):
    """The clients' answers at one point x; each keeps its c_i = ∇f_i(x) to itself."""

    @property
    def losses(self) -> Vector:
        """L_i = f_i(x); NaN for clients that were not asked."""

    def project(self, direction: torch.Tensor) -> Vector:
        """⟨c_i, v⟩ per client, for a direction v that the clients can form from what they were sent."""

    def norms(self) -> Vector:
        """‖c_i‖² per client."""

    def restriction(self, V: torch.Tensor, weights: Vector, metric: torch.Tensor) -> Restriction:
        """Slopes and curvature along the columns of V, of which the last sum is the only one that clients lack."""

    def diagonal(self, weights: Vector) -> torch.Tensor:
        """Σ_i w_i diag ∇²f_i(x)."""

    def gram(self) -> NDArray[np.float64]:
        """⟨c_i, c_j⟩ for all pairs: like the next two, for servers that may see every client's own vector."""

    def each(self) -> torch.Tensor:
        """The c_i themselves, (N, d), in the order of the clients that were asked."""

    def diagonals(self) -> torch.Tensor:
        """Every client's diag ∇²f_i(x), (N, d), in the same order."""

    @property
    def rounding(self) -> tuple[Vector, Vector]:
        """Bounds on the rounding errors of L_i and, in norm, of c_i: two scalars that come with the losses."""


@runtime_checkable
class Updates(Vectors, Protocol):
    """The clients' local work d_i = x − u_{i,J} = η_i J Δu_i."""

    def norms(self) -> Vector:
        """‖d_i‖² per client: scalars that go up with d_i."""

    def snapshot(self, weights: Vector) -> torch.Tensor:
        """Σ_i w_i (x − u_{i,t'}) for the plan's snapshot t'."""


@runtime_checkable
class Memory(Vectors, Protocol):
    """Vectors that clients keep from round to round, such as the control variates of SCAFFOLD.

    A value like any other: `plus` returns a new one, so that a state can be kept, compared and taken back. A runtime's
    own class is a dataclass of tensors, so that a checkpoint can hold it.
    """

    def plus(self, scale: float, vectors: Vectors | torch.Tensor, clients: Clients = None) -> Memory:
        """v_i + scale·w_i for the given clients (all by default); a single tensor is the same w for everyone."""

    def replaced(self, vectors: Vectors, clients: Clients = None) -> Memory:
        """w_i in the place of v_i for the given clients."""


@runtime_checkable
class Federation(Protocol):
    """N clients that keep their data and answer questions about a common parameter vector x ∈ R^d.

    Questions go to all clients, or to some (`clients`, distinct numbers): only those compute, and only they count as
    traffic.
    """

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

    def memory(self) -> Memory:
        """A zero vector at every client."""

    def losses(
        self,
        x: torch.Tensor,
        batch_size: int | None = None,
        key: tuple[int, ...] = (0,),
        clients: Clients = None,
        alone: bool = True,
    ) -> Vector:
        """f_i(x), over all samples or over a seeded minibatch; NaN for clients that were not asked.

        Where it is not `alone`, the next question at the same x goes out with it, as one exchange.
        """

    def gradients(
        self,
        x: torch.Tensor,
        batch_size: int | None = None,
        key: tuple[int, ...] = (0,),
        clients: Clients = None,
        alone: bool = True,
        coefficients_sent: int | None = None,
    ) -> Gradients:
        """Losses and gradients at x, over all samples or over a seeded minibatch; `alone` as for `losses`.

        Where clients can form x from vectors that they have, `coefficients_sent` numbers go down in place of x.
        """

    def local_updates(
        self,
        x: torch.Tensor,
        at: Gradients | Memory | None,
        correction: torch.Tensor | None,
        plan: LocalPlan,
        clients: Clients = None,
    ) -> Updates:
        """J local steps u ← u − η_i (g_i(u) − c_i + correction) from x.

        c_i is what the client answered (`Gradients`) or kept (`Memory`); `None` leaves c_i or the correction out.
        """

    def proximal_steps(self, at: Gradients, correction: torch.Tensor, plan: ProximalPlan) -> Updates:
        """The clients' local models at x, solved: d_i ≈ (∇²f_i + βD)⁻¹ correction."""

    def evaluate(self, x: torch.Tensor, split: str = "train") -> ClientScores:
        """Per-client scores of x on the "train" or "test" samples."""
