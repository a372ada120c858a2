"""See a run on FLARE through as an administrator, and work round FLARE's failures.

FLARE's session starts threads that it never ends, writes to the console and cannot be used again once the server was
away. So it has a process of its own, spoken to in lines of JSON, which is killed and started again.

What nvflare 2.9.0 does, with the settings of `provision` and `local` (two busy cores, three sites):

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

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scaffpd.deploy.coordinate import Outcome, finished
from scaffpd.deploy.coordinator.federation_file import FederationFile
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.supervise import RetryPolicy, Supervisor
from scaffpd.errors import InputError


class LostError(Exception):
    """The server did not answer the administrator."""


class AdminSession:
    """An administrator of a federation, by the startup kit that FLARE made for him.

    Args:
        kit: the administrator's startup kit: the folder that holds `startup`.
        log: where FLARE's own messages go.
        environment: what the session's process gets in addition.
        patience: seconds to wait for a reply.
    """

    def __init__(
        self, kit: Path, log: Path, environment: Mapping[str, str] | None = None, patience: float = 30.0
    ) -> None:
        if not (kit / "startup" / "fed_admin.json").is_file():
            raise InputError(f"{str(kit)!r} is no administrator's startup kit: it holds no startup/fed_admin.json.")
        self.kit, self.log, self.patience = kit.resolve(), log, patience
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def call(self, *request: str) -> Any:
        """One command's result; raises `LostError` when the server cannot be asked."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                reply = json.loads(self._line(process))
            except (OSError, queue.Empty, ValueError) as problem:
                self._kill()
                raise LostError(f"FLARE's server did not answer {request[0]!r}.") from problem
            if "error" in reply:
                raise LostError(f"FLARE's server did not do {request[0]!r}: {reply['error']}")
            return reply["value"]

    def close(self) -> None:
        """End the session."""
        with self._lock:
            if self._process and self._process.stdin:
                try:
                    self._process.stdin.close()
                    self._process.wait(2.0)
                except (OSError, subprocess.TimeoutExpired):
                    pass
            self._kill()

    def _line(self, process: subprocess.Popen[str]) -> str:
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return self._lines.get(timeout=0.2)
            except queue.Empty:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise

    def _running(self) -> subprocess.Popen[str]:
        if self._process and self._process.poll() is None:
            return self._process
        self._kill()
        with self.log.open("ab") as log:
            self._process = process = subprocess.Popen(
                [sys.executable, "-u", "-m", "scaffpd.deploy.flare.admin", str(self.kit)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.kit,
                env=os.environ | self._environment, start_new_session=True,
            )  # fmt: skip
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lines = lines
        threading.Thread(target=_drain, args=(process, lines), daemon=True, name="flare admin").start()
        return process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin:
            with contextlib.suppress(OSError):
                process.stdin.close()


def _drain(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            lines.put(line)


class FlareJob:
    """One job, handed in as often as need be.

    Args:
        admin: the administrator's session.
        job: the job's folder.
    """

    def __init__(self, admin: AdminSession, job: Path) -> None:
        self.admin, self.job = admin, job.resolve()
        self.current: str | None = None

    def adopt(self) -> bool:
        """Take over a job of the same name that the server has not finished; whether there is one."""
        going = self.admin.call("unfinished", self.job.name)
        self.current = going[-1] if going else self.current
        return bool(going)

    def submit(self) -> None:
        """Hand in the job."""
        try:
            self.current = str(self.admin.call("submit", str(self.job)))
        except LostError as problem:
            raise InputError(f"FLARE did not take the job: {problem}") from problem

    def running(self) -> bool:
        """Whether the job that was handed in last has not come to its end; so too while the server does not answer."""
        if self.current is None:
            return False
        try:
            return not str(self.admin.call("status", self.current)).startswith(FINISHED)
        except LostError:
            return True

    def abort(self) -> None:
        """Tell the job to end."""
        try:
            if self.running():
                self.admin.call("abort", str(self.current))
        except LostError:
            return

    def connected(self) -> set[str]:
        """The sites that the server takes for connected; none while it does not answer."""
        try:
            return set(self.admin.call("sites"))
        except LostError:
            return set()

    def outside(self) -> set[str]:
        """The connected sites that have no part in the running job."""
        try:
            return set(self.admin.call("outside", self.current)) if self.current else set()
        except LostError:
            return set()


def resume(
    kit: Path,
    job: Path,
    file: FederationFile,
    seconds: float = float("inf"),
    say: Callable[[str], object] = lambda sentence: None,
    look: Callable[[], object] = lambda: None,
) -> Outcome:
    """See a run through as the administrator to whom the startup kit belongs, on the machine with the run's folder.

    A job that is still running there is taken over; otherwise it is handed in.
    """
    folder = DeployedRun(file.folder)
    if (done := finished(file, folder)) is not None:
        say("This run had ended before: nothing was trained.")
        return done
    limits = RetryPolicy(quorum=file.policy.quorum, waiting=file.policy.start_timeout, seconds=seconds)
    admin = AdminSession(kit, folder.path / "admin.log")
    try:
        deployment = FlareJob(admin, job.resolve())
        if deployment.adopt():
            say("The job is running already.")
        Supervisor(deployment, folder, limits, say, look).run()
    finally:
        admin.close()
    return Outcome.of(folder)


FINISHED = "FINISHED"


def serve(kit: Path) -> None:
    """Answer requests from standard input on standard output until it is closed."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever FLARE prints goes to the log
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
    """A session as the user to whom the startup kit belongs."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    user = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]["username"]
    return new_secure_session(user, str(kit), timeout=5.0, auto_login_max_tries=1)


def sites(session: Any) -> list[str]:
    """The sites that the server knows as connected."""
    return sorted(str(client.name) for client in session.get_connected_client_list())


def status(session: Any, job: str) -> str:
    """A job's status in FLARE's words."""
    return str(session.get_job_status(job))


def outside(session: Any, job: str) -> list[str]:
    """The connected sites that have no process for the job: FLARE lets nobody into a running one."""
    rows = session.get_client_job_status() or []
    inside = {row["client_name"] for row in rows if row.get("job_id") == job}
    return sorted({str(row["client_name"]) for row in rows} - inside)


def unfinished(session: Any, name: str) -> list[str]:
    """The jobs of that name that are waiting or running, oldest first."""
    jobs = session.list_jobs()
    going = [job for job in jobs if not str(job.get("status", "")).startswith(FINISHED) and job.get("job_name") == name]
    return [str(job["job_id"]) for job in sorted(going, key=lambda job: str(job.get("submit_time", "")))]


COMMANDS: dict[str, Any] = {
    "submit": lambda session, job: str(session.submit_job(job)),
    "status": status,
    "abort": lambda session, job: session.abort_job(job) and None,
    "sites": sites,
    "outside": outside,
    "unfinished": unfinished,
    "ping": lambda session: None,
}

if __name__ == "__main__":
    serve(Path(sys.argv[1]))
