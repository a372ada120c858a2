"""What leaves a silo under an agreement, phase by phase, from the questions of all its steps."""

from __future__ import annotations

from typing import NamedTuple

from scaffpd.federation.border import Announced, Part, Shown, each, shown
from scaffpd.federation.questions import LossFacts
from scaffpd.run.settings.federation import FederationTerms


class Commitment(Announced):
    """What shows later that rows are the same."""

    kind = "commitment"
    shows = (each("rows", "a salted hash of your rows, which shows later that they are the same"),)


class Spendings(Announced):
    """What a private run has cost."""

    kind = "spent"
    shows = (each("epsilon", "ε so far, which depends on the questions and not on your rows"),)


class Phase(NamedTuple):
    """What leaves in a part of a run."""

    when: str
    shown: list[Shown]


def phases(terms: FederationTerms) -> list[Phase]:
    """Return what leaves before training, at every point and at the end."""
    private = terms.privacy is not None
    method = terms.method
    asked = method.asks(convex=terms.model.network is None)
    looks = [] if method.asks_losses else shown({"evaluate"})
    begin = [] if private else [*Commitment.shows]
    ends = [*Spendings.shows] if private else shown({"evaluate", "evaluate.accuracy"})
    return [
        Phase("before training", [*begin, *terms.plan().shows(), *LossFacts.shows]),
        Phase("in every round", [*shown(asked), *looks]),
        Phase("at the end", ends),
    ]


def announced(terms: FederationTerms) -> frozenset[Part]:
    """Return all that a silo may post."""
    return frozenset(one.key for phase in phases(terms) for one in phase.shown)
