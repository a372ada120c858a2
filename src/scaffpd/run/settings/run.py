"""`config.toml`: the complete settings of a run, from which it can be repeated."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w
from pydantic import Field, ValidationInfo, model_validator

from scaffpd.algorithms import Fair
from scaffpd.data.tabular.agree import EXPANSIONS, TASKS
from scaffpd.data.tabular.formats import SEPARATORS
from scaffpd.data.tabular.read import DECIMALS
from scaffpd.errors import InputError
from scaffpd.models.losses import LOSSES
from scaffpd.objectives import Objective
from scaffpd.privacy import LOCAL_STEPS, LOSS_SHARE, RADIUS, ROUNDS, Private
from scaffpd.run.settings import reading as key
from scaffpd.run.settings.reading import (
    SettingsTable,
    algorithm_kind,
    algorithm_of,
    kind_of,
    read_toml,
    validated,
)

OTHERS = {
    "silos": "a federation.toml; `scaffpd deploy` takes it",
    "limits": "a silo.toml; `scaffpd silo` takes it",
}
OBJECTIVE = "ChiSquare"
OF_TABLE = (
    *(
        "client",
        "target",
        "columns",
        "categories",
        "task",
        "standardise",
        "separator",
        "decimal",
        "missing",
    ),
    *("split_by", "dates", "test_file", "ranges", "features", "more_files"),
)
GOES_WITH = {  # which keys go with which source of data
    **dict.fromkeys(OF_TABLE, ("file",)),
    **dict.fromkeys(("clients", "alpha"), ("source",)),
    **dict.fromkeys(("test", "seed"), ("file", "source")),
}
Column = Annotated[key.Text, Field(description="the name of a column")]
Loss = Annotated[str, key.one_of(LOSSES)]
Tolerance = Annotated[key.NonNegative, Field(description="a number >= 0 (0: make all rounds)")]


class DataSettings(SettingsTable):
    """[data]: a table, a named data set, or the user's own function."""

    file: key.Text | None = None
    more_files: key.Texts | None = None  # tables with the same columns, appended to the first
    source: key.Text | None = None
    entry: key.Text | None = None
    client: Column | None = None
    target: Column | None = None
    columns: key.Texts | None = None
    categories: key.Texts | None = None
    task: Annotated[str, key.one_of(TASKS)] | None = None
    standardise: key.Switch = True
    features: Annotated[str, key.one_of(EXPANSIONS)] | None = None
    separator: Annotated[str, key.one_of(tuple(SEPARATORS))] | None = None
    decimal: Annotated[str, key.one_of(DECIMALS)] | None = None
    missing: key.Codes | None = None
    clients: Annotated[int, Field(ge=2, description="a whole number >= 2")] | None = None
    alpha: key.Positive | None = None
    split_by: Column | None = None
    dates: key.Switch = False
    test: key.HeldOut = 0.2
    test_file: key.Text | None = None
    seed: key.Whole = 0
    beside: key.Text | None = None
    # [least, largest] of numeric columns by name, "*" for all others; columns are then scaled by these alone
    ranges: dict[str, key.Range] | None = None

    @model_validator(mode="after")
    def _keys_go_together(self, info: ValidationInfo[Path]) -> Self:
        file = repr(info.context.name)
        chosen = self.model_fields_set & {"file", "source", "entry"}
        if len(chosen) != 1:
            raise InputError(
                "exactly-file-source",
                f"{file} needs exactly one of file, source and entry in [data].",
            )
        (kind,) = chosen
        for name, owners in GOES_WITH.items():
            if name in self.model_fields_set and kind not in owners:
                raise InputError(
                    "data-goes-data",
                    f"{file} has data.{name}, which goes with data.{' or data.'.join(owners)}, but not with {kind}.",
                )
        for name in ("client", "target"):
            if kind == "file" and getattr(self, name) is None:
                raise InputError(
                    "name-column-data",
                    f"{file} needs the name of a column for data.{name}, but it is missing.",
                )
        if self.test_file is not None and (self.model_fields_set & {"test", "split_by"}):
            raise InputError(
                "data-test-file",
                f"{file} has data.test_file, so data.test and data.split_by have nothing to split.",
            )
        return self

    @property
    def name(self) -> str:
        """Name of the file or data set; empty for a function."""
        return (Path(self.file).name.split(".")[0] or "run") if self.file else self.source or ""

    def values(self) -> dict[str, Any]:
        """Return all keys of this source of data."""
        kind = next(kind for kind in ("file", "source", "entry") if getattr(self, kind) is not None)
        other = {name for name, owners in GOES_WITH.items() if kind not in owners}
        return self.model_dump(exclude=other, exclude_none=True, mode="json")


class LinearSettings(SettingsTable):
    """Settings of a linear model."""

    loss: Loss | None = None
    l2: key.NonNegative = 1e-3
    intercept: key.Switch = True


class ModelSettings(LinearSettings):
    """[model] of a run: a linear model, or a network that a function returns."""

    network: (
        Annotated[key.Text, Field(description='a function such as "networks:small"')] | None
    ) = None
    strength: key.Positive | None = (
        None  # κ of personal models, to compare with a shared one; left out, by folds
    )

    @model_validator(mode="before")
    @classmethod
    def _network_has_no_regulariser(cls, given: Any) -> Any:
        """Give a network l2 = 0 where its table says nothing."""
        return {"l2": 0.0, **given} if isinstance(given, dict) and "network" in given else given

    @model_validator(mode="after")
    def _network_has_no_intercept(self, info: ValidationInfo[Path]) -> Self:
        for name in ("intercept", "strength") if self.network is not None else ():
            if name in self.model_fields_set:
                raise InputError(
                    "model-goes-linear",
                    f"{info.context.name!r} has model.{name}, which goes with a linear model only.",
                )
        return self

    @property
    def foreign(self) -> set[str]:
        """Keys that do not apply to this kind of model."""
        return {"intercept", "strength"} if self.network is not None else set()


class TrainingSettings(SettingsTable):
    """[training]: how long, how exactly and where."""

    rounds: key.Count = 1000  # the most rounds; 30 by default with [privacy]
    # the certified gap to stop at; 0 to make all rounds; left out, 1e-6 for methods with a certificate
    tol: Tolerance | None = None
    seed: key.Whole = 0  # of all randomness
    device: key.Text = "cpu"  # such as "cpu" or "cuda"
    numbers: key.Numbers | None = None  # "float32" or "float64"; left out, the model decides
    # whether to train the average model as well; by default not with [privacy]
    baseline: key.Switch = True
    # random splits for measuring each client's gain from joining; 0 for none; left out, 5 for small tables, else 1
    splits: key.Whole | None = None
    groups: key.Texts | None = None  # columns of a table whose groups are scored as well as clients


class PrivacyBudget(SettingsTable):
    """[privacy]: differential privacy of every training row against anyone who sees what clients send."""

    epsilon: key.Positive  # ε of the whole run, all its models together
    delta: key.Between = Private.delta  # δ
    clip: key.Positive = Private.clip  # C, the largest norm of a row's gradient
    loss_clip: key.Positive = Private.loss_clip  # B, the largest loss of a row
    # R, the longest row once columns are scaled; longer ones are shortened. Not for networks.
    radius: key.Positive | None = None
    smoothness: key.Positive | None = None  # a public L; left out, it follows from R
    loss_share: key.Between = LOSS_SHARE  # the share of the budget that losses get


class PrivacySettings(PrivacyBudget):
    """[privacy] of a run on one machine."""

    # seed of repeatable noise, for experiments; left out, a secret from the operating system
    seed: key.Whole | None = None

    def model(
        self,
        bare: Any,
        methods: Sequence[Any],
        rounds: int,
        secret: bytes | None = None,
    ) -> Private:
        """Return the model with the noise that spends ε on these methods, `rounds` rounds each."""
        if self.radius is None and self.smoothness is None:
            raise InputError(
                "smoothness-network-losses",
                "The smoothness of a network's losses is not known: give [privacy] a public smoothness.",
            )
        return Private.solved(
            bare,
            self.epsilon,
            list(methods),
            rounds,
            self.delta,
            self.loss_share,
            clip=self.clip,
            loss_clip=self.loss_clip,
            radius=self.radius,
            smoothness=self.smoothness,
            secret=secret if self.seed is None else self.seed,
        )


class PathSettings(SettingsTable):
    """[path]: the number of points of a fairness path from the average to the worst case."""

    points: key.Count = 9


class RunConfig(SettingsTable):
    """A `config.toml`, complete. Relative paths start from its folder, `place`."""

    name: key.Text = ""
    folder: key.FileName | None = None  # folder of the run
    data: DataSettings = Field(default_factory=dict, validate_default=True)
    model: ModelSettings = ModelSettings()
    objective: dict[str, Any] | None = None
    algorithm: dict[str, Any] = Field(default_factory=dict)
    training: TrainingSettings = TrainingSettings()
    privacy: PrivacySettings | None = None
    path: PathSettings = PathSettings()
    _place: Path
    _method: Any
    _left_out: set[str]

    @classmethod
    def read(cls, path: Path, changes: Mapping[str, Mapping[str, Any]] | None = None) -> RunConfig:
        """Read a settings file; `changes` (by table) override it."""
        values = read_toml(path.absolute(), OTHERS)
        for table, new in (changes or {}).items():
            old = values.get(table, {})
            if isinstance(old, dict):
                other = new.get("kind", old.get("kind")) != old.get(
                    "kind"
                )  # another kind has other arguments
                values[table] = dict(new) if other else {**old, **new}
        return cls.of(values, path.absolute())

    @classmethod
    def of(cls, values: Mapping[str, Any], label: str | Path) -> RunConfig:
        """Check settings; `label` names them in messages, and relative paths start from its folder."""
        file = Path.cwd() / label
        found = validated(cls, values, file)
        algorithm = found.algorithm
        objective = found.objective
        training = found.training
        privacy = found.privacy
        if privacy is not None:  # defaults with noise: fewer rounds, one local step, one model
            training = _usual(training, rounds=ROUNDS, baseline=False)
            privacy = _usual(privacy, radius=None if found.model.network else RADIUS)
            if algorithm.get("kind", "Fair") == "Fair":
                algorithm = {"local_steps": LOCAL_STEPS, **algorithm}
        chosen = algorithm_kind(
            algorithm.get("kind", "Fair"), file.parent, f"algorithm.kind in {file.name!r},"
        )
        if objective is None and isinstance(chosen, type) and chosen.needs_objective():
            objective = {"kind": OBJECTIVE}
        complete = key.with_usual(objective, file)
        left_out = {"strength"} if complete != objective else set[str]()
        objective = complete
        if found.model.network is None and "l2" not in found.model.model_fields_set:
            left_out.add("l2")
        if found.model.network is None and found.model.strength is None:
            left_out.add("kappa")
        changes = {
            "algorithm": algorithm,
            "objective": objective,
            "training": training,
            "privacy": privacy,
        }
        made = found.model_copy(
            update=changes | {"name": found.name or found.data.name or file.stem}
        )
        made._place, made._method, made._left_out = (
            file.parent,
            algorithm_of(algorithm, objective, file),
            left_out,
        )
        return made

    @property
    def place(self) -> Path:
        """Folder that relative paths start from."""
        return self._place

    @property
    def code(self) -> Path:
        """Folder of the user's own functions."""
        return self._place / (self.data.beside or ".")

    @property
    def method(self) -> Any:
        """Algorithm with its objective."""
        return self._method

    @property
    def goal(self) -> Objective | None:
        """Objective of the algorithm, or `None`."""
        return getattr(self._method, "objective", None)

    def method_for(self, objective: Objective) -> Any:
        """Return the algorithm with another objective; `Fair` if it takes none."""
        if self.goal is not None:
            return replace(self._method, objective=objective)
        return Fair(objective) if self.privacy is None else Fair(objective, LOCAL_STEPS)

    def with_tol(self, tol: float) -> RunConfig:
        """Return the same run with another certified gap to stop at."""
        return self.model_copy(update={"training": self.training.model_copy(update={"tol": tol})})

    @property
    def left_out(self) -> set[str]:
        """Settings left out, among l2, strength (of the objective) and kappa (κ of personal models)."""
        return self._left_out

    def with_strengths(
        self, l2: float, objective: dict[str, Any] | None, kappa: float | None = None
    ) -> RunConfig:
        """Return the same run with these strengths, as if the settings gave them."""
        model = self.model.model_copy(
            update={"l2": l2, "strength": self.model.strength if kappa is None else kappa}
        )
        made = self.model_copy(update={"model": model, "objective": objective})
        made._method, made._left_out = (
            algorithm_of(self.algorithm, objective, self._place / "config.toml"),
            set(),
        )
        return made

    def toml(self, folder: Path, heading: str = "") -> str:
        """Return all settings, defaults included, as a `config.toml` in that folder."""
        data = self.data.values()
        for name in ("file", "test_file"):
            if getattr(self.data, name) is not None:
                data[name] = _relative(self.place / getattr(self.data, name), folder)
        if self.data.more_files:
            data["more_files"] = [
                _relative(self.place / name, folder) for name in self.data.more_files
            ]
        if (self.data.entry or self.model.network) and self.place.resolve() != folder.resolve():
            data["beside"] = _relative(self.code, folder)
        more = {
            "folder": ".",
            "data": data,
            "algorithm": {"kind": kind_of(self.method), **self.algorithm},
        }
        values = (
            self.model_dump(exclude_none=True, exclude={"model": self.model.foreign}, mode="json")
            | more
        )
        return f"# {heading}\n" * bool(heading) + tomli_w.dumps(values)


def _usual(table: Any, **usual: Any) -> Any:
    """Return a table with changed defaults."""
    return table.model_copy(
        update={name: new for name, new in usual.items() if name not in table.model_fields_set}
    )


def _relative(path: Path, folder: Path) -> str:
    """Write a path from the run's folder where both lie below here, so that they can move together; else in full."""
    here = Path.cwd().resolve()
    place = path.resolve()
    if place.is_relative_to(here) and folder.resolve().is_relative_to(here):
        return Path(os.path.relpath(place, folder.resolve())).as_posix()
    return place.as_posix()
