"""A run is a folder: settings, tables, the model, and everything that a report is made from.

config.toml         complete, re-runnable
environment.json    versions and machine
summary.json        what was trained and how it ended
rounds.csv          a row for every model and round
clients.csv         a row for every model and client
partition.csv       which client has how many rows of which label
path.csv            a row for every point of a fairness path
model.safetensors   the model that is kept
fills.json          what stands in for missing values, client by client
noise.secret        of a private run: what noise is drawn from, for its owner alone
checkpoint/         one file for every model
report.html         all of it to look at
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as save_tensors

from scaffpd.checkpoint import atomic_write
from scaffpd.config.run import RunConfig, toml_text
from scaffpd.deploy.deployed_run import model_bytes
from scaffpd.errors import InputError
from scaffpd.runs import tables
from scaffpd.runs.prepare import Prepared
from scaffpd.runs.train import SECRET as SECRET
from scaffpd.runs.train import Trained, main_model
from scaffpd.system import environment, lock_folder

FILES = (
    *("config.toml", "environment.json", "summary.json", "rounds.csv", "clients.csv", "partition.csv", "path.csv"),
    *("fills.json", "model.safetensors", "report.html", SECRET),
)
PASSING = ("rounds", "tol", "baseline")  # how long a run goes on does not make it another
MARK = re.compile(r"# scaffpd (\w+) ")


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, kind: str, config: RunConfig, fresh: bool) -> None:
        """Find out before the work that the folder is a file, somebody else's, or that of another run."""
        place, other = str(self.path), self.kind()
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"Cannot write to the folder {place!r}: it is a file.")
        if other is None and any((self.path / name).exists() for name in FILES):
            raise InputError(f"The folder {place!r} holds files that no run of this kind has written: choose another.")
        if other not in (None, kind):
            raise InputError(f"The folder {place!r} is that of `scaffpd {other}`: choose another one with --out.")
        if not fresh and not self.fits(kind, config):
            raise InputError(
                f"The folder {place!r} holds another run: choose another one with --out, or start anew there with "
                "--fresh."
            )

    def kind(self) -> str | None:
        """Which command has written the folder; `None` where none has."""
        found = MARK.match(self._text())
        return found[1] if found else None

    def _text(self) -> str:
        try:
            return (self.path / "config.toml").read_text(encoding="utf-8")
        except (OSError, ValueError):
            return ""

    @contextmanager
    def opened(self, kind: str, config: RunConfig, fresh: bool) -> Iterator[None]:
        """Make the folder, keep others out of it, and write down the settings."""
        self.check(kind, config, fresh)
        try:
            (self.path / "checkpoint").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"Cannot write to the folder {str(self.path)!r}: {error.strerror}.") from None
        with lock_folder(self.path, f"Another run is at work in {str(self.path)!r}."):
            if fresh:
                self._clear()
            self._write("config.toml", self._settings(kind, config))
            self._write("environment.json", json.dumps(environment(), indent=1) + "\n")
            yield

    def _clear(self) -> None:
        """Remove what a run has written, and nothing else."""
        for file in [*(self.path / name for name in FILES), *(self.path / "checkpoint").glob("*.npz")]:
            file.unlink(missing_ok=True)

    def fits(self, kind: str, config: RunConfig) -> bool:
        """Whether there is no other run here: how long one goes on does not make it another."""
        text = self._text()
        return not text or (self.kind() == kind and _lasting(text) == _lasting(self._settings(kind, config)))

    def _settings(self, kind: str, config: RunConfig) -> str:
        return toml_text(config.complete(self.path), self._command(kind))

    def _command(self, kind: str) -> str:
        return f"scaffpd {kind} {shlex.quote((self.path / 'config.toml').as_posix())}"

    def write(
        self, kind: str, config: RunConfig, prepared: Prepared, models: Sequence[Trained],
        path: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Everything but settings and checkpoints."""
        command = self._command(kind)
        self._write("summary.json", tables.summary(kind, title(config, prepared), command, prepared, models, path))
        self._write("rounds.csv", tables.csv_text(tables.rounds(models, prepared.measure)))
        self._write("clients.csv", tables.csv_text(tables.clients(models, prepared.measure)))
        self._write("partition.csv", tables.csv_text(tables.partition(prepared)))
        if path is not None:
            self._write("path.csv", tables.csv_text(tables.points(models, prepared)))
        self._write_model(prepared, main_model(models))

    def _write_model(self, prepared: Prepared, one: Trained) -> None:
        x = np.ascontiguousarray(prepared.in_units(one.result.x))
        setup = prepared.setup(one.algorithm)
        with atomic_write(self.path / "model.safetensors") as file:
            file.write(save_tensors({"x": x}, prepared.metadata()) if setup is None else model_bytes(x, setup))
        if prepared.fills:
            self._write("fills.json", json.dumps(prepared.fills, ensure_ascii=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        with atomic_write(self.path / name) as file:
            file.write(text.encode())


def _lasting(text: str) -> dict[str, Any] | None:
    """The settings that make a run what it is; `None` where they cannot be read."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    main_model = {key: value for key, value in values.items() if key not in ("name", "folder")}
    training = values.get("training", {})
    passing = ("tol",) if "privacy" in values else PASSING  # noise is made for so many rounds and models
    return main_model | {"training": {key: value for key, value in training.items() if key not in passing}}


def title(config: RunConfig, prepared: Prepared) -> str:
    """The run in a few words."""
    by = f" by {prepared.word}" if "file" in config.data else ""
    return f"{config.name}: {len(prepared.names)} {'client' if by else prepared.word}s{by}"
