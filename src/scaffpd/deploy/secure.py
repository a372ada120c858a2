r"""Secure sums among deployed silos: before training for sums over columns, in training for every vector.

c_i and d_i stay at their silos: the coordinator has no earlier answer that could stand in for an absent silo. A silo
that does not answer is lost at once: the run waits for it, or, where all agree to that, repeats the round among the
remaining silos. An exchange that somebody has left before its masked vector came is never opened.

Columns may be of very different sizes, and a sum has one clip. So every sum over columns is made twice: to a multiple
of 2⁻ᶠ, and then what is left beyond that, with a clip that is as much smaller; and once more, until every column has
its digits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.deploy import messages
from scaffpd.deploy.agreement import Refusal
from scaffpd.deploy.byzantine import Shapes, too_large, troubles
from scaffpd.deploy.mask_messages import around_arrays, format_values, opened_of, shares_of
from scaffpd.deploy.membership import Lost
from scaffpd.deploy.messages import Array, Message, batch_values, plain, plan_values
from scaffpd.deploy.session import SiloRequest
from scaffpd.errors import InputError
from scaffpd.federation import Clients, ClientScores, LocalPlan, ProximalPlan, Vector
from scaffpd.masking import Aggregator, Opened, Terms
from scaffpd.masking.terms import LARGEST, SMALLEST
from scaffpd.secure.channel import MaskedReply, Rounding, SumRequest
from scaffpd.secure.sums import SecureSums
from scaffpd.tabular.agree import width

if TYPE_CHECKING:
    from scaffpd.deploy.remote import Remote


Checks = Callable[[Mapping[str, Message]], Mapping[str, str]]
Ask = Callable[[SiloRequest, Sequence[str], Checks], dict[str, Message]]
WITNESSES = 2
USELESS = "its part of a secure sum cannot be used"


class SiloParties:
    """Silos that mask what they send.

    Args:
        ask: puts a question to silos, and returns the answers that are there and pass the checks.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def _read(self, request: SiloRequest, names: Sequence[str], read: Callable[[str, Message], Any]) -> dict[str, Any]:
        """Put a question, and return what `read` makes of every answer; one that it refuses is no answer.

        What silos say about each other is believed where two say it, and ends the sum.
        """
        parts: dict[str, Any] = {}
        heard = request.kind != messages.REVEAL  # by then everybody has taken everybody's shares

        def check(answers: Mapping[str, Message]) -> dict[str, str]:
            troubles = {}
            for name, reply in answers.items():
                try:
                    parts[name] = None if heard and "accused" in reply.values else read(name, reply)
                except InputError as error:
                    troubles[name] = str(error)
            return troubles

        replies = self._ask(request, names, check)
        said = {name: reply.values["accused"] for name, reply in replies.items() if "accused" in reply.values}
        claims = {name: plain(accused) for name, accused in said.items() if heard}
        why = {accused: plain(replies[name].values.get("why")) for name, accused in claims.items()}
        sure = {accused: why[accused] for accused, n in Counter(claims.values()).items() if n >= WITNESSES}
        if sure:
            self.accused(sure)
        for name, accused in claims.items():
            raise InputError(f"Silo {name!r} does not add up with {accused!r}: {why[accused]}")
        return {name: parts[name] for name in replies}

    def accused(self, claims: Mapping[str, str]) -> None:
        """End a sum with silos whose cards or shares several others cannot use."""
        name, sentence = next(iter(claims.items()))
        raise InputError(f"Silo {name!r} cannot be added up with: {sentence}")

    def meet(self, names: Sequence[str]) -> None:
        """Give everybody's cards to everybody; there is no sum where somebody does not take them."""
        cards = self._read(SiloRequest(messages.CARD), names, lambda _, reply: reply.values.get("card"))
        for name, card in cards.items():
            if not isinstance(card, dict) or card.get("name") != name:
                raise InputError(f"Silo {name!r} shows no card of its own.")
        self._read(SiloRequest(messages.MEET, {"cards": list(cards.values())}), names, lambda _, reply: reply)

    def open(self, terms: Terms) -> dict[str, Opened]:
        """Have everybody open an exchange."""
        request = SiloRequest(messages.OPEN, {"terms": terms.values()})
        return self._read(request, terms.names, lambda name, reply: opened_of(reply.arrays, terms, name))

    def mask(self, aggregator: Aggregator | None, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Ask for everybody's masked vector, or its size."""
        about: SiloRequest = wanted.held
        values = {**about.values, "about": about.kind, "total": wanted.total, "numbers": format_values(wanted.numbers)}
        own: dict[str, dict[str, Array]] = {name: {} for name in wanted.weights}
        if aggregator is not None:
            values["terms"] = aggregator.terms.values()
            own = {name: around_arrays(aggregator.around(name), aggregator.terms, name) for name in own}
        personal = {name: ({"weight": weight}, own[name]) for name, weight in wanted.weights.items()}
        request = SiloRequest(messages.MASKED, values, about.vectors, {}, about.arrays, personal)
        replies = self._read(request, list(own), lambda _, reply: _masked(reply, length))
        for name, reply in replies.items():
            if isinstance(reply, str):
                raise InputError(f"Silo {name!r} declines: {reply}")
        return replies

    def reveal(
        self, terms: Terms, survivors: Sequence[str], following: Terms
    ) -> tuple[dict[str, dict[str, int]], dict[str, Opened]]:
        """Ask for shares that open a sum, and for the opening of the exchange that follows."""
        values = {"terms": terms.values(), "survivors": list(survivors), "following": following.values()}

        def parts(name: str, reply: Message) -> tuple[dict[str, int], Opened]:
            return shares_of(reply.arrays, terms, name), opened_of(reply.arrays, following, name)

        read = self._read(SiloRequest(messages.REVEAL, values), survivors, parts)
        return {name: both[0] for name, both in read.items()}, {name: both[1] for name, both in read.items()}


def _masked(reply: Message, length: int) -> MaskedReply | str:
    """Read a silo's masked vector; or why it declines."""
    if "declined" in reply.values:
        return plain(reply.values["declined"])
    exponent, vector = reply.values.get("exponent"), reply.arrays.get("masked")
    if type(exponent) is not int or not SMALLEST <= exponent <= LARGEST:
        raise InputError(USELESS)
    if vector is not None and (vector.dtype != np.int64 or vector.shape != (length,)):
        raise InputError(USELESS)
    return MaskedReply(exponent, None if vector is None else vector.view(np.uint64))


Totals = dict[str, Mapping[str, Array]]
TOGETHER = "all silos"
ATTEMPTS, EXACT = 5, 1e-15


def secure_totals(
    ask: Callable[[SiloRequest], dict[str, Message]], members: Sequence[str], secure: Mapping[str, Any]
) -> Callable[[SiloRequest], Totals]:
    """Return a function that puts a question for totals, and returns those of all silos together."""

    def checked(request: SiloRequest, names: Sequence[str], check: Checks) -> dict[str, Message]:
        replies = ask(request)
        for name, why in check(replies).items():
            raise Refusal(name, f"{why.rstrip('.')}.")
        return replies

    parties = SiloParties(checked)
    parties.meet(members)
    sums = SecureSums(parties, secure.get("colluding"), secure.get("leaving"), lambda exchanges, up, down: None)

    def added(kind: str, about: SiloRequest, length: int) -> Any:
        return sums.sum(kind, about, dict.fromkeys(members, 1.0), length)

    def totals(question: SiloRequest) -> Totals:
        what, columns = "squares" if "mean" in question.arrays else "sum", width(question.values["schema"])
        about = SiloRequest("totals", {**question.values, "parts": ["n", what]}, arrays=question.arrays)
        both = added(what, about, 2 * columns)
        for again in range(1, ATTEMPTS):
            assert sums.last is not None
            smallest = np.abs(both[both != 0]).min(initial=np.inf)
            if again > 1 and sums.last.error <= EXACT * smallest:
                break
            rest = replace(about, values={**about.values, "beyond": sums.last.bits})
            both += added(f"{what}, {again}", rest, 2 * columns)
        return {TOGETHER: {"n": np.rint(both[:columns]), what: both[columns:]}}

    return totals


class SiloChannel(SiloParties):
    """The silos of a `Remote`, which mask what they send."""

    def __init__(self, remote: Remote) -> None:
        super().__init__(self.put)
        self.remote, self._like = remote, remote.start()
        self.meet(remote.names)

    def put(self, question: SiloRequest, names: Sequence[str], check: Checks) -> dict[str, Message]:
        """A question that everybody has to answer; only shares may come from fewer."""
        replies = self.remote.membership.ask(question, list(names), check)
        lacking = [name for name in names if name not in replies]
        if lacking and question.kind != messages.REVEAL:
            raise Lost(lacking)
        return replies

    def accused(self, claims: Mapping[str, str]) -> None:
        """Whose shares, or keys, several others cannot use is quarantined."""
        names = self.remote.names
        self.remote.accuse(
            {names.index(name): f"{why.rstrip('.')} (masks)" for name, why in claims.items() if name in names}
        )
        super().accused(claims)

    def mask(self, aggregator: Aggregator | None, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Everybody's masked vector; whose size is absurd beside the others' would leave their sum no digits."""
        replies = super().mask(aggregator, wanted, length)
        names, weights = self.remote.names, wanted.weights
        sizes = {
            names.index(name): float(np.ldexp(1.0, reply.exponent)) / abs(weights[name])
            for name, reply in replies.items()
            if weights[name] and reply.exponent > SMALLEST
        }
        outlier = self.remote.membership.policy.outlier
        self.remote.accuse(too_large("masked vector has size", sizes, sizes, outlier**2))
        return replies

    def reveal(
        self, terms: Terms, survivors: Sequence[str], following: Terms
    ) -> tuple[dict[str, dict[str, int]], dict[str, Opened]]:
        """Shares that open a sum; where more silos have left than it bears, the round is begun anew without them."""
        shares, opened = super().reveal(terms, survivors, following)
        lacking = [name for name in survivors if name not in shares]
        if len(lacking) > terms.leaving:
            raise Lost(lacking)
        return shares, opened

    def parts(self, question: SiloRequest, clients: Clients, shapes: Shapes) -> dict[str, NDArray[np.float64]]:
        """Numbers of every silo, by their names (N, …); NaN for those that were not asked."""
        names = self.remote.names
        chosen = [names[i] for i in (range(len(names)) if clients is None else clients)]
        replies = self.put(question, chosen, lambda answers: troubles(answers, shapes, self._like))
        out = {part: np.full((len(names), *shape), np.nan) for part, shape in shapes.items()}
        for name, reply in replies.items():
            for part, table in out.items():
                table[names.index(name)] = reply.arrays[part]
        return out

    def scalars(self, question: SiloRequest, clients: Clients, count: int = 1) -> NDArray[np.float64]:
        """A few numbers of every silo, (N, count)."""
        return self.parts(question, clients, {"scalars": (count,)})["scalars"]

    def gradients(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> SiloPoint:
        """Losses at x; c_i stays there."""
        batch = batch_values(batch_size, key)
        seen = self._judged(x, batch_size, self.scalars(SiloRequest(messages.GRADIENTS, batch, {"x": x}), clients, 3))
        return SiloPoint(self, x, batch, clients, seen)

    def losses(self, x: Tensor, batch_size: int | None, key: tuple[int, ...], clients: Clients) -> Vector:
        """L_i."""
        question = SiloRequest(messages.LOSSES, batch_values(batch_size, key), {"x": x})
        return self._judged(x, batch_size, self.scalars(question, clients))[:, 0]

    def _judged(self, x: Tensor, batch_size: int | None, seen: NDArray[np.float64]) -> NDArray[np.float64]:
        """Losses of an absurd size give a silo away here as well; the rest of an answer cannot be looked at."""
        got = {i: {"scalars": row} for i, row in enumerate(seen) if not np.isnan(row[0])}
        self.remote.accuse(self.remote.judge.losses(x, batch_size, got))
        return seen

    def local_updates(
        self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan, clients: Clients
    ) -> SiloSteps:
        """Local steps, which silos make when their d_i is asked for."""
        if at is not None and not isinstance(at, SiloPoint):
            raise InputError("Deployed secure sums have no vectors that silos keep from round to round: use ScaffPD.")
        vectors, values = {"x": x}, {"plan": plan_values(plan)}
        if at is not None:
            vectors, values = {**vectors, "at": at.x}, {**values, **at.batch}
        if correction is not None:
            vectors["correction"] = correction
        return SiloSteps(self, SiloRequest(messages.UPDATES, values, vectors), clients)

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> SiloSteps:
        """Local models."""
        known = self.remote.facts.constants
        L = known.smoothness if at.batch["batch_size"] is None else known.steepest
        steepest = float(max(plan.steepest, np.max(L)))
        values = {"pull": plan.pull, "limit": plan.limit, "steepest": steepest, **at.batch}
        vectors = {"at": at.x, "correction": correction, "metric": plan.metric}
        return SiloSteps(self, SiloRequest(messages.PROXIMAL, values, vectors), at.clients)

    def evaluate(self, x: Any, split: str) -> ClientScores:
        """Scores per silo."""
        return self.remote.evaluate(x, split)


class SiloPoint:
    """Silos at one x."""

    def __init__(
        self, channel: SiloChannel, x: Tensor, batch: Mapping[str, Any], clients: Clients, seen: NDArray[np.float64]
    ) -> None:
        self._channel, self.x, self.batch, self.clients = channel, x, batch, clients
        self.losses, *self._rounding = np.ascontiguousarray(seen.T)

    @property
    def rounding(self) -> Rounding:
        """Bounds on the errors of L_i and c_i."""
        return self._rounding[0], self._rounding[1]

    def _question(self, kind: str, **vectors: Tensor) -> SiloRequest:
        return SiloRequest(kind, self.batch, {"at": self.x, **vectors})

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per silo."""
        return self._channel.scalars(self._question(messages.PROJECT, direction=direction), self.clients)[:, 0]

    def norms(self) -> Vector:
        """‖c_i‖² per silo."""
        return self._channel.scalars(_sizes(self.held("c")), self.clients)[:, 0]

    def slopes(self, V: Tensor, metric: Tensor) -> tuple[NDArray[np.float64], Vector]:
        """Vᵀc_i and ‖c_i‖² in the metric D⁻¹."""
        question = replace(self._question(messages.CURVATURE, metric=metric), arrays={"V": V.numpy()})
        seen = self._channel.parts(question, self.clients, {"slopes": (V.shape[1],), "scalars": (1,)})
        return seen["slopes"], seen["scalars"][:, 0]

    def held(self, what: str, V: Tensor | None = None, metric: Tensor | None = None) -> SiloRequest:
        """The question that the vector would answer."""
        if what == "c":
            return SiloRequest(messages.GRADIENTS, {**self.batch, "parts": ["c"]}, {"x": self.x})
        if what == "diagonal" or V is None or metric is None:
            return SiloRequest(messages.DIAGONAL, {**self.batch, "parts": ["diagonal"]}, {"at": self.x})
        arrays: dict[str, Array] = {"V": V.numpy()}
        vectors = {"at": self.x, "metric": metric}
        return SiloRequest(messages.CURVATURE, {**self.batch, "parts": ["curvature"]}, vectors, {}, arrays)


class SiloSteps:
    """Local steps of silos."""

    def __init__(self, channel: SiloChannel, question: SiloRequest, clients: Clients) -> None:
        self._channel, self._question, self._clients = channel, question, clients

    def norms(self) -> Vector:
        """‖d_i‖² per silo."""
        return self._channel.scalars(_sizes(self.held("d")), self._clients)[:, 0]

    def held(self, what: str) -> SiloRequest:
        """The question that the vector would answer."""
        return replace(self._question, values={**self._question.values, "parts": [what]})


def _sizes(about: SiloRequest) -> SiloRequest:
    """How long such a vector is."""
    return replace(about, kind=messages.SIZES, values={**about.values, "about": about.kind})
