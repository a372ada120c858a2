"""The folder of a deployed run: the state to resume from, and the result.

settings.json     what identifies the run: a folder is for one run
setup.json        the agreement: columns, categories, labels, means, deviations, model
constants.json    what every silo reported about its rows with the agreement
checkpoint.npz    the state, written after every round
progress.jsonl    a line per round, and per event of a silo
outcome.json      how the run ended, or why it pauses
run.json, model.safetensors    the record of the run, and the model
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

import scaffpd.training.history as disk
from scaffpd.deploy.messages import Json, JsonMapping
from scaffpd.errors import InputError
from scaffpd.files import JsonLines, clear_drafts, lock_folder, make_folder, write_file
from scaffpd.run.record import EventRecord
from scaffpd.run.settings.model_file import Setup
from scaffpd.training.history import History

PROGRESS = "progress.jsonl"
OUTCOME = "outcome.json"
PAUSED = "paused"
FAILED = "failed"
GLANCE = 2.0  # seconds to wait for a lock before it counts as held
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: its end, or the reason of a pause."""

    status: str  # a status of the training loop, "paused" or "failed"
    # whether the run has ended; after "failed" it resumes once the cause is mended
    final: bool
    sentence: str  # the same in words
    rounds: int = 0  # rounds made
    certificate: float | None = None  # the certified gap; `None` if nothing is certified
    # the largest ε of a silo, and δ; `None` without noise
    privacy: Mapping[str, float] | None = None

    @classmethod
    def of(cls, folder: DeployedRun) -> Outcome:
        """Read it from a run's folder."""
        ended = folder.read(OUTCOME, cls)
        if ended is None:
            raise InputError("no-outcome", f"The run in {str(folder.path)!r} has no outcome yet.")
        return ended


class DeployedRun:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = make_folder(path)
        self.checkpoint = self.path / "checkpoint.npz"

    def busy(self) -> bool:
        """Return whether a coordinator is running on this folder."""
        try:
            with lock_folder(self.path, ""):
                return False
        except InputError:
            return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one coordinator work at a time."""
        busy = f"Another coordinator is at work in {str(self.path)!r}."
        with lock_folder(self.path, busy, GLANCE):
            clear_drafts(self.path)
            yield

    def read(self, name: str, kind: type[Kind]) -> Kind | None:
        """Read one of the JSON files as a value of this kind; return `None` if it is missing."""
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            read: Kind = TypeAdapter(kind).validate_python(content)
            return read
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise InputError(
                "run-file-unreadable",
                f"The file {str(path)!r} cannot be read; use another folder, or remove it to start "
                "over.",
            ) from None

    def write(self, name: str, value: JsonMapping) -> None:
        """Write one of the JSON files."""
        write_file(self.path / name, json.dumps(value, indent=1) + "\n")

    def has_outcome(self) -> bool:
        """Return whether the run has ended or pauses."""
        return (self.path / OUTCOME).exists()

    def rounds(self) -> int:
        """Return the rounds made so far."""
        rounds, _ = self.entries()
        return int(rounds[-1]["round"]) if rounds else 0

    def setup(self) -> Setup | None:
        """Return the agreement of this run, or `None` before it was made."""
        values = self.read("setup.json", Json)
        return None if values is None else Setup.of(values)

    def history(self) -> History | None:
        """Return the history up to the last checkpoint; `None` before the first."""
        if not self.checkpoint.exists():
            return None
        arrays, about = disk.read(self.checkpoint)
        return History.unpack(about["names"], arrays)

    def progress(self, line: JsonMapping) -> None:
        """Append a line to progress.jsonl."""
        JsonLines(self.path / PROGRESS, 0o666).append(line)

    def entries(self) -> tuple[list[Json], list[EventRecord]]:
        """Return the rounds and the events of progress.jsonl."""
        path = self.path / PROGRESS
        try:
            lines = list(JsonLines(path).read())
            events = [EventRecord(**line["event"]) for line in lines if "event" in line]
            return [line for line in lines if "round" in line], events
        except (OSError, ValueError, TypeError, AttributeError):
            raise InputError(
                "progress-unreadable",
                f"The file {str(path)!r} cannot be read; repair it, or use another folder.",
            ) from None

    def status(self) -> Json:
        """Return the status of a run: its state, the last round and the last events."""
        ended = self.read(OUTCOME, Outcome)
        rounds, events = self.entries()
        last = rounds[-1] if rounds else {}
        state = "interrupted" if rounds or events else "not begun"
        if ended is not None:
            state = ended.status
        if self.busy():
            state = "running"
        file = self.path / PROGRESS
        exchanges = last.get("exchanges", 0)
        return {
            "state": state,
            "round": last.get("round", 0),
            "certificate": last.get("certificate"),
            "members": last.get("members", []),
            "exchanges": exchanges,
            "seconds_per_exchange": last["seconds"] / exchanges if exchanges else None,
            "messages_up": last.get("messages_up", 0),
            "messages_down": last.get("messages_down", 0),
            "quiet_seconds": time.time() - file.stat().st_mtime if file.exists() else None,
            "events": [event.model_dump() for event in events[-5:]],
            "sentence": "" if state == "running" or not ended else ended.sentence,
        }


def write_outcome(folder: DeployedRun, outcome: Outcome) -> None:
    """Write the outcome; the run's record must be complete by then."""
    folder.write(OUTCOME, asdict(outcome))
