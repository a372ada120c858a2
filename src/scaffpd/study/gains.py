r"""`Joining`: what every client gains from training with the others, with intervals, in words.

All models answer the same held-out rows, so gains are paired: the mean of ℓ_j(alone) − ℓ_j(model)
over rows j, with Student's t interval; over splits, it is corrected for rows that splits share
(Nadeau and Bengio 2003): sd·√(1/K + n₂/n₁) with n₂ rows held out and n₁ trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from scaffpd.algorithms.evidence import Strengths
from scaffpd.errors import InputError
from scaffpd.numbers import plural
from scaffpd.tasks.base import Task
from scaffpd.training.loop import Result
from scaffpd.training.metrics import (
    NO,
    NOISE,
    SMALL,
    YES,
    Array,
    HeldOutMoments,
    RelativeGain,
    SplitTables,
    Weights,
    a_fifth,
    clearly,
    every,
    known_mean,
    worst_fifth,
)

CONSTANT = "constant"
ALONE = "alone"
AVERAGE = "average"
FAIR = "fair"
PERSONAL = "personal"
MODELS = (CONSTANT, ALONE, AVERAGE, FAIR, PERSONAL)
CALLED = {
    AVERAGE: "one average model",
    FAIR: "one fair model",
    PERSONAL: "personal models",
    ALONE: "alone",
    CONSTANT: "a constant answer",
}
STRICT = 1.31  # a 99 % interval in units of one of 95 %
SIMPLEST = "the simplest that nothing clearly beats"
# how a recommendation begins, but for joint models
USE = {CONSTANT: "These columns do not predict the {goal}", ALONE: "Let every {word} train alone"}


@dataclass(frozen=True)
class Joining:
    """Gain of every client from training with the others.

    Attributes:
        names: the clients.
        models: those compared, of constant, alone, average, fair and personal.
        loss: mean held-out loss without a regulariser, (models × clients).
        score: by the measure of the task, (models × clients).
        task: what is predicted; of times to an event the loss is the share of wrong pairs.
        rows: (trained on, held out) of every client.
        evidence: what intervals of losses are made from.
        splits: how many splits this is the mean of.
        word: what a client is called.
        results: of the training of average, fair and personal, on the first split.
        parameters: of every model, (1 + clients × d) on the first split: for a client that was not
            trained on, then client by client.
        strengths: of the personal models, where the evidence has set them.
        certificates: the proven gap of every model on the first split, of alone the largest.
    """

    names: tuple[str, ...]
    models: tuple[str, ...]
    loss: Array = field(repr=False)
    score: Array = field(repr=False)
    task: Task
    rows: tuple[tuple[int, int], ...] = field(repr=False)
    evidence: HeldOutMoments | SplitTables = field(repr=False)
    splits: int = 1
    word: str = "client"
    results: Mapping[str, Result] = field(default_factory=dict, repr=False)
    parameters: Mapping[str, Array] = field(default_factory=dict, repr=False)
    strengths: Strengths | None = field(default=None, repr=False)
    certificates: Mapping[str, float] = field(default_factory=dict, repr=False)

    @classmethod
    def mean(cls, several: Sequence[Joining]) -> Joining:
        """Take the mean over random splits of the same clients' rows; intervals are over splits."""
        first = several[0]
        if len(several) < 2:
            raise InputError("too-few-splits", "A mean over splits needs at least two of them.")
        # n₂/n₁ of Nadeau and Bengio: splits share rows, which a plain interval does not know
        overlap = sum(held for _, held in first.rows) / sum(trained for trained, _ in first.rows)
        parts = [one.evidence for one in several]
        evidence = SplitTables(
            [part for part in parts if isinstance(part, HeldOutMoments)], overlap
        )
        return replace(
            first,
            loss=evidence.means,
            score=known_mean([one.score for one in several]),
            evidence=evidence,
            splits=len(several),
        )

    def gain(self, model: str, over: str = ALONE, of: Weights | None = None) -> RelativeGain:
        """Return the gain over all clients, each counting the same; `of` makes other weights from a
        model's losses.
        """
        return RelativeGain.of(self.evidence.difference(*self._places(over, model), of or every))

    @cached_property
    def judged(self) -> list[int]:
        """The places of the clients whose held-out rows can be judged: of times to an event, two
        of them can be compared. Means and counts are of these.
        """
        return np.flatnonzero(~np.isnan(self.loss).any(0)).tolist()

    def _places(self, one: str, other: str) -> tuple[int, int]:
        return self.models.index(one), self.models.index(other)

    def gains(self, model: str, over: str = ALONE) -> list[RelativeGain]:
        """Return the gain of every client."""
        return [RelativeGain.of(one) for one in self.evidence.each(*self._places(over, model))]

    def pays(self, model: str, over: str = ALONE) -> list[str]:
        """Return for every client whether its gain is clear: yes, no, or within noise."""
        return clearly(self.evidence.each(*self._places(over, model)))

    def by_rows(self, losses: Array) -> Array:
        """Return weights by which every held-out row counts the same: few rows of a client are a
        rough measure, and must not hide what all others show.
        """
        held = np.array([held for _, held in self.rows]) * ~np.isnan(losses)
        return np.asarray(held / held.sum())

    def _over(self, model: str, over: str) -> list[RelativeGain]:
        """Return the gain over clients, for their worst-served fifth, and over rows."""
        return [self.gain(model, over, of) for of in (every, worst_fifth, self.by_rows)]

    def better(self, model: str, than: str) -> bool:
        """Return whether its loss is clearly lower over clients, for their worst-served fifth or
        over rows, at 99 % since many pairs are compared, and clearly higher in none of these.
        """
        found = self._over(model, than)
        lower = any(g.pays == YES and g.value > STRICT * (g.value - g.low) for g in found)
        return lower and all(g.pays != NO for g in found)

    @cached_property
    def recommendation(self) -> str:
        """The simplest of constant, alone, average, fair and personal that no other clearly beats.

        If every model is beaten by some other, the one that the fewest beat.
        """
        return min(self.models, key=lambda m: sum(self.better(other, m) for other in self.models))

    @property
    def shown(self) -> str:
        """The joint model that is compared: the one recommended, else the best in the mean."""
        joint = [m for m in (AVERAGE, FAIR, PERSONAL) if m in self.models]
        if self.recommendation in joint:
            return self.recommendation
        return min(joint, key=lambda m: float(known_mean(self.loss[self.models.index(m)])))

    @property
    def base(self) -> str:
        """What the joint model is compared with: alone, or a constant where that is advised."""
        return CONSTANT if self.recommendation == CONSTANT else ALONE

    @property
    def sentence(self) -> str:
        """Give the recommendation."""
        best = self.recommendation
        goal = self.task.goal
        start = USE.get(best, f"Use {CALLED[best]}").format(word=self.word, goal=goal)
        if best == ALONE and len(self.names) == 1:
            start = "Train alone"
        pays = {gain.pays for gain in self._over(self.shown, ALONE)[:2]}
        if best == ALONE and NO not in pays:
            sure = "may pay, but that is not certain" if YES in pays else "brings no clear gain"
            start += f": joining {sure}"
        if best == CONSTANT:
            some = YES in self.pays(self.shown, CONSTANT)
            if some or self.gain(self.shown, CONSTANT).high > SMALL[0]:
                it = f"Over all {plural(self.word)} it" if some else "It"
                start = f"{it} is not clear that these columns predict the {goal}"
        if best == self.shown:
            start += f": {SIMPLEST}"
        return f"{start}."

    @property
    def details(self) -> list[str]:
        """Say it in units of the target: rows of 100, or the target's own. Then give the loss
        against alone (or a constant), one average model and the fair one, with intervals where
        something is clear.
        """
        means = {m: float(known_mean(self.score[k])) for k, m in enumerate(self.models)}
        named = [m for m in dict.fromkeys([self.shown, AVERAGE, ALONE, CONSTANT]) if m in means]
        measure = self.task.measure
        scores = [f"{CALLED[m]} {measure.brief(means[m])}" for m in named]
        compared = self._compared(self.shown, self.base)
        found = [f"{measure.mean}: {', '.join(scores)}."]
        who = f"; {self._who()}" if len(self.names) > 1 else ""
        found.append(f"With {CALLED[self.shown]} the {self.task.lost} is {compared}{who}.")
        if AVERAGE not in self.models:
            return found
        if self.shown != AVERAGE and self._clear(self.shown, AVERAGE):
            found.append(f"Against one average model it is {self._compared(self.shown, AVERAGE)}.")
        elif self.shown != AVERAGE:
            others = [CALLED[m] for m in self.models if self.better(m, AVERAGE)]
            but = f", but is clearly beaten by {others[0]}" if others else ""
            found.append(f"One average model does as well, within noise{but}.")
        return [*found, self.fairness] if self.shown != FAIR and FAIR in self.models else found

    @property
    def fairness(self) -> str:
        """Say whether the fair model serves somebody that one average model does not.

        Personal models have one objective, the mean over rows: none of eight others served new rows
        reliably better on fifteen tables (`benchmarks/accuracy/fairness.py`).
        """
        pays = self._clear(FAIR, AVERAGE)
        start = "Do not use the fair model here"
        if self.shown == PERSONAL and YES not in pays:
            return (
                "One fair model helps nobody clearly over an average one; the personal models "
                "count all rows alike, and no fair ones were fitted."
            )
        if not pays:
            return f"{start}: it helps nobody clearly."
        if YES in pays:
            helps = "The fair model helps"
            start = f"{helps} some and costs others" if NO in pays else helps
        compared = self._compared(FAIR, AVERAGE)
        return f"{start}: against one average model its {self.task.lost} is {compared}."

    def _clear(self, model: str, over: str) -> set[str]:
        """Return the outcomes that are clear of noise, over clients and for the worst-served."""
        return {gain.pays for gain in self._over(model, over)} - {NOISE}

    def _compared(self, model: str, over: str) -> str:
        """Say how the losses compare in the mean and for the worst-served fifth."""
        mean, worst, rows = self._over(model, over)
        fifth = self.word if a_fifth(len(self.judged)) == 1 else "fifth"
        than = mean.than("" if over == AVERAGE else CALLED[over])
        if len(self.names) == 1:
            return f"{than} ({mean.range})"
        said = f"{than} ({mean.range}), for the worst-served {fifth} {worst.than()} ({worst.range})"
        if rows.pays != NOISE and mean.pays == NOISE:
            said += f", over all rows {rows.than()} ({rows.range})"
        return said

    def _who(self) -> str:
        """Say who gains, such as "4 of 12 clients clearly gain, none clearly loses"."""
        found = self.pays(self.shown, self.base)
        gain, lose = found.count(YES), found.count(NO)
        who = f"of {len(self.judged)} {plural(self.word)}"
        gaining = f"{gain or 'none'} {who} clearly gain{'' if gain > 1 else 's'}"
        return f"{gaining}, {lose or 'none'} clearly lose{'' if lose > 1 else 's'}"

    @property
    def method(self) -> str:
        """Describe how intervals were computed."""
        if self.splits > 1:
            over = f"{self.splits} random splits, corrected for the rows that splits share"
        else:
            block = getattr(self.evidence, "block", 1)
            over = "held-out rows, paired"
            over = over if block == 1 else f"blocks of {block} {over}"
        return (
            f"Student's t over {over}, at 95 %; clients are marked such that at most 5 % of the "
            "marks are by chance; half of the rows name the worst-served, the other half judge them"
        )

    def __str__(self) -> str:
        return " ".join([self.sentence, *self.details])
