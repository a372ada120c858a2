"""Open an administrator's session with FLARE, submit the job, and follow it to its end.

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

from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.deploy.deployed_run import Outcome
    from scaffpd.run.settings.federation import FederationFile

PATIENCE = 300.0  # seconds without an answer of the server, after which a run is given up
# Seconds after which a job without a process at the server counts as lost. FLARE lists the job of a
# server that died as running for ever, and neither aborts nor deletes it.
UNLISTED = 30.0
OVER = ("FINISHED", "ABANDONED")  # how FLARE's final statuses begin
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


class FlareJob:
    """The federation's job on a FLARE server; it can be submitted again."""

    def __init__(self, session: AdminSession, folder: Path) -> None:
        self.session = session
        self.folder = folder.resolve()
        self.current: str | None = None
        self._listed = 0.0  # when the server last had a process for the job

    def adopt(self) -> bool:
        """Take over a job of the same name that the server is running; return whether it is."""
        for job in self.session.call("unfinished", self.folder.name):
            self.current = job
            self._listed = time.monotonic()
            while self.running():
                if self.session.call("status", job)[1]:
                    return True
                time.sleep(EVERY)
        self.current = None
        return False

    def submit(self) -> None:
        """Submit the job."""
        try:
            self.current = str(self.session.call("submit", str(self.folder)))
        except LostError as problem:
            raise InputError("job-refused", f"FLARE did not accept the job: {problem}") from problem
        self._listed = time.monotonic()

    def running(self) -> bool:
        """Return whether the last submitted job is waiting or running.

        Whether a job is lost is decided by the server's own list of processes, never by comparing
        clocks of two machines.
        """
        if self.current is None:
            return False
        said, listed = self.session.call("status", self.current)
        now = time.monotonic()
        started = said.startswith(("DISPATCHED", "RUNNING"))
        if listed or not started:  # a submitted job has no process before it is dispatched
            self._listed = now
        return not said.startswith(OVER) and now - self._listed < UNLISTED

    def connected(self) -> set[str]:
        """Return the sites that the server lists as connected."""
        return set(self.session.call("sites"))


def resume(
    folder: Path,
    file: FederationFile,
    seconds: float,
    say: Callable[[str], object],
    look: Callable[[], object],
) -> Outcome:
    """Follow a run from the coordinator's folder, which holds administrator's kit and job.

    Take over a job that is still running; otherwise submit it.
    """
    job = next((folder / "job").glob("*/"), None)
    if job is None:
        raise InputError(
            "no-job", f"There is no job in {str(folder / 'job')!r}: `deploy flare` writes it."
        )
    file.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(AdminSession(folder / "admin", file.folder / "admin.log")) as session:
        return follow(FlareJob(session, job), file, seconds, say, look)


def follow(
    job: FlareJob,
    file: FederationFile,
    seconds: float,
    say: Callable[[str], object],
    look: Callable[[], object],
) -> Outcome:
    """Submit the job unless it is running, wait for its end, and return the run's outcome.

    A job that ends without an outcome is not submitted again: a service manager does that.
    """
    from scaffpd.deploy.coordinate import reopen  # loads torch: not in the session's process
    from scaffpd.deploy.deployed_run import DeployedRun, Outcome

    folder = DeployedRun(file.folder)
    done = reopen(file, folder)
    if done is not None:
        say("This run had ended before: nothing was trained.")
        return done
    deadline = time.monotonic() + seconds
    if _patiently(job.adopt, say):
        say("The job is running already.")
    else:
        _wait_for_silos(job, file, say)
        job.submit()
    while _patiently(job.running, say):
        look()
        if time.monotonic() > deadline:
            raise InputError(
                "run-too-long",
                f"The run has not ended after {seconds:g} seconds: resume it later.",
            )
        time.sleep(EVERY)
    look()
    if not folder.has_outcome():
        raise InputError(
            "job-ended-early",
            f"The job ended after round {folder.rounds()} without an outcome: see the server's "
            "log for the reason, then resume the run.",
        )
    return Outcome.of(folder)


def _patiently(ask: Callable[[], bool], say: Callable[[str], object]) -> bool:
    """Ask until the server answers, for `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    said = False
    while True:
        try:
            return ask()
        except LostError as problem:
            if time.monotonic() > deadline:
                raise InputError(
                    "server-not-answering", f"{problem} Start the server, then resume."
                ) from None
        if not said:
            say("FLARE's server does not answer yet.")
        said = True
        time.sleep(1.0)


def _wait_for_silos(job: FlareJob, file: FederationFile, say: Callable[[str], object]) -> None:
    """Wait until all silos are connected: FLARE admits none to a job that has started."""
    deadline = time.monotonic() + file.timeout
    said = False
    while True:
        with contextlib.suppress(LostError):
            missing = [name for name in file.silos if name not in job.connected()]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise InputError(
                    "silos-not-connected",
                    f"Not connected after {file.timeout:g} seconds: "
                    f"{', '.join(missing)}. Start them, then resume.",
                )
            if not said:
                say(f"Waiting for {', '.join(missing)}.")
            said = True
        if time.monotonic() > deadline + PATIENCE:
            raise InputError("server-not-answering", "FLARE's server does not answer.")
        time.sleep(EVERY)


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


def unfinished(session: Any, name: str) -> list[str]:
    """Return the jobs of that name that FLARE lists as waiting or running, oldest first."""
    jobs = sorted(session.list_jobs(), key=lambda job: str(job.get("submit_time", "")))
    return [
        str(job["job_id"])
        for job in jobs
        if job.get("job_name") == name and not str(job.get("status", "")).startswith(OVER)
    ]


def status(session: Any, job: str) -> tuple[str, bool]:
    """Return FLARE's status of a job, and whether the server has a process for it."""
    listed = {str(running.job_id) for running in session.get_system_info().job_info}
    return str(session.get_job_status(job)), job in listed


COMMANDS: dict[str, Callable[..., object]] = {
    "submit": lambda session, job: str(session.submit_job(job)),
    "status": status,
    "sites": lambda session: sorted(
        str(client.name) for client in session.get_connected_client_list()
    ),
    "unfinished": unfinished,
}

if __name__ == "__main__":
    serve(Path(sys.argv[1]))
