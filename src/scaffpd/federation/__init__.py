r"""The narrow waist: `Federation`, N clients that keep their data and answer questions.

Two things vary, and nothing else does: where clients are (a `Channel`: in this process, or silos behind a transport)
and how their vectors are added up (a `Summer`: plain, or masked). Algorithms are written against `Federation` once.
They ask for vectors only as weighted sums (`.sum(weights)`), so that masked sums can take the place of plain ones; per
client they see scalars. Those that need more say so: `each` and `diagonals` of `Gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation import weighed as weighed  # its questions are known by their kinds
from scaffpd.federation.answers import (
    Answers,
    ClientScores,
    ClientSelection,
    Constants,
    Gradients,
    Memory,
    Restriction,
    Traffic,
    Updates,
)
from scaffpd.federation.questions import (
    Clients,
    GradientsAt,
    Key,
    LocalPlan,
    LocalSteps,
    Losses,
    Optima,
    ProximalPlan,
    ProximalSteps,
    Question,
    Reply,
    Scores,
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
]  # fmt: skip


class Channel(Protocol):
    """Where clients are.

    Attributes:
        names: the clients, in a fixed order.
        keeps: whether vectors that clients keep from round to round are within reach.
        here: whether clients are in this process, and not at other organisations.
    """

    names: tuple[str, ...]
    keeps: bool
    here: bool

    @property
    def work(self) -> float:
        """How many numbers a pass over the training features reads; infinite where nobody knows."""

    @property
    def absent(self) -> int:
        """How many clients do not answer at present."""

    @property
    def account(self) -> Any:
        """What private clients have released; `None` where they are not private, or keep books of their own."""

    @property
    def fingerprint(self) -> str:
        """Identifies model, clients and data, so that a checkpoint is never resumed on another problem."""

    def constants(self) -> Constants:
        """Smoothness and convexity of the clients' losses."""

    def start(self) -> Tensor:
        """The default x⁰ (zero for linear models, the module's own parameters otherwise)."""

    def own(self, x: Tensor) -> Tensor | None:
        """Every client's own model u_i(x), (N, d), where the model is `Personal` and the clients are here."""

    def masked(self) -> Channel:
        """The same clients with keys of their own; itself, where their vectors are here."""

    def ask(self, question: Question, chosen: Sequence[int]) -> Reply:
        """The answers of the chosen clients, in that order."""


class Summer(Protocol):
    """How vectors are added up.

    Attributes:
        hides: whether no single vector leaves its client.
        projections: whether clients show their gradients along directions that the server chooses.
        twice: whether clients let the same vectors into sums with two different weights.
        silent: whether losses stay with their clients too.
    """

    hides: bool
    projections: bool
    twice: bool
    silent: bool

    def shown(self, question: Question, reply: Reply) -> Reply:
        """What clients show of their numbers."""

    def sum(self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector) -> Tensor:
        """Σ_i w_i v_i over the clients that were asked; `part` names what is summed."""

    def error(self, length: int, weights: Vector) -> float:
        """The most, in norm and per unit of weight, that the last sum is off by its number format."""


class PlainSums:
    """Vectors that clients send as they are."""

    hides, projections, twice, silent = False, True, True, False

    def shown(self, question: Question, reply: Reply) -> Reply:
        """All of it."""
        return reply

    def sum(self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector) -> Tensor:
        """One matrix product, where the clients are here; nobody's vector is formed for it."""
        sent = torch.from_numpy(np.array(weights[asked.index])).to(torch.float64 if vectors.fine else asked.like.dtype)
        if asked.like.is_cuda:  # from pinned memory, nobody waits for the device
            sent = sent.pin_memory()
        return vectors.sum(sent.to(asked.like.device, non_blocking=True))

    def error(self, length: int, weights: Vector) -> float:
        """Nothing beyond rounding."""
        return 0.0


class Federation:
    """N clients that keep their data and answer questions about a common parameter vector x ∈ R^d.

    Questions go to all clients, or to some (`clients`, distinct numbers): only those compute, and only they count as
    traffic.

    Args:
        channel: where the clients are.
        sums: how their vectors are added up; as they are, by default.
    """

    def __init__(self, channel: Channel, sums: Summer | None = None) -> None:
        self.channel: Any = channel
        self.sums: Summer = PlainSums() if sums is None else sums
        self._names, self._like, self._traffic = tuple(channel.names), channel.start(), Traffic()
        self._everyone = ClientSelection(list(range(len(self._names))), self._names, self._like, True)
        self._known: tuple[Tensor | None, set[int] | None] = (None, set())  # the last x, and who has it

    @property
    def names(self) -> Sequence[str]:
        """The clients, in a fixed order."""
        return self._names

    @property
    def dimension(self) -> int:
        """d, the length of x."""
        return len(self._like)

    @property
    def traffic(self) -> Traffic:
        """What training needs to send so far, by one formula for every runtime; a deployment's `wire` has the bytes."""
        return self._traffic

    @property
    def fingerprint(self) -> str:
        """Identifies model, clients and data, so that a checkpoint is never resumed on another problem."""
        fingerprint: str = self.channel.fingerprint
        return fingerprint

    @property
    def account(self) -> Any:
        """What private clients have released, an `Account`; `None` where the model is not `Private`."""
        return self.channel.account

    @property
    def privacy(self) -> Any:
        """What the clients' answers have cost so far, a `Spent`; `None` where the model is not `Private`."""
        return None if self.account is None else self.account.spent()

    def constants(self) -> Constants:
        """Smoothness and convexity of the clients' losses: one exchange, four scalars up."""
        self.count(exchanges=1, up=4 * len(self._names))
        known: Constants = self.channel.constants()
        return known if self.sums.projections else replace(known, first_order=True)

    def start(self) -> Tensor:
        """The default x⁰ (zero for linear models, the module's own parameters otherwise)."""
        start: Tensor = self.channel.start()
        return start

    def memory(self) -> Memory:
        """A zero vector at every client; nothing is sent."""
        if not self.channel.keeps:
            raise InputError("This method keeps vectors at clients, which deployed secure sums do not have.")
        return Memory(self._like.new_zeros(len(self._names), self.dimension), self)

    def losses(
        self, x: Tensor, batch_size: int | None = None, key: Key = (0,), clients: Clients = None, alone: bool = True
    ) -> Vector:
        """f_i(x), over all samples or over a seeded minibatch; NaN for clients that were not asked.

        Where it is not `alone`, the next question at the same x goes out with it, as one exchange.
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
        """Losses and gradients at x, over all samples or over a seeded minibatch; `alone` as for `losses`.

        Where clients can form x from vectors that they have, `coefficients_sent` numbers go down in place of x.
        """
        question, asked = GradientsAt(x, batch_size, key), self.selection(clients)
        return Gradients(self, question, asked, self._put(question, asked, alone, coefficients_sent))

    def local_updates(
        self, x: Tensor, at: Gradients | Memory | None, correction: Tensor | None, plan: LocalPlan,
        clients: Clients = None,
    ) -> Updates:  # fmt: skip
        """J local steps u ← u − η_i (g_i(u) − c_i + correction) from x.

        c_i is what the client answered (`Gradients`) or kept (`Memory`); `None` leaves c_i or the correction out.
        """
        asked = self.selection(clients)
        if plan.each is not None and (len(plan.each) != len(asked.chosen) or not 1 <= min(plan.each) <= plan.steps):
            raise InputError("A plan needs a number of local steps, from 1 to `steps`, for every client that is asked.")
        question = LocalSteps(x, self._held(at, asked), correction, plan)
        return Updates(self, question, asked, self._put(question, asked))

    def proximal_steps(self, at: Gradients, correction: Tensor, plan: ProximalPlan) -> Updates:
        """The clients' local models at x, solved: d_i ≈ (∇²f_i + βD)⁻¹ correction."""
        question = ProximalSteps(self._held(at, at.asked), correction, plan)
        return Updates(self, question, at.asked, self._put(question, at.asked))

    def _held(self, at: Any, asked: ClientSelection) -> Any:
        """Where the c_i of these clients were answered, or those that they keep."""
        if isinstance(at, Gradients) and at.federation is self and at.chosen == asked.chosen:
            return at.question
        if isinstance(at, Memory) and self.channel.keeps and at.vectors.shape == (len(self._names), self.dimension):
            return at.vectors[asked.chosen]
        if at is None:
            return None
        raise InputError("local_updates needs what these very clients have answered (gradients) or kept (memory).")

    def evaluate(self, x: Tensor | NDArray[np.float64], split: str = "train", accuracy: bool = True) -> ClientScores:
        """Per-client loss f_i(x) (regulariser included), accuracy and sample counts of x on "train" or "test".

        A `Personal` model is scored at each client's own u_i(x), made from its training rows. Without `accuracy` it is
        NaN: silos show few of them.
        """
        question = Scores(self.point(x), split, accuracy)
        reply = self.sums.shown(question, self.channel.ask(question, self._everyone.chosen))
        loss, right, count = (self._everyone.scattered(reply.numbers[name]()) for name in question.scalars)
        return ClientScores(self._names, loss, right, count.astype(np.int64))

    def optima(self) -> Vector:
        """min_u f_i(u), which every client solves for by itself: one exchange, a scalar up."""
        return self.ask(Optima()).numbers("lowest")

    def own_models(self, x: Tensor | NDArray[np.float64]) -> Tensor | None:
        """Every client's own model u_i(x), (N, d), where the model is `Personal` and the clients are here.

        Nothing is sent.
        """
        own: Tensor | None = self.channel.own(self.point(x))
        return own

    def ask(self, question: Question, clients: Clients = None, alone: bool = True) -> Answers:
        """Put any question to clients: one exchange where it is `alone`."""
        asked = self.selection(clients)
        return Answers(self, question, asked, self._put(question, asked, alone))

    def _put(self, question: Question, asked: ClientSelection, alone: bool = True, sent: int | None = None) -> Reply:
        """Count what a question costs, and put it; masked vectors come with their sums, in an exchange of their own."""
        n, d, hides = len(asked.chosen), self.dimension, self.sums.hides
        up = question.up(d, hides)
        down = self._send(question.sent, asked) if sent is None else sent * n
        self.count(exchanges=alone and (up > 0 or not hides), up=up * n, down=down + question.down(d) * n)
        return self.sums.shown(question, self.channel.ask(question, asked.chosen))

    def count(self, *, exchanges: int = 0, up: int = 0, down: int = 0) -> None:
        """Add to the traffic, in numbers of the format of x."""
        size = self._like.element_size()
        self._traffic.add(exchanges=exchanges, up=up * size, down=down * size)

    def selection(self, clients: Clients) -> ClientSelection:
        """The clients that a question goes to."""
        if clients is None or clients is self._everyone.chosen:
            return self._everyone
        chosen, last = [int(i) for i in clients], len(self._names) - 1
        if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) > last:
            raise InputError(f"clients must be distinct numbers from 0 to {last}, got {chosen}.")
        everyone = chosen == self._everyone.chosen
        return self._everyone if everyone else ClientSelection(chosen, self._names, self._like)

    def _send(self, x: Tensor | None, asked: ClientSelection) -> int:
        """Count the numbers that go down for these clients to have x; those that were just asked about it have it."""
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
        """The point x in the model's format: itself where it has it, so that clients that answered there know it."""
        like = self._like
        kind = (like.shape, like.dtype, like.device)
        if isinstance(x, Tensor) and not x.requires_grad and (x.shape, x.dtype, x.device) == kind:
            return x
        try:
            point = torch.as_tensor(x).detach().to(like)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"{name} must be an array of {self.dimension} numbers.") from None
        if point.shape != like.shape:
            raise InputError(f"{name} has shape {tuple(point.shape)}, but the model has {self.dimension} parameters.")
        return point
