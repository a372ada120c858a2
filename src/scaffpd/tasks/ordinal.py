"""Categories in an order, such as mild, fair and poor, by proportional odds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scaffpd.models import Linear
from scaffpd.tasks.base import Cells, Matrix, ScoreColumn, Scores, TargetColumn
from scaffpd.tasks.classification import ACCURACY, Classification, believed, calibration

SAID = (
    "Proportional odds: every column multiplies the odds of a higher category by the same number, "
    "whichever it is, and clients share the distances of cut points."
)
COLUMNS = {
    "accuracy": ACCURACY,
    "mae": ScoreColumn("categories off", "decimal"),
    "rps": ScoreColumn("RPS", "decimal"),
    "log_loss": ScoreColumn("log score", "decimal"),
    "mean_probability": ScoreColumn("expected", screen=False),
    "base_rate": ScoreColumn("true", screen=False),
}


class OrderedCategories(Classification):
    """Whole numbers in their order, or texts in the one that is given; never read so unasked."""

    name = "ordinal"
    losses = ("ordinal",)
    ordered = True
    counted = False  # a person is several rows of its loss
    columns = COLUMNS
    adds_to = "the log-odds of a higher category"
    ratios = "odds"
    explained = (
        "*Categories off*: the mean number of categories between the predicted and the true one. "
        "*RPS*: the ranked probability score, the mean squared error of the probabilities to be "
        "above each category, added up. *Log score*: −log of the probability of what came true. "
        "*Expected* is the mean probability of the predicted category, *true* how often it came."
    )

    def suits(self, column: TargetColumn) -> bool:
        return False

    def loss(self, classes: int = 0, periods: Sequence[float] = ()) -> str:
        return "ordinal"

    def said(self, periods: Sequence[float]) -> list[str]:
        return [SAID]

    def answers(self, model: Linear, z: Matrix) -> tuple[Cells, Matrix]:
        """Return the most probable categories, and the probability of each."""
        shares = np.exp(z)
        return z.argmax(1), shares / shares.sum(1, keepdims=True)

    def row_scores(self, y: Cells, guess: Cells, shares: Matrix, labels: int) -> Scores:
        """Return accuracy, mean |category − predicted|, mean −log P(y), the ranked probability
        score Σ_k (P(y > k) − [y > k])², and what `calibration` does.
        """
        known = y.astype(np.int64) >= 0
        own, p, hit = y[known].astype(np.int64), shares[known], guess[known].astype(np.int64)
        if not len(own):
            return {"accuracy": 0.0 if len(y) else None}
        above = 1 - p.cumsum(1)[:, :-1]
        seen = own[:, None] > np.arange(p.shape[1] - 1)
        return {
            "accuracy": float(np.mean(y == guess)),
            "mae": float(np.abs(own - hit).mean()),
            "rps": float(((above - seen) ** 2).sum(1).mean()),
            "log_loss": float(-np.log(np.maximum(p[np.arange(len(p)), own], 1e-300)).mean()),
            **calibration(*believed(own, hit, p)),
        }
