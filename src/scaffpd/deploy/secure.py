r"""Secure sums over deployed silos: of columns before training, of every vector during training.

c_i and d_i stay at their silos, so no earlier answer can replace an absent silo: the run waits for
it. A sum that lacks one masked vector can never be opened.

Columns may have very different scales, but a sum has one clip. So every sum over columns is made
first to a multiple of 2⁻ᶠ, then of the remainder with a clip smaller by as much, and so on until
every column has its digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import numpy as np
from torch import Tensor

from scaffpd.data.tabular.agree import width
from scaffpd.deploy import messages
from scaffpd.deploy.messages import SCALE, Array, JsonMapping, Message, plain
from scaffpd.deploy.remote import Facts, RemoteChannel, Session, SiloRequest, columns_of, itself
from scaffpd.errors import ExposedError, InputError
from scaffpd.federation import Vector
from scaffpd.federation.questions import (
    GradientsAt,
    Question,
    Reply,
    Scores,
    SharedSum,
    Vectors,
)
from scaffpd.privacy.mechanism import Clip
from scaffpd.run.settings.model_file import linear
from scaffpd.secure.aggregation import SecureSums
from scaffpd.secure.masking import FixedPoint
from scaffpd.secure.parties import MaskedReply, SumRequest
from scaffpd.secure.terms import LARGEST, SMALLEST

TOGETHER = "all silos"  # the name of a sum over all
ATTEMPTS = 5  # sums over columns: the first, and remainders
EXACT = 1e-15


class SiloParties:
    """Silos that mask what they send, over a session: the `parties` of a `SecureSums`."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def meet(self, names: Sequence[str]) -> None:
        """Send all cards to all silos; each refuses those that it does not trust."""
        cards = []
        for name, reply in self.session.ask(SiloRequest(messages.CARD), names).items():
            card = reply.values.get("card")
            if not isinstance(card, dict) or card.get("name") != name:
                raise InputError("card-of-another", f"Silo {name!r} shows no card of its own.")
            cards.append(card)
        self.session.ask(SiloRequest(messages.MEET, {"cards": cards}), names)

    def mask(self, wanted: SumRequest, length: int) -> dict[str, MaskedReply]:
        """Return the masked vectors of all silos, or the sizes; all get the same question."""
        about = wanted.held.about if isinstance(wanted.held, SiloVectors) else wanted.held
        terms = wanted.weights.terms
        numbers = wanted.numbers
        values = {
            **about.values,
            "about": about.kind,
            "names": list(terms.names),
            "colluding": terms.colluding,
            "weights": wanted.weights.values.tolist(),
            "numbers": None if numbers is None else numbers.values(),
        }
        found: dict[str, MaskedReply] = {}

        def check(answers: Mapping[str, Message]) -> dict[str, str]:
            useless = {}
            for name, reply in answers.items():
                if "declined" not in reply.values:
                    masked = _read_masked(reply, length, numbers)
                    if masked is None:
                        useless[name] = "its part of a secure sum cannot be used"
                    else:
                        found[name] = masked
            return useless

        request = SiloRequest(messages.MASKED, values, about.arrays)
        for name, reply in self.session.ask(request, terms.names, check).items():
            if "declined" in reply.values:
                kind = ExposedError if reply.values.get("exposed") is True else InputError
                why = plain(reply.values["declined"])
                raise kind("silo-declines", f"Silo {name!r} declines: {why}")
        return found


def _read_masked(reply: Message, length: int, numbers: FixedPoint | None) -> MaskedReply | None:
    """Read a masked vector; return `None` if the reply cannot be used.

    A vector comes if and only if it fits the number format.
    """
    exponent = reply.values.get("exponent")
    vector = reply.arrays.get("masked")
    if type(exponent) is not int or not SMALLEST <= exponent <= LARGEST:
        return None
    if vector is not None and (vector.dtype != np.int64 or vector.shape != (length,)):
        return None
    if (vector is not None) != (numbers is not None and exponent <= numbers.exponent):
        return None
    return MaskedReply(exponent, None if vector is None else vector.view(np.uint64))


def secure_totals(
    session: Session, members: Sequence[str], colluding: int | None
) -> Callable[[SiloRequest], dict[str, Mapping[str, Array]]]:
    """Return a function that asks for totals and returns their sum over all silos."""
    parties = SiloParties(session)
    parties.meet(members)
    sums = SecureSums(parties, colluding, lambda exchanges, up, down: None)

    def added(kind: str, about: SiloRequest, length: int) -> Vector:
        return sums.sum(kind, about, dict.fromkeys(members, 1.0), length)

    def totals(question: SiloRequest) -> dict[str, Mapping[str, Array]]:
        what = "squares" if "mean" in question.arrays else "sum"
        columns = width(question.values["schema"])
        about = SiloRequest("totals", {**question.values, "parts": ["n", what]}, question.arrays)
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
    """Silos of a federation with masked vectors: a `Channel`, and the `parties` of its sums."""

    keeps = False

    def __init__(self, session: Session, facts: Facts) -> None:
        RemoteChannel.__init__(self, session, facts)
        self.meet(self.names)

    def ask(self, question: Question, chosen: Sequence[int]) -> Reply:
        """Return every silo's open numbers, and handles on vectors.

        A silo computes a vector when the sum over all is asked for.
        """
        if isinstance(question, Scores):
            return self.scores(question)
        request = self.request(question, chosen)
        shapes = question.shapes(len(self.like))
        hidden = {
            part: self._handle(request, part, shapes.pop(part), chosen)
            for part in question.vectors & shapes.keys()
        }
        if isinstance(question, GradientsAt) and self._noise.get("colluding") is not None:
            shares = partial(self._shared, question.x, hidden["c"], chosen)
            hidden["c"] = replace(hidden["c"], addends=shares)
        if question.scalars:
            shapes["scalars"] = (len(question.scalars),)
        parts = self.exchange(request, shapes, chosen) if shapes else {}
        numbers = {part: partial(itself, parts[part]) for part in shapes}
        return Reply(numbers | columns_of(question, parts), hidden)

    def _handle(
        self,
        request: SiloRequest,
        part: str,
        shape: tuple[int, ...],
        chosen: Sequence[int],
    ) -> SiloVectors:
        """Return a handle on a vector that stays at its silo; silos report its norm."""
        about = replace(request, values={**request.values, "parts": [part]})
        size = replace(about, kind=messages.SIZES, values={**about.values, "about": about.kind})

        def norms() -> Tensor:
            return self.exchange(size, {"scalars": (1,)}, chosen)["scalars"][:, 0]

        return SiloVectors(_not_available, _not_available, norms, shape, about=about)

    @property
    def _noise(self) -> JsonMapping:
        setup = self.session.setup
        return {} if setup is None else setup.privacy

    def _shared(
        self, x: Tensor, held: SiloVectors, chosen: Sequence[int], weights: Tensor
    ) -> SharedSum:
        """Return a sum to which silos add shares of the noise, in the units sent to them.

        See `PrivateOracle`.
        """
        setup = self.session.setup
        noise = self._noise
        assert setup is not None
        w = weights.numpy()
        scale = float(np.max(np.abs(w) / self.facts.constants.samples[list(chosen)])) or 1.0
        clip = Clip.of(float(noise["clip"]), float(noise["noise"]), int(noise["together"]))
        asked = replace(held, about=replace(held.about, values={**held.about.values, SCALE: scale}))
        l2 = linear(setup.model).l2
        if not isinstance(l2, float):
            raise InputError("l2-of-shared-noise", "Shared noise needs one l2 for all columns.")
        return SharedSum(asked, np.inf, clip.unit * scale, l2 * float(w.sum()) * x)


@dataclass(frozen=True, eq=False)
class SiloVectors(Vectors):
    """Vectors that stay at their silos; `about` is the question that they answer."""

    about: SiloRequest = field(kw_only=True)


def _not_available(*_: object) -> NoReturn:
    raise InputError(
        "vectors-stay-at-silos", "Vectors of deployed secure sums stay at their silos."
    )
