r"""Interface of step rules: a rule sets the paper's {τ_r, σ_r, θ_r, η_ℓ} before a round and sees the outcome after it.

One round of Scaff-PD, in the form that all rules share (S = Σ λ_i, which is 1 on the simplex):

    λ⁺ = prox_σ(L + θ (L − L_prev), λ),   c = Σ λ⁺_i c_i,   d = Σ (λ⁺_i/S) d_i,   x⁺ = x − step · d,

where d_i = x − u_{i,J} = η_i J Δu_i. With one η_ℓ for all clients, step = τ S/(η_ℓ J) gives the paper's
x⁺ = x − τ Σ λ⁺_i Δu_i.

`Fixed` is the simplest rule: constant steps, chosen by the user or by a grid search. `Theory` has the step sizes for
which the paper proves its rates.

SC-SC (ψ μ_λ-strongly convex; appendix B.2, "How to set parameters"), with ω = 1/(1 − θ):

    ω = C_ω ( 1/2 + 24 L_xx/μ_x + √( (1/2 + 24 L_xx/μ_x)² + 16 L_λx²/(μ_x μ_λ) ) ),
    τ = (4/μ_x)(1 − θ)/θ,   σ = (1/μ_λ)(1 − θ)/θ.

(The appendix' quadratic inequality for ω has its root with 8 in place of 16; the formula as printed is larger, hence
safe, and is used.)

SC-C (ψ merely convex; Condition 4.1):

    σ_r = γ_r τ_r,   θ_r = σ_{r−1}/σ_r,   γ_{r+1} = γ_r (1 + μ τ_r),   τ_{r+1} = τ_r √(γ_r/γ_{r+1}),

with μ = μ_x/4 as in the appendix' remark, started so that (1 − δ)/τ_0 ≥ 12 L_xx + 2 L_λx² σ_0/c_α with both terms
equal (δ = 0.1, c_α = 0.9).

In both, η_ℓ = τ_r/(J η_g) with the η_g ≥ 1 that keeps the drift within the proof's bound,
36 τ² L_xx/η_g² + 2 τ³ L_xx²/η_g² ≤ τ/16. The conditions are those of exact gradients: with minibatches the paper
needs smaller steps still (1/(1 − θ) above ζ²/(μ_x ε)), which cannot be computed beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from scaffpd.errors import InputError, count, positive, real, unknown
from scaffpd.federation import Constants, Vector
from scaffpd.objectives.base import LARGEST, Objective


@dataclass(frozen=True)
class Schedule:
    r"""Factor on η_ℓ in round r = 1, 2, …: optional warm-up, half a cosine and steps down.

        warm-up    r/(warmup + 1) up to round `warmup`
        cosine     last + (1 − last)(1 + cos πt)/2,  t = (r − 1 − warmup)/(rounds − warmup) in [0, 1]
        steps      drop^k with k rounds of `at` before r

    Args:
        rounds: last round of the cosine; `None` for none.
        warmup: rounds of growing rates.
        last: the cosine's last factor, in (0, 1].
        at: rounds after which the rate drops.
        drop: the factor there, in (0, 1].
    """

    rounds: int | None = None
    warmup: int = 0
    last: float = 0.01
    at: tuple[int, ...] = ()
    drop: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", tuple(count("Schedule", "at", r) for r in self.at))
        if self.warmup != 0:
            count("Schedule", "warmup", self.warmup)
        if self.rounds is not None and count("Schedule", "rounds", self.rounds) <= self.warmup:
            raise InputError(
                "schedule-rounds-warmup",
                f"Schedule needs rounds > warmup, got {self.rounds} and {self.warmup}.",
            )
        for name in ("last", "drop"):
            if not 0 < real("Schedule", name, getattr(self, name)) <= 1:
                raise InputError(
                    "schedule-post-init",
                    f"Schedule needs 0 < {name} <= 1, got {getattr(self, name)!r}.",
                )

    def __call__(self, r: int) -> float:
        """Return the factor in round r."""
        factor = min(1.0, r / (self.warmup + 1)) * self.drop ** sum(r > past for past in self.at)
        if self.rounds is None:
            return factor
        t = min(1.0, max(0.0, (r - 1 - self.warmup) / (self.rounds - self.warmup)))
        return factor * (self.last + (1 - self.last) * (1 + math.cos(math.pi * t)) / 2)


@dataclass(frozen=True)
class StepProblem:
    """Data of the problem before the first round.

    Attributes:
        objective: (Λ, ψ).
        constants: L_i and μ_i.
        local_steps: J.
        stochastic: whether local steps use minibatches.
        exact: whether losses and c_i are over all samples.
        losses: L(x⁰).
        gradient_norms: ‖c_i(x⁰)‖² per client; asking costs N scalars.
    """

    objective: Objective
    constants: Constants
    local_steps: int
    stochastic: bool
    exact: bool
    losses: Vector
    gradient_norms: Callable[[], Vector]


@dataclass(frozen=True)
class Rates:
    """Numbers of one round.

    Attributes:
        sigma: σ of the dual step; 0 keeps λ as it is.
        theta: θ of the extrapolation.
        step: the factor on d; `None` derives it from `tau`.
        tau: the paper's τ, if `step` is `None`.
        local_rate: η_ℓ; `None` lets each client take `local_scale`/L_i.
        local_scale: see `local_rate`.
        correction: correction of local steps: "gradients" c_i = ∇f_i(x) as in the paper, "variates" that clients
            update from their local steps (SCAFFOLD's option II), or "none", FedAvg's.
    """

    sigma: float
    theta: float
    step: float | None = None
    tau: float | None = None
    local_rate: float | None = None
    local_scale: float = 1.0
    correction: str = "gradients"

    def primal(self, total: float, local_steps: int) -> float:
        """Return the factor on d = Σ (λ_i/S) d_i for S = `total`."""
        if self.step is not None:
            return self.step
        assert self.tau is not None
        assert self.local_rate is not None
        return self.tau * total / (self.local_rate * local_steps)


@dataclass(frozen=True)
class Trial:
    """One attempted round, as the server saw it.

    Attributes:
        objective: (Λ, ψ).
        before: L at x.
        after: L at x⁺.
        weights: λ⁺.
        step: the factor on d.
        slope: ⟨c, d⟩.
        precision: the machine epsilon of the losses' number format.
        secants: ⟨c_i, x⁺ − x⟩ at x and at x⁺ per client; asking costs 2N scalars. `None` if sums hide them.
        bend: ½ Σ_i λ⁺_i ⟨c_i(x⁺) − c_i(x), x⁺ − x⟩ from two sums instead; `None` if masks allow only one sum.
    """

    objective: Objective
    before: Vector
    after: Vector
    weights: Vector
    step: float
    slope: float
    precision: float
    secants: Callable[[], tuple[Vector, Vector]] | None
    bend: Callable[[], float] | None = None

    def value(self) -> float:
        """Objective at x⁺; +∞ if losses are not finite, or so large that the run diverges."""
        sane = bool(np.all(np.abs(self.after) < LARGEST / 4))
        return self.objective._support(self.after) if sane else np.inf


class StepRule(Protocol):
    """Step rule: a pure state machine of plain numbers."""

    def start(self, problem: StepProblem) -> Any:
        """Return the rule's state before the first round."""

    def rates(self, state: Any) -> Rates:
        """Return the numbers of the next round."""

    def judge(self, state: Any, trial: Trial) -> tuple[Any, bool]:
        """Return the next state, and whether x⁺ is taken."""


@dataclass(frozen=True)
class FixedState:
    """Empty state."""


@dataclass(frozen=True)
class Fixed:
    """Algorithm 1 with constant τ, σ, θ and one local rate η_ℓ for all clients.

    Args:
        tau: primal step τ = J η_ℓ η_g.
        sigma: dual step σ.
        theta: extrapolation θ, in [0, 1].
        local_rate: η_ℓ; it must stay below 2/L_i for every client.
    """

    tau: float
    sigma: float
    theta: float = 1.0
    local_rate: float = 0.1

    def __post_init__(self) -> None:
        for name in ("tau", "sigma", "local_rate"):
            positive("Fixed", name, getattr(self, name))
        if not 0 <= real("Fixed", "theta", self.theta) <= 1:
            raise InputError(
                "fixed-theta-between", f"Fixed needs theta between 0 and 1, got {self.theta!r}."
            )

    def start(self, problem: StepProblem) -> FixedState:
        """Return the empty state."""
        return FixedState()

    def rates(self, state: FixedState) -> Rates:
        """Return the same numbers every round."""
        return Rates(sigma=self.sigma, theta=self.theta, tau=self.tau, local_rate=self.local_rate)

    def judge(self, state: FixedState, trial: Trial) -> tuple[FixedState, bool]:
        """Take every step."""
        return state, True


CONDITIONS = ("auto", "sc-sc", "sc-c")


@dataclass(frozen=True)
class TheoryState:
    """State: τ_r, σ_r, θ_r; the strong convexity by which γ_r grows (0 for constant steps); L_xx and J, for η_ℓ."""

    tau: float
    sigma: float
    theta: float
    growth: float
    smoothness: float
    local_steps: int


@dataclass(frozen=True)
class Theory:
    """Step sizes from the constants of the problem, as proved in the paper (safe and slow).

    Args:
        condition: "sc-sc", "sc-c", or "auto": SC-SC if ψ is strongly convex, else SC-C.
        smoothness: L_xx; by default max_i L_i, from the data.
        coupling: L_λx; by default (Σ ‖∇f_i(x⁰)‖²)^½, its value at the start.
        strong_convexity: μ_x; by default min_i μ_i, from the data.
        factor: C_ω ≥ 1.
    """

    condition: str = "auto"
    smoothness: float | None = None
    coupling: float | None = None
    strong_convexity: float | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.condition not in CONDITIONS:
            raise unknown("condition", self.condition, CONDITIONS)
        for name in ("smoothness", "coupling", "strong_convexity"):
            if getattr(self, name) is not None:
                positive("Theory", name, getattr(self, name))
        if positive("Theory", "factor", self.factor) < 1:
            raise InputError("theory-factor", f"Theory needs factor >= 1, got {self.factor!r}.")

    def start(self, problem: StepProblem) -> TheoryState:
        """Read the constants and solve for τ, σ, θ."""
        objective = problem.objective
        constants = problem.constants
        if not objective.simplex:
            raise InputError(
                "theory-weights-simplex",
                f"Theory needs weights on the simplex, which {objective!r} does not have: use Auto().",
            )
        mu_x = self.strong_convexity or float(constants.strong_convexity.min())
        if mu_x <= 0:
            raise InputError(
                "theory-strongly-convex",
                "Theory needs strongly convex losses: give the model l2 > 0, or use Auto().",
            )
        mu_dual = objective.strong_convexity(len(problem.losses))
        if self.condition == "sc-sc" and mu_dual <= 0:
            raise InputError(
                "theory-condition-sc",
                f"Theory's condition 'sc-sc' needs a strongly convex ψ, which {objective!r} has not.",
            )
        L_xx = self.smoothness or float(constants.smoothness.max())
        L_dual = self.coupling or float(np.sqrt(problem.gradient_norms().sum())) or 1.0
        if mu_dual > 0 and self.condition != "sc-c":
            tau, sigma, theta = self._linear(L_xx, L_dual, mu_x, mu_dual)
            return TheoryState(tau, sigma, theta, 0.0, L_xx, problem.local_steps)
        tau = 0.9 / (24 * L_xx)
        return TheoryState(
            tau, 12 * L_xx * 0.9 / (2 * L_dual**2), 1.0, mu_x / 4, L_xx, problem.local_steps
        )

    def _linear(
        self, L_xx: float, L_dual: float, mu_x: float, mu_dual: float
    ) -> tuple[float, float, float]:
        half = 0.5 + 24 * L_xx / mu_x
        omega = self.factor * (half + np.sqrt(half**2 + 16 * L_dual**2 / (mu_x * mu_dual)))
        return 4 / (mu_x * (omega - 1)), 1 / (mu_dual * (omega - 1)), 1 - 1 / omega

    def rates(self, state: TheoryState) -> Rates:
        """Return this round's numbers; a larger η_g means shorter local steps and less drift."""
        pull = state.tau * state.smoothness
        eta_g = max(1.0, float(np.sqrt(16 * (36 * pull + 2 * pull**2))))
        local_rate = state.tau / (state.local_steps * eta_g)
        return Rates(sigma=state.sigma, theta=state.theta, tau=state.tau, local_rate=local_rate)

    def judge(self, state: TheoryState, trial: Trial) -> tuple[TheoryState, bool]:
        """Take every step; under SC-C, θ_{r+1} = (1 + μ τ_r)^(−½), τ shrinks by it and σ grows by it."""
        if state.growth == 0:
            return state, True
        theta = (1 + state.growth * state.tau) ** -0.5
        return replace(state, tau=state.tau * theta, sigma=state.sigma / theta, theta=theta), True
