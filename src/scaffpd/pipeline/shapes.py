r"""`shapes`: what every value of a column adds to a model's output, as a picture needs it.

    f(v) = β (v − m)/d + Σ_k c_k (1[v > t_k] − m_k)

is a line with a jump at every agreed threshold t_k, centred over training rows, so that f(v) − f(w)
is the difference of two predictions whose rows differ in nothing else. Its error is that of the
posterior at the mode, √(bᵀ C b) with C = (W⁻¹ + Σ_i (H_i⁻¹ + T)⁻¹)⁻¹ (see `algorithms/evidence`)
and b the encoded value. Rows are counted between thresholds, which shows no single value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.algorithms.evidence import FLAT, Evidence, Prior
from scaffpd.data.tabular.agree import encoded_features
from scaffpd.models import Personal
from scaffpd.models.execution import limit_threads
from scaffpd.models.linear import Linear, fitted
from scaffpd.models.personal import base_of
from scaffpd.pipeline.models import Trained, main_model
from scaffpd.pipeline.prepared import Prepared
from scaffpd.study.gains import Joining
from scaffpd.study.verdict import ALONE, AVERAGE, CONSTANT, PERSONAL
from scaffpd.training.settling import groups_of

MOST_OWN = 20  # clients whose own curves are shown: those with the most rows
MOST_SHAPES = 12  # columns: those whose curves are spread most
MOST_COEFFICIENTS = 1500  # up to which errors are computed
Matrix = NDArray[np.float64]
Places = NDArray[np.int_]


@dataclass(frozen=True)
class Shape:
    """The curve of one column (and label, of more than two).

    Attributes:
        column: its name.
        label: whose output it adds to.
        model: the shared curve's model.
        edges: of the cells. The outer two are where a picture ends, and no row's value.
        rows: training rows in every cell.
        shared: f at both ends of every cell, one after the other.
        errors: its standard errors, where they are known.
        own: the same for clients that have curves of their own.
        spread: the deviation of f over training rows, or of the clients' own if that is more.
    """

    column: str
    edges: Sequence[float]
    rows: Sequence[int]
    shared: Sequence[float]
    label: str = ""
    model: str = ""
    errors: Sequence[float] = ()
    own: Mapping[str, Sequence[float]] = field(default_factory=dict)
    spread: float = 0.0


def shapes(
    prepared: Prepared, models: Sequence[Trained], joining: Joining | str = ""
) -> list[Shape]:
    """Return the curves of the recommended model (of clients alone, beside the average one); of a
    constant answer those of the average model. Those that are spread most come first.
    """
    if prepared.schema is None:
        return []
    by_name = {one.name: one for one in models}
    name = main_model(models).name
    if isinstance(joining, Joining):
        name = joining.recommendation
    shared = by_name.get(AVERAGE if name in (ALONE, CONSTANT) else name)
    if shared is None:
        return []
    own: Mapping[str, Matrix] = {}
    rows = np.array([len(y) for _, y in prepared.train])
    if name in (ALONE, PERSONAL):
        alone = joining.parameters[ALONE][1:] if isinstance(joining, Joining) else None
        own = {
            prepared.names[i]: shared.own(i) if alone is None or name == PERSONAL else alone[i]
            for i in np.argsort(-rows, kind="stable")[:MOST_OWN]
        }
    covariance = _covariance(shared, prepared) if shared.name in (AVERAGE, PERSONAL) else None
    found = list(_shapes(prepared, shared, own, covariance))
    ranked = sorted({one.column: 0.0 for one in found}, key=lambda c: -_most(found, c))
    return [one for name in ranked for one in found if one.column == name]


def _most(found: Sequence[Shape], column: str) -> float:
    return max(one.spread for one in found if one.column == column)


def _shapes(
    prepared: Prepared, shared: Trained, own: Mapping[str, Matrix], covariance: Matrix | None
) -> Iterator[Shape]:
    assert prepared.schema is not None
    features = encoded_features(prepared.schema)
    mean, deviation = prepared.encoding.mean, prepared.encoding.deviation
    X = np.concatenate([np.asarray(X, dtype=np.float64) for X, _ in prepared.train])
    several = len(prepared.labels) > 2 and not prepared.model.ordered
    labels = prepared.labels if several else ("",)
    for column in prepared.schema["columns"]:
        if column["kind"] == "category" or len(steps := column.get("steps", [])) < 2:
            continue
        line = next(j for j, one in enumerate(features) if one.group == column["name"])
        places = np.arange(line, line + 1 + len(steps))
        on = X[:, places[1:]] * deviation[places[1:]] + mean[places[1:]] > 0.5
        rows = np.bincount(on.sum(1), minlength=len(steps) + 1)
        gaps = np.diff(steps)
        first, last = np.minimum(gaps[[0, -1]], 2 * np.median(gaps))
        edges = np.array([steps[0] - first, *steps, steps[-1] + last])
        B = _encoded(edges, mean[places], deviation[places])

        def at(x: Matrix, k: int, B: Matrix = B, places: Places = places) -> Matrix:
            w = prepared.model.reshape(x, len(features))[0][places, k]
            return np.asarray(prepared.unit * B @ w, dtype=np.float64)

        for k, label in enumerate(labels):
            curve = at(shared.result.x, k)
            mine = {client: at(x, k) for client, x in own.items()} if len(labels) == 1 else {}
            errors = np.empty(0)
            if covariance is not None and len(labels) == 1:
                C = covariance[np.ix_(places, places)]
                errors = prepared.unit * np.sqrt(np.maximum(((B @ C) * B).sum(1), 0.0))
            yield Shape(
                column["name"],
                edges.tolist(),
                rows.tolist(),
                curve.tolist(),
                label,
                shared.name,
                errors.tolist(),
                {client: values.tolist() for client, values in mine.items()},
                max(_spread(values, rows) for values in (curve, *mine.values())),
            )


def _encoded(edges: Matrix, mean: Matrix, deviation: Matrix) -> Matrix:
    """Return the encoded values at both ends of every cell: a line, then steps."""
    cells = np.repeat(np.arange(len(edges) - 1), 2)
    values = np.column_stack([edges[:-1], edges[1:]]).ravel()
    above = cells[:, None] > np.arange(len(edges) - 2)
    return np.asarray((np.column_stack([values, above]) - mean) / deviation)


def _spread(curve: Matrix, rows: Places) -> float:
    """Return the deviation over rows, each in the middle of its cell."""
    middle = curve.reshape(-1, 2).mean(1)
    share = rows / max(rows.sum(), 1)
    return float(np.sqrt(share @ (middle - share @ middle) ** 2))


def _covariance(one: Trained, prepared: Prepared) -> Matrix | None:
    """Return C of a model's shared coefficients, as if every row counted alike."""
    inner = base_of(one.model)
    width = len(prepared.columns)
    if not isinstance(inner, Linear) or inner.classes or width > MOST_COEFFICIENTS:
        return None
    size = width + len(inner.beyond)
    kappa = one.model.strength if isinstance(one.model, Personal) else np.inf
    if isinstance(kappa, str) or isinstance(inner.l2, str):
        return None
    with limit_threads(one.federation.channel.work):
        problem = Evidence(one.federation, groups_of(inner, width, prepared.columns), inner.loss)
        train = one.scores["train"]
        error = float(train.loss @ train.counts / train.counts.sum())
        scale = 2 * error if problem.squared else 1.0
        l2 = np.array(fitted("Linear", "l2", inner.l2, size, inner.intercept))
        with np.errstate(divide="ignore"):
            tau = np.broadcast_to(scale / np.asarray(kappa, dtype=np.float64), size)
            omega = np.minimum(scale / (problem.n * l2), FLAT * problem.unit)
        x = torch.from_numpy(one.result.x.astype(np.float64)).to(problem.zero())[:, None]
        C = problem.at(Prior(np.array(tau), omega, scale), x).C.double().cpu().numpy()
    if problem.squared:  # residuals have used up degrees of freedom
        used = float((1 - C.diagonal() / omega).sum())
        C = C * problem.n / max(problem.n - used, 1.0)
    return np.asarray(C)
