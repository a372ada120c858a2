"""The one thing that an engine has to bring along: carrying bytes to sites and back.

Everything else (what is asked, what is answered, what happens when nobody answers) is the same for every engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Failure:
    """No reply from a site.

    Attributes:
        reason: what happened, in words.
        gone: whether the engine knows that the site is not there any more (and not just slow).
        garbage: whether there was a reply, and it could not be used.
    """

    reason: str
    gone: bool = False
    garbage: bool = False


class Transport(Protocol):
    """Sites that can be asked.

    An engine that authenticates sites by the names of their silos has an attribute `named = True`: then a silo cannot
    call itself anything else.
    """

    def sites(self) -> tuple[str, ...]:
        """The sites that are connected now, by the engine's own names for them, sorted."""

    def ask(self, questions: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send every site its own question and wait for all replies, `timeout` seconds at most.

        A site that fails or does not answer in time yields a `Failure`; it never keeps the others' replies back. A
        reply that comes later than that is thrown away, never taken for the answer to a later question.
        """


class Answering(Protocol):
    """What an engine hosts at a site: a `Silo`."""

    def answer(self, question: bytes) -> bytes:
        """The reply to a question; a refusal is a reply as well, nothing is ever raised."""

    def kept(self) -> bytes:
        """What another process of this site needs to go on: agreements, vectors, secrets of open sums; no rows."""

    def restore(self, kept: bytes) -> None:
        """Go on from what `kept` returned in an earlier process."""
