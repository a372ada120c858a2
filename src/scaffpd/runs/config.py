"""`config.toml`: everything that a run depends on, complete, so that the run can be repeated from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from scaffpd.algorithms import Fair
from scaffpd.deploy.protocol.setup import FORMATS
from scaffpd.errors import InputError, unknown
from scaffpd.models.losses import LOSSES
from scaffpd.objectives import Objective
from scaffpd.privacy.defaults import LOCAL_STEPS
from scaffpd.runs.data_table import read_data
from scaffpd.runs.privacy import Privacy, settle
from scaffpd.settings.objects import algorithm_kind, algorithm_of, kind_of
from scaffpd.settings.section import Section

TABLES = ("data", "model", "objective", "algorithm", "training", "privacy", "path")
POINTS = 9
OTHERS = {"silos": "a federation.toml; `scaffpd deploy` takes it", "limits": "a silo.toml; `scaffpd silo` takes it"}
OBJECTIVE = {"kind": "ChiSquare", "rho": 0.1}


@dataclass(frozen=True)
class Training:
    """How long, how exactly and where.

    Attributes:
        rounds: the most rounds; 30 where they are left out with [privacy].
        tol: the certified gap to stop at; 0 to make all rounds; left out, 1e-6 where something can be certified.
        seed: of all randomness.
        device: such as "cpu" or "cuda".
        numbers: "float32" or "float64"; empty leaves it to the model.
        baseline: whether the average model is trained as well, to compare with; with [privacy] only where asked for.
    """

    rounds: int = 1000
    tol: float | None = None
    seed: int = 0
    device: str = "cpu"
    numbers: str = ""
    baseline: bool = True


@dataclass(frozen=True)
class RunConfig:
    """A run, described.

    Attributes:
        place: the folder that relative paths start from.
        name: of the run.
        folder: where the run is kept.
        data: what [data] has, checked.
        model: what [model] has, checked.
        algorithm: what is run, with its objective.
        training: how long, how exactly and where.
        values: [objective] and [algorithm] as they were written.
        points: of a fairness path, between the average and the worst case.
        privacy: what [privacy] has, checked; `None` where there is none.
    """

    place: Path
    name: str
    folder: Path | None
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    algorithm: Any
    training: Training
    values: Mapping[str, Any] = field(repr=False)
    points: int = POINTS
    privacy: Privacy | None = None

    @classmethod
    def read(cls, path: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> RunConfig:
        """Read a settings file; `changes` (by table) take the place of what it says."""
        file = path.absolute()
        return cls._of(Section.read(file, ("name", "folder", *TABLES), OTHERS), changes or {})

    @classmethod
    def of(cls, values: Mapping[str, Any], label: str) -> RunConfig:
        """From what a command line says; `label` is what messages call it."""
        return cls._of(Section(Path.cwd() / label, dict(values), ("name", "folder", *TABLES)), {})

    @classmethod
    def _of(cls, top: Section, changes: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        for table, new in changes.items():
            old = top.section(table, top.values.get(table, {}) or ()).values
            top.values[table] = dict(new) if "kind" in new else {**old, **new}  # another kind has other arguments
        data, privacy = read_data(top), Privacy.read(top)
        settle(top)
        chosen = top.section("algorithm", top.values.get("algorithm", {}) or ()).values.get("kind", "Fair")
        kind = algorithm_kind(chosen, top.file.parent, f"algorithm.kind in {top.file.name!r},")
        if "objective" not in top and isinstance(kind, type) and kind.needs_objective():
            top.values["objective"] = dict(OBJECTIVE)
        algorithm = algorithm_of(top)
        values = {name: top.values[name] for name in ("objective", "algorithm") if name in top}
        folder = top.maybe("folder")
        place = top.file.parent
        return cls(
            place, top.text("name", _name(data, top)), None if folder is None else place / Path(folder).expanduser(),
            data, _model(top), algorithm, _training(top), values,
            top.section("path", ("points",)).whole("points", POINTS, 1), privacy,
        )  # fmt: skip

    @property
    def objective(self) -> Objective | None:
        """The objective, of algorithms that are given one."""
        return getattr(self.algorithm, "objective", None)

    def algorithm_for(self, objective: Objective) -> Any:
        """The same algorithm with another objective; the one of our choice where it is given none."""
        if self.objective is not None:
            return replace(self.algorithm, objective=objective)
        return Fair(objective) if self.privacy is None else Fair(objective, LOCAL_STEPS)

    def complete(self, folder: Path) -> dict[str, Any]:
        """All settings, for a `config.toml` in that folder: what was left out has its default."""
        data = dict(self.data)
        if "file" in data:
            data["file"] = _relative(self.place / data["file"], folder)
        if ("entry" in data or "network" in self.model) and self.place.resolve() != folder.resolve():
            data["beside"] = _relative(self.place / data.get("beside", "."), folder)
        training = {item.name: getattr(self.training, item.name) for item in fields(Training)}
        training["numbers"] = self.training.numbers or None
        return {
            "name": self.name, "folder": ".", "data": data, "model": dict(self.model),
            "objective": dict(self.values.get("objective", {})) or None,
            "algorithm": {"kind": kind_of(self.algorithm), **self.values.get("algorithm", {})},
            "training": training, "privacy": None if self.privacy is None else self.privacy.table(),
            "path": {"points": self.points},
        }  # fmt: skip


def _model(top: Section) -> dict[str, Any]:
    section = top.section("model", ("loss", "l2", "intercept", "network"))
    found: dict[str, Any] = {}
    if "network" in section:
        found["network"] = section.text("network", needs='a function such as "networks:small"')
        if "intercept" in section:
            raise InputError(f"{top.file.name!r} has model.intercept, which a network has not.")
    loss = section.maybe("loss")
    if loss is not None and loss not in LOSSES:
        raise unknown(f"model.loss in {top.file.name!r},", loss, LOSSES)
    found |= {"loss": loss} if loss else {}
    found["l2"] = section.number("l2", 0.0 if "network" in found else 1e-3, "a number >= 0", 0, float("inf"))
    return found if "network" in found else found | {"intercept": section.boolean("intercept", True)}


def _training(top: Section) -> Training:
    section = top.section("training", [item.name for item in fields(Training)])
    numbers = section.maybe("numbers")
    if numbers is not None and numbers not in FORMATS:
        raise unknown(f"training.numbers in {top.file.name!r},", numbers, FORMATS)
    return Training(
        section.whole("rounds", Training.rounds, 1),
        section.number("tol", 0, "a number >= 0 (0: make all rounds)", 0, float("inf")) if "tol" in section else None,
        section.whole("seed", Training.seed),
        section.text("device", Training.device),
        numbers or "",
        section.boolean("baseline", Training.baseline),
    )


def _name(data: Mapping[str, Any], top: Section) -> str:
    if "file" in data:
        return Path(data["file"]).name.split(".")[0] or "run"
    return str(data.get("source") or top.file.stem)


def _relative(path: Path, folder: Path) -> str:
    """From the run's folder where both lie below here, so that they can move together; in full elsewhere."""
    here, place = Path.cwd().resolve(), path.resolve()
    if place.is_relative_to(here) and folder.resolve().is_relative_to(here):
        return Path(os.path.relpath(place, folder.resolve())).as_posix()
    return place.as_posix()
