r"""Minimax from sums: the server learns no loss, no gradient and no weight of a single client.

Many objectives leave every client to find its own weight. With ψ(λ) = Σ ψ_i(λ_i) on the simplex
(`Separable`), one threshold ν for all is enough:

    λ_i(ν) = argmax_l (L_i − ν) l − ψ_i(l) − (δ/2)(l − m_i)²,        Σ λ_i(ν) = 1,

and λ(ν) maximises Σ λ_i L_i − ψ(λ) − (δ/2)‖λ − m‖². Call the maximum Φ(x); its gradient is
Σ λ_i c_i. All that the server needs are sums: Σ λ_i(ν) and V(ν) = ν + Σ max_l (…) for a few
thresholds ν, whose least value is Φ(x); Σ λ_i c_i; Σ λ_i d_i. One round at x:

    (1)  correction q down, Σ λ_i d_i up:  J local steps u ← u − η_i (∇f_i(u) − c_i + q) of all
    (2)  x⁺ = x − t d down, Σ λ_i(ν_k) and V(ν_k) up for a few ν_k; the server interpolates ν
    (3)  ν down, Σ λ_i c_i and what the certificate is made of up

d is a quasi-Newton step (L-BFGS: J. Nocedal, "Updating quasi-Newton matrices with limited
storage", 1980) whose first matrix is the clients' local work: local steps solve for the curvature
Σ λ_i ∇²f_i, and the pairs (x⁺ − x, ∇Φ⁺ − ∇Φ) add what the moving weights contribute, a matrix of
rank N − 1 at most. t is 1 unless Φ does not fall.

Where ψ is not curved (`CVaR`, `Agnostic`), δ > 0 makes Φ smooth and the centre m moves: m ← λ as
soon as the primal part of the certificate is the smaller one, with a smaller δ where it is much
smaller. This is the proximal method of multipliers (Rockafellar 1976). Clients store m_i.

**Certificate.** With S = Σ λ_i, for every ν, and with sums known up to their number format,

    F(x) − min F ≤ [ν + Σ ψ_i*(L_i − ν) − Σ λ_i L_i/S + ψ(λ/S)] + ‖Σ λ_i c_i/S‖² / (2 Σ λ_i μ_i/S):

clients round their terms to the safe side, and the server adds the errors of sums. An S other than
one costs accuracy, not truth.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.certificate import length
from scaffpd.algorithms.minimax import MinimaxMethod, MinimaxState
from scaffpd.algorithms.thresholds import ThresholdSearch
from scaffpd.errors import InputError
from scaffpd.federation import Federation, LocalPlan, Vector
from scaffpd.federation.questions import GradientsAt
from scaffpd.federation.weighted import SUMMARY, Response, Thresholds, WeightedSteps, WeightRule
from scaffpd.objectives.base import Objective
from scaffpd.objectives.rounding import EPSILON, LEAST

ASKED = 6  # exchanges in which a threshold has to be found
KINKED = 1e-3  # share of the expected change of Φ that a bend between two thresholds may make up
FIRST = 0.025  # δ at first, by N times the mean loss
# m moves where the primal part of the certificate is below READY of the dual one; δ falls as well
# where it is below MUCH
READY = 0.5
MUCH = 0.1
SMALLER = 0.3
ARMIJO = 1e-4
SHORTEST = 0.1
LONGEST = 0.6
PATIENCE = 40  # halvings of a step
NOISE = 1e-13  # of Φ, relative


@dataclass(frozen=True, kw_only=True)
class MinimaxSumsState(MinimaxState):
    """`weights` and `losses` are NaN: nobody but the clients knows them.

    Attributes:
        nu: ν.
        value: Φ(x).
        mass: Σ λ_i.
        direction: Σ λ_i c_i / Σ λ_i.
        primal: the certificate's part that another x could save.
        dual: the part that another λ could gain.
        delta: δ.
        centre: the number under which clients store m, times `scale`; 0 for the prior.
        scale: see `centre`.
        name: the number under which they store λ.
        width: how far from the mean loss the first ν is looked for.
        way: d, while shorter steps along it are tried.
        step: t; 1 where there is a new d to be found.
        moves: x⁺ − x of the last rounds, (K, d).
        changes: ∇Φ⁺ − ∇Φ of the last rounds.
        at: where clients have answered.
    """

    nu: float
    value: float
    mass: float
    direction: Tensor
    primal: float = np.inf
    dual: float = np.inf
    delta: float
    centre: int = 0
    scale: float = 1.0
    name: int = 0
    width: float
    way: Tensor
    step: float = 1.0
    moves: Tensor
    changes: Tensor
    at: GradientsAt = field(repr=False, metadata={"transient": True})

    @property
    def looked_up(self) -> bool:
        """Losses are looked up at the end, where clients show them."""
        return False

    def rule(self, objective: Objective, *levels: float, name: int = 0) -> WeightRule:
        """Return the rule by which clients find their weights, for these thresholds."""
        return WeightRule(objective, levels, self.delta, self.centre, self.scale, name)


@dataclass(frozen=True)
class MinimaxSums(MinimaxMethod[MinimaxSumsState]):
    """A quasi-Newton method on sums, for objectives whose clients can find their own weights.

    Args:
        objective: `ChiSquare`, `Tilted`, `CVaR`, `Agnostic`, `Average`, or one of them in `Excess`.
        local_steps: J.
        pairs: the most moves that the quasi-Newton step goes by.
    """

    published: ClassVar[str] = ""
    questions: ClassVar[frozenset[str]] = frozenset(
        {Thresholds.kind, Response.kind, WeightedSteps.kind}
    )
    needs: ClassVar[frozenset[str]] = frozenset()
    asks_losses: ClassVar[bool] = True

    local_steps: int = 20
    pairs: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not able(self.objective):
            raise InputError(
                "not-separable",
                "MinimaxSums needs an objective whose clients can find their own weights "
                f"(ChiSquare, Tilted, CVaR, Agnostic, Average), not {self.objective!r}.",
            )

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> MinimaxSumsState:
        """Find ν at x⁰, from the mean and the spread of the losses there."""
        return self._begin(federation, seed, x0)

    def _begin(
        self, federation: Federation, seed: int, x0: Tensor | None, delta: float | None = None
    ) -> MinimaxSumsState:
        x = federation.start() if x0 is None else x0
        constants = federation.constants()
        n = len(federation.names)
        at = GradientsAt(x)
        form = self.objective.threshold_form(n)
        mean, square = _masses(federation, at, WeightRule(self.objective, ()))[:2]
        if not math.isfinite(square):
            raise InputError("start-not-finite", "The loss of a client is not finite at the start.")
        size = abs(mean) + float(np.abs(form.offset).max()) + LEAST
        delta = 0.0 if form.curved else delta or FIRST * n * size
        if delta > 0 and not federation.sums.allows_reweighting:
            raise InputError(
                "too-few-clients-to-reweight",
                f"{self.objective!r} moves weights while x stands still, and so few clients let a "
                "vector into one secure sum only: use ChiSquare, show the losses (losses = "
                '"clear"), or have more clients.',
            )
        state = MinimaxSumsState(
            x=x,
            weights=np.full(n, np.nan),
            losses=np.full(n, np.nan),
            seed=seed,
            constants=constants,
            nu=float(mean),
            value=np.inf,
            mass=1.0,
            direction=torch.zeros_like(x),
            delta=delta,
            width=max(math.sqrt(max(square - mean**2, 0.0)), 1e-3 * size),
            way=torch.zeros_like(x),
            moves=x.new_zeros(0, len(x)),
            changes=x.new_zeros(0, len(x)),
            at=at,
        )
        return self._answered(federation, self._threshold(federation, state, at, state.nu))

    def resume(self, federation: Federation, state: MinimaxSumsState) -> MinimaxSumsState:
        """Ask for thresholds at x again; where clients may have forgotten m, begin there anew."""
        if state.delta == 0:
            at = GradientsAt(state.x)
            size = abs(state.value) + abs(state.nu)
            self._threshold(federation, state, at, state.nu, 1e-9 * size)
            return replace(state, at=at)
        new = self._begin(federation, state.seed, state.x, state.delta)
        return replace(
            new,
            rounds=state.rounds,
            moves=state.moves,
            changes=state.changes,
            accepted=state.accepted,
        )

    def uncertified(self, state: MinimaxSumsState) -> str | None:
        """Say why nothing is proven about the result, or return `None`."""
        if not state.constants.convex:
            return "the losses are not known to be convex."
        if state.constants.strong_convexity.max() > 0:
            return None
        return "no loss is strongly convex; give the model l2 > 0."

    def round(self, federation: Federation, state: MinimaxSumsState) -> MinimaxSumsState:
        """Take a step, or a shorter one along the last direction where that was too long."""
        state = self._centred(federation, replace(state, rounds=state.rounds + 1))
        if state.step == 1.0:
            state = replace(state, way=self._way(federation, state))
        slope = float(state.direction @ state.way)
        t = state.step
        if not slope > 0:
            none = state.moves[:0]
            return replace(state, step=1.0, moves=none, changes=none, accepted=False)
        at = GradientsAt(state.x - t * state.way)
        tried = self._threshold(federation, state, at, state.nu - t * slope / 2, t * slope)
        rise = tried.value - state.value
        if not rise <= NOISE * abs(state.value) + 4 * _error(federation) - ARMIJO * t * slope:
            room = 2 * (rise + t * slope)
            best = t * t * slope / room if math.isfinite(room) and room > 0 else 0.0
            step = float(np.clip(best, SHORTEST * t, LONGEST * t))
            return replace(state, step=step if step > 2.0**-PATIENCE else 1.0, accepted=False)
        new = self._answered(federation, replace(tried, accepted=True, step=1.0))
        return self._with_pair(state, new)

    def _centred(self, federation: Federation, state: MinimaxSumsState) -> MinimaxSumsState:
        """Move m to λ where another x could save less than another λ: a second sum at one x."""
        if state.delta == 0 or state.step < 1.0 or state.primal > READY * state.dual:
            return state
        delta = state.delta * (SMALLER if state.primal <= MUCH * state.dual else 1.0)
        moved = replace(state, centre=state.name, scale=state.mass, delta=delta)
        moved = self._threshold(federation, moved, state.at, state.nu, state.dual)
        return self._answered(federation, moved)

    def _way(self, federation: Federation, state: MinimaxSumsState) -> Tensor:
        """Return d, by the two loops of L-BFGS around the clients' local work."""
        plan = LocalPlan(self.local_steps, key=(state.seed, state.rounds, 1))
        rule = state.rule(self.objective, state.nu)

        def local_work(q: Tensor) -> Tensor:
            made = federation.ask(WeightedSteps(state.at, rule, q, plan))
            return made.added("weighted_d", np.ones(len(federation.names))) / state.mass

        return two_loops(state.moves, state.changes, state.direction, local_work)

    def _with_pair(self, state: MinimaxSumsState, new: MinimaxSumsState) -> MinimaxSumsState:
        """Remember the move and the change of the gradient, where Φ bends upwards along it."""
        s = new.x - state.x
        y = new.direction - state.direction
        # The loops divide by ρ, summed in another order: rounding must not choose its sign.
        least = max(1e-12, 64 * torch.finfo(s.dtype).eps)
        if not float((s * y).sum()) > least * float(s.norm() * y.norm()):
            return new
        moves = torch.cat([state.moves, s[None]])
        changes = torch.cat([state.changes, y[None]])
        return replace(new, moves=moves[-self.pairs :], changes=changes[-self.pairs :])

    def _threshold(
        self,
        federation: Federation,
        state: MinimaxSumsState,
        at: GradientsAt,
        expected: float,
        change: float = np.inf,
    ) -> MinimaxSumsState:
        """Return the state at another point, with ν and Φ there.

        `change` is about how much Φ will change. The search ends where Φ, which is at least the
        mean loss, is too large for a step to go there.
        """
        state = replace(state, x=at.x, at=at)
        size = abs(expected) + (abs(state.value) if math.isfinite(state.value) else 0.0)
        width = max(change if math.isfinite(change) else state.width, NOISE * size)
        tilt = self.objective.threshold_form(len(federation.names)).tilt
        search = ThresholdSearch(expected, width, tilt)
        curved = state.delta == 0
        for _ in range(ASKED):
            levels = search.next()
            found = _masses(federation, at, state.rule(self.objective, *levels))
            error = _error(federation)
            if not np.all(np.isfinite(found)) or (curved and found[0] > state.value + 4 * error):
                break
            search.take(levels, found[2::2], found[3::2])
            best = search.found(KINKED * change + 4 * error + NOISE * size, error)
            if best is not None:
                return replace(state, nu=best.nu, value=best.value)
        return replace(state, value=float(found[0]) if curved else np.inf)  # no step goes there

    def _answered(self, federation: Federation, state: MinimaxSumsState) -> MinimaxSumsState:
        """Ask for Σ λ_i c_i at the new point, and certify it."""
        if not math.isfinite(state.value):
            raise InputError(
                "losses-too-large", "The losses are too large, or not finite, at the start."
            )
        d = len(state.x)
        name = _name(state) if state.delta > 0 else 0
        rule = state.rule(self.objective, state.nu, name=name)
        asked = federation.ask(Response(state.at, rule))
        found = asked.added("weighted", np.ones(len(federation.names)))
        error = _error(federation)
        numbers = found[d:].double().cpu().numpy()
        mass = float(numbers[0])
        state = replace(state, direction=found[:d].to(state.x) / mass, mass=mass, name=name)
        return self._proven(state, numbers, error)

    def _proven(self, state: MinimaxSumsState, sums: Vector, error: float) -> MinimaxSumsState:
        """Return the state with its certificate; `error` is the most that every sum may be off."""
        n = len(state.weights)
        form = self.objective.threshold_form(n)
        mass, gained, moment, bound, modulus, rounding = (float(v) for v in sums)
        slack = error + 4 * n * EPSILON * (1 + abs(gained) + abs(bound))
        least = mass - slack
        most = mass + slack
        sane = np.all(np.isfinite(sums)) and least > 0 and modulus > 4 * slack
        if self.uncertified(state) or not sane:
            return replace(state, certificate=np.inf, floor=np.inf)

        def gain(off: float, moment: float, mass: float) -> float:
            """Return how much another λ may gain, with sums that are off."""
            best = state.nu + bound + off
            return best - (gained - off) / mass + float(form.cost(moment, mass))

        dual = gain(0.0, moment, mass)
        ends = [gain(slack, moment + off, m) for off in (slack, -slack) for m in (least, most)]
        size = float(length(state.direction))
        wide = 1 + 16 * (n + 4) * EPSILON
        primal = size**2 * mass / modulus / 2
        vector = 2 * error * math.sqrt(len(state.x) + SUMMARY)
        longest = (size * mass + rounding + vector) / least * wide
        highest = longest**2 * most / (modulus - slack) / 2 * wide
        floor = max(*ends, dual) - dual + max(highest - primal, 0.0)
        floor += 8 * EPSILON * (abs(state.nu) + abs(bound) + abs(gained)) + LEAST
        if form.capped:  # λ/S may be beyond its caps by this share, and losses are not negative
            value = abs(state.nu) + abs(bound) + 2 * float(np.abs(form.offset).max())
            dual += max(1 / least - 1, 0.0) * value
        dual = max(dual, 0.0)
        gap = dual + primal + floor
        return replace(state, certificate=gap, floor=floor, primal=primal, dual=dual)


def two_loops(
    steps: Tensor, changes: Tensor, v: Tensor, initial: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return Hv for the L-BFGS matrix H of pairs (s_k, y_k), oldest first, around H_0.

    H_{k+1} = (I − s_k y_kᵀ/ρ_k) H_k (I − y_k s_kᵀ/ρ_k) + s_k s_kᵀ/ρ_k,        ρ_k = ⟨s_k, y_k⟩
    """
    rho = (steps * changes).sum(1)
    q = v
    alphas = []
    for s, y, r in zip(steps.flip(0), changes.flip(0), rho.flip(0), strict=True):
        alphas.append(s @ q / r)
        q = q - alphas[-1] * y
    out = initial(q)
    for s, y, r, alpha in zip(steps, changes, rho, reversed(alphas), strict=True):
        out = out + (alpha - y @ out / r) * s
    return out


def able(objective: Objective) -> bool:
    """Return whether any number of clients can find their own weights for this objective."""
    prior = objective.prior
    base = getattr(objective, "objective", objective)
    cap = getattr(base, "cap", None)
    n = len(prior) if prior is not None else max(2, math.ceil(1 / cap) if cap else 2)
    if isinstance(getattr(objective, "offset", None), str):
        return type(base).separable is not Objective.separable
    sizes = np.size(getattr(objective, "offset", 0.0))
    return objective.separable(sizes if sizes > 1 else n) is not None


def _name(state: MinimaxSumsState) -> int:
    """Return the number under which clients store λ: a digest of all that λ depends on.

    So a run is a function of its seed and its sums, and weights of another run on the same clients
    can only have the same number if they are the same weights.
    """
    what = (state.nu, state.delta, state.centre, state.scale)
    text = state.x.detach().cpu().numpy().tobytes() + repr(what).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6]) + 1


def _masses(federation: Federation, at: GradientsAt, rule: WeightRule) -> Vector:
    """Ask for the sums of `Thresholds`."""
    asked = federation.ask(Thresholds(at, rule))
    return asked.added("masses", np.ones(len(federation.names))).double().cpu().numpy()


def _error(federation: Federation) -> float:
    """Return the most that an entry of the last sum may be off by its number format."""
    return federation.sums.error(1, np.ones(1))
