"""Data and model of a run: from a table, or from the four hospitals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms import Fair
from scaffpd.algorithms.evidence import INTERCEPT
from scaffpd.data.curves import plainly
from scaffpd.data.hospitals import heart_disease
from scaffpd.data.tabular.agree import Schema, encoded_features, features
from scaffpd.data.tabular.clients import Clients, read_clients
from scaffpd.data.tabular.columns import CATEGORY, NUMBER
from scaffpd.data.tabular.encode import fills
from scaffpd.data.tabular.settings import (
    CLASSIFICATION,
    COUNTS,
    REGRESSION,
    SURVIVAL,
    TableSettings,
)
from scaffpd.errors import InputError, unknown
from scaffpd.federation import ClientScores, Vector
from scaffpd.models import Linear, Personal, regulariser
from scaffpd.models.baseline import concordance
from scaffpd.models.cox import refuse_noise
from scaffpd.models.linear import nearly_free
from scaffpd.numbers import several
from scaffpd.privacy.counts import SHARE, PrivateCounting
from scaffpd.privacy.noise import secret_bytes
from scaffpd.privacy.private import RIDGE, private_ridge
from scaffpd.run.settings.model_file import Setup
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.settings.tables import AUTO, SourceSettings
from scaffpd.training.cohort import Cohort
from scaffpd.training.pairs import with_pairs

Pair = tuple[Any, Any]
SHOWN = 20  # names of columns in a sentence
SURVIVES = (
    "Cox's model: risk sets and baselines within a client, Efron's ties. Losses count from that of "
    "a model that knows nothing, as partial likelihoods of clients cannot be compared."
)
PERIODS = (
    "Discrete time: a logistic hazard in each of the periods until {}, with levels that all "
    "clients share. Losses are means over persons and periods at risk, and ratios of hazards are "
    "those of odds."
)
FLAMBY = (
    "FLamby's benchmark has these hospitals with 10 of the 13 columns and a split of its own. Mean "
    "accuracies there: its best published model for all 73.5 %, each hospital alone 73.0 %; ours "
    "for all 72.3 %, fair 73.6 %, personal 81.5 %, alone 80.5 % (results/flamby)."
)
LOSS = {
    "logistic": "logistic regression",
    "softmax": "softmax regression",
    "squared": "least squares",
    "poisson": "Poisson regression",
    "cox": "Cox's model, risk sets within clients",
    "hazard": "logistic hazards of periods",
}


@dataclass(frozen=True)
class Prepared:
    """Clients and a model."""

    names: tuple[str, ...]  # the clients
    train: list[Pair] = field(repr=False)  # their (X, y)
    test: list[Pair] = field(repr=False)  # the same of held-out rows; empty where there are none
    model: Linear
    task: str  # "classification", "regression" or "survival"
    labels: tuple[str, ...]  # of the classes, in the order of their numbers
    about: str  # the data in a phrase
    word: str = "client"  # what a client is
    unit: float = 1.0  # what one unit of the target is in units of the data
    centre: float = 0.0  # what zero is, likewise
    # what was agreed about columns, of tables
    schema: Schema | None = field(default=None, repr=False)
    mean: Vector = field(default_factory=lambda: np.empty(0), repr=False)  # of encoded columns
    deviation: Vector = field(default_factory=lambda: np.empty(0), repr=False)  # likewise
    remarks: tuple[str, ...] = ()  # what was left out, and why
    # of held-out rows, client by client: the values of columns that scores are cut by
    groups: Mapping[str, Sequence[NDArray[Any]]] = field(default_factory=dict, repr=False)
    # what stands in for missing values, by client and column
    fills: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict, repr=False)
    # names of columns where the rows are no table; empty where they have none
    features: tuple[str, ...] = ()
    # of counts: the column with the log of their exposures, and the exposure that means are for
    exposure: tuple[str, float] | None = None
    # of a private run with curves: what its thresholds have cost
    counts: PrivateCounting | None = field(default=None, repr=False)

    @property
    def measure(self) -> Literal["accuracy", "rmse", "concordance"]:
        """The measure that clients are scored by."""
        if self.task == SURVIVAL:
            return "concordance"
        return "accuracy" if self.task == CLASSIFICATION else "rmse"

    @property
    def upwards(self) -> bool:
        """Whether more is better."""
        return self.task in (CLASSIFICATION, SURVIVAL)

    @property
    def numbers(self) -> int:
        """Rows × columns to train on."""
        return sum(X.shape[0] * X.shape[1] for X, _ in self.train)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the encoded columns; numbers where the data has none."""
        if self.schema is not None:
            return features(self.schema)
        return self.features or tuple(map(str, range(self.train[0][0].shape[1])))

    @property
    def split(self) -> Literal["train", "test"]:
        """The rows that clients are scored on."""
        return "test" if self.test else "train"

    def cohort(self, config: RunConfig, model: Any = None) -> Cohort:
        """Return the clients in this process; `model` replaces the run's own."""
        device = config.training.device
        test = self.test or None
        chosen = self.model if model is None else model
        return Cohort(self.train, chosen, self.names, device=device, test=test)

    def personal(self, config: RunConfig) -> Personal:
        """Return the model that every client makes its own."""
        own = self.differing(config.model.personal)
        kappa = config.model.kappa
        if own is None or isinstance(kappa, str):
            return Personal(self.model, kappa, own)
        width = len(self.columns) + len(self.model.beyond)
        each = np.full(width, np.inf)  # a model's file has strengths only
        each[[-1 if j == INTERCEPT else int(j) for j in own]] = kappa
        return Personal(self.model, each.tolist())

    def differing(self, names: Sequence[str]) -> list[int | str] | None:
        """Return the encoded columns of those named, and "intercept"; `None` for all."""
        if not names:
            return None
        owners = list(self.columns)
        if self.schema is not None:
            owners = [one.group.removesuffix(" steps") for one in encoded_features(self.schema)]
        found: list[int | str] = []
        for name in names:
            if name not in (*owners, INTERCEPT):
                known = [owner for owner in dict.fromkeys(owners) if " × " not in owner]
                raise unknown("column", name, [*known, INTERCEPT])
            found += [j for j, owner in enumerate(owners) if owner == name]
        return [*found, INTERCEPT] if INTERCEPT in names else found

    def scores(self, cohort: Cohort, x: NDArray[np.float64], split: str) -> ClientScores:
        """Score x: losses without the regulariser; RMSE of numbers in the data's units, and the
        concordance of periods.
        """
        found = cohort.evaluate(x, split)
        found = replace(found, loss=found.loss - regulariser(cohort.model, x))
        if self.upwards and not self.model.periods:
            return found
        if self.model.periods or self.model.loss == "poisson":
            rows = self.train if split == "train" else self.test
            models = cohort.own_models(x)
            own = [x] * len(rows) if models is None else [u.numpy(force=True) for u in models]
            answers = [
                (self.model.predict(u, np.asarray(X)), y)
                for u, (X, y) in zip(own, rows, strict=True)
            ]
            if self.model.periods:
                entry = self.model.entry
                ranked = [
                    concordance(y[:, 0], y[:, 1], z, y[:, 2] if entry else None) for z, y in answers
                ]
                return replace(found, accuracy=np.array(ranked))
            errors = [
                np.mean(w * (exposure * mean - counts) ** 2)
                for mean, y in answers
                for counts, exposure, w in [self.model.parts(y)]
            ]
            return replace(found, accuracy=np.sqrt(errors))
        return replace(found, accuracy=self.unit * np.sqrt(np.maximum(found.loss, 0.0)))

    def setup(self) -> Setup | None:
        """Describe what the parameters expect of a row; `None` where the rows are no table."""
        if self.schema is None:
            return None
        model = {"kind": "linear", "loss": self.model.loss, "intercept": self.model.intercept}
        if self.model.periods:
            model["periods"] = list(self.model.periods)
        if self.model.classes is not None:
            model["classes"] = self.model.classes
        if self.exposure is not None:
            model["exposure"] = list(self.exposure)
        return Setup(model, self.schema, self.mean, self.deviation)

    def in_units(self, x: NDArray[Any]) -> NDArray[Any]:
        """Convert parameters, of one model or of several, to the units of the target's file."""
        if self.upwards or self.model.loss == "poisson":
            return x
        scaled = x * self.unit
        if self.model.intercept:
            scaled[..., -1] += self.centre
        return scaled


def described(model: Linear) -> str:
    """Describe a model in a phrase."""
    ridge = "by evidence" if model.l2 == AUTO else f"{np.max(model.l2):g}"
    return f"{LOSS[model.loss]}, ridge {ridge}{'' if model.beyond else ', no intercept'}"


def prepare(config: RunConfig, seed: int | None = None, secret: bytes | None = None) -> Prepared:
    """Read the data and make the model.

    Args:
        config: the settings.
        seed: chooses held-out rows in the run's stead.
        secret: what the noise of a private run's thresholds is drawn from; a new one if left out.
    """
    seed = config.training.seed if seed is None else seed
    if isinstance(config.data, TableSettings):
        return _from_file(config, config.data, seed, secret)
    return _hospitals(config, config.data, seed)


def _from_file(
    config: RunConfig, source: TableSettings, seed: int, secret: bytes | None
) -> Prepared:
    if source.curves == AUTO:
        source = source.model_copy(update={"curves": "on" if _curved(config) else "off"})
    counts: PrivateCounting | None = None
    asked = config.privacy
    if asked is not None and source.curves == "on":
        known = secret if asked.seed is None else asked.seed
        counts = PrivateCounting(asked.epsilon, asked.delta, secret_bytes(known))
    found = read_clients(source, seed, plainly if counts is None else counts)
    task = found.schema["task"] if source.time is None else SURVIVAL
    labels = tuple(map(str, found.schema["labels"]))
    model = _weighted(config, source, found, len(labels))
    targets = [own.train[1] for own in found.encoded]
    numbers = task == REGRESSION and source.task != COUNTS
    unit, centre = _target_scale(targets) if numbers else (1.0, 0.0)
    train, test = _rows(found, unit, centre)
    if config.privacy is None and task != SURVIVAL:
        found = with_pairs(found, train, model, source.pairs)
        model = _weighted(config, source, found, len(labels))
        train, test = _rows(found, unit, centre)
    rows = sum(sum(own.rows) for own in found.rows)
    columns = several(len(found.schema["columns"]), "column")
    width = train[0][0].shape[1]
    about = f"{source.file[0].name}: {several(rows, 'row')}, {columns}, {width} once encoded"
    return Prepared(
        tuple(own.name for own in found.rows),
        train,
        test,
        model,
        task,
        labels,
        about,
        source.word,
        unit,
        centre,
        found.schema,
        found.mean,
        found.deviation,
        (
            *_ways(source),
            *_kinds(found),
            *_private(config, counts),
            *found.remarks,
        ),
        found.groups,
        {} if found.schema.get("declared") else {own.name: fills(own) for own in found.rows},
        exposure=None if source.offset is None else (source.offset, found.exposure or 1.0),
        counts=counts if counts is not None and counts.releases else None,
    )


def _private(config: RunConfig, counts: PrivateCounting | None) -> list[str]:
    """Say what a private run does otherwise."""
    remarks = []
    if config.privacy is not None and config.model.l2 == AUTO:
        remarks.append(
            f"With noise l2 is {RIDGE:g}: evidence would cost ε, and does not know of the noise."
        )
    if counts is not None:
        remarks.append(
            f"Thresholds come from noised counts, which take {SHARE:.0%} of the budget; no pairs "
            "are looked for."
        )
    return remarks


def _rows(found: Clients, unit: float, centre: float) -> tuple[list[Pair], list[Pair]]:
    """Return training and held-out rows; what stands behind a target stays as it is."""

    def scaled(pair: Pair) -> Pair:
        X, y = pair
        if (unit, centre) == (1.0, 0.0):
            return pair
        if y.ndim == 1:
            return X, (y - centre) / unit
        return X, np.column_stack([(y[:, 0] - centre) / unit, y[:, 1:]])

    test = [scaled(own.test) for own in found.encoded if own.test is not None]
    return [scaled(own.train) for own in found.encoded], test


def _weighted(config: RunConfig, source: TableSettings, found: Clients, classes: int) -> Linear:
    groups = [feature.group for feature in encoded_features(found.schema)]
    if config.privacy is not None and (source.weight or source.offset):
        raise InputError("weights-with-noise", "--weight and --offset need a model without noise.")
    if source.time is not None:
        return _timed(config, source, found, groups)
    made = _model(config, source.task or found.schema["task"], classes, groups)
    if source.weight is None and source.offset is None:
        return made
    return replace(made, weighted=source.weight is not None, exposed=source.offset is not None)


def _ways(source: TableSettings) -> list[str]:
    """Say how times to an event are modelled."""
    if source.time is None:
        return []
    ends = " and ".join(", ".join(f"{end:g}" for end in source.periods).rsplit(", ", 1))
    return [PERIODS.format(ends) if source.periods else SURVIVES]


def _timed(config: RunConfig, source: TableSettings, found: Clients, groups: list[str]) -> Linear:
    """Make the model of times to an event; dates of entry have become times."""
    weighted = source.weight is not None
    entry = len(found.rows[0].extra) - weighted > 1
    if config.privacy is not None and not source.periods:
        refuse_noise()
    l2 = _ridge(config, len(groups), len(source.periods))
    kind = "hazard" if source.periods else "cox"
    named = tuple(groups) if config.privacy is None else None
    return Linear(kind, l2, groups=named, weighted=weighted, entry=entry, periods=source.periods)


def _curved(config: RunConfig) -> bool:
    """Return whether numbers have curves unasked: thresholds are values of rows, which ε would have
    to cover, and methods of first order are slow on steps.
    """
    return config.privacy is None and isinstance(config.method, Fair)


def _target_scale(targets: Sequence[Vector]) -> tuple[float, float]:
    parts = [y if y.ndim == 1 else y[:, 0] for y in targets]
    n = sum(map(len, parts))
    centre = sum(float(y.sum()) for y in parts) / n
    squares = sum(float(((y - centre) ** 2).sum()) for y in parts) / n
    return (squares**0.5 if squares > 0 else 1.0), centre


def _kinds(found: Clients) -> tuple[str, ...]:
    columns = found.schema["columns"]
    numbers = [c["name"] for c in columns if c["kind"] == NUMBER]
    categories = [f"{c['name']} ({len(c['categories'])})" for c in columns if c["kind"] == CATEGORY]
    sentences = []
    steps = sum(len(c.get("steps", ())) for c in columns if c["kind"] == NUMBER)
    curves = f"Numbers, as lines and {steps} steps" if steps else "Numbers"
    for kind, names in ((curves, numbers), ("Categories", categories)):
        more = "" if len(names) <= SHOWN else f" and {len(names) - SHOWN} more"
        sentences += [f"{kind}: {', '.join(names[:SHOWN])}{more}."] if names else []
    pairs = [f"{p['left']['name']} × {p['right']['name']}" for p in found.schema.get("pairs", ())]
    sentences += [f"Pairs: {', '.join(pairs)}."] if pairs else []
    if found.exposure is not None:
        sentences.append(f"Counts are for an exposure of {found.exposure:g}.")
    return tuple(sentences)


def _hospitals(config: RunConfig, data: SourceSettings, seed: int) -> Prepared:
    silos = heart_disease(data.test, seed)
    rows = sum(len(y) for _, y in [*silos.train, *silos.test])
    columns = len(silos.features)
    return Prepared(
        silos.names,
        silos.train,
        silos.test,
        _model(config, CLASSIFICATION, 2, range(columns)),
        CLASSIFICATION,
        ("0", "1"),
        f"{data.source}: {rows} rows, {columns} columns",
        "hospital",
        remarks=(FLAMBY,),
        features=silos.features,
    )


def _model(config: RunConfig, task: str, classes: int, groups: Sequence[str | int]) -> Linear:
    """Make the model whose loss goes by the task; strengths are those of `groups` of columns."""
    if classes:
        loss = "logistic" if classes == 2 else "softmax"
    else:
        loss = "poisson" if task == COUNTS else "squared"
    named = None if config.privacy is not None else tuple(map(str, groups))
    own = classes if loss == "softmax" else None
    return Linear(loss, _ridge(config, len(groups), 1), True, own, groups=named)


def _ridge(config: RunConfig, features: int, levels: int) -> float | str | list[float]:
    """Return l2 of features and of levels behind them, as `Linear` takes it."""
    l2 = config.model.l2
    if isinstance(l2, str):
        return l2 if config.privacy is None else private_ridge(features, levels)
    return nearly_free(l2, features, levels) if levels and config.privacy is None else l2
