"""Silos in this process behind the same bytes: the conformance suite's first runtime, and a way to try a deployment."""

from __future__ import annotations

from collections.abc import Mapping

from scaffpd.deploy.protocol.transport import Answering, Failure


class InProcess:
    """A `Transport` to silos that are objects here."""

    def __init__(self, silos: Mapping[str, Answering]) -> None:
        self.silos = dict(silos)

    def sites(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(sorted(self.silos))

    def ask(self, questions: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """One after another; they always answer."""
        return {
            site: self.silos[site].answer(question)
            if site in self.silos
            else Failure("there is no such site", gone=True)
            for site, question in questions.items()
        }
