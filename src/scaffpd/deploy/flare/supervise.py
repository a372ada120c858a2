"""What works round FLARE's failures: hand the job in again; the coordinator goes on from its last round.

What nvflare 2.9.0 does, with the settings of `rules` and `local` (two busy cores, three sites):

- A site's *job process* is killed: the site reports it and FLARE ends the whole job, whatever `min_clients` says,
  within about 8 seconds. The site itself stays. Cure: hand the job in again.
- A *site* is killed: the job goes on, every call to the site takes its full timeout, and FLARE lists the site as
  connected until `dead_after` has passed. When it is started again it is connected after 3 seconds, but gets no part in
  the running job. Cure: abort the job (6 to 10 seconds) and hand it in again. Who has no part is told by FLARE's
  `check_status client`.
- A *site hangs* (SIGSTOP): like a killed one. When it wakes, its job process is still there and answers again: no cure
  is needed, and the supervisor leaves the job alone.
- The *server* is killed: its job is lost. Started again with the same kit, it is found by the sites without help: after
  6 seconds in the one run with `maint_msg_timeout` at 3, after 29 in the one with FLARE's default of 30. The sites' old
  job processes were still there then; a new job ran beside them. Cure: hand the job in again.
- A job is handed in while a dead site is still listed as connected: FLARE left it out and started with the others.
- Seconds, with other work on the machine all the time (load 6 to 13 on two cores), so upper bounds: start-up with
  provisioning 8 to 24; from submission to the first call 13 to 34 with three sites (every process imports torch, about
  3 seconds of processor time each); a call of ten numbers to three sites 0.03 to 0.2; one of 5 million doubles each way
  3 to 7 (5 seconds of processor time in all); from the coordinator's end until FLARE calls the job finished 6 to 9, for
  which nobody has to wait.
- From the source, not tried: FLARE holds a finished job open for a site whose end it has not heard of, up to
  `client_outcome_wait_timeout` (900 seconds unless the server's environment has NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scaffpd.deploy.flare.deployment import Deployment
from scaffpd.deploy.flare.session import Admin
from scaffpd.errors import InputError


class Job(Protocol):
    """What is supervised: a `FlareEngine` or a `Deployment`."""

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
class Limits:
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
        final: whether the run has its final outcome.
        rounds: how many rounds have been completed, to tell progress from standstill.
        limits: when to give up.
        say: is told, in a sentence, what is done.
    """

    def __init__(
        self,
        job: Job,
        final: Callable[[], bool],
        rounds: Callable[[], int],
        limits: Limits | None = None,
        say: Callable[[str], object] = lambda sentence: None,
    ) -> None:
        self.job, self.final, self.rounds, self.say = job, final, rounds, say
        self.limits = limits or Limits()
        self._fruitless, self._seen = 0, -1
        self._submitted, self._ending = -float("inf"), False
        self._outside: dict[str, int] = {}

    def run(self) -> None:
        """Return once the outcome is final; raise an `InputError` when there is no use in going on."""
        deadline = time.monotonic() + self.limits.seconds
        while not self.final():
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
        # A job that is coming to its end has lost its sites already while FLARE still calls it running. So a site is
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
        deadline = time.monotonic() + self.limits.waiting
        while len(there := self.job.connected()) < self.limits.quorum:
            if time.monotonic() > deadline:
                raise InputError(
                    f"Only {len(there)} of at least {self.limits.quorum} silos are connected after "
                    f"{self.limits.waiting:g} seconds: start the others (and the server), then resume."
                )
            time.sleep(self.limits.every)


def final_outcome(file: Path) -> Callable[[], bool]:
    """Whether the coordinator's outcome.json says that the run is over for good."""

    def final() -> bool:
        try:
            return bool(json.loads(file.read_text(encoding="utf-8")).get("final"))
        except (OSError, ValueError):
            return False

    return final


def resume(
    kit: Path,
    job: Path,
    final: Callable[[], bool],
    rounds: Callable[[], int],
    limits: Limits | None = None,
    log: Path | None = None,
    say: Callable[[str], object] = lambda sentence: None,
) -> None:
    """Supervise a federation in production, as the administrator to whom the startup kit belongs.

    A job that is still running there is taken over; otherwise it is handed in.
    """
    admin = Admin(kit, log or kit / "admin.log")
    try:
        deployment = Deployment(admin, job)
        if deployment.adopt():
            say("The job is running already.")
        Supervisor(deployment, final, rounds, limits, say).run()
    finally:
        admin.close()
