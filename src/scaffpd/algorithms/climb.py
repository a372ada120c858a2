"""The fixed point of `algorithms/evidence.py`: how variances move, for any number of problems."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from scaffpd.federation import Vector

LIMIT = 60  # rounds of the fixed point
LARGEST = 25.0  # a variance, in units that explain about all
NOTHING = 1e-3  # degrees of freedom below which a family that shrinks says nothing any more
LEAST = 1e-8  # of the targets' variance: the smallest σ²
FASTER = 5.0  # times the step of the fixed point, at most
SLACK = 0.1  # nats that a faster step may lose before it is shortened
JUMP = 30.0  # factor by which a variance may change in a round

Families = NDArray[np.int64]  # per feature: the number of the variance that it shares, or −1
Mask = NDArray[np.bool_]


class Units(Protocol):
    """What the fixed point has to know of an `Evidence`."""

    squared: bool
    means: bool
    noise: float
    unit: Vector


class Climb(ABC):
    """The fixed point, for n problems at once: the n rows of every array are their own.

    Variances of a row with the same number in a family change by the same factor. One with number
    −1 stays as it is, or is `tied`: a multiple of s.

    Attributes:
        variances, scale: (n, variances) and s, (n,).
        families: (n, variances).
        targets: numbers of rows times targets.
        vanish: which variances become 0 when they have shrunk to nothing; others stay as they are.
        size, freedom: sums of squares over their variance, and degrees of freedom. Their difference
            is twice the derivative of log E in the log of the variance (at fixed curvature, where
            the loss is not squared).
        residual: RSS/σ², (n,).
        evidence: log E, (n,).
        decrease: nats that the answers are from the mode.
    """

    problem: Units
    families: Families
    targets: Vector | float
    tied: Mask | bool = False
    vanish: Mask | bool = False
    size: Vector
    freedom: Vector
    residual: Vector
    evidence: Vector
    decrease = 0.0
    rounds = 0

    def __init__(self, problem: Units, variances: Vector, scale: Vector) -> None:
        self.problem = problem
        self.variances = variances
        self.scale = scale
        self.most = LARGEST * np.tile(problem.unit, variances.shape[1] // len(problem.unit))

    @abstractmethod
    def answer(self) -> None:
        """Find the modes and what follows from them, from those before."""

    def started(self, families: Families) -> Self:
        self.families = families.copy()
        self.answer()
        return self

    def run(self, tol: float) -> None:
        """Update all variances until no evidence gains `tol` nats a round."""
        before: tuple[Vector, Vector] | None = None
        fastest = np.full((len(self.scale), 1), FASTER)
        best = np.full(len(self.scale), -np.inf)
        while True:
            # where the evidence is largest, sums of squares equal degrees of freedom: a = b
            a, b = self._sums()
            known = (a > 0) & (b > 0)
            # in logarithms, so that no step makes a variance negative
            residual = np.log(np.where(known, a, 1) / np.where(known, b, 1))
            # one at its limit wants to grow for ever, which is no reason to go on
            full = _added(self.families, self.variances < 0.999 * self.most) == 0
            residual[:, :-1][full[:, :-1] & (residual[:, :-1] > 0)] = 0.0
            # (a − b)/2 is the slope of log E, so this is what a round can gain
            active = np.abs((a - b) * residual).sum(1) / 2 + self.decrease >= tol
            if self.rounds >= LIMIT or not active.any():
                return
            # A step that has lost evidence was too long. A flat x that rows separate is anywhere,
            # and with it the evidence, which then tells nothing about the step.
            if not self.problem.means:
                fastest[self.evidence < best - SLACK] /= 2
            best = np.maximum(best, self.evidence)
            change = faster(residual, before, np.maximum(fastest, 1.0)) * active[:, None]
            before = change, residual
            self._change(change, (a < b) & (b < NOTHING) & active[:, None])
            self.answer()
            self.rounds += 1

    def _sums(self) -> tuple[Vector, Vector]:
        """Return every family's sums of squares and degrees of freedom, and last those of σ²."""
        a, b = (_added(self.families, part) for part in (self.size, self.freedom))
        # the last column was that of number −1, and now is that of σ²: a = b where there is none
        a[:, -1] = b[:, -1] = 1.0
        if self.problem.squared:
            # as many rows are spent as the coefficients have degrees of freedom
            free = np.maximum(self.targets - self.freedom.sum(1), 1e-9)
            a[:, -1] = self.residual + (self.tied * self.size).sum(1)
            b[:, -1] = free + (self.tied * self.freedom).sum(1)
        return a, b

    def _change(self, change: Vector, gone: Mask) -> None:
        """Change every family; let go of what has shrunk to nothing."""
        inside = self.families >= 0
        before = self.scale
        self.scale = before * np.exp(change[:, -1])
        if self.problem.squared:
            self.scale = np.maximum(self.scale, 2 * LEAST * self.problem.noise)
        # number −1 takes the last column, that of σ², and `inside` drops it
        factor = np.exp(np.take_along_axis(change, self.families, 1))
        fixed = np.where(self.tied, (self.scale / before)[:, None], 1.0) * self.variances
        self.variances = np.where(inside, np.minimum(self.variances * factor, self.most), fixed)
        over = inside & np.take_along_axis(gone, self.families, 1)
        self.variances[over & self.vanish] = 0.0
        self.families[over] = -1


def faster(
    residual: Vector, before: tuple[Vector, Vector] | None, fastest: float | Vector
) -> Vector:
    """Return how log variances move: by their residuals log(a/b), times factors up to `fastest`.

    The last changes, and the residuals `before` them, suggest these: the plain fixed point is slow
    where clients have few rows.
    """
    factor = np.ones_like(residual)
    if before is not None:
        moved = np.abs(before[0]) > 1e-9
        # a secant step per variance: the root of the line through the last two residuals
        slope = (residual - before[1]) / np.where(moved, before[0], 1)
        factor = np.where(moved, np.clip(-1 / np.minimum(slope, -0.01), 0.5, fastest), 1)
    return np.clip(factor * residual, -np.log(JUMP), np.log(JUMP))


def _added(families: Families, values: Vector | Mask) -> Vector:
    """Return every row's sums over its families; the last column is that of number −1."""
    total = np.zeros((len(families), families.shape[1] + 1))
    np.add.at(total, (np.arange(len(families))[:, None], families), values)
    return total
