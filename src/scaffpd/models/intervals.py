r"""Sums over intervals of a line of points, in logarithms and without a subtraction.

Sums of e^{z} over risk sets with late entries are sums over intervals. Differences of running sums
would cancel; here every sum is one of positive terms, so that it keeps its digits wherever a row
enters, and whatever row outweighs the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

NONE = float("-inf")  # the logarithm of an empty sum


class LogSums(NamedTuple):
    """Sums Σ e^{z} as logarithms, and the means of some columns with the weights e^{z}."""

    log: Tensor
    mean: Tensor

    def joined(self, other: LogSums) -> LogSums:
        """Return the sums of both."""
        log = torch.logaddexp(self.log, other.log)
        if not self.mean.shape[-1]:
            return LogSums(log, self.mean)
        share = torch.where(other.log == NONE, 0, (other.log - log).exp())
        return LogSums(log, self.mean + share[..., None] * (other.mean - self.mean))

    def total(self) -> LogSums:
        """Return the sums over the last axis."""
        log = torch.logsumexp(self.log, -1)
        share = torch.where(self.log == NONE, 0, (self.log - log[..., None]).exp())
        return LogSums(log, (share[..., None] * self.mean).sum(-2))

    def at(self, place: Tensor) -> LogSums:
        """Select places."""
        return LogSums(self.log[place], self.mean[place])

    def scaled(self, log: Tensor) -> LogSums:
        """Return the sums times e^{log}."""
        return LogSums(self.log + log, self.mean)


def collected(terms: LogSums, place: Tensor, size: int) -> LogSums:
    """Add up terms at each of `size` places."""
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
    """Return empty sums."""
    return LogSums(like.log.new_full((size,), NONE), like.mean.new_zeros(size, like.mean.shape[1]))


class Prefixes:
    """Intervals that begin with the first point of their client: running sums, client by client.

    Args:
        last: the last point of each interval, of all clients' points one after the other.
        rows: which of the rows have an interval that is not empty.
        counts: every client's number of points.
    """

    def __init__(self, last: Tensor, rows: Tensor, counts: Tensor) -> None:
        self.shape = len(counts), max(int(counts.max()), 1)
        owner = torch.repeat_interleave(torch.arange(len(counts)).to(counts), counts)
        start = torch.cumsum(counts, 0) - counts
        here = torch.arange(len(owner)).to(counts)
        self.places = here - start[owner] + owner * self.shape[1]
        self.rows = rows
        self.last = self.places[last[rows]]
        self.size = len(last)
        self.depth = self.shape[1].bit_length()

    def over(self, points: LogSums) -> LogSums:
        """Return the sums over the points of every interval."""
        table = nothing(self.shape[0] * self.shape[1], points)
        table.log[self.places] = points.log
        table.mean[self.places] = points.mean
        out = nothing(self.size, points)
        found = self._running(table, 1).at(self.last)
        out.log[self.rows] = found.log
        out.mean[self.rows] = found.mean
        return out

    def covering(self, rows: LogSums) -> LogSums:
        """Return the sums over the intervals that cover each point."""
        own = collected(rows.at(self.rows), self.last, self.shape[0] * self.shape[1])
        return self._running(own, -1).at(self.places)

    def _running(self, sums: LogSums, direction: int) -> LogSums:
        """Add what is 1, 2, 4, … places before, or behind."""
        log = sums.log.view(self.shape)
        mean = sums.mean.view(*self.shape, sums.mean.shape[1])
        for k in range(self.depth):
            step = min(1 << k, self.shape[1])
            near, far = (slice(step, None), slice(None, -step))
            to, of = (near, far) if direction > 0 else (far, near)
            found = LogSums(log[:, to], mean[:, to]).joined(LogSums(log[:, of], mean[:, of]))
            log = log.clone()
            mean = mean.clone()
            log[:, to] = found.log
            mean[:, to] = found.mean
        return LogSums(log.flatten(), mean.flatten(0, 1))


class Intervals:
    r"""Intervals [l_j, h_j) of a line of points: sums over the points of each, and the transpose.

    An interval crosses the middle of one block of 2^k points, at the bit in which l_j and h_j − 1
    first differ. There it is the end of the left half and the beginning of the right half: two
    entries of running sums within halves. These take one step from each size of blocks to the
    next, so that all of it costs O(rows + points · log points).

    Args:
        low: l_j.
        high: h_j; an interval may be empty.
        points: the length of the line.
    """

    def __init__(self, low: Tensor, high: Tensor, points: int) -> None:
        self.low = low
        self.last = high - 1
        self.points = points
        self.size = 1 << max(points - 1, 0).bit_length()
        level = torch.frexp((low ^ self.last).clamp_min(0).double()).exponent
        level = torch.where(high > low, level, -1)
        self.levels = [torch.nonzero(level == k)[:, 0] for k in range(1 + max(int(level.max()), 0))]
        self.depth = 2 * len(self.levels)

    def over(self, points: LogSums) -> LogSums:
        """Return the sums over the points of every interval."""
        more = self.size - self.points
        log = pad(points.log, (0, more), value=NONE)
        right = LogSums(log, pad(points.mean, (0, 0, 0, more)))
        left = right
        out = nothing(len(self.low), points)
        for level, rows in enumerate(self.levels):
            low = left.at(self.low[rows])
            found = low.joined(right.at(self.last[rows])) if level else low
            out.log[rows] = found.log
            out.mean[rows] = found.mean
            if level:
                right, left = _grown(right, 1 << (level - 1)), _grown(left, -(1 << (level - 1)))
        return out

    def covering(self, rows: LogSums) -> LogSums:
        """Return the sums over the intervals that cover each point."""
        right = left = nothing(self.size, rows)
        for level in range(len(self.levels) - 1, 0, -1):
            some = self.levels[level]
            own = rows.at(some)
            right = right.joined(collected(own, self.last[some], self.size))
            left = left.joined(collected(own, self.low[some], self.size))
            half = 1 << (level - 2) if level > 1 else 0
            right = _pushed(right, half)
            left = _pushed(left, -half)
        single = self.levels[0]
        alone = collected(rows.at(single), self.low[single], self.size)
        found = right.joined(left).joined(alone)
        return LogSums(found.log[: self.points], found.mean[: self.points])


def _halves(sums: LogSums, half: int) -> tuple[LogSums, LogSums]:
    """Return the inner and the outer half of every block: left and right, or the reverse if < 0."""
    size = abs(half)
    blocks = len(sums.log) // (2 * size)
    log = sums.log.view(blocks, 2, size)
    mean = sums.mean.view(blocks, 2, size, sums.mean.shape[1])
    inner, outer = (0, 1) if half > 0 else (1, 0)
    return LogSums(log[:, inner], mean[:, inner]), LogSums(log[:, outer], mean[:, outer])


def _whole(inner: LogSums, outer: LogSums, half: int) -> LogSums:
    pair = (inner, outer) if half > 0 else (outer, inner)
    log = torch.stack([part.log for part in pair], 1).flatten()
    return LogSums(log, torch.stack([part.mean for part in pair], 1).flatten(0, 2))


def _grown(sums: LogSums, half: int) -> LogSums:
    """Go from running sums within halves to those within blocks; from the right if < 0."""
    inner, outer = _halves(sums, half)
    end = -1 if half > 0 else 0
    whole = LogSums(inner.log[:, end, None], inner.mean[:, end, None])
    return _whole(inner, outer.joined(whole), half)


def _pushed(sums: LogSums, half: int) -> LogSums:
    """Go from entries of blocks to those of halves: the outer half covers all of the inner."""
    if half == 0:
        return sums
    inner, outer = _halves(sums, half)
    end = abs(half) - 1 if half > 0 else 0
    whole = outer.total()
    last = LogSums(inner.log[:, end], inner.mean[:, end]).joined(whole)
    log, mean = inner.log.clone(), inner.mean.clone()
    log[:, end] = last.log
    mean[:, end] = last.mean
    return _whole(LogSums(log, mean), outer, half)
