"""The folder of a deployed run: enough to resume from the last round, and the tables that a reader wants.

setup.json        the agreement: columns, categories, labels, means, deviations, model
segments.json     who took part in which part of the run
segment-0.npz     that part's checkpoint, written after every round
progress.jsonl    a line per round, for whoever watches
events.csv        who went away, came back, was dropped or quarantined
rounds.csv, clients.csv, model.safetensors, outcome.json    the result
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as save_tensors

from scaffpd import checkpoint as disk
from scaffpd.deploy.membership import QUARANTINED, SiloEvent
from scaffpd.deploy.messages import Array, Setup
from scaffpd.errors import InputError
from scaffpd.history import SCALARS, History
from scaffpd.system import lock_folder

MODEL = "deployed"  # what the tables call the one model of a deployed run


@dataclass(frozen=True)
class Segment:
    """A part of a run with the same members throughout.

    Attributes:
        number: counted from zero.
        members: the silos.
        before: rounds made in earlier segments.
    """

    number: int
    members: tuple[str, ...]
    before: int


class DeployedRun:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"Cannot make the run's folder {str(path)!r}: {error.strerror}.") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One coordinator at a time."""
        with lock_folder(self.path, f"Another coordinator is at work in {str(self.path)!r}."):
            for half in self.path.glob(".*"):  # files that a killed coordinator had begun to write
                half.unlink(missing_ok=True)
            yield

    def outcome(self) -> dict[str, Any] | None:
        """How the run ended, or `None`."""
        return self._read("outcome.json")

    def final(self) -> bool:
        """Whether there is nothing left to do."""
        return bool((self.outcome() or {}).get("final"))

    def forget_outcome(self) -> None:
        """The run goes on."""
        (self.path / "outcome.json").unlink(missing_ok=True)

    def seen(self) -> int:
        """Rounds made so far, as a watcher needs it: without reading a checkpoint."""
        try:
            return int((self.path / "round").read_text())
        except (OSError, ValueError):
            return 0

    def rounds(self) -> int:
        """Rounds made so far, in all parts."""
        segments = self.segments()
        return segments[-1].before + self.reached(segments[-1])[1] if segments else 0

    def write_outcome(self, outcome: dict[str, Any]) -> None:
        """Say how the run ended."""
        self._write("outcome.json", outcome)

    def settings(self) -> dict[str, Any] | None:
        """What the run is about, as its first coordinator wrote it down."""
        return self._read("settings.json")

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Keep what the run is about."""
        self._write("settings.json", settings)

    def setup(self) -> Setup | None:
        """The agreement of this run, if it was made."""
        values = self._read("setup.json")
        return None if values is None else Setup.of(values)

    def write_setup(self, setup: Setup) -> None:
        """Keep the agreement: a run that goes on uses the same one."""
        self._write("setup.json", setup.values())

    def segments(self) -> list[Segment]:
        """All parts so far."""
        read = self._read("segments.json")
        return [Segment(s["number"], tuple(s["members"]), s["before"]) for s in read["segments"]] if read else []

    def begin(self, segment: Segment, x: Array | None) -> None:
        """A new part, which starts at x (the federation's own start where it is `None`)."""
        if x is not None:
            with disk.atomic_write(self.path / f"start-{segment.number}.npy") as file:
                np.save(file, x)
        self._write("segments.json", {"segments": [asdict(s) for s in (*self.segments(), segment)]})

    def start(self, segment: Segment) -> Array | None:
        """Where a part starts."""
        path = self.path / f"start-{segment.number}.npy"
        return np.load(path, allow_pickle=False) if path.exists() else None

    def checkpoint(self, segment: Segment) -> Path:
        """The file of a part's state."""
        return self.path / f"segment-{segment.number}.npz"

    def reached(self, segment: Segment) -> tuple[Array | None, int]:
        """X and the number of rounds that a part has come to."""
        path = self.checkpoint(segment)
        if not path.exists():
            return self.start(segment), 0
        arrays, _ = disk.read(path)
        return arrays["state.x"], int(arrays["state.rounds"])

    def stood_in(self, segment: Segment) -> bool:
        """Whether the state that a part has come to holds something that stood in for an absent silo."""
        path = self.checkpoint(segment)
        return path.exists() and bool(np.any(disk.read(path)[0]["history.absent"]))

    def progress(self, line: dict[str, Any]) -> None:
        """A line for whoever watches."""
        if "round" in line:
            with disk.atomic_write(self.path / "round") as file:
                file.write(str(line["round"]).encode())
        with (self.path / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def event(self, event: SiloEvent) -> None:
        """Write down what happened to a silo."""
        path = self.path / "events.csv"
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(["round", "silo", "what", "sentence"])
            writer.writerow([event.round, event.silo, event.what, event.sentence])

    def quarantined(self) -> set[str]:
        """Who has given itself away in this run: for good, whoever coordinates it."""
        path = self.path / "events.csv"
        if not path.exists():
            return set()
        with path.open(newline="", encoding="utf-8") as file:
            return {row["silo"] for row in csv.DictReader(file) if row.get("what") == QUARANTINED}

    def write_rounds(self, silos: Sequence[str]) -> None:
        """The table of all rounds of all parts; a silo that was no member has empty cells."""
        columns = ["model", "segment", *SCALARS, *(f"loss[{s}]" for s in silos), *(f"weight[{s}]" for s in silos)]
        with disk.atomic_write(self.path / "rounds.csv") as raw:
            raw.write((",".join(columns) + "\r\n").encode())
            for segment in self.segments():
                if not self.checkpoint(segment).exists():
                    continue
                arrays, about = disk.read(self.checkpoint(segment))
                history = History.unpack(about["names"], arrays)
                table = {name: history[name].tolist() for name in history.columns}
                for row in range(len(history)):
                    cells = [table[name][row] if name in table else "" for name in columns[3:]]
                    number = table["round"][row] + segment.before
                    raw.write((",".join(map(str, [MODEL, segment.number, number, *cells])) + "\r\n").encode())

    def write_clients(self, rows: Sequence[dict[str, Any]]) -> None:
        """The table of silos."""
        with (self.path / "clients.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def write_model(self, x: Array, setup: Setup) -> None:
        """The parameters, with what they expect of a row."""
        with disk.atomic_write(self.path / "model.safetensors") as file:
            file.write(model_bytes(x, setup))

    def _read(self, name: str) -> dict[str, Any] | None:
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

    def _write(self, name: str, value: dict[str, Any]) -> None:
        with disk.atomic_write(self.path / name) as file:
            file.write((json.dumps(value, indent=1) + "\n").encode())


def model_bytes(x: Array, setup: Setup) -> bytes:
    """Parameters in a safetensors file, with what they expect of a row."""
    tensors = {"x": np.ascontiguousarray(x), "mean": setup.mean, "deviation": setup.deviation}
    return save_tensors(tensors, {"setup": json.dumps(setup.values())})
