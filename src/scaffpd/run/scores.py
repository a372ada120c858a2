"""Scores of a model: accuracy, the rows that it picks, calibration, columns, and their effects.

All of it is about held-out rows of clients in this process. Silos elsewhere are asked for none of
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from scaffpd.algorithms.evidence import INTERCEPT
from scaffpd.data.tabular.agree import encoded_features
from scaffpd.data.tabular.columns import CATEGORY
from scaffpd.data.tabular.settings import CLASSIFICATION, SURVIVAL
from scaffpd.models import Personal
from scaffpd.run.prepare import Prepared
from scaffpd.run.record import EVERYONE, BinRow, CoefficientRow, ScoreRow
from scaffpd.run.settings.model_file import answers
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.survival import survival_rows
from scaffpd.run.train import MOST_NUMBERS, Trained
from scaffpd.study.coefficients import CoefficientTable, coefficients, level_contrast
from scaffpd.study.gains import PERSONAL
from scaffpd.training.cohort import Cohort
from scaffpd.training.metrics import CONFIDENCE

# the most bins of a reliability table, and the fewest rows in each
BINS = 10
PER_BIN = 30
MOST_EFFECTS = 300  # columns up to which effects are estimated
MOST_POINTS = 3  # models of a path that have bins and coefficients
Scores = dict[str, float | None]
Matrix = NDArray[np.float64]
Places = NDArray[np.int64]  # of labels
Outputs = Mapping[str, Sequence[Matrix]]  # of every model, client by client
Z = float(ndtri((1 + CONFIDENCE) / 2))


@dataclass(frozen=True)
class HeldOutScores:
    """All that is measured on held-out rows beside every client's loss and measure."""

    scores: Sequence[ScoreRow] = field(default=(), repr=False)
    bins: Sequence[BinRow] = field(default=(), repr=False)
    coefficients: Sequence[CoefficientRow] = field(default=(), repr=False)
    curves: Sequence[ScoreRow] = field(default=(), repr=False)


def held_out_scores(prepared: Prepared, models: Sequence[Trained]) -> HeldOutScores:
    """Score a run's linear models, personal ones among them."""
    model = prepared.model
    if not prepared.test:
        return HeldOutScores()
    parameters: dict[str, Sequence[Matrix]] = {
        one.name: [one.own(i) for i in range(len(prepared.names))] for one in models
    }
    # of a path with many points, only those that are compared
    few = {one.name for one in models if one.role or len(models) <= MOST_POINTS}
    main = {name: own for name, own in parameters.items() if name in few}
    if prepared.task == SURVIVAL:
        scores, curves = survival_rows(prepared, parameters)
        return HeldOutScores(scores, [], coefficient_rows(prepared, main), curves)
    outputs = {
        name: [
            model.outputs(x, np.asarray(X, dtype=np.float64))
            for x, (X, _) in zip(own, prepared.test, strict=True)
        ]
        for name, own in parameters.items()
    }
    return HeldOutScores(
        list(_score_rows(prepared, outputs)),
        list(_bin_rows(prepared, {name: outputs[name] for name in main})),
        coefficient_rows(prepared, main),
    )


def label_scores(y: Places, guess: Places, shares: Matrix, of: int = 2) -> Scores:
    """Score predicted labels. With two of them, the second is the one that is looked for.

    Args:
        y: the place of the true label of every row; −1 for one that training did not have.
        guess: that of the predicted one.
        shares: the probability of every label; no columns where the model has none.
        of: the number of labels, where `shares` does not say it.

    Returns:
        accuracy; recall and precision (of more than two labels, the mean over those that occur and
        over those that are predicted), and of two labels the rates that Fairlearn knows by these
        names. With probabilities log_loss, brier (mean of (p − y)² of two labels, of
        Σ_k (p_k − [y = k])² of more), auc (of more, the mean of one against the rest), and what
        `calibration` returns.
    """
    k = shares.shape[1]
    two = (k or of) == 2
    labels: Sequence[int] = [1] if two else range(k or of)
    found: Scores = {"accuracy": _mean(y == guess)}
    if two:
        found["selection_rate"] = _mean(guess == 1)
    found["recall"] = _average(_mean(guess[y == own] == own) for own in labels)
    found["precision"] = _average(_mean(y[guess == own] == own) for own in labels)
    if two:
        found["false_positive_rate"] = _mean(guess[y == 0] == 1)
        found["false_negative_rate"] = _mean(guess[y == 1] != 1)
    if k:
        known = y >= 0
        p = shares[known]
        own = y[known]
        # a probability that has underflowed to zero must not make the whole mean infinite
        found["log_loss"] = _mean(-np.log(np.maximum(p[np.arange(len(p)), own], 1e-300)))
        found["brier"] = _mean(((p - np.eye(k)[own]) ** 2).sum(1) / (2 if two else 1))
        found["auc"] = _average(_auc(own == one, p[:, one]) for one in labels)
        found |= calibration(*believed(own, guess[known], p))
    return found


def number_scores(y: Matrix, predicted: Matrix) -> Scores:
    """Score predicted numbers: RMSE, mean absolute error, R² = 1 − Σ(y − ŷ)²/Σ(y − ȳ)²."""
    error = y - predicted
    spread = float(((y - y.mean()) ** 2).sum())
    return {
        "rmse": float(np.sqrt((error**2).mean())),
        "mae": float(np.abs(error).mean()),
        "r2": 1 - float((error**2).sum()) / spread if spread > 0 else None,
    }


def believed(y: Places, guess: Places, shares: Matrix) -> tuple[Matrix, NDArray[np.bool_]]:
    """Return a probability of every row, and whether it came true.

    It is that of the second label of two, or else of the one guessed.
    """
    if shares.shape[1] == 2:
        return shares[:, 1], y == 1
    return shares[np.arange(len(guess)), guess], y == guess


def calibration(p: Matrix, true: NDArray[np.bool_]) -> Scores:
    """Hold probabilities against what came true.

    Returns the mean_probability beside its base_rate; and calibration_error, the mean over rows of
    how far their bin is off.
    """
    if not len(p):
        return {}
    bins = reliability(p, true)
    error = sum(one.rows * abs(one.mean_probability - one.base_rate) for one in bins) / len(p)
    return {
        "mean_probability": _mean(p),
        "base_rate": _mean(true),
        "calibration_error": error,
    }


def reliability(p: Matrix, true: NDArray[np.bool_], model: str = "") -> list[BinRow]:
    """Cut rows by their probability into bins of equal size, and find which share came true.

    At most `BINS` bins with at least `PER_BIN` rows each; equal probabilities share one. The
    interval is Wilson's.
    """
    order = np.argsort(p, kind="stable")
    wanted = max(1, min(BINS, len(p) // PER_BIN))
    starts = np.unique(np.searchsorted(p[order], p[order][np.arange(wanted) * len(p) // wanted]))
    found = []
    for part in np.split(order, starts[1:]):
        n = len(part)
        share = float(true[part].mean())
        centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
        found.append(
            BinRow(
                model=model,
                rows=n,
                mean_probability=float(p[part].mean()),
                base_rate=share,
                low=max(centre - half, 0.0),
                high=min(centre + half, 1.0),
            )
        )
    return found


def _mean(values: NDArray[np.float64] | NDArray[np.bool_]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _auc(y: NDArray[np.bool_], p: Matrix) -> float | None:
    """Return the chance that a row of this label ranks higher: U/(n₁ n₀), ties count half."""
    ours = p[y]
    others = np.sort(p[~y])
    pairs = len(ours) * len(others)
    if not pairs or not np.isfinite(p).all():
        return None
    # rows below, and rows below or equal: their sum counts a tie once and a lower row twice
    twice = np.searchsorted(others, ours, "left") + np.searchsorted(others, ours, "right")
    return float(twice.sum() / 2 / pairs)


def score_groups(
    y: NDArray[np.generic],
    guess: NDArray[np.generic],
    shares: Matrix | None,
    values: NDArray[np.object_],
    groups: Iterable[str],
) -> Iterator[tuple[str, int, Scores]]:
    """Score the rows of every group, and all rows last; numbers have no `shares`."""
    parts = [(group, np.flatnonzero(values == group)) for group in groups]
    labels = 0 if shares is None else 1 + int(max(y.max(initial=1), guess.max(initial=1)))
    for group, rows in [*parts, (EVERYONE, np.arange(len(y)))]:
        if shares is None:
            scores = number_scores(y[rows].astype(float), guess[rows].astype(float))
        else:
            own = y[rows].astype(np.int64), guess[rows].astype(np.int64)
            scores = label_scores(*own, shares[rows], labels)
        yield group, len(rows), scores


def _truth(prepared: Prepared, i: int) -> NDArray[np.generic]:
    y = prepared.model.parts(np.asarray(prepared.test[i][1]))[0]
    return y if prepared.task == CLASSIFICATION else y * prepared.unit + prepared.centre


def _answers(prepared: Prepared, z: Matrix) -> tuple[NDArray[np.generic], Matrix | None]:
    labels = prepared.task == CLASSIFICATION
    guess, shares = answers(prepared.model, z, labels)
    return (guess, shares) if labels else (guess * prepared.unit + prepared.centre, None)


def _score_rows(prepared: Prepared, outputs: Outputs) -> Iterator[ScoreRow]:
    """Yield a row for every model and client, and for every value of every column of groups."""
    y = np.concatenate([_truth(prepared, i) for i in range(len(prepared.names))])
    sizes = [len(own) for _, own in prepared.test]
    exposure = np.concatenate([prepared.model.parts(own)[1] for _, own in prepared.test])
    owner = np.repeat(np.array(prepared.names, dtype=object), sizes)
    cuts = {"client": owner} | {by: np.concatenate(parts) for by, parts in prepared.groups.items()}
    for name, z in outputs.items():
        guess, shares = _answers(prepared, np.concatenate(z))
        if shares is None:
            guess = guess.astype(np.float64) * exposure
        for by, values in cuts.items():
            order = list(dict.fromkeys(values.tolist()))
            groups = order if by == "client" else sorted(order)
            for group, rows, found in score_groups(y, guess, shares, values, groups):
                yield ScoreRow(model=name, by=by, group=group, rows=rows, values=found)


def _bin_rows(prepared: Prepared, outputs: Outputs) -> Iterator[BinRow]:
    """Yield the reliability of every model's probabilities over all rows."""
    truth = np.concatenate([_truth(prepared, i) for i in range(len(prepared.names))])
    for name, own in outputs.items():
        guess, shares = _answers(prepared, np.concatenate(own))
        if shares is not None and shares.shape[1]:
            pair = believed(truth.astype(np.int64), guess.astype(np.int64), shares)
            yield from reliability(*pair, name)


def coefficient_rows(
    prepared: Prepared, parameters: Mapping[str, Sequence[Matrix]]
) -> list[CoefficientRow]:
    """Make a row for every encoded column (and label, of more than two).

    What one deviation adds to the output is the coefficient times the column's standard deviation
    over training rows; for numbers in units of the target, for labels in log-odds (in the outputs
    of least squares). Personal models have their least and largest.
    """
    X = np.concatenate([np.asarray(X, dtype=np.float64) for X, _ in prepared.train])
    scale = X.std(0)[:, None] * prepared.unit
    tables = {}
    for name, own in parameters.items():
        models = own if name == PERSONAL else own[:1]
        shaped = [prepared.model.reshape(x, X.shape[1])[0] * scale for x in models]
        tables[name] = np.stack(shaped)
    many = next(iter(tables.values())).shape[2] > 1
    rows = []
    for j, column in enumerate(prepared.columns):
        for k, label in enumerate(prepared.labels if many else ("",)):
            values: dict[str, float] = {}
            for name, table in tables.items():
                added = table[:, j, k]
                if name == PERSONAL:
                    values[f"{name}_low"] = float(added.min())
                    values[f"{name}_high"] = float(added.max())
                else:
                    values[name] = float(added[0])
            rows.append(CoefficientRow(column=column, label=label, values=values))
    return rows


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
        or prepared.numbers > MOST_NUMBERS
    ):
        return None
    encoded = encoded_features(schema)
    lines = [j for j, feature in enumerate(encoded) if not feature.step]
    if len(lines) > MOST_EFFECTS:
        return None
    categorical = {column["name"] for column in schema["columns"] if column["kind"] == CATEGORY}
    groups = [encoded[j].group for j in lines]
    named = prepared.differing(config.model.personal)
    places = {j: k for k, j in enumerate(lines)} | {INTERCEPT: INTERCEPT}
    last = list(model.beyond)
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
