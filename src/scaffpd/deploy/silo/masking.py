r"""A silo's part in secure sums: its keys, its rules, and the one gate through which its answers leave.

While vectors are to be masked, an answer leaves with the numbers that its question shows and nothing else: what has
none is refused, not answered in the clear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from scaffpd.config.silo import SecureRules
from scaffpd.deploy import mask_messages, messages
from scaffpd.deploy.messages import Array, Message, MissingVectors, names_of, number
from scaffpd.errors import InputError
from scaffpd.federation.questions import QUESTIONS, Curvature, GradientsAt, LocalSteps, ProximalSteps, Question, Reply
from scaffpd.masking import Card, Identity, Party, Terms
from scaffpd.masking.keys import Authority
from scaffpd.masking.terms import LARGEST, Accused, Forgotten
from scaffpd.secure.parties import Contribution, DisclosureGuard, GuardedParty, TooLarge, coarse, quantised

RELEASED: dict[str, tuple[str, ...]] = {
    "hello": (), "describe": (), "setup": ("constants",), "start": ("x",), messages.CARD: (), messages.MEET: (),
    messages.OPEN: ("shown", "sealed"), messages.MASKED: ("masked",), messages.REVEAL: ("shares", "shown", "sealed"),
    messages.SIZES: ("scalars",), messages.SPENT: (),
}  # fmt: skip
TOTALS = ("n", "sum", "squares")
MEASURED = {(GradientsAt.kind, "c"), (LocalSteps.kind, "d"), (ProximalSteps.kind, "d")}  # what silos tell the length of
PROBE = 3  # the place of a loss among the constants


class SiloMasking:
    """One silo in secure sums."""

    def __init__(self, name: str, rules: SecureRules) -> None:
        self.rules = rules
        signed = None
        if rules.certificate is not None and rules.certificate_key is not None:
            try:
                signed = rules.certificate.read_bytes(), rules.certificate_key.read_bytes()
            except OSError as error:
                raise InputError(f"The certificate or its key in {str(error.filename)!r} cannot be read.") from None
        own = Identity.kept(name, rules.identity, signed)
        authority = None if rules.authority is None else Authority.read(rules.authority)
        self.party = Party(own, rules.pins, authority, rules.colluding)
        self.guard = DisclosureGuard(rules.changing, counted=not rules.projections)

    def kept(self) -> dict[str, Any]:
        """Return what another process of this silo needs to go on; it holds secrets."""
        return {"party": self.party.kept(), "company": self.guard.kept()}

    def restore(self, kept: Any) -> None:
        """Go on from what `kept` returned."""
        try:
            self.party.restore(kept["party"])
            self.guard.restore(kept["company"])
        except (KeyError, TypeError, ValueError):
            raise InputError("the secrets of secure sums cannot be read") from None

    def answer(self, asked: Message, compute: Callable[[Message], Message]) -> Message:
        """Answer any question; `compute` answers those that are not about keys and masks."""
        try:
            if asked.kind in (messages.MASKED, messages.SIZES):
                return self._hidden(asked, compute)
            return self._keys(asked.kind, asked.values) if asked.kind in messages.SECRET else compute(asked)
        except Accused as claim:  # an answer: who is meant, and not who says so, has to answer for it
            return Message("answer", {"accused": claim.name, "why": str(claim)})
        except Forgotten:  # secrets do not outlive a process; the others go on, and this silo joins them later
            raise MissingVectors(["secrets"]) from None

    def _keys(self, kind: str, values: Mapping[str, Any]) -> Message:
        name = self.party.name
        if kind == messages.CARD:
            return Message("answer", {"card": self.party.identity.card.values()})
        if kind == messages.MEET:
            cards = values.get("cards")
            self.party.meet([Card.of(card) for card in (cards if isinstance(cards, list) else [])])
            return Message("answer")
        if kind == messages.OPEN:
            terms = Terms.of(values.get("terms"))
            return Message("answer", {}, mask_messages.opened_arrays(self.party.share(terms), terms, name))
        terms, following = Terms.of(values.get("terms")), Terms.of(values.get("following"))
        shares = self.party.reveal(terms.exchange, names_of(values, "survivors"))
        opened = mask_messages.opened_arrays(self.party.share(following), following, name)
        return Message("answer", {}, mask_messages.share_arrays(shares, terms, name) | opened)

    def _hidden(self, asked: Message, compute: Callable[[Message], Message]) -> Message:
        """Answer with a vector that another question is about: masked, or no more than its length."""
        about, parts = str(asked.values.get("about")), names_of(asked.values, "parts")
        hidden = TOTALS if about == "totals" else QUESTIONS[about].vectors if about in QUESTIONS else ()
        if not parts or not set(parts) <= set(hidden) or (about == Curvature.kind and not self.rules.projections):
            raise InputError(f"There is nothing to be masked in the answer to {about!r}.")
        found = compute(Message(about, asked.values, asked.arrays)).arrays
        if not set(parts) <= set(found):
            raise InputError(f"There is nothing to be masked in the answer to {about!r}.")
        vector = np.concatenate([np.asarray(found[part], dtype=np.float64).ravel() for part in parts])
        if asked.kind == messages.SIZES:
            if (about, *parts) not in MEASURED:
                raise InputError("This silo tells the length of its gradient and of its update, and of nothing else.")
            return Message("answer", {}, {"scalars": np.array([float(np.square(vector).sum())])})
        if "beyond" in asked.values:  # the digits that a coarser sum has left
            bits = int(np.clip(number(asked.values, "beyond"), -LARGEST, LARGEST))
            vector = vector - np.ldexp(np.rint(np.ldexp(vector, bits)), -bits)
        return self._masked(asked.values, asked.arrays, vector)

    def _masked(self, values: Mapping[str, Any], arrays: Mapping[str, Array], vector: Array) -> Message:
        """Answer with the masked vector, or with its size."""
        part = Contribution(number(values, "weight"), number(values, "total"), self.rules.share)
        numbers = mask_messages.format_of(values.get("numbers"))
        terms, around = None, {}
        if numbers is not None:
            terms = Terms.of(values.get("terms"))
            around = mask_messages.around_of(arrays, terms, self.party.name)
        try:
            found = GuardedParty(self.party, self.guard).answer(part, terms, around, numbers, vector)
        except TooLarge as refusal:  # an answer: the run ends with it, rather than going on without this silo
            return Message("answer", {"declined": str(refusal)})
        sent = {} if found.vector is None else {"masked": found.vector.view(np.int64)}
        return Message("answer", {"exponent": found.exponent}, sent)

    def coarse(self, question: Question, reply: Reply) -> Reply:
        """Round losses to this silo's quantum."""
        return coarse(question, reply, self.rules.quantum)

    def released(self, kind: str, message: Message) -> Message:
        """Return what may leave of an answer: the numbers that its question shows."""
        asked, allowed = QUESTIONS.get(kind), RELEASED.get(kind)
        if asked is not None and asked.scalars and (kind != Curvature.kind or self.rules.projections):
            allowed = tuple(part for part in message.arrays if part not in asked.vectors)
        if allowed is None:
            raise InputError(
                f"This silo sends vectors masked only: the question {kind!r} is not answered. Does the federation lack "
                "[secure]?"
            )
        arrays = {name: np.array(array) for name, array in message.arrays.items() if name in allowed}
        if kind == "setup":
            arrays["constants"][PROBE] = quantised(arrays["constants"][PROBE], self.rules.quantum)
        return Message(message.kind, message.values, arrays)
