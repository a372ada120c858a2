"""The caller's end of an administrator's session (see `admin`)."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from scaffpd.deploy.flare.admin import FINISHED
from scaffpd.errors import InputError


class Lost(Exception):
    """The server did not answer the administrator."""


class Admin:
    """An administrator of a federation, by the startup kit that FLARE made for him.

    Args:
        kit: the administrator's startup kit: the folder that holds `startup`.
        log: where FLARE's own messages go.
        patience: seconds to wait for a reply.
    """

    def __init__(self, kit: Path, log: Path, patience: float = 30.0) -> None:
        if not (kit / "startup" / "fed_admin.json").is_file():
            raise InputError(f"{str(kit)!r} is no administrator's startup kit: it holds no startup/fed_admin.json.")
        self.kit, self.log, self.patience = kit.resolve(), log, patience
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The session's process, if there is one."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def call(self, *request: str) -> Any:
        """One command's result; raises `Lost` when the server cannot be asked."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                reply = json.loads(self._line(process))
            except (OSError, queue.Empty, ValueError) as problem:
                self._kill()
                raise Lost(f"FLARE's server did not answer {request[0]!r}.") from problem
            if "error" in reply:
                raise Lost(f"FLARE's server did not do {request[0]!r}: {reply['error']}")
            return reply["value"]

    def submit(self, job: Path) -> str:
        """Hand in a job; FLARE's name for it."""
        return str(self.call("submit", str(job.resolve())))

    def finished(self, job: str) -> bool:
        """Whether the job has come to its end, whatever that is."""
        return str(self.call("status", job)).startswith(FINISHED)

    def abort(self, job: str) -> None:
        """Tell a job to end."""
        self.call("abort", job)

    def sites(self) -> set[str]:
        """The sites that the server takes for connected."""
        return set(self.call("sites"))

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
                env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip
        self._lines = lines = queue.SimpleQueue()
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
            try:
                process.stdin.close()
            except OSError:
                pass


def _drain(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            lines.put(line)
