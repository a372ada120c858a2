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

Part = tuple[str, str]  # the kind of a question, and the name of a part of its answers
LARGEST = 1e50  # of a number in the clear: larger losses mean divergence
QUESTIONS: dict[str, type[Announced]] = {}


class Shown(NamedTuple):
    """A part of an answer that leaves a client.

    Attributes:
        part: its name.
        words: what an agreement calls it.
        each: whether everybody sees each client's own; else only a sum over all clients.
        extra: whether only some methods ask for it, which then name it.
        kind: of the question, which fills it in.
        range: the least and the most that a number of it can be.
    """

    part: str
    words: str
    each: bool = False
    extra: bool = False
    kind: str = ""
    range: tuple[float, float] = (-LARGEST, LARGEST)

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


def summed(part: str, words: str, extra: bool = False) -> Shown:
    """Announce a part that leaves a client only in a sum over all clients."""
    return Shown(part, words, False, extra)


class Announced:
    """A kind of question, whatever it is about, with all that its answers show.

    Attributes:
        kind: its name in messages, in agreements and in `Algorithm.questions`.
        shows: the parts of its answers.
        scalars: those that every client reveals as a number; they follow from `shows`.
        vectors: those that leave a client only in a sum, if sums are masked; likewise.
    """

    kind: ClassVar[str] = ""
    shows: ClassVar[tuple[Shown, ...]] = ()
    scalars: ClassVar[tuple[str, ...]] = ()
    vectors: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        known = QUESTIONS.get(cls.kind, cls)
        ours = known.__module__.startswith("scaffpd.") > cls.__module__.startswith("scaffpd.")
        base = Announced in cls.__bases__
        if not (cls.kind or base) or ours:
            raise InputError(
                "question-kind-taken",
                f"A new question needs its own kind; {cls.kind!r} is taken.",
            )
        cls.shows = tuple(one._replace(kind=cls.kind) for one in cls.shows)
        cls.scalars = tuple(one.part for one in cls.shows if one.each and not one.extra)
        cls.vectors = tuple(one.part for one in cls.shows if not one.each)
        QUESTIONS[cls.kind] = cls

    @classmethod
    def named(cls, part: str) -> Shown:
        """Return a part by its name."""
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
