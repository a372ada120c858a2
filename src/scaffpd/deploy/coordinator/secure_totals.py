r"""Sums over columns, masked: what silos have to add up before training is nobody's business either.

Columns may be of very different sizes, and a sum has one clip. So every sum is made twice: to a multiple of 2⁻ᶠ, and
then what is left beyond that, with a clip that is as much smaller; and once more, until every column has its digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scaffpd.deploy.coordinator.line import Question
from scaffpd.deploy.coordinator.opening import Refusal
from scaffpd.deploy.coordinator.parties import Checks, SiloParties
from scaffpd.deploy.protocol.wire import Array, Message
from scaffpd.secure.sums import Sums
from scaffpd.tabular.schema import width

Totals = dict[str, Mapping[str, Array]]
TOGETHER = "all silos"
ATTEMPTS, EXACT = 5, 1e-15


def secure_totals(
    ask: Callable[[Question], dict[str, Message]], members: Sequence[str], secure: Mapping[str, Any]
) -> Callable[[Question], Totals]:
    """Puts a question for totals, and returns those of all silos together."""

    def checked(question: Question, names: Sequence[str], check: Checks) -> dict[str, Message]:
        replies = ask(question)
        for name, why in check(replies).items():
            raise Refusal(name, f"{why.rstrip('.')}.")
        return replies

    parties = SiloParties(checked)
    parties.meet(members)
    sums = Sums(parties, secure.get("colluding"), secure.get("leaving"), lambda exchanges, up, down: None)

    def added(kind: str, about: Question, length: int) -> Any:
        return sums.sum(kind, about, dict.fromkeys(members, 1.0), length)

    def totals(question: Question) -> Totals:
        what, columns = "squares" if "mean" in question.arrays else "sum", width(question.values["schema"])
        about = Question("totals", {**question.values, "parts": ["n", what]}, arrays=question.arrays)
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
