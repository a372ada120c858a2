"""The folder of a run: settings, tables, the model, and everything that a report is made from.

config.toml         complete, re-runnable
environment.json    versions and machine
summary.json        what was trained and how it ended
rounds.csv          a row for every model and round
clients.csv         a row for every model and client
scores.csv          a row for every model and client or group: accuracy, AUC, recall, calibration, … of held-out rows
reliability.csv     a row for every model, client and bin of probabilities: which share came true
coefficients.csv    a row for every encoded column: what one deviation of it adds, under every model
held_out.npz        losses of single held-out rows, by which runs are compared
calibration.json    slope and intercept of every client's outputs, where it was asked for
joining.csv         a row for every client and model: alone, average, fair, personal, on held-out rows
kappa_path.csv      a row for every κ, from one model for all to everybody alone: losses on folds of training rows
coalition.csv       a row for every pair of clients: what one's leaving does to the other's held-out loss
partition.csv       which client has how many rows of which label
path.csv            a row for every point of a fairness path
model.safetensors   the model that the run is about
average.safetensors the average model, where it was trained to compare with
personal.safetensors  a shared model and what every client makes of it; hand it to nobody but the clients
fills.json          what stands in for missing values, client by client
noise.secret        of a private run: what noise is drawn from, readable by its owner alone
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as save_tensors

import scaffpd
from scaffpd.data.tabular.agree import CLASSIFICATION
from scaffpd.errors import InputError
from scaffpd.files import csv_text, lock_folder, make_folder, write_file
from scaffpd.machine import environment
from scaffpd.run.prepare import Prepared, described
from scaffpd.run.scores import HeldOutScores
from scaffpd.run.settings.model_file import model_bytes
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.train import SECRET, SPREAD, Trained, main_model
from scaffpd.study.coalitions import Coalition
from scaffpd.study.gains import Joining
from scaffpd.training.history import SCALARS
from scaffpd.training.metrics import client_row

FORMAT = 1
RESULTS = (  # of `write`
    *(
        "summary.json",
        "rounds.csv",
        "clients.csv",
        "joining.csv",
        "kappa_path.csv",
        "coalition.csv",
        "partition.csv",
    ),
    *(
        "path.csv",
        "fills.json",
        "model.safetensors",
        "average.safetensors",
        "personal.safetensors",
        "scores.csv",
    ),
    *("reliability.csv", "coefficients.csv", "held_out.npz", "calibration.json"),
)
FILES = ("config.toml", "environment.json", "report.html", SECRET, *RESULTS)
# settings that may change when a run goes on
PASSING = ("rounds", "tol", "baseline", "splits", "coalition", "groups", "recalibrate")
MARK = re.compile(r"# scaffpd (\w+) ")
COSTS = ("exchanges", "bytes_up", "bytes_down", "seconds")
Rows = list[dict[str, Any]]


class RunFolder:
    """The folder of one run of `train` or `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, kind: str, config: RunConfig, fresh: bool) -> None:
        """Refuse a folder that is not `usable`, or that of another run."""
        self.usable(kind)
        if not fresh and not self.fits(kind, config):
            place = repr(str(self.path))
            raise InputError(
                "holds-another-run",
                f"{place} holds another run: choose another one with --out, or start anew with --fresh.",
            )

    def usable(self, kind: str) -> None:
        """Refuse, before any work, a folder that is a file, somebody else's, or that of another command."""
        place = str(self.path)
        other = self.kind()
        if self.path.exists() and not self.path.is_dir():
            raise InputError(
                "write-folder-file", f"Cannot write to the folder {place!r}: it is a file."
            )
        if other is None and any((self.path / name).exists() for name in FILES):
            raise InputError(
                "folder-holds-files",
                f"The folder {place!r} holds files that no run of this kind has written: choose another.",
            )
        if other not in (None, kind):
            raise InputError(
                "folder-scaffpd-choose",
                f"The folder {place!r} is that of `scaffpd {other}`: choose another one with --out.",
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
    def opened(self, kind: str, config: RunConfig, fresh: bool) -> Iterator[None]:
        """Make the folder, lock it, and write the settings."""
        self.check(kind, config, fresh)
        make_folder(self.path)
        make_folder(self.path / "checkpoint")
        with lock_folder(self.path, f"Another run is at work in {str(self.path)!r}."):
            if fresh:
                for file in [
                    *(self.path / name for name in FILES),
                    *(self.path / "checkpoint").glob("*.npz"),
                ]:
                    file.unlink(missing_ok=True)
            write_files(
                self.path, {"config.toml": self._settings(kind, config)} | environment_file()
            )
            yield

    def fits(self, kind: str, config: RunConfig) -> bool:
        """Return whether the folder is empty or holds the same run, made for more or fewer rounds."""
        text = self._text()
        return not text or (
            self.kind() == kind and _lasting(text) == _lasting(self._settings(kind, config))
        )

    def _settings(self, kind: str, config: RunConfig) -> str:
        return config.toml(self.path, self._command(kind))

    def _command(self, kind: str) -> str:
        return f"scaffpd {kind} {shlex.quote((self.path / 'config.toml').as_posix())}"

    def write(
        self,
        kind: str,
        config: RunConfig,
        prepared: Prepared,
        models: Sequence[Trained],
        path: Mapping[str, Any] | None = None,
        joining: Joining | str = "",
        coalition: Coalition | None = None,
        scored: HeldOutScores | None = None,
    ) -> None:
        """Write everything but settings and checkpoints; `joining` is what that brings, or why it is not known."""
        named = title(config, prepared), self._command(kind)
        files: dict[str, Any] = dict(
            tables(kind, *named, prepared, models, path, joining=joining, coalition=coalition)
        )
        if scored is not None:
            rows = {
                "scores": scored.scores,
                "reliability": scored.bins,
                "coefficients": scored.coefficients,
            }
            files |= {f"{name}.csv": csv_text(own) for name, own in rows.items() if own}
            if scored.calibrations:
                files["calibration.json"] = json.dumps(scored.calibrations) + "\n"
            files["held_out.npz"] = scored.rows
        if prepared.fills:
            files["fills.json"] = json.dumps(prepared.fills, ensure_ascii=False) + "\n"
        main = main_model(models)
        for one in models:
            if one is main or one.role == "before":
                files["model.safetensors" if one is main else "average.safetensors"] = _model(
                    one, prepared
                )
        setup = prepared.setup(main.algorithm)
        if isinstance(joining, Joining) and joining.own is not None and setup is not None:
            own = np.stack([prepared.in_units(x) for x in joining.own])
            files["personal.safetensors"] = model_bytes(own, setup, prepared.names)
        write_files(self.path, files)
        for name in set(RESULTS) - files.keys():  # what an earlier run with other settings has left
            (self.path / name).unlink(missing_ok=True)


def _model(one: Trained, prepared: Prepared) -> bytes:
    x = np.ascontiguousarray(prepared.in_units(one.result.x))
    setup = prepared.setup(one.algorithm)
    return save_tensors({"x": x}, prepared.metadata()) if setup is None else model_bytes(x, setup)


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files by name, each all of it or nothing."""
    for name, text in files.items():
        write_file(folder / name, text)


def environment_file() -> dict[str, str]:
    """Return versions and machine as text, by file name."""
    return {"environment.json": json.dumps(environment(), indent=1) + "\n"}


def _lasting(text: str) -> dict[str, Any] | None:
    """Return the settings that make a run what it is; `None` where they cannot be read."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
    kept = {key: value for key, value in values.items() if key not in ("name", "folder")}
    passing = (
        ("tol",) if "privacy" in values else PASSING
    )  # noise is made for so many rounds and models
    return kept | {
        "training": {key: v for key, v in values.get("training", {}).items() if key not in passing}
    }


def title(config: RunConfig, prepared: Prepared) -> str:
    """Name the run in a few words."""
    by = f" by {prepared.word}" if config.data.file else ""
    return f"{config.name}: {len(prepared.names)} {'client' if by else prepared.word}s{by}"


def tables(
    kind: str,
    title: str,
    command: str,
    prepared: Prepared,
    models: Sequence[Trained],
    path: Mapping[str, Any] | None = None,
    verdict: Sequence[str] | None = None,
    joining: Joining | str = "",
    coalition: Coalition | None = None,
) -> dict[str, str]:
    """Make the summary and the tables of a run, by file name."""
    told = {} if verdict is None else {"sentence": verdict[0], "details": " ".join(verdict[1:])}
    caution = joining if isinstance(joining, str) else joining.caution
    summary = {
        "format": FORMAT,
        "kind": kind,
        "title": title,
        "command": command,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": scaffpd.__version__,
        "task": prepared.task,
        "measure": prepared.measure,
        "split": prepared.split,
        "labels": list(prepared.labels),
        "clients_word": prepared.word,
        "model": described(prepared.model),
        "data": prepared.about,
        "models": [_ended(one) for one in models],
        "privacy": _privacy(models),
        "remarks": list(prepared.remarks),
        "cautions": [caution] if caution else [],
        "verdict": None if verdict is None else list(verdict),
        "path": path,
        "joining": joining.summary() | told if isinstance(joining, Joining) else None,
        "coalition": None if coalition is None else coalition.summary(),
    }
    found = {
        "summary.json": json.dumps(summary, indent=1, ensure_ascii=False) + "\n",
        "rounds.csv": csv_text(_round_rows(models, f"{prepared.split}_{prepared.measure}")),
        "clients.csv": csv_text(client_rows(models, prepared.measure)),
        "partition.csv": csv_text(_partition_rows(prepared)),
    }
    if isinstance(joining, Joining):
        found["joining.csv"] = csv_text(joining.table())
        if joining.kappa_path:
            found["kappa_path.csv"] = csv_text(joining.kappa_path)
    if coalition is not None:
        found["coalition.csv"] = csv_text(coalition.table())
    return found if path is None else found | {"path.csv": csv_text(_point_rows(models, prepared))}


def _ended(one: Trained) -> dict[str, Any]:
    """Describe how a model was trained and how that ended."""
    result = one.result
    return {
        "name": one.name,
        "role": one.role,
        "objective": None if one.objective is None else repr(one.objective),
        "algorithm": "chosen by itself" if one.algorithm == "Fair" else one.algorithm,
        "status": str(result.status),
        "message": result.message,
        "certificate": float(result.certificate) if np.isfinite(result.certificate) else None,
        "rounds": result.rounds,
        **{name: result.history[name][-1].item() for name in COSTS},
        "strength": one.strength,
    }


def _privacy(models: Sequence[Trained]) -> dict[str, Any] | None:
    """State what all models together have cost the clients' records; `None` where nothing was private."""
    private = models[-1].private
    spent = models[-1].result.privacy
    if private is None or spent is None:
        return None
    return {
        "epsilon": spent.worst,
        "delta": spent.delta,
        "budget": private.budget,
        "clients": dict(zip(spent.names, spent.epsilon.tolist(), strict=True)),
        "clip": private.clip,
        "loss_clip": private.loss_clip,
        "radius": private.radius,
        "smoothness": private.smoothness,
        "noise": private.noise,
        "loss_noise": private.loss_noise,
        "seeded": isinstance(private.secret, int),
        "models": [one.name for one in models],
    }


def _round_rows(models: Sequence[Trained], score: str) -> Rows:
    rows = []
    for one in models:
        for row in one.result.history.rows():
            found = one.scores.get(row["round"], {})
            scored = {f"{score}_{name}": found.get(name) for name in SPREAD}
            rows.append(
                {"model": one.name, **{name: row[name] for name in SCALARS}, **scored, **row}
            )
    return rows


def client_rows(models: Sequence[Trained], measure: str) -> Rows:
    """Make a row for every model and client."""
    rows = []
    for one in models:
        spent = one.result.privacy
        scores = {"train": one.train} | ({} if one.test is None else {"test": one.test})
        for i, name in enumerate(one.result.names):
            row = client_row(one.name, name, one.result.weights[i], scores, i, measure)
            row |= {
                "test_rows": row["test_rows"] or 0,
                "change_clear": "" if one.clear is None else one.clear[i],
            }
            rows.append(row if spent is None else row | {"epsilon": float(spent.epsilon[i])})
    return rows


def _partition_rows(prepared: Prepared) -> Rows:
    rows = []
    for i, name in enumerate(prepared.names):
        y = prepared.train[i][1]
        held = prepared.test[i][1] if prepared.test else np.empty(0)
        if prepared.task != CLASSIFICATION:
            rows.append({"client": name, "label": "", "train_rows": len(y), "test_rows": len(held)})
            continue
        for k, label in enumerate(prepared.labels):
            counts = [int((np.asarray(part) == k).sum()) for part in (y, held)]
            rows.append(
                {"client": name, "label": label, "train_rows": counts[0], "test_rows": counts[1]}
            )
    return rows


def _point_rows(models: Sequence[Trained], prepared: Prepared) -> Rows:
    rows = []
    for one in models:
        ended = _ended(one)
        found = one.spread(prepared)
        cells = {name: ended[name] for name in ("rounds", *COSTS, "certificate")}
        score = f"{prepared.split}_{prepared.measure}"
        scored = {f"{score}_{name}": getattr(found, name) for name in (*SPREAD, "best_20")}
        rows.append({"model": one.name, "strength": one.strength, **cells, **scored})
    return rows
