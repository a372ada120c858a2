r"""A silo's part in secure sums: its keys, its rules, and the one function through which its answers leave.

If vectors are masked, only what `RELEASED` or its question lists leaves in the clear; other questions are refused.
The masks of a vector depend on the whole question, so a coordinator that asks silos different things gets no sum.

If silos weight their vectors themselves, by a threshold from the coordinator, one of them could be the whole sum: at a
high threshold only the worst-served silo has weight. So the coordinator shows all silos the masked answers to its
question for Σ λ_j at a few thresholds, and that question. A silo finds its own answer to it among them and adds them up
to Σ λ_j; all silos are shown the same, as this is part of the present question. The sum at the next higher
threshold is no larger than the present one, so the silo compares its own weight with that. Answers to different
questions, or masked with other keys, add up to noise, which shows: every silo's last number is a multiple of 2⁸ (see
`padded`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np
from pydantic import FiniteFloat

from scaffpd.deploy import messages
from scaffpd.deploy.messages import (
    Array,
    Message,
    MissingVectors,
    asked_digest,
    names_of,
    number,
    read_values,
)
from scaffpd.deploy.silo.guard import SiloGuard
from scaffpd.deploy.silo.records import as_numbers, as_text
from scaffpd.errors import ExposedError, InputError
from scaffpd.federation.questions import QUESTIONS, Curvature, Question, Reply
from scaffpd.federation.weighed import Thresholds, WeighedQuestion
from scaffpd.run.settings.silo import SecureRules
from scaffpd.secure import parties
from scaffpd.secure.keys import Authority
from scaffpd.secure.masking import Card, FixedPoint, Identity, Party, Terms
from scaffpd.secure.parties import (
    DisclosureGuard,
    GuardedParty,
    SumRecord,
    TooLarge,
    WeightedVector,
    Weighting,
)
from scaffpd.secure.terms import LARGEST, Accused, Forgotten

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
PROBE = 3  # the index of the loss among the constants
REMEMBERED = 20_000  # sums of one run
MASSES = "masses"  # the journal's name for masked answers about thresholds
UNSEEN = "The question does not show what everybody has answered for thresholds above its own."
NAMELESS = "There is nothing to be masked in the answer to {!r}."


class JournalledGuard(DisclosureGuard):
    """A `DisclosureGuard` that keeps its sums in the journal shared by the silo's processes."""

    def __init__(self, rules: SecureRules, guard: SiloGuard, run: str) -> None:
        super().__init__(rules.changing, not rules.projections, guard.sketch, REMEMBERED)
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

    def __init__(self, name: str, rules: SecureRules, guard: SiloGuard) -> None:
        self.rules = rules
        self._guard = guard
        self._sums: dict[str, GuardedParty] = {}
        signed = None
        if rules.certificate is not None and rules.certificate_key is not None:
            try:
                signed = rules.certificate.read_bytes(), rules.certificate_key.read_bytes()
            except OSError as error:
                raise InputError(
                    "certificate-key-read",
                    f"The certificate or its key in {str(error.filename)!r} cannot be read.",
                ) from None
        own = Identity.kept(name, rules.identity, signed)
        authority = None if rules.authority is None else Authority.read(rules.authority)
        self.party = Party(
            own, rules.pins, authority, rules.colluding, {name, *rules.known} if rules.known else ()
        )

    def restore(self, kept: Any) -> None:
        """Restore what `Party.kept` returned in another process of this silo."""
        try:
            self.party.restore(kept)
        except (KeyError, TypeError, ValueError):
            raise InputError(
                "secrets-secure-sums", "the secrets of secure sums cannot be read"
            ) from None

    def answer(
        self,
        asked: Message,
        compute: Callable[[Message, str], Message],
        vectors: Callable[[Message], dict[str, Array]],
    ) -> Message:
        """Answer any question; `compute` answers those that are not about keys and masks."""
        try:
            if asked.kind in (messages.MASKED, messages.SIZES):
                return self._hidden(asked, compute, vectors)
            return (
                self._keys(asked.kind, asked.values)
                if asked.kind in messages.SECRET
                else compute(asked, "")
            )
        except Accused as claim:  # sent as an answer, so that it counts against the accused
            return Message("answer", {"accused": claim.name, "why": str(claim)})
        except (
            Forgotten
        ):  # secrets end with a process; the others continue, and this silo joins them later
            raise MissingVectors(["secrets"]) from None

    def _keys(self, kind: str, values: Mapping[str, Any]) -> Message:
        """Return this silo's card, or store the others'."""
        if kind == messages.CARD:
            return Message("answer", {"card": self.party.identity.card.values()})
        cards = values.get("cards")
        self.party.meet([Card.of(card) for card in (cards if isinstance(cards, list) else [])])
        return Message("answer")

    def _hidden(
        self,
        asked: Message,
        compute: Callable[[Message, str], Message],
        vectors: Callable[[Message], dict[str, Array]],
    ) -> Message:
        """Answer with the masked vector of another question, or only with its norm."""
        about = str(asked.values.get("about"))
        if about == messages.DRILL and asked.kind == messages.MASKED:
            return self._drill(asked)
        parts = names_of(asked.values, "parts")
        hidden = QUESTIONS[about].vectors if about in QUESTIONS else ()
        known = (
            parts in TOTALS
            if about == "totals"
            else len(parts) == 1 and parts[0] in hidden and "beyond" not in asked.values
        )
        if not known or (about == Curvature.kind and not self.rules.projections):
            raise InputError("hidden", NAMELESS.format(about))
        sums = None if asked.kind == messages.SIZES else self._weighting(asked.values, about)
        computed = compute(Message(about, asked.values, asked.arrays), asked.kind)
        found = computed.arrays
        if not set(parts) <= set(found):
            raise InputError("hidden", NAMELESS.format(about))
        vector = np.concatenate(
            [np.asarray(found[part], dtype=np.float64).ravel() for part in parts]
        )
        if issubclass(QUESTIONS.get(about, Question), WeighedQuestion):
            vector = parties.padded(vector)
        bare = None
        if messages.BARE in found and sums is not None:
            mass = self._mass(asked, vectors(asked), sums.terms)
            bare = WeightedVector(found[messages.BARE], float(found[messages.WEIGHT][0]), mass)
        if sums is None:
            return Message("answer", {}, {"scalars": np.array([float(np.square(vector).sum())])})
        if (
            about == "totals"
        ):  # the remainder of a coarser sum; none of its digits, if there was no such sum
            bits = int(
                np.clip(number({"beyond": -LARGEST, **asked.values}, "beyond"), -LARGEST, LARGEST)
            )
            bare = WeightedVector(vector, 1.0, len(sums.values), bits)
            vector = vector - np.ldexp(np.rint(np.ldexp(vector, bits)), -bits)
        if computed.values.get("shared"):  # already weighted, before the noise was added
            sums = Weighting(sums.terms, np.ones(len(sums.values)))
        digest = asked_digest(asked, vectors(asked))
        reply = self._masked(asked, sums, vector, digest, bare)
        if about == Thresholds.kind and "masked" in reply.arrays:
            name = f"{digest.hex()} {messages.digest(reply.arrays['masked'])}"
            self._guard.journal.note(self._guard.run, MASSES, name)
        return reply

    def _mass(self, asked: Message, vectors: Mapping[str, Array], terms: Terms) -> float:
        """Return a lower bound of Σ λ_j from all silos' masked answers for thresholds at this point."""
        seen = asked.values.get("seen", {})
        rows = asked.arrays.get("seen")
        n = len(terms.names)
        read = read_values({"weighing": dict[str, Any], "numbers": dict[str, Any]}, seen, UNSEEN)
        levels = read_values({"levels": list[FiniteFloat]}, read["weighing"], UNSEEN)["levels"]
        if seen.get("about") != Thresholds.kind or _about(seen) != _about(asked.values):
            raise InputError("mass", UNSEEN)
        if rows is None or rows.dtype != np.int64 or rows.shape != (n, 3 + 2 * len(levels)):
            raise InputError("mass", UNSEEN)
        own = np.ascontiguousarray(rows[terms.names.index(self.party.name)])
        before = Message(
            messages.MASKED, {**seen, "setup": asked.values.get("setup"), "vectors": {}}
        )
        name = f"{asked_digest(before, {'at': vectors['at']}).hex()} {messages.digest(own)}"
        if name not in self._guard.journal.known(self._guard.run, MASSES):
            raise InputError(
                "silo-own-answer", "This silo's own answer is not among those that it is shown."
            )
        numbers = FixedPoint.of(read["numbers"])
        nu = asked.values["weighing"]["levels"][0]
        total = numbers.decode(rows.view(np.uint64).sum(0, dtype=np.uint64))
        off = np.ldexp(n, -numbers.bits)
        higher = [float(total[2 + 2 * k]) for k, level in enumerate(levels) if level >= nu]
        if not higher:
            raise InputError("mass", UNSEEN)
        least = 2**parties.STEP
        if (
            total[-1] % least
            or total[-1] < n * least
            or min(higher) < -off
            or max(higher) > n + off
        ):
            raise InputError("silo-shown-add", "What the silo is shown does not add up.")
        return float(np.clip(max(higher) - off, 0, 1))

    def _drill(self, asked: Message) -> Message:
        """Answer with masked ones, under masks used for nothing else."""
        sums = self._weighting(asked.values, messages.DRILL)
        numbers = FixedPoint.of(asked.values.get("numbers"))
        masked = self.party.mask(
            sums.terms, asked_digest(asked, {}), numbers, np.ones(messages.DRILLED)
        )
        return Message("answer", {"exponent": 0}, {"masked": masked.view(np.int64)})

    def _weighting(self, values: Mapping[str, Any], about: str) -> Weighting:
        """Read the members of a sum and their weights."""
        names = names_of(values, "names")
        kinds = {"weights": list[FiniteFloat], "colluding": int}
        read = read_values(kinds, values, "The question does not say who takes part in the sum.")
        known = {self.party.name, *self.party.known}
        if len(names) > len(known) or not set(names) <= known:
            raise Forgotten(
                "client-met-everybody", "This client has not met everybody in that sum."
            )
        if (
            len(names) < self.rules.members
            or self.party.name not in names
            or len(read["weights"]) != len(names)
        ):
            raise InputError(
                "silo-takes-part",
                f"This silo takes part in sums over {self.rules.members} silos or more, itself included.",
            )
        weighed = about == "totals" or issubclass(QUESTIONS.get(about, Question), WeighedQuestion)
        if weighed and set(read["weights"]) != {1.0}:
            raise InputError(
                "sums-over-columns",
                "Sums over columns, and of vectors that silos weight themselves, need equal weights.",
            )
        return Weighting(Terms(tuple(names), read["colluding"]), np.array(read["weights"]))

    def _masked(
        self,
        asked: Message,
        sums: Weighting,
        vector: Array,
        digest: bytes,
        bare: WeightedVector | None,
    ) -> Message:
        """Answer with the masked vector, or with its size."""
        given = asked.values.get("numbers")
        numbers = None if given is None else FixedPoint.of(given)
        run = (
            self._guard.run or self.party.identity.card.once.hex()
        )  # or this process, before a run is named
        if run not in self._sums:
            self._sums[run] = GuardedParty(
                self.party, JournalledGuard(self.rules, self._guard, run), self.rules.share
            )
        try:
            found = self._sums[run].answer(sums, numbers, vector, digest, bare)
        except (
            TooLarge,
            ExposedError,
        ) as refusal:  # sent as an answer, as the sum is at fault and not this silo
            return Message(
                "answer", {"declined": str(refusal), "exposed": isinstance(refusal, ExposedError)}
            )
        sent = {} if found.vector is None else {"masked": found.vector.view(np.int64)}
        return Message("answer", {"exponent": found.exponent}, sent)

    def coarse(self, question: Question, reply: Reply) -> Reply:
        """Round losses to this silo's quantum."""
        return parties.coarse(question, reply, self.rules.quantum)

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
            said = f"This silo sends only masked vectors: the question {kind!r} is not answered."
            raise InputError("federation-lack-secure", f"{said} Does the federation lack [secure]?")
        arrays = {
            name: np.array(array) for name, array in message.arrays.items() if name in allowed
        }
        if kind == "setup" and self.rules.quantum > 0:
            arrays["constants"][PROBE] = (
                np.rint(arrays["constants"][PROBE] / self.rules.quantum) * self.rules.quantum
            )
        return Message(message.kind, message.values, arrays)


def _about(values: Mapping[str, Any]) -> list[Any]:
    """Return what a question for weights shares with the one about thresholds: the rows, and the rule for weights."""
    how = {
        name: value for name, value in values["weighing"].items() if name not in ("levels", "name")
    }
    return [how, *(values.get(name) for name in ("batch_size", "key", "names", "colluding"))]
