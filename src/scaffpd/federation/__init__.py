r"""The interface between algorithms and clients: `Federation`, N clients that keep their data and answer questions.

Only two things vary: where clients are (a `Channel`: in this process, or silos behind a transport) and how their
vectors are added up (a `Summer`: plain, or masked). Algorithms are written against `Federation` once.
They ask for vectors only as weighted sums (`.sum(weights)`), so that masked sums can take the place of plain ones; per
client they see scalars. Algorithms that need more declare it: `each` and `diagonals` of `Gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation import weighed as weighed  # registers its questions by their kinds
from scaffpd.federation.channel import Channel, ClientScores, Constants, Restriction, Summer
from scaffpd.federation.questions import (
    Clients,
    ClientSelection,
    Curvature,
    Diagonal,
    GradientsAt,
    Key,
    LocalPlan,
    LocalSteps,
    Losses,
    Optima,
    Project,
    ProximalPlan,
    ProximalSteps,
    Question,
    Reply,
    Scores,
    Traffic,
    Vector,
    Vectors,
    same_point,
)

__all__ = [
    "ClientScores",
    "Clients",
    "Constants",
    "Federation",
    "Gradients",
    "Key",
    "LocalPlan",
    "Memory",
    "ProximalPlan",
    "Restriction",
    "Traffic",
    "Updates",
    "Vector",
    "same_point",
]


class PlainSums:
    """Plain sums: clients send their vectors unmasked."""

    hides = False
    projections = True
    twice = True
    silent = False

    def shown(self, question: Question, reply: Reply) -> Reply:
        """Return the whole reply."""
        return reply

    def sum(self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector) -> Tensor:
        """Return the sum by one matrix product if the clients are here, without forming single vectors."""
        sent = torch.from_numpy(np.array(weights[asked.index])).to(
            torch.float64 if vectors.fine else asked.like.dtype
        )
        if asked.like.is_cuda:  # from pinned memory, without waiting for the device
            sent = sent.pin_memory()
        return vectors.sum(sent.to(asked.like.device, non_blocking=True))

    def error(self, length: int, weights: Vector) -> float:
        """Return 0: only rounding."""
        return 0.0


class Federation:
    """N clients that keep their data and answer questions about a common parameter vector x ∈ R^d.

    Questions go to all clients, or to some (`clients`, distinct numbers): only those compute and count as
    traffic.

    Args:
        channel: where the clients are.
        sums: how their vectors are added up; plain by default.
    """

    def __init__(self, channel: Channel, sums: Summer | None = None) -> None:
        self.channel: Any = channel
        self.sums: Summer = PlainSums() if sums is None else sums
        self._names, self._like, self._traffic = tuple(channel.names), channel.start(), Traffic()
        self._everyone = ClientSelection(
            list(range(len(self._names))), self._names, self._like, True
        )
        self._known: tuple[Tensor | None, set[int] | None] = (
            None,
            set(),
        )  # the last x, and the clients that have it

    @property
    def names(self) -> Sequence[str]:
        """Names of the clients, in a fixed order."""
        return self._names

    @property
    def dimension(self) -> int:
        """d, the length of x."""
        return len(self._like)

    @property
    def traffic(self) -> Traffic:
        """Traffic that training needs so far, by one formula for every runtime; a deployment's `wire` has the bytes."""
        return self._traffic

    @property
    def fingerprint(self) -> str:
        """Identifier of model, clients and data, so that a checkpoint is never resumed on another problem."""
        fingerprint: str = self.channel.fingerprint
        return fingerprint

    @property
    def account(self) -> Any:
        """Account of private clients' releases, an `Account`; `None` if the model is not `Private`."""
        return self.channel.account

    @property
    def privacy(self) -> Any:
        """Privacy cost of the clients' answers so far, a `Spent`; `None` if the model is not `Private`."""
        return None if self.account is None else self.account.spent()

    def constants(self) -> Constants:
        """Return smoothness and convexity of the clients' losses: one exchange, four scalars up."""
        self.count(exchanges=1, up=4 * len(self._names))
        known: Constants = self.channel.constants()
        return known if self.sums.projections else replace(known, first_order=True)

    def start(self) -> Tensor:
        """Return the default x⁰ (zero for linear models, the module's own parameters otherwise)."""
        start: Tensor = self.channel.start()
        return start

    def memory(self) -> Memory:
        """Store a zero vector at every client; nothing is sent."""
        if not self.channel.keeps:
            raise InputError(
                "method-keeps-vectors",
                "This method keeps vectors at clients, which deployed secure sums do not support.",
            )
        return Memory(self._like.new_zeros(len(self._names), self.dimension), self)

    def losses(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: Key = (0,),
        clients: Clients = None,
        alone: bool = True,
    ) -> Vector:
        """Return f_i(x), over all samples or over a seeded minibatch; NaN for clients that were not asked.

        If not `alone`, the next question at the same x is sent with it, as one exchange.
        """
        return self.ask(Losses(x, batch_size, key), clients, alone).numbers("loss")

    def gradients(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: Key = (0,),
        clients: Clients = None,
        alone: bool = True,
        coefficients_sent: int | None = None,
    ) -> Gradients:
        """Return losses and gradients at x, over all samples or over a seeded minibatch; `alone` as for `losses`.

        If clients can form x from vectors that they have, `coefficients_sent` numbers go down in place of x.
        """
        question = GradientsAt(x, batch_size, key)
        asked = self.selection(clients)
        return Gradients(
            self, question, asked, self._put(question, asked, alone, coefficients_sent)
        )

    def local_updates(
        self,
        x: Tensor,
        at: Gradients | Memory | None,
        correction: Tensor | None,
        plan: LocalPlan,
        clients: Clients = None,
    ) -> Updates:
        """Take J local steps u ← u − η_i (g_i(u) − c_i + correction) from x.

        c_i is the client's answer (`Gradients`) or stored vector (`Memory`); `None` leaves c_i or the correction out.
        """
        asked = self.selection(clients)
        if plan.each is not None and (
            len(plan.each) != len(asked.chosen) or not 1 <= min(plan.each) <= plan.steps
        ):
            raise InputError(
                "plan-number-local",
                "A plan needs a number of local steps, from 1 to `steps`, for every client that is asked.",
            )
        question = LocalSteps(x, self._held(at, asked), correction, plan)
        return Updates(self, question, asked, self._put(question, asked))

    def proximal_steps(self, at: Gradients, correction: Tensor, plan: ProximalPlan) -> Updates:
        """Solve the clients' local models at x: d_i ≈ (∇²f_i + βD)⁻¹ correction."""
        question = ProximalSteps(self._held(at, at.asked), correction, plan)
        return Updates(self, question, at.asked, self._put(question, at.asked))

    def _held(self, at: Any, asked: ClientSelection) -> Any:
        """Return the point at which these clients answered their c_i, or the c_i that they store."""
        if isinstance(at, Gradients) and at.federation is self and at.chosen == asked.chosen:
            return at.question
        if (
            isinstance(at, Memory)
            and self.channel.keeps
            and at.vectors.shape == (len(self._names), self.dimension)
        ):
            return at.vectors[asked.chosen]
        if at is None:
            return None
        raise InputError(
            "local-updates-these",
            "local_updates needs what these very clients have answered (gradients) or kept (memory).",
        )

    def evaluate(
        self, x: Tensor | NDArray[np.float64], split: str = "train", accuracy: bool = True
    ) -> ClientScores:
        """Return per-client loss f_i(x) (regulariser included), accuracy and sample counts of x on "train" or "test".

        A `Personal` model is scored at each client's own u_i(x), from its training rows. Without `accuracy` it is
        NaN: silos reveal few of them.
        """
        question = Scores(self.point(x), split, accuracy)
        reply = self.sums.shown(question, self.channel.ask(question, self._everyone.chosen))
        loss, right, count = (
            self._everyone.scattered(reply.numbers[name]()) for name in question.scalars
        )
        return ClientScores(self._names, loss, right, count.astype(np.int64))

    def optima(self) -> Vector:
        """Return min_u f_i(u), which every client solves by itself: one exchange, a scalar up."""
        return self.ask(Optima()).numbers("lowest")

    def own_models(self, x: Tensor | NDArray[np.float64]) -> Tensor | None:
        """Return every client's own model u_i(x), (N, d), if the model is `Personal` and the clients are here.

        Nothing is sent.
        """
        own: Tensor | None = self.channel.own(self.point(x))
        return own

    def ask(self, question: Question, clients: Clients = None, alone: bool = True) -> Answers:
        """Put any question to clients: one exchange if it is `alone`."""
        asked = self.selection(clients)
        return Answers(self, question, asked, self._put(question, asked, alone))

    def _put(
        self,
        question: Question,
        asked: ClientSelection,
        alone: bool = True,
        sent: int | None = None,
    ) -> Reply:
        """Count the cost of a question, and put it; masked vectors come with their sums, in another exchange."""
        n = len(asked.chosen)
        d = self.dimension
        hides = self.sums.hides
        up = question.up(d, hides)
        down = self._send(question.sent, asked) if sent is None else sent * n
        self.count(
            exchanges=alone and (up > 0 or not hides), up=up * n, down=down + question.down(d) * n
        )
        return self.sums.shown(question, self.channel.ask(question, asked.chosen))

    def count(self, *, exchanges: int = 0, up: int = 0, down: int = 0) -> None:
        """Add to the traffic, in numbers of the format of x."""
        size = self._like.element_size()
        self._traffic.add(exchanges=exchanges, up=up * size, down=down * size)

    def selection(self, clients: Clients) -> ClientSelection:
        """Select the clients that a question goes to."""
        if clients is None or clients is self._everyone.chosen:
            return self._everyone
        chosen = [int(i) for i in clients]
        last = len(self._names) - 1
        if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) > last:
            raise InputError(
                "clients-must-distinct",
                f"clients must be distinct numbers from 0 to {last}, got {chosen}.",
            )
        everyone = chosen == self._everyone.chosen
        return self._everyone if everyone else ClientSelection(chosen, self._names, self._like)

    def _send(self, x: Tensor | None, asked: ClientSelection) -> int:
        """Count the numbers sent so that these clients have x; clients that were just asked about it have it."""
        if x is None:
            return 0
        last, known = self._known
        known = known if last is x else set()
        if known is None:  # everyone has it
            return 0
        if asked.everyone:
            self._known = x, None
            return (len(asked.chosen) - len(known)) * self.dimension
        new = set(asked.chosen) - known
        self._known = x, known | new
        return len(new) * self.dimension

    def point(self, x: Any, name: str = "x") -> Tensor:
        """Return x in the model's format, the same object if possible, so that clients that answered there know it."""
        like = self._like
        kind = (like.shape, like.dtype, like.device)
        if isinstance(x, Tensor) and not x.requires_grad and (x.shape, x.dtype, x.device) == kind:
            return x
        try:
            point = torch.as_tensor(x).detach().to(like)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                "must-array-numbers", f"{name} must be an array of {self.dimension} numbers."
            ) from None
        if point.shape != like.shape:
            raise InputError(
                "shape-model-parameters",
                f"{name} has shape {tuple(point.shape)}, but the model has {self.dimension} parameters.",
            )
        return point


class Answers:
    """Answers of some clients to one question; their vectors stay with them.

    Attributes:
        main: the vector that `sum` adds up.
    """

    main = ""

    def __init__(
        self, federation: Federation, question: Any, asked: ClientSelection, reply: Reply
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
                "answers-vectors-add",
                f"The answers have no vectors {part!r} to add up (they have {known}).",
            )
        return self.federation.sums.sum(
            part, self.reply.vectors[part], self.asked, self.asked.checked(weights)
        )

    def each(self) -> Tensor:
        """Return the v_i themselves, (n, …), in the order of the clients asked: for servers that may see them."""
        if self.federation.sums.hides:
            _hidden()
        return self.reply.vectors[self.main].each()


def _hidden() -> NoReturn:
    raise InputError(
        "secure-sums-hide",
        "Secure sums hide every client's own vector: use a method that needs sums only, such as ScaffPD.",
    )


class Gradients(Answers):
    """Clients' answers at one point x; each keeps its c_i = ∇f_i(x) to itself.

    Attributes:
        losses: L_i = f_i(x); NaN for clients that were not asked.
    """

    main = "c"
    losses: Vector

    def __init__(
        self, federation: Federation, question: GradientsAt, asked: ClientSelection, reply: Reply
    ) -> None:
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
                "method-client-show",
                "This method has every client show the server its gradient along several directions, which secure "
                "sums are meant to hide: use ScaffPD, or allow it with projections=True.",
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
            raise InputError(
                "snapshot-plan-asked", "There is no snapshot: the plan asked for none."
            )
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
        asked = self.federation.selection(None)
        held = Vectors(lambda w: w @ self.vectors, lambda: self.vectors)
        return self.federation.sums.sum("memory", held, asked, asked.checked(weights))

    def plus(
        self, scale: float, vectors: Answers | Memory | Tensor, clients: Clients = None
    ) -> Memory:
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

    def _rows(
        self, vectors: Answers | Memory | Tensor, clients: Clients
    ) -> tuple[list[int] | slice, Tensor]:
        """Return the clients whose vectors change, and the change of each."""
        chosen = None if clients is None else self.federation.selection(clients).chosen
        if isinstance(vectors, Tensor):
            return slice(None) if chosen is None else chosen, vectors
        if isinstance(vectors, Memory):
            return (
                (slice(None), vectors.vectors)
                if chosen is None
                else (chosen, vectors.vectors[chosen])
            )
        own = vectors.chosen
        each = vectors.reply.vectors[vectors.main].each()
        if chosen is None or chosen == own:
            return own, each
        if not set(chosen) <= set(own):
            raise InputError(
                "clients-keep-vectors", "Clients can only keep vectors that they have."
            )
        place = {client: k for k, client in enumerate(own)}
        return chosen, each[[place[i] for i in chosen]]
