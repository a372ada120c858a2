"""A run is a folder: settings, tables, the model, and everything that a report is made from.

config.toml         complete, re-runnable
environment.json    versions and machine
summary.json        what was trained and how it ended
rounds.csv          a row for every model and round
clients.csv         a row for every model and client
partition.csv       which client has how many rows of which label
path.csv            a row for every point of a fairness path
model.safetensors   the model that is kept
checkpoint/         one file for every model
report.html         all of it to look at
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as save_tensors

import scaffpd
from scaffpd.checkpoint import replacing
from scaffpd.deploy.coordinator.run_folder import model_bytes
from scaffpd.environment import environment
from scaffpd.errors import InputError
from scaffpd.lock import alone
from scaffpd.runs import tables
from scaffpd.runs.config import RunConfig
from scaffpd.runs.prepared import Prepared, described
from scaffpd.runs.trained import Trained, kept
from scaffpd.settings.writing import toml_text

FORMAT = 1


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, kind: str, fresh: bool = False) -> None:
        """Find out before the work that this is no folder, or that of something else."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"Cannot write to the folder {str(self.path)!r}: it is a file.")
        other = self.kind()
        if other is not None and other != kind and not fresh:
            raise InputError(f"The folder {str(self.path)!r} is that of `scaffpd {other}`: choose another with --out.")

    def kind(self) -> str | None:
        """What the folder holds; `None` where it holds nothing yet."""
        try:
            found = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return str(found.get("kind")) if isinstance(found, dict) else None

    @contextmanager
    def opened(self, config: RunConfig, fresh: bool) -> Iterator[None]:
        """Make the folder, keep others out of it, and write down the settings; a folder of another run is refused."""
        try:
            (self.path / "checkpoint").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"Cannot write to the folder {str(self.path)!r}: {error.strerror}.") from None
        with alone(self.path, f"Another run is at work in {str(self.path)!r}."):
            if fresh:
                shutil.rmtree(self.path / "checkpoint")
                (self.path / "checkpoint").mkdir()
            elif not self.fits(config):
                raise InputError(
                    f"The folder {str(self.path)!r} holds another run: choose another one with --out, or start anew "
                    "there with --fresh."
                )
            self._write("config.toml", self._settings(config))
            self._write("environment.json", json.dumps(environment(), indent=1) + "\n")
            yield
        (self.path / "lock").unlink(missing_ok=True)

    def fits(self, config: RunConfig) -> bool:
        """Whether there is no other run here: how long one goes on does not make it another."""
        file = self.path / "config.toml"
        if not file.exists():
            return True
        return _lasting(file.read_text(encoding="utf-8")) == _lasting(self._settings(config))

    def checkpoint(self, model: str) -> Path:
        """The file of a model's state."""
        return self.path / "checkpoint" / f"{''.join(c if c.isalnum() else '-' for c in model)}.npz"

    def _settings(self, config: RunConfig) -> str:
        return toml_text(config.complete(self.path), f"scaffpd train {self.path.as_posix()}/config.toml")

    def write(
        self, kind: str, config: RunConfig, prepared: Prepared, models: Sequence[Trained],
        path: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Everything but settings and checkpoints."""
        summary = {
            "format": FORMAT, "kind": kind, "title": title(config, prepared),
            "command": f"scaffpd {kind} {shlex.quote((self.path / 'config.toml').as_posix())}",
            "made": datetime.now(UTC).isoformat(timespec="seconds"), "version": scaffpd.__version__,
            "task": prepared.task, "measure": prepared.measure, "split": prepared.split,
            "labels": list(prepared.labels), "clients_word": prepared.word, "model": described(prepared.model),
            "data": prepared.about, "models": [tables.about(one) for one in models], "remarks": list(prepared.remarks),
            "verdict": None, "path": path,
        }  # fmt: skip
        self._write("summary.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
        self._write("rounds.csv", tables.csv_text(tables.rounds(models, prepared.measure)))
        self._write("clients.csv", tables.csv_text(tables.clients(models, prepared.measure)))
        self._write("partition.csv", tables.csv_text(tables.partition(prepared)))
        if path is not None:
            self._write("path.csv", tables.csv_text(tables.points(models, prepared)))
        self._write_model(config, prepared, kept(models))

    def _write_model(self, config: RunConfig, prepared: Prepared, one: Trained) -> None:
        x = np.ascontiguousarray(prepared.in_units(one.result.x))
        setup = prepared.setup(one.algorithm)
        with replacing(self.path / "model.safetensors") as file:
            file.write(save_tensors({"x": x}) if setup is None else model_bytes(x, setup))

    def _write(self, name: str, text: str) -> None:
        with replacing(self.path / name) as file:
            file.write(text.encode())


def _lasting(text: str) -> list[str]:
    """The settings that make a run what it is."""
    passing = ("rounds =", "tol =", "folder =", "name =", "baseline =", "#")
    return [line for line in text.splitlines() if line.strip() and not line.startswith(passing)]


def title(config: RunConfig, prepared: Prepared) -> str:
    """The run in a few words."""
    by = f" by {prepared.word}" if "file" in config.data else ""
    return f"{config.name}: {len(prepared.names)} {'clients' if by else _plural(prepared.word)}{by}"


def _plural(word: str) -> str:
    return f"{word}s"
