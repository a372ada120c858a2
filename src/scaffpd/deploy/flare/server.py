"""Run the coordinator at FLARE's server, over a `Transport` of Collab calls.

Every site is called in its own thread with its own timeout: FLARE's group call would send the same
bytes to all, and a dead site would delay the others.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvflare.collab import collab
from nvflare.collab.api.exceptions import RunAborted

from scaffpd.deploy.flare.serving import SERVER_FILE
from scaffpd.deploy.messages import Failure, JsonMapping

GRACE = 2.0  # seconds that FLARE gets for its own timeout


class CollabTransport:
    """Sites of the running job, by FLARE's proxies; a site's name is in its certificate."""

    def __init__(self, proxies: JsonMapping, aborted: Callable[[], bool] = lambda: False) -> None:
        self._proxies = dict(proxies)
        self._aborted = aborted

    def ask(self, questions: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        arrived: queue.SimpleQueue[tuple[str, bytes | Failure]] = queue.SimpleQueue()
        for site, question in questions.items():
            if site not in self._proxies:
                arrived.put((site, Failure("it is not connected")))
                continue
            task = (site, question, timeout, arrived)
            threading.Thread(target=self._deliver, args=task, daemon=True).start()
        late = Failure(f"No reply within {timeout:g} seconds.")
        answers: dict[str, bytes | Failure] = dict.fromkeys(questions, late)
        waiting = set(questions)
        deadline = time.monotonic() + timeout + GRACE
        while waiting and time.monotonic() < deadline:
            if self._aborted():
                raise RunAborted(
                    "FLARE ended the job, as it does once a silo's process has ended; the log of "
                    f"that silo says why (no answer yet: {', '.join(sorted(waiting))})"
                )
            try:
                site, reply = arrived.get(timeout=0.5)
            except queue.Empty:
                continue
            if site in waiting:
                answers[site] = reply
                waiting.discard(site)
        return answers

    def _deliver(
        self, site: str, question: bytes, timeout: float, arrived: queue.SimpleQueue[Any]
    ) -> None:
        reply: object
        try:
            reply = self._proxies[site](timeout=timeout).answer(question)
            if not isinstance(reply, bytes):
                reply = Failure(f"The site sent {type(reply).__name__} instead of bytes.")
        except RunAborted:  # `ask` says it, in our words
            return
        except Exception as problem:  # one failing site must not lose the others' replies
            late = "timed out" in str(problem)
            reply = Failure(f"No reply within {timeout:g} seconds." if late else str(problem))
        arrived.put((site, reply))


class Coordinator:
    """The object that FLARE runs at the server (startup kits name its path: leave it here)."""

    @collab.main  # type: ignore[untyped-decorator]
    def run(self) -> None:
        from scaffpd.deploy.coordinate import coordinate

        proxies = {str(proxy.name): proxy for proxy in collab.clients}
        context = collab.context
        transport = CollabTransport(proxies, lambda: bool(context.is_aborted()))
        coordinate(Path(os.environ[SERVER_FILE]), transport)
