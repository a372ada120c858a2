"""The folder of a deployed run: what it resumes from, and its result.

settings.json     what identifies the run: a folder is for one run
states.json, state-*.npz, rows.json    what to resume from (see `program`)
progress.jsonl    a line per round, and per event of a silo
outcome.json      how the run ended, or why it pauses
run.json, model.safetensors    the record of the run, and the model
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from scaffpd.deploy.messages import JsonMapping
from scaffpd.errors import InputError
from scaffpd.fields import Json
from scaffpd.files import JsonLines, lock_folder, make_folder, write_file
from scaffpd.report.record import EventRecord

PROGRESS = "progress.jsonl"
OUTCOME = "outcome.json"
INTERRUPTED = "interrupted"
PAUSED = "paused"
FAILED = "failed"
GLANCE = 2.0  # seconds to wait for a lock before it counts as held
T = TypeVar("T")


def read_json(file: Path, default: T) -> T:
    try:
        found: T = json.loads(file.read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        return default
    except (OSError, ValueError):
        raise InputError(
            "run-file-unreadable",
            f"The file {str(file)!r} cannot be read; use another folder, or remove it to start "
            "over.",
        ) from None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: its end, or the reason of a pause."""

    status: str  # a status of the training loop, "paused" or "failed"
    sentence: str  # the same in words
    rounds: int = 0  # rounds made
    certificate: float | None = None  # the certified gap; `None` if nothing is certified

    @property
    def final(self) -> bool:
        """Whether the run has ended; else it goes on once its cause is mended."""
        return self.status not in (PAUSED, FAILED, INTERRUPTED)


class DeployedRun:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = make_folder(path)
        self.checkpoint = self.path / "checkpoint.npz"

    def locked(self) -> AbstractContextManager[None]:
        return lock_folder(
            self.path, f"Another coordinator is at work in {str(self.path)!r}.", GLANCE
        )

    def outcome(self) -> Outcome | None:
        found: Json = read_json(self.path / OUTCOME, {})
        return Outcome(**found) if found else None

    def end(self, outcome: Outcome) -> None:
        """Write the outcome; the run's record must be complete by then."""
        write_file(self.path / OUTCOME, json.dumps(asdict(outcome), indent=1) + "\n")

    def pause(self, why: str) -> Outcome:
        made = self.rounds()
        waits = f"The run waits after round {made}: see to it, and the same command goes on."
        return Outcome(PAUSED, f"{why.rstrip('.')}. {waits}", made)

    def rounds(self) -> int:
        rounds, _ = self.entries()
        return int(rounds[-1]["round"]) if rounds else 0

    def progress(self, line: JsonMapping) -> None:
        JsonLines(self.path / PROGRESS, 0o666).append(line)

    def entries(self) -> tuple[list[Json], list[EventRecord]]:
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
        rounds, events = self.entries()
        ended = self.outcome()
        state = "interrupted" if rounds or events else "not begun"
        if ended is not None:
            state = ended.status
        try:
            with lock_folder(self.path, ""):
                pass
        except InputError:
            state = "running"
        file = self.path / PROGRESS
        nothing = {"round": 0, "certificate": None, "exchanges": 0}
        return {
            "state": state,
            **(rounds[-1] if rounds else nothing),
            "quiet_seconds": time.time() - file.stat().st_mtime if file.exists() else None,
            "events": [event.model_dump() for event in events[-5:]],
            "sentence": "" if state == "running" or not ended else ended.sentence,
        }
