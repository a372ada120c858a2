r"""Step rules set {τ_r, σ_r, θ_r, η_ℓ} before a round, and see its outcome after it.

One round of Scaff-PD, in the form that all rules share (S = Σ λ_i, which is 1 on the simplex):

    λ⁺ = prox_σ(L + θ (L − L_prev), λ),   c = Σ λ⁺_i c_i,   d = Σ (λ⁺_i/S) d_i,   x⁺ = x − step · d,

where d_i = x − u_{i,J} = η_i J Δu_i. With one η_ℓ for all clients, step = τ S/(η_ℓ J) gives the
paper's x⁺ = x − τ Σ λ⁺_i Δu_i.

**`Auto`**: adaptive steps without parameters, for convex losses.

Clients take η_i = 1/L_i; the server has a factor e on d and a dual/primal ratio γ, with σ = γ e.
After a round it knows, at no cost,

    D = e⟨c, d⟩                        the predicted decrease,
    B = ⟨λ⁺, L⁺ − L⟩ + D               the part lost to curvature (∝ e²),
    X = σ‖q‖² / (2κ),  q = L⁺ − L      the part that moving weights may cost (∝ e³; q is centred on
                                       the simplex, where only differences between clients count).

*Primal step.* Accelerated primal-dual theory, in the metric that makes ‖x⁺ − x‖² equal D, needs
B + X ≤ D/2; the longest such step along the direction just tried is

    ê = ⟨c, d⟩ / (b + √(b² + 2 a ⟨c, d⟩)),    b = B/e²,  a = X/e³.

For fixed weights ê is the exact line search, and using it for the *next* direction, as done here,
is the step of Barzilai and Borwein (1988), which is far faster than monotone descent but needs
tolerance: a step is taken while B + X ≤ 2D. If the objective finds no new best value for `PATIENCE`
rounds, the rule falls back for good to the condition of the theory (B + X ≤ D/2, and 0.8 ê).

*Balance.* With the coupling K² ≈ ‖q‖²/(e D), a dual step of length 1/K² from λ⁺ would gain

    g_λ = max_λ ⟨λ − λ⁺, L⁺⟩ − ψ(λ) + ψ(λ⁺) − (K²/2)‖λ − λ⁺‖²,

while the primal step gains about g_x = ⟨c, d⟩/2. γ moves to balance the two, ever more slowly.

*Noise.* With minibatches in the local steps (losses and c_i are full), ⟨c, d⟩, b and a are averaged
over rounds, so that ê tends to E⟨c, d⟩ / E⟨d, H d⟩: the step decays as noise dominates. Then steps
need not descend, only not leap, and σ = γ does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from scaffpd.errors import SHARE, positive, ranged
from scaffpd.federation import Constants, Vector
from scaffpd.objectives.base import LARGEST, Objective

KAPPA = 3.0
ROOM = 2.0  # B + X ≤ this times D, until the rule falls back
STRICT = 0.5  # and then
PATIENCE = 50
GROWTH = 1.5  # most and least factor on e from one step taken to the next
DROP = 0.15
BALANCE = 0.3  # pace of log γ at first; it halves every COOLING settled rounds, roughly
COOLING = 20.0
SATURATED = 1.5  # an imbalance that counts as large, and the most that acts at once
NOISY_MEMORY = 0.9
LEAP = 0.5  # share of the loss that a noisy step may lose
LEAST_STEP = 1e-90  # its cube does not underflow


@dataclass(frozen=True)
class StepProblem:
    """Data of the problem before the first round."""

    objective: Objective  # (Λ, ψ)
    constants: Constants  # L_i and μ_i
    local_steps: int  # J
    stochastic: bool  # whether local steps use minibatches
    losses: Vector  # L(x⁰)
    gradient_norms: Callable[[], Vector]  # ‖c_i(x⁰)‖² per client; asking costs N scalars


@dataclass(frozen=True)
class Rates:
    """Numbers of one round."""

    sigma: float  # σ of the dual step; 0 keeps λ as it is
    theta: float  # θ of the extrapolation
    step: float | None = None  # the factor on d; `None` derives it from `tau`
    tau: float | None = None  # the paper's τ, if `step` is `None`
    local_rate: float | None = None  # η_ℓ; `None` lets each client take `local_scale`/L_i
    local_scale: float = 1.0  # see `local_rate`
    # of local steps: "gradients" c_i = ∇f_i(x) as in the paper, "variates" that clients update from
    # their steps (SCAFFOLD's option II), or "none" as in FedAvg
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
    """One attempted round, as the server saw it."""

    objective: Objective  # (Λ, ψ)
    before: Vector  # L at x
    after: Vector  # L at x⁺
    weights: Vector  # λ⁺
    step: float  # the factor on d
    slope: float  # ⟨c, d⟩
    precision: float  # the machine epsilon of the losses' number format
    # ½ Σ_i λ⁺_i ⟨c_i(x⁺) − c_i(x), x⁺ − x⟩ from two sums; `None` if masks allow only one
    bend: Callable[[], float] | None = None
    rounded: float = 0.0  # the machine epsilon of the slope's format, if that is not double

    def value(self) -> float:
        """Objective at x⁺; +∞ if losses are not finite, or so large that the run diverges."""
        sane = bool(np.all(np.abs(self.after) < LARGEST / 4))
        return self.objective._support(self.after) if sane else np.inf


RuleState = Any  # every rule has a state of its own type


class StepRule(Protocol):
    """Step rule: a pure state machine of plain numbers."""

    # the rule's state before the first round
    def start(self, problem: StepProblem) -> RuleState: ...
    def rates(self, state: RuleState) -> Rates: ...  # the numbers of the next round
    # the next state, and whether x⁺ is taken
    def judge(self, state: RuleState, trial: Trial) -> tuple[RuleState, bool]: ...


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
        ranged("Fixed", "theta", self.theta, SHARE)

    def start(self, problem: StepProblem) -> Rates:
        return Rates(sigma=self.sigma, theta=self.theta, tau=self.tau, local_rate=self.local_rate)

    def rates(self, state: Rates) -> Rates:
        return state

    def judge(self, state: Rates, trial: Trial) -> tuple[Rates, bool]:
        return state, True


@dataclass(frozen=True)
class AutoState:
    """e, γ and the quantities that control them."""

    step: float = 1.0  # e
    gamma: float = 0.0  # γ = σ/e; 0 until the first step has measured the coupling
    previous_sigma: float = 0.0  # σ of the last dual step, for the extrapolation
    coupling: float = 0.0  # K², a slowly forgetting maximum
    imbalance: float = 0.0  # smoothed log(g_λ/g_x)
    accepted: int = 0  # steps taken
    settled: int = 0  # steps taken while the imbalance was small; γ slows down as they add up
    best: float = np.inf  # the best value of the objective so far
    since: int = 0  # steps taken since then
    strict: bool = False  # whether the rule has fallen back to B + X ≤ D/2
    local_scale: float = 1.0  # factor on 1/L_i; below one only if local steps diverged
    memory: float = 0.0  # weight of the past in the three averages below; 0 without noise
    slope: float = 0.0  # averaged ⟨c, d⟩
    b: float = 0.0  # averaged b
    a: float = 0.0  # averaged a

    @property
    def sigma(self) -> float:
        """σ = γ e; under noise, where e decays, σ = γ."""
        sigma = self.gamma * (self.step if self.memory == 0 else 1.0)
        return float(np.clip(sigma, 1 / LARGEST, LARGEST)) if self.gamma > 0 else 0.0


@dataclass(frozen=True)
class Auto:
    """Tuning-free steps for Scaff-PD; on networks it takes those of `Nonconvex`.

    Args:
        extrapolation: the fraction of the paper's θ = min(1, σ_{r−1}/σ_r) to use. With local steps
            the primal contracts so much in a round that extrapolating the losses only delays λ:
            none is the measured best (`benchmarks/ROUNDS.md`), 1 is the paper's.
    """

    extrapolation: float = 0.0

    def __post_init__(self) -> None:
        ranged("Auto", "extrapolation", self.extrapolation, SHARE)

    def start(self, problem: StepProblem) -> AutoState:
        """Begin with one full local step at fixed λ, which measures the coupling of x and λ."""
        return AutoState(memory=NOISY_MEMORY if problem.stochastic else 0.0)

    def rates(self, state: AutoState) -> Rates:
        """Return σ = γ e, θ, e and the clients' factor on 1/L_i."""
        sigma = state.sigma
        theta = min(1.0, state.previous_sigma / sigma) if state.previous_sigma > 0 else 1.0
        return Rates(
            sigma=sigma,
            theta=self.extrapolation * theta,
            step=state.step,
            local_scale=state.local_scale,
        )

    def judge(self, state: AutoState, trial: Trial) -> tuple[AutoState, bool]:
        """Compare the predicted decrease of the step with the actual one."""
        if not np.isfinite(trial.slope):
            return replace(state, local_scale=state.local_scale / 2), False
        value = trial.value()
        e = state.step
        if not np.isfinite(value):  # overflow, or outside the domain (Nash: a loss above b)
            return replace(state, step=max(e / 10, LEAST_STEP)), False
        promised = e * trial.slope
        bregman, change = curvature_and_change(trial, state.b * e**2)
        cross = state.sigma * float(change @ change) / (2 * KAPPA)
        # A share `memory` of the past; none at the first round.
        past = state.memory if state.b > 0 else 0.0
        state = replace(
            state,
            slope=past * state.slope + (1 - past) * trial.slope,
            b=past * state.b + (1 - past) * bregman / e**2,
            a=past * state.a + (1 - past) * cross / e**3,
        )
        ideal = longest_step(state.slope, state.b, state.a, otherwise=e)
        room = (STRICT if state.strict else ROOM) * promised
        if state.memory > 0:  # a noisy step need not descend; it must not leap
            room = max(room, promised + LEAP * abs(float(trial.weights @ trial.before)))
        if bregman + cross > room:
            shorter = float(np.clip(0.9 * ideal, 0.05 * e, 0.8 * e))
            return replace(state, step=max(shorter, LEAST_STEP)), False
        return self._accepted(state, trial, value, change, ideal), True

    def _accepted(
        self, state: AutoState, trial: Trial, value: float, change: Vector, ideal: float
    ) -> AutoState:
        # The step's squared length in the metric of D: predicted, or, if larger, from curvature.
        energy = max(state.step * trial.slope, 2 * state.b * state.step**2)
        seen = float(change @ change) / (state.step * energy) if energy > 0 else 0.0
        coupling = max(seen, 0.9 * state.coupling)
        gamma, imbalance = self._balance(state, trial, coupling)
        better = value < state.best - 1e-13 * abs(value)
        since = 0 if better else state.since + 1
        target = 0.8 * ideal if state.strict else ideal
        return replace(
            state,
            step=float(np.clip(target, DROP * state.step, GROWTH * state.step)),
            gamma=gamma,
            previous_sigma=state.sigma,
            coupling=coupling,
            imbalance=imbalance,
            accepted=state.accepted + 1,
            settled=state.settled + (abs(imbalance) < SATURATED),
            best=min(value, state.best),
            since=since,
            strict=state.strict or since >= PATIENCE,
        )

    def _balance(self, state: AutoState, trial: Trial, coupling: float) -> tuple[float, float]:
        if state.gamma == 0:
            return first_ratio(trial, coupling), 0.0
        if state.memory > 0:
            return state.gamma, state.imbalance
        if coupling == 0:  # x does not depend on λ: let λ go
            return min(4 * state.gamma, LARGEST), state.imbalance
        gain, rounding = dual_gain(trial, coupling)
        pull = float(np.log(gain / max(0.5 * state.slope, 1e-300))) if gain > rounding else 0.0
        imbalance = pull if state.accepted == 1 else 0.7 * state.imbalance + 0.3 * pull
        pace = BALANCE / (1 + state.settled / COOLING)
        push = pace * float(np.clip(imbalance, -SATURATED, SATURATED))
        return state.gamma * float(np.exp(push)), imbalance


def longest_step(slope: float, b: float, a: float, otherwise: float) -> float:
    """Return ê, the root of b e + a e² = slope/2; `otherwise` if nothing was learnt."""
    if slope <= 0:
        return otherwise / 2 if slope < 0 else otherwise
    root = b + np.sqrt(b * b + 2 * a * slope) if b > 0 or a > 0 else 0.0
    return float(slope / root) if root > 0 else GROWTH * otherwise


def first_ratio(trial: Trial, coupling: float) -> float:
    """Return the first γ: σ‖q‖² just small against D.

    It is up to ten times that if ψ is curved enough to hold λ.
    """
    ratio = 0.45 / (coupling * trial.step**2) if coupling > 0 else 1.0
    curvature = trial.objective.curvature(trial.weights)
    floor = min(1e-3 / curvature, 10 * ratio) if 0 < curvature < np.inf else 0.0
    return float(np.clip(max(ratio, floor), 1 / LARGEST, LARGEST))


def dual_gain(trial: Trial, coupling: float) -> tuple[float, float]:
    """Return g_λ of a proximal step of length 1/K², and its rounding error."""
    objective = trial.objective
    weights = trial.weights
    losses = trial.after
    if objective.simplex:  # a common shift changes nothing but the rounding
        losses = losses - weights @ losses / weights.sum()
    better = objective._prox(losses, weights, float(np.clip(1 / coupling, 1 / LARGEST, LARGEST)))
    move = better - weights
    penalties = objective._value(better), objective._value(weights)
    gain = float(move @ losses) - penalties[0] + penalties[1] - coupling / 2 * float(move @ move)
    return gain, 4 * trial.precision * (abs(penalties[0]) + abs(penalties[1])) + 1e-300


def curvature_and_change(trial: Trial, expected: float = 0.0) -> tuple[float, Vector]:
    """Return B and q.

    If B is lost in the rounding of the losses, compute it from sums of gradients along the step
    (trapezoid rule); without them, from the last curvature.
    """
    weights = trial.weights
    change = trial.after - trial.before
    bregman = float(weights @ change) + trial.step * trial.slope
    noise = 2 * trial.precision * float(weights @ (np.abs(trial.before) + np.abs(trial.after)))
    noise += trial.rounded * trial.step * abs(trial.slope)
    if bregman < 1e4 * noise:
        bregman = max(bregman, expected, 0.0) if trial.bend is None else max(trial.bend(), 0.0)
    return bregman, change - change.mean() if trial.objective.simplex else change
