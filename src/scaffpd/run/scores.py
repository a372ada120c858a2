"""Scores of a model: accuracy, the rows that it picks, calibration, and the features that it uses.

All of it is about held-out rows of clients in this process. Silos elsewhere are asked for none of it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logsumexp, ndtri

from scaffpd.algorithms import Fair
from scaffpd.data.silos import fold_numbers
from scaffpd.data.tabular.agree import CLASSIFICATION
from scaffpd.errors import InputError
from scaffpd.models import Linear, Personal
from scaffpd.numbers import several
from scaffpd.objectives import Average
from scaffpd.run import EVERYONE
from scaffpd.run.prepare import Prepared
from scaffpd.run.settings.model_file import answers
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.train import Trained, contestants
from scaffpd.study.folds import FOLDS, Folds, answered
from scaffpd.study.gains import Joining
from scaffpd.training.cohort import Cohort
from scaffpd.training.loop import train
from scaffpd.training.metrics import CONFIDENCE

PERSONAL = "personal"
RECALIBRATED = "recalibrated"
# the most bins of a reliability table, and the fewest rows in each
BINS = 10
PER_BIN = 30
MOST_POINTS = 3  # models of a path that bins and single rows are kept of
Scores = dict[str, Any]
Rows = list[dict[str, Any]]
Matrix = NDArray[np.float64]
Z = float(ndtri((1 + CONFIDENCE) / 2))


def label_scores(y: NDArray[Any], guess: NDArray[Any], shares: Matrix, of: int = 2) -> Scores:
    """Score predicted labels. With two of them, the second is the one that is looked for.

    Args:
        y: the place of the true label of every row; −1 for one that training did not have.
        guess: that of the predicted one.
        shares: the probability of every label; no columns where the model has none.
        of: the number of labels, where `shares` does not say it.

    Returns:
        accuracy; recall and precision (of more than two labels, the mean over those that occur and over those that are
        predicted), and of two labels the rates that Fairlearn knows by these names. With probabilities log_loss, brier
        (mean of (p − y)² of two labels, of Σ_k (p_k − [y = k])² of more), auc (of more, the mean of one against the
        rest), and what `calibration` returns.
    """
    k = shares.shape[1]
    found: Scores = {"accuracy": _mean(y == guess)}
    labels: Sequence[int] = range(k or of)
    if two := len(labels) == 2:
        labels = [1]
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
        found["log_loss"] = _mean(-np.log(np.maximum(p[np.arange(len(p)), own], 1e-300)))
        found["brier"] = _mean(((p - np.eye(k)[own]) ** 2).sum(1) / (2 if two else 1))
        found["auc"] = _average(_auc(own == one, p[:, one]) for one in labels)
        found |= calibration(*believed(own, guess[known], p))
    return found


def believed(
    y: NDArray[Any], guess: NDArray[Any], shares: Matrix
) -> tuple[Matrix, NDArray[np.bool_]]:
    """Return a probability of every row, of the second label of two or else of the one guessed; and if it came true."""
    if shares.shape[1] == 2:
        return shares[:, 1], y == 1
    return shares[np.arange(len(guess)), guess], y == guess


def calibration(p: Matrix, true: NDArray[np.bool_]) -> Scores:
    """Hold probabilities against what came true.

    Returns the mean_probability beside its base_rate; their difference, calibration_gap, with its 95 % interval (of the
    mean of p − [true] over rows); and calibration_error, the mean over rows of how far their bin is off.
    """
    if not len(p):
        gaps = (f"calibration_{of}" for of in ("gap", "gap_low", "gap_high", "error"))
        return dict.fromkeys(("mean_probability", "base_rate", *gaps))
    off = p - true
    half = Z * float(off.std(ddof=1)) / math.sqrt(len(off)) if len(off) > 1 else math.inf
    gap = float(off.mean())
    bins = reliability(p, true)
    return {
        "mean_probability": _mean(p),
        "base_rate": _mean(true),
        "calibration_gap": gap,
        "calibration_gap_low": max(gap - half, -1.0),
        "calibration_gap_high": min(gap + half, 1.0),
        "calibration_error": sum(
            b["rows"] * abs(b["mean_probability"] - b["base_rate"]) for b in bins
        )
        / len(p),
    }


def reliability(p: Matrix, true: NDArray[np.bool_]) -> Rows:
    """Cut rows by their probability into bins of equal size, and tell which share of each came true.

    At most `BINS` bins with at least `PER_BIN` rows each; equal probabilities share one. The interval is Wilson's.
    """
    order = np.argsort(p, kind="stable")
    wanted = max(1, min(BINS, len(p) // PER_BIN))
    found = Rows()
    starts = np.unique(np.searchsorted(p[order], p[order][np.arange(wanted) * len(p) // wanted]))
    for k, part in enumerate(np.split(order, starts[1:])):
        n = len(part)
        share = float(true[part].mean())
        centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
        found.append(
            {
                "bin": k + 1,
                "rows": n,
                "mean_probability": float(p[part].mean()),
                "base_rate": share,
                "base_rate_low": max(centre - half, 0.0),
                "base_rate_high": min(centre + half, 1.0),
            }
        )
    return found


def number_scores(y: Matrix, predicted: Matrix) -> Scores:
    """Score predicted numbers: root mean squared and mean absolute error, R² = 1 − Σ(y − ŷ)²/Σ(y − ȳ)², both means."""
    error = y - predicted
    spread = float(((y - y.mean()) ** 2).sum())
    r2 = 1 - float((error**2).sum()) / spread if spread > 0 else None
    means = {"mean_prediction": float(predicted.mean()), "mean_truth": float(y.mean())}
    return {
        "rmse": float(np.sqrt((error**2).mean())),
        "mae": float(np.abs(error).mean()),
        "r2": r2,
        **means,
    }


def _mean(values: NDArray[Any]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _auc(y: NDArray[Any], p: Matrix) -> float | None:
    """Return the chance that a row of this label has the higher probability: U/(n₁ n₀), ties count half."""
    ours = p[y]
    others = np.sort(p[~y])
    below = np.searchsorted(others, ours, "left") + np.searchsorted(
        others, ours, "right"
    )  # twice as many as lower
    return (
        float(below.sum() / 2 / pairs)
        if (pairs := len(ours) * len(others)) and np.isfinite(p).all()
        else None
    )


@dataclass(frozen=True)
class HeldOutScores:
    """All that is measured on held-out rows beside clients.csv: the tables, and the losses of single rows."""

    scores: Rows = field(repr=False)  # by model, and by client or group: scores.csv
    bins: Rows = field(repr=False)  # by model and client: reliability.csv
    coefficients: Rows = field(repr=False)  # by encoded column: coefficients.csv
    rows: bytes = field(repr=False)  # losses and errors of single rows, by model: held_out.npz
    calibrations: Mapping[str, Mapping[str, list[float]]] = field(
        default_factory=dict
    )  # by model and client


def held_out_scores(
    config: RunConfig, prepared: Prepared, models: Sequence[Trained], joining: Joining | str = ""
) -> HeldOutScores | None:
    """Score a run's linear models, personal ones among them; `None` without held-out rows or for networks."""
    model = prepared.model
    if not prepared.test or not isinstance(model, Linear):
        return None
    parameters: dict[str, Sequence[Any]] = {
        one.name: [one.result.x] * len(prepared.names) for one in models
    }
    if isinstance(joining, Joining) and joining.own is not None:
        parameters[PERSONAL] = list(joining.own[1:])
    main = [one.name for one in models if one.role or len(models) <= MOST_POINTS]
    outputs = {
        name: [
            model.outputs(x, np.asarray(X, dtype=np.float64))
            for x, (X, _) in zip(own, prepared.test, strict=True)
        ]
        for name, own in parameters.items()
    }
    found = (
        calibrated(config, prepared, joining)
        if config.training.recalibrate and len(models) < 3
        else {}
    )
    for name, own in found.items():
        outputs[f"{name} {RECALIBRATED}"] = [
            adjusted(z, own[client])
            for z, client in zip(outputs[name], prepared.names, strict=True)
        ]
    few = {
        name: z
        for name, z in outputs.items()
        if name in main or name not in parameters or name == PERSONAL
    }
    return HeldOutScores(
        list(_score_rows(prepared, outputs)),
        list(_bin_rows(prepared, few)),
        coefficient_rows(prepared, {name: own for name, own in parameters.items() if name in few}),
        _single_rows(prepared, few),
        found,
    )


def _truth(prepared: Prepared, i: int) -> NDArray[Any]:
    y = np.asarray(prepared.test[i][1])
    return y if prepared.task == CLASSIFICATION else y * prepared.unit + prepared.centre


def _answers(prepared: Prepared, z: Matrix) -> tuple[NDArray[Any], Matrix | None]:
    guess, shares = answers(prepared.model, z, prepared.task == CLASSIFICATION)
    return (
        (guess, shares)
        if prepared.task == CLASSIFICATION
        else (guess * prepared.unit + prepared.centre, None)
    )


def _score_rows(
    prepared: Prepared, outputs: Mapping[str, Sequence[Matrix]]
) -> Iterable[dict[str, Any]]:
    """Yield a row for every model and client, and for every value of every column of groups; all rows last."""
    y = np.concatenate([_truth(prepared, i) for i in range(len(prepared.names))])
    owner = np.repeat(
        np.array(prepared.names, dtype=object), [len(own) for _, own in prepared.test]
    )
    cuts = {"client": owner} | {by: np.concatenate(parts) for by, parts in prepared.groups.items()}
    for name, z in outputs.items():
        guess, shares = _answers(prepared, np.concatenate(z))
        for by, values in cuts.items():
            order = dict.fromkeys(values.tolist())
            for group, own in by_group(
                y, guess, shares, values, order if by == "client" else sorted(order)
            ):
                yield {"model": name, "by": by, "group": group} | own


def by_group(
    y: NDArray[Any],
    guess: NDArray[Any],
    shares: Matrix | None,
    values: NDArray[Any],
    groups: Iterable[str],
) -> Iterable[tuple[str, Scores]]:
    """Score the rows of every group, and all rows last; numbers have no `shares`."""
    parts = [
        *((group, np.flatnonzero(values == group)) for group in groups),
        (EVERYONE, np.arange(len(y))),
    ]
    of = 0 if shares is None else 1 + int(max(y.max(initial=1), guess.max(initial=1)))
    for group, rows in parts:
        pair = y[rows], guess[rows]
        scores = number_scores(*pair) if shares is None else label_scores(*pair, shares[rows], of)
        yield group, {"rows": len(rows)} | scores


def _bin_rows(
    prepared: Prepared, outputs: Mapping[str, Sequence[Matrix]]
) -> Iterable[dict[str, Any]]:
    """Yield the reliability of every model's probabilities, over all rows and client by client."""
    for name, own in outputs.items():
        pairs = []
        for i, z in enumerate(own):
            guess, shares = _answers(prepared, z)
            if shares is None or not shares.shape[1]:
                return
            pairs.append(believed(_truth(prepared, i), guess, shares))
        whole = np.concatenate([p for p, _ in pairs]), np.concatenate([true for _, true in pairs])
        for client, pair in zip((EVERYONE, *prepared.names), (whole, *pairs), strict=True):
            yield from ({"model": name, "client": client, **row} for row in reliability(*pair))


def coefficient_rows(prepared: Prepared, parameters: Mapping[str, Sequence[Any]]) -> Rows:
    """Make a row for every encoded column (and label, of more than two): what one deviation adds to the output.

    That is the coefficient times the column's standard deviation over training rows; for numbers in units of the
    target, for labels in log-odds (in the outputs of least squares). Personal models have their least and largest.
    """
    X = np.concatenate([np.asarray(X, dtype=np.float64) for X, _ in prepared.train])
    scale = X.std(0)[:, None] * prepared.unit
    tables = {
        name: np.stack(
            [
                prepared.model.reshape(x, X.shape[1])[0] * scale
                for x in (own if name == PERSONAL else own[:1])
            ]
        )
        for name, own in parameters.items()
    }
    labels = prepared.labels if len(next(iter(tables.values()))[0][0]) > 1 else ("",)
    rows = []
    for j, column in enumerate(prepared.columns):
        for k, label in enumerate(labels):
            row: dict[str, Any] = {"column": column, "label": label}
            for name, table in tables.items():
                own = table[:, j, k]
                row |= (
                    {name: own[0]}
                    if name != PERSONAL
                    else {f"{name}_low": own.min(), f"{name}_high": own.max()}
                )
            rows.append({key: float(v) if not isinstance(v, str) else v for key, v in row.items()})
    return rows


def _single_rows(prepared: Prepared, outputs: Mapping[str, Sequence[Matrix]]) -> bytes:
    """Write losses of single rows (and 1 for a wrong label) by model, and what tells these rows from others."""
    losses: dict[str, Any] = {}
    for name, own in outputs.items():
        parts = [
            answered(prepared.model, z, np.asarray(y))
            for z, (_, y) in zip(own, prepared.test, strict=True)
        ]
        losses[f"loss {name}"] = np.concatenate([loss for loss, _ in parts])
        if parts[0][1] is not None:
            losses[f"wrong {name}"] = np.concatenate(
                [1 - hit for _, hit in parts if hit is not None]
            )
    made = io.BytesIO()
    counts = np.array([len(y) for _, y in prepared.test])
    np.savez_compressed(
        made, counts=counts, unit=prepared.unit, rows=np.array(prepared.held), **losses
    )
    return made.getvalue()


def calibrated(
    config: RunConfig, prepared: Prepared, joining: Joining | str = ""
) -> dict[str, dict[str, list[float]]]:
    """Fit slope and intercept of every client's outputs, for every model, to rows that were left out of its training.

    Folds cut each client's training rows; all models are trained without a fold, and answer it. A client with fewer
    rows than folds is in all training, and its outputs stay.
    """
    seed = config.training.seed
    pairs = zip(prepared.names, prepared.train, strict=True)
    numbers = [
        fold_numbers(name, y, FOLDS, seed) if len(y) >= FOLDS else np.full(len(y), -1)
        for name, (_, y) in pairs
    ]
    folds = Folds(list(prepared.train), list(prepared.names), prepared.model, numbers, FOLDS)
    left = [folds.rows(k, True) for k in range(FOLDS)]
    parts = [
        _left_out(config, prepared, joining, folds.rows(k, False), left[k]) for k in range(FOLDS)
    ]
    y = [
        np.concatenate([np.asarray(labels) for _, labels in own]) for own in zip(*left, strict=True)
    ]
    found = {}
    for name in parts[0]:
        z = [np.concatenate(own) for own in zip(*(part[name] for part in parts), strict=True)]
        found[name] = dict(zip(prepared.names, map(slope_and_intercept, z, y), strict=True))
    return found


def _left_out(
    config: RunConfig,
    prepared: Prepared,
    joining: Joining | str,
    rest: Sequence[Any],
    left: Sequence[Any],
) -> dict[str, list[Matrix]]:
    """Train every model on the rest, and return its outputs for the rows left out, client by client."""
    fitted: dict[str, Sequence[Any]] = {}
    for name, _, method in contestants(config):
        fitted[name] = [_fitted(config, prepared, prepared.model, method, rest).x] * len(left)
    if isinstance(joining, Joining) and joining.own is not None:
        own = Personal(prepared.model, joining.strength)
        fitted[PERSONAL] = _fitted(
            config, prepared, own, Fair(config.goal or Average()), rest
        ).personal
    return {
        name: [
            prepared.model.outputs(x, np.asarray(X, dtype=np.float64))
            for x, (X, _) in zip(xs, left, strict=True)
        ]
        for name, xs in fitted.items()
    }


def _fitted(config: RunConfig, prepared: Prepared, model: Any, method: Any, rows: Any) -> Any:
    cohort = Cohort(rows, model, prepared.names, device=config.training.device)
    training = config.training
    return train(
        method, cohort, training.rounds, training.tol or None, training.seed, progress=False
    ).uninterrupted()


def slope_and_intercept(z: Matrix, y: NDArray[Any]) -> list[float]:
    """Return b and a of the outputs b z + a that give the labels the largest likelihood (Platt's scaling).

    Normal priors with deviation 1 hold b at 1 and a at 0, so that few rows change little, and one label alone is no
    reason for certainty: min Σ_j ℓ(b z_j + a, y_j) + ((b − 1)² + ‖a‖²)/2.
    """
    from scipy.optimize import minimize  # slow to import

    one = z.shape[1] == 1

    def value(v: Matrix) -> tuple[float, Matrix]:
        w = v[0] * z + v[1:]
        if one:
            loss = np.logaddexp(0, w[:, 0]) - y * w[:, 0]
            slope = expit(w) - y[:, None]
        else:
            total = logsumexp(w, axis=1, keepdims=True)
            loss = total[:, 0] - w[np.arange(len(y)), y]
            slope = np.exp(w - total) - np.eye(z.shape[1])[y]
        away = v - start
        return float(loss.sum() + away @ away / 2), np.concatenate(
            [[(slope * z).sum()], slope.sum(0)]
        ) + away

    start = np.concatenate([[1.0], np.zeros(z.shape[1])])
    return [
        float(v) for v in minimize(value, start, jac=True, method="BFGS", options={"gtol": 1e-8}).x
    ]


def adjusted(z: Matrix, parameters: Sequence[float]) -> Matrix:
    """Return b z + a."""
    made: Matrix = parameters[0] * z + np.asarray(parameters[1:])
    return made


def check_recalibration(config: RunConfig, prepared: Prepared) -> Prepared:
    """Refuse to recalibrate what has no probabilities, or what folds would give away; name clients with few rows."""
    if not config.training.recalibrate:
        return prepared
    if (
        prepared.task != CLASSIFICATION
        or not isinstance(prepared.model, Linear)
        or prepared.model.loss == "squared"
    ):
        raise InputError(
            "recalibrate-probabilities-labels",
            "--recalibrate is for the probabilities of labels, of logistic and softmax regression.",
        )
    if config.privacy is not None:
        raise InputError(
            "recalibrate-trains-folds",
            "--recalibrate trains on folds, which would spend ε: leave it or --epsilon out.",
        )
    few = sum(len(y) < FOLDS for _, y in prepared.train)
    said = (
        f"{several(few, 'client')} with too few training rows for {FOLDS} folds not recalibrated."
    )
    return replace(prepared, remarks=(*prepared.remarks, said)) if few else prepared
