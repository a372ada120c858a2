"""Sees a run through: a job that ends early is handed in again, and the coordinator goes on from its last round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.errors import InputError


class SupervisedJob(Protocol):
    """What is supervised: an engine on this machine, or a deployment in production."""

    def submit(self) -> None:
        """Hand in the job."""

    def running(self) -> bool:
        """Whether it is going."""

    def abort(self) -> None:
        """End it."""

    def connected(self) -> set[str]:
        """The sites that are there."""

    def outside(self) -> set[str]:
        """Those of them that have no part in the running job."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long to keep trying.

    Attributes:
        quorum: the job is not handed in with fewer sites.
        attempts: submissions in a row without a new round in between, before giving up.
        waiting: seconds with too few sites, before giving up.
        seconds: for everything.
        every: seconds between two looks.
        settle: seconds that a job gets before it is ended on behalf of a site that is back.
    """

    quorum: int = 1
    attempts: int = 5
    waiting: float = 300.0
    seconds: float = float("inf")
    every: float = 0.5
    settle: float = 30.0


class Supervisor:
    """Keeps a job going until its outcome is final.

    Args:
        job: what is supervised.
        folder: the run's folder: its outcome, and its rounds to tell progress from standstill.
        limits: when to give up.
        say: is told, in a sentence, what is done.
        look: called again and again meanwhile.
    """

    def __init__(
        self,
        job: SupervisedJob,
        folder: DeployedRun,
        limits: RetryPolicy | None = None,
        say: Callable[[str], object] = lambda sentence: None,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        self.job, self.say, self.look = job, say, look
        self.final, self.rounds = folder.final, folder.seen
        self.limits = limits or RetryPolicy()
        self._fruitless, self._seen = 0, -1
        self._submitted, self._ending = -float("inf"), False
        self._outside: dict[str, int] = {}

    def run(self) -> None:
        """Return once the outcome is final; raise an `InputError` when there is no use in going on."""
        deadline = time.monotonic() + self.limits.seconds
        while not self.final():
            self.look()
            if time.monotonic() > deadline:
                raise InputError(f"The run is not over after {self.limits.seconds:g} seconds: resume it later.")
            if self.job.running():
                self._watch()
            elif not self.final():
                self._again()
            time.sleep(self.limits.every)

    def _watch(self) -> None:
        done = self.rounds()
        if self._ending or time.monotonic() - self._submitted < self.limits.settle or done <= self._seen:
            return
        # A job that is coming to its end has lost its sites already while it still counts as running. So a site is
        # back only if it is outside the job while the job completes a round.
        back = self.job.outside()
        since = {site: self._outside.get(site, done) for site in back}
        self._outside = since
        if ready := sorted(site for site, first in since.items() if done > first):
            self.say(f"{', '.join(ready)} can take part again: the job is started anew from its last round.")
            self.job.abort()
            self._ending = True

    def _again(self) -> None:
        self._wait_for_sites()
        if self.final():
            return
        done = self.rounds()
        self._fruitless = 0 if done > self._seen else self._fruitless + 1
        if self._fruitless >= self.limits.attempts:
            raise InputError(
                f"The job ended {self._fruitless} times without completing a round: the server's log says why; "
                "put it right, then resume."
            )
        first, self._seen = self._seen < 0, max(done, self._seen)
        if not first:
            self.say(f"The job ended early; it is started anew from round {done}.")
        try:
            self.job.submit()
        except InputError as problem:
            self.say(str(problem))
        self._submitted, self._ending, self._outside = time.monotonic(), False, {}

    def _wait_for_sites(self) -> None:
        limits = self.limits
        if not wait_for(lambda: len(self.job.connected()) >= limits.quorum, limits.waiting, limits.every):
            raise InputError(
                f"Only {len(self.job.connected())} of at least {limits.quorum} silos are connected after "
                f"{limits.waiting:g} seconds: start the others (and the server), then resume."
            )


def wait_for(done: Callable[[], bool], seconds: float, every: float = 0.2) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True
