"""Risk sets of N clients' rows, and Cox's partial likelihood as a function of z = A x.

A client's event times are in order; row j is at risk at those in (entry_j, T_j]. With weights w_j,
and at a time with m tied events D of mean weight w̄, Efron's likelihood has m terms (B. Efron 1977,
"The efficiency of Cox's likelihood function"), and Breslow's one term with all of D's weight:

    s_e = Σ_{R∖D} w_j e^{z_j} + (1 − k/m) Σ_D w_j e^{z_j},    k = 0 … m − 1,    v_e = w̄
    n_i ℓ_i(z) = Σ_e v_e (log s_e − z̄_D),    z̄_D the weighted mean of D

    ∂/∂z_j  = q_j − w_j [event],    q_j = w_j e^{z_j} Σ_e v_e c_ej/s_e,    c_ej = 1, in D 1 − k/m
    ∂²/∂z² t = q ∘ (t − t̄),    t̄_j the mean, over the terms of j, of the terms' weighted means of t

D. R. Cox 1972, "Regression models and life-tables"; risk sets within a client are the stratified
model of trials at several centres: baselines differ, effects are shared.

Sums over risk sets with late entries are sums over intervals of event times. Differences of running
sums would cancel: every sum here is one of positive terms, as a logarithm, and so precise.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from scaffpd.models.samples import Ragged

NONE = float("-inf")  # the logarithm of an empty sum


class LogSums(NamedTuple):
    """Sums Σ e^{z} as logarithms, and the means of some columns with the weights e^{z}."""

    log: Tensor
    mean: Tensor

    def joined(self, other: LogSums) -> LogSums:
        log = torch.logaddexp(self.log, other.log)
        if not self.mean.shape[-1]:
            return LogSums(log, self.mean)
        share = torch.where(other.log == NONE, 0, (other.log - log).exp())
        return LogSums(log, self.mean + share[..., None] * (other.mean - self.mean))

    def at(self, place: Tensor) -> LogSums:
        return LogSums(self.log[place], self.mean[place])

    def scaled(self, log: Tensor) -> LogSums:
        """Return the sums times e^{log}."""
        return LogSums(self.log + log, self.mean)


def collected(terms: LogSums, place: Tensor, size: int) -> LogSums:
    z, columns = terms
    top = z.new_full((size,), NONE).scatter_reduce_(0, place, z, "amax")
    top = torch.where(torch.isfinite(top), top, 0)
    log = top + z.new_zeros(size).index_add_(0, place, (z - top[place]).exp()).log()
    if not columns.shape[1]:
        return LogSums(log, columns.new_zeros(size, 0))
    share = (z - log[place]).exp()[:, None]
    return LogSums(
        log, columns.new_zeros(size, columns.shape[1]).index_add_(0, place, share * columns)
    )


def nothing(size: int, like: LogSums) -> LogSums:
    return LogSums(like.log.new_full((size,), NONE), like.mean.new_zeros(size, like.mean.shape[1]))


def moved(sums: LogSums, places: int) -> LogSums:
    """Move sums to later places, or to earlier ones if < 0."""
    ends = places, -places
    return LogSums(pad(sums.log, ends, value=NONE), pad(sums.mean, (0, 0, *ends)))


class Intervals:
    r"""Intervals [l_j, h_j) of a line of points: sums over the points of each, and the transpose.

    An interval is a row of blocks of 2^k points, one for every bit k of its length, the shortest
    first. Sums over all blocks of a size come from those of half of it, so that all of it costs
    O((rows + points) log points).

    Args:
        low: l_j.
        high: h_j; an interval may be empty.
        points: the length of the line.
    """

    def __init__(self, low: Tensor, high: Tensor, points: int) -> None:
        self.size = len(low)
        self.points = points
        length = (high - low).clamp_min(0)
        self.blocks = []  # of 2^k points: whose they are, and where they begin
        for k in range(int(length.max()).bit_length()):
            rows = torch.nonzero((length >> k) & 1)[:, 0]
            self.blocks.append((rows, low[rows] + (length[rows] & ((1 << k) - 1))))
        self.depth = 2 * len(self.blocks)

    def over(self, points: LogSums) -> LogSums:
        """Return the sums over the points of every interval."""
        out = nothing(self.size, points)
        for k, (rows, first) in enumerate(self.blocks):
            if k:
                points = points.joined(moved(points, -(1 << (k - 1))))
            found = out.at(rows).joined(points.at(first))
            out.log[rows] = found.log
            out.mean[rows] = found.mean
        return out

    def covering(self, rows: LogSums) -> LogSums:
        """Return the sums over the intervals that cover each point."""
        found = nothing(self.points, rows)
        for k, (some, first) in reversed([*enumerate(self.blocks)]):
            found = found.joined(collected(rows.at(some), first, self.points))
            if k:
                found = found.joined(moved(found, 1 << (k - 1)))
        return found


EFRON = "efron"
BRESLOW = "breslow"
TIES = (EFRON, BRESLOW)
ROUNDING = 1e-14
TIME, EVENT, ENTRY, WEIGHT = range(4)  # columns of targets


class RiskSets:
    """Who is at risk when.

    Attributes:
        layout: the rows of every client.
        weight: w_j.
        events: the rows with events, and `time` the number of the event time of each; numbers go
            on from client to client.
        term: the number of the event time of every term e; `owner` is its client, `share` the
            logarithm of 1 − k/m and `v` its weight.
        order: the rows, client after client by their times; `first` the place in it of the first
            row with T_j ≥ t of every event time t.
        tied: the most events at one time.

    Args:
        y: times, events, entries and weights, in double precision.
        layout: the rows of every client.
        ties: "efron" or "breslow".
    """

    def __init__(self, y: Tensor, layout: Ragged, ties: str) -> None:
        self.layout = layout
        self.weight = y[:, WEIGHT]
        table = y.cpu().numpy()
        time, entry = table[:, TIME], table[:, ENTRY]
        dead = (table[:, EVENT] > 0) & (table[:, WEIGHT] > 0)
        low, high, place = np.zeros((3, len(table)), dtype=np.int64)
        order = np.lexsort((time, layout.owner.cpu().numpy()))
        first: list[int] = []
        points = 0
        start = 0
        for size in layout.lengths:
            own = slice(start, start + size)
            times = np.unique(time[own][dead[own]])
            place[own] = points + np.searchsorted(times, time[own])
            low[own] = points + np.searchsorted(times, entry[own], "right")
            # at its own time a row with an event is one of D
            after = points + np.searchsorted(times, time[own], "right")
            high[own] = np.where(dead[own], place[own], after)
            first += (start + np.searchsorted(time[order[own]], times)).tolist()
            points += len(times)
            start += size
        high[table[:, WEIGHT] == 0] = 0

        def tensor(array: object) -> Tensor:
            return torch.as_tensor(array, device=y.device)

        self.points = points
        self.order = tensor(order)
        self.first = tensor(np.array(first, dtype=np.int64))
        self.intervals = Intervals(tensor(low), tensor(high), points)
        self.events = tensor(np.flatnonzero(dead))
        self.time = tensor(place[dead])
        counts = np.bincount(place[dead], minlength=points)
        total = np.bincount(place[dead], table[dead, WEIGHT], minlength=points)
        self.tied = int(counts.max(initial=1))
        self.own_weight = tensor(total)
        owner = np.zeros(points, dtype=np.int64)
        owner[place[dead]] = layout.owner.cpu().numpy()[dead]
        term = np.repeat(np.arange(points), counts) if ties == EFRON else np.arange(points)
        before = np.cumsum(counts) - counts
        k = np.arange(len(term)) - before[term] if ties == EFRON else np.zeros(points)
        self.term = tensor(term)
        self.owner = tensor(owner[term])
        self.share = tensor(np.log1p(-k / np.maximum(counts, 1)[term]))
        self.v = tensor(total[term] / (counts[term] if ties == EFRON else 1.0))
        self.log_weight = self.weight.log()  # −∞ for rows that do not count

    def widest(self, lengths: Tensor) -> Tensor:
        """Return Σ_e v_e ρ_e² per client, ρ_e the greatest length of a row with T_j ≥ T_e.

        It bounds n_i λ_max(∇²ℓ_i): a variance is at most the mean square around any centre.
        """
        parts = torch.split(lengths[self.order], self.layout.lengths)
        ahead = [part.flip(0).cummax(0).values.flip(0) for part in parts]
        return self.added(self.v * torch.cat(ahead)[self.first[self.term]].square())

    def added(self, terms: Tensor) -> Tensor:
        return terms.new_zeros(len(self.layout)).index_add_(0, self.owner, terms)


class PartialLikelihood:
    """n_i ℓ_i and its derivatives in z, of all clients at once."""

    def __init__(self, risk: RiskSets, z: Tensor) -> None:
        self.risk = risk
        self.z = z
        self.log = z + risk.log_weight
        sums = self._sums(z.new_zeros(len(z), 0))
        self.log_sums = sums.log  # log s_e
        event = z[risk.events] * risk.weight[risk.events]
        centre = z.new_zeros(risk.points).index_add_(0, risk.time, event) / risk.own_weight
        self.gaps = sums.log - centre[risk.term]

    def _sums(self, columns: Tensor) -> LogSums:
        """Return log s_e, and the means of columns with its weights, term by term."""
        risk = self.risk
        rows = LogSums(self.log, columns)
        rest = risk.intervals.covering(rows)
        own = collected(rows.at(risk.events), risk.time, risk.points)
        return rest.at(risk.term).joined(own.at(risk.term).scaled(risk.share))

    @cached_property
    def value(self) -> Tensor:
        return self.risk.added(self.risk.v * self.gaps)

    def _spread(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return q_j, and the means over the terms of j of columns per term."""
        risk = self.risk
        terms = LogSums(risk.v.log() - self.log_sums, columns)
        later = risk.intervals.over(collected(terms, risk.term, risk.points))
        own = collected(terms.scaled(risk.share), risk.term, risk.points).at(risk.time)
        both = nothing(len(self.z), later)
        both.log[risk.events] = own.log
        both.mean[risk.events] = own.mean
        both = later.joined(both)
        return (self.log + both.log).exp(), both.mean

    @cached_property
    def q(self) -> Tensor:
        return self._spread(self.z.new_zeros(len(self.log_sums), 0))[0]

    @cached_property
    def residual(self) -> Tensor:
        """q_j − w_j [event]."""
        r = self.q.clone()
        r[self.risk.events] -= self.risk.weight[self.risk.events]
        return r

    def bend(self, T: Tensor) -> Tensor:
        """Return ∂²/∂z² T for T (rows, k)."""
        q, centre = self._spread(self._sums(T).mean)
        gap = T - centre
        # columns that are constant among those at risk have no curvature, not one of rounding
        noise = ROUNDING * T.abs().amax(0) if len(T) else 0.0
        return q[:, None] * torch.where(gap.abs() > noise, gap, 0)
