"""The border of a client: what leaves it is a part of an answer that was announced beforehand.

A question lists the parts of its answers (`Shown`): in which words an agreement names them, and
whether everybody sees each client's own or only a sum over all clients. What a run announces is the
parts of the questions that its steps ask. Nothing else can be posted: a deployed run looks every
part up before it makes the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from scaffpd.errors import InputError
from scaffpd.objectives.base import LARGEST

Part = tuple[str, str]  # the kind of a question, and the name of a part of its answers
QUESTIONS: dict[str, type[Announced]] = {}


class Shown(NamedTuple):
    """A part of an answer that leaves a client."""

    part: str  # its name
    words: str  # what an agreement calls it
    each: bool = False  # whether everybody sees each client's own; else only a sum over all clients
    extra: bool = False  # whether only some methods ask for it, which then name it
    # whether it has sums over rows of the products of every two columns, from which everybody can
    # work out all two-way tables
    tables: bool = False
    kind: str = ""  # of the question, which fills it in
    range: tuple[float, float] = (-LARGEST, LARGEST)  # the least and the most that a number can be

    @property
    def key(self) -> Part:
        """Return what a session looks up."""
        return self.kind, self.part


def each(
    part: str,
    words: str,
    extra: bool = False,
    range: tuple[float, float] = (-LARGEST, LARGEST),
) -> Shown:
    """Announce a part of which everybody sees each client's own."""
    return Shown(part, words, True, extra, range=range)


def summed(part: str, words: str, extra: bool = False, tables: bool = False) -> Shown:
    """Announce a part that leaves a client only in a sum over all clients."""
    return Shown(part, words, False, extra, tables)


class Announced:
    """A kind of question, whatever it is about, with all that its answers show."""

    kind: ClassVar[str] = ""  # its name in messages, in agreements and in `Algorithm.questions`
    shows: ClassVar[tuple[Shown, ...]] = ()  # the parts of its answers
    # those that every client reveals as a number; they follow from `shows`
    scalars: ClassVar[tuple[str, ...]] = ()
    # those that leave a client only in a sum, if sums are masked; likewise
    vectors: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        # A question of one's own may not take a name of the package's: who reads an agreement must
        # not take one for the other.
        known = QUESTIONS.get(cls.kind, cls)
        ours = known.__module__.startswith("scaffpd.") > cls.__module__.startswith("scaffpd.")
        base = Announced in cls.__bases__
        if not (cls.kind or base) or ours:
            raise InputError(
                "question-kind-taken", f"A new question needs its own kind; {cls.kind!r} is taken."
            )
        cls.shows = tuple(one._replace(kind=cls.kind) for one in cls.shows)
        cls.scalars = tuple(one.part for one in cls.shows if one.each and not one.extra)
        cls.vectors = tuple(one.part for one in cls.shows if not one.each)
        QUESTIONS[cls.kind] = cls

    @classmethod
    def named(cls, part: str) -> Shown:
        return next(one for one in cls.shows if one.part == part)


def shown(asks: Iterable[str]) -> list[Shown]:
    """Return the parts that leave with these questions, by `Algorithm.questions`.

    A kind stands for all parts of its answers but the extra ones, which are named, such as
    "gradients.norm".
    """
    found: list[Shown] = []
    for name in sorted(asks):
        kind, _, extra = name.partition(".")
        parts = QUESTIONS[kind].shows
        found += [one for one in parts if (one.part == extra if extra else not one.extra)]
    return found
