"""`config.toml`: the complete settings of a run, from which it can be repeated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import tomli_w
from pydantic import Discriminator, Field, Tag

import scaffpd.fields as key
from scaffpd.algorithms import Algorithm, Fair
from scaffpd.data.tabular.settings import TableSettings
from scaffpd.errors import InputError
from scaffpd.fields import Json, SettingsTable, read_toml, validated
from scaffpd.objectives import Objective
from scaffpd.privacy import LOCAL_STEPS, RADIUS, ROUNDS
from scaffpd.settings.methods import algorithm_of, changed, class_of, kind_of, with_usual
from scaffpd.settings.tables import (
    ModelSettings,
    PathSettings,
    PrivacySettings,
    SourceSettings,
    TrainingSettings,
)

OTHERS = {
    "silos": "a federation.toml; `scaffpd deploy` takes it",
    "limits": "a silo.toml; `scaffpd silo` takes it",
}
OBJECTIVE = "ChiSquare"
KINDS = {"file": "Table", "source": "Source"}  # keys that tell kinds of data


def _kind(given: object) -> str | None:
    """Tell what kind of data a table describes; `None` unless exactly one key says so."""
    keys = given.keys() if isinstance(given, dict) else getattr(type(given), "model_fields", {})
    named = KINDS.keys() & set(keys)
    return KINDS[named.pop()] if len(named) == 1 else None


Data = Annotated[
    Annotated[TableSettings, Tag("Table")] | Annotated[SourceSettings, Tag("Source")],
    Discriminator(_kind),
]


class RunConfig(SettingsTable):
    """A `config.toml`, complete. Relative paths start from its folder, `place`."""

    name: key.Text = ""
    folder: key.FileName | None = None  # of the run
    data: Data
    model: ModelSettings = ModelSettings()
    objective: Json | None = None
    algorithm: Json = Field(default_factory=dict)
    training: TrainingSettings = TrainingSettings()
    privacy: PrivacySettings | None = None
    path: PathSettings = PathSettings()
    _place: Path
    _method: Algorithm

    @classmethod
    def read(
        cls,
        path: Path,
        changes: Mapping[str, Mapping[str, object]] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> RunConfig:
        """Read a settings file; `changes` (by table) override it."""
        values = read_toml(path.absolute(), OTHERS)
        for table, new in (changes or {}).items():
            old = values.get(table, {})
            if isinstance(old, dict):
                # an objective or algorithm of another kind has other arguments
                other = new.get("kind", old.get("kind")) != old.get("kind")
                values[table] = dict(new) if other else {**old, **new}
        return cls.of(values, path.absolute(), options)

    @classmethod
    def of(
        cls,
        values: Mapping[str, object],
        label: str | Path,
        options: Mapping[str, str] | None = None,
    ) -> RunConfig:
        """Check settings, and complete those whose defaults depend on others.

        Args:
            values: by table.
            label: names the settings in messages; relative paths start from its folder.
            options: keys that were given on the command line, and their options.
        """
        file = Path.cwd() / label
        data = values.get("data", {})
        misspelt = values.keys() - cls.model_fields.keys()
        if isinstance(data, dict) and not misspelt and _kind(data) is None:
            raise InputError(
                "data-source-unclear", f"{file.name!r} needs either file or source in [data]."
            )
        found = validated(cls, values, file, options)
        algorithm = found.algorithm
        training = found.training
        privacy = found.privacy
        if privacy is not None:  # every round and every local step costs privacy
            if "rounds" not in training.model_fields_set:
                training = training.model_copy(update={"rounds": ROUNDS})
            privacy = privacy.model_copy(update={"radius": privacy.radius or RADIUS})
            if algorithm.get("kind", "Fair") == "Fair":
                algorithm = {"local_steps": LOCAL_STEPS, **algorithm}
        asked = (options or {}).get("algorithm.kind", f"algorithm.kind in {file.name!r},")
        find = partial(class_of, folder=file.parent)  # this user's own classes, too
        chosen = find(Algorithm, algorithm.get("kind", "Fair"), asked)
        objective = found.objective
        if objective is None and chosen.needs_objective():
            objective = {"kind": OBJECTIVE}
        complete = with_usual(objective, file, find)
        changes = {"algorithm": algorithm, "training": training, "privacy": privacy}
        changes |= {"name": found.name or found.data.name, "objective": complete}
        made = found.model_copy(update=changes)
        made._place = file.parent
        made._method = algorithm_of(algorithm, complete, file, find)
        return made

    @property
    def place(self) -> Path:
        return self._place

    @property
    def table(self) -> TableSettings | None:
        return self.data if isinstance(self.data, TableSettings) else None

    @property
    def method(self) -> Algorithm:
        return self._method

    @property
    def goal(self) -> Objective | None:
        return getattr(self._method, "objective", None)

    def method_for(self, objective: Objective) -> Algorithm:
        """Return the algorithm with another objective; `Fair` if it takes none."""
        if self.goal is not None:
            return changed(self._method, objective=objective)
        return Fair(objective) if self.privacy is None else Fair(objective, LOCAL_STEPS)

    def counting(self, sizes: Sequence[int]) -> RunConfig:
        """Return the same run whose objective counts clients by their sizes, if that is asked."""
        if self.training.count_clients == "alike" or self.goal is None:
            return self
        if "prior" not in self.goal.arguments():
            raise InputError(
                "objective-without-prior",
                f"{type(self.goal).__name__} does not weight clients: leave out --count-clients.",
            )
        made = self.model_copy()
        made._method = changed(self._method, objective=self.goal.with_arguments(prior=sizes))
        return made

    def with_tol(self, tol: float) -> RunConfig:
        return self.model_copy(update={"training": self.training.model_copy(update={"tol": tol})})

    def toml(self, folder: Path, heading: str = "") -> str:
        """Return all settings, defaults included, as a `config.toml` in that folder."""
        values = self.model_dump(mode="json", exclude_none=True)
        values["folder"] = "."
        empty: tuple[object, ...] = ([], {})  # as if left out
        for part in ("data", "model"):
            values[part] = {name: one for name, one in values[part].items() if one not in empty}
        values["algorithm"] = {"kind": kind_of(self.method), **self.algorithm}
        if self.table is not None:
            files = [_relative(file, folder) for file in self.table.file]
            values["data"]["file"] = files if files[1:] else files[0]
            if isinstance(self.table.test, Path):
                values["data"]["test"] = _relative(self.table.test, folder)
        return f"# {heading}\n" * bool(heading) + tomli_w.dumps(values)


def _relative(path: Path, folder: Path) -> str:
    """Write a path from the run's folder where both lie below the working folder, so that they can
    move together; else in full.
    """
    here = Path.cwd().resolve()
    place = path.resolve()
    if place.is_relative_to(here) and folder.resolve().is_relative_to(here):
        return Path(os.path.relpath(place, folder.resolve())).as_posix()
    return place.as_posix()
