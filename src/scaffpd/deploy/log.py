"""`RunLog`: what a coordinator or a silo writes about its runs, one line of JSON each."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError
from scaffpd.files import lock_file

LONGEST_MESSAGE = 2000  # characters of a line of a log


class _LogFile(RotatingFileHandler):
    """Log file that only its owner reads; several processes may write to it, each line under a lock."""

    def _open(self) -> Any:
        return open(
            self.baseFilename,
            "a",
            encoding="utf-8",
            opener=lambda path, flags: os.open(path, flags, 0o600),
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line to the current file: another process may have started a new one."""
        try:
            with lock_file(Path(f"{self.baseFilename}.lock")):
                super().emit(record)
                self.close()
        except InputError:
            self.handleError(record)  # on standard error: a log that cannot be written ends no run


class RunLog:
    """Log of a coordinator or a silo: lines of JSON with time, level, run, round, silo and message.

    It records the sentences that the other side gets too, and never an unexpected exception's text, a value or a key.
    """

    def __init__(self, settings: Any) -> None:
        self.run = ""
        self._handler = None
        if settings is not None:
            size = settings.size_mb * 2**20
            level = settings.level.upper()
            self._handler = _LogFile(
                settings.file, maxBytes=size, backupCount=settings.keep, delay=True
            )
            self._handler.setLevel(level)

    def note(
        self, level: str, message: str, silo: str | None = None, number: int | None = None
    ) -> None:
        """Write a line, if there is a log; `number` is that of the round, if known."""
        if self._handler is None:
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level,
            "run": self.run or None,
            "round": number,
            "silo": silo,
            "message": message[:LONGEST_MESSAGE],
        }
        record = logging.makeLogRecord(
            {"levelno": getattr(logging, level.upper()), "msg": json.dumps(line)}
        )
        if record.levelno >= self._handler.level:
            self._handler.handle(record)
