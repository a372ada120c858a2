"""Open an administrator's session with FLARE, submit the job, and supervise the run.

FLARE's session starts threads that it never ends, writes to the console and is useless once the server was down. So it
runs in its own process (this module as a script), which reads and writes lines of JSON and can be killed and restarted.
docs/deploy/what-happens-when.md says what FLARE does when a site, a job or the server is lost.
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
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.deploy.deployed_run import Outcome
    from scaffpd.run.settings.federation import FederationFile

PATIENCE = 300.0  # seconds for the server to come up
OVER = (
    "FINISHED",
    "ABANDONED",
    "LOST",
)  # how final statuses begin; LOST is ours, for a job that died with its server


class LostError(Exception):
    """The server did not answer the administrator."""


class AdminSession:
    """An administrator of a federation, with FLARE's startup kit (the folder that holds `startup`).

    FLARE's own messages go to `log`; `environment` extends the process's; a reply may take `patience` seconds.
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
                "administrator-startup-kit",
                f"{str(kit)!r} is no administrator's startup kit: it holds no startup/fed_admin.json.",
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
            if self._process and self._process.stdin:
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    self._process.stdin.close()
                    self._process.wait(2.0)
            self._kill()

    def _exchange(self, line: bytes) -> bytes:
        """Send a line and return the reply's; return an empty one if there is none in time."""
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._start()
        assert self._process is not None
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(line)
        return stdout.readline() if select.select([stdout], [], [], self.patience)[0] else b""

    def _start(self) -> None:
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
        self.session, self.folder = session, folder.resolve()
        self.current: str | None = None

    def adopt(self) -> bool:
        """Take over a job of the same name that the server has not finished; return whether there is one."""
        going = self.session.call("unfinished", self.folder.name)
        self.current = going[-1] if going else self.current
        return bool(going)

    def submit(self) -> None:
        """Submit the job."""
        try:
            self.current = str(self.session.call("submit", str(self.folder)))
        except LostError as problem:
            raise InputError(
                "flare-accept-job", f"FLARE did not accept the job: {problem}"
            ) from problem

    def running(self) -> bool:
        """Return whether the last submitted job is running; true while the server does not answer."""
        return self.current is not None and not self._ask("", "status", self.current).startswith(
            OVER
        )

    def abort(self) -> None:
        """End the job."""
        if self.current is not None and self.running():
            self._ask(None, "abort", self.current)

    def connected(self) -> set[str]:
        """Return the sites that the server lists as connected; none while it does not answer."""
        return set(self._ask([], "sites"))

    def outside(self) -> set[str]:
        """Return the connected sites outside the running job."""
        return set(self._ask([], "outside", self.current)) if self.current else set()

    def _ask(self, lost: Any, *request: str) -> Any:
        try:
            return self.session.call(*request)
        except LostError:
            return lost


def resume(
    kit: Path,
    job: Path,
    file: FederationFile,
    seconds: float,
    say: Callable[[str], object],
    look: Callable[[], object],
) -> Outcome:
    """Supervise a run as the startup kit's administrator, on the machine with the run's folder.

    Take over a job that is still running; otherwise submit it.
    """
    from scaffpd.deploy.supervise import (
        ended_before,
        supervise,
    )  # loads torch: not in the session's process

    if (done := ended_before(file, say)) is not None:
        return done
    with contextlib.closing(AdminSession(kit, file.folder / "admin.log")) as session:
        deployed = FlareJob(session, job)
        if _adopted(deployed, time.monotonic() + min(seconds, PATIENCE), say):
            say("The job is running already.")
        return supervise(deployed, file, seconds, say, look)


def _adopted(deployed: FlareJob, deadline: float, say: Callable[[str], object]) -> bool:
    """Wait for the server and return whether the job is running already."""
    said = False
    while True:
        try:
            return deployed.adopt()
        except LostError as problem:
            if time.monotonic() > deadline:
                raise InputError(
                    "start-server-resume", f"{problem} Start the server, then resume."
                ) from None
        if not said:
            say("FLARE's server does not answer yet.")
        said = True
        time.sleep(1.0)


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
    os._exit(0)  # FLARE's threads would keep the process for a while


def connect(kit: Path) -> Any:
    """Open a session as the startup kit's user."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    user = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]["username"]
    return new_secure_session(user, str(kit), timeout=5.0, auto_login_max_tries=1)


def outside(session: Any, job: str) -> list[str]:
    """Return the connected sites without a process for the job; FLARE admits no site to a running job."""
    rows = session.get_client_job_status() or []
    inside = {row["client_name"] for row in rows if row.get("job_id") == job}
    return sorted({str(row["client_name"]) for row in rows} - inside)


def unfinished(session: Any, name: str) -> list[str]:
    """Return the jobs of that name that are waiting or running, oldest first."""
    jobs = sorted(session.list_jobs(), key=lambda job: str(job.get("submit_time", "")))
    own = [
        job
        for job in jobs
        if job.get("job_name") == name and not str(job.get("status", "")).startswith(OVER)
    ]
    return [
        str(job["job_id"])
        for job in own
        if not status(session, str(job["job_id"])).startswith(OVER)
    ]


def status(session: Any, job: str) -> str:
    """Return FLARE's status of a job, or LOST if the server was restarted and has no process for it.

    FLARE lists the job of a server that died as RUNNING for ever, and neither aborts nor deletes it.
    """
    said = str(session.get_job_status(job))
    if not said.startswith(("DISPATCHED", "RUNNING")):
        return said
    server = session.get_system_info()
    if job in {str(running.job_id) for running in server.job_info}:
        return said
    meta = session.get_job_meta(job)
    begun = datetime.fromisoformat(meta.get("start_time") or meta["submit_time_iso"])
    return "LOST" if begun.timestamp() < server.server_info.start_time else said


COMMANDS: dict[str, Any] = {
    "submit": lambda session, job: str(session.submit_job(job)),
    "status": status,
    "abort": lambda session, job: session.abort_job(job) and None,
    "sites": lambda session: sorted(
        str(client.name) for client in session.get_connected_client_list()
    ),
    "outside": outside,
    "unfinished": unfinished,
}

if __name__ == "__main__":
    serve(Path(sys.argv[1]))
