"""The folder of a deployed run: enough to resume from the last round, and the tables that a reader wants.

setup.json        the agreement: columns, categories, labels, means, deviations, model
constants.json    what every silo said of its losses when it took the agreement
segments.json     who took part in which part of the run
segment-0.npz     that part's checkpoint, written after every round
progress.jsonl    a line per round, for whoever watches
events.csv        who went away, came back, was dropped or quarantined
choice.json       l2, κ and the objective's strength as folds have chosen them, with [choosing]
joining.csv, joining.json    what joining brings every silo that tells, with training.joining
rounds.csv, clients.csv, model.safetensors, outcome.json    the result
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scaffpd import checkpoint as disk
from scaffpd.config.model_file import Setup, model_bytes
from scaffpd.deploy.membership import QUARANTINED, SiloEvent
from scaffpd.deploy.messages import Array
from scaffpd.errors import InputError
from scaffpd.history import SCALARS, History
from scaffpd.system import atomic_write, csv_text, lock_folder, make_folder, write_file

MODEL = "deployed"  # what the tables call the one model of a deployed run


@dataclass(frozen=True)
class Segment:
    """A part of a run with the same members throughout."""

    number: int  # counted from zero
    members: tuple[str, ...]  # the silos
    before: int  # rounds made in earlier segments


class DeployedRun:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = make_folder(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one coordinator work at a time."""
        with lock_folder(self.path, f"Another coordinator is at work in {str(self.path)!r}."):
            for half in self.path.glob(".*"):  # files that a killed coordinator had begun to write
                half.unlink(missing_ok=True)
            yield

    def read(self, name: str) -> dict[str, Any] | None:
        """Read one of the JSON files, or return `None` where there is none."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            read = None
        if not isinstance(read, dict):
            raise InputError(f"The file {str(path)!r} cannot be read; use another folder, or remove it to start anew.")
        return read

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write one of the JSON files."""
        write_file(self.path / name, json.dumps(value, indent=1) + "\n")

    def final(self) -> bool:
        """Whether there is nothing left to do."""
        return bool((self.read("outcome.json") or {}).get("final"))

    def seen(self) -> int:
        """Return the rounds made so far without reading a checkpoint."""
        try:
            return int((self.path / "round").read_text())
        except (OSError, ValueError):
            return 0

    def rounds(self) -> int:
        """Return the rounds made so far, in all parts."""
        segments = self.segments()
        return segments[-1].before + self.reached(segments[-1])[1] if segments else 0

    def setup(self) -> Setup | None:
        """Return the agreement of this run, if it was made: a run that is resumed uses the same one."""
        values = self.read("setup.json")
        return None if values is None else Setup.of(values)

    def segments(self) -> list[Segment]:
        """Return all parts so far."""
        read = self.read("segments.json")
        return [Segment(s["number"], tuple(s["members"]), s["before"]) for s in read["segments"]] if read else []

    def begin(self, segment: Segment, x: Array | None) -> None:
        """Begin a new part at x (at the federation's own start where it is `None`)."""
        if x is not None:
            with atomic_write(self.path / f"start-{segment.number}.npy") as file:
                np.save(file, x)
        self.write("segments.json", {"segments": [asdict(s) for s in (*self.segments(), segment)]})

    def start(self, segment: Segment) -> Array | None:
        """Return the point at which a part starts."""
        path = self.path / f"start-{segment.number}.npy"
        return np.load(path, allow_pickle=False) if path.exists() else None

    def checkpoint(self, segment: Segment) -> Path:
        """Return the file of a part's state."""
        return self.path / f"segment-{segment.number}.npz"

    def reached(self, segment: Segment) -> tuple[Array | None, int]:
        """Return x and the number of rounds that a part has reached."""
        path = self.checkpoint(segment)
        if not path.exists():
            return self.start(segment), 0
        arrays, _ = disk.read(path)
        return arrays["state.x"], int(arrays["state.rounds"])

    def stood_in(self, segment: Segment) -> bool:
        """Whether a lower bound has stood in for an absent silo in a part."""
        path = self.checkpoint(segment)
        return path.exists() and bool(np.any(disk.read(path)[0]["history.absent"]))

    def progress(self, line: Mapping[str, Any]) -> None:
        """Append a line for whoever watches."""
        if "round" in line:
            write_file(self.path / "round", str(line["round"]))
        with (self.path / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def event(self, event: SiloEvent) -> None:
        """Append an event, to the table and for whoever watches."""
        path, row = self.path / "events.csv", asdict(event)
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([row, row.values()] if new else [row.values()])
        self.progress({"event": row})

    def quarantined(self) -> set[str]:
        """Return the silos that are quarantined in this run: for good, whoever coordinates it."""
        path = self.path / "events.csv"
        if not path.exists():
            return set()
        with path.open(newline="", encoding="utf-8") as file:
            return {row["silo"] for row in csv.DictReader(file) if row.get("what") == QUARANTINED}

    def write_rounds(self, silos: Sequence[str]) -> None:
        """Write the table of all rounds of all parts; a silo that was no member has empty cells."""
        columns = ["model", "segment", *SCALARS, *(f"loss[{s}]" for s in silos), *(f"weight[{s}]" for s in silos)]
        rows: list[dict[str, Any]] = []
        for segment in self.segments():
            if self.checkpoint(segment).exists():
                arrays, about = disk.read(self.checkpoint(segment))
                history = History.unpack(about["names"], arrays)
                table = history.table()
                for k, number in enumerate(table["round"]):
                    cells = {name: table[name][k] for name in columns if name in table}
                    rows.append(cells | {"model": MODEL, "segment": segment.number, "round": number + segment.before})
        write_file(self.path / "rounds.csv", csv_text(rows, columns))

    def write_table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table of the result."""
        write_file(self.path / name, csv_text(rows))

    def write_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the table of silos."""
        write_file(self.path / "clients.csv", csv_text(rows))

    def write_model(self, x: Array, setup: Setup) -> None:
        """Write the parameters, with what they expect of a row."""
        write_file(self.path / "model.safetensors", model_bytes(x, setup))
