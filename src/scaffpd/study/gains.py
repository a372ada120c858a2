r"""`Joining`: what every client gains from training with the others, with intervals, in words.

All models answer the same held-out rows, so gains are paired: the mean of ℓ_j(alone) − ℓ_j(model)
over rows j, with Student's t interval; over splits, it is corrected for rows that splits share
(Nadeau and Bengio 2003): sd·√(1/K + n₂/n₁) with n₂ rows held out and n₁ trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.numbers import plural
from scaffpd.study.choosing import FOLDS
from scaffpd.training.metrics import (
    NO,
    NOISE,
    YES,
    HeldOutMoments,
    PairedDifference,
    RelativeGain,
    SplitTables,
    Weights,
    a_fifth,
    every,
    worst_fifth,
)

Array = NDArray[np.float64]
CONSTANT = "constant"
ALONE = "alone"
AVERAGE = "average"
FAIR = "fair"
PERSONAL = "personal"
MODELS = (CONSTANT, ALONE, AVERAGE, FAIR, PERSONAL)
CALLED = {
    AVERAGE: "one average model",
    FAIR: "one fair model",
    PERSONAL: "personal, fair models",
    ALONE: "alone",
}


@dataclass(frozen=True)
class Joining:
    """Gain of every client from training with the others.

    Attributes:
        names: the clients.
        models: those compared, of constant, alone, average, fair and personal.
        loss: mean held-out loss without a regulariser, (models × clients).
        score: accuracy or, for regression, root mean squared error, (models × clients).
        measure: "accuracy" or "rmse".
        rows: (trained on, held out) of every client.
        evidence: what intervals of losses are made from.
        errors: the same of the share of wrong labels or, for regression, of root mean squared
            errors.
        ridges: κ_i that every client has chosen alone.
        strength: κ of the personal models.
        splits: how many splits this is the mean of.
        word: what a client is called.
        own: the shared model first, then the personal ones, client by client, (1 + clients × d) on
            the first split; `None` where silos keep theirs.
        without: clients with too few rows for folds, which train with the others and are not
            compared.
    """

    names: tuple[str, ...]
    models: tuple[str, ...]
    loss: Array = field(repr=False)
    score: Array = field(repr=False)
    measure: str
    rows: tuple[tuple[int, int], ...] = field(repr=False)
    evidence: HeldOutMoments | SplitTables = field(repr=False)
    errors: HeldOutMoments | SplitTables = field(repr=False)
    ridges: tuple[float, ...] = field(repr=False)
    strength: float
    splits: int = 1
    word: str = "client"
    own: Array | None = field(default=None, repr=False)
    without: tuple[str, ...] = ()

    @classmethod
    def mean(cls, several: Sequence[Joining]) -> Joining:
        """Take the mean over random splits of the same clients' rows; intervals are over splits."""
        first = several[0]
        if len(several) < 2:
            raise InputError("one-split", "A mean over splits needs at least two of them.")
        if any(one.names != first.names for one in several):
            raise InputError(
                "splits-differ",
                "another split leaves other clients rows enough for folds: take one split.",
            )
        # n₂/n₁ of Nadeau and Bengio: splits share rows, which a plain interval does not know
        overlap = sum(held for _, held in first.rows) / sum(trained for trained, _ in first.rows)
        evidence, errors = (
            SplitTables([part for part in parts if isinstance(part, HeldOutMoments)], overlap)
            for parts in ([one.evidence for one in several], [one.errors for one in several])
        )
        return replace(
            first,
            loss=evidence.means,
            score=np.mean([one.score for one in several], axis=0),
            evidence=evidence,
            errors=errors,
            splits=len(several),
        )

    def gain(self, model: str, over: str = ALONE, of: Weights | None = None) -> RelativeGain:
        """Return the gain over all clients, each counting the same; `of` makes other weights from a
        model's losses.
        """
        return RelativeGain.of(self.evidence.difference(*self._places(over, model), of or every))

    def change(self, model: str, over: str = ALONE, of: Weights | None = None) -> PairedDifference:
        """Return the gain in accuracy (as a share) or error (in units of the target); better is
        positive in either.
        """
        return self.errors.difference(*self._places(over, model), of or every)

    def _places(self, one: str, other: str) -> tuple[int, int]:
        return self.models.index(one), self.models.index(other)

    def gains(self, model: str, over: str = ALONE) -> list[RelativeGain]:
        """Return the gain of every client."""
        return [self.gain(model, over, self._only(i)) for i in range(len(self.names))]

    def _only(self, i: int) -> Weights:
        """Return weights that count one client alone."""
        one = np.eye(len(self.names))[i]
        return lambda _: one

    def losers(self, model: str) -> int:
        """Count the clients that a model costs clearly, against training alone."""
        return sum(gain.pays == NO for gain in self.gains(model))

    def better(self, model: str, than: str) -> bool:
        """Return whether its loss is clearly lower in the mean or for the worst-served fifth, and
        higher in neither.
        """
        found = {self.gain(model, than, of).pays for of in (every, worst_fifth)}
        return YES in found and NO not in found

    @cached_property
    def recommendation(self) -> str:
        """Alone, average, fair or personal: the simplest that no other is clearly better than.

        A model that clearly costs fewer clients something is better too, unless it is clearly worse
        for all.
        """
        chosen = ALONE
        for model in (m for m in (AVERAGE, FAIR, PERSONAL) if m in self.models):
            spares = chosen != ALONE and self.losers(model) < self.losers(chosen)
            worse = NO in {self.gain(model, chosen, of).pays for of in (every, worst_fifth)}
            if self.better(model, chosen) or (spares and not worse):
                chosen = model
        return chosen

    @property
    def sentence(self) -> str:
        """Describe the recommendation and the gains, with intervals."""
        best = self.recommendation
        if best == ALONE:
            gain = self.gain(self.shown)
            start = "Joining brings no clear gain" if gain.pays == NOISE else "Stay alone"
            whose = f"with {CALLED[self.shown]} the loss"
            return f"{start}: {whose} is {gain.than(ALONE)} ({gain.range})."
        gain = self.gain(best)
        whose = "the loss"
        if gain.pays != YES:
            gain = self.gain(best, of=worst_fifth)
            whose = f"the loss of {self._fifth}"
        start = "Keep one average model" if best == AVERAGE else f"Join with {CALLED[best]}"
        return f"{start}: {whose} is {gain.than(ALONE)} ({gain.range}); {self._who(best)}."

    @property
    def details(self) -> str:
        """The same against one average model."""
        shown = self.shown if self.shown != AVERAGE else self.models[-1]
        mean = self.gain(shown, AVERAGE)
        worst = self.gain(shown, AVERAGE, worst_fifth)
        first = f"On held-out rows, {self._who(shown)}. " if self.recommendation == ALONE else ""
        alone, average = (
            self.change(shown, over).in_units(self.measure, CALLED[over])
            for over in (ALONE, AVERAGE)
        )
        name = "accuracy" if self.measure == "accuracy" else "error"
        return (
            f"{first}Against one average model, the mean loss with {CALLED[shown]} is "
            f"{mean.words} ({mean.range}); "
            f"for {self._fifth} it is {worst.words} ({worst.range}). Mean {name} is {alone}, and "
            f"{average}."
        )

    @property
    def caution(self) -> str:
        """Name the clients that have too few rows to be compared; empty where there are none."""
        if not self.without:
            return ""
        names = ", ".join(self.without[:5])
        more = f" and {len(self.without) - 5} more" if self.without[5:] else ""
        return (
            f"What joining brings is not known at {names}{more}: with fewer than {FOLDS} rows to "
            f"train on, too few for folds, a {self.word} only trains with the others."
        )

    @property
    def shown(self) -> str:
        """The model that sentences are about: the one recommended, else the last."""
        return self.recommendation if self.recommendation != ALONE else self.models[-1]

    @property
    def _fifth(self) -> str:
        k = a_fifth(len(self.names))
        return f"the worst-served {self.word if k == 1 else f'fifth of {plural(self.word)}'}"

    def _who(self, model: str) -> str:
        """Say who gains, such as "4 of 12 clients clearly gain, none clearly loses"."""
        found = [gain.pays for gain in self.gains(model)]
        gain = found.count(YES)
        lose = found.count(NO)
        who = f"of {len(found)} {plural(self.word)}"
        gaining = (
            f"{gain} {who} clearly gain{'s' if gain == 1 else ''}"
            if gain
            else f"none {who} clearly gains"
        )
        return f"{gaining}, {lose or 'none'} clearly lose{'' if lose > 1 else 's'}"

    def table(self) -> list[dict[str, str | float]]:
        """Return a row for every client and model: loss, score, gains over alone and the average.

        Cells are empty where a model would be compared with itself, or nothing is known.
        """
        rows = []
        for i, name in enumerate(self.names):
            for k, model in enumerate(self.models):
                row: dict[str, str | float] = {
                    "client": name,
                    "model": model,
                    "train_rows": self.rows[i][0],
                    "test_rows": self.rows[i][1],
                    "test_loss": float(self.loss[k, i]),
                    f"test_{self.measure}": float(self.score[k, i]),
                }
                for over in (ALONE, AVERAGE):
                    gain = self.gain(model, over, self._only(i))
                    for end, value in zip(("", "_low", "_high"), gain, strict=True):
                        known = over != model and math.isfinite(value)
                        row[f"gain_over_{over}{end}"] = value if known else ""
                row["pays"] = "" if model == ALONE else self.gain(model, ALONE, self._only(i)).pays
                rows.append(row)
        return rows

    @property
    def method(self) -> str:
        """Describe how intervals were computed."""
        if self.splits > 1:
            how = (
                f"Student's t over {self.splits} random splits, corrected for the rows that "
                "splits share, at 95 %"
            )
        else:
            block = getattr(self.evidence, "block", 1)
            rows = "held-out rows" if block == 1 else f"blocks of {block} held-out rows"
            how = f"Student's t over {rows}, paired, at 95 %"
        return f"{how}; half of the rows name the worst-served, the other half judge them"

    def __str__(self) -> str:
        return " ".join(filter(None, (self.sentence, self.details)))
