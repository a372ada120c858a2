"""Labels, by logistic or softmax regression."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from scaffpd.errors import InputError
from scaffpd.models import Linear
from scaffpd.models.numerics import CONFIDENCE
from scaffpd.tasks.base import (
    BinRow,
    Cells,
    Matrix,
    Measure,
    ScoreColumn,
    Scores,
    Target,
    TargetColumn,
    Task,
)

# whole numbers with more different values than this are taken for amounts, not for labels
GUESSED = 5
MOST_LABELS = 50
LARGEST = 2**53  # whole numbers up to here survive JSON
# the most bins of a reliability table, and the fewest rows in each
BINS = 10
PER_BIN = 30
Z = float(ndtri((1 + CONFIDENCE) / 2))
ACCURACY = Measure(
    "accuracy",
    "share",
    name="accuracy",
    upwards=True,
    subject="",
    mean="Right of 100 held-out rows",
)
COLUMNS = {
    "accuracy": ACCURACY,
    "auc": ScoreColumn("AUC", "decimal"),
    "recall": ScoreColumn("recall", label=True),
    "precision": ScoreColumn("precision", label=True),
    "selection_rate": ScoreColumn("picked", label=True, screen=False),
    "false_positive_rate": ScoreColumn("false alarms"),
    "brier": ScoreColumn("Brier score", "decimal", screen=False),
    "mean_probability": ScoreColumn("expected", label=True),
    "base_rate": ScoreColumn("true", label=True),
    "calibration_error": ScoreColumn("calibration error", "decimal", screen=False),
}


class Classification(Task):
    """Whole numbers or texts; of two labels, the second is the one that is looked for."""

    name = "classification"
    measure = ACCURACY
    losses: ClassVar[tuple[str, ...]] = ("logistic", "softmax")
    labelled = True
    counted = True
    roles = ("label",)
    columns = COLUMNS
    adds_to = "log-odds"
    serving = ("probability of what came true, %", "more")

    explained = (
        "*AUC*: how often a row that is true ranks above one that is not. *Recall*: the share of "
        "what is true that is found. *Precision*: the share of what is picked that is true. *False "
        "alarms*: the share of what is not true that is picked. *Brier score*: the mean squared "
        "error of probabilities. *Expected* is the mean predicted probability, *true* the share "
        "that came true; *calibration error* is their mean distance in bins of similar "
        "probability, and above zero by chance where rows are few."
    )

    def suits(self, column: TargetColumn) -> bool:
        """Return whether a column has texts that are no names, or few whole numbers."""
        if column.categories:
            return len(column.categories) <= MOST_LABELS
        distinct = np.unique(column.values)
        return len(distinct) <= GUESSED and not len(_odd(distinct))

    def read(self, owner: str, column: TargetColumn) -> Target:
        distinct, places = np.unique(column.values, return_inverse=True)
        if len(distinct) > MOST_LABELS:
            some = column.categories[:2] or tuple(f"{v:g}" for v in distinct[:2])
            raise InputError(
                "too-many-labels",
                f"{owner} has {len(distinct):,} labels such as {' and '.join(some)} in its target "
                f"{column.name!r}: {MOST_LABELS} at most. Are they numbers (money, per cent), or "
                "names that could be put into groups?",
            )
        if column.categories:
            return Target(self, column.values.astype(np.int64), column.categories, column.note)
        odd = _odd(distinct)
        if len(odd):
            raise InputError(
                "labels-not-whole",
                f"{owner} has {odd[0]:g} in its target {column.name!r}; labels are whole numbers "
                'or texts, regression takes any number (data.task = "regression").',
            )
        return Target(self, places, tuple(map(int, distinct)), column.note)

    def loss(self, classes: int = 0, periods: Sequence[float] = ()) -> str:
        return "softmax" if classes > 2 else "logistic"

    def client_score(self, model: Linear, z: Matrix, y: Cells, unit: float) -> float:
        own, _, w = model.parts(np.asarray(y))
        hit = model.row_losses(z, own)[1]
        return math.nan if hit is None else float(1 - np.mean(w * (1 - hit)))

    def answers(self, model: Linear, z: Matrix) -> tuple[Cells, Matrix]:
        """Return the places of labels; a probability of each where the loss is a likelihood."""
        if model.loss == "logistic":
            z = np.concatenate([np.zeros_like(z), z], axis=1)
        if model.loss == "squared":
            return z.argmax(1), np.empty((len(z), 0))
        shares = np.exp(z - z.max(1, keepdims=True))
        return z.argmax(1), shares / shares.sum(1, keepdims=True)

    def row_scores(self, y: Cells, guess: Cells, shares: Matrix, labels: int) -> Scores:
        """Score predicted labels. With two of them, the second is the one that is looked for.

        Args:
            y: the place of the true label of every row; −1 for one that training did not have.
            guess: that of the predicted one.
            shares: the probability of every label; no columns where the model has none.
            labels: how many there are, where `shares` does not say it.

        Returns:
            accuracy; recall and precision (of more than two labels, the mean over those that occur
            and over those that are predicted), and of two labels the rates that Fairlearn knows by
            these names. With probabilities log_loss, brier (mean of (p − y)² of two labels, of
            Σ_k (p_k − [y = k])² of more), auc (of more, the mean of one against the rest), and what
            `calibration` returns.
        """
        places = y.astype(np.int64)
        k = shares.shape[1]
        two = (k or labels) == 2
        every: Sequence[int] = [1] if two else range(k or labels)
        found: Scores = {"accuracy": _mean(y == guess)}
        if two:
            found["selection_rate"] = _mean(guess == 1)
        found["recall"] = _average(_mean(guess[y == own] == own) for own in every)
        found["precision"] = _average(_mean(y[guess == own] == own) for own in every)
        if two:
            found["false_positive_rate"] = _mean(guess[y == 0] == 1)
            found["false_negative_rate"] = _mean(guess[y == 1] != 1)
        if k:
            known = places >= 0
            p = shares[known]
            own = places[known]
            # a probability that has underflowed to zero must not make the whole mean infinite
            found["log_loss"] = _mean(-np.log(np.maximum(p[np.arange(len(p)), own], 1e-300)))
            found["brier"] = _mean(((p - np.eye(k)[own]) ** 2).sum(1) / (2 if two else 1))
            found["auc"] = _average(_auc(own == one, p[:, one]) for one in every)
            found |= calibration(*believed(own, guess[known], p))
        return found

    def bins(self, y: Cells, guess: Cells, shares: Matrix) -> list[BinRow]:
        """Hold the probabilities of all rows against what came true."""
        return reliability(*believed(y, guess, shares)) if shares.shape[1] else []

    def served(self, loss: float, score: float | None) -> float:
        """Return the geometric mean of the probabilities of what came true, exp(−loss)."""
        return 100 * math.exp(-loss)


def _odd(numbers: Cells) -> Matrix:
    found = np.asarray(numbers, dtype=np.float64)
    odd: Matrix = found[(found != np.round(found)) | (np.abs(found) > LARGEST)]
    return odd


def believed(y: Cells, guess: Cells, shares: Matrix) -> tuple[Matrix, NDArray[np.bool_]]:
    """Return a probability of every row, and whether it came true.

    It is that of the second label of two, or else of the one guessed.
    """
    if shares.shape[1] == 2:
        return shares[:, 1], y == 1
    return shares[np.arange(len(guess)), guess.astype(np.int64)], y == guess


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


def reliability(p: Matrix, true: NDArray[np.bool_]) -> list[BinRow]:
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
