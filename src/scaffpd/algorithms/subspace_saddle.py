r"""Subspace saddle: Scaff-PD whose server solves the round's saddle problem in a span, exactly.

Scaff-PD's local work yields one vector d, and its server goes along it by a step size. Here the
server goes anywhere in the span of V = [last step, d, c, older ones], along which every client
reports its slopes: k scalars.

Round, at x with L, λ, S = Σ λ_i and c = Σ λ_i c_i:
    (1)  d = Σ (λ_i/S) d_i,  d_i ≈ argmin ½dᵀH_i d + (β/2)‖d‖²_D − ⟨c/S, d⟩    c down; d_i up
    (2)  V, D-orthonormal;  g_i = Vᵀc_i,  Q = Σ λ_i VᵀH_iV                     d down; scalars up
    (3)  (α, λ⁺) = the saddle point of `SubspaceModel`                         on the server
    (4)  L and Σ λ⁺_i c_i at x⁺ = x + Vα                                       α, λ⁺ down; L, c_i up
         x⁺ is taken where the merit F_w falls by a tenth of what the model promised; else δ grows,
         and the next round is (3) and (4) alone

Nothing is left to tune: β follows the length that the model wants along d, the scale s of
w_i² = s (⟨c,d⟩/‖c‖²_{D⁻¹}) (‖c_i‖²_{D⁻¹} − ‖g_i‖²) follows how far λ has moved, δ how good the last
promise was, k how many clients' weights move. Where the certificate does not halve in 50 rounds,
one centre ν holds the weights for many rounds: F_w is then the merit of one problem, and the method
converges (docs/subspace-saddle.md has the proof).
For squared losses the diagonal B of the Hessian is known: D is B where that is uneven, and I
elsewhere; B⁻¹c is in V as well where B is uneven, or where there is room.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import (
    CONVEX,
    CURVATURE,
    DIAGONAL,
    EXACT,
    GRADIENTS,
    PROXIMAL,
    SLOPES,
    steepest,
)
from scaffpd.algorithms.minimax import AnsweredState, MinimaxMethod, asked_again
from scaffpd.algorithms.saddle import solve_saddle
from scaffpd.algorithms.subspace import SubspaceModel, orthonormal
from scaffpd.errors import InputError, count
from scaffpd.federation import Federation, ProximalPlan, Vector
from scaffpd.objectives.base import LARGEST

INEXACT = 1e-6  # accuracy of the server's problems, as a share of how far there is to go
FIRST = 1e-6  # the same before anything is known of that, as a share of the losses
ROUNDING = 1e-16  # the accuracy that the server's arithmetic allows, as a share of the losses
# columns of V: the last step, d and c; where nothing is set; where many weights move
LEAST = 3
USUAL = 20
MOST = 300
STORED = 60  # columns that are stored where nothing is set: more may soon be of use
OWN = 10.0  # the size of a Hessian in the metric of its own diagonal: at least 1, at most d
STIFF = 0.01  # κ, in units of the Hessians' size
MOVES = 0.01  # a weight that changes by more than this share of the largest one has moved
PATIENCE = 50  # rounds in which the certificate has to halve
EASED = 0.25  # what is left of ω when ν moves
TINY = 1e-300  # in place of a zero that is divided by


@dataclass(frozen=True)
class Neighbourhood:
    """Answers of the clients about the neighbourhood of x."""

    V: Tensor  # the basis
    fresh: list[Tensor]  # d and c, which later rounds may use again
    model: SubspaceModel  # their losses in its span
    w: Vector  # w_i, whether the model uses them or not
    merit: float  # F_w(L(x))
    pull: float  # β for the next round
    scale: float  # s


@dataclass(frozen=True, kw_only=True)
class SubspaceSaddleState(AnsweredState):
    """`rounds` counts trial points; `accepted` says whether the last one was taken."""

    direction: Tensor  # c
    columns: Tensor  # vectors that everybody knows, the last step first, (n, d)
    diagonal: Tensor  # Σ p_i diag ∇²f_i for squared losses, or I
    metric: Tensor  # D
    uneven: bool  # whether that is the diagonal, because it is uneven, and not I
    size: float  # how large Hessians are in that metric, roughly
    pull: float  # β
    scale: float = 1.0  # s
    damping: float = 0.0  # δ
    # by how much every client's loss was above the model at a rejected trial; then zero
    bends: Vector
    energy: float = np.nan  # Σ (w_i²/s)(λ_i^r − λ_i^{r−1})²; NaN before the first step
    moving: int = 0  # the most clients whose weights one step has moved
    careful: bool = False  # whether w is used in any case, because a trial without it was rejected
    # the decrease that the last model promised: how far there may still be to go
    promise: float = np.inf
    record: float = np.inf  # the last certificate that was at most half of the record before it
    since: int = 0  # the round of that
    # ν, once the certificate has stalled; empty before
    centre: Vector = field(default_factory=lambda: np.empty(0))
    hold: float = 0.0  # ω
    # the neighbourhood of x, where a trial point there was rejected
    around: Neighbourhood | None = field(default=None, repr=False, metadata={"transient": True})


@dataclass(frozen=True)
class SubspaceSaddle(MinimaxMethod[SubspaceSaddleState]):
    """The subspace saddle method: the fewest rounds from sums and scalars, no step size.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        memory: k, the largest dimension of the subspace: every client reveals k projections of its
            gradient a round, and the server stores k vectors. Left out, 20, and one more for each
            client whose weight moves, up to 300.
    """

    published = "Subspace saddle"
    questions = frozenset({GRADIENTS, PROXIMAL, CURVATURE, DIAGONAL})
    needs = frozenset({CONVEX, EXACT, SLOPES})

    memory: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory is not None and count(type(self).__name__, "memory", self.memory) < LEAST:
            raise InputError(
                "memory-too-small",
                f"{type(self).__name__} needs memory >= {LEAST}: the last step, d and c; "
                f"got {self.memory}.",
            )

    def uncertified(self, state: SubspaceSaddleState) -> str | None:
        """Say why nothing is proven; then the model's promise has to do."""
        reason = super().uncertified(state)
        if reason is None or not np.isfinite(state.promise):
            return reason
        return f"{reason} The last round's model promised a decrease of {state.promise:.1e}."

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> SubspaceSaddleState:
        x, constants, at = self._open(federation, x0)
        weights = self.objective.start(at.losses)
        steepest(constants.smoothness)
        diagonal = torch.ones_like(x)
        if constants.quadratic:
            prior = self.objective.weights(len(at.losses)).copy()
            diagonal = at.diagonal(prior)
            diagonal = torch.where(diagonal > 0, diagonal, 1)
        uneven = badly_scaled(diagonal)
        size = OWN if uneven else float(constants.smoothness.mean())
        state = SubspaceSaddleState(
            x=x,
            weights=weights,
            losses=at.losses,
            direction=at.sum(weights),
            columns=x.new_empty(0, len(x)),
            diagonal=diagonal,
            metric=diagonal if uneven else torch.ones_like(x),
            uneven=uneven,
            size=size,
            pull=0.01 * size,
            seed=seed,
            constants=constants,
            at=at,
            bends=np.zeros(len(weights)),
        )
        return self._certified(state, at, state.direction)

    def resume(self, federation: Federation, state: SubspaceSaddleState) -> SubspaceSaddleState:
        """Ask the clients again at x, and around it after a rejected step."""
        state = asked_again(federation, state)
        return state if state.accepted else replace(state, around=self._look(federation, state))

    def round(self, federation: Federation, state: SubspaceSaddleState) -> SubspaceSaddleState:
        around = state.around or self._look(federation, state)
        tol = self._accuracy(state)
        state = replace(state, rounds=state.rounds + 1)
        model = replace(around.model, losses=state.losses + state.bends)
        step = model.solve(state.damping, tol)
        x = state.x + around.V @ torch.from_numpy(step.z).to(around.V)
        at = federation.gradients(x, coefficients_sent=len(step.z) + len(state.weights))
        promised = around.merit - step.value
        finite = bool(np.all(np.abs(at.losses) < LARGEST / 4))
        gained = around.merit - model.merit(at.losses, tol) if finite else -np.inf
        # the first δ after a rejected trial: ½, or what takes back its promise, δκ‖α‖² = promise
        stiff = max(STIFF * state.size * float(step.z @ step.z), TINY)
        least = min(0.5, max(promised, 0.0) / stiff)
        if not gained >= 0.1 * promised - 2 * tol:
            if finite and state.accepted and not model.w.any():
                # A second-order correction: the losses bend upwards by more than the model, each in
                # its own way. Where a model shifted by that still promises something, it is tried
                # before anything is damped.
                bends = at.losses - model.predicted(step.z)
                bent = replace(model, losses=state.losses + bends).solve(state.damping, tol)
                if around.merit - bent.value > 0.1 * promised:
                    return replace(state, accepted=False, around=around, bends=bends)
            return self._rejected(state, around, tol, max(4 * state.damping, least))
        moves = np.abs(step.weights - state.weights)
        away = around.model.w * moves
        moving = int(np.count_nonzero(moves > MOVES * step.weights.max()))
        columns = torch.stack([x - state.x, *around.fresh, *state.columns])
        direction = at.sum(step.weights)
        state = replace(
            state,
            x=x,
            weights=step.weights,
            losses=at.losses,
            direction=direction,
            at=at,
            around=None,
            columns=columns[: self.memory or max(STORED, self._most(state))],
            pull=around.pull,
            scale=around.scale,
            damping=damped(state.damping, gained, promised, least),
            energy=float(away @ away) / around.scale,
            moving=max(state.moving, moving),
            promise=max(promised, 0.0),
            accepted=True,
            bends=np.zeros(len(moves)),
        )
        return self._watched(self._certified(state, at, direction), tol)

    def _watched(self, state: SubspaceSaddleState, tol: float) -> SubspaceSaddleState:
        """Hold λ to a centre ν for good once the certificate has not halved in many rounds.

        The problem is then that of ψ + (ω/2)‖λ − ν‖² until it is solved to half of the certificate,
        which is when ν moves to λ and ω falls to a quarter. Where ψ bends by itself ω = 0, and the
        merit is the objective.
        """
        if len(state.centre):
            missed = self.objective.support(state.losses) - self._held_value(state, tol)
            if missed < 0.5 * state.certificate or state.hold == 0:
                return state
            return replace(state, centre=state.weights, hold=EASED * state.hold)
        if state.certificate <= 0.5 * state.record:
            return replace(state, record=state.certificate, since=state.rounds)
        if state.rounds - state.since < PATIENCE or not np.isfinite(state.certificate):
            return state
        hold = state.certificate if self._flat(state) else 0.0
        return replace(state, centre=state.weights, hold=hold)

    def _held_value(self, state: SubspaceSaddleState, tol: float) -> float:
        """Return max_{l∈Λ} ⟨L, l⟩ − ψ(l) − (ω/2)‖l − ν‖², plus (ω/2)‖λ − ν‖²."""
        away = state.weights - state.centre
        w = np.full(len(away), state.hold**0.5)
        nothing = np.empty((0, len(w)))
        best = solve_saddle(self.objective, state.losses, nothing, state.centre, tol, w)
        return best.value + 0.5 * state.hold * float(away @ away)

    def _rejected(
        self, state: SubspaceSaddleState, around: Neighbourhood, tol: float, damping: float
    ) -> SubspaceSaddleState:
        """Stay, with a model that promises less: weights held, or more damping."""
        state = replace(state, accepted=False, bends=0 * state.bends)
        if self._held(state, around.V.shape[1]) or not around.w.any():
            return replace(state, damping=damping, around=around)
        model = replace(around.model, w=around.w)
        around = replace(around, model=model, merit=model.merit(state.losses, tol))
        return replace(state, careful=True, around=around)

    def _look(self, federation: Federation, state: SubspaceSaddleState) -> Neighbourhood:
        """Make steps (1) and (2), and return what they show, with the β and s that they suggest."""
        c = state.direction
        most = self._most(state)
        fresh: list[Tensor] = []
        if len(c) <= most:
            # V is all of R^d: nothing is left for local work to find, or for w to hold.
            V = torch.diag(state.metric.rsqrt())
        else:
            total = float(state.weights.sum()) or 1.0
            plan = ProximalPlan(state.pull, state.metric)
            d = federation.proximal_steps(state.at, c / total, plan).sum(state.weights / total)
            fresh = [d, c]
            extra = [c / state.diagonal] if state.uneven else []
            known = [*state.columns[:1], *fresh, *extra, *state.columns[1:]]
            V = orthonormal(known, state.metric, most)
        seen = state.at.restriction(V, state.weights, state.metric)
        pull, scale, w = state.pull, state.scale, np.zeros(len(state.weights))
        if fresh:
            slope = float(c @ d)
            along = (V.mT @ (state.metric * d)).double().cpu().numpy()
            bend = float(along @ seen.curvature @ along)
            pull = pulled(pull, slope / bend if bend > 0 else 0.0, state.size)
            if np.isfinite(state.energy):
                scale = scaled(scale, slope / max(state.energy, TINY))
            unseen = np.maximum(seen.sizes - (seen.slopes**2).sum(1), 0)
            square = max(float((c.square() / state.metric).sum()), TINY)
            w = np.sqrt(scale * max(slope, 0.0) / square * unseen)
        # weights are held by w, or to the centre
        held, centre = w * self._held(state, V.shape[1]), state.weights
        if len(state.centre):
            held, centre = np.full_like(w, state.hold**0.5), state.centre
        near = (state.losses, seen.slopes, seen.curvature)
        model = SubspaceModel(self.objective, *near, centre, held, STIFF * state.size)
        merit = model.merit(state.losses, self._accuracy(state))
        return Neighbourhood(V, fresh, model, w, merit, pull, scale)

    def _held(self, state: SubspaceSaddleState, k: int) -> bool:
        """Return whether to use w: not if ψ is flat, D = I and V has a column for every weight that
        moves, where it costs rounds, as observed; until a trial is rejected without it.
        """
        wanted = not self._flat(state) or state.uneven or state.careful or k < state.moving
        return wanted or len(state.centre) > 0

    def _flat(self, state: SubspaceSaddleState) -> bool:
        return self.objective.simplex and self.objective.strong_convexity(len(state.weights)) == 0

    def _most(self, state: SubspaceSaddleState) -> int:
        return min(USUAL + state.moving, MOST) if self.memory is None else self.memory

    def _accuracy(self, state: SubspaceSaddleState) -> float:
        """Return that of the server's problems: a share of how far there is to go."""
        left = min(state.certificate, state.promise)
        size = 1 + float(np.abs(state.losses).max())
        return max(INEXACT * left, ROUNDING * size) if np.isfinite(left) else FIRST * size


def badly_scaled(diagonal: Tensor) -> bool:
    """Return whether curvatures of most coordinates differ by a factor of 4: a metric pays."""
    low, high = np.quantile(diagonal.double().cpu().numpy(), (0.1, 0.9))
    return bool(high > 4 * low)


def pulled(pull: float, length: float, size: float) -> float:
    """Return the β with which the model's best length along d, ⟨c, d⟩/⟨d, H(λ)d⟩, comes near ½."""
    off = float(np.log(max(length, 1e-9) / 0.5))
    if abs(off) <= 0.2:
        return pull
    return float(np.clip(pull * np.exp(-np.clip(off, -1.5, 1.5)), 1e-7 * size, 10 * size))


def scaled(scale: float, ratio: float) -> float:
    """Return the s that brings the energy of λ's last step near a share of the decrease ⟨c, d⟩.

    The target is e to one; `ratio` is the decrease over the energy, and half of what is missing in
    log s is made up at a time.
    """
    off = float(np.log(max(ratio, TINY))) - 1 - float(np.log(scale))
    return float(np.clip(scale * np.exp(np.clip(0.5 * off, -1, 1)), 0.03, 2.0))


def damped(damping: float, gained: float, promised: float, least: float) -> float:
    """Return δ for the next round: less after a good promise (none below `least`), else more."""
    if gained >= 0.75 * promised:
        return damping / 4 if damping > 0.1 * least else 0.0
    return max(2 * damping, 0.25) if gained < 0.25 * promised else damping
