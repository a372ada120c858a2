r"""The interface between algorithms and clients: `Federation`, N clients that answer questions.

Only two things vary: where clients are (a `Channel`: in this process, or silos behind a transport)
and how their vectors are added up (a `Summer`: plain, or masked). Algorithms are written against
`Federation` once. They ask for vectors only as weighted sums (`.sum(weights)`), so that masked sums
can take the place of plain ones; per client they see scalars. Algorithms that need more declare it:
`each` and `hessians` of `Gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation.answers import (
    Answers,
    Asked,
    ClientSelection,
    Gradients,
    Memory,
    PlainSums,
    Summer,
    Traffic,
    Updates,
)
from scaffpd.federation.plans import (
    Clients,
    ClientScores,
    Constants,
    Key,
    LocalPlan,
    ProximalPlan,
    ReleaseCounts,
    Restriction,
    Spent,
    Strength,
    Vector,
)
from scaffpd.federation.questions import (
    GradientsAt,
    LocalSteps,
    Losses,
    ProximalSteps,
    Question,
    Reply,
    Scores,
    same_point,
)

__all__ = [
    "Channel",
    "ClientScores",
    "Clients",
    "Constants",
    "Federation",
    "Gradients",
    "Key",
    "LocalPlan",
    "Memory",
    "PrivacyAccount",
    "ProximalPlan",
    "ReleaseCounts",
    "Restriction",
    "Spent",
    "Strength",
    "Traffic",
    "Updates",
    "Vector",
    "same_point",
]


class PrivacyAccount(Protocol):
    """Account of private clients' releases, which a checkpoint stores."""

    @property
    def total(self) -> int: ...  # Number of releases so far
    def spent(self) -> Spent: ...
    def pack(self) -> dict[str, NDArray[np.generic]]: ...
    # Add the releases of `pack` that are not counted yet
    def merge(self, arrays: dict[str, NDArray[np.generic]]) -> None: ...


class Channel(Protocol):
    """Access to the clients, wherever they are."""

    names: tuple[str, ...]  # the clients, in a fixed order
    here: bool  # whether clients are in this process, and not at other organisations

    # Number of numbers that a pass over the training features reads; infinite if unknown
    @property
    def work(self) -> float: ...
    # description of the model; `None` if it is not known here
    @property
    def model(self) -> object: ...
    # Account of private clients' releases; `None` if they have none here
    @property
    def account(self) -> PrivacyAccount | None: ...
    # Identifier of model, clients and data: a checkpoint is resumed on no other problem
    @property
    def fingerprint(self) -> str: ...
    def constants(self) -> Constants: ...
    def start(self) -> Tensor: ...
    # every client's u_i(x), (N, d), if the model is `Personal` and they are here
    def own(self, x: Tensor) -> Tensor | None: ...
    # access to the same clients with other strengths of their model
    def using(self, l2: Strength | None, strength: Strength | None) -> Channel: ...
    def resumed(self, rounds: int) -> None: ...  # Note that a run goes on after so many rounds
    # whether and how a run ends: the same everywhere, if several run it together
    def decided(self, status: str | None) -> str | None: ...
    # the answers of the chosen clients, in that order
    def ask(self, question: Question, chosen: Sequence[int]) -> Reply: ...


class Federation:
    """N clients that keep their data and answer questions about a common parameter vector x ∈ R^d.

    Questions go to all clients, or to some (`clients`, distinct numbers): only those compute and
    count as traffic.

    Args:
        channel: where the clients are.
        sums: how their vectors are added up; plain by default.
    """

    def __init__(self, channel: Channel, sums: Summer | None = None) -> None:
        self.channel = channel
        self.sums: Summer = PlainSums() if sums is None else sums
        self.names = tuple(channel.names)  # of the clients, in a fixed order
        self._like = channel.start()
        self.dimension = len(self._like)  # d, the length of x
        # by one formula for every runtime; a deployment's `wire` has the bytes
        self.traffic = Traffic()
        self._everyone = ClientSelection([*range(len(self.names))], self.names, self._like, True)
        self._known: tuple[Tensor | None, set[int]] = (None, set())  # the last x, and who has it

    @property
    def fingerprint(self) -> str:
        """Identifier of model, clients and data, for checkpoints."""
        return self.channel.fingerprint

    @property
    def account(self) -> PrivacyAccount | None:
        """Account of private clients' releases; `None` if the model is not `Private`."""
        return self.channel.account

    @property
    def privacy(self) -> Spent | None:
        """Privacy cost of the clients' answers so far; `None` if the model is not `Private`."""
        return None if self.account is None else self.account.spent()

    def constants(self) -> Constants:
        """Return smoothness and convexity of the clients' losses: one exchange, four scalars up."""
        self.count(exchanges=1, up=4 * len(self.names))
        known = self.channel.constants()
        return known if self.sums.allows_projections else replace(known, first_order=True)

    def start(self) -> Tensor:
        """Return the default x⁰ (zero for linear models, the module's own parameters otherwise)."""
        return self.channel.start()

    def using(self, l2: Strength | None = None, strength: Strength | None = None) -> Self:
        """Return the same clients with another l2 or another strength of `Personal`.

        What is known of the data carries over, and traffic is counted together.
        """
        other = copy(self)
        other.channel = self.channel.using(l2, strength)
        return other

    def memory(self) -> Memory:
        """Store a zero vector at every client; nothing is sent."""
        return Memory(self._like.new_zeros(len(self.names), self.dimension), self)

    def losses(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: Key = (0,),
        clients: Clients = None,
        alone: bool = True,
    ) -> Vector:
        """Return f_i(x), over all samples or a seeded minibatch; NaN where clients were not asked.

        If not `alone`, the next question at the same x is sent with it, as one exchange.
        """
        return self.ask(Losses(x, batch_size, key), clients, alone).numbers("loss")

    def gradients(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: Key = (0,),
        clients: Clients = None,
        coefficients_sent: int | None = None,
    ) -> Gradients:
        """Return losses and gradients at x, over all samples or over a seeded minibatch.

        If clients can form x from vectors that they have, `coefficients_sent` numbers go down in
        place of x.
        """
        question = GradientsAt(x, batch_size, key)
        asked = self.selection(clients)
        reply = self._put(question, asked, sent=coefficients_sent)
        return Gradients(self, question, asked, reply)

    def local_updates(
        self,
        x: Tensor,
        at: Gradients | Memory | None,
        correction: Tensor | None,
        plan: LocalPlan,
        clients: Clients = None,
    ) -> Updates:
        """Take J local steps u ← u − η_i (g_i(u) − c_i + correction) from x.

        c_i is the client's answer (`Gradients`) or stored vector (`Memory`); `None` leaves c_i or
        the correction out.
        """
        asked = self.selection(clients)
        question = LocalSteps(x, self._held(at, asked), correction, plan)
        return Updates(self, question, asked, self._put(question, asked))

    def proximal_steps(self, at: Gradients, correction: Tensor, plan: ProximalPlan) -> Updates:
        """Solve the clients' local models at x: d_i ≈ (∇²f_i + βD)⁻¹ correction."""
        question = ProximalSteps(at.question, correction, plan)
        return Updates(self, question, at.asked, self._put(question, at.asked))

    def _held(
        self, at: Gradients | Memory | None, asked: ClientSelection
    ) -> GradientsAt | Tensor | None:
        """Return the point at which these clients answered c_i, or the c_i that they store."""
        if at is None:
            return None
        if isinstance(at, Gradients) and at.federation is self and at.chosen == asked.chosen:
            return at.question
        if isinstance(at, Memory) and at.vectors.shape == (len(self.names), self.dimension):
            return at.vectors[asked.chosen]
        raise InputError(
            "foreign-answers",
            "local_updates needs the gradients of these clients, or the vectors that they store.",
        )

    def evaluate(
        self, x: Tensor | NDArray[np.float64], split: str = "train", score: bool = True
    ) -> ClientScores:
        """Return per-client loss, score and sample counts of x on "train" or "test".

        The loss is f_i(x), regulariser included. A `Personal` model is scored at each client's own
        u_i(x), from its training rows, by the mean loss of the rows alone: its regulariser is on x.
        Without `score` that is NaN: silos reveal few of them.
        """
        question = Scores(self.point(x), split, score)
        reply = self.channel.ask(question, self._everyone.chosen)
        found = {name: self._everyone.scattered(part()) for name, part in reply.numbers.items()}
        right = found.get("score", np.full(len(self.names), np.nan))
        return ClientScores(self.names, found["loss"], right, found["count"].astype(np.int64))

    def own_models(self, x: Tensor | NDArray[np.float64]) -> Tensor | None:
        """Return what `Channel.own` has; nothing is sent."""
        return self.channel.own(self.point(x))

    def ask(self, question: Asked, clients: Clients = None, alone: bool = True) -> Answers[Asked]:
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
        """Count the cost of a question, and put it; masked vectors come later, with their sums."""
        n = len(asked.chosen)
        hides = self.sums.hides_vectors
        up = question.up(self.dimension, hides)
        down = self._send(question.sent, asked) if sent is None else sent * n
        down += question.down(self.dimension) * n
        self.count(exchanges=alone and (up > 0 or not hides), up=up * n, down=down)
        return self.channel.ask(question, asked.chosen)

    def count(self, *, exchanges: int = 0, up: int = 0, down: int = 0) -> None:
        """Add to the traffic, in numbers of the format of x."""
        size = self._like.element_size()
        self.traffic.add(exchanges=exchanges, up=up * size, down=down * size)

    def selection(self, clients: Clients) -> ClientSelection:
        if clients is None or clients is self._everyone.chosen:
            return self._everyone
        chosen = [int(i) for i in clients]
        last = len(self.names) - 1
        if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) > last:
            raise InputError(
                "clients-not-distinct",
                f"clients must be distinct numbers from 0 to {last}, got {chosen}.",
            )
        everyone = chosen == self._everyone.chosen
        return self._everyone if everyone else ClientSelection(chosen, self.names, self._like)

    def _send(self, x: Tensor | None, asked: ClientSelection) -> int:
        """Count what is sent so that these clients have x, unless they were just asked about it."""
        if x is None:
            return 0
        last, known = self._known
        new = set(asked.chosen) - (known if last is x else set())
        self._known = x, new | (known if last is x else set())
        return len(new) * self.dimension

    def point(self, x: Tensor | ArrayLike, name: str = "x") -> Tensor:
        """Return x in the model's format: the same object if possible, by which clients know it."""
        like = self._like
        kind = (like.shape, like.dtype, like.device)
        if isinstance(x, Tensor) and not x.requires_grad and (x.shape, x.dtype, x.device) == kind:
            return x
        try:
            point = torch.as_tensor(x).detach().to(like)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                "point-not-numbers", f"{name} must be an array of {self.dimension} numbers."
            ) from None
        if point.shape != like.shape:
            raise InputError(
                "point-length",
                f"{name} has shape {tuple(point.shape)}, but the model has {self.dimension} "
                "parameters.",
            )
        return point
