"""What leaves a silo under an agreement, phase by phase, from the questions of all its steps."""

from __future__ import annotations

from typing import NamedTuple

from scaffpd.algorithms import ALGORITHMS, Fair
from scaffpd.algorithms.base import ERRORS, PRODUCTS, SLOPES, VECTORS
from scaffpd.federation.border import Announced, Part, Shown, each, shown
from scaffpd.federation.modes import ModesAt, ModeSpread, ModeSquares, OwnCoefficients
from scaffpd.federation.questions import Scores
from scaffpd.settings.terms import FederationTerms


class Commitment(Announced):
    """What shows later that rows are the same."""

    kind = "commitment"
    shows = (each("rows", "a salted hash of your rows, which shows later that they are the same"),)


class Spendings(Announced):
    """What a private run has cost."""

    kind = "spent"
    shows = (
        each(
            "epsilon",
            "ε so far, which depends on the questions and not on your rows",
            False,
            (0, 1e6),
        ),
    )


class Phase(NamedTuple):
    """What leaves in a part of a run."""

    when: str
    shown: list[Shown]


# what an own method may ask, of which nothing is known before its operator has agreed; `Fair`
# stands for others
UNKNOWN = frozenset[str]().union(
    *(
        kind.questions - kind.simulated()
        for kind in ALGORITHMS.values()
        if kind is not Fair and not kind.needs & {VECTORS, SLOPES}
    )
)


def _asked(terms: FederationTerms) -> frozenset[str]:
    """Return what the agreed method asks.

    An operator who has agreed to code of the silo's own has read that it may ask for what methods
    of the package ask, and for nothing else.
    """
    if terms.own:
        return UNKNOWN
    proven = terms.privacy is None and terms.model.l2 != 0
    asked = terms.method.asks(convex=terms.model.network is None)
    if terms.privacy is not None:  # `Fair` has fixed steps then, for networks too
        asked |= terms.method.asks()
    asked |= {PRODUCTS} if terms.reaching else frozenset()
    return asked if proven else asked - {ERRORS}


def phases(terms: FederationTerms) -> list[Phase]:
    """Return what leaves before training, at every point and at the end."""
    private = terms.privacy is not None
    begin = [] if private else [*Commitment.shows]
    ends = [*Spendings.shows] if private else shown({Scores.kind, f"{Scores.kind}.score"})
    ends += _effects(terms)
    return [
        Phase("before training", [*begin, *terms.plan().shows()]),
        Phase("in every round", shown(_asked(terms))),
        Phase("at the end", ends),
    ]


def _effects(terms: FederationTerms) -> list[Shown]:
    """Return what a table of effects takes."""
    model = terms.model
    if model.effects is None:
        return []
    intercept = not terms.task.timed
    differ = model.effects == "slopes" or (model.effects == "intercepts" and intercept)
    found = [*ModesAt.shows, *ModeSpread.shows]
    found += ModeSquares.shows if differ or model.errors == "robust" else ()
    return [*found, *(OwnCoefficients.shows if model.effects == "stratified" and intercept else ())]


def announced(terms: FederationTerms) -> frozenset[Part]:
    """Return all that a silo may post."""
    return frozenset(one.key for phase in phases(terms) for one in phase.shown)
