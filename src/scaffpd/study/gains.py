r"""`Joining`: what every client gains from training with the others, and which model to use.

All models answer the same held-out rows, so gains are paired: the mean of ℓ_j(alone) − ℓ_j(model)
over rows j, with Student's t interval; over splits, it is corrected for rows that splits share
(Nadeau and Bengio 2003): sd·√(1/K + n₂/n₁) with n₂ rows held out and n₁ trained on.

Means over clients are those of random effects (DerSimonian and Laird 1986): client i has the weight
1/(τ² + v_i), with v_i the variance of its gain by chance and τ² that of gains between clients. Few
rows count less, unless clients differ by more than chance.

Recommended is the model of the least expected loss, or a simpler one m whose loss is within 1 % of
it and whose expected excess E[(L_m − L_least)₊] is at most .5 %. What it claims is *shown* if a
one-sided test at 1 % says so: of a joint model, that it beats both alone and a constant (p is
multiplied by the number of joint models that it was chosen from); of alone (or a constant), that
none is better by 2 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from scaffpd.algorithms.evidence import Strengths
from scaffpd.errors import InputError
from scaffpd.numbers import plural
from scaffpd.study.verdict import (
    ALONE,
    AS_GOOD,
    AVERAGE,
    CONSTANT,
    EQUAL,
    JOINT,
    LEVEL,
    MARGIN,
    PAYS,
    TOO_FEW,
    ClientRow,
    Gain,
    ModelRow,
    Verdict,
)
from scaffpd.tasks.base import Task
from scaffpd.training.loop import Result
from scaffpd.training.metrics import (
    Array,
    HeldOutMoments,
    PairedDifference,
    RelativeGain,
    SplitTables,
    Weights,
    clearly,
    known_mean,
    worst_fifth,
)

OVER = (CONSTANT, ALONE, AVERAGE)  # what gains are over
EXCESS = 0.005  # of the loss that a simpler model is expected to cost


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
        minimised: the loss that models minimise.
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
    minimised: str = ""

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

    @cached_property
    def judged(self) -> list[int]:
        """The places of the clients whose held-out rows can be judged: of times to an event, two
        of them can be compared. Means and counts are of these.
        """
        return np.flatnonzero(~np.isnan(self.loss).any(0)).tolist()

    @cached_property
    def weights(self) -> Array:
        """How much every client counts in means: 1/(τ² + v_i), summing to one."""
        joint = [self.models.index(m) for m in JOINT if m in self.models]
        best = min(joint, key=lambda k: float(known_mean(self.loss[k])))
        alone = self.models.index(ALONE)
        found = np.zeros(len(self.names))
        found[self.judged] = pooling(
            (self.loss[alone] - self.loss[best])[self.judged],
            self.evidence.noise(alone, best)[self.judged],
        )
        return found

    def pooled(self, losses: Array) -> Array:
        """Return them, for the clients whose loss is known."""
        found = self.weights * ~np.isnan(losses)
        return np.asarray(found / found.sum())

    def _difference(self, model: str, over: str, of: Weights | None = None) -> PairedDifference:
        return self.evidence.difference(*self._places(over, model), of or self.pooled)

    def gain(self, model: str, over: str = ALONE, of: Weights | None = None) -> RelativeGain:
        """Return the gain in the mean over clients; `of` makes other weights of losses."""
        return RelativeGain.of(self._difference(model, over, of))

    def _places(self, one: str, other: str) -> tuple[int, int]:
        return self.models.index(one), self.models.index(other)

    def gains(self, model: str, over: str = ALONE) -> list[RelativeGain]:
        """Return the gain of every client."""
        return [RelativeGain.of(one) for one in self.evidence.each(*self._places(over, model))]

    def pays(self, model: str, over: str = ALONE) -> list[str]:
        """Return for every client whether its gain is clear, corrected for their number."""
        return clearly(self.evidence.each(*self._places(over, model)))

    @cached_property
    def expected(self) -> dict[str, float]:
        """The loss of every model that is expected on new rows."""
        return {m: self.evidence.level(k, self.pooled) for k, m in enumerate(self.models)}

    @cached_property
    def recommendation(self) -> str:
        """The model of the least expected loss, or a simpler one that costs hardly more."""
        loss = self.expected
        least = min(loss, key=lambda m: loss[m])

        def enough(simple: str) -> bool:
            found = self._difference(least, simple)
            near = found.mean <= MARGIN * loss[least]
            return near and found.excess <= EXCESS * loss[least]

        return next(m for m in self.models if m == least or enough(m))

    @cached_property
    def chance(self) -> float:
        """The p-value of what is to be shown of the recommended model."""
        best = self.recommendation
        joint = [m for m in JOINT if m in self.models]
        if best in joint:  # both are to be rejected, so no correction is due for the two
            beaten = max(self._difference(best, one).above() for one in (CONSTANT, ALONE))
            return min(len(joint) * beaten, 1.0)
        others = joint if best == ALONE else [m for m in self.models if m != best]
        return max(self._difference(one, best).below(EQUAL) for one in others)

    @cached_property
    def verdict(self) -> Verdict:
        """All of it in fields."""
        best = self.recommendation
        shown = self.chance <= LEVEL
        return Verdict(
            best,
            TOO_FEW if not shown else PAYS if best in JOINT else AS_GOOD,
            self.chance,
            [self._over_clients(model) for model in self.models],
            list(self._by_client()),
            {self.names[i]: float(self.weights[i]) for i in self.judged},
            self.minimised,
            self.method,
            self.splits,
            dict(self.certificates),
        )

    def _over_clients(self, model: str) -> ModelRow:
        k = self.models.index(model)
        w = self.weights * ~np.isnan(self.score[k])
        score = float(w @ np.nan_to_num(self.score[k]) / w.sum()) if w.sum() else None
        over = [m for m in OVER if m != model and m in self.models]
        means, worst = (
            {m: _gain(self.gain(model, m, of)) for m in over} for of in (None, worst_fifth)
        )
        return ModelRow(model, self.expected[model], score, means, worst)

    def _by_client(self) -> Iterator[ClientRow]:
        over = {m: [o for o in OVER if o != m and o in self.models] for m in self.models}
        pairs = [(model, one) for model, others in over.items() for one in others]
        gains = {pair: self.gains(*pair) for pair in pairs}
        pays = {pair: self.pays(*pair) for pair in pairs}
        for i in self.judged:
            for k, (m, others) in enumerate(over.items()):
                yield ClientRow(
                    self.names[i],
                    m,
                    *self.rows[i],
                    float(self.loss[k, i]),
                    None if np.isnan(self.score[k, i]) else float(self.score[k, i]),
                    {one: _gain(gains[m, one][i]) for one in others},
                    {one: pays[m, one][i] for one in others},
                )

    @property
    def method(self) -> str:
        """Describe how intervals were computed."""
        if self.splits > 1:
            over = f"{self.splits} random splits, corrected for the rows that splits share"
        else:
            block = getattr(self.evidence, "block", 1)
            over = "held-out rows, paired"
            over = over if block == 1 else f"blocks of {block} {over}"
        low, high = (100 * f(self.weights[self.judged]) for f in (np.min, np.max))
        share = f"{low:.2g} to {high:.2g} % each, by how sure their losses are"
        share = "alike" if high < 1.05 * low else share
        many = plural(self.word)
        return (
            f"Student's t over {over}, at 95 %; {many} are marked such that at most 5 % of the "
            f"marks are by chance; means count {many} {share}; half of the rows name the "
            "worst-served, the other half judge them"
        )

    def __str__(self) -> str:
        return " ".join(self.verdict.sentences(self.task, self.word))


def pooling(gains: Array, noise: Array) -> Array:
    """Return weights 1/(τ² + v_i) of clients; all alike where nothing is known of the noise v_i."""
    if len(gains) < 2 or not (np.isfinite(noise).all() and noise.min() > 0):
        return np.full(len(gains), 1 / max(len(gains), 1))
    w = 1 / noise
    spread = w @ (gains - w @ gains / w.sum()) ** 2 - (len(gains) - 1)
    w = 1 / (noise + max(0.0, spread / (w.sum() - w @ w / w.sum())))
    return np.asarray(w / w.sum())


def _gain(found: RelativeGain) -> Gain:
    ends = (float(end) if math.isfinite(end) else None for end in found[1:])
    return Gain(found.value, *ends)
