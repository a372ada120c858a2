r"""Adaptive steps for losses that are not convex (networks).

`Auto`'s rules are those of convex functions: they compare a step with the decrease that gradients
at its start predict. For 62 minibatch steps through a network those gradients predict next to
nothing, so that every round looked like a failure and the next one was made shorter, until nothing
moved. Here rounds are judged by the objective alone:

    local steps   η = s/max_i L_i for all clients, as in FedAvg, and x⁺ = Σ λ_i u_i
    weights       λ⁺ = argmin_Λ ψ(λ) − ⟨L, λ⟩ + ‖λ − λ^r‖²/(2σ_r),  σ_r = κ/(N·spread of L(x^r)):
                  without ψ, a client whose loss is one standard deviation above the mean gains κ/N
    corrections   of minibatch steps: control variates c_i that clients update from their steps,
                  SCAFFOLD's option II, and c = Σ λ_i c_i. The paper's c_i = ∇f_i(x) is the gradient
                  before the first step: a client fits its own labels within a few steps, g_i(u)
                  vanishes, and the rest of g_i(u) − c_i + c pushes it away from them. A mean over
                  the steps has the right size. Corrections end if the value rises with them. Full
                  gradients use the paper's, and every round has to descend
    s             one; halved after a round that leaps, which is not taken, and when nothing else
                  helps
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scaffpd.algorithms.steps.rules import Rates, StepProblem, Trial
from scaffpd.federation import Vector

KAPPA = 0.3
FLAT = 0.05  # least spread, as a share of the losses
LEAP = 0.5  # share of the value by which a round may be worse than the best
BETTER = 1e-3  # share of the value that counts as an improvement
HURT = 0.2  # share of the value by which a round with corrections may be worse than the best
PATIENCE = 5  # rounds without an improvement before something is changed
# share of 1/max L_i below which the rule gives up; recovery after a leap
SHORTEST = 1 / 64
LENGTHEN = 1.1


@dataclass(frozen=True)
class NonconvexState:
    """Rates, and the quantities that control them."""

    rate: float  # 1/max_i L_i
    stochastic: bool  # whether local steps use minibatches. If not, every round has to descend.
    # halved after a round that is not taken, and longer again with every one that is
    scale: float = 1.0
    cooling: float = 1.0  # halved when nothing else helps
    sigma: float = 0.0  # σ; 0 before the first round, whose losses do not yet distinguish clients
    correction: str = "none"  # correction of local steps, see `Rates`
    best: float = np.inf  # the best value of the objective so far
    since: int = 0  # rounds since then, or since the last change

    @property
    def stalled(self) -> bool:
        return self.cooling < SHORTEST


@dataclass(frozen=True)
class Nonconvex:
    """Steps for Scaff-PD on networks; `Auto` uses them if losses are not known to be convex."""

    def start(self, problem: StepProblem) -> NonconvexState:
        """Start with FedAvg's rate, and λ as it is; a single local step has no drift."""
        steepest = float(problem.constants.smoothness.max())
        rate = 1 / steepest if steepest > 0 else 1.0
        value = problem.objective.support(problem.losses)
        correction = "variates"
        if problem.local_steps == 1 or not problem.stochastic:
            correction = "gradients"
        return NonconvexState(rate, problem.stochastic, correction=correction, best=value)

    def rates(self, state: NonconvexState) -> Rates:
        """Return one rate for all; the server averages by λ."""
        local_rate = state.rate * state.scale * state.cooling
        return Rates(state.sigma, 0.0, step=1.0, local_rate=local_rate, correction=state.correction)

    def judge(self, state: NonconvexState, trial: Trial) -> tuple[NonconvexState, bool]:
        """Take every step that does not leap, or, without noise, every one that descends."""
        value = trial.value()
        size = max(abs(state.best), 1e-12)
        if not np.isfinite(value):
            return replace(state, scale=state.scale / 8), False
        rises = float(trial.weights @ (trial.after - trial.before)) > 0
        leaps = value > state.best + LEAP * size
        if leaps if state.stochastic else rises:
            return replace(state, scale=state.scale / 2), False
        since = 0 if value < state.best - BETTER * size else state.since + 1
        new = replace(
            state,
            sigma=dual_rate(trial.after),
            best=min(value, state.best),
            since=since,
            scale=min(1.0, LENGTHEN * state.scale),
        )
        if state.correction == "variates" and value > state.best + HURT * size:
            return replace(new, correction="none", since=0), True
        if since >= PATIENCE:
            new = replace(new, cooling=state.cooling / 2, since=0)
        return new, True


def dual_rate(losses: Vector) -> float:
    spread = max(float(losses.std()), FLAT * float(np.abs(losses).mean()), 1e-300)
    return KAPPA / (len(losses) * spread)
