"""The caller's end of an administrator's session (see `admin`)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError


class LostError(Exception):
    """The server did not answer the administrator."""


class Admin:
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
