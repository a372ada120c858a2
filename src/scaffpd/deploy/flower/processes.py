"""Processes that are ours, with everything that they start, found again by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_MARK = "SCAFFPD_ENGINE_PART"


class Processes:
    """Named parts, each a process with all its descendants.

    A part's mark is inherited by whatever it starts, so a grandchild is found even if its parents are gone and it has
    a session of its own (Flower detaches its SuperExec).
    """

    def __init__(self) -> None:
        self._engine = uuid.uuid4().hex
        self._started: dict[str, list[subprocess.Popen[bytes]]] = {}

    def start(self, part: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
        """Start a process of a part, in a session of its own; its output is appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=log.parent,
                env={**environment, _MARK: self._value(part)},
            )
        self._started.setdefault(part, []).append(process)
        return process.pid

    def parts(self) -> list[str]:
        """The parts that have been started and not killed."""
        return [part for part, started in self._started.items() if started]

    def alive(self, part: str) -> bool:
        """Whether all that was started for a part is still running."""
        started = self._started.get(part, [])
        return bool(started) and all(process.poll() is None for process in started)

    def members(self, part: str | None = None) -> list[psutil.Process]:
        """Every living process of a part, or of all parts."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                value = process.environ().get(_MARK, "")
                ours = value == self._value(part) if part else value.startswith(f"{self._engine}:")
                if ours and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(process)
        return found

    def signal(self, part: str, number: int) -> None:
        """Send a signal to every process of a part."""
        for process in self.members(part):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

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
        self._reap(part)

    def _reap(self, part: str | None) -> None:
        for name in [part] if part else list(self._started):
            for process in self._started.pop(name, []):
                process.wait()

    def _value(self, part: str) -> str:
        return f"{self._engine}:{part}"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
