"""Silos of one process around a board: threads that exchange posts, with hooks for lies."""

import threading
from functools import lru_cache

import numpy as np
import torch

import scaffpd as sp
from scaffpd.deploy.replica import PublicFacts, replica
from scaffpd.deploy.transcript import FIRST, Session
from scaffpd.models.personal import base_of
from scaffpd.secure.keys import Card, Identity

AGREEMENT = bytes(range(32))
# five parties of one process check the same signatures, whose outcome is the same for each
Card.signed = lru_cache(2**14)(Card.signed)


class Everything:
    """What sessions may post that no agreement is behind."""

    def __contains__(self, part):
        return True


ALL = {"announced": Everything()}


class GoneError(Exception):
    """Another silo has ended early."""


class ThreadBoard:
    """Posts by step; `tamper(name, step, senders, posts, log)` returns what a silo is shown."""

    def __init__(self, names, tamper=None, patience=20.0):
        self.names = tuple(names)
        self.tamper = tamper
        self.patience = patience
        self.log = {}
        self.changed = threading.Condition()
        self.broken = False

    def link(self, name):
        board = self

        class Linked:
            def exchange(self, step, senders, own):
                return board.exchange(name, step, senders, own)

        return Linked()

    def exchange(self, name, step, senders, own):
        wanted = self.names[:1] if senders == FIRST else self.names
        with self.changed:
            posts = self.log.setdefault(step, {})
            if own is not None:
                posts[name] = own
                if set(wanted) <= set(posts):
                    self.changed.notify_all()
            there = self.changed.wait_for(
                lambda: self.broken or set(wanted) <= set(posts), self.patience
            )
            if not there or not set(wanted) <= set(posts):
                raise GoneError
            shown = dict(posts)
            log = {k: dict(v) for k, v in self.log.items()}
        return shown if self.tamper is None else self.tamper(name, step, senders, shown, log)

    def end(self):
        with self.changed:
            self.broken = True
            self.changed.notify_all()


def sessions(names, tamper=None, identities=None, onlooker=True, **options):
    """A session for every silo and an onlooker, and their board."""
    board = ThreadBoard(names, tamper, **options)
    identities = identities or {name: Identity() for name in names}
    cards = {name: identities[name].card for name in names}
    made = {
        name: Session(board.link(name), cards, AGREEMENT, name, identities[name], **ALL)
        for name in names
    }
    if onlooker:
        made[""] = Session(board.link(""), cards, AGREEMENT, **ALL)
    return made, board


def together(made, board, action):
    """Run action(name, session) everywhere at once; return results, or what was raised."""
    found = {}

    def go(name):
        try:
            found[name] = action(name, made[name])
        except BaseException as error:
            found[name] = error
            board.end()

    threads = [threading.Thread(target=go, args=(name,), daemon=True) for name in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def facts_of(cohorts):
    """What an agreement might say of these silos: their rows, and the rate of the steepest."""
    channels = [cohort.channel for cohort in cohorts.values()]
    known = [channel.constants() for channel in channels]
    model = channels[0].model
    base = base_of(model)
    network = not isinstance(base, sp.Linear)
    return PublicFacts(
        np.concatenate([one.samples for one in known]),
        None if network else model,
        0 if network else len(channels[0].start()) // (base.classes or 1),
        max(float(one.smoothness.max()) for one in known),
    )


def trained(
    cohorts,
    method,
    tamper=None,
    colluding=1,
    rounds=50,
    tol=1e-8,
    meddle=None,
    journals=None,
    **options,
):
    """Train at every silo, each with its own rows; results by silo, "" the onlooker's.

    `journals` are of an earlier epoch.
    """
    made, board = sessions(list(cohorts), tamper, **options)
    facts = facts_of(cohorts)

    def action(name, session):
        session.tolerance = method.tolerance
        session.journal = (journals or {}).get(name, session.journal)
        session.journal.begin()
        session.open({})
        own = cohorts[name].channel if name else None
        federation = replica(session, own, colluding, facts, "test")
        chosen = method if meddle is None else meddle(name, method, federation)
        result = sp.train(chosen, federation, rounds, tol)
        session.confirm()
        return result

    return together(made, board, action), made, board


def singles(cohort_of, names):
    return {name: cohort_of([name]) for name in names}


class Many:
    """One object per silo, used in lockstep: what is called on it is called on each in a thread."""

    def __init__(self, objects, board):
        self._objects = objects
        self._board = board

    def __getattr__(self, name):
        found = {who: getattr(one, name) for who, one in self._objects.items()}
        return (
            self._result(found)
            if not all(map(callable, found.values()))
            else Many(found, self._board)
        )

    def __call__(self, *given, **named):
        def action(who, function):
            own = [_own(one, who) for one in given]
            return function(*own, **{key: _own(one, who) for key, one in named.items()})

        self._board.broken = False
        found = together(self._objects, self._board, action)
        errors = [one for one in found.values() if isinstance(one, BaseException)]
        told = [error for error in errors if not isinstance(error, GoneError)]
        if errors:
            raise (told or errors)[0]
        return self._result(found)

    def _result(self, found):
        plain = (float, int, str, tuple, np.ndarray, torch.Tensor, type(None))
        first = next(iter(found.values()))
        if isinstance(first, plain) and not isinstance(first, tuple):
            for other in found.values():
                np.testing.assert_array_equal(np.asarray(other), np.asarray(first))
            return first
        data = type(first).__name__ in ("Constants", "ClientScores", "Traffic", "tuple")
        return first if data else Many(found, self._board)


def _own(given, who):
    return given._objects[who] if isinstance(given, Many) else given


def lockstep(cohorts, journals=None, colluding=1):
    """The federation of all silos and an onlooker, as one object."""
    made, board = sessions(list(cohorts), patience=20.0)
    facts = facts_of(cohorts)

    def action(name, session):
        session.tolerance = 1e-6
        session.journal = (journals or {}).get(name, session.journal)
        session.open({})
        return replica(session, cohorts[name].channel if name else None, colluding, facts, "test")

    found = together(made, board, action)
    for one in found.values():
        if isinstance(one, BaseException):
            raise one
    return Many(found, board)
