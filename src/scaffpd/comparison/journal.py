"""The folder of a comparison: what was asked for, every run as soon as it is done, and the tables at the end.

about.json    the setting, the grid of every method, versions
runs.jsonl    one line per run, flushed to disk when it is done; the same call again goes on after the last of them
runs.csv, clients.csv, table.csv    written when all is done
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

import scaffpd
from scaffpd.comparison.runs import Job, Run
from scaffpd.errors import InputError

ABOUT, LOG = "about.json", "runs.jsonl"
TABLES = ("runs.csv", "clients.csv", "table.csv")


class Journal:
    """Runs on disk; without a folder, runs in memory only."""

    def __init__(self, folder: str | os.PathLike[str] | None, about: dict[str, Any]) -> None:
        self.runs: dict[Job, Run] = {}
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            self._open(self.folder, about)

    def _open(self, folder: Path, about: dict[str, Any]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / ABOUT).exists():
                _compare(folder, about)
                self._read(folder / LOG)
            else:
                _check_empty(folder)
                note = {"setting": about, "versions": _versions()}
                write(folder / ABOUT, json.dumps(note, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            why = "it is a file" if folder.is_file() else error.strerror
            raise InputError(f"Cannot write to the folder {str(folder)!r}: {why}.") from None

    def _read(self, log: Path) -> None:
        """All whole lines; the beginning of a line whose writing was interrupted is cut off."""
        text = log.read_bytes() if log.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        try:
            runs = [Run.from_json(line) for line in whole.decode().splitlines()]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{str(log)!r} is not a readable record of runs; remove it to start anew.") from None
        if len(whole) < len(text):
            os.truncate(log, len(whole))
        self.runs = {run.job: run for run in runs}

    def add(self, run: Run) -> None:
        """Keep a run, on disk before anything else happens."""
        self.runs[run.job] = run
        if self.folder is not None:
            with (self.folder / LOG).open("a", encoding="utf-8") as file:
                file.write(run.to_json() + "\n")
                file.flush()
                os.fsync(file.fileno())


def write(path: Path, text: str) -> None:
    """All of it or nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _compare(folder: Path, about: dict[str, Any]) -> None:
    try:
        there = json.loads((folder / ABOUT).read_text(encoding="utf-8"))["setting"]
        other = [name for name in about if there.get(name) != json.loads(json.dumps(about[name]))]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{str(folder / ABOUT)!r} is not of a comparison; use another folder.") from None
    if other:
        raise InputError(
            f"The folder {str(folder)!r} has a comparison with other {' and '.join(other)}; use another folder."
        )


def _check_empty(folder: Path) -> None:
    for name in (LOG, *TABLES):
        if (folder / name).exists():
            raise InputError(f"The folder {str(folder)!r} has a {name} of something else; use another folder.")


def _versions() -> dict[str, str]:
    return {
        "scaffpd": scaffpd.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "numpy": np.__version__,
    }  # fmt: skip
