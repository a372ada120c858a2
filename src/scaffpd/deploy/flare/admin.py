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
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaffpd.deploy.flare.serving import KIT, PART, served
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.deploy.deployed_run import DeployedRun, Outcome
    from scaffpd.deploy.processes import Processes
    from scaffpd.run.settings.federation import FederationFile

ADMIN = "admin"  # folders of the server's kit: the administrator's own kit, and the job
JOB = "job"
PATIENCE = 300.0  # seconds without an answer of the server, after which the run pauses
RUNS = ("DISPATCHED", "RUNNING", "FINISHED", "ABANDONED")  # how FLARE's statuses begin
OVER = RUNS[2:]
EVERY = 0.5  # seconds between two looks


class LostError(Exception):
    """The server did not answer the administrator."""


class AdminSession:
    """An administrator of a federation, with FLARE's startup kit (the folder that holds `startup`).

    FLARE's own messages go to `log`; `environment` extends the process's; a reply may take
    `patience` seconds.
    """

    def __init__(
        self,
        kit: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        patience: float = 30.0,
    ) -> None:
        if not (kit / "startup" / "fed_admin.json").is_file():
            raise InputError(
                "no-admin-kit",
                f"{str(kit)!r} is no administrator's startup kit: it holds no "
                "startup/fed_admin.json.",
            )
        self.kit = kit.resolve()
        self.log = log
        self.patience = patience
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def call(self, *request: str) -> Any:
        """Return the result of one command; raise `LostError` if the server does not answer."""
        with self._lock:
            try:
                reply = json.loads(self._exchange(json.dumps(request).encode() + b"\n"))
            except (OSError, ValueError) as problem:
                self._kill()
                raise LostError(f"FLARE's server did not answer {request[0]!r}.") from problem
            if "error" in reply:
                raise LostError(f"FLARE's server did not do {request[0]!r}: {reply['error']}")
            return reply["value"]

    def close(self) -> None:
        """End the session."""
        with self._lock:
            self._kill()

    def _exchange(self, line: bytes) -> bytes:
        """Send a line and return the reply's; return an empty one if there is none in time."""
        if self._process is None or self._process.poll() is not None:
            self._kill()
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-m", "scaffpd.deploy.flare.admin", str(self.kit)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    cwd=self.kit,
                    env=os.environ | self._environment,
                    start_new_session=True,
                )
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(line)
        return stdout.readline() if select.select([stdout], [], [], self.patience)[0] else b""

    def _kill(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()


class StopError(Exception):
    """Why a run cannot be followed any further."""


def run(
    file: FederationFile,
    seconds: float,
    say: Callable[[str], object],
    look: Callable[[], object],
) -> Outcome:
    """Run FLARE's server and the federation's job until the run ends or pauses.

    A new server has no jobs, so that nothing of an earlier one can be taken for this one's. What
    outlives servers is the run's own folder.
    """
    from scaffpd.deploy.coordinate import reopen  # loads torch: not in the session's process
    from scaffpd.deploy.deployed_run import DeployedRun

    folder = DeployedRun(file.folder)
    done = reopen(file, folder)
    if done is not None:
        say("This run had ended before: nothing was trained.")
        return done
    with served(file.path) as processes:
        followed = FollowedJob(file, processes, folder, time.monotonic() + seconds, say, look)
        with contextlib.closing(followed):
            reason = followed.to_its_end()
    look()
    outcome = folder.outcome()
    if outcome is None:
        outcome = folder.pause(reason)
        with contextlib.suppress(OSError):  # a full disk may be the reason
            folder.end(outcome)
    return outcome


class FollowedJob:
    """The job of a run on a server that was started for it."""

    def __init__(
        self,
        file: FederationFile,
        processes: Processes,
        folder: DeployedRun,
        deadline: float,
        say: Callable[[str], object],
        look: Callable[[], object],
    ) -> None:
        kit = file.path.resolve().parent / KIT
        self.file = file
        self.log = kit / "log.txt"
        self.job = kit / JOB / file.name
        self.session = AdminSession(kit / ADMIN, kit / "admin.txt", processes.environment(ADMIN))
        self.processes = processes
        self.folder = folder
        self.deadline = deadline
        self.say = say
        self.look = look
        self._missing: list[str] = []

    def close(self) -> None:
        """End the session."""
        self.session.close()

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
        """Ask the server until there is an answer, and return it."""
        heard = time.monotonic()
        while True:
            self.look()
            if not self.processes.alive(PART):
                raise StopError(f"FLARE's server has ended; {self.log} says why.")
            now = time.monotonic()
            try:
                answer = ask()
                heard = now
            except LostError as problem:
                answer = ""
                if now - heard > PATIENCE:
                    raise StopError(str(problem)) from None
            if answer:
                return answer
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
    """Open a session as the startup kit's user."""
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
