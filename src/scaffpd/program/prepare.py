"""Data and model of a run: from a table, or from the four hospitals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from scaffpd.algorithms import Fair
from scaffpd.data.curves import plainly
from scaffpd.data.hospitals import heart_disease
from scaffpd.data.tabular.agree import Schema, encoded_features
from scaffpd.data.tabular.clients import Clients, ClientTable, read_clients
from scaffpd.data.tabular.columns import CATEGORY, NUMBER
from scaffpd.data.tabular.encode import fills
from scaffpd.data.tabular.settings import TableSettings
from scaffpd.errors import InputError
from scaffpd.federation import Vector
from scaffpd.models import Linear
from scaffpd.models.cox import refuse_noise
from scaffpd.models.linear import nearly_free
from scaffpd.numbers import several
from scaffpd.pipeline.columns import Plan, agreed, with_dispersion
from scaffpd.pipeline.prepared import Prepared
from scaffpd.pipeline.sites import SitesHere, Splits
from scaffpd.privacy.counts import SHARE, PrivateCounting
from scaffpd.privacy.noise import secret_bytes
from scaffpd.privacy.private import RIDGE, private_ridge
from scaffpd.settings.run import RunConfig
from scaffpd.settings.tables import AUTO, SourceSettings
from scaffpd.tasks.classification import Classification

SHOWN = 20  # names of columns in a sentence
FLAMBY = (
    "FLamby's benchmark has these hospitals with 10 of the 13 columns and a split of its own. Mean "
    "accuracies there: its best published model for all 73.5 %, each hospital alone 73.0 %; ours "
    "for all 72.3 %, fair 73.6 %, personal 81.5 %, alone 80.5 % (results/flamby)."
)


class Source:
    """The data of a run, read once, and split by any seed."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @cached_property
    def _table(self) -> ClientTable:
        source = self.config.table
        assert source is not None
        if source.curves == AUTO:
            curves = "on" if _curved(self.config) else "off"
            source = source.model_copy(update={"curves": curves})
        return read_clients(source)

    def prepared(
        self, seed: int | None = None, secret: bytes | None = None, left: Sequence[int] = ()
    ) -> Prepared:
        """Agree on columns and encode the rows.

        Args:
            seed: chooses held-out rows in the run's stead.
            secret: what the noise of a private run's thresholds is drawn from; a new one if left
                out.
            left: clients whose rows have no part in what is agreed.
        """
        seed = self.config.training.seed if seed is None else seed
        if isinstance(self.config.data, TableSettings):
            return _encoded(self.config, self._table, seed, secret, left)
        return _hospitals(self.config, self.config.data, seed)

    def halves(self) -> tuple[Prepared, Prepared]:
        """Return one half of every client's rows, which agree on columns, and the other half,
        encoded as these say; whole groups of --split-by.
        """
        table = self._table
        source = table.source.model_copy(update={"test": 0.5})
        seed = self.config.training.seed
        one = _encoded(self.config, replace(table, source=source), seed, None)
        rows = Splits(one.test, [])
        return one, replace(one, sites=replace(one.sites, encoded=[(one.encoding, rows)]))


def _encoded(
    config: RunConfig,
    table: ClientTable,
    seed: int,
    secret: bytes | None,
    left: Sequence[int] = (),
) -> Prepared:
    source = table.source
    counts: PrivateCounting | None = None
    asked = config.privacy
    if asked is not None and source.curves == "on":
        known = secret if asked.seed is None else asked.seed
        counts = PrivateCounting(asked.epsilon, asked.delta, secret_bytes(known))
    found = table.clients(seed)
    task = found.task
    targets = [own.target.values[~own.held].astype(np.float64) for own in found.rows]
    unit, centre = _target_scale(targets) if task.scaled else (1.0, 0.0)
    clients = [own.in_units(unit, centre) for own in found.rows] if task.scaled else found.rows
    plan = Plan(
        partial(_model, config, source, found),
        source.curves == "on",
        source.pairs if asked is None and source.time is None else 0,
    )
    sites = SitesHere.of(clients, plainly if counts is None else counts, unit)
    there = [rows for i, rows in enumerate(clients) if i not in left]
    encoding = agreed(found.schema, SitesHere.of(there, sites.counted, unit), plan)
    schema = encoding.schema
    model = with_dispersion(encoding, sites, _model(config, source, found, schema))
    assert isinstance(model, Linear)
    rows = sum(sum(own.rows) for own in found.rows)
    columns = several(len(schema["columns"]), "column")
    width = len(encoding.mean)
    return Prepared(
        replace(sites, device=config.training.device),
        encoding,
        model,
        tuple(map(str, schema["labels"])),
        f"{source.file[0].name}: {several(rows, 'row')}, {columns}, {width} once encoded",
        source.word,
        centre,
        (
            *task.said(source.periods),
            *_kinds(schema, found.exposure),
            *_spread(model),
            *_private(config, counts),
            *found.remarks,
        ),
        found.groups,
        {} if schema.get("declared") else {own.name: fills(own) for own in found.rows},
        exposure=None if source.offset is None else (source.offset, found.exposure or 1.0),
    )


def _spread(model: Linear) -> list[str]:
    """Say how counts vary, where that is not as their means."""
    alpha = model.dispersion
    return [f"Counts of mean μ have the variance μ + {alpha:.3g} μ²."] if alpha else []


def _private(config: RunConfig, counts: PrivateCounting | None) -> list[str]:
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
    if config.model.dispersion is not None:
        made = replace(made, dispersion=config.model.dispersion)
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
    device = config.training.device
    sites, encoding = SitesHere.of_arrays(silos.names, silos.train, silos.test, task, device=device)
    return Prepared(
        sites,
        encoding,
        task.linear(_ridge(config, columns, 1), 2, groups=groups),
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
