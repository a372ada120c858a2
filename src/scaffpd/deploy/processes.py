"""Start the processes of an engine, find them by a mark in their environment, and end them.

FLARE's processes start others in their own sessions. Orphans cannot be found through their parent,
but they inherit the mark. Run as a script, this module runs one process with a watchdog, which
ends all with its mark once the process that started it has ended.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARK = "SCAFFPD_ENGINE_PART"


class Processes:
    """Named parts, each of one or more processes and their descendants."""

    def __init__(self, mark: str | None = None) -> None:
        self.mark = mark or uuid.uuid4().hex
        self.started: dict[str, list[subprocess.Popen[bytes]]] = {}

    def environment(self, part: str) -> dict[str, str]:
        """Return the environment of a process of this part, with the mark."""
        return {MARK: f"{self.mark}:{part}"}

    def start(
        self,
        part: str,
        command: Sequence[str],
        log: Path | None,
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> int:
        """Run a Python module in its own session, with output to `log` or ours.

        It ends with this process.
        """
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") if log else contextlib.nullcontext() as stream:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "scaffpd.deploy.processes",
                    str(os.getpid()),
                    *command,
                ],
                cwd=folder or (log and log.parent),
                env={**environment, **self.environment(part)},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.setdefault(part, []).append(process)
        return process.pid

    def alive(self, part: str) -> bool:
        """Return whether every process started for a part is running."""
        started = self.started.get(part, [])
        return bool(started) and all(process.poll() is None for process in started)

    def wait(self, part: str) -> int:
        """Wait for the last process started for a part and return its exit code."""
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

    def kill(self, part: str | None = None, seconds: float = 10.0) -> None:
        """Send SIGKILL to a part, or to all, until no process is left."""
        end = time.monotonic() + seconds
        while members := self.members(part):
            for process in members:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            if time.monotonic() > end:
                raise TimeoutError(
                    f"These processes do not end: {[process.pid for process in members]}."
                )
            time.sleep(0.02)
        for name in [part] if part else list(self.started):
            for started in self.started.pop(name, []):
                started.kill()  # in case it has lost its mark
                started.wait()


def free_port() -> int:
    """Return a free port on loopback whose next one is free as well."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            port = int(first.getsockname()[1])
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


def end_with(parent: int) -> None:
    """End this process and all others of its part once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    mark, _, part = os.environ[MARK].rpartition(":")
    with contextlib.suppress(TimeoutError):
        Processes(mark).kill(part)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    owner = int(sys.argv[1])
    sys.argv = sys.argv[2:]
    threading.Thread(target=end_with, args=(owner,), daemon=True, name="watchdog").start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
