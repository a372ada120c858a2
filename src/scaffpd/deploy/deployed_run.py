"""The folder of a deployed run: the state to resume from, and the tables of the result.

setup.json        the agreement: columns, categories, labels, means, deviations, model
constants.json    what every silo reported about its losses with the agreement
segments.json     who took part in which part of the run
segment-0.npz     that part's checkpoint, written after every round
progress.jsonl    a line per round and per event: who went away, came back, was dropped or is quarantined
events.csv        the events alone, as a table
choice.json       l2, κ and the objective's strength as folds have chosen them, with [choosing]
joining.json      what joining brings every silo that says so, with training.joining
clients.json      every silo's scores
outcome.json, run.json, model.safetensors    the result, and its record
rounds.csv, clients.csv, joining.csv         the same as tables, for other programs
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import scaffpd.training.history as disk
from scaffpd import __version__
from scaffpd.deploy.log import RunLog
from scaffpd.deploy.messages import Array, reader_of
from scaffpd.deploy.session import QUARANTINED, SiloEvent
from scaffpd.errors import InputError
from scaffpd.files import (
    JsonLines,
    atomic_write,
    clear_drafts,
    csv_text,
    lock_folder,
    make_folder,
    write_file,
)
from scaffpd.run.settings.model_file import Setup, model_bytes
from scaffpd.training.history import SCALARS, History
from scaffpd.training.trackers import prometheus

PROGRESS = "progress.jsonl"
OUTCOME = "outcome.json"
PAUSED = "paused"
FAILED = "failed"
MODEL = "deployed"  # the model's name in the tables
GLANCE = 2.0  # seconds to wait for a lock before it counts as held


@dataclass(frozen=True)
class Segment:
    """A part of a run with the same members throughout."""

    number: int  # counted from zero
    members: tuple[str, ...]  # the silos
    before: int  # rounds made in earlier segments


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: its end, or the reason of a pause."""

    status: str  # a status of the training loop, "paused" or "failed"
    final: bool  # whether the run has ended; after "failed" it resumes once the cause is mended
    sentence: str  # the same in words
    members: tuple[str, ...] = ()  # the silos that the result is about
    rounds: int = 0  # rounds made
    certificate: float | None = None  # the certified gap; `None` if nothing is certified
    privacy: Mapping[str, float] | None = (
        None  # the largest ε of a silo, and δ; `None` where there is no noise
    )

    @classmethod
    def of(cls, folder: DeployedRun) -> Outcome:
        """Read it from a run's folder."""
        ended: Outcome | None = folder.read(OUTCOME, cls)
        if ended is None:
            raise InputError(
                "run-outcome-yet", f"The run in {str(folder.path)!r} has no outcome yet."
            )
        return ended


class DeployedRun:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path, self.log = make_folder(path), RunLog(None)

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
        with lock_folder(
            self.path, f"Another coordinator is at work in {str(self.path)!r}.", GLANCE
        ):
            clear_drafts(self.path)
            yield

    def read(self, name: str, kind: Any = dict[str, Any]) -> Any:
        """Read one of the JSON files as a value of this kind; return `None` if it is missing."""
        path = self.path / name
        try:
            return reader_of(kind).validate_python(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            sentence = f"The file {str(path)!r} cannot be read; use another folder, or remove it to start anew."
            raise InputError("read", sentence) from None

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write one of the JSON files."""
        write_file(self.path / name, json.dumps(value, indent=1) + "\n")

    def final(self) -> bool:
        """Return whether the run has ended."""
        ended: Outcome | None = self.read(OUTCOME, Outcome)
        return ended is not None and ended.final

    def seen(self) -> int:
        """Return the rounds made so far without reading a checkpoint."""
        try:
            return int((self.path / "round").read_text())
        except (OSError, ValueError):
            return 0

    def rounds(self) -> int:
        """Return the rounds made so far, in all segments."""
        segments = self.segments()
        return segments[-1].before + self.reached(segments[-1])[1] if segments else 0

    def setup(self) -> Setup | None:
        """Return the agreement of this run, or `None` before it was made."""
        values = self.read("setup.json")
        return None if values is None else Setup.of(values)

    def segments(self) -> list[Segment]:
        """Return all segments so far."""
        read = self.read("segments.json", dict[Literal["segments"], list[Segment]])
        return list(read["segments"]) if read else []

    def begin(self, segment: Segment, x: Array | None) -> None:
        """Begin a new segment at x, or at the federation's own start if it is `None`."""
        if x is not None:
            with atomic_write(self.path / f"start-{segment.number}.npy") as file:
                np.save(file, x)
        self.write("segments.json", {"segments": [asdict(s) for s in (*self.segments(), segment)]})

    def start(self, segment: Segment) -> Array | None:
        """Return the point at which a segment starts."""
        path = self.path / f"start-{segment.number}.npy"
        return np.load(path, allow_pickle=False) if path.exists() else None

    def checkpoint(self, segment: Segment) -> Path:
        """Return the file of a segment's state."""
        return self.path / f"segment-{segment.number}.npz"

    def reached(self, segment: Segment) -> tuple[Array | None, int]:
        """Return x and the number of rounds that a segment has reached."""
        arrays, _ = self._state(segment, "state.x", "state.rounds")
        return (
            (arrays["state.x"], int(arrays["state.rounds"])) if arrays else (self.start(segment), 0)
        )

    def _state(self, segment: Segment, *only: str) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return arrays, all or `only` some, and notes of a segment's checkpoint; empty before the first one."""
        path = self.checkpoint(segment)
        return disk.read(path, only or None) if path.exists() else ({}, {})

    def goes_on(self, segment: Segment) -> bool:
        """Return whether a segment can go on: no bound has replaced an absent silo, the version is the same."""
        arrays, about = self._state(segment)  # all of it: damage must show before the silos work
        return not arrays or (
            about.get("version") == __version__ and not np.any(arrays.get("history.absent", 0))
        )

    def progress(self, line: Mapping[str, Any]) -> None:
        """Append a line to progress.jsonl."""
        if "round" in line:
            write_file(self.path / "round", str(line["round"]))
            gap = (
                "nothing is certified"
                if line["certificate"] is None
                else f"certified gap {line['certificate']:.2e}"
            )
            self.log.note(
                "info",
                f"The round is done: {gap}, {line['exchanges']} exchanges.",
                number=line["round"],
            )
        JsonLines(self.path / PROGRESS, 0o666).append(line)

    def entries(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rounds and the events of progress.jsonl."""
        path = self.path / PROGRESS
        try:
            lines = list(JsonLines(path).read())
            events = [
                asdict(SiloEvent(*line["event"].values())) for line in lines if "event" in line
            ]
            return [line for line in lines if "round" in line], events
        except (OSError, ValueError, TypeError, AttributeError):
            raise InputError(
                "file-read-mend",
                f"The file {str(path)!r} cannot be read; mend it, or use another folder.",
            ) from None

    def status(self) -> dict[str, Any]:
        """Return the status of a run: the last round, absent silos and the last events."""
        ended: Outcome | None = self.read(OUTCOME, Outcome)
        (rounds, events), now = self.entries(), time.time()
        lines = bool(rounds or events)
        last = rounds[-1] if rounds else {}
        state = (
            "running"
            if self.busy()
            else ended.status
            if ended
            else "interrupted"
            if lines
            else "not begun"
        )
        exchanges = last.get("exchanges", 0)
        seconds = last.get("seconds", 0.0)
        return {
            "state": state,
            "round": last.get("round", 0),
            "certificate": last.get("certificate"),
            "members": last.get("members", []),
            "absent": last.get("absent", []),
            "losses": last.get("losses", []),
            "weights": last.get("weights", []),
            "exchanges": exchanges,
            "seconds_per_exchange": seconds / exchanges if exchanges else None,
            "messages_up": last.get("messages_up", 0),
            "messages_down": last.get("messages_down", 0),
            "epsilon": ((ended and ended.privacy) or {}).get("epsilon"),
            "quiet_seconds": now - (self.path / PROGRESS).stat().st_mtime if lines else None,
            "events": events[-5:],
            "sentence": "" if state == "running" or not ended else ended.sentence,
        }

    def event(self, event: SiloEvent) -> None:
        """Append an event to progress.jsonl, and write all events to events.csv."""
        self.progress({"event": asdict(event)})
        self.write_table("events.csv", self.entries()[1])
        self.log.note("warning", event.sentence, event.client, event.round)

    def quarantined(self) -> set[str]:
        """Return the silos that are quarantined for the rest of this run."""
        return {event["client"] for event in self.entries()[1] if event["what"] == QUARANTINED}

    def write_rounds(self, silos: Sequence[str]) -> None:
        """Write the tables of events and of all rounds; a silo that was not a member has empty cells."""
        self.write_table("events.csv", self.entries()[1])
        columns = [
            "model",
            "segment",
            *SCALARS,
            *(f"loss[{s}]" for s in silos),
            *(f"weight[{s}]" for s in silos),
        ]
        rows: list[dict[str, Any]] = []
        for segment in self.segments():
            arrays, about = self._state(segment)
            if arrays:
                for row in History.unpack(about["names"], arrays).rows():
                    place = {
                        "model": MODEL,
                        "segment": segment.number,
                        "round": row["round"] + segment.before,
                    }
                    rows.append(row | place)
        write_file(self.path / "rounds.csv", csv_text(rows, columns))

    def write_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table of the result, if it has rows."""
        if rows:
            write_file(self.path / name, csv_text(rows))

    def write_model(self, x: Array, setup: Setup) -> None:
        """Write the parameters with the agreement: columns, categories and scale."""
        write_file(self.path / "model.safetensors", model_bytes(x, setup))


def run_metrics(status: Mapping[str, Any]) -> str:
    """Return the status of a run in Prometheus's format."""
    silos = status["members"]
    return prometheus(
        "scaffpd",
        {
            "running": float(status["state"] == "running"),
            "round": status["round"],
            "certificate": status["certificate"],
            "exchanges_total": status["exchanges"],
            "seconds_per_exchange": status["seconds_per_exchange"],
            "quiet_seconds": status["quiet_seconds"],
            "bytes_total": {(("way", way),): status[f"messages_{way}"] for way in ("up", "down")},
            "absent": {(("silo", name),): float(name in status["absent"]) for name in silos},
            "loss": {
                (("silo", name),): value
                for name, value in zip(silos, status["losses"], strict=True)
            },
            "epsilon": status["epsilon"],
        },
    )
