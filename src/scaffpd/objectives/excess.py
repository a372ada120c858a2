"""Excess losses: an objective of the clients' losses above their own levels, or of their losses on other rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.errors import InputError
from scaffpd.objectives.base import (
    LARGEST,
    Objective,
    ProxStep,
    Scale,
    Vector,
    above,
    finite_vector,
    roundings,
)
from scaffpd.objectives.base import inner as product

HELD_OUT = "held-out"
TURNS = 60
IDLE = 12
LEAST_SHARE = 0.05


class Excess(Objective):
    r"""Any objective on f_i(x) − b_i in the place of f_i(x): ψ_b(λ) = ψ(λ) + ⟨b, λ⟩ on the same Λ.

    A loss has a part that no model removes, such as the noise of labels. By raw losses, the noisiest client gets the
    weight; by the excess over its own optimum, the client that a common model serves worst gets it.
    `Excess(Agnostic(), "own")` is minimax regret (Agarwal and Zhang 2022, "Minimax regret optimization for robust
    machine learning under distribution shift"; Mo, Xu and Xue 2024).

    Args:
        objective: (Λ, ψ), such as `CVaR(0.2)`.
        offset: b, one number per client or one for all; or "own", each client's own optimum min_u f_i(u), which the
            clients compute when `train` begins (N numbers go up); or "held-out": λ maximises over the
            losses h_i on held-out rows (`Cohort(..., test=...)`, no longer test rows), see `equilibrium`.
    """

    def __init__(self, objective: Objective, offset: float | ArrayLike | str) -> None:
        if not isinstance(objective, Objective) or isinstance(objective, Excess):
            raise InputError(
                "excess-objective-such",
                f"Excess needs an objective such as CVaR(0.2), got {objective!r}.",
            )
        self.objective = objective
        self.offset = offset
        if isinstance(offset, str):
            if offset not in ("own", HELD_OUT):
                raise InputError(
                    "excess-numbers-offset",
                    f"Excess needs numbers in offset, {HELD_OUT!r} or 'own', got {offset!r}.",
                )
        else:
            self.offset = finite_vector(
                "Excess", "offset", np.atleast_1d(np.asarray(offset)), LARGEST
            )

    @property
    def simplex(self) -> bool:  # type: ignore[override]
        """Same as the wrapped objective."""
        return self.objective.simplex

    @property
    def prior(self) -> Vector | None:  # type: ignore[override]
        """Same as the wrapped objective."""
        return self.objective.prior

    @property
    def by_held_out(self) -> bool:
        """Return whether λ maximises over losses on held-out rows."""
        return isinstance(self.offset, str) and self.offset == HELD_OUT

    def settled(self, federation: Any) -> Excess:
        """Return the objective with numbers; ask clients for their own optima if the offset is "own"."""
        if not isinstance(self.offset, str):
            return self
        return Excess(self.objective, federation.optima())

    def levels(self, n: int) -> Vector:
        """Return the levels b for `n` clients."""
        if isinstance(self.offset, str):
            raise InputError(
                "offset-numbers-train",
                f"offset={self.offset!r} has no numbers before `train` has asked the clients for them.",
            )
        b = np.asarray(self.offset)
        if len(b) not in (1, n):
            raise InputError(
                "excess-offset-clients",
                f"Excess has an offset for {len(b)} clients, but there are {n}.",
            )
        return np.broadcast_to(b, n)

    def weights(self, n: int) -> Vector:
        """Return the prior p for `n` clients."""
        self.levels(n)
        return self.objective.weights(n)

    def _value(self, weights: Vector) -> float:
        """Return ψ(λ) + ⟨b, λ⟩."""
        return self.objective._value(weights) + product(self.levels(len(weights)), weights)

    def _contains(self, weights: Vector, tolerance: float) -> bool:
        return self.objective._contains(weights, tolerance)

    def _prox(self, s: Vector, old: Vector, sigma: Scale) -> Vector:
        """Return prox_σ(s − b, l)."""
        return self.objective._prox(s - self.levels(len(s)), old, sigma)

    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep:
        return self.objective._prox_step(s - self.levels(len(s)), old, sigma)

    def _maximizer(self, losses: Vector) -> Vector:
        return self.objective._maximizer(losses - self.levels(len(losses)))

    def _support(self, losses: Vector) -> float:
        """Return support(L − b)."""
        return self.objective._support(losses - self.levels(len(losses)))

    def _ceiling(self, losses: Vector) -> float:
        return self.objective._ceiling(np.nextafter(losses - self.levels(len(losses)), np.inf))

    def _cost(self, weights: Vector) -> float:
        terms = self.levels(len(weights)) * weights
        if self.simplex:
            terms = terms / weights.sum()
        return above(
            np.append(terms, self.objective._cost(weights)), more=roundings(len(terms)) + 8
        )

    def _stretch(self, weights: Vector) -> float:
        return self.objective._stretch(weights)

    def _origin(self) -> float:
        return self.objective._origin() + 2.0 * float(
            np.abs(self.levels(np.size(self.offset))).max()
        )

    def separable(self, n: int) -> Any:
        """Return the objective's form, with offset b."""
        found = self.objective.separable(n)
        return None if found is None else replace(found, offset=self.levels(n))

    def strong_convexity(self, n: int) -> float:
        """Same as the wrapped objective: ⟨b, λ⟩ is linear."""
        return self.objective.strong_convexity(n)

    def curvature(self, weights: ArrayLike) -> float:
        """Same as the wrapped objective."""
        return self.objective.curvature(weights)

    def start(self, losses: ArrayLike) -> Vector:
        """Return λ⁰ for the excess losses."""
        found = np.asarray(losses)
        return self.objective.start(found - self.levels(len(found)))

    def check(self, losses: ArrayLike, names: Any) -> None:
        """Refuse excess losses that the objective is not defined for."""
        found = np.asarray(losses)
        self.objective.check(found - self.levels(len(found)), names)


def equilibrium(
    objective: Objective,
    clients: int,
    solve: Callable[[Excess], tuple[Any, Vector, Vector, Vector]],
    tol: float,
) -> tuple[Any, float, int]:
    r"""Let λ maximise over losses h_i(x) on held-out rows, while x minimises Σ λ_i f_i over training rows.

    The two players have different losses, so there is no saddle point, but an equilibrium, at which the levels are
    b = f(x) − h(x), for then λ maximises ⟨f(x) − b, λ⟩ − ψ(λ) = ⟨h(x), λ⟩ − ψ(λ). For given levels x and λ are those
    of a convex problem, with its certificate, which bounds how much another x could lower Σ λ_i f_i; the levels follow,

        b ← b + s (f(x) − h(x) − b),      s = 1, or less if the last step was too long,

    until no other λ would gain more than `tol`: support(h) − ⟨h, λ⟩ + ψ(λ), or twelve steps gain nothing. If h = f
    nothing changes: b = 0.

    Args:
        objective: (Λ, ψ).
        clients: N.
        solve: from the objective with levels, a model, λ, f(x) and h(x).
        tol: largest remaining gain of λ.

    Returns:
        The best model, the remaining gain of λ there, and the number of calls of `solve`.
    """
    best: tuple[Any, float] = (None, np.inf)
    levels = np.zeros(clients)
    share = 1.0
    last = np.inf
    turns = 0
    found = 0
    while turns < min(TURNS, found + IDLE) and not best[1] <= tol:
        model, weights, losses, aside = solve(Excess(objective, levels))
        gain = objective.support(aside) - product(aside, weights) + objective.value(weights)
        turns += 1
        if best[0] is None or gain < best[1]:
            best = (model, gain)
            found = turns
        share = min(1.0, 1.2 * share) if gain < last else max(LEAST_SHARE, 0.5 * share)
        levels = levels + share * (losses - aside - levels)
        last = gain
    return *best, turns
