"""A whole sum among clients, and everything that its server receives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scaffpd.secure.masking import FixedPoint, Identity, Party, Terms


def parties(names):
    made = {name: Party(Identity(name)) for name in names}
    cards = [party.identity.card for party in made.values()]
    for party in made.values():
        party.meet(cards)
    return made


@dataclass
class View:
    """What a server receives: masked vectors; and what it makes of them."""

    masked: dict = field(default_factory=dict)
    total: object = None


def exchange(clients, vectors, numbers=None, colluding=None, asked=b"one question", told=None):
    """One sum; `told` has those who are asked another question."""
    view = View()
    names = list(vectors)
    terms = Terms.usual(names, colluding)
    numbers = numbers or FixedPoint.finest(len(names), 10)
    for name in names:
        view.masked[name] = clients[name].mask(
            terms, (told or {}).get(name, asked), numbers, vectors[name]
        )
    view.total = np.sum(list(view.masked.values()), axis=0, dtype=np.uint64)
    return view
