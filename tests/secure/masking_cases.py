"""A whole exchange among clients of which some leave, and everything that its server receives."""

from __future__ import annotations

from dataclasses import dataclass, field

from scaffpd.masking import Aggregator, FixedPoint, Identity, Party, Terms
from scaffpd.masking.keys import nonce


def parties(names):
    made = {name: Party(Identity(name)) for name in names}
    cards = [party.identity.card for party in made.values()]
    for party in made.values():
        party.meet(cards)
    return made


@dataclass
class View:
    """What a server receives in an exchange: openings, masked vectors, shares; and what it makes of them."""

    opened: dict = field(default_factory=dict)
    masked: dict = field(default_factory=dict)
    shares: dict = field(default_factory=dict)
    total: object = None
    survivors: tuple = ()


def exchange(clients, vectors, numbers=None, colluding=None, leaving=None, unmasked=(), unrevealed=()):
    """One exchange; `unmasked` leave before they send their vectors, `unrevealed` before they give their shares."""
    view, names = View(), list(vectors)
    terms = Terms.usual(nonce(), names, colluding, leaving)
    numbers = numbers or FixedPoint.finest(len(names), 10)
    view.opened = {name: clients[name].share(terms) for name in names}
    server = Aggregator(terms, view.opened, len(next(iter(vectors.values()))))
    for name in names:
        if name not in unmasked:
            view.masked[name] = clients[name].mask(terms.exchange, server.around(name), numbers, vectors[name])
            server.take(name, view.masked[name])
    view.survivors = server.survivors
    for name in server.survivors:
        if name not in unrevealed:
            view.shares[name] = clients[name].reveal(terms.exchange, server.survivors)
    view.total = server.open(view.shares)
    return view
