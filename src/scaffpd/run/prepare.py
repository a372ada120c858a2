"""Data and model of a run: from a table, a data set known by name, or a function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.data import Silos
from scaffpd.data.tabular.agree import CLASSIFICATION, REGRESSION
from scaffpd.data.tabular.clients import Clients, TableFile, read_clients
from scaffpd.data.tabular.columns import CATEGORY, NUMBER
from scaffpd.data.tabular.encode import expanded_names, fills
from scaffpd.errors import InputError, unknown
from scaffpd.federation import ClientScores, Vector
from scaffpd.models import Linear, Module
from scaffpd.numbers import several
from scaffpd.run.settings.model_file import FORMATS, Setup
from scaffpd.run.settings.reading import load
from scaffpd.run.settings.run import OF_TABLE, RunConfig
from scaffpd.training.cohort import Cohort

Pair = tuple[Any, Any]
SHOWN = 20  # names of columns in a sentence
WANTED = (
    "clients as a mapping from names to (X, y), or two such mappings, the second of held-out rows"
)
LOSS = {
    "logistic": "logistic regression",
    "softmax": "softmax regression",
    "squared": "least squares",
} | {"poisson": "Poisson regression"}


@dataclass(frozen=True)
class Prepared:
    """Clients and a model."""

    names: tuple[str, ...]  # the clients
    train: list[Pair] = field(repr=False)  # their (X, y)
    test: list[Pair] = field(repr=False)  # the same of held-out rows; empty where there are none
    model: Linear | Module
    task: str  # "classification" or "regression"
    labels: tuple[str, ...]  # of the classes, in the order of their numbers
    about: str  # the data in a phrase
    word: str = "client"  # what a client is
    unit: float = 1.0  # what one unit of the target is in units of the data
    centre: float = 0.0  # what zero is, likewise
    schema: Mapping[str, Any] | None = field(
        default=None, repr=False
    )  # what was agreed about columns, of tables
    mean: Vector = field(default_factory=lambda: np.empty(0), repr=False)  # of encoded columns
    deviation: Vector = field(default_factory=lambda: np.empty(0), repr=False)  # likewise
    remarks: tuple[str, ...] = ()  # what was left out, and why
    # of held-out rows, client by client: the values of columns that scores are cut by
    groups: Mapping[str, Sequence[NDArray[Any]]] = field(default_factory=dict, repr=False)
    held: str = ""  # tells these held-out rows from others
    # what stands in for missing values, by client and column
    fills: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict, repr=False)
    features: tuple[
        str, ...
    ] = ()  # names of columns where the rows are no table; empty where they have none

    @property
    def measure(self) -> Literal["accuracy", "rmse"]:
        """The measure that clients are scored by."""
        return "accuracy" if self.task == CLASSIFICATION else "rmse"

    @property
    def upwards(self) -> bool:
        """Whether more is better."""
        return self.task == CLASSIFICATION

    @property
    def linear(self) -> Linear:
        """The model, where it is linear."""
        assert isinstance(self.model, Linear)
        return self.model

    @property
    def numbers(self) -> int:
        """Rows × columns to train on."""
        return sum(X.shape[0] * X.shape[1] for X, _ in self.train)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the encoded columns; numbers where the data has none."""
        if self.schema is not None:
            return tuple(expanded_names(dict(self.schema)))
        return self.features or tuple(map(str, range(self.train[0][0].shape[1])))

    @property
    def split(self) -> Literal["train", "test"]:
        """The rows that clients are scored on."""
        return "test" if self.test else "train"

    def cohort(self, config: RunConfig, model: Any = None) -> Cohort:
        """Return the clients in this process; `model` replaces the run's own."""
        numbers = FORMATS.get(config.training.numbers or "")
        device = config.training.device
        test = self.test or None
        chosen = self.model if model is None else model
        return Cohort(self.train, chosen, self.names, device=device, dtype=numbers, test=test)

    def scores(self, cohort: Cohort, x: Tensor | NDArray[np.float64], split: str) -> ClientScores:
        """Score x: losses without the regulariser; of numbers, RMSE in the data's units."""
        found = cohort.evaluate(x, split)
        l2 = float(self.model.l2)
        point = torch.as_tensor(x).double()
        found = replace(found, loss=found.loss - l2 / 2 * float(point @ point))
        if self.task == CLASSIFICATION:
            return found
        if isinstance(self.model, Linear) and self.model.loss == "poisson":
            rows = self.train if split == "train" else self.test
            model = self.model
            models = cohort.own_models(x)
            own = [x] * len(rows) if models is None else [u.numpy(force=True) for u in models]
            errors = [
                np.mean((model.predict(u, np.asarray(X)) - y) ** 2)
                for u, (X, y) in zip(own, rows, strict=True)
            ]
            return replace(found, accuracy=np.sqrt(errors))
        return replace(found, accuracy=self.unit * np.sqrt(np.maximum(found.loss, 0.0)))

    def setup(self, algorithm: str) -> Setup | None:
        """Describe what the parameters expect of a row; `None` where the rows are no table."""
        if self.schema is None or not isinstance(self.model, Linear):
            return None
        model = {
            "kind": "linear",
            **{name: getattr(self.model, name) for name in ("loss", "l2", "intercept")},
        }
        if self.model.classes is not None:
            model["classes"] = self.model.classes
        return Setup(algorithm, model, self.schema, self.mean, self.deviation)

    def metadata(self) -> dict[str, str]:
        """Describe what a network expects of a row of a table, and what its outputs mean."""
        about = {
            "unit": repr(self.unit),
            "centre": repr(self.centre),
            "labels": json.dumps(self.labels),
        }
        if self.schema is None:
            return about
        scale = {
            "mean": json.dumps(self.mean.tolist()),
            "deviation": json.dumps(self.deviation.tolist()),
        }
        return about | {"schema": json.dumps(self.schema), **scale}

    def in_units(self, x: NDArray[Any]) -> NDArray[Any]:
        """Convert the parameters to the units of the target in the file."""
        if (
            self.task == CLASSIFICATION
            or not isinstance(self.model, Linear)
            or self.model.loss == "poisson"
        ):
            return x
        scaled = x * self.unit
        if self.model.intercept:
            scaled[-1] += self.centre
        return scaled


def described(model: Any) -> str:
    """Describe a model in a phrase."""
    if isinstance(model, Linear):
        return f"{LOSS[model.loss]}, l2 = {model.l2:g}{'' if model.intercept else ', no intercept'}"
    return repr(model)


def prepare(config: RunConfig) -> Prepared:
    """Read the data and make the model."""
    if config.data.file is not None:
        return _from_file(config, config.data.file)
    return _from_source(config) if config.data.source is not None else _from_entry(config)


def _from_file(config: RunConfig, name: str) -> Prepared:
    file = config.place / Path(name).expanduser()
    asked = config.data.model_dump(include={*OF_TABLE, "test", "seed"}, exclude_none=True)
    asked["more_files"] = tuple(
        config.place / Path(more).expanduser() for more in config.data.more_files or ()
    )
    if config.data.test_file is not None:
        asked["test_file"] = config.place / Path(config.data.test_file).expanduser()
    source = TableFile(file, **asked, groups=tuple(config.training.groups or ()))
    found = read_clients(source)
    task = found.schema["task"]
    labels = tuple(map(str, found.schema["labels"]))
    train = [e.train for e in found.encoded]
    test = [e.test for e in found.encoded if e.test is not None]
    counts = config.model.loss == "poisson"
    unit, centre = _target_scale(train, config) if task == REGRESSION and not counts else (1.0, 0.0)
    if task == REGRESSION and not counts:
        train, test = ([(X, (y - centre) / unit) for X, y in part] for part in (train, test))
    rows = sum(sum(own.rows) for own in found.rows)
    width = found.encoded[0].train[0].shape[1]
    columns = several(len(found.schema["columns"]), "column")
    about = f"{file.name}: {several(rows, 'row')}, {columns}, {width} once encoded"
    return Prepared(
        tuple(own.name for own in found.rows),
        train,
        test,
        _model(config, task, len(labels)),
        task,
        labels,
        about,
        source.client,
        unit,
        centre,
        found.schema,
        found.mean,
        found.deviation,
        (*_kinds(found), *found.remarks),
        found.groups,
        _digest(
            part
            for own in found.rows
            for part in (own.held, np.asarray(own.target.values)[own.held])
        ),
        {} if found.schema.get("declared") else {own.name: fills(own) for own in found.rows},
    )


def _digest(arrays: Iterable[Any]) -> str:
    """Name rows by their contents."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(repr(np.shape(array)).encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:32]


def _target_scale(train: Sequence[Pair], config: RunConfig) -> tuple[float, float]:
    """Return deviation and mean of the target; without an intercept, the mean is taken as zero."""
    n = sum(len(y) for _, y in train)
    centre = (
        sum(float(y.sum()) for _, y in train) / n
        if config.model.intercept and not config.model.network
        else 0.0
    )
    squares = sum(float(((y - centre) ** 2).sum()) for _, y in train) / n
    return (squares**0.5 if squares > 0 else 1.0), centre


def _kinds(found: Clients) -> tuple[str, ...]:
    """Say which columns are numbers, and which are categories."""
    columns = found.schema["columns"]
    numbers = [c["name"] for c in columns if c["kind"] == NUMBER]
    categories = [f"{c['name']} ({len(c['categories'])})" for c in columns if c["kind"] == CATEGORY]
    sentences = []
    for kind, names in (("Numbers", numbers), ("Categories", categories)):
        more = "" if len(names) <= SHOWN else f" and {len(names) - SHOWN} more"
        sentences += [f"{kind}: {', '.join(names[:SHOWN])}{more}."] if names else []
    return tuple(sentences)


def _from_source(config: RunConfig) -> Prepared:
    from scaffpd.study.comparison.problem import NAMES, problem  # a table needs none of them

    data = config.data
    name = config.data.source or ""
    if name not in NAMES:
        raise unknown("data set", name, NAMES)
    made = problem(name, data.clients, data.alpha, data.test)
    silos = made.silos(data.seed)
    rows = sum(len(y) for _, y in [*silos.train, *silos.test])
    about = f"{made.name}: {rows} rows, {len(silos.features)} columns"
    return _of_silos(config, silos, about, "hospital" if name == "hospitals" else "client")


def _from_entry(config: RunConfig) -> Prepared:
    entry = config.data.entry or ""
    silos = load(config.code, entry)
    if not isinstance(silos, Silos):
        parts = silos if isinstance(silos, tuple) else (silos,)
        if not 1 <= len(parts) <= 2 or not all(
            isinstance(part, Mapping) and part for part in parts
        ):
            raise InputError(
                "entry-returns-no-clients", f"The entry {entry!r} must return {WANTED}."
            )
        names, *others = (tuple(map(str, part)) for part in parts)
        if others and others[0] != names:
            raise InputError(
                "entry-returns-no-clients",
                f"The entry {entry!r} must return held-out rows of the same clients, "
                "in the same order.",
            )
        train, test = (list(part.values()) for part in (*parts, {})[:2])
        silos = Silos(names, train, test, ())
    return _of_silos(config, silos)


def _of_silos(config: RunConfig, silos: Silos, about: str = "", word: str = "client") -> Prepared:
    """Distinguish labels from numbers by their type, or by a loss that is for numbers."""
    try:
        train, test = (
            [t for _, y in part if (t := np.asarray(y).ravel()).size]
            for part in (silos.train, silos.test)
        )
        kind = np.concatenate(train).dtype.kind
        about = (
            about or f"{config.data.entry}: {sum(len(y) for _, y in silos.train)} rows to train on"
        )
    except (TypeError, ValueError):
        raise InputError(
            "entry-returns-no-clients", f"The entry {config.data.entry!r} must return {WANTED}."
        ) from None
    numbers = config.data.entry is not None and config.model.loss in ("squared", "poisson")
    task = CLASSIFICATION if kind in "iub" and not numbers else REGRESSION
    if task == CLASSIFICATION and any(y.dtype.kind not in "iub" for y in test):
        raise InputError(
            "held-out-labels-not-whole",
            "Held-out labels must be whole numbers, as those to train on are.",
        )
    classes = int(max(y.max() for y in [*train, *test])) + 1 if task == CLASSIFICATION else 0
    return Prepared(
        silos.names,
        silos.train,
        silos.test,
        _model(config, task, classes),
        task,
        tuple(map(str, range(classes))),
        about,
        word,
        held=_digest(np.asarray(part) for pair in silos.test for part in pair),
        features=silos.features,
    )


def _model(config: RunConfig, task: str, classes: int) -> Any:
    given = config.model
    loss = given.loss or (
        "squared" if task == REGRESSION else "logistic" if classes == 2 else "softmax"
    )
    if task == REGRESSION and loss not in ("squared", "poisson"):
        raise InputError(
            "loss-not-for-numbers",
            f"The target is a number, so the loss is squared (or poisson, of counts), not {loss}.",
        )
    if task == CLASSIFICATION and loss == "poisson":
        raise InputError(
            "poisson-for-labels",
            'Poisson loss counts, and the target is read as labels: say data.task = "regression".',
        )
    if loss == "logistic" and classes != 2:
        raise InputError(
            "logistic-needs-two-labels",
            f"Logistic loss tells two labels apart, and there are {classes}: use softmax.",
        )
    if given.network is not None:
        return Module(load(config.code, given.network), loss, given.l2)
    many = classes if loss == "softmax" or (loss == "squared" and classes) else None
    return Linear(loss, given.l2, given.intercept, many)
