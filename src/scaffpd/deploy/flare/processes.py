"""Processes that belong to an engine, and to whom in it: found by a mark in their environment.

FLARE's processes start others, and a child that has lost its parent is nobody's child. The mark stays.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARK, ROLE = "SCAFFPD_ENGINE", "SCAFFPD_ROLE"


class Processes:
    """Starts processes under a common mark, and finds and ends all that carry it."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, role: str) -> dict[str, str]:
        """What a process of this role has to have in its environment."""
        return {MARK: self.mark, ROLE: role}

    def start(self, role: str, module: Sequence[str], folder: Path, log: Path, extra: Mapping[str, str]) -> None:
        """Run a Python module in `folder`, in a session of its own, with its output in `log`; it ends when we end."""
        environment = os.environ | extra | self.environment(role)
        command = [sys.executable, "-u", "-m", "scaffpd.deploy.flare.child", str(os.getpid()), *module]
        with log.open("ab") as stream:
            self._started[role] = subprocess.Popen(
                command, cwd=folder, env=environment,
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def main(self, role: str) -> int | None:
        """The process that was started for a role, if it lives."""
        process = self._started.get(role)
        return process.pid if process and process.poll() is None else None

    def code(self, role: str) -> int | None:
        """With what the process that was started for a role has ended, if it has."""
        return self._started[role].poll()

    def pids(self, role: str | None = None) -> set[int]:
        """Everything alive with the mark (and the role)."""
        found = set()
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                alive = process.status() != psutil.STATUS_ZOMBIE
            except (psutil.Error, OSError):
                continue
            if alive and environment.get(MARK) == self.mark and role in (None, environment.get(ROLE)):
                found.add(process.pid)
        return found

    def signal(self, pids: set[int], number: signal.Signals) -> None:
        """Send a signal to each of them that is still there."""
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def kill(self, role: str | None = None, patience: float = 10.0) -> None:
        """End everything with the mark (and the role) at once; whoever is started meanwhile as well."""
        deadline = time.monotonic() + patience
        while (left := self.pids(role)) and time.monotonic() < deadline:
            self.signal(left, signal.SIGKILL)
            time.sleep(0.05)
        for name, process in self._started.items():
            if role in (None, name):
                process.wait(patience)
