"""Start the processes of an engine, find them by a mark in their environment, and end them.

Engines start processes that start others, in sessions of their own, and a child that has lost its parent is nobody's
child. The mark stays. Run as a script, this module is the watchdog of one process, which ends with the process that
started it: whoever is killed takes the engine along.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from scaffpd.errors import InputError

MARK = "SCAFFPD_ENGINE_PART"


class Processes:
    """Named parts, each of one or more processes with all that they start."""

    def __init__(self, mark: str | None = None) -> None:
        self.mark = mark or uuid.uuid4().hex
        self.started: dict[str, list[subprocess.Popen[bytes]]] = {}

    def environment(self, part: str) -> dict[str, str]:
        """Return what a process of this part must have in its environment."""
        return {MARK: f"{self.mark}:{part}"}

    def start(
        self, part: str, command: Sequence[str], log: Path | None, environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> int:  # fmt: skip
        """Run a Python module or script in a session of its own, its output in `log` or ours; it ends when we end."""
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") if log else contextlib.nullcontext() as stream:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "scaffpd.deploy.processes", str(os.getpid()), *command],
                cwd=folder or (log and log.parent), env={**environment, **self.environment(part)},
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.started.setdefault(part, []).append(process)
        return process.pid

    def alive(self, part: str) -> bool:
        """Tell whether all that was started for a part is still running."""
        started = self.started.get(part, [])
        return bool(started) and all(process.poll() is None for process in started)

    def wait(self, part: str) -> int:
        """Wait for the process that was started last for a part, and return its exit code."""
        return self.started[part][-1].wait()

    def members(self, part: str | None = None) -> list[psutil.Process]:
        """Return every living process of a part, or of all parts."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                value = process.environ().get(MARK, "")
                ours = value == f"{self.mark}:{part}" if part else value.startswith(f"{self.mark}:")
                if ours and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(process)
        return found

    def pids(self, part: str | None = None) -> set[int]:
        """Return the process ids of `members`."""
        return {process.pid for process in self.members(part)}

    def kill(self, part: str | None = None, seconds: float = 10.0) -> None:
        """SIGKILL a part, or all, until nothing of it is left."""
        end = time.monotonic() + seconds
        while members := self.members(part):
            for process in members:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            if time.monotonic() > end:
                raise TimeoutError(f"These processes do not end: {[process.pid for process in members]}.")
            time.sleep(0.02)
        for name in [part] if part else list(self.started):
            for started in self.started.pop(name, []):
                started.kill()  # if it should have lost its mark
                started.wait()


class SupervisedJob(Protocol):
    """An engine on this machine, or a job in production."""

    def submit(self) -> None:
        """Hand in the job, or hand it in again."""

    def running(self) -> bool:
        """Tell whether the job that was handed in last is still going."""

    def abort(self) -> None:
        """End the job and leave the processes up."""

    def connected(self) -> set[str]:
        """Return the sites that the server sees now."""

    def outside(self) -> set[str]:
        """Return those of them that have no part in the running job, and can get one only by starting it again."""


class LocalEngine(SupervisedJob):
    """A server, and a process (tree) for every silo, on loopback, by federation.toml and every silo.toml.

    Engines write into `work`. Each of their parts, the server, the silos and what else there is, has a log.
    """

    parts: Sequence[str]

    def __init__(self, federation: Path, silos: Mapping[str, Path], work: Path) -> None:
        self.federation, self.work, self.processes = federation.resolve(), work.resolve(), Processes()
        self.silos = {name: path.resolve() for name, path in silos.items()}

    def start(self) -> None:
        """Bring everything up and wait until all silos are connected."""

    def stop(self) -> None:
        """Take everything down, whatever state it is in; nothing is lost, since every round has its checkpoint."""
        self.processes.kill()

    def log(self, part: str) -> Path:
        """Return the log file of a part."""
        return self.work / f"{part}.log"

    def logs(self) -> dict[str, Path]:
        """Return the log file of every part."""
        return {part: self.log(part) for part in self.parts}

    def wait(self, missing: Callable[[], Collection[str]], sentence: str, seconds: float) -> None:
        """Wait until no part is missing, or refuse with a sentence, a part's name and the log that says why."""
        end = time.monotonic() + seconds
        while lacking := sorted(missing()):
            if dead := [part for part in self.processes.started if not self.processes.alive(part)]:
                raise InputError(f"{sentence}: {dead[0]} has ended at once, see {self.log(dead[0])}.")
            if time.monotonic() > end:
                who = f"{lacking[0]!r} is not there, and {self.log(lacking[0])} says why."
                raise InputError(f"{sentence} within {seconds:g} seconds: {who}")
            time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Return ports on loopback that nobody uses now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in sockets]


def end_with(parent: int) -> None:
    """End this process and its group once it has another parent."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    owner, sys.argv = int(sys.argv[1]), sys.argv[2:]
    threading.Thread(target=end_with, args=(owner,), daemon=True, name="watchdog").start()
    if Path(sys.argv[0]).is_file():
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
