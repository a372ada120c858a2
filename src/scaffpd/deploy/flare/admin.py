"""Run FLARE's server, submit the job as its administrator, and follow the job to its end.

FLARE's session starts threads that it never ends, writes to the console and is useless once the
server was down. So it runs in its own process (this module as a script), which reads and writes
lines of JSON and can be killed and restarted. docs/deploy/what-happens-when.md says what FLARE does
when a site, a job or the server is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaffpd.deploy.flare.serving import KIT, served
from scaffpd.deploy.processes import MARK, Processes

if TYPE_CHECKING:
    from scaffpd.deploy.deployed_run import DeployedRun, Outcome
    from scaffpd.settings.federation import FederationFile

ADMIN = "admin"  # folders of the server's kit: the administrator's own kit, and the job
JOB = "job"
ANSWER = 30.0  # seconds that the server has for an answer
PATIENCE = 300.0  # seconds without any, after which the run pauses
RUNS = ("DISPATCHED", "RUNNING", "FINISHED", "ABANDONED")  # how FLARE's statuses begin
OVER = RUNS[2:]
EVERY = 0.5  # seconds between two looks
Watch = Callable[[Mapping[str, object]], None]


class LostError(Exception):
    """The server did not answer the administrator."""


class AdminSession:
    """An administrator of a federation, in a process of its own with a mark."""

    def __init__(self, kit: Path, mark: str) -> None:
        self.kit = kit
        self.mark = mark
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, *request: str) -> Any:
        """Return the result of one command; raise `LostError` if the server does not answer."""
        try:
            reply = json.loads(self._exchange(json.dumps(request).encode() + b"\n"))
        except (OSError, ValueError) as problem:
            self.close()
            raise LostError(f"FLARE's server did not answer {request[0]!r}.") from problem
        if "error" in reply:
            raise LostError(f"FLARE's server did not do {request[0]!r}: {reply['error']}")
        return reply["value"]

    def _exchange(self, line: bytes) -> bytes:
        """Send a line and return the reply's; return an empty one if there is none in time."""
        if self._process is None:
            with (self.kit.parent / "admin.txt").open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-m", __name__, str(self.kit)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    cwd=self.kit,
                    env=os.environ | {MARK: self.mark},
                    start_new_session=True,
                )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line)
        stdout = self._process.stdout
        return stdout.readline() if select.select([stdout], [], [], ANSWER)[0] else b""

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes its pipes and waits for it
                self._process = None


class StopError(Exception):
    """Why a run cannot be followed any further."""


def run(
    file: FederationFile, watch: Watch, say: Callable[[str], object], seconds: float
) -> Outcome:
    """Run FLARE's server and the federation's job until the run ends or pauses.

    A new server has no jobs, so that nothing of an earlier one can be taken for this one's. What
    outlives servers is the run's own folder.
    """
    from scaffpd.deploy.coordinate import reopen  # loads torch: not in the session's process
    from scaffpd.deploy.deployed_run import PROGRESS, DeployedRun
    from scaffpd.files import JsonLines

    folder = DeployedRun(file.folder)
    done = reopen(file, folder)
    if done is not None:
        say("This run had ended before: nothing was trained.")
        return done
    lines = JsonLines(folder.path / PROGRESS)
    lines.skip()

    def look() -> None:
        for line in lines.read():
            watch(line)

    with served(file.path) as processes:
        followed = FollowedJob(file, processes, folder, time.monotonic() + seconds, say, look)
        with contextlib.closing(followed.session):
            reason = followed.to_its_end()
    look()
    outcome = folder.outcome()
    if outcome is None:
        outcome = folder.pause(reason)
        with contextlib.suppress(OSError):  # a full disk may be the reason
            folder.end(outcome)
    return outcome


@dataclass
class FollowedJob:
    """The job of a run on a server that was started for it."""

    file: FederationFile
    processes: Processes
    folder: DeployedRun
    deadline: float
    say: Callable[[str], object]
    look: Callable[[], object]
    _missing: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        kit = self.file.path.resolve().parent / KIT
        self.log = kit / "log.txt"
        self.job = kit / JOB / self.file.name
        self.session = AdminSession(kit / ADMIN, self.processes.mark)

    def to_its_end(self) -> str:
        """Wait for all silos, submit the job, and wait for its end; return a reason to pause."""
        try:
            self._until(self._all_connected)
            self.say("All silos are connected; the run starts.")
            current = str(self.session.call("submit", str(self.job)))
            said = self._until(lambda: self._status(current))
        except StopError as reason:
            return str(reason)
        except LostError as problem:
            return f"{problem} {self.log} says why."
        return self._why_early(said)

    def _until(self, ask: Callable[[], str]) -> str:
        heard = time.monotonic()
        while True:
            self.look()
            if not self.processes.alive():
                raise StopError(f"FLARE's server has ended; {self.log} says why.")
            now = time.monotonic()
            try:
                if answer := ask():
                    return answer
                heard = now
            except LostError as problem:
                if now - heard > PATIENCE:
                    raise StopError(str(problem)) from None
            if now > self.deadline:
                raise StopError(self._why_late())
            time.sleep(EVERY)

    def _all_connected(self) -> str:
        """Return "yes" once all silos are connected: FLARE admits none to a job that runs."""
        connected = self.session.call("sites")
        missing = [name for name in self.file.silos if name not in connected]
        if missing and missing != self._missing:
            self.say(f"Waiting for {', '.join(missing)}.")
        self._missing = missing
        return "" if missing else "yes"

    def _status(self, job: str) -> str:
        """Return FLARE's last word on a job; nothing while it runs."""
        said = str(self.session.call("status", job))
        if not said.startswith(RUNS):
            self._all_connected()  # it waits for a silo that has gone
        return said if said.startswith(OVER) else ""

    def _why_late(self) -> str:
        _, events = self.folder.entries()
        why = events[-1].sentence if events else ""
        if self._missing:
            why = f"Not connected: {', '.join(self._missing)}."
        return f"The time is up. {why}".strip()

    def _why_early(self, said: str) -> str:
        """Return why a job has ended without an outcome; a full disk cannot hold the reason."""
        probe = self.folder.path / ".space"
        try:
            probe.write_bytes(bytes(2**16))
            probe.unlink()
        except OSError as error:
            return f"Cannot write to {str(self.folder.path)!r}: {error.strerror}."
        return f"FLARE ended the job ({said}); {self.log} says why."


# --- the session's own process


def serve(kit: Path) -> None:
    """Answer requests from standard input on standard output until the input is closed."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # FLARE's prints go to the log
    session: Any = None
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            session = session or connect(kit)
            reply = {"value": COMMANDS[command](session, *arguments)}
        except Exception as problem:
            reply = {"error": f"{type(problem).__name__}: {problem}"}
            with contextlib.suppress(Exception):
                session.close()
            session = None
        replies.write(json.dumps(reply) + "\n")
    with contextlib.suppress(Exception):
        session.close()
    os._exit(0)  # FLARE's threads would hold the process for a while


def connect(kit: Path) -> Any:
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    user = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]["username"]
    return new_secure_session(user, str(kit), timeout=5.0, auto_login_max_tries=1)


COMMANDS: dict[str, Callable[..., object]] = {
    "submit": lambda session, job: str(session.submit_job(job)),
    "status": lambda session, job: str(session.get_job_status(job)),
    "sites": lambda session: sorted(
        str(client.name) for client in session.get_connected_client_list()
    ),
}

if __name__ == "__main__":
    serve(Path(sys.argv[1]))
