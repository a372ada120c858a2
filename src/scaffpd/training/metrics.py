r"""A table of clients in a few numbers: no worst client without the mean, and no mean without the
worst.

The worst and the best 20 % are those of the paper's footnote: sort the clients by the measure and
take the mean of the lowest and of the highest fifth. A fifth of N clients is ⌈N/5⌉ of them: 1 of 4,
1 of 5, 2 of 6, 4 of 20.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, stdtr, stdtrit

from scaffpd.federation import ClientScores, Vector
from scaffpd.models.numerics import CONFIDENCE, student
from scaffpd.tasks.base import NEGLIGIBLE

YES = "yes"
NO = "no"
NOISE = "within noise"
Array = NDArray[np.float64]
Weights = Callable[[Array], Array]  # of the clients, given their losses


@dataclass(frozen=True)
class Spread:
    """One measure v_i over all N clients.

    `mean` and `deviation` are over clients, each counting the same, `weighted_mean` is over
    samples. The worst client is the one that is served worst, the first of several; `worst_20` is
    the mean over the ⌈N/5⌉ that are served worst.
    """

    mean: float
    weighted_mean: float
    worst: float
    best: float
    worst_client: str
    best_client: str
    deviation: float
    worst_20: float
    best_20: float

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        values: Vector,
        upwards: bool,
        counts: NDArray[np.int64] | None = None,
    ) -> Spread:
        """Summarise a measure over clients with these numbers of samples; `upwards` where more is
        better.
        """
        badness = -values if upwards else values
        order = np.argsort(-badness, kind="stable")
        k = a_fifth(len(values))
        worst = int(badness.argmax())
        best = int(badness.argmin())
        return cls(
            mean=float(values.mean()),
            weighted_mean=float(np.average(values, weights=counts)),
            worst=float(values[worst]),
            best=float(values[best]),
            worst_client=names[worst],
            best_client=names[best],
            deviation=float(values.std()),
            worst_20=float(values[order[:k]].mean()),
            best_20=float(values[order[-k:]].mean()),
        )


@dataclass(frozen=True)
class Summary:
    """`ClientScores` in a few numbers; regression has no score."""

    loss: Spread
    score: Spread | None

    @classmethod
    def of(cls, scores: ClientScores) -> Summary:
        rated = not np.isnan(scores.score).all()
        score = Spread.of(scores.names, scores.score, True, scores.counts) if rated else None
        return cls(Spread.of(scores.names, scores.loss, False, scores.counts), score)


def a_fifth(clients: int) -> int:
    return math.ceil(clients / 5)


def every(losses: Array) -> Array:
    """Return weights 1/N: every client counts the same, but those of unknown loss (NaN)."""
    known = ~np.isnan(losses)
    return np.asarray(known / known.sum())


def worst_fifth(losses: Array) -> Array:
    """Return weights 1/⌈N/5⌉ of the ⌈N/5⌉ clients with the largest losses, 0 of all others."""
    k = a_fifth(int((~np.isnan(losses)).sum()))
    found = np.zeros(len(losses))
    found[np.argsort(-losses, kind="stable")[:k]] = 1 / k
    return found


def half_interval(values: ArrayLike, overlap: float = 0.0) -> Array:
    """Return half of Student's 95 % interval for the mean over the first axis: t·sd·√(1/K +
    overlap); ∞ for K = 1.

    `overlap` is n₂/n₁ where the K values are those of random splits that hold out n₂ rows and train
    on n₁: splits share rows, which a plain interval does not know (Nadeau and Bengio 2003,
    "Inference for the generalization error").
    """
    several = np.asarray(values, dtype=np.float64)
    K = len(several)
    if K < 2:
        return np.full(several.shape[1:], math.inf)[()]
    deviation: Array = several.std(axis=0, ddof=1)
    return student(K - 1) * deviation * math.sqrt(1 / K + overlap)


class PairedDifference(NamedTuple):
    """By how much a measure is lower than `base`, half of the 95 % interval, `base`, half of the
    interval of their ratio, and the degrees of freedom of both.
    """

    mean: float
    half: float
    base: float
    relative_half: float
    freedom: float = 1e9

    @property
    def chance(self) -> float:
        """The p-value of no difference, by the paired t test; 1 where nothing is known.

        Not by the interval of the ratio: far out, where several are compared, the test of skewed
        ratios is wrong too often (at n = 30, 1.0 % of draws are below 0.25 %).
        """
        return min(2 * self.above(-1 if self.mean < 0 else 1), 1.0)

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return self.half / student(self.freedom) if self.half < math.inf else math.inf

    def above(self, sign: int = 1) -> float:
        """Return the one-sided p-value of sign·mean > 0; 1 where nothing is known."""
        if not 0 < self.half < math.inf:
            return 1.0
        return float(stdtr(self.freedom, -sign * self.mean / self.error))

    def below(self, share: float) -> float:
        """Return the one-sided p-value of mean < share·base."""
        rest = share * self.base - self.mean
        if self.half == 0:
            return 0.0 if rest > 0 else 1.0
        return float(stdtr(self.freedom, -rest / self.error)) if self.half < math.inf else 1.0

    @property
    def excess(self) -> float:
        """E[(mean + error·z)₊], z ~ N(0, 1): what is lost, where gains are none."""
        if not 0 < self.error < math.inf:
            return self.error or max(self.mean, 0.0)
        z = self.mean / self.error
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return self.error * density + self.mean * float(ndtr(z))


def clearly(found: Sequence[PairedDifference]) -> list[str]:
    """Return which of several differences are clear: yes, no, or within noise.

    By Benjamini and Hochberg (1995), at most 5 % of those that are named are expected to be named
    by chance; where there is no difference at all, anybody is named in at most 5 % of cases.
    """
    chances = np.array([one.chance for one in found])
    ranked = np.sort(chances)
    most = (1 - CONFIDENCE) * np.arange(1, len(found) + 1) / len(found)
    passed = ranked[ranked <= most]
    limit = passed[-1] if len(passed) else -1.0
    outcomes = [RelativeGain.of(one).pays for one in found]
    return [o if p <= limit else NOISE for o, p in zip(outcomes, chances, strict=True)]


class RelativeGain(NamedTuple):
    """Decrease of a model's loss against another's, as a share of the other's, with its 95 %
    interval.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, found: PairedDifference) -> RelativeGain:
        """Take the difference as a share of the loss that it starts from.

        With r = 1 − share and half an interval h, r + h and r·exp(h/r) agree to first order. The
        low end is that of the logarithm, which is the wider: ratios of skewed losses need it.
        """
        if not found.base > 0:
            return cls(0.0, -math.inf, math.inf)
        share = found.mean / found.base
        half = found.relative_half
        r = max(1 - share, 1e-12)
        low = 1 - r * math.exp(half / r) if half < 50 * r else -math.inf
        return cls(share, low, share + half if math.isinf(half) else min(share + half, 1.0))

    @property
    def pays(self) -> str:
        """Yes or no where the interval is clear of zero, else within noise."""
        if not (self.low > 0 or self.high < 0) or abs(self.value) < NEGLIGIBLE:
            return NOISE
        return YES if self.value > 0 else NO


@dataclass(frozen=True)
class HeldOutMoments:
    r"""Losses of M models on the held-out rows of N clients, as far as intervals need them.

    Weights w(L) may depend on the losses, as those of the worst-served fifth do. Chosen on the rows
    that are judged, the clients named are unlucky as well as badly served, and no interval covers.
    So every second block of rows names the clients that the others judge, and the other way round:
    with n_ih blocks and mean losses L_ih in half h ∈ {0, 1},

        level = Σ_h Σ_i (n_ih/n_i) w_i(L_{1−h}) L_ih,

    the mean over clients where weights are constant. A client of one row of NaN is left out.

    Attributes:
        means: over rows, (M × N).
        halves: over the rows of every half, (2 × M × N).
        shares: n_ih/n_i, (2 × N).
        covariances: of the means over blocks of rows, (N × M × M); NaN where there is one block
            only.
        blocks: how many blocks every client has, n_i.
        block: how many consecutive rows count as one.
    """

    means: Array
    halves: Array
    shares: Array
    covariances: Array
    blocks: NDArray[np.int64]
    block: int = 1

    @classmethod
    def of(cls, losses: Sequence[Array], block: int = 1) -> HeldOutMoments:
        """Make them from the losses of every row, (M × rows) per client."""
        parts = [np.array_split(own, math.ceil(own.shape[1] / block), axis=1) for own in losses]
        grouped = [np.stack([part.mean(1) for part in own], axis=1) for own in parts]
        unknown = np.full((len(losses[0]),) * 2, math.nan)
        spread = [np.atleast_2d(np.cov(g)) if g.shape[1] > 1 else unknown for g in grouped]
        blocks = np.array([g.shape[1] for g in grouped])
        means = np.stack([own.mean(1) for own in losses], axis=1)
        rows = np.array([own.shape[1] for own in losses])
        # of unequal blocks too, the halves' shares are those of rows: constant weights give `means`
        first = [np.concatenate(own[::2], axis=1) for own in parts]
        share = np.array([own.shape[1] for own in first]) / rows
        one = np.stack([own.mean(1) for own in first], axis=1)
        # a client with a single block has nothing but its mean to be named by
        other = np.where(
            share < 1, (means - share * one) / np.where(share < 1, 1 - share, 1), means
        )
        halves = np.stack([one, other])
        return cls(means, halves, np.stack([share, 1 - share]), np.stack(spread), blocks, block)

    def weights(self, k: int, of: Weights) -> Array:
        """Return (n_ih/n_i) w_i(L_{1−h}) of model k, (2 × N)."""
        found: Array = self.shares * np.stack([of(self.halves[1, k]), of(self.halves[0, k])])
        return found

    def level(self, k: int, of: Weights) -> float:
        """Return the level of model k under weights that `of` makes from losses."""
        weights = self.weights(k, of)
        return float((weights * np.where(weights > 0, self.halves[:, k], 0)).sum())

    def difference(self, a: int, b: int, of: Weights) -> PairedDifference:
        """Return by how much the level is lower under b than under a."""
        w = self.weights(a, of)
        v = self.weights(b, of)
        base, other = (np.array([self.level(k, of)]) for k in (a, b))
        return _differences(base, other, lambda r: self._half(a, b, r * w, v))[0]

    def each(self, a: int, b: int) -> list[PairedDifference]:
        """Return the same of every client by itself: Student's t over its blocks."""
        C = self.covariances
        freedom = np.maximum(self.blocks - 1, 1)
        quantile = stdtrit(freedom, (1 + CONFIDENCE) / 2)

        def half(r: Array) -> tuple[Array, Array]:
            spread = r**2 * C[:, a, a] + C[:, b, b] - 2 * r * C[:, a, b]
            found = quantile * np.sqrt(np.maximum(spread, 0.0) / self.blocks)
            return np.where(self.blocks > 1, found, math.inf), freedom

        return _differences(self.means[a], self.means[b], half)

    def noise(self, a: int, b: int) -> Array:
        """Return the variance by chance of every client's mean difference, with one variance of
        blocks for all: few of them are a rough measure of their own.
        """
        C = self.covariances
        spread = C[:, a, a] + C[:, b, b] - 2 * C[:, a, b]
        known = self.blocks > 1
        freedom = (self.blocks - 1)[known]
        variance = freedom @ spread[known] / freedom.sum() if known.any() else math.nan
        return np.asarray(variance / self.blocks)

    def _half(self, a: int, b: int, w: Array, v: Array) -> tuple[float, float]:
        """Return half of the interval of Σ_h Σ_i w_ih ℓ_a − v_ih ℓ_b, and its degrees of freedom.

        The standard error is √(Σ_i Σ_h s_ih²/n_ih) with s_ih² the variance of w_ih ℓ_a − v_ih ℓ_b
        over the n_i blocks of client i; degrees of freedom are Welch's. A client with a single
        block takes the mean of the others' s_ih², and with it their degrees of freedom.
        """
        C = self.covariances
        spread = w**2 * C[:, a, a] + v**2 * C[:, b, b] - 2 * w * v * C[:, a, b]
        used = (w != 0) | (v != 0)
        several = np.broadcast_to(self.blocks > 1, used.shape)[used]
        spread = np.maximum(spread[used], 0.0)
        known = spread[several]
        spread = np.where(several, spread, known.mean() if len(known) else math.inf)
        errors = spread / (self.shares * self.blocks)[used]
        if not np.isfinite(errors).all():
            return math.inf, 1.0
        freedom = (self.shares * (self.blocks - 1))[used]
        freedom = np.where(several, freedom, freedom.sum())
        welch = errors.sum() ** 2 / max((errors**2 / freedom).sum(), 1e-300)
        return student(max(welch, 1.0)) * math.sqrt(errors.sum()), max(welch, 1.0)


@dataclass(frozen=True)
class SplitTables:
    """The same of several random splits of the clients' rows."""

    splits: Sequence[HeldOutMoments]
    overlap: float  # n₂/n₁

    @cached_property
    def means(self) -> Array:
        """(models × clients), the mean over splits that know a client."""
        return known_mean([one.means for one in self.splits])

    def level(self, k: int, of: Weights) -> float:
        return float(np.mean([one.level(k, of) for one in self.splits]))

    def noise(self, a: int, b: int) -> Array:
        """Splits together see a client's rows once or more, which are as many as there are."""
        share = max(1 / len(self.splits), self.overlap / (1 + self.overlap))
        return share * known_mean([one.noise(a, b) for one in self.splits])

    def difference(self, a: int, b: int, of: Weights) -> PairedDifference:
        levels = (np.array([[one.level(k, of)] for one in self.splits]) for k in (a, b))
        return self._differences(*levels)[0]

    def each(self, a: int, b: int) -> list[PairedDifference]:
        return self._differences(*(np.stack([one.means[k] for one in self.splits]) for k in (a, b)))

    def _differences(self, base: Array, other: Array) -> list[PairedDifference]:
        def half(r: Array) -> tuple[Array, int]:
            found = half_interval(r * base - other, self.overlap)
            return np.where(np.isnan(found), math.inf, found), max(len(self.splits) - 1, 1)

        return _differences(known_mean(base), known_mean(other), half)


def known_mean(several: ArrayLike) -> Array:
    """Return the mean over the first axis of what is no NaN; NaN where nothing is."""
    values = np.asarray(several, dtype=np.float64)
    known = (~np.isnan(values)).sum(0)
    return np.where(known > 0, np.nansum(values, 0) / np.maximum(known, 1), math.nan)


def _differences(
    base: Array, other: Array, half: Callable[[Array], tuple[Array | float, ArrayLike]]
) -> list[PairedDifference]:
    """Compare levels one by one. `half(r)` returns half of the interval of r·base − other, and its
    degrees of freedom; that of the ratio is the one with r held at its estimate (the delta
    method), over `base`.
    """
    positive = base > 0
    unit = np.where(positive, base, 1.0)
    plain, _ = half(np.ones(len(base)))
    relative, freedom = half(np.where(positive, other / unit, 1.0))
    share = np.where(positive, relative / unit, math.inf)
    columns = np.broadcast_arrays(base - other, plain, base, share, freedom)
    return [PairedDifference(*one) for one in np.stack(columns, axis=1).tolist()]
