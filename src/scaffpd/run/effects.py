"""Coefficients of a run's columns that can be reported, in the columns' own units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaffpd.algorithms.evidence import INTERCEPT
from scaffpd.data.tabular.agree import encoded_features
from scaffpd.data.tabular.columns import CATEGORY
from scaffpd.models import Personal
from scaffpd.run.prepare import Prepared
from scaffpd.run.settings.run import RunConfig
from scaffpd.study.coefficients import CoefficientTable, coefficients, level_contrast
from scaffpd.training.cohort import Cohort

MOST = 300  # columns
NUMBERS = 20_000_000  # rows × columns


def effects(config: RunConfig, prepared: Prepared) -> CoefficientTable | None:
    """Estimate lines and categories of a table, without curves; `None` where that cannot be.

    The intercept is that of a row with the mean of every column; a category is the difference from
    the mean over rows. Of numbers, both are in units of the target; of labels, in log-odds;
    of times to an event, it is a logarithm of hazard ratios.
    """
    model = prepared.model
    schema = prepared.schema
    if (
        schema is None
        or model.loss == "softmax"
        or config.privacy is not None
        or prepared.numbers > NUMBERS
    ):
        return None
    encoded = encoded_features(schema)
    lines = [j for j, feature in enumerate(encoded) if not feature.step]
    if len(lines) > MOST:
        return None
    categorical = {column["name"] for column in schema["columns"] if column["kind"] == CATEGORY}
    groups = [encoded[j].group for j in lines]
    named = prepared.differing(config.model.personal)
    places = {j: k for k, j in enumerate(lines)} | {INTERCEPT: INTERCEPT}
    last = [INTERCEPT] * model.intercept
    differ = None if named is None else [places[j] for j in named if j in places]
    rows = [(np.asarray(X)[:, lines], y) for X, y in prepared.train]
    shape = replace(model, l2=0.0, groups=tuple(groups))
    cohort = Cohort(rows, Personal(shape, 1.0, differ), prepared.names)
    L = level_contrast(
        [*(group if group in categorical else "" for group in groups), *[""] * len(last)],
        np.append(prepared.mean[lines], [1.0] * len(last)),
        np.append(prepared.deviation[lines], [1.0] * len(last)),
    )
    found = coefficients(cohort, prepared.unit * L, prepared.centre)
    return replace(found, names=(*(encoded[j].name for j in lines), *last))
