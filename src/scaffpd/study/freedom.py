r"""Errors of a mixed model's coefficients where its variances are estimated, and robust ones.

With Q_i the Hessian in x of −log of client i's likelihood, C = (Σ_i Q_i)⁻¹ and E_g the columns of
group g, the information about τ is that of restricted likelihood, and the degrees of freedom of
⟨l, x⟩ are Satterthwaite's (Kenward & Roger 1997):

    G_g = Σ_i Q_i E_g Q_i,    I_gh = ½ Σ_i tr[E_gQ_iE_h(Q_i − 2 Q_iCQ_i)] + ½ tr(C G_g C G_h)
    ν_l = 2 c²/(∂ᵀ I⁻¹ ∂),    c = lᵀC l,    ∂_g = lᵀC G_g C l

Where clients differ less than chance has them, τ_g = 0 and a = Σ_i ‖g_i‖²_g < b = tr_g Σ_i (Q_i −
Q_iCQ_i): the variance is then c·a/b (Hartung & Knapp 2001, without a floor); with c itself, few
clients that are alike would be covered in 99 %. Only a/b below the 1 % quantile of χ²/(N − 1), such
as of one table that is there twice, is no chance, and counts as that.

Of labels and counts x depends on τ, and its estimate with it: as joint likelihood has it (lme4),
C grows by D J⁻¹ Dᵀ with D_g = ∂x/∂log τ_g and J = −∂² log E/∂(log τ)², by differences.

A client's own coefficients take √τ_g as uniform and integrate over it; with the estimate alone,
and above all with an estimate of 0, their errors are too small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from scipy.special import chdtri

from scaffpd.algorithms.climb import Mask
from scaffpd.algorithms.evidence import Evidence, ModePoint
from scaffpd.federation.modes import ModeInformation, ModeSpread, ModeSquares, OwnCoefficients
from scaffpd.training.metrics import Array

POINTS = 8  # at which a deviation is integrated over
MOST = 3  # deviations that are integrated over, one by one
MANY = 50  # clients from which on deviations are known well enough
LITTLE = 0.1  # degrees of freedom of a variance that is all but 0
TINY = 1e-300
CLOSE = 1e-3  # nats
RARE = 0.01  # chance of clients that are more alike than is believed
STEP = 0.1  # of log τ
SURE = 0.25  # the least curvature of log E in log τ that is believed
REACH = 10.0  # standard errors of τ that the integral goes up to


class Inference:
    """Errors, degrees of freedom and own coefficients at a fit.

    Args:
        problem, point: what was asked, and the answers at the estimates.
        C: Cov x.
        differs: which coefficients have a variance between clients.
        rest: degrees of freedom that the rows leave, infinite for likelihoods without a scale.
        L: what is reported: L x.
        robust: whether errors are to be robust.
    """

    def __init__(
        self,
        problem: Evidence,
        point: ModePoint,
        C: Array,
        differs: Mask,
        rest: float,
        L: Array,
        robust: bool,
    ) -> None:
        self.problem = problem
        self.point = point
        self.rest = rest
        self.C = C
        self.N = len(problem.weights)
        self.here = problem.federation.channel.here
        names = np.array(problem.groups)
        several = self.N > 1
        self.own_groups = [differs & (names == g) for g in dict.fromkeys(names[differs]) if several]
        of = np.array(self.own_groups, dtype=float).reshape(-1, len(problem.groups))
        self.of = np.repeat(of, len(self.C) // len(problem.groups), axis=1)
        # of every group: lᵀC G_g C l, ‖g_i‖²_g and tr(C G_g); I; and Σ_i ⟨Cl, g_i⟩²
        self.slopes, self.lengths, self.known, self.squares = self._asked(L, robust)
        p = len(self.of)
        self.unknown = np.linalg.pinv(self.known, hermitian=True) if p else self.known
        self.more = np.zeros_like(self.C)
        alive = [own for own in self.own_groups if point.prior.tau[own].max() > 0]
        if problem.means and not point.lost and 0 < len(alive) <= MOST:
            self._join(alive)

    def _join(self, alive: list[Mask]) -> None:
        """Find what C grows by because τ is estimated."""
        prior = self.point.prior
        x = self.point.x + self.point.step
        moves, slopes = [], []
        for own in alive:
            ends = []
            for step in (STEP, -STEP):
                tau = np.where(own, prior.tau * np.exp(step), prior.tau)
                at = replace(prior, tau=tau)
                point = self.problem.mode(at, x, self.point.question, CLOSE)
                size, freedom, _ = self.problem.moments(point)
                slope = [(size - freedom)[0, : len(g)][g].sum() / 2 for g in alive]
                ends.append((point.x + point.step).flatten().tolist() + slope)
            change = np.subtract(ends[0], ends[1]) / (2 * STEP)
            moves.append(change[: len(x)])
            slopes.append(change[len(x) :])
        bends, V = np.linalg.eigh(-(np.array(slopes) + np.array(slopes).T) / 2)
        D = np.array(moves).T @ V
        self.more = D / np.maximum(bends, SURE) @ D.T

    def _asked(self, L: Array, robust: bool) -> tuple[Array, Array, Array, Array]:
        """Ask for all of it; silos show squares alone, which bound tr(C G_g C G_g) from below."""
        q, p, k = len(self.C), len(L), len(self.of)
        LC = L @ self.C
        point = self.point
        parts = point.question, point.C, point.step.flatten()
        groups = torch.from_numpy(self.of).to(point.C)

        def added(question: ModeInformation | ModeSquares) -> Array:
            seen = self.problem.federation.ask(question)
            found = seen.added(question.vectors[0], self.problem.weights)
            return np.asarray(found.double().cpu().numpy())

        if not (k or robust):
            return np.zeros((p, 0)), np.zeros((2, 0)), np.zeros((0, 0)), np.full(p, np.nan)
        if self.here:
            answer = added(ModeInformation(*parts, groups))
            outer = answer[: q * q].reshape(q, q)
            G = answer[q * q : q * q * (k + 1)].reshape(k, q, q)
            turned = self.C @ G
            known = answer[q * q * (k + 1) :].reshape(k, k)
            return (
                np.einsum("la,gab,lb->lg", LC, G, LC),
                np.stack([self.of @ np.diag(outer), np.trace(turned, axis1=1, axis2=2)]),
                (known + np.einsum("gab,hba->gh", turned, turned)) / 2,
                ((LC @ outer) * LC).sum(1),
            )
        rows = torch.from_numpy(np.ascontiguousarray(LC)).to(point.C)
        answer = added(ModeSquares(*parts, groups, rows, robust))
        along, lengths, known, squares = np.split(answer, np.cumsum([k * p, 2 * k, k * k]))
        along = along.reshape(p, k)
        # tr M² is at least (uᵀMu/uᵀu)² for any u, such as C^½ l, of M = C^½ G_g C^½
        most = (along / np.maximum((LC * L).sum(1), TINY)[:, None]).max(0)
        return (
            along,
            lengths.reshape(2, k),
            (known.reshape(k, k) + np.diag(most**2)) / 2,
            squares,
        )

    @cached_property
    def less(self) -> Array:
        """By how much less than by chance clients differ, where τ is 0 or on its way there."""
        found = np.ones(len(self.C))
        total = np.linalg.inv(self.C)
        others = max(self.N - 1, 1)
        least = float(chdtri(others, 1 - RARE)) / others
        for g, own in enumerate(self.of > 0):
            tau = self.point.prior.tau[self.own_groups[g]]
            chance = np.diag(total)[own].sum() - self.lengths[1, g]
            if tau.max() * chance < LITTLE and chance > 0:
                found[own] = np.clip(self.lengths[0, g] / chance, least, 1.0) ** 0.5
        return found

    def errors(self, L: Array) -> tuple[Array, Array]:
        """Return the standard errors of L x, and their degrees of freedom."""
        variance = ((L @ self.C) * L).sum(1)
        slopes = self.slopes
        spread = ((slopes @ self.unknown) * slopes).sum(1)
        freedom = np.full(len(L), self.rest)
        np.divide(2 * variance**2, spread, out=freedom, where=spread > 0)
        L = L * self.less
        variance = ((L @ (self.C + self.more)) * L).sum(1)
        return np.sqrt(np.maximum(variance, 0.0)), np.clip(freedom, 1.0, self.rest)

    def robust(self, L: Array) -> tuple[Array, Array]:
        """Return errors from C (Σ_i g_ig_iᵀ) C, times N/(N − 1)·(n − 1)/(n − q)."""
        N = self.N
        n = self.problem.n
        scale = (N / (N - 1) if N > 1 else np.nan) * (n - 1) / max(n - len(self.C), 1)
        variance = self.squares * scale
        return np.sqrt(np.maximum(variance, 0.0)), np.full(len(L), max(N - 1.0, 1.0))

    def own(self, L: Array, known: bool = True) -> tuple[Array, Array]:
        """Return the clients' L u_i and their variances, integrated over the deviations: of few
        clients, where x is known; none of silos, where they stay.
        """
        if not self.here:
            return np.zeros((0, len(L))), np.zeros((0, len(L)))
        mean, variance = plain = self._own(self.point, L)
        few = len(mean) < MANY and len(self.own_groups) <= MOST
        if few and known:
            for g, own in enumerate(self.own_groups):
                found = list(self._over(g, own, L))
                if not found:
                    continue
                weights, values = zip(*found, strict=True)
                w = np.exp(np.array(weights) - max(weights))
                means, variances = np.array(values).swapaxes(0, 1)
                centre = np.tensordot(w / w.sum(), means, 1)
                spread = np.tensordot(w / w.sum(), variances + (means - centre) ** 2, 1)
                mean = mean + centre - plain[0]
                variance = variance + np.maximum(spread - plain[1], 0.0)
        return mean, variance

    def _over(self, g: int, own: Mask, L: Array) -> Iterator[tuple[float, tuple[Array, Array]]]:
        """Return log evidence and own coefficients at deviations of one group."""
        prior = self.point.prior
        most = prior.tau[own].max() + REACH * max(self.unknown[g, g], 0.0) ** 0.5
        point = self.point
        for s in (np.arange(POINTS) + 0.5) / POINTS * most**0.5:
            tau = np.where(own, s * s, prior.tau)
            x = point.x + point.step
            point = self.problem.mode(replace(prior, tau=tau), x, point.question)
            if point.lost:
                return
            yield point.evidence, self._own(point, L)

    def _own(self, point: ModePoint, L: Array) -> tuple[Array, Array]:
        rows = torch.from_numpy(L).to(point.C)
        question = OwnCoefficients(point.question, point.C, point.step.flatten(), rows)
        each = self.problem.federation.ask(question).each("own").double().cpu().numpy()
        return each[:, 0], each[:, 1]

    def free(self, last: int) -> tuple[Array, Array]:
        """Return the mean of the last coefficients over clients, and their variance, by sums."""
        rows = np.eye(len(self.C))[-last:]
        point = self.point
        ask = self.problem.federation.ask
        parts = point.question, point.C, point.step.flatten()
        sums = ask(OwnCoefficients(*parts, torch.from_numpy(rows).to(point.C)))
        mean = sums.added("own", self.problem.weights).double().cpu().numpy()[0] / self.N
        spread = ask(ModeSpread(*parts)).added("spread", self.problem.weights)[0, -last:]
        x = (point.x + point.step).flatten()[-last:]
        tau = np.repeat(point.prior.tau, len(self.C) // len(self.problem.groups))[-last:]
        squares = spread.double().cpu().numpy() * tau - self.N * (mean - x.cpu().numpy()) ** 2
        return mean, np.maximum(squares, 0.0) / max(self.N - 1, 1)
