r"""A silo's part in secure sums: its keys, its rules, and the one function by which answers leave.

If vectors are masked, only what `RELEASED` or its question lists leaves in the clear; other
questions are refused. The masks of a vector depend on the whole question, so a coordinator that
asks silos different things gets no sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from pydantic import FiniteFloat

from scaffpd.deploy import messages
from scaffpd.deploy.messages import (
    JsonMapping,
    Message,
    MissingAgreement,
    asked_digest,
    names_of,
    number,
    read_values,
)
from scaffpd.deploy.silo.guard import SiloGuard
from scaffpd.deploy.silo.records import as_numbers, as_text
from scaffpd.errors import ExposedError, InputError
from scaffpd.federation import Vector
from scaffpd.federation.questions import QUESTIONS, Curvature
from scaffpd.run.settings.silo import SecureRules, SiloFile
from scaffpd.secure.masking import Card, FixedPoint, Identity, Party, Terms
from scaffpd.secure.parties import (
    DisclosureGuard,
    GuardedParty,
    SumRecord,
    TooLarge,
    Weighting,
)
from scaffpd.secure.terms import LARGEST, Forgotten

RELEASED: dict[str, tuple[str, ...]] = {
    "hello": (),
    "describe": (),
    "setup": ("constants",),
    "start": ("x",),
    messages.CARD: (),
    messages.MEET: (),
    messages.MASKED: ("masked",),
    messages.SIZES: ("scalars",),
    messages.SPENT: (),
}
TOTALS = (["n", "sum"], ["n", "squares"])
REMEMBERED = 20_000  # sums of one run
NAMELESS = "There is nothing to be masked in the answer to {!r}."


class JournalledGuard(DisclosureGuard):
    """A `DisclosureGuard` that stores its sums in the journal, which outlives the process."""

    def __init__(self, rules: SecureRules, guard: SiloGuard, run: str) -> None:
        super().__init__(not rules.projections, guard.sketch, REMEMBERED)
        self._journal = guard.journal
        self._run = run
        self._loaded = 0

    def check(self, *asked: Any) -> SumRecord | None:
        """Admit the vector to a sum, or refuse."""
        known = self._journal.known(self._run, "sum")
        for length, sketch, names, weights, *more in islice(known.values(), self._loaded, None):
            super().remember(
                SumRecord(length, as_numbers(sketch), tuple(names), as_numbers(weights), *more)
            )
        self._loaded = len(known)
        return super().check(*asked)

    def remember(self, record: SumRecord | None) -> None:
        """Record a sum before the vector leaves."""
        if record is not None:
            about = (
                record.length,
                as_text(record.sketch),
                record.names,
                as_text(record.weights),
                *record[4:],
            )
            self._journal.note(
                self._run, "sum", hashlib.sha256(repr(about).encode()).hexdigest(), about
            )


class SiloMasking:
    """One silo in secure sums."""

    def __init__(self, file: SiloFile, guard: SiloGuard) -> None:
        self.rules = file.secure
        self._guard = guard
        self._sums: dict[str, GuardedParty] = {}
        own = Identity.stored(file.name, file.identity)
        self.party = Party(own, file.secure.pins, file.secure.colluding)

    def answer(self, asked: Message, compute: Callable[[Message, str], Message]) -> Message:
        """Answer any question; `compute` answers those that are not about keys and masks."""
        try:
            if asked.kind in (messages.MASKED, messages.SIZES):
                return self._hidden(asked, compute)
            if asked.kind in messages.SECRET:
                if asked.kind == messages.CARD:
                    return Message("answer", {"card": self.party.identity.card.values()})
                cards = asked.values.get("cards")
                self.party.meet(
                    [Card.of(card) for card in cards] if isinstance(cards, list) else []
                )
                return Message("answer")
            return compute(asked, "")
        except Forgotten:  # secrets end with a process: silos have to meet again
            raise MissingAgreement from None

    def _hidden(self, asked: Message, compute: Callable[[Message, str], Message]) -> Message:
        """Answer with the masked vector of another question, or only with its norm."""
        about = str(asked.values.get("about"))
        parts = names_of(asked.values, "parts")
        hidden = QUESTIONS[about].vectors if about in QUESTIONS else ()
        known = (
            parts in TOTALS
            if about == "totals"
            else len(parts) == 1 and parts[0] in hidden and "beyond" not in asked.values
        )
        if not known or (about == Curvature.kind and not self.rules.projections):
            raise InputError("nothing-to-mask", NAMELESS.format(about))
        sums = None if asked.kind == messages.SIZES else self._weighting(asked.values, about)
        computed = compute(Message(about, asked.values, asked.arrays), asked.kind)
        found = computed.arrays
        if not set(parts) <= set(found):
            raise InputError("nothing-to-mask", NAMELESS.format(about))
        vector = np.concatenate(
            [np.asarray(found[part], dtype=np.float64).ravel() for part in parts]
        )
        columns = None
        if sums is None:
            return Message("answer", {}, {"scalars": np.array([float(np.square(vector).sum())])})
        if about == "totals":
            # the remainder of a coarser sum; none of its digits, if there was no such sum
            bits = int(
                np.clip(number({"beyond": -LARGEST, **asked.values}, "beyond"), -LARGEST, LARGEST)
            )
            columns = (vector, bits)
            vector = vector - np.ldexp(np.rint(np.ldexp(vector, bits)), -bits)
        if computed.values.get("shared"):  # already weighted, before the noise was added
            sums = Weighting(sums.terms, np.ones(len(sums.values)))
        return self._masked(asked, sums, vector, columns)

    def _weighting(self, values: JsonMapping, about: str) -> Weighting:
        """Read the members of a sum and their weights."""
        names = names_of(values, "names")
        kinds = {"weights": list[FiniteFloat], "colluding": int}
        read = read_values(kinds, values, "The question does not say who takes part in the sum.")
        known = {self.party.name, *self.party.known}
        if len(names) > len(known) or not set(names) <= known:
            raise Forgotten("client-not-met", "This client has not met everybody in that sum.")
        if (
            len(names) < self.rules.members
            or self.party.name not in names
            or len(read["weights"]) != len(names)
        ):
            raise InputError(
                "sum-too-small",
                f"This silo takes part in sums over {self.rules.members} silos or more, itself "
                "included.",
            )
        if about == "totals" and set(read["weights"]) != {1.0}:
            raise InputError("weights-not-equal", "Sums over columns need equal weights.")
        return Weighting(Terms(tuple(names), read["colluding"]), np.array(read["weights"]))

    def _masked(
        self,
        asked: Message,
        sums: Weighting,
        vector: Vector,
        columns: tuple[Vector, int] | None,
    ) -> Message:
        """Answer with the masked vector, or with its size."""
        given = asked.values.get("numbers")
        numbers = None if given is None else FixedPoint.of(given)
        # or this process, before a run is named
        run = self._guard.run or self.party.identity.card.once.hex()
        if run not in self._sums:
            self._sums[run] = GuardedParty(
                self.party, JournalledGuard(self.rules, self._guard, run), self.rules.share
            )
        try:
            found = self._sums[run].answer(sums, numbers, vector, asked_digest(asked), columns)
        except (TooLarge, ExposedError) as refusal:
            # sent as an answer, as the sum is at fault and not this silo
            exposed = isinstance(refusal, ExposedError)
            return Message("answer", {"declined": str(refusal), "exposed": exposed})
        sent = {} if found.vector is None else {"masked": found.vector.view(np.int64)}
        return Message("answer", {"exponent": found.exponent}, sent)

    def released(self, kind: str, message: Message) -> Message:
        """Return the part of an answer that may leave: the scalars that its question declares."""
        asked = QUESTIONS.get(kind)
        allowed = RELEASED.get(kind)
        if (
            asked is not None
            and asked.scalars
            and (kind != Curvature.kind or self.rules.projections)
        ):
            allowed = tuple(part for part in message.arrays if part not in asked.vectors)
        if allowed is None:
            raise InputError(
                "vectors-only-masked",
                f"This silo sends only masked vectors: the question {kind!r} is not answered. Does "
                "the federation lack [secure]?",
            )
        arrays = {
            name: np.array(array) for name, array in message.arrays.items() if name in allowed
        }
        return Message(message.kind, message.values, arrays)
