"""Supervise a run: resubmit a job that ends early, so that the coordinator resumes from its last round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scaffpd.deploy.coordinate import reopen
from scaffpd.deploy.deployed_run import DeployedRun, Outcome
from scaffpd.errors import InputError
from scaffpd.run.settings.federation import FederationFile

if TYPE_CHECKING:  # engines need an optional package
    from scaffpd.deploy.processes import SupervisedJob


@dataclass(frozen=True)
class RetryPolicy:
    """Limits on the attempts to finish a run."""

    quorum: int = 1  # fewest sites to submit the job
    attempts: int = 5  # submissions in a row without a new round in between, before giving up
    waiting: float = 300.0  # seconds with too few sites, before giving up
    silos: int = 1  # sites to wait for before the first submission, since FLARE admits none later
    seconds: float = float("inf")  # seconds for the whole run
    every: float = 0.5  # seconds between two checks
    settle: float = (
        30.0  # seconds that a job runs before it may be restarted for a site that is back
    )


@dataclass(eq=False)
class Supervisor:
    """Keep a job going until its outcome is final.

    The run's folder has the outcome and the round counter, which shows progress. `say` gets a sentence about every
    action; `look` is called repeatedly.
    """

    job: SupervisedJob
    folder: DeployedRun
    policy: RetryPolicy
    say: Callable[[str], object]
    look: Callable[[], object] = lambda: None
    _fruitless: int = 0
    _seen: int = -1
    _submitted: float = -float("inf")
    _ending: bool = False
    _outside: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        """Return once the outcome is final; raise an `InputError` if the policy's limits are reached."""
        deadline = time.monotonic() + self.policy.seconds
        while not self.folder.final():
            self.look()
            if time.monotonic() > deadline:
                raise InputError(
                    "run-over-seconds",
                    f"The run is not over after {self.policy.seconds:g} seconds: resume it later.",
                )
            if self.job.running():
                self._watch()
            elif not self.folder.final():
                self._submit()
            time.sleep(self.policy.every)

    def _watch(self) -> None:
        """Restart the job for a site that is back."""
        done = self.folder.seen()
        if (
            self._ending
            or time.monotonic() - self._submitted < self.policy.settle
            or done <= self._seen
        ):
            return
        # A job that is ending has lost its sites but still counts as running. So a site is back only if it is outside
        # the job while the job completes a round.
        self._outside = {site: self._outside.get(site, done) for site in self.job.outside()}
        if ready := sorted(site for site, first in self._outside.items() if done > first):
            self.say(
                f"{', '.join(ready)} can take part again: the job is started anew from its last round."
            )
            self.job.abort()
            self._ending = True

    def _submit(self) -> None:
        self._wait_for_sites()
        if self.folder.final():
            return
        done = self.folder.seen()
        self._fruitless = 0 if done > self._seen else self._fruitless + 1
        if self._fruitless >= self.policy.attempts:
            raise InputError(
                "job-ended-times",
                f"The job ended {self._fruitless} times without completing a round: the server's log says why; "
                "put it right, then resume.",
            )
        first = self._seen < 0
        self._seen = max(done, self._seen)
        if not first:
            self.say(f"The job ended early; it is started anew from round {done}.")
        try:
            self.job.submit()
        except InputError as problem:
            self.say(str(problem))
        self._submitted = time.monotonic()
        self._ending = False
        self._outside = {}

    def _wait_for_sites(self) -> None:
        policy = self.policy
        left = self.policy.waiting
        if self._seen < 0 and not wait_for(
            lambda: len(self.job.connected()) >= policy.silos, left, policy.every
        ):
            left = 0.0
        if not wait_for(lambda: len(self.job.connected()) >= policy.quorum, left, policy.every):
            raise InputError(
                "least-silos-connected",
                f"Only {len(self.job.connected())} of at least {policy.quorum} silos are connected after "
                f"{policy.waiting:g} seconds: start the others (and the server), then resume.",
            )


def supervise(
    job: SupervisedJob,
    file: FederationFile,
    seconds: float,
    say: Callable[[str], object],
    look: Callable[[], object],
) -> Outcome:
    """Supervise the job of a federation by its own policy and return the outcome."""
    folder = DeployedRun(file.folder)
    wait = file.faults.start_timeout
    silos = len(file.silos)
    policy = RetryPolicy(quorum=file.faults.quorum, waiting=wait, silos=silos, seconds=seconds)
    Supervisor(job, folder, policy, say, look).run()
    look()
    return Outcome.of(folder)


def ended_before(file: FederationFile, say: Callable[[str], object]) -> Outcome | None:
    """Return the outcome of a run that has already ended, and say so; otherwise `None`."""
    done = reopen(file, DeployedRun(file.folder))
    if done is not None:
        say("This run had ended before: nothing was trained.")
    return done


def wait_for(done: Callable[[], bool], seconds: float, every: float = 0.2) -> bool:
    """Wait until `done()` is true; return whether it was in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True
