r"""Scaff-PD: accelerated primal-dual federated learning with bias-corrected local steps.

Y. Yu, S. P. Karimireddy, Y. Ma, M. I. Jordan,
"Scaff-PD: Communication Efficient Fair and Robust Federated Learning", 2023.

Algorithm 1, round r:
    (1)  L_i = f_i(x^r),  c_i = ∇f_i(x^r)                                           x down; L_i, c_i up
    (2)  s = (1 + θ_r) L(x^r) − θ_r L(x^{r−1})
         λ^{r+1} = argmin_{λ∈Λ} ψ(λ) − ⟨s, λ⟩ + ‖λ − λ^r‖²/(2σ_r)                   on the server
    (3)  c = Σ λ_i^{r+1} c_i;  Δu_i = Local-update(x^r, c_i, c)                     c down; Δu_i up
         x^{r+1} = x^r − τ_r Σ λ_i^{r+1} Δu_i                                       on the server
Algorithm 2, Local-update: u ← u − η_ℓ (g_i(u) − c_i + c), J times from u = x;  Δu_i = (x − u)/(η_ℓ J).

The code starts a round with step (3) and ends it with (1) and (2) at the new point, so that a finished round holds a
pair (x, λ) with everything that its certificate needs. Off the simplex, c and λ enter local work as c/S and λ/S with
S = Σ λ_i. Where a step rule asks for other corrections than gradients (`Nonconvex`, for networks), clients send L_i in
(1). There c_i is what a client keeps and renews from its steps, c_i − c + (x − u_{i,J})/(J η_ℓ), zero at the start, as
in SCAFFOLD's option II; or c_i = c = 0.

Accelerated primal-dual is Scaff-PD without local steps:
E. Y. Hamedani, N. S. Aybat,
"A Primal-Dual Algorithm with Line Search for General Convex-Concave Saddle Point Problems", 2021, Algorithm 2.1.

    s = (1 + θ_r) L(x^r) − θ_r L(x^{r−1})
    λ^{r+1} = argmin_{λ∈Λ} ψ(λ) − ⟨s, λ⟩ + ‖λ − λ^r‖²/(2σ_r)
    x^{r+1} = x^r − τ_r Σ λ_i^{r+1} ∇f_i(x^r)

After a single local step Δu_i = c for every client, so that the server can take it by itself: the iterates are those of
Scaff-PD with J = 1, for one exchange a round instead of two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import GRADIENTS, LOSSES, UPDATES
from scaffpd.algorithms.minimax import MinimaxMethod, MinimaxState
from scaffpd.algorithms.steps import Auto, StepRule
from scaffpd.algorithms.steps.base import Rates, StepProblem, Trial
from scaffpd.algorithms.steps.nonconvex import NonconvexState
from scaffpd.errors import InputError
from scaffpd.federation import Federation, Gradients, LocalPlan, Memory, Vector
from scaffpd.objectives.base import LARGEST
from scaffpd.privacy.accountant import ReleaseCounts

RECENT = 50  # rounds, for a rate
ADVICE = (
    "Neither corrections nor shorter local steps improve on the best value any more: try larger batches, another "
    "network, or another start."
)


@dataclass(frozen=True, kw_only=True)
class ScaffPDState(MinimaxState):
    """`weights` are λ^{r+1}, the answer of the dual step at x = x^r.

    Attributes:
        centre: λ^r, from which that step was taken.
        previous: L(x^{r−1}).
        direction: c = Σ λ_i^{r+1} c_i at x^r.
        answered: the round whose answers `at` holds (it seeds their minibatches).
        rule: the step rule's own state.
        variates: the c_i that clients keep, (N, d), where they are not gradients; else empty.
        at: the clients' answers at x^r, asked for anew when a run is resumed; `None` where c_i are no gradients.
    """

    centre: Vector
    previous: Vector
    direction: Tensor
    answered: int
    rule: Any
    variates: Tensor = field(repr=False)
    at: Gradients | None = field(repr=False, metadata={"transient": True})


@dataclass(frozen=True)
class ScaffPD(MinimaxMethod):
    """Scaff-PD for any objective.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        local_steps: J.
        batch_size: samples per local gradient; `None` uses all of them.
        steps: `Auto()`, `Fixed(...)` or `Theory(...)`.
        full_gradients: with `batch_size`, whether (L_i, c_i) still use all samples. They do by default: the error
            floor is lower and the certificate stays valid. `False` is the paper's fully stochastic setting.
    """

    published: ClassVar[str] = "Scaff-PD"
    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS, LOSSES, UPDATES})
    asks_losses: ClassVar[bool] = True

    local_steps: int = 100
    batch_size: int | None = None
    steps: StepRule = field(default_factory=Auto)
    full_gradients: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = not isinstance(self.steps, type) and all(
            hasattr(self.steps, k) for k in ("start", "rates", "judge")
        )
        if not rule:
            raise InputError(
                "steps-such-auto",
                f"{type(self).__name__} needs steps such as Auto(), Fixed(...) or Theory(...), got {self.steps!r}.",
            )

    @property
    def exact(self) -> bool:
        """Return whether losses and gradients are over all samples, as a certificate needs."""
        return self.batch_size is None or self.full_gradients

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count a point a round, and J local steps, the first of which is c_i where it is over all samples."""
        points = ReleaseCounts.points(rounds + 1, None if self.exact else self.batch_size)
        known = rounds if self.batch_size is None else 0
        return points + ReleaseCounts.over(
            self.batch_size, gradients=rounds * self.local_steps - known
        )

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> ScaffPDState:
        """Make steps (1) and (2) at x⁰."""
        x, constants, at = self._open(federation, x0, seed)
        weights = self.objective.start(at.losses)
        stochastic = self.batch_size is not None or constants.noisy
        problem = StepProblem(
            self.objective, constants, self.local_steps, stochastic, self.exact, at.losses, at.norms
        )
        state = ScaffPDState(
            x=x,
            weights=weights,
            centre=weights,
            losses=at.losses,
            previous=at.losses,
            direction=torch.zeros_like(x),
            seed=seed,
            answered=0,
            rule=self.steps.start(problem),
            constants=constants,
            at=at,
            variates=x[:0],
        )
        rates = self.steps.rates(state.rule)
        if rates.correction == "gradients":
            return self._dual_step(state, rates)
        keeps = rates.correction == "variates" and federation.channel.keeps
        return self._dual_step(
            replace(state, at=None, variates=federation.memory().vectors if keeps else x[:0]), rates
        )

    def stalled(self, state: ScaffPDState) -> bool:
        """Return whether the rule for networks has nothing left to try."""
        return isinstance(state.rule, NonconvexState) and state.rule.stalled

    def advise(self, state: ScaffPDState, certificates: Vector) -> str:
        """Say how fast it went, and which method would do, where `fair` would take another one."""
        if isinstance(state.rule, NonconvexState):
            return ADVICE if self.stalled(state) else ""
        back = min(RECENT, len(certificates) - 1)
        before = float(certificates[-1 - back])
        now = float(certificates[-1])
        if not (
            isinstance(self.steps, Auto) and back > 0 and np.isfinite(now) and np.isfinite(before)
        ):
            return ""
        pace = f"by a factor of {before / now:.2g}" if now < before else "no further"
        said = f"Auto steps brought the certificate {pace} in the last {back} rounds"
        if self.batch_size is not None or state.constants.first_order:
            return f"{said}; more rounds, or larger batches, would go on from here."
        return f"{said}: sp.fair(objective) would choose a second-order method, which needs few rounds and no step size."

    def resume(self, federation: Federation, state: ScaffPDState) -> ScaffPDState:
        """Ask the clients for their answers at x again, where local steps need them."""
        needed = self.steps.rates(state.rule).correction == "gradients"
        return replace(
            state, at=self._ask(federation, state.x, state.seed, state.answered) if needed else None
        )

    def round(self, federation: Federation, state: ScaffPDState) -> ScaffPDState:
        """Make one round: local steps, the new point, the rule's verdict, the dual step."""
        rates = self.steps.rates(state.rule)
        total = float(state.weights.sum()) or 1.0
        r = state.rounds + 1
        if rates.correction != "gradients":
            return self._round_without_gradients(federation, state, rates)
        d = self._local_work(federation, state, rates)
        before = state.at
        assert before is not None
        step = rates.primal(total, self.local_steps)
        x = state.x - step * d
        slope = state.direction @ d
        at = self._ask(federation, x, state.seed, r)
        hidden = state.constants.first_order
        trial = Trial(
            self.objective,
            state.losses,
            at.losses,
            state.weights,
            step,
            float(slope),
            _precision(x),
            secants=None
            if hidden
            else lambda: (before.project(x - state.x), at.project(x - state.x)),
            bend=(lambda: _bend(state, at, x)) if federation.sums.allows_reweighting else None,
        )
        rule, accepted = self.steps.judge(state.rule, trial)
        state = replace(state, rule=rule, accepted=accepted, rounds=r)
        if not accepted and state.constants.first_order:
            return state  # another λ at the same x would be another sum of the same vectors, which masks do not hide
        if accepted:
            state = replace(
                state,
                x=x,
                at=at,
                answered=r,
                centre=state.weights,
                previous=state.losses,
                losses=at.losses,
            )
        return self._dual_step(state, self.steps.rates(rule))

    def _round_without_gradients(
        self, federation: Federation, state: ScaffPDState, rates: Rates
    ) -> ScaffPDState:
        """Make a round with control variates that clients keep, or without corrections: nobody sends a gradient."""
        weights = state.weights / (float(state.weights.sum()) or 1.0)
        r = state.rounds + 1
        corrected = rates.correction == "variates" and len(state.variates) > 0
        kept = Memory(state.variates, federation) if corrected else None
        c = None if kept is None else kept.sum(weights)
        plan = self._plan(state, rates)
        updates = federation.local_updates(state.x, kept, c, plan)
        x = state.x - updates.sum(weights)
        losses = federation.losses(x, None if self.exact else self.batch_size, (state.seed, r, 0))
        trial = Trial(
            self.objective,
            state.losses,
            losses,
            state.weights,
            1.0,
            np.nan,
            _precision(x),
            secants=None,
        )
        rule, accepted = self.steps.judge(state.rule, trial)
        state = replace(state, rule=rule, accepted=accepted, rounds=r)
        if not accepted:
            return state
        variates = state.variates
        if kept is not None and c is not None:
            federation.count(
                up=len(federation.names) * federation.dimension
            )  # c_i, for a sum with other weights
            variates = (
                kept.plus(-1.0, c).plus(1 / (plan.steps * (plan.rate or 1.0)), updates).vectors
            )
        state = replace(
            state,
            x=x,
            variates=variates,
            centre=state.weights,
            previous=state.losses,
            losses=losses,
        )
        return self._dual_step(state, self.steps.rates(rule))

    def _local_work(self, federation: Federation, state: ScaffPDState, rates: Rates) -> Tensor:
        """Make step (3): d = Σ (λ_i/S) d_i."""
        total = float(state.weights.sum()) or 1.0
        updates = federation.local_updates(
            state.x, state.at, state.direction / total, self._plan(state, rates)
        )
        return updates.sum(state.weights / total)

    def _plan(self, state: ScaffPDState, rates: Rates) -> LocalPlan:
        key = (state.seed, state.rounds + 1, 1)
        return LocalPlan(
            self.local_steps, rates.local_rate, rates.local_scale, self.batch_size, key
        )

    def _ask(self, federation: Federation, x: Tensor, seed: int, r: int) -> Gradients:
        return federation.gradients(x, None if self.exact else self.batch_size, (seed, r, 0))

    def _dual_step(self, state: ScaffPDState, rates: Rates) -> ScaffPDState:
        weights = state.centre
        if rates.sigma > 0 and np.all(
            np.abs(state.losses) < LARGEST / 4
        ):  # beyond, the run is about to be ended
            s = state.losses + rates.theta * (state.losses - state.previous)
            weights = self.objective._prox(s, state.centre, rates.sigma)
        if state.at is None:
            return replace(state, weights=weights)
        state = replace(state, weights=weights, direction=state.at.sum(weights))
        return self._certified(state, state.at, state.direction)


def _bend(state: ScaffPDState, at: Gradients, x: Tensor) -> float:
    """Return ½ Σ_i λ_i ⟨c_i(x⁺) − c_i(x), x⁺ − x⟩, from sums alone."""
    return float((at.sum(state.weights) - state.direction) @ (x - state.x)) / 2


def _precision(x: Tensor) -> float:
    return float(torch.finfo(x.dtype).eps)


@dataclass(frozen=True)
class AcceleratedPrimalDual(ScaffPD):
    """The accelerated primal-dual method.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        steps: `Auto()`, `Fixed(...)` or `Theory(...)`.
    """

    published: ClassVar[str] = "APD"
    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS})

    local_steps: int = field(default=1, init=False, repr=False)
    batch_size: None = field(default=None, init=False, repr=False)
    full_gradients: bool = field(default=True, init=False, repr=False)

    def _local_work(self, federation: Federation, state: ScaffPDState, rates: Rates) -> Tensor:
        """Return Σ (λ_i/S) η_i c/S: one local step of everybody, made by the server."""
        total = float(state.weights.sum()) or 1.0
        L = state.constants.smoothness
        eta = np.full(len(L), rates.local_rate or 0.0)
        if rates.local_rate is None:  # nobody moves where the loss is flat
            eta = np.divide(rates.local_scale, L, out=np.zeros_like(L), where=L > 0)
        return float(state.weights @ eta) / total * (state.direction / total)
