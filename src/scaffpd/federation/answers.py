"""Clients' answers as an algorithm sees them: who was asked, numbers per client, and vectors as
weighted sums, plain or masked (`Summer`); and what was sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation.plans import Clients, Restriction, Vector
from scaffpd.federation.questions import (
    WIDTHS,
    Curvature,
    Diagonal,
    GradientsAt,
    Hessian,
    LocalSteps,
    ProximalSteps,
    Question,
    Reply,
    Vectors,
    Widths,
)

Asked = TypeVar("Asked", bound=Question)
SINGLE = 1 + 1e-6  # more than what single precision takes from a bound
TINY = 1e-19  # more than what the format of masked sums does


@dataclass(frozen=True)
class ClientSelection:
    """Selected clients."""

    chosen: list[int]  # their numbers, in the order of their answers
    names: Sequence[str]  # names of all clients
    like: Tensor  # a tensor in the format of x
    everyone: bool = False  # whether these are all clients, in order

    @cached_property
    def index(self) -> slice | NDArray[np.int64]:
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
            raise InputError(
                "weight-of-absent-client", "Weights must be zero for clients that were not asked."
            )
        return w


@dataclass
class Traffic:
    """What the method has needed to send, summed over clients; evaluation is not counted."""

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


class Summer(Protocol):
    """Sums of the clients' vectors."""

    hides_vectors: bool  # whether no single vector leaves its client
    # whether clients reveal their gradients along directions that the server chooses
    allows_projections: bool
    allows_reweighting: bool  # whether clients allow sums of the same vectors with two weightings

    # Σ_i w_i v_i over the clients that were asked; `part` names the summed vectors
    def sum(
        self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector
    ) -> Tensor: ...
    # Bound the error of the last sum due to its format, in norm and per unit of weight
    def error(self, length: int, weights: Vector) -> float: ...


class PlainSums:
    """Plain sums: clients send their vectors unmasked."""

    hides_vectors = False
    allows_projections = True
    allows_reweighting = True

    def sum(self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector) -> Tensor:
        """Return the sum by one matrix product, without single vectors if clients are here."""
        precision = torch.float64 if vectors.double_weights else asked.like.dtype
        sent = torch.from_numpy(np.array(weights[asked.index])).to(precision)
        if asked.like.is_cuda:  # from pinned memory, without waiting for the device
            sent = sent.pin_memory()
        return vectors.sum(sent.to(asked.like.device, non_blocking=True))

    def error(self, length: int, weights: Vector) -> float:
        return 0.0


class Asker(Protocol):
    """What answers need of the federation that asked."""

    @property
    def sums(self) -> Summer: ...
    def ask(self, question: Asked, clients: Clients = None) -> Answers[Asked]: ...
    def selection(self, clients: Clients) -> ClientSelection: ...
    def count(self, *, exchanges: int = 0, up: int = 0, down: int = 0) -> None: ...


class Answers(Generic[Asked]):
    """Answers of some clients to one question; their vectors stay with them.

    Attributes:
        main: the vector that `sum` adds up.
    """

    main = ""

    def __init__(
        self, federation: Asker, question: Asked, asked: ClientSelection, reply: Reply
    ) -> None:
        self.federation = federation
        self.question = question
        self.asked = asked
        self.reply = reply
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
            raise InputError(
                "vectors-missing",
                f"The answers have no vectors {part!r} to add up (they have {known}).",
            )
        vectors = self.reply.vectors[part]
        if self.federation.sums.hides_vectors:  # they go up now, with their weights
            numbers = math.prod(vectors.shape or self.asked.like.shape)
            self.federation.count(exchanges=1, up=numbers * len(self.chosen))
        return self.federation.sums.sum(part, vectors, self.asked, self.asked.checked(weights))

    def each(self, part: str = "") -> Tensor:
        """Return the v_i themselves, (n, …), in the order asked: for servers that may see them."""
        if self.federation.sums.hides_vectors:
            raise InputError(
                "method-needs-vectors",
                "Secure sums hide every client's own vector: use a method that needs sums only, "
                "such as ScaffPD.",
            )
        return self.reply.vectors[part or self.main].each()


class Gradients(Answers[GradientsAt]):
    """Clients' answers at one point x; each keeps its c_i = ∇f_i(x) to itself."""

    main = "c"
    losses: Vector  # L_i = f_i(x); NaN for clients that were not asked

    def __init__(
        self, federation: Asker, question: GradientsAt, asked: ClientSelection, reply: Reply
    ) -> None:
        super().__init__(federation, question, asked, reply)
        self.losses = self.numbers("loss")
        # the losses' machine epsilon: linear models have them in double precision
        self.precision = torch.finfo(reply.numbers["loss"]().dtype).eps
        self._sums: dict[bytes, Tensor] = {}
        self._error = 0.0

    @property
    def x(self) -> Tensor:
        return self.question.x

    def rounding(self) -> tuple[Vector, Vector]:
        """Bound the errors of L_i and of c_i (norms), each with its share of a sum's error.

        Where vectors are masked that is an exchange, and for every client the sum over all of them.
        """
        if self.federation.sums.hides_vectors:
            everyone = np.zeros(len(self.asked.names))
            everyone[self.asked.index] = 1.0
            total = self.added("errors", everyone).double().cpu().numpy()
            bounds = everyone[:, None] * (total * SINGLE + TINY)
        else:
            bounds = self.numbers("errors")
        return bounds[:, 0], bounds[:, 1] + self._error

    def sum(self, weights: Vector) -> Tensor:
        """Return Σ_i w_i c_i; a masked sum is asked for only once."""
        if not self.federation.sums.hides_vectors:
            return super().sum(weights)
        name = np.asarray(weights, dtype=np.float64).tobytes()
        if name not in self._sums:
            self._sums[name] = super().sum(weights)
            self._error = max(self._error, self.federation.sums.error(len(self.x), weights))
        return self._sums[name]

    def norms(self) -> Vector:
        """Return ‖c_i‖² per client: one exchange, a scalar up."""
        self.federation.count(exchanges=1, up=len(self.chosen))
        return self.asked.scattered(self.reply.vectors["c"].norms())

    def restriction(self, V: Tensor, weights: Vector, metric: Tensor) -> Restriction[Vector]:
        """Return slopes and curvature along V; clients lack only the last sum in it."""
        if not self.federation.sums.allows_projections:
            raise InputError(
                "method-shows-projections",
                "This method has every client show the server its gradient along several "
                "directions, which secure sums are meant to hide: use ScaffPD, or allow it with "
                "projections=True.",
            )
        seen = self._ask(Curvature(self.question, V, metric))
        Q = seen.added("curvature", weights).double().cpu().numpy()
        return Restriction(seen.numbers("slopes"), (Q + Q.T) / 2, seen.numbers("size"))

    def diagonal(self, weights: Vector) -> Tensor:
        """Return Σ_i w_i diag ∇²f_i(x); the sum is sent to all clients."""
        self.federation.count(down=len(self.x) * len(self.chosen))
        return self._ask(Diagonal(self.question)).added("diagonal", weights)

    def hessian(self, weights: Vector) -> Tensor:
        """Return Σ_i w_i ∇²f_i(x), (d, d), in float64."""
        return self._ask(Hessian(self.question)).added("hessian", weights)

    def hessians(self) -> Tensor:
        """Return every client's ∇²f_i(x), (n, d, d), in float64: for servers that may see them."""
        return self._ask(Hessian(self.question)).each("hessian")

    def width(self, root: Tensor, weights: Vector | None) -> float:
        """Return `width_of` the clients, for RRᵀ ≤ ∇²Φ(x)."""
        w = None if weights is None else torch.from_numpy(weights)
        return width_of(self._ask(Widths(self.question, root, w)))

    def _ask(self, question: Asked) -> Answers[Asked]:
        return self.federation.ask(question, self.chosen)


def width_of(seen: Answers[Widths]) -> float:
    """Bound ρ of all clients from above, by the highest class that one of them is in."""
    ones = np.zeros(len(seen.asked.names))
    ones[seen.asked.index] = 1.0
    highest = int(torch.nonzero(seen.added("class", ones) > 0.5).max())
    return float(WIDTHS[highest]) if highest < len(WIDTHS) else math.inf


class Updates(Answers[LocalSteps | ProximalSteps]):
    """Clients' local work d_i = x − u_{i,J} = η_i J Δu_i."""

    main = "d"

    def norms(self) -> Vector:
        """Return ‖d_i‖² per client: scalars that go up with d_i."""
        self.federation.count(up=len(self.chosen))
        return self.asked.scattered(self.reply.vectors["d"].norms())

    def snapshot(self, weights: Vector) -> Tensor:
        """Return Σ_i w_i (x − u_{i,t'}) for the plan's snapshot t'."""
        return self.added("snapshot", weights)


@dataclass(frozen=True)
class Memory:
    """Vectors that clients store from round to round, such as the control variates of SCAFFOLD.

    It is immutable: `plus` returns a new one, so that a state can be stored, compared and restored.
    """

    vectors: Tensor = field(repr=False)  # v_i, (N, d)
    federation: Asker = field(repr=False, metadata={"transient": True})  # federation of the clients

    def sum(self, weights: Vector) -> Tensor:
        asked = self.federation.selection(None)
        held = Vectors(lambda w: w @ self.vectors, lambda: self.vectors)
        return self.federation.sums.sum("memory", held, asked, asked.checked(weights))

    def plus(
        self, scale: float, vectors: Answers[Asked] | Tensor, clients: Clients = None
    ) -> Memory:
        """Return v_i + scale·w_i for the clients that answered with w_i.

        A single tensor is the same w for the given clients (all by default).
        """
        if isinstance(vectors, Tensor):
            rows, added = self.federation.selection(clients).chosen, vectors
        else:
            rows, added = vectors.chosen, vectors.reply.vectors[vectors.main].each()
        changed = self.vectors.clone()
        changed[rows] += scale * added
        return replace(self, vectors=changed)
