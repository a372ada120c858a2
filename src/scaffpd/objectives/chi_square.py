"""The χ² penalty on leaving the prior, and its limits: the worst client alone, the prior alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.errors import PART, InputError, ranged
from scaffpd.objectives import simplex
from scaffpd.objectives.base import (
    EPSILON,
    Objective,
    ProxStep,
    Scale,
    Vector,
    above,
    read_scale,
    roundings,
)

TRIED = 16
ROUNDING = 1e-9
# ρ of a path, in units of how far the losses of the average model differ
WIDEST = 10.0
NARROWEST = 1 / 30


class ChiSquare(Objective):
    r"""Λ = {λ in the simplex, λ_i ≤ κ}, ψ(λ) = (ρ/2) Σ_i (λ_i − p_i)²/p_i.

    The penalised χ² divergence of distributionally robust optimisation (Levy, Carmon, Duchi and
    Sidford 2020, "Large-scale methods for distributionally robust optimization"; Duchi and Namkoong
    2021, "Learning models with uniform performance via distributionally robust optimization"). Its
    optimum guarantees the best trade-off between mean and spread: while no weight reaches zero, x
    minimises exactly Σ p_i f_i + Var_p(f)/(2ρ). ρ → ∞ is `Average` and ρ → 0 is `Agnostic`; with a
    cap κ, ρ → 0 is the mean of the 1/κ largest losses, and no client can move the model by more
    than its share κ of the gradient.

    Args:
        rho: the penalty ρ > 0 on leaving the prior, in units of the loss.
        prior: reference weights p, 1/N each if not given.
        cap: κ, the largest weight of a client, between 1/N and 1; no cap if not given.
    """

    parameter = "rho"
    symbol = "ρ"
    usual = 0.1
    meaning = "ρ says how fair: small looks at those served worst, large at the average"

    def __init__(
        self, rho: float, prior: ArrayLike | None = None, cap: float | None = None
    ) -> None:
        self.rho = read_scale("ChiSquare", "rho", rho)
        self.cap = None if cap is None else read_scale("ChiSquare", "cap", cap)
        if self.cap is not None:
            ranged("ChiSquare", "cap", cap, PART, "cap-out-of-range")
        super().__init__(prior)

    @staticmethod
    def strengths(losses: Vector, points: int) -> Vector:
        """Return ρ in units of how far the losses differ."""
        least = 1e-9 * (1 + float(np.abs(losses).max()))
        scale = max(float(np.abs(losses - losses.mean()).max()), least)
        return np.geomspace(WIDEST * scale, NARROWEST * scale, points)

    def caps(self, n: int) -> Vector | None:
        return None if self.cap is None else np.full(n, self.cap)

    def weights(self, n: int) -> Vector:
        """Return the prior p for `n` clients; refuse fewer than 1/κ of them."""
        if self.cap is not None and n * self.cap < 1.0 - 4.0 * EPSILON * n:
            raise InputError(
                "cap-too-small",
                f"ChiSquare has cap={self.cap:g}, but {n} clients need at least {1 / n:g} (1/{n}).",
            )
        return super().weights(n)

    def start(self, losses: Vector) -> Vector:
        """Return λ⁰: the prior, or the nearest weights below the cap."""
        prior = super().start(losses)
        caps = self.caps(len(prior))
        inside = caps is None or np.all(prior <= caps)
        return prior if inside else self._maximizer(np.zeros(len(prior)))

    def _value(self, weights: Vector) -> float:
        p = self.weights(len(weights))
        return float(0.5 * self.rho * np.add.reduce((weights - p) ** 2 / p))

    def _maximizer(self, losses: Vector) -> Vector:
        """Return λ_i = min(p_i [(L_i − ν)/ρ]₊, κ) with ν such that Σ λ_i = 1."""
        return self._projected(losses, 0.0, self.weights(len(losses)) / self.rho)

    def _ceiling(self, losses: Vector) -> float:
        n = len(losses)
        weights = self._maximizer(losses)
        return simplex.dual_above(losses, weights, self.weights(n), self.rho, self.caps(n))

    def _cost(self, weights: Vector) -> float:
        """Bound ψ(λ), including its change if λ is moved back below the cap."""
        p = self.weights(len(weights))
        caps = self.caps(len(weights))
        moved = 0.0
        if caps is not None:
            moved = 2.0 * self._stretch(weights) * (float(np.max(caps / p)) + 1.0)
        return self.rho * (0.5 * simplex.distance_above(weights, p) + moved)

    def _stretch(self, weights: Vector) -> float:
        caps = self.caps(len(weights))
        return 0.0 if caps is None else simplex.share_above(weights, caps)

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        """Return λ_i = min(d_i [s_i + l_i/σ_i − ν]₊, κ), d_i = 1/(ρ/p_i + 1/σ_i), Σ λ_i = 1."""
        rate = self._rate(len(s), sigma)
        weights = self._projected(s, old / sigma, rate)
        return simplex.capped_step(weights, rate, np.inf if self.cap is None else self.cap)

    @property
    def separable(self) -> bool:
        """Whether the prior is below the cap, as clients take for granted."""
        return self.cap is None or self.prior is None or bool(self.prior.max() <= self.cap)

    def _most(self, p: Vector) -> Vector:
        return np.full(len(p), 1.0 if self.cap is None else self.cap)

    def _penalties(self, weights: Vector, p: Vector) -> Vector:
        return np.asarray(0.5 * self.rho * (weights - p) ** 2 / p)

    def _conjugate(self, t: Vector, p: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        """Return λ_i = p_i (1 + t_i/ρ) between 0 and κ, with its slope p_i/ρ."""
        free = p * (1.0 + t / self.rho)
        top = self._most(p)
        weights = np.clip(free, 0.0, top)
        value = weights * t - self._penalties(weights, p)
        slope = np.where((free > 0.0) & (free < top), p / self.rho, 0.0)
        return value, weights, slope, np.where(free > 0.0, p / self.rho, 0.0)

    def largest(self, n: int) -> float:
        return 1.0 if self.cap is None else self.cap

    def strong_convexity(self, n: int) -> float:
        """Return ρ / max_i p_i."""
        return float(self.rho / self.weights(n).max())

    def _rate(self, n: int, sigma: Scale) -> Vector:
        """Return 1 / (ρ/p_i + 1/σ_i)."""
        p = self.weights(n)
        return sigma * (p / (p + sigma * self.rho))

    def _projected(self, s: Vector, pull: Vector | float, w: Vector) -> Vector:
        """Return λ_i = min(w_i [s_i + pull_i − ν]₊, κ) with Σ λ_i = 1.

        With a cap ν may lie far below the largest s_i. So it is computed twice, the second time
        relative to the s_i nearest to it: then s_i − ν keeps its digits if λ_i is neither zero nor
        κ. If that was not the right one, the next nearest are tried.
        """
        if (caps := self.caps(len(s))) is None:
            return simplex.project_weighted(s - s.max() + pull, w)
        top = s.max()
        _, level = simplex.project_capped(s - top + pull, caps, w)
        near = np.unique(s)
        near = near[np.argsort(np.abs(near - top - level))]
        best, wrong = self._measured(s, pull, w, caps, near[0])
        for origin in near[1:TRIED]:
            if wrong <= ROUNDING:
                break
            other = self._measured(s, pull, w, caps, origin)
            best, wrong = other if other[1] < wrong else (best, wrong)
        return best

    @staticmethod
    def _measured(
        s: Vector, pull: Vector | float, w: Vector, caps: Vector, origin: float
    ) -> tuple[Vector, float]:
        """Return λ with s relative to one of its entries, and the error of Σ λ_i at that ν.

        Entries far from the origin are at zero, or at κ, for any ν near it.
        """
        far = 8.0 * (float(np.max(caps / w)) + float(np.max(np.abs(pull))))
        u = np.clip(s - origin + pull, -far, far)
        weights, level = simplex.project_capped(u, caps, w)
        wrong = abs(float(np.clip(w * (u - level), 0.0, caps).sum()) - 1.0)
        # a ν that far away belongs to another origin
        return weights, wrong if abs(level) <= far / 4 else wrong + 1.0


class Agnostic(Objective):
    r"""Λ = the simplex, ψ = 0:  min_x max_i f_i(x).

    "Agnostic federated learning" (Mohri, Sivek and Suresh 2019). Its optimum guarantees the
    smallest possible worst loss, and with it the best bound on the loss under every mixture of the
    clients that may turn up later. The prior does not enter Λ: it is the start λ⁰, and breaks ties.
    """

    def _prox(self, s: Vector, old: Vector, sigma: Scale) -> Vector:
        """Return λ_i = [l_i + σ_i(s_i − ν)]₊ , Σ λ_i = 1: for one σ, the projection of l + σs."""
        return simplex.project_weighted(s - s.max() + old / sigma, sigma * np.ones(len(s)))

    def _maximizer(self, losses: Vector) -> Vector:
        """Put all weight on the clients with the largest loss, in proportion to the prior."""
        return simplex.normalised(np.where(losses == losses.max(), self.weights(len(losses)), 0.0))

    def _ceiling(self, losses: Vector) -> float:
        """Return max_i L_i, which has no rounding error."""
        return float(losses.max())

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        return simplex.capped_step(self._prox(s, old, sigma), sigma)


class Average(Objective):
    r"""Λ = {p}, ψ = 0:  min_x Σ p_i f_i(x).

    The objective of federated averaging (McMahan, Moore, Ramage, Hampson and Agüera y Arcas 2017).
    Its optimum guarantees the smallest prior-weighted mean loss.
    """

    def _maximizer(self, losses: Vector) -> Vector:
        return self.weights(len(losses)).copy()

    def _ceiling(self, losses: Vector) -> float:
        return above(self.weights(len(losses)) * losses, more=roundings(len(losses)) + 8)

    separable = True

    def _most(self, p: Vector) -> Vector:
        return p

    _least = _most

    def _conjugate(self, t: Vector, p: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        """Return λ_i = p_i, whatever t is."""
        return p * t, p, np.zeros(len(p)), np.zeros(len(p))

    def largest(self, n: int) -> float:
        return float(self.weights(n).max())

    def _stretch(self, weights: Vector) -> float:
        return simplex.share_above(weights, self.weights(len(weights)))

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        return ProxStep(self.weights(len(s)).copy(), np.zeros(len(s)), np.empty((0, len(s))))
