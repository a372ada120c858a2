r"""`Theory`: the step sizes for which the paper proves its rates.

SC-SC (ψ μ_λ-strongly convex; appendix B.2, "How to set parameters", with C_ω = 1), with
ω = 1/(1 − θ):

    ω = 1/2 + 24 L_xx/μ_x + √( (1/2 + 24 L_xx/μ_x)² + 16 L_λx²/(μ_x μ_λ) ),
    τ = (4/μ_x)(1 − θ)/θ,   σ = (1/μ_λ)(1 − θ)/θ.

(The appendix' quadratic inequality for ω has its root with 8 in place of 16; the formula as printed
is larger, hence safe, and is used.)

SC-C (ψ merely convex; Condition 4.1):

    σ_r = γ_r τ_r,   θ_r = σ_{r−1}/σ_r,   γ_{r+1} = γ_r (1 + μ τ_r),   τ_{r+1} = τ_r √(γ_r/γ_{r+1}),

with μ = μ_x/4 as in the appendix' remark, started so that (1 − δ)/τ_0 ≥ 12 L_xx + 2 L_λx² σ_0/c_α
with both terms equal (δ = 0.1, c_α = 0.9).

In both, η_ℓ = τ_r/(J η_g) with the η_g ≥ 1 that keeps the drift within the proof's bound,
36 τ² L_xx/η_g² + 2 τ³ L_xx²/η_g² ≤ τ/16.

Minibatches whose gradients have the variance E‖g_i − ∇f_i‖² ≤ ζ² leave an error of
(1 − θ) ζ²/μ_x under constant steps, so SC-SC takes at least ω = ζ²/(μ_x ε) to reach
μ_x ‖x − x*‖² = O(ε) (the paper's theorem for SC-SC). Under SC-C τ_r falls as 1/r, and the error
with it: nothing has to be known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from scaffpd.algorithms.steps.rules import Rates, StepProblem, Trial
from scaffpd.errors import InputError


@dataclass(frozen=True)
class TheoryState:
    """τ_r, σ_r, θ_r; the μ by which γ_r grows (0 for constant steps); L_xx and J, for η_ℓ."""

    tau: float
    sigma: float
    theta: float
    growth: float
    smoothness: float
    local_steps: int


@dataclass(frozen=True)
class Theory:
    """Step sizes from the constants of the problem, as proved in the paper (safe and slow).

    SC-SC if ψ is strongly convex, else SC-C. L_xx is max_i L_i and μ_x min_i μ_i, from the data,
    and L_λx is (Σ ‖∇f_i(x⁰)‖²)^½, at the start.

    Args:
        noise: ζ, the standard deviation of a client's minibatch gradient; 0 for full gradients.
        accuracy: ε, the μ_x ‖x − x*‖² that is wanted; needed with noise.
    """

    noise: float = 0.0
    accuracy: float | None = None

    def __post_init__(self) -> None:
        given = (self.noise,) if self.accuracy is None else (self.noise, self.accuracy)
        if not all(math.isfinite(value) and value >= 0 for value in given) or self.accuracy == 0:
            raise InputError(
                "theory-noise",
                f"Theory needs noise >= 0 and accuracy above 0, got {self.noise!r} and "
                f"{self.accuracy!r}.",
            )
        if self.noise and self.accuracy is None:
            raise InputError(
                "accuracy-missing",
                "Theory(noise=...) needs accuracy=...: with noise, steps go by the error wanted.",
            )

    def start(self, problem: StepProblem) -> TheoryState:
        objective = problem.objective
        constants = problem.constants
        if not objective.simplex:
            raise InputError(
                "not-on-the-simplex",
                f"Theory needs weights on the simplex, which {objective!r} does not have: use "
                "Auto().",
            )
        mu_x = float(constants.strong_convexity.min())
        if mu_x <= 0:
            raise InputError(
                "not-strongly-convex",
                "Theory needs strongly convex losses: give the model l2 > 0, or use Auto().",
            )
        mu_dual = objective.strong_convexity(len(problem.losses))
        L_xx = float(constants.smoothness.max())
        L_dual = float(np.sqrt(problem.gradient_norms().sum())) or 1.0
        if mu_dual > 0:
            half = 0.5 + 24 * L_xx / mu_x
            omega = half + np.sqrt(half**2 + 16 * L_dual**2 / (mu_x * mu_dual))
            if self.accuracy is not None:
                omega = max(omega, self.noise**2 / (mu_x * self.accuracy))
            tau = 4 / (mu_x * (omega - 1))  # (1 − θ)/θ = 1/(ω − 1)
            sigma = 1 / (mu_dual * (omega - 1))
            return TheoryState(tau, sigma, 1 - 1 / omega, 0.0, L_xx, problem.local_steps)
        tau = 0.9 / (24 * L_xx)
        sigma = 0.9 * 12 * L_xx / (2 * L_dual**2)
        return TheoryState(tau, sigma, 1.0, mu_x / 4, L_xx, problem.local_steps)

    def rates(self, state: TheoryState) -> Rates:
        """Return this round's numbers; a larger η_g means shorter local steps and less drift."""
        pull = state.tau * state.smoothness
        eta_g = max(1.0, float(np.sqrt(16 * (36 * pull + 2 * pull**2))))
        local_rate = state.tau / (state.local_steps * eta_g)
        return Rates(sigma=state.sigma, theta=state.theta, tau=state.tau, local_rate=local_rate)

    def judge(self, state: TheoryState, trial: Trial) -> tuple[TheoryState, bool]:
        """Take every step; under SC-C, τ shrinks and σ grows by θ_{r+1} = (1 + μ τ_r)^(−½)."""
        if state.growth == 0:
            return state, True
        theta = (1 + state.growth * state.tau) ** -0.5
        return replace(state, tau=state.tau * theta, sigma=state.sigma / theta, theta=theta), True
