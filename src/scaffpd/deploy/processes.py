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
from types import ModuleType
from typing import TYPE_CHECKING

from scaffpd.errors import needed

if TYPE_CHECKING:
    import psutil

MARK = "SCAFFPD_ENGINE_PART"


class Processes:
    """One process with its descendants, and all else that has its mark, by default a new one."""

    def __init__(self, mark: str | None = None) -> None:
        self.mark = mark or uuid.uuid4().hex
        self.started: subprocess.Popen[bytes] | None = None

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path
    ) -> None:
        """Run a Python module in its own session; it ends with this process."""
        with log.open("ab") as stream:
            self.started = subprocess.Popen(
                [sys.executable, "-u", "-m", __name__, str(os.getpid()), *command],
                cwd=folder,
                env={**environment, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> bool:
        return self.started is not None and self.started.poll() is None

    def members(self) -> list[psutil.Process]:
        """Return every living process with the mark, but this one."""
        psutil = _psutil()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = process.environ().get(MARK) == self.mark and process.pid != os.getpid()
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> None:
        if self.started is not None:
            self.started.terminate()
            self.started.wait()

    def kill(self, seconds: float = 10.0) -> None:
        """Send SIGKILL until no process is left."""
        psutil = _psutil()
        deadline = time.monotonic() + seconds
        while members := self.members():
            for process in members:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if time.monotonic() > deadline:
                raise TimeoutError(f"These do not end: {[process.pid for process in members]}.")
            time.sleep(0.02)
        if self.started is not None:
            self.started.kill()  # in case it has lost its mark
            self.started.wait()


def _psutil() -> ModuleType:
    found: ModuleType = needed("psutil", "psutil", "flare")
    return found


def free_port() -> int:
    """Return a free port on loopback whose next one is free as well."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            port = int(first.getsockname()[1])
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


def end_with(parent: int) -> None:
    """End this process and all others with its mark once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    with contextlib.suppress(TimeoutError):
        Processes(os.environ[MARK]).kill()
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    owner = int(sys.argv[1])
    sys.argv = sys.argv[2:]
    threading.Thread(target=end_with, args=(owner,), daemon=True, name="watchdog").start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
