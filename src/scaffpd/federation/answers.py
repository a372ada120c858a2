"""What a server has of its clients' answers: constants, numbers of each, vectors that it may add up; and their cost."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation.questions import (
    Clients,
    Curvature,
    Diagonal,
    GradientsAt,
    Project,
    Question,
    Reply,
    Vector,
    Vectors,
)

if TYPE_CHECKING:
    from scaffpd.federation import Federation


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
        corrects: whether local steps can be corrected; Adam's cannot.
    """

    smoothness: Vector
    strong_convexity: Vector
    convex: bool
    steepest: Vector
    samples: NDArray[np.int64]
    quadratic: bool = False
    noisy: bool = field(default=False, metadata={"transient": True})  # known before a run is resumed
    first_order: bool = field(default=False, metadata={"transient": True})
    corrects: bool = field(default=True, metadata={"transient": True})

    def only(self, clients: list[int]) -> Constants:
        """The same for some of the clients."""
        names = ("smoothness", "strong_convexity", "steepest", "samples")
        return replace(self, **{name: getattr(self, name)[clients] for name in names})

    def expected_smoothness(self, batch_size: int | None) -> Vector:
        """L_i + (max_j L_ij − L_i)/b: how steep the mean of b random samples is (all samples: L_i itself)."""
        if batch_size is None:
            return self.smoothness
        mixed = self.smoothness + np.maximum(self.steepest - self.smoothness, 0) / batch_size
        return np.where(self.samples <= batch_size, self.smoothness, mixed)


@dataclass
class Traffic:
    """Communication since the start, summed over clients, as the method needs it; evaluation is not counted."""

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
        vars(self).update(vars(earlier))


class Restriction(NamedTuple):
    """The clients' losses at one point to second order, seen in the span of V = [v_1 … v_k].

    Clients compute with tensors, the server with arrays.

    Attributes:
        slopes: g_i = Vᵀc_i, (N, k).
        curvature: Q = Σ w_i VᵀH_iV, (k, k).
        sizes: ‖c_i‖² in the metric D⁻¹, (N,).
    """

    slopes: Any
    curvature: Any
    sizes: Any


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


@dataclass(frozen=True)
class ClientSelection:
    """Some clients.

    Attributes:
        chosen: their numbers, in the order of their answers.
        names: of all clients.
        like: a tensor of the format of x.
        everyone: whether these are all clients, in order.
    """

    chosen: list[int]
    names: Sequence[str]
    like: Tensor
    everyone: bool = False

    @cached_property
    def index(self) -> slice | NDArray[np.int64]:
        """The same numbers, for NumPy."""
        return slice(None) if self.everyone else np.array(self.chosen)

    def scattered(self, values: Tensor) -> Vector:
        """Put per-client numbers in the order of all clients, NaN for those that were not asked."""
        if self.everyone:
            return np.array(values.double().cpu().numpy())
        out = np.full((len(self.names), *values.shape[1:]), np.nan)
        out[self.index] = values.double().cpu().numpy()
        return out

    def checked(self, weights: Vector) -> Vector:
        """One weight a client; who was not asked must have none."""
        w = np.asarray(weights, dtype=np.float64)
        outside = not self.everyone and np.count_nonzero(w) != np.count_nonzero(w[self.index])
        if w.shape != (len(self.names),) or outside:
            raise InputError("Weights must be zero for clients that were not asked.")
        return w


class Answers:
    """What some clients have answered to one question; their vectors stay with them.

    Attributes:
        main: the vector that `sum` adds up.
    """

    main = ""

    def __init__(self, federation: Federation, question: Any, asked: ClientSelection, reply: Reply) -> None:
        self.federation, self.question, self.asked, self.reply = federation, question, asked, reply
        self.chosen = asked.chosen

    def numbers(self, name: str) -> Vector:
        """One number, or row, of every client; NaN for those that were not asked."""
        return self.asked.scattered(self.reply.numbers[name]())

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i v_i; clients that have no v_i must have weight zero."""
        return self.added(self.main, weights)

    def added(self, part: str, weights: Vector) -> Tensor:
        """Σ_i w_i v_i of any part of the answer."""
        if part not in self.reply.vectors:
            known = ", ".join(self.reply.vectors) or "none"
            raise InputError(f"The answers have no vectors {part!r} to add up (they have {known}).")
        return self.federation.sums.sum(part, self.reply.vectors[part], self.asked, self.asked.checked(weights))

    def each(self) -> Tensor:
        """The v_i themselves, (n, …), in the order of the clients that were asked: for servers that may see them."""
        if self.federation.sums.hides:
            _hidden()
        return self.reply.vectors[self.main].each()


def _hidden() -> NoReturn:
    raise InputError("Secure sums hide every client's own vector: use a method that needs sums only, such as ScaffPD.")


class Gradients(Answers):
    """The clients' answers at one point x; each keeps its c_i = ∇f_i(x) to itself.

    Attributes:
        losses: L_i = f_i(x); NaN for clients that were not asked.
    """

    main = "c"
    losses: Vector

    def __init__(self, federation: Federation, question: GradientsAt, asked: ClientSelection, reply: Reply) -> None:
        super().__init__(federation, question, asked, reply)
        self.losses = self.numbers("loss")
        self._sums: dict[bytes, Tensor] = {}
        self._error = 0.0

    @property
    def x(self) -> Tensor:
        """Where they were asked."""
        x: Tensor = self.question.x
        return x

    @property
    def rounding(self) -> tuple[Vector, Vector]:
        """Bounds on the errors of L_i and, in norm, of c_i; what the format of a sum adds is everybody's part of it."""
        return self.numbers("loss_error"), self.numbers("gradient_error") + self._error

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i c_i; a masked sum is not asked for twice."""
        if not self.federation.sums.hides:
            return super().sum(weights)
        name = np.asarray(weights, dtype=np.float64).tobytes()
        if name not in self._sums:
            self._sums[name] = super().sum(weights)
            self._error = max(self._error, self.federation.sums.error(len(self.x), weights))
        return self._sums[name]

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per client, for a direction v that the clients can form from what they were sent."""
        if not self.federation.sums.projections:
            _hidden()
        return self._ask(Project(self.question, direction)).numbers("slope")

    def norms(self) -> Vector:
        """‖c_i‖² per client: one exchange, a scalar up."""
        self.federation.count(exchanges=1, up=len(self.chosen))
        return self.asked.scattered(self.reply.vectors["c"].norms())

    def restriction(self, V: Tensor, weights: Vector, metric: Tensor) -> Restriction:
        """Slopes and curvature along the columns of V, of which the last sum is the only one that clients lack."""
        if not self.federation.sums.projections:
            raise InputError(
                "This method has every client show the server its gradient along several directions, which secure "
                "sums are meant to hide: use ScaffPD, or allow it with projections=True."
            )
        seen = self._ask(Curvature(self.question, V, metric))
        Q = seen.added("curvature", weights).double().cpu().numpy()
        return Restriction(seen.numbers("slopes"), (Q + Q.T) / 2, seen.numbers("size"))

    def diagonal(self, weights: Vector) -> Tensor:
        """Σ_i w_i diag ∇²f_i(x); the sum goes down to everyone."""
        self.federation.count(down=len(self.x) * len(self.chosen))
        return self._ask(Diagonal(self.question)).added("diagonal", weights)

    def diagonals(self) -> Tensor:
        """Every client's diag ∇²f_i(x), (n, d): like the next one, for servers that may see single vectors."""
        if self.federation.sums.hides:
            _hidden()
        return self._ask(Diagonal(self.question)).reply.vectors["diagonal"].each()

    def hessians(self) -> Tensor:
        """Every client's ∇²f_i(x), (n, d, d), in float64: the matrices that `restriction` adds up, with V = I."""
        if self.federation.sums.hides:
            _hidden()
        whole = torch.eye(len(self.x)).to(self.x)
        seen = self._ask(Curvature(self.question, whole, torch.ones_like(self.x)))
        return seen.reply.vectors["curvature"].each().double()

    def _ask(self, question: Question) -> Answers:
        return self.federation.ask(question, self.chosen)


class Updates(Answers):
    """The clients' local work d_i = x − u_{i,J} = η_i J Δu_i."""

    main = "d"

    def norms(self) -> Vector:
        """‖d_i‖² per client: scalars that go up with d_i."""
        self.federation.count(up=len(self.chosen))
        return self.asked.scattered(self.reply.vectors["d"].norms())

    def snapshot(self, weights: Vector) -> Tensor:
        """Σ_i w_i (x − u_{i,t'}) for the plan's snapshot t'."""
        if "snapshot" not in self.reply.vectors:
            raise InputError("There is no snapshot: the plan asked for none.")
        return self.added("snapshot", weights)


@dataclass(frozen=True)
class Memory:
    """Vectors that clients keep from round to round, such as the control variates of SCAFFOLD.

    A value like any other: `plus` returns a new one, so that a state can be kept, compared and taken back.

    Attributes:
        vectors: v_i, (N, d).
        federation: whose clients keep them.
    """

    vectors: Tensor = field(repr=False)
    federation: Federation = field(repr=False, metadata={"transient": True})

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i v_i."""
        asked, held = self.federation.selection(None), Vectors(lambda w: w @ self.vectors, lambda: self.vectors)
        return self.federation.sums.sum("memory", held, asked, asked.checked(weights))

    def plus(self, scale: float, vectors: Answers | Memory | Tensor, clients: Clients = None) -> Memory:
        """v_i + scale·w_i for the given clients (all by default); a single tensor is the same w for everyone."""
        rows, added = self._rows(vectors, clients)
        changed = self.vectors.clone()
        changed[rows] += scale * added
        return replace(self, vectors=changed)

    def replaced(self, vectors: Answers | Memory, clients: Clients = None) -> Memory:
        """w_i in the place of v_i for the given clients."""
        rows, new = self._rows(vectors, clients)
        changed = self.vectors.clone()
        changed[rows] = new
        return replace(self, vectors=changed)

    def _rows(self, vectors: Answers | Memory | Tensor, clients: Clients) -> tuple[list[int] | slice, Tensor]:
        """Whose vectors change, and what every client has of its own to change them by."""
        chosen = None if clients is None else self.federation.selection(clients).chosen
        if isinstance(vectors, Tensor):
            return slice(None) if chosen is None else chosen, vectors
        if isinstance(vectors, Memory):
            return (slice(None), vectors.vectors) if chosen is None else (chosen, vectors.vectors[chosen])
        own, each = vectors.chosen, vectors.reply.vectors[vectors.main].each()
        if chosen is None or chosen == own:
            return own, each
        if not set(chosen) <= set(own):
            raise InputError("Clients can only keep vectors that they have.")
        place = {client: k for k, client in enumerate(own)}
        return chosen, each[[place[i] for i in chosen]]


BUCKETS = 32  # of a sketch


class Sketch:
    """Random sums of a vector's entries: distances of sketches are nearly those of vectors; `seed` is secret."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed
        self._drawn: dict[int, tuple[NDArray[np.int64], Vector]] = {}

    def __call__(self, vector: NDArray[Any]) -> Vector:
        """Return the sketch of a vector; short vectors keep their distances exactly."""
        own = np.asarray(vector, dtype=np.float64).ravel()
        if len(own) not in self._drawn:
            random = np.random.default_rng([self.seed, len(own)])
            signs = np.where(random.integers(0, 2, len(own)) == 0, 1.0, -1.0)
            self._drawn[len(own)] = random.permutation(len(own)) % BUCKETS, signs
        places, signs = self._drawn[len(own)]
        return np.bincount(places, signs * own, BUCKETS).astype(np.float64)
