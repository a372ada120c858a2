r"""Models that clients train by themselves, with the ridge of their own evidence, all at once.

    u_i ~ N(0, Ω_i),   Ω_i = diag(ω_ig),      ω_ig ← ‖u_i‖²_g / Σ_{j∈g} (1 − V_jj/ω_ig)
                                              σ_i² ← RSS_i/(n_i − all degrees of freedom)

is the evidence of `algorithms/evidence.py` for one client and τ = 0: first one ω_i for all groups,
and one per group where that gains a nat each. What a column can explain is measured on everybody's
rows, as columns are scaled by all: on its own rows, a column that hardly varies there would get a
large variance, and answers that are far off where it does vary. The intercept is free for numbers.
For labels it is N(0, 4), which is near Laplace's rule (ones + 1)/(rows + 2): a client that has seen
one label only does not know that there is no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.evidence import (
    FASTER,
    FLAT,
    INTERCEPT,
    LARGEST,
    LEAST,
    LIMIT,
    NOTHING,
    ROUGH,
    SLACK,
    START,
    WORTH,
    Evidence,
    faster,
)
from scaffpd.models import Linear
from scaffpd.models.execution import limit_threads, parallel_map
from scaffpd.models.glm import LinearOracle
from scaffpd.models.modes import ModeRows, Solved
from scaffpd.models.newton import portions
from scaffpd.models.samples import PaddedBlock
from scaffpd.training.cohort import Cohort, Pair
from scaffpd.training.settling import groups_of

Array = NDArray[np.float64]
Families = NDArray[np.int64]
CLOSE = 0.1, 1e-12  # slope of a Newton step, in nats, while strengths are sought and at the end


@dataclass
class _Fit:
    """Where the clients of a block are: variances per feature, s_i, and what follows from them."""

    omega: Array  # (n, features)
    scale: Array  # (n,)
    v: Tensor  # (n, q, copies)
    evidence: Array  # (n,)


class _Block:
    """Clients of a block, each with its own evidence."""

    def __init__(self, problem: Evidence, rows: ModeRows, block: PaddedBlock, counts: bool) -> None:
        self.problem = problem
        self.rows = rows
        self.who = block.clients
        self.samples, self.y, self.weight = rows.of(block)
        self.A = (
            self.samples if isinstance(self.samples, Tensor) else rows.rows.of(block)[0].double()
        )
        self.n = rows.sizes[self.who].numpy(force=True)
        wide = np.array(problem.groups) == INTERCEPT
        intercept = FLAT if problem.squared else LARGEST if counts else START[1]
        omega = np.where(wide, intercept * problem.unit, START[1] * problem.share)
        shape = len(self.who), len(problem.groups)
        self.families = [
            np.broadcast_to(np.where(wide, -1, family), shape)
            for family in (problem.joined, problem.own)
        ]
        scale = np.full(len(self.who), 2 * problem.noise if problem.squared else 1.0)
        v = self.weight.new_zeros(len(self.who), len(problem.groups) * rows.coupled, problem.copies)
        self.start = _Fit(np.tile(omega, (len(self.who), 1)), scale, v, np.empty(0))

    def models(self) -> tuple[Tensor, Tensor]:
        """Return the clients' coefficients, (n, d), and what is proven of them.

        In v, what is minimised is strongly convex with modulus 1: its gap is ‖∇‖²/2 at most. Of the
        mean loss it is that times s_i/n_i. Rounding is bounded by γ = ε·(terms of a sum).
        """
        common, single = self.families
        more = len(np.unique(single)) - len(np.unique(common))
        rough = max(ROUGH[0], ROUGH[1] * more)
        fit = self._climbed(self.start, common, rough)
        if more:
            other = self._climbed(fit, single, rough)
            gains = other.evidence - fit.evidence > WORTH * more
            fit = _chosen(gains, other, fit)
            fit = self._climbed(fit, np.where(gains[:, None], single, common), ROUGH[0])
        end = self._solved(fit, CLOSE[1])
        u, gap = self._proven(fit, end)
        gap[end.slope > CLOSE[1]] = torch.inf  # r is of the step before
        return u, gap

    def _proven(self, fit: _Fit, end: Solved) -> tuple[Tensor, Tensor]:
        S = self._deviations(fit)
        u = S[..., None] * end.v
        pull = (self.A.mT @ end.r).view_as(u)
        each = u.abs().view(len(u), self.A.shape[2], -1)
        size = self.y.abs().reshape(*self.y.shape[:2], -1).amax(2, keepdim=True)
        reach = (self.A.abs() @ each + 1) * (size + 1)
        scale = torch.from_numpy(fit.scale).to(u)
        error = self.A.abs().mT @ (end.r.abs() + (self.weight / scale[:, None])[..., None] * reach)
        terms = 8 * torch.finfo(u.dtype).eps * (torch.from_numpy(self.n).to(u) + len(S[0]))
        slack = S[..., None] * error.view_as(u) + end.v.abs()
        norm = (S[..., None] * pull + end.v).flatten(1).norm(dim=1)
        gap = (norm + terms * slack.flatten(1).norm(dim=1)).square() / 2
        return u.flatten(1), gap * scale / torch.from_numpy(self.n).to(u)

    def _deviations(self, fit: _Fit) -> Tensor:
        return (
            torch.from_numpy(np.sqrt(fit.omega))
            .to(self.weight)
            .repeat_interleave(self.rows.coupled, 1)
        )

    def _solved(self, fit: _Fit, close: float) -> Solved:
        weight = self.weight / torch.from_numpy(fit.scale).to(self.weight)[:, None]
        z = weight.new_zeros(*weight.shape, self.rows.outputs)
        return self.rows.solve(
            (self.samples, self.y, weight), z, self._deviations(fit), fit.v, close
        )

    def _climbed(self, start: _Fit, families: Families, tol: float) -> _Fit:
        """Update ω_i and σ_i² until a client's evidence gains less than `tol` nats a round."""
        fit = start
        families = families.copy()
        before: tuple[Array, Array] | None = None
        fastest = np.full((len(self.n), 1), FASTER)
        best = np.full(len(self.n), -np.inf)
        for _ in range(LIMIT):
            fit, a, b = self._moments(fit, families)
            known = (a > 0) & (b > 0)
            residual = np.log(np.where(known, a, 1) / np.where(known, b, 1))
            residual[self._capped(fit, families) & (residual > 0)] = 0.0
            active = np.abs((a - b) * residual).sum(1) / 2 >= tol
            if not active.any():
                break
            fastest[fit.evidence < best - SLACK] /= 2
            best = np.maximum(best, fit.evidence)
            change = faster(residual, before, np.maximum(fastest, 1.0)) * active[:, None]
            before = change, residual
            fit = self._changed(fit, families, change)
            gone = (a < b) & (b < NOTHING) & active[:, None]
            families[(families >= 0) & np.take_along_axis(gone, families, 1)] = -1
        return fit

    def _moments(self, fit: _Fit, families: Families) -> tuple[_Fit, Array, Array]:
        """Return the fit at its modes, with sums of squares and degrees of freedom: ω, then σ²."""
        problem = self.problem
        found = self._solved(fit, CLOSE[0])
        v = found.v - found.step
        L = found.near.L.diagonal(dim1=1, dim2=2)
        inside = problem.copies * L.log().sum(1)
        rest = self.rows.rest[self.who] / torch.from_numpy(fit.scale).to(self.weight)
        value = found.value - found.slope / 2 + rest
        size = v.square().sum(2)
        freedom = problem.copies * found.near.freedom
        left = 2 * value - size.sum(1)
        each, free = (
            part.view(len(self.n), -1, self.rows.coupled).sum(2).numpy(force=True)
            for part in (size, freedom)
        )
        evidence = -(value + inside).numpy(force=True)
        a, b = (_added(families, part) for part in (each, free))
        if problem.squared:
            rows = self.n * problem.copies
            evidence -= rows / 2 * np.log(np.pi * fit.scale)
            a[:, -1] = left.numpy(force=True)
            b[:, -1] = np.maximum(rows - free.sum(1), 1e-9)
        return _Fit(fit.omega, fit.scale, v, evidence), a, b

    def _capped(self, fit: _Fit, families: Families) -> NDArray[np.bool_]:
        """Return which families are as large as they may be."""
        below = fit.omega < 0.999 * LARGEST * self.problem.unit
        full: NDArray[np.bool_] = _added(families, below) == 0
        full[:, -1] = False
        return full

    def _changed(self, fit: _Fit, families: Families, change: Array) -> _Fit:
        problem = self.problem
        factor = np.where(families >= 0, np.take_along_axis(change, families, 1), 0.0)
        omega = np.where(
            families >= 0,
            np.minimum(fit.omega * np.exp(factor), LARGEST * problem.unit),
            fit.omega,
        )
        scale = fit.scale * np.exp(change[:, -1])
        if problem.squared:
            scale = np.maximum(scale, 2 * LEAST * problem.noise)
        near = torch.from_numpy(np.sqrt(fit.omega / omega)).to(self.weight)
        v = fit.v * near.repeat_interleave(self.rows.coupled, 1)[..., None]  # the same u_i
        return _Fit(omega, scale, v, fit.evidence)


def _added(families: Families, values: Array | NDArray[np.bool_]) -> Array:
    """Return every client's sums over its families, and a last column for σ²."""
    n, features = families.shape
    total = np.zeros((n, features + 1))
    place = np.where(families >= 0, families, features)
    np.add.at(total, (np.arange(n)[:, None], place), values)
    total[:, -1] = 0.0
    return total


def _chosen(which: NDArray[np.bool_], one: _Fit, other: _Fit) -> _Fit:
    """Take the first for some clients, and the second for the others."""
    column = which[:, None]
    chosen = torch.from_numpy(column[..., None]).to(one.v.device)
    return _Fit(
        np.where(column, one.omega, other.omega),
        np.where(which, one.scale, other.scale),
        torch.where(chosen, one.v, other.v),
        np.where(which, one.evidence, other.evidence),
    )


def fit_alone(model: Linear, pairs: Sequence[Pair]) -> tuple[Array, Array]:
    """Train every client by itself, with the ridge of its own evidence.

    Return the models, (clients, d), and each client's proven gap.
    """
    cohort = Cohort(pairs, replace(model, l2=1.0), settle=False)
    inner = cohort.channel.train.oracle
    assert isinstance(inner, LinearOracle)
    features = cohort.channel.train.shape[0]
    with limit_threads(inner.rows.A.numel()):
        problem = Evidence(cohort, groups_of(model, features), model.loss)
        rows = ModeRows(inner, problem.coupled)
        found = problem.zero().new_empty(len(cohort.names), len(inner.start()))
        gaps = found.new_empty(len(found))

        def work(block: PaddedBlock) -> None:
            fit = _Block(problem, rows, block, model.uneven)
            found[block.clients], gaps[block.clients] = fit.models()

        width = len(problem.groups) * problem.coupled
        parallel_map(work, portions(rows.rows, width), found.device)
    return found.numpy(force=True), gaps.numpy(force=True)
