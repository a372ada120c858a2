r"""Silos in a secure sum, as the coordinator reaches them: cards, openings, masked vectors and shares go to and fro."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from scaffpd.deploy.coordinator.line import Question
from scaffpd.deploy.protocol import masks, needs
from scaffpd.deploy.protocol.wire import Array, Message, plain
from scaffpd.errors import InputError
from scaffpd.masking import Aggregator, Opened, Terms
from scaffpd.masking.fixed_point import LARGEST, SMALLEST
from scaffpd.secure.reach import Masked, Wanted

Checks = Callable[[Mapping[str, Message]], Mapping[str, str]]
Ask = Callable[[Question, Sequence[str], Checks], dict[str, Message]]
WITNESSES = 2
USELESS = "its part of a secure sum cannot be used"


class SiloParties:
    """Silos that mask what they send.

    Args:
        ask: puts a question to silos; the answers of those who are there and whose answers stand up to the checks.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def meet(self, names: Sequence[str]) -> None:
        """Hand everybody's cards to everybody; who does not take them says why, and there is no sum."""
        cards = {name: reply.values.get("card") for name, reply in self._ask(Question(needs.CARD), names, _no).items()}
        for name, card in cards.items():
            if not isinstance(card, dict) or card.get("name") != name:
                raise InputError(f"Silo {name!r} shows no card of its own.")
        self._heard(self._ask(Question(needs.MEET, {"cards": list(cards.values())}), names, _no))

    def _heard(self, replies: Mapping[str, Message]) -> None:
        """What silos say about each other: believed where two say it, and the end of the sum in any case."""
        claims = {name: plain(reply.values["accused"]) for name, reply in replies.items() if "accused" in reply.values}
        why = {claims[name]: plain(replies[name].values.get("why")) for name in claims}
        sure = {accused: why[accused] for accused, n in Counter(claims.values()).items() if n >= WITNESSES}
        if sure:
            self.accused(sure)
        for name, accused in claims.items():
            raise InputError(f"Silo {name!r} does not add up with {accused!r}: {why[accused]}")

    def accused(self, claims: Mapping[str, str]) -> None:
        """Several silos say so: whose cards or shares are not right."""
        name, sentence = next(iter(claims.items()))
        raise InputError(f"Silo {name!r} cannot be added up with: {sentence}")

    def open(self, terms: Terms) -> dict[str, Opened]:
        """Everybody opens an exchange."""
        question = Question(needs.OPEN, {"terms": terms.values()})
        read = _readable(lambda n, m: None if "accused" in m.values else masks.opened_of(m.arrays, terms, n))
        replies = self._ask(question, terms.names, read)
        self._heard(replies)
        return {name: masks.opened_of(reply.arrays, terms, name) for name, reply in replies.items()}

    def mask(self, aggregator: Aggregator | None, wanted: Wanted, length: int) -> dict[str, Masked]:
        """Everybody's masked vector, or its size."""
        about: Question = wanted.held
        values: dict[str, Any] = {
            **about.values, "about": about.kind, "total": wanted.total, "numbers": masks.format_values(wanted.numbers),
        }  # fmt: skip
        personal: dict[str, tuple[dict[str, Any], dict[str, Array]]] = {}
        for name, weight in wanted.weights.items():
            arrays = {}
            if aggregator is not None:
                arrays = masks.around_arrays(aggregator.around(name), aggregator.terms, name)
            personal[name] = {"weight": weight}, arrays
        if aggregator is not None:
            values["terms"] = aggregator.terms.values()
        question = Question(needs.MASKED, values, about.vectors, {}, about.arrays, personal)
        replies = self._ask(question, list(wanted.weights), _readable(lambda _, m: _masked(m, length)))
        self._heard(replies)
        for name, reply in replies.items():
            if "declined" in reply.values:
                raise InputError(f"Silo {name!r} declines: {plain(reply.values['declined'])}")
        return {name: _masked(reply, length) for name, reply in replies.items()}

    def reveal(
        self, terms: Terms, survivors: Sequence[str], following: Terms
    ) -> tuple[dict[str, dict[str, int]], dict[str, Opened]]:
        """Shares that open a sum, and the opening of the exchange that follows."""
        values = {"terms": terms.values(), "survivors": list(survivors), "following": following.values()}

        def parts(name: str, reply: Message) -> tuple[dict[str, int], Opened]:
            return masks.shares_of(reply.arrays, terms, name), masks.opened_of(reply.arrays, following, name)

        replies = self._ask(Question(needs.REVEAL, values), survivors, _readable(parts))
        read = {name: parts(name, reply) for name, reply in replies.items()}
        return {name: both[0] for name, both in read.items()}, {name: both[1] for name, both in read.items()}


def _masked(reply: Message, length: int) -> Masked:
    """A silo's answer, checked."""
    if {"declined", "accused"} & set(reply.values):
        return Masked(SMALLEST, None)
    exponent, vector = reply.values.get("exponent"), reply.arrays.get("masked")
    if type(exponent) is not int or not SMALLEST <= exponent <= LARGEST:
        raise InputError(USELESS)
    if vector is None:
        return Masked(exponent, None)
    if vector.dtype != np.int64 or vector.shape != (length,):
        raise InputError(USELESS)
    return Masked(exponent, vector.view(np.uint64))


def _no(answers: Mapping[str, Message]) -> dict[str, str]:
    return {}


def _readable(read: Callable[[str, Message], Any]) -> Checks:
    """Which answers cannot be read, and why."""

    def check(answers: Mapping[str, Message]) -> dict[str, str]:
        troubles = {}
        for name, reply in answers.items():
            try:
                read(name, reply)
            except InputError as error:
                troubles[name] = str(error)
        return troubles

    return check
