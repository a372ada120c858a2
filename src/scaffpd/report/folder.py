"""The folder of a run.

config.toml           the settings, complete and re-runnable
run.json              the record (see `report.record`): what was trained, how it ended, all tables
model.safetensors     the model to use: the one recommended
NAME.safetensors      every model that was compared: constant, alone, average, fair, personal. One
                      of clients' own has the shared one first; each is its client's business
noise.secret          of a private run: what noise is drawn from, readable by its owner alone
checkpoint/           one file for every model
report.html           the page
*.csv                 tables of the record, for other programs
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as save_tensors

from scaffpd.errors import InputError
from scaffpd.files import lock_folder, make_folder, write_file
from scaffpd.numbers import several
from scaffpd.pipeline.models import Contest, Trained, main_model
from scaffpd.pipeline.prepared import Prepared
from scaffpd.pipeline.run import Record
from scaffpd.report import record
from scaffpd.report.record import RunRecord, TableReading
from scaffpd.report.recording import exports
from scaffpd.settings.model_file import Setup, model_bytes
from scaffpd.settings.run import RunConfig
from scaffpd.study.gains import Joining
from scaffpd.study.verdict import AVERAGE, FAIR, MODELS
from scaffpd.training.history import Checkpoint

Kind = Literal["train", "path"]
MAIN = "model.safetensors"
SECRET = "noise.secret"
OTHERS = tuple(f"{name}.safetensors" for name in MODELS)
TABLES = (
    "rounds.csv",
    "clients.csv",
    "joining.csv",
    "newcomers.csv",
    "scores.csv",
    "coefficients.csv",
    "effects.csv",
)
RESULTS = (record.NAME, MAIN, *OTHERS, *TABLES)
FILES = ("config.toml", "report.html", SECRET, *RESULTS)
# settings that may change when a run goes on
PASSING = ("rounds", "tol", "splits")
MARK = re.compile(r"# scaffpd (\w+) ")


class RunFolder:
    """The folder of one run of `train` or `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, kind: Kind, config: RunConfig, fresh: bool) -> None:
        """Refuse a file, somebody else's folder, that of another command, or of another run."""
        place = repr(str(self.path))
        other = self.kind()
        if self.path.exists() and not self.path.is_dir():
            raise InputError("folder-is-file", f"Cannot write to the folder {place}: it is a file.")
        if other is None and any((self.path / name).exists() for name in FILES):
            raise InputError(
                "folder-of-others",
                f"The folder {place} holds files that no run has written: choose another.",
            )
        if other not in (None, kind):
            raise InputError(
                "folder-of-another-command",
                f"The folder {place} belongs to `scaffpd {other}`: choose another with --out.",
            )
        if not fresh and not self.fits(kind, config):
            raise InputError(
                "folder-of-another-run",
                f"{place} holds another run: choose another folder with --out, "
                "or start over with --fresh.",
            )

    def kind(self) -> str | None:
        """Return which command has written the folder; `None` where none has."""
        found = MARK.match(self._text())
        return found[1] if found else None

    def _text(self) -> str:
        try:
            return (self.path / "config.toml").read_text(encoding="utf-8")
        except (OSError, ValueError):
            return ""

    @contextmanager
    def opened(self, kind: Kind, config: RunConfig, fresh: bool) -> Iterator[None]:
        self.check(kind, config, fresh)
        make_folder(self.path)
        make_folder(self.path / "checkpoint")
        with lock_folder(self.path, f"Another run is at work in {str(self.path)!r}."):
            if fresh:
                old = [self.path / name for name in FILES]
                for file in [*old, *(self.path / "checkpoint").glob("*.npz")]:
                    file.unlink(missing_ok=True)
            write_file(self.path / "config.toml", self.settings(kind, config))
            try:
                yield
            except KeyboardInterrupt:
                raise self.interruption() from None

    def interruption(self) -> KeyboardInterrupt:
        """Return what to raise where Ctrl-C has ended a run: with what is saved, if anything is."""
        if not any((self.path / "checkpoint").glob("*.npz")):
            return KeyboardInterrupt()
        return KeyboardInterrupt(
            f"what was trained is saved in {self.path}; the same command goes on"
        )

    def fits(self, kind: Kind, config: RunConfig) -> bool:
        """Return whether it is empty or holds the same run, made for more or fewer rounds."""
        text = self._text()
        same = _lasting(text) == _lasting(self.settings(kind, config))
        return not text or (self.kind() == kind and same)

    def settings(self, kind: Kind, config: RunConfig) -> str:
        return config.toml(self.path, self.command(kind))

    def command(self, kind: Kind) -> str:
        return f"scaffpd {kind} {shlex.quote((self.path / 'config.toml').as_posix())}"

    def checkpoint(self, contest: Contest) -> Checkpoint:
        file = "".join(c if c.isalnum() else "-" for c in contest.name)
        return Checkpoint(self.path / "checkpoint" / f"{file}.npz")

    def write(self, run: RunRecord, found: Record) -> None:
        assert found.own is not None
        prepared = found.own.rows
        models = found.models
        joining = found.own.joining
        files: dict[str, str | bytes] = dict(exports(run))
        files[MAIN] = _trained(main_model(models), prepared)
        files |= {
            f"{one.name}.safetensors": _trained(one, prepared)
            for one in models
            if one.name in MODELS and len(models) > 1
        }
        if isinstance(joining, Joining):
            for name, own in joining.parameters.items():
                shared = name in (AVERAGE, FAIR)
                x, owners = (own[0], ()) if shared else (own, prepared.names)
                files.setdefault(f"{name}.safetensors", _model(x, prepared, owners))
            files[MAIN] = files[f"{joining.recommendation}.safetensors"]
        write_files(self.path, files)
        run.write(self.path)
        # what an earlier run with other settings has left must not be taken for this one's
        for name in {*RESULTS} - {record.NAME, *files}:
            (self.path / name).unlink(missing_ok=True)


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, text in files.items():
        write_file(folder / name, text)


def _trained(one: Trained, prepared: Prepared) -> bytes:
    """Encode a model: the shared one, and below it the clients' own where they have some."""
    found = one.result
    if found.personal is None:
        return _model(found.x, prepared)
    x = np.stack([found.x, *found.personal])
    return _model(x, prepared, prepared.names)


def _model(x: NDArray[np.float64], prepared: Prepared, owners: Sequence[str] = ()) -> bytes:
    x = np.ascontiguousarray(prepared.in_units(x))
    setup = setup_of(prepared)
    return save_tensors({"x": x}) if setup is None else model_bytes(x, setup, owners)


def setup_of(prepared: Prepared) -> Setup | None:
    """Describe what the parameters expect of a row; `None` where the rows are no table."""
    if prepared.schema is None:
        return None
    linear = prepared.model
    model = {
        "kind": "linear",
        "task": prepared.task.name,
        "loss": linear.loss,
        "intercept": linear.intercept,
    }
    if linear.periods:
        model["periods"] = list(linear.periods)
    if linear.classes is not None:
        model["classes"] = linear.classes
    if prepared.exposure is not None:
        model["exposure"] = list(prepared.exposure)
    return Setup(model, *prepared.encoding)


def _lasting(text: str) -> dict[str, object] | None:
    """Return the settings that make a run what it is; `None` where they cannot be read."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    lasting: dict[str, object] = {
        key: value for key, value in values.items() if key not in ("name", "folder")
    }
    # noise is made for so many rounds and models
    passing = ("tol",) if "privacy" in values else PASSING
    data = values.get("data", {})
    lasting["data"] = {key: value for key, value in data.items() if key != "groups"}
    training = values.get("training", {})
    lasting["training"] = {key: value for key, value in training.items() if key not in passing}
    return lasting


def title(config: RunConfig, prepared: Prepared) -> str:
    return f"{config.name}: {several(len(prepared.names), prepared.word)}"


def reading(config: RunConfig) -> TableReading | None:
    table = config.table
    if table is None:
        return None
    return TableReading(
        client=table.client,
        target="" if table.time else table.target,
        decimal=table.decimal,
        missing=list(table.missing),
    )
