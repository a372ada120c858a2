r"""Secure sums over deployed silos: of columns before training, of every vector during training.

c_i and d_i stay at their silos, so no earlier answer can replace an absent silo. The run waits for it or, if all silos
agree to that, repeats the round with the remaining ones. A sum that lacks one masked vector can never be opened.

Columns may have very different scales, but a sum has one clip. So every sum over columns is made first to a multiple of
2⁻ᶠ, then of the remainder with a clip smaller by as much, and so on until every column has its digits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_
from secrets import token_hex
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from scaffpd.data.tabular.agree import width
from scaffpd.deploy import messages
from scaffpd.deploy.byzantine import Shapes, too_large, troubles
from scaffpd.deploy.messages import SCALE, Array, Facts, Message, Unusable, plain
from scaffpd.deploy.remote import RemoteChannel, itself
from scaffpd.deploy.session import TOGETHER, Lost, Membership, SiloRequest
from scaffpd.errors import ExposedError, InputError
from scaffpd.federation.questions import (
    GradientsAt,
    Losses,
    Question,
    Reply,
    Scores,
    SharedSum,
    Vectors,
)
from scaffpd.federation.weighed import Response, Thresholds, WeighedQuestion, WeighedSteps
from scaffpd.privacy.mechanism import Clip
from scaffpd.run.settings.federation import PAUSE, FederationFile
from scaffpd.run.settings.model_file import linear
from scaffpd.secure import SecureSums
from scaffpd.secure.masking import FixedPoint, Terms
from scaffpd.secure.parties import MaskedReply, SumRequest, Weighting
from scaffpd.secure.terms import FEWEST as MASKED_FEWEST
from scaffpd.secure.terms import LARGEST, SMALLEST

Checks = Callable[[Mapping[str, Message]], Mapping[str, str]]
Ask = Callable[[SiloRequest, Sequence[str], Checks], dict[str, Message]]
WITNESSES = 2
MASSES = 32  # stored answers about thresholds
USELESS = "its part of a secure sum cannot be used"
CHANGES = "changes its size when the question is repeated (masks)"


class SiloParties:
    """Silos that mask what they send.

    `ask` asks silos and returns the answers that pass the checks. `leave`, if the run may continue without a silo, ends
    the segment to do so.
    """

    def __init__(self, ask: Ask, leave: Callable[[str, str], NoReturn] | None = None) -> None:
        self._ask = ask
        self._leave = leave

    def _read(
        self, request: SiloRequest, names: Sequence[str], read: Callable[[str, Message], Any]
    ) -> dict[str, Any]:
        """Ask, and return `read` of every answer; an answer that it rejects counts as none.

        An accusation by two silos is believed and ends the sum.
        """
        parts: dict[str, Any] = {}

        def check(answers: Mapping[str, Message]) -> dict[str, str]:
            troubles = {}
            for name, reply in answers.items():
                try:
                    parts[name] = None if "accused" in reply.values else read(name, reply)
                except InputError as error:
                    troubles[name] = str(error)
            return troubles

        replies = self._ask(request, names, check)
        said = {
            name: reply.values["accused"]
            for name, reply in replies.items()
            if "accused" in reply.values
        }
        claims = {name: plain(accused) for name, accused in said.items()}
        why = {accused: plain(replies[name].values.get("why")) for name, accused in claims.items()}
        sure = {
            accused: why[accused]
            for accused, n in Counter(claims.values()).items()
            if n >= WITNESSES
        }
        if sure:
            self.accused(sure)
        for name, accused in claims.items():
            self.disputed(
                name, f"it does not add up with {accused!r}: {why[accused]}", len(replies)
            )
        return {name: parts[name] for name in replies}

    def accused(self, claims: Mapping[str, str]) -> None:
        """End a sum with silos whose cards several others reject."""
        name, sentence = next(iter(claims.items()))
        raise InputError("silo-added-up", f"Silo {name!r} cannot be added up with: {sentence}")

    def meet(self, names: Sequence[str]) -> None:
        """Send all cards to all silos; raise an error if one rejects them."""
        cards = self._read(
            SiloRequest(messages.CARD), names, lambda _, reply: reply.values.get("card")
        )
        for name, card in cards.items():
            if not isinstance(card, dict) or card.get("name") != name:
                raise InputError("silo-shows-card", f"Silo {name!r} shows no card of its own.")
        self._read(
            SiloRequest(messages.MEET, {"cards": list(cards.values())}),
            names,
            lambda _, reply: reply,
        )

    def mask(self, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Ask all silos for their masked vectors, or the sizes; all get the same question with all weights."""
        replies = self._masked(wanted, length)
        for name, reply in replies.items():
            if isinstance(reply, InputError):
                self.declined(name, reply, wanted)
        return replies

    def _masked(self, wanted: SumRequest, length: int) -> dict[str, Any]:
        """Return all answers; an error object stands for a silo that declines."""
        about: SiloRequest = wanted.held
        names = wanted.weights.terms.names
        numbers = wanted.numbers
        request = SiloRequest(
            messages.MASKED, _said(about, wanted), about.vectors, {}, about.arrays
        )
        return self._read(request, names, lambda _, reply: _masked(reply, length, numbers))

    def declined(self, name: str, why: InputError, wanted: SumRequest) -> None:
        """End a sum that a silo declines."""
        raise type(why)(why.code, f"Silo {name!r} declines: {why}")

    def disputed(self, name: str, why: str, members: int) -> None:
        """Continue without a silo that alone rejects a card which others accept, or end the sum."""
        if self._leave is not None and members > WITNESSES:
            self._leave(name, why)
        raise InputError("silo-says", f"Silo {name!r} says that {why}")


def _said(about: SiloRequest, wanted: SumRequest) -> dict[str, Any]:
    """Return the values of a question for masked vectors."""
    terms = wanted.weights.terms
    numbers = wanted.numbers
    return {
        **about.values,
        "about": about.kind,
        "names": list(terms.names),
        "colluding": terms.colluding,
        "weights": wanted.weights.values.tolist(),
        "numbers": None if numbers is None else numbers.values(),
    }


def _masked(
    reply: Message, length: int, numbers: FixedPoint | None = None
) -> MaskedReply | InputError:
    """Read a silo's masked vector, or why it declines; a vector comes if and only if it fits the number format."""
    if "declined" in reply.values:
        kind = ExposedError if reply.values.get("exposed") is True else InputError
        return kind("silo-declines", plain(reply.values["declined"]))
    exponent = reply.values.get("exponent")
    vector = reply.arrays.get("masked")
    if type(exponent) is not int or not SMALLEST <= exponent <= LARGEST:
        raise InputError("masked", USELESS)
    if vector is not None and (vector.dtype != np.int64 or vector.shape != (length,)):
        raise InputError("masked", USELESS)
    if (vector is not None) != (numbers is not None and exponent <= numbers.exponent):
        raise InputError("masked", USELESS)
    return MaskedReply(exponent, None if vector is None else vector.view(np.uint64))


Totals = dict[str, Mapping[str, Array]]
ATTEMPTS = 5
EXACT = 1e-15


def secure_totals(
    ask: Callable[[SiloRequest], dict[str, Message]], members: Sequence[str], file: FederationFile
) -> Callable[[SiloRequest], Totals]:
    """Return a function that asks for totals and returns their sum over all silos."""

    def checked(request: SiloRequest, names: Sequence[str], check: Checks) -> dict[str, Message]:
        replies = ask(request)
        for name, why in check(replies).items():
            unusable(name, why)
        return replies

    def unusable(name: str, why: str) -> NoReturn:
        raise Unusable(name, why)

    parties = SiloParties(checked, None if file.faults.missing == PAUSE else unusable)
    parties.meet(members)
    sums = SecureSums(parties, file.masking.get("colluding"), lambda exchanges, up, down: None)

    def added(kind: str, about: SiloRequest, length: int) -> Any:
        return sums.sum(kind, about, dict.fromkeys(members, 1.0), length)

    def totals(question: SiloRequest) -> Totals:
        what = "squares" if "mean" in question.arrays else "sum"
        columns = width(question.values["schema"])
        about = SiloRequest(
            "totals", {**question.values, "parts": ["n", what]}, arrays=question.arrays
        )
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


class MaskedRemote(SiloParties, RemoteChannel):
    """Silos of a federation with masked vectors: both a `Channel` and the `parties` of its sums.

    Each silo's own file sets its share and quantum.
    """

    keeps = False

    def __init__(self, membership: Membership, facts: Facts) -> None:
        SiloParties.__init__(
            self, self.put, None if membership.policy.missing == PAUSE else self._without
        )
        RemoteChannel.__init__(self, membership, facts)
        self._sizes: tuple[Any, dict[str, int]] = (None, {})  # sizes of the vectors asked for last
        # the last questions about thresholds, their values, and the answers
        self._masses: list[tuple[SiloRequest, dict[str, Any], Any]] = []
        self.meet(self.names)

    def put(self, question: SiloRequest, names: Sequence[str], check: Checks) -> dict[str, Message]:
        """Ask a question that every silo has to answer."""
        replies = self.membership.ask(question, list(names), check)
        lacking = [name for name in names if name not in replies]
        if lacking:
            raise Lost(lacking)
        return replies

    def ask(self, question: Question, chosen: Sequence[int]) -> Reply:
        """Return every silo's open numbers, and handles on vectors that it computes when their sum is asked for."""
        if isinstance(question, Scores):
            return self.scores(question)
        request = self.request(question, chosen)
        shapes = question.shapes(len(self.like))
        padded = isinstance(question, WeighedQuestion)
        hidden = {
            part: self._handle(request, part, shapes.pop(part), chosen, padded)
            for part in question.vectors & shapes.keys()
        }
        if isinstance(question, GradientsAt) and self._noise.get("colluding") is not None:
            hidden["c"] = replace(
                hidden["c"], addends=partial(self._shared, question.x, hidden["c"], chosen)
            )
        if question.scalars:
            shapes["scalars"] = (len(question.scalars),)
        table = self._numbers(request, shapes, chosen) if shapes else {}
        if isinstance(question, Losses):  # only sizes can be tested here
            got = {
                i: {"scalars": row.numpy()} for i, row in zip(chosen, table["scalars"], strict=True)
            }
            self.accuse(self.judge.losses(question.x, question.batch_size, got))
        numbers = {part: partial(itself, table[part]) for part in shapes}
        numbers |= {
            name: partial(itself, table["scalars"][:, j]) for j, name in enumerate(question.scalars)
        }
        return Reply(numbers, hidden)

    def _numbers(
        self, request: SiloRequest, shapes: Shapes, chosen: Sequence[int]
    ) -> dict[str, Tensor]:
        """Stack the parts of all answers."""
        names = [self.names[i] for i in chosen]
        replies = self.put(
            request, names, lambda answers: troubles(answers, shapes, shapes, self.like)
        )
        return {
            part: torch.from_numpy(np.stack([replies[name].arrays[part] for name in names]))
            for part in shapes
        }

    def _handle(
        self,
        request: SiloRequest,
        part: str,
        shape: tuple[int, ...],
        chosen: Sequence[int],
        padded: bool,
    ) -> SiloVectors:
        """Return a handle on a vector that stays at its silo; silos report its norm."""
        about = replace(request, values={**request.values, "parts": [part]})
        size = replace(about, kind=messages.SIZES, values={**about.values, "about": about.kind})

        def norms() -> Tensor:
            return self._numbers(size, {"scalars": (1,)}, chosen)["scalars"][:, 0]

        fine = padded and shape != self.like.shape
        return SiloVectors(
            _stays, _stays, norms, shape, double_weights=fine, hides_size=padded, about=about
        )

    @property
    def _noise(self) -> Mapping[str, Any]:
        setup = self.membership.session.setup
        return {} if setup is None else setup.privacy

    def _shared(
        self, x: Tensor, held: SiloVectors, chosen: Sequence[int], weights: Tensor
    ) -> SharedSum:
        """Return a sum to which silos add shares of the noise, in the units sent to them (see `PrivateOracle`)."""
        setup = self.membership.session.setup
        noise = self._noise
        assert setup is not None
        w = weights.numpy()
        scale = float(np.max(np.abs(w) / self.facts.constants.samples[list(chosen)])) or 1.0
        clip = Clip.of(float(noise["clip"]), float(noise["noise"]), int(noise["together"]))
        asked = replace(held, about=replace(held.about, values={**held.about.values, SCALE: scale}))
        return SharedSum(
            asked, np.inf, clip.unit * scale, float(linear(setup.model).l2) * float(w.sum()) * x
        )

    def accused(self, claims: Mapping[str, str]) -> None:
        """Quarantine a silo whose keys several others reject."""
        known = {
            name: f"{why.rstrip('.')} (masks)" for name, why in claims.items() if name in self.names
        }
        self.accuse({self.names.index(name): why for name, why in known.items()})
        super().accused(claims)

    def mask(self, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Collect the masked vectors; refuse one so large that the sum would lose its digits."""
        about = self._with_masses(wanted.held.about)
        replies = super().mask(replace(wanted, held=about), length)
        if about.kind == Thresholds.kind and all(
            reply.vector is not None for reply in replies.values()
        ):
            found = (replies[name].vector for name in wanted.weights.terms.names if name in replies)
            rows = np.stack([vector for vector in found if vector is not None])
            self._masses = [
                *self._masses[1 - MASSES :],
                (about, _said(about, wanted), rows.view(np.int64)),
            ]
        self._check_sizes(wanted, replies)
        weights = dict(zip(wanted.weights.terms.names, wanted.weights.values, strict=True))
        if SCALE in wanted.held.about.values:  # all have the same, public size
            return replies
        sizes = {
            self.names.index(name): float(np.ldexp(1.0, reply.exponent)) / abs(weights[name])
            for name, reply in replies.items()
            if weights[name] and reply.exponent > SMALLEST
        }
        self.accuse(
            too_large("masked vector has size", sizes, sizes, self.membership.policy.outlier**2)
        )
        return replies

    def _check_sizes(self, wanted: SumRequest, replies: Mapping[str, MaskedReply]) -> None:
        """Accuse silos whose vector changes its size when it is asked for again in another number format."""
        asked = (wanted.held, wanted.weights)
        sizes = {name: reply.exponent for name, reply in replies.items()}
        before = (
            self._sizes[1]
            if self._sizes[0] is not None and all(map(is_, self._sizes[0], asked))
            else sizes
        )
        self._sizes = asked, sizes
        other = [name for name in sizes if before.get(name, sizes[name]) != sizes[name]]
        self.accuse({self.names.index(name): f"its vector {CHANGES}" for name in other})

    # --- sums that fail, if the run may continue without a silo

    def declined(self, name: str, why: InputError, wanted: SumRequest) -> None:
        """Continue without a silo that declines at an average weight or less; otherwise end the sum."""
        weights = np.abs(wanted.weights.normalised)
        usual = weights[wanted.weights.terms.names.index(name)] <= 1 / len(weights)
        if self._leave is not None and usual and not isinstance(why, ExposedError):
            self._leave(name, f"it declines a sum: {why}")
        super().declined(name, why, wanted)

    def _without(self, name: str, why: str) -> NoReturn:
        self.membership.leave(name, "refused", why)
        raise Lost([name])

    def spoilt(self, changed: Sequence[str]) -> None:
        """Quarantine the silo that has spoilt a sum, if it can be found without any silo's vector.

        It is a silo whose masked vector changes when it is asked for again, or one without which sums of ones add up
        and with which they do not: it has false keys or other software.
        """
        found = dict.fromkeys(
            changed, "its masked vector changes when the question is repeated (masks)"
        )
        if not changed and len(self.names) > MASKED_FEWEST and not self._adds_up(self.names):
            fine = [
                one
                for one in self.names
                if self._adds_up([other for other in self.names if other != one])
            ]
            found = dict.fromkeys(
                fine[:1], "sums of ones add up without it, and with it they do not (masks)"
            )
            found = (
                found if len(fine) == 1 else {}
            )  # a silo that spoils only some sums could frame another
        self.accuse({self.names.index(one): why for one, why in found.items()})

    def _adds_up(self, names: Sequence[str]) -> bool:
        """Return whether masked ones of these silos add up."""
        numbers = FixedPoint.finest(len(names), 0)
        terms = Terms.usual(tuple(names), None)
        about = SiloRequest(messages.DRILL, {"once": token_hex(16)})
        wanted = SumRequest(about, Weighting(terms, np.ones(len(names))), numbers)
        replies = [*self._masked(wanted, messages.DRILLED).values()]
        if not all(isinstance(reply, MaskedReply) for reply in replies):
            return False
        total: Any = np.sum([reply.vector for reply in replies], axis=0, dtype=np.uint64)
        return bool(np.all(numbers.decode(total) == len(names)))

    def _with_masses(self, about: SiloRequest) -> SiloRequest:
        """Attach all masked answers for the next higher threshold, and their question.

        Silos add them up to Σ λ_j themselves.
        """
        if about.kind not in (Response.kind, WeighedSteps.kind):
            return about
        nu = about.values["weighing"]["levels"][0]
        above = [
            (
                min(
                    (level for level in asked.values["weighing"]["levels"] if level >= nu),
                    default=np.inf,
                ),
                k,
            )
            for k, (asked, _, _) in enumerate(self._masses)
            if _same_weighing(asked, about)
        ]
        if not above:
            return about
        _, seen, rows = self._masses[min(above)[1]]
        return replace(
            about, values={**about.values, "seen": seen}, arrays={**about.arrays, "seen": rows}
        )


@dataclass(frozen=True, eq=False)
class SiloVectors(Vectors):
    """Vectors that stay at their silos; `about` is the question that they answer."""

    about: SiloRequest = field(kw_only=True)


def _same_weighing(asked: SiloRequest, about: SiloRequest) -> bool:
    """Return whether two questions derive weights from thresholds by the same rule at the same point."""
    one, other = (
        {**request.values["weighing"], "levels": 0, "name": 0} for request in (asked, about)
    )
    return asked.vectors["at"] is about.vectors["at"] and one == other


def _stays(*_: Any) -> NoReturn:
    raise InputError(
        "vectors-deployed-secure", "Vectors of deployed secure sums stay at their silos."
    )
