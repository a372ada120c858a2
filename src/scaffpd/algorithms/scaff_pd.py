r"""Scaff-PD: accelerated primal-dual federated learning with bias-corrected local steps.

Y. Yu, S. P. Karimireddy, Y. Ma, M. I. Jordan,
"Scaff-PD: Communication Efficient Fair and Robust Federated Learning", 2023.

Algorithm 1, round r:
    (1)  L_i = f_i(x^r),  c_i = ∇f_i(x^r)                              x down; L_i, c_i up
    (2)  s = (1 + θ_r) L(x^r) − θ_r L(x^{r−1})
         λ^{r+1} = argmin_{λ∈Λ} ψ(λ) − ⟨s, λ⟩ + ‖λ − λ^r‖²/(2σ_r)      on the server
    (3)  c = Σ λ_i^{r+1} c_i;  Δu_i = Local-update(x^r, c_i, c)        c down; Δu_i up
         x^{r+1} = x^r − τ_r Σ λ_i^{r+1} Δu_i                          on the server
Algorithm 2, Local-update: u ← u − η_ℓ (g_i(u) − c_i + c), J times from u = x;
    Δu_i = (x − u)/(η_ℓ J).

The code starts a round with step (3) and ends it with (1) and (2) at the new point, so that a
finished round holds a pair (x, λ) with everything that its certificate needs. Off the simplex, c
and λ enter local work as c/S and λ/S with S = Σ λ_i. Where a step rule asks for other corrections
than gradients (`Nonconvex`, for networks), clients send L_i in (1). There c_i is what a client
stores and renews from its steps, c_i − c + (x − u_{i,J})/(J η_ℓ), zero at the start, as in
SCAFFOLD's option II; or c_i = c = 0.

J = 1 is the accelerated primal-dual method (APD): E. Y. Hamedani, N. S. Aybat, "A Primal-Dual
Algorithm with Line Search for General Convex-Concave Saddle Point Problems", 2021, Algorithm 2.1.
After a single local step with full gradients Δu_i = c for every client, so that the server takes it
by itself: one exchange a round instead of two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import ERRORS, GRADIENTS, LOSSES, NORMS, STORED, UPDATES, steepest
from scaffpd.algorithms.minimax import MinimaxMethod, MinimaxState, dual_step
from scaffpd.algorithms.steps import Auto, Nonconvex, StepRule, Theory
from scaffpd.algorithms.steps.nonconvex import NonconvexState
from scaffpd.algorithms.steps.rules import Rates, RuleState, StepProblem, Trial
from scaffpd.errors import InputError
from scaffpd.federation import Constants, Federation, Gradients, LocalPlan, Memory, Vector
from scaffpd.federation.plans import ReleaseCounts

POINT = 0  # purposes of a round's random numbers: minibatches of (1), and of local steps
LOCAL = 1
START = f"{GRADIENTS}.loss"  # all that networks need of the answers at x⁰
ADVICE = (
    "Neither corrections nor shorter local steps improve on the best value any more: try larger "
    "batches, another network, or another start."
)


@dataclass(frozen=True, kw_only=True)
class ScaffPDState(MinimaxState):
    """`weights` are λ^{r+1}, the answer of the dual step at x = x^r."""

    centre: Vector  # λ^r, from which that step was taken
    previous: Vector  # L(x^{r−1})
    direction: Tensor  # c = Σ λ_i^{r+1} c_i at x^r
    answered: int  # the round whose answers `at` holds (it seeds their minibatches)
    rule: RuleState  # the step rule's own state
    # the c_i that clients store, (N, d), where they are not gradients; else empty
    variates: Tensor = field(repr=False)
    # the clients' answers at x^r, asked for anew when a run is resumed; `None` where c_i are no
    # gradients
    at: Gradients | None = field(repr=False, metadata={"transient": True})

    @property
    def share(self) -> Vector:
        return self.weights / (float(self.weights.sum()) or 1.0)


@dataclass(frozen=True)
class ScaffPD(MinimaxMethod[ScaffPDState]):
    """Scaff-PD for any objective; with `local_steps=1` the accelerated primal-dual method.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        local_steps: J.
        batch_size: samples per local gradient; `None` uses all of them.
        steps: `Auto()`, `Fixed(...)` or `Theory(...)`.
        full_gradients: with `batch_size`, whether (L_i, c_i) still use all samples. They do by
            default: the error floor is lower and the certificate stays valid. `False` is the
            paper's fully stochastic setting.
    """

    published = "Scaff-PD"
    questions = frozenset({GRADIENTS, START, ERRORS, NORMS, LOSSES, UPDATES, STORED})
    asks_losses = True

    local_steps: int = 100
    batch_size: int | None = None
    steps: StepRule = field(default_factory=Auto)
    full_gradients: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = ("start", "rates", "judge")
        if isinstance(self.steps, type) or not all(hasattr(self.steps, part) for part in parts):
            raise InputError(
                "not-a-step-rule",
                f"{type(self).__name__} needs steps such as Auto(), Fixed(...) or Theory(...), "
                f"got {self.steps!r}.",
            )
        if isinstance(self.steps, Auto) and not self.exact:
            raise InputError(
                "auto-needs-full-losses",
                "Auto judges steps by full losses: use full_gradients=True, or Fixed(...) or "
                "Theory(...) steps.",
            )

    @property
    def exact(self) -> bool:
        return self.batch_size is None or self.full_gradients

    def asks(self, convex: bool = True) -> frozenset[str]:
        """Leave out what only networks, `Theory` or several local steps ask for."""
        if isinstance(self.steps, Auto) and not convex:  # no gradient is summed
            return frozenset({START, LOSSES, UPDATES, STORED})
        asked = {GRADIENTS} | ({NORMS} if isinstance(self.steps, Theory) else set())
        asked |= {UPDATES} if self.local_steps > 1 or self.batch_size is not None else set()
        return frozenset(asked | ({ERRORS} if convex and self.exact else set()))

    def measures(self, convex: bool = True) -> bool:
        """Return whether steps are those of theory, of networks, or the server's own."""
        if isinstance(self.steps, Theory | Nonconvex):
            return True
        single = self.local_steps == 1 and self.batch_size is None
        return isinstance(self.steps, Auto) and (single or not convex)

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count a point a round, and J local steps; the first of them is c_i if that is exact."""
        points = ReleaseCounts.points(rounds + 1, None if self.exact else self.batch_size)
        known = rounds if self.batch_size is None else 0
        return points + ReleaseCounts.over(
            self.batch_size, gradients=rounds * self.local_steps - known
        )

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> ScaffPDState:
        x, constants, at = self._open(federation, x0, seed)
        weights = self.objective.start(at.losses)
        stochastic = self.batch_size is not None or constants.noisy
        problem = StepProblem(
            self.objective, constants, self.local_steps, stochastic, at.losses, at.norms
        )
        rule = self._rule(constants)
        state = ScaffPDState(
            x=x,
            weights=weights,
            centre=weights,
            losses=at.losses,
            previous=at.losses,
            direction=torch.zeros_like(x),
            seed=seed,
            answered=0,
            rule=rule.start(problem),
            constants=constants,
            at=at,
            variates=x[:0],
        )
        rates = rule.rates(state.rule)
        if rates.correction != "gradients":
            stores = rates.correction == "variates"
            variates = federation.memory().vectors if stores else x[:0]
            state = replace(state, at=None, variates=variates)
        return self._dual_step(state, rates)

    def stalled(self, state: ScaffPDState) -> bool:
        return isinstance(state.rule, NonconvexState) and state.rule.stalled

    def advise(self, state: ScaffPDState) -> str:
        """Say what may help, and which method would do where `fair` would take another one."""
        if isinstance(state.rule, NonconvexState):
            return ADVICE if state.rule.stalled else ""
        limited = state.constants.first_order or state.constants.noisy
        if self.batch_size is not None or limited or not isinstance(self.steps, Auto):
            return ""
        return "sp.fair(objective) would choose a second-order method, which needs fewer rounds."

    def resume(self, federation: Federation, state: ScaffPDState) -> ScaffPDState:
        """Ask the clients for their answers at x again, where local steps need them."""
        if self._rule(state.constants).rates(state.rule).correction != "gradients":
            return replace(state, at=None)
        return replace(state, at=self._ask(federation, state.x, state.seed, state.answered))

    def round(self, federation: Federation, state: ScaffPDState) -> ScaffPDState:
        rule = self._rule(state.constants)
        rates = rule.rates(state.rule)
        if rates.correction != "gradients":
            return self._round_without_gradients(federation, state, rule, rates)
        d = self._local_work(federation, state, rates)
        step = rates.primal(float(state.weights.sum()) or 1.0, self.local_steps)
        x = state.x - step * d
        slope = state.direction @ d
        if x.dtype != torch.float64:  # along the step that is left after rounding
            slope = state.direction.double() @ (state.x.double() - x.double()) / step
        r = state.rounds + 1
        at = self._ask(federation, x, state.seed, r)
        trial = self._trial(state, at.losses, step, float(slope), at.precision)
        if federation.sums.allows_reweighting:
            trial = replace(trial, bend=lambda: _bend(state, at, x))
        judged, accepted = rule.judge(state.rule, trial)
        state = replace(state, rule=judged, accepted=accepted, rounds=r)
        if not accepted and state.constants.first_order:
            # Another λ at this x would be another sum of the same vectors: masks do not hide those.
            return state
        if accepted:
            state = self._taken(replace(state, at=at, answered=r), x, at.losses)
        return self._dual_step(state, rule.rates(judged))

    def _round_without_gradients(
        self, federation: Federation, state: ScaffPDState, rule: StepRule, rates: Rates
    ) -> ScaffPDState:
        """Make a round with stored control variates, or none: nobody sends a gradient."""
        r = state.rounds + 1
        plan = self._plan(state, rates)
        stored = None
        c = None
        if rates.correction == "variates" and len(state.variates) > 0:
            stored = Memory(state.variates, federation)
            c = stored.sum(state.share)
        updates = federation.local_updates(state.x, stored, c, plan)
        x = state.x - updates.sum(state.share)
        batch = None if self.exact else self.batch_size
        losses = federation.losses(x, batch, (state.seed, r, POINT))
        precision = torch.finfo(x.dtype).eps
        trial = self._trial(state, losses, 1.0, np.nan, precision)
        judged, accepted = rule.judge(state.rule, trial)
        state = replace(state, rule=judged, accepted=accepted, rounds=r)
        if not accepted:
            return state
        if stored is not None and c is not None:
            # The next c is a sum of the new c_i with other weights: they go up once more.
            federation.count(up=len(federation.names) * federation.dimension)
            scale = 1 / (plan.steps * (plan.rate or 1.0))
            state = replace(state, variates=stored.plus(-1.0, c).plus(scale, updates).vectors)
        return self._dual_step(self._taken(state, x, losses), rule.rates(judged))

    def _trial(
        self, state: ScaffPDState, losses: Vector, step: float, slope: float, precision: float
    ) -> Trial:
        rounded = 0.0 if state.x.dtype == torch.float64 else torch.finfo(state.x.dtype).eps
        known = state.losses, losses, state.weights, step, slope, precision
        return Trial(self.objective, *known, rounded=rounded)

    def _rule(self, constants: Constants) -> StepRule:
        """Return the step rule for these losses: the rules of `Auto` are those of convex ones."""
        networks = isinstance(self.steps, Auto) and not constants.convex
        return Nonconvex() if networks else self.steps

    def _local_work(self, federation: Federation, state: ScaffPDState, rates: Rates) -> Tensor:
        total = float(state.weights.sum()) or 1.0
        c = state.direction / total
        if self.local_steps == 1 and self.batch_size is None:
            # d_i = η_i c/S, which the server knows; nobody moves where the loss is flat.
            L = state.constants.smoothness
            if rates.local_rate is None:
                steepest(L)
            eta = np.divide(rates.local_scale, L, out=np.zeros_like(L), where=L > 0)
            if rates.local_rate is not None:
                eta = np.full_like(L, rates.local_rate)
            return float(state.weights @ eta) / total * c
        plan = self._plan(state, rates)
        return federation.local_updates(state.x, state.at, c, plan).sum(state.share)

    def _plan(self, state: ScaffPDState, rates: Rates) -> LocalPlan:
        key = (state.seed, state.rounds + 1, LOCAL)
        return LocalPlan(
            self.local_steps, rates.local_rate, rates.local_scale, self.batch_size, key
        )

    def _ask(self, federation: Federation, x: Tensor, seed: int, r: int) -> Gradients:
        return federation.gradients(x, None if self.exact else self.batch_size, (seed, r, POINT))

    def _taken(self, state: ScaffPDState, x: Tensor, losses: Vector) -> ScaffPDState:
        return replace(state, x=x, centre=state.weights, previous=state.losses, losses=losses)

    def _dual_step(self, state: ScaffPDState, rates: Rates) -> ScaffPDState:
        """Make step (2), and certify the pair (x, λ)."""
        weights = state.centre
        if rates.sigma > 0:
            s = state.losses + rates.theta * (state.losses - state.previous)
            weights = dual_step(self.objective, s, state.centre, rates.sigma)
        if state.at is None:
            return replace(state, weights=weights)
        at = state.at
        state = replace(state, weights=weights, direction=at.sum(weights))
        return self._certified(state, at, state.direction)


def _bend(state: ScaffPDState, at: Gradients, x: Tensor) -> float:
    """Return ½ Σ_i λ_i ⟨c_i(x⁺) − c_i(x), x⁺ − x⟩, from sums alone."""
    return float((at.sum(state.weights) - state.direction) @ (x - state.x)) / 2
