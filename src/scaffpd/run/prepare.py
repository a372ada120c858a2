"""Data and model of a run: from a table, or from the four hospitals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from scaffpd.data.tabular.settings import TableSettings
from scaffpd.errors import InputError, unknown
from scaffpd.federation import ClientScores, Vector
from scaffpd.models import Linear, Personal, regulariser
from scaffpd.models.cox import refuse_noise
from scaffpd.models.linear import nearly_free
from scaffpd.numbers import several
from scaffpd.pipeline.columns import Plan, agreed
from scaffpd.pipeline.sites import SitesHere
from scaffpd.privacy.counts import SHARE, PrivateCounting
from scaffpd.privacy.noise import secret_bytes
from scaffpd.privacy.private import RIDGE, private_ridge
from scaffpd.run.settings.model_file import Setup
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.settings.tables import AUTO, SourceSettings
from scaffpd.tasks.base import Task
from scaffpd.tasks.classification import Classification
from scaffpd.training.cohort import Cohort

Pair = tuple[Any, Any]
SHOWN = 20  # names of columns in a sentence
FLAMBY = (
    "FLamby's benchmark has these hospitals with 10 of the 13 columns and a split of its own. Mean "
    "accuracies there: its best published model for all 73.5 %, each hospital alone 73.0 %; ours "
    "for all 72.3 %, fair 73.6 %, personal 81.5 %, alone 80.5 % (results/flamby)."
)


@dataclass(frozen=True)
class Prepared:
    """Clients and a model."""

    names: tuple[str, ...]  # the clients
    train: list[Pair] = field(repr=False)  # their (X, y)
    test: list[Pair] = field(repr=False)  # the same of held-out rows; empty where there are none
    model: Linear
    task: Task
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
        """Score x: losses without the regulariser, and the task's measure in the data's units."""
        found = cohort.evaluate(x, split)
        found = replace(found, loss=found.loss - regulariser(cohort.model, x))
        rows = self.train if split == "train" else self.test

        def answers() -> list[Pair]:
            models = cohort.own_models(x)
            own = [x] * len(rows) if models is None else [u.numpy(force=True) for u in models]
            outputs = self.model.outputs
            return [(outputs(u, np.asarray(X)), y) for u, (X, y) in zip(own, rows, strict=True)]

        scores = self.task.client_scores(self.model, found, self.unit, answers)
        return replace(found, score=scores)

    def setup(self) -> Setup | None:
        """Describe what the parameters expect of a row; `None` where the rows are no table."""
        if self.schema is None:
            return None
        model = {
            "kind": "linear",
            "task": self.task.name,
            "loss": self.model.loss,
            "intercept": self.model.intercept,
        }
        if self.model.periods:
            model["periods"] = list(self.model.periods)
        if self.model.classes is not None:
            model["classes"] = self.model.classes
        if self.exposure is not None:
            model["exposure"] = list(self.exposure)
        return Setup(model, self.schema, self.mean, self.deviation)

    def in_units(self, x: NDArray[Any]) -> NDArray[Any]:
        """Convert parameters, of one model or of several, to the units of the target's file."""
        scaled = x * self.unit
        if self.model.intercept:
            scaled[..., -1] += self.centre
        return scaled


def described(model: Linear) -> str:
    """Describe a model in a phrase."""
    ridge = "by evidence" if model.l2 == AUTO else f"{np.max(model.l2):g}"
    return f"{model.called}, ridge {ridge}{'' if model.beyond else ', no intercept'}"


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
    found = read_clients(source, seed)
    task = found.task
    targets = [own.target.values[~own.held].astype(np.float64) for own in found.rows]
    unit, centre = _target_scale(targets) if task.scaled else (1.0, 0.0)
    clients = [own.in_units(unit, centre) for own in found.rows] if task.scaled else found.rows
    plan = Plan(
        partial(_model, config, source, found),
        source.curves == "on",
        source.pairs if asked is None and source.time is None else 0,
    )
    sites = SitesHere(clients, plainly if counts is None else counts)
    encoding = agreed(found.schema, sites, plan)
    encoded = [own.encoded(*encoding) for own in clients]
    rows = sum(sum(own.rows) for own in found.rows)
    columns = several(len(encoding.schema["columns"]), "column")
    width = len(encoding.mean)
    about = f"{source.file[0].name}: {several(rows, 'row')}, {columns}, {width} once encoded"
    return Prepared(
        tuple(sites.names),
        [own.train for own in encoded],
        [own.test for own in encoded if own.test is not None],
        _model(config, source, found, encoding.schema),
        task,
        tuple(map(str, encoding.schema["labels"])),
        about,
        source.word,
        unit,
        centre,
        *encoding,
        (
            *task.said(source.periods),
            *_kinds(encoding.schema, found.exposure),
            *_private(config, counts),
            *found.remarks,
        ),
        found.groups,
        {} if encoding.schema.get("declared") else {own.name: fills(own) for own in found.rows},
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


def _model(config: RunConfig, source: TableSettings, found: Clients, schema: Schema) -> Linear:
    groups = [feature.group for feature in encoded_features(schema)]
    private = config.privacy is not None
    weighted = source.weight is not None
    exposed = source.offset is not None
    if private and (weighted or exposed):
        raise InputError("weights-with-noise", "--weight and --offset need a model without noise.")
    made = found.task.linear(
        0.0,
        len(schema["labels"]),
        periods=source.periods,
        groups=None if private else tuple(groups),
        weighted=weighted,
        exposed=exposed,
        entry=len(found.rows[0].extra) - weighted - exposed > 1,
    )
    if private and not made.summed:
        refuse_noise()
    return replace(made, l2=_ridge(config, len(groups), len(made.beyond)))


def _curved(config: RunConfig) -> bool:
    """Return whether numbers have curves unasked: thresholds are values of rows, which ε would have
    to cover, and methods of first order are slow on steps.
    """
    return config.privacy is None and isinstance(config.method, Fair)


def _target_scale(parts: Sequence[Vector]) -> tuple[float, float]:
    n = sum(map(len, parts))
    centre = sum(float(y.sum()) for y in parts) / n
    squares = sum(float(((y - centre) ** 2).sum()) for y in parts) / n
    return (squares**0.5 if squares > 0 else 1.0), centre


def _kinds(schema: Schema, exposure: float | None) -> tuple[str, ...]:
    columns = schema["columns"]
    numbers = [c["name"] for c in columns if c["kind"] == NUMBER]
    categories = [f"{c['name']} ({len(c['categories'])})" for c in columns if c["kind"] == CATEGORY]
    sentences = []
    steps = sum(len(c.get("steps", ())) for c in columns if c["kind"] == NUMBER)
    curves = f"Numbers, as lines and {steps} steps" if steps else "Numbers"
    for kind, names in ((curves, numbers), ("Categories", categories)):
        more = "" if len(names) <= SHOWN else f" and {len(names) - SHOWN} more"
        sentences += [f"{kind}: {', '.join(names[:SHOWN])}{more}."] if names else []
    pairs = [f"{p['left']['name']} × {p['right']['name']}" for p in schema.get("pairs", ())]
    sentences += [f"Pairs: {', '.join(pairs)}."] if pairs else []
    if exposure is not None:
        sentences.append(f"Counts are for an exposure of {exposure:g}.")
    return tuple(sentences)


def _hospitals(config: RunConfig, data: SourceSettings, seed: int) -> Prepared:
    silos = heart_disease(data.test, seed)
    rows = sum(len(y) for _, y in [*silos.train, *silos.test])
    columns = len(silos.features)
    task = Classification()
    groups = None if config.privacy is not None else tuple(map(str, range(columns)))
    return Prepared(
        silos.names,
        silos.train,
        silos.test,
        task.linear(_ridge(config, columns, 1), 2, groups=groups),
        task,
        ("0", "1"),
        f"{data.source}: {rows} rows, {columns} columns",
        "hospital",
        remarks=(FLAMBY,),
        features=silos.features,
    )


def _ridge(config: RunConfig, features: int, levels: int) -> float | str | list[float]:
    """Return l2 of features and of levels behind them, as `Linear` takes it."""
    l2 = config.model.l2
    if isinstance(l2, str):
        return l2 if config.privacy is None else private_ridge(features, levels)
    return nearly_free(l2, features, levels) if levels and config.privacy is None else l2
