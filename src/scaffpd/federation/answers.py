"""The server's view of its clients' answers: constants, numbers per client, vectors to add up, and their cost."""

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
        """Select some of the clients."""
        names = ("smoothness", "strong_convexity", "steepest", "samples")
        return replace(self, **{name: getattr(self, name)[clients] for name in names})

    def expected_smoothness(self, batch_size: int | None) -> Vector:
        """Return L_i + (max_j L_ij − L_i)/b, the smoothness of the mean of b random samples (all samples: L_i)."""
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
        """Return a copy that later traffic does not change."""
        return replace(self)

    def restore(self, earlier: Traffic) -> None:
        """Go back to `earlier` (a resumed or interrupted run)."""
        vars(self).update(vars(earlier))


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


@dataclass(frozen=True)
class ClientSelection:
    """Selected clients.

    Attributes:
        chosen: their numbers, in the order of their answers.
        names: names of all clients.
        like: a tensor in the format of x.
        everyone: whether these are all clients, in order.
    """

    chosen: list[int]
    names: Sequence[str]
    like: Tensor
    everyone: bool = False

    @cached_property
    def index(self) -> slice | NDArray[np.int64]:
        """Numbers of the clients, for NumPy."""
        return slice(None) if self.everyone else np.array(self.chosen)

    def scattered(self, values: Tensor) -> Vector:
        """Put per-client numbers in the order of all clients, NaN for those that were not asked."""
        if self.everyone:
            return np.array(values.double().cpu().numpy())
        out = np.full((len(self.names), *values.shape[1:]), np.nan)
        out[self.index] = values.double().cpu().numpy()
        return out

    def checked(self, weights: Vector) -> Vector:
        """Check the weights, one per client: zero for clients that were not asked."""
        w = np.asarray(weights, dtype=np.float64)
        outside = not self.everyone and np.count_nonzero(w) != np.count_nonzero(w[self.index])
        if w.shape != (len(self.names),) or outside:
            raise InputError("Weights must be zero for clients that were not asked.")
        return w


class Answers:
    """Answers of some clients to one question; their vectors stay with them.

    Attributes:
        main: the vector that `sum` adds up.
    """

    main = ""

    def __init__(self, federation: Federation, question: Any, asked: ClientSelection, reply: Reply) -> None:
        self.federation, self.question, self.asked, self.reply = federation, question, asked, reply
        self.chosen = asked.chosen

    def numbers(self, name: str) -> Vector:
        """Return one number, or row, of every client; NaN for clients that were not asked."""
        return self.asked.scattered(self.reply.numbers[name]())

    def sum(self, weights: Vector) -> Tensor:
        """Return Σ_i w_i v_i; clients without a v_i must have weight zero."""
        return self.added(self.main, weights)

    def added(self, part: str, weights: Vector) -> Tensor:
        """Return Σ_i w_i v_i of any part of the answer."""
        if part not in self.reply.vectors:
            known = ", ".join(self.reply.vectors) or "none"
            raise InputError(f"The answers have no vectors {part!r} to add up (they have {known}).")
        return self.federation.sums.sum(part, self.reply.vectors[part], self.asked, self.asked.checked(weights))

    def each(self) -> Tensor:
        """Return the v_i themselves, (n, …), in the order of the clients asked: for servers that may see them."""
        if self.federation.sums.hides:
            _hidden()
        return self.reply.vectors[self.main].each()


def _hidden() -> NoReturn:
    raise InputError("Secure sums hide every client's own vector: use a method that needs sums only, such as ScaffPD.")


class Gradients(Answers):
    """Clients' answers at one point x; each keeps its c_i = ∇f_i(x) to itself.

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
        """Point of the question."""
        x: Tensor = self.question.x
        return x

    @property
    def rounding(self) -> tuple[Vector, Vector]:
        """Bound the errors of L_i and, in norm, of c_i, with each client's share of the rounding of a sum."""
        return self.numbers("loss_error"), self.numbers("gradient_error") + self._error

    def sum(self, weights: Vector) -> Tensor:
        """Return Σ_i w_i c_i; a masked sum is asked for only once."""
        if not self.federation.sums.hides:
            return super().sum(weights)
        name = np.asarray(weights, dtype=np.float64).tobytes()
        if name not in self._sums:
            self._sums[name] = super().sum(weights)
            self._error = max(self._error, self.federation.sums.error(len(self.x), weights))
        return self._sums[name]

    def project(self, direction: Tensor) -> Vector:
        """Return ⟨c_i, v⟩ per client, for a direction v that clients can form from earlier messages."""
        if not self.federation.sums.projections:
            _hidden()
        return self._ask(Project(self.question, direction)).numbers("slope")

    def norms(self) -> Vector:
        """Return ‖c_i‖² per client: one exchange, a scalar up."""
        self.federation.count(exchanges=1, up=len(self.chosen))
        return self.asked.scattered(self.reply.vectors["c"].norms())

    def restriction(self, V: Tensor, weights: Vector, metric: Tensor) -> Restriction:
        """Return slopes and curvature along the columns of V; clients lack only the last sum among them."""
        if not self.federation.sums.projections:
            raise InputError(
                "This method has every client show the server its gradient along several directions, which secure "
                "sums are meant to hide: use ScaffPD, or allow it with projections=True."
            )
        seen = self._ask(Curvature(self.question, V, metric))
        Q = seen.added("curvature", weights).double().cpu().numpy()
        return Restriction(seen.numbers("slopes"), (Q + Q.T) / 2, seen.numbers("size"))

    def diagonal(self, weights: Vector) -> Tensor:
        """Return Σ_i w_i diag ∇²f_i(x); the sum is sent to all clients."""
        self.federation.count(down=len(self.x) * len(self.chosen))
        return self._ask(Diagonal(self.question)).added("diagonal", weights)

    def diagonals(self) -> Tensor:
        """Return every client's diag ∇²f_i(x), (n, d): for servers that may see single vectors."""
        if self.federation.sums.hides:
            _hidden()
        return self._ask(Diagonal(self.question)).reply.vectors["diagonal"].each()

    def hessians(self) -> Tensor:
        """Return every client's ∇²f_i(x), (n, d, d), in float64, the matrices that `restriction` adds up for V = I."""
        if self.federation.sums.hides:
            _hidden()
        whole = torch.eye(len(self.x)).to(self.x)
        seen = self._ask(Curvature(self.question, whole, torch.ones_like(self.x)))
        return seen.reply.vectors["curvature"].each().double()

    def _ask(self, question: Question) -> Answers:
        return self.federation.ask(question, self.chosen)


class Updates(Answers):
    """Clients' local work d_i = x − u_{i,J} = η_i J Δu_i."""

    main = "d"

    def norms(self) -> Vector:
        """Return ‖d_i‖² per client: scalars that go up with d_i."""
        self.federation.count(up=len(self.chosen))
        return self.asked.scattered(self.reply.vectors["d"].norms())

    def snapshot(self, weights: Vector) -> Tensor:
        """Return Σ_i w_i (x − u_{i,t'}) for the plan's snapshot t'."""
        if "snapshot" not in self.reply.vectors:
            raise InputError("There is no snapshot: the plan asked for none.")
        return self.added("snapshot", weights)


@dataclass(frozen=True)
class Memory:
    """Vectors that clients store from round to round, such as the control variates of SCAFFOLD.

    It is immutable: `plus` returns a new one, so that a state can be stored, compared and restored.

    Attributes:
        vectors: v_i, (N, d).
        federation: federation of the clients.
    """

    vectors: Tensor = field(repr=False)
    federation: Federation = field(repr=False, metadata={"transient": True})

    def sum(self, weights: Vector) -> Tensor:
        """Return Σ_i w_i v_i."""
        asked, held = self.federation.selection(None), Vectors(lambda w: w @ self.vectors, lambda: self.vectors)
        return self.federation.sums.sum("memory", held, asked, asked.checked(weights))

    def plus(self, scale: float, vectors: Answers | Memory | Tensor, clients: Clients = None) -> Memory:
        """Return v_i + scale·w_i for the given clients (all by default); a single tensor is the same w for all."""
        rows, added = self._rows(vectors, clients)
        changed = self.vectors.clone()
        changed[rows] += scale * added
        return replace(self, vectors=changed)

    def replaced(self, vectors: Answers | Memory, clients: Clients = None) -> Memory:
        """Replace v_i by w_i for the given clients."""
        rows, new = self._rows(vectors, clients)
        changed = self.vectors.clone()
        changed[rows] = new
        return replace(self, vectors=changed)

    def _rows(self, vectors: Answers | Memory | Tensor, clients: Clients) -> tuple[list[int] | slice, Tensor]:
        """Return the clients whose vectors change, and the change of each."""
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


BUCKETS = 32  # buckets of a sketch


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
