r"""Minimax from sums: the server learns no loss, no gradient and no weight of a single client.

Many objectives leave every client to find its own weight. With ψ(λ) = Σ ψ_i(λ_i) on the simplex (`Separable`), one
threshold ν for all is enough:

    λ_i(ν) = argmax_l (L_i − ν) l − ψ_i(l) − (δ/2)(l − m_i)²,        Σ λ_i(ν) = 1,

and λ(ν) maximises Σ λ_i L_i − ψ(λ) − (δ/2)‖λ − m‖². Call the maximum Φ(x); its gradient is Σ λ_i c_i. All that the
server needs are sums: Σ λ_i(ν) and V(ν) = ν + Σ max_l (…) for a few thresholds ν, whose least value is Φ(x); Σ λ_i c_i;
Σ λ_i d_i. One round at x:

    (1)  correction q down, Σ λ_i d_i up:  J local steps u ← u − η_i (∇f_i(u) − c_i + q) of everybody
    (2)  x⁺ = x − t d down, Σ λ_i(ν_k) and V(ν_k) up for a few ν_k; the server interpolates ν
    (3)  ν down, Σ λ_i c_i and what the certificate is made of up

d is a quasi-Newton step (L-BFGS, Nocedal 1980) whose first matrix is the clients' local work: local steps solve for the
curvature Σ λ_i ∇²f_i, and the pairs (x⁺ − x, ∇Φ⁺ − ∇Φ) add what the moving weights contribute, a matrix of rank N − 1
at most. t is 1 unless Φ does not fall.

Where ψ is not curved (`CVaR`, `Agnostic`), δ > 0 makes Φ smooth and the centre m moves: m ← λ as soon as the primal
part of the certificate is the smaller one, with a smaller δ where it is much smaller. This is the proximal method of
multipliers (Rockafellar 1976). Clients keep m_i.

**Certificate.** With S = Σ λ_i, for every ν, and with sums that are known up to their number format,

    F(x) − min F ≤ [ν + Σ ψ_i*(L_i − ν) − Σ λ_i L_i/S + ψ(λ/S)] + ‖Σ λ_i c_i/S‖² / (2 Σ λ_i μ_i/S):

clients round their terms to the safe side, and the server adds the errors of sums. An S other than one costs accuracy,
not truth.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.minimax import EPSILON, MinimaxMethod, MinimaxState, length
from scaffpd.algorithms.quasi_newton_minimax import Pairs
from scaffpd.errors import InputError
from scaffpd.federation import Federation, LocalPlan, Vector
from scaffpd.federation.questions import GradientsAt
from scaffpd.federation.weighed import SUMMARY, Response, Thresholds, WeighedSteps, Weighing
from scaffpd.objectives.base import Objective
from scaffpd.objectives.rounding import LEAST

GRID = (
    -8.0,
    -2.0,
    -0.5,
    -0.1,
    0.1,
    0.5,
    2.0,
    8.0,
)  # thresholds that are tried, in widths from where ν is expected
CLOSER = (
    -0.5,
    -0.125,
    -1 / 64,
    -1 / 1024,
    1 / 1024,
    1 / 64,
    0.125,
    0.5,
)  # and around the secant between two of them
ASKED = 6  # exchanges in which a threshold has to be found
KINKED = 1e-3  # share of the expected change of Φ that a bend between two thresholds may make up
# δ at first, by N times the mean loss; how it falls, and when
FIRST = 0.025
SMALLER = 0.3
MUCH = 0.1
READY = 0.5
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
        centre: the number under which clients keep m, times `scale`; 0 for the prior.
        scale: see `centre`.
        name: the number under which they keep λ.
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


class Threshold(NamedTuple):
    """A threshold: ν, Σ λ_i(ν) and V(ν)."""

    nu: float
    mass: float
    value: float


@dataclass(frozen=True)
class MinimaxSums(MinimaxMethod):
    """A quasi-Newton method on sums, for objectives whose clients can find their own weights.

    Args:
        objective: `ChiSquare`, `Tilted`, `CVaR`, `Agnostic`, `Average`, or one of them in `Excess`.
        local_steps: J.
        pairs: the most moves that the quasi-Newton step goes by.
    """

    published: ClassVar[str] = ""
    questions: ClassVar[frozenset[str]] = frozenset(
        {Thresholds.kind, Response.kind, WeighedSteps.kind}
    )
    asks_losses: ClassVar[bool] = True

    local_steps: int = 20
    pairs: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not able(self.objective):
            raise InputError(
                "minimaxsums-objective-whose",
                f"MinimaxSums needs an objective whose clients can find their own weights (ChiSquare, Tilted, CVaR, "
                f"Agnostic, Average), not {self.objective!r}.",
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
        none = x.new_zeros(0, len(x))
        form = self.objective.threshold_form(n)
        mean, square = _masses(federation, at, Weighing(self.objective, ()), n)[0][:2]
        if not math.isfinite(square):
            raise InputError(
                "loss-client-finite", "The loss of a client is not finite at the start."
            )
        size = abs(mean) + float(np.abs(form.offset).max()) + LEAST
        delta = 0.0 if form.curved else delta or FIRST * n * size
        if delta > 0 and not federation.sums.allows_reweighting:
            raise InputError(
                "weights-move-while",
                f"{self.objective!r} has weights move while x stands still, and so few clients let a vector into one "
                'secure sum only: use ChiSquare, show the losses (losses = "clear"), or have more clients.',
            )
        state = MinimaxSumsState(
            x=x,
            weights=np.full(n, np.nan),
            losses=np.full(n, np.nan),
            seed=seed,
            constants=constants,
            nu=mean,
            value=np.inf,
            mass=1.0,
            direction=torch.zeros_like(x),
            delta=delta,
            width=max(math.sqrt(max(square - mean**2, 0.0)), 1e-3 * size),
            way=torch.zeros_like(x),
            moves=none,
            changes=none,
            at=at,
        )
        return self._answered(federation, self._threshold(federation, state, at, mean))

    def resume(self, federation: Federation, state: MinimaxSumsState) -> MinimaxSumsState:
        """Ask for thresholds at x again; where clients have forgotten their centre, begin there anew."""
        at = GradientsAt(state.x)
        try:
            self._threshold(
                federation, state, at, state.nu, 1e-9 * (abs(state.value) + abs(state.nu))
            )
        except InputError:
            new = self._begin(federation, state.seed, state.x, state.delta)
            return replace(
                new,
                rounds=state.rounds,
                moves=state.moves,
                changes=state.changes,
                accepted=state.accepted,
            )
        return replace(state, at=at)

    def uncertified(self, state: MinimaxSumsState) -> str | None:
        """Say why nothing is proven about the result, or return `None`."""
        known = state.constants
        if not known.convex:
            return "the losses are not known to be convex."
        return (
            None
            if known.strong_convexity.max() > 0
            else "no loss is strongly convex; give the model l2 > 0."
        )

    def round(self, federation: Federation, state: MinimaxSumsState) -> MinimaxSumsState:
        """Take a step, or a shorter one along the last direction where that was too long."""
        state = self._centred(federation, replace(state, rounds=state.rounds + 1))
        if state.step == 1.0:
            state = replace(state, way=self._way(federation, state))
        slope = float(state.direction @ state.way)
        t = state.step
        if not slope > 0:
            return replace(
                state, step=1.0, moves=state.moves[:0], changes=state.changes[:0], accepted=False
            )
        x = state.x - t * state.way
        tried = self._threshold(
            federation, state, GradientsAt(x), state.nu - t * slope / 2, t * slope
        )
        rise = tried.value - state.value
        if not rise <= NOISE * abs(state.value) + 4 * _error(federation) - ARMIJO * t * slope:
            room = 2 * (rise + t * slope)
            best = t * t * slope / room if math.isfinite(room) and room > 0 else 0.0
            step = float(np.clip(best, SHORTEST * t, LONGEST * t))
            return replace(state, step=step if step > 2.0**-PATIENCE else 1.0, accepted=False)
        new = self._answered(federation, replace(tried, accepted=True, step=1.0))
        return self._with_pair(state, new)

    def _centred(self, federation: Federation, state: MinimaxSumsState) -> MinimaxSumsState:
        """Move the centre to λ where another x could save less than another λ: a second sum of the same vectors."""
        if state.delta == 0 or state.step < 1.0 or state.primal > READY * state.dual:
            return state
        delta = state.delta * (SMALLER if state.primal <= MUCH * state.dual else 1.0)
        moved = replace(state, centre=state.name, scale=state.mass, delta=delta)
        return self._answered(
            federation, self._threshold(federation, moved, state.at, state.nu, state.dual)
        )

    def _way(self, federation: Federation, state: MinimaxSumsState) -> Tensor:
        """Return d, by the two loops of L-BFGS around the clients' local work."""
        plan = LocalPlan(self.local_steps, key=(state.seed, state.rounds, 1))

        def local_work(q: Tensor) -> Tensor:
            made = federation.ask(WeighedSteps(state.at, self._weighing(state, state.nu), q, plan))
            return made.added("weighted_d", np.ones(len(federation.names))) / state.mass

        return Pairs(state.moves, state.changes).applied(state.direction, local_work)

    def _with_pair(self, state: MinimaxSumsState, new: MinimaxSumsState) -> MinimaxSumsState:
        """Remember the move and the change of the gradient, where Φ bends upwards along it."""
        s = new.x - state.x
        y = new.direction - state.direction
        least = max(
            1e-12, 64 * torch.finfo(s.dtype).eps
        )  # so that rounding cannot change the sign of ρ
        if not float((s * y).sum()) > least * float(s.norm() * y.norm()):
            return new
        moves = torch.cat([state.moves, s[None]])
        changes = torch.cat([state.changes, y[None]])
        return replace(new, moves=moves[-self.pairs :], changes=changes[-self.pairs :])

    def _weighing(self, state: MinimaxSumsState, *levels: float, name: int = 0) -> Weighing:
        return Weighing(self.objective, levels, state.delta, state.centre, state.scale, name)

    def _threshold(
        self,
        federation: Federation,
        state: MinimaxSumsState,
        at: GradientsAt,
        expected: float,
        change: float = np.inf,
    ) -> MinimaxSumsState:
        """Return the state at another point, with ν and Φ there; `change` is about how much Φ will change.

        The search ends where Φ, which is at least the mean loss, is too large for a step to go there.
        """
        n = len(federation.names)
        size = abs(expected) + (abs(state.value) if math.isfinite(state.value) else 0.0)
        width = max(change if math.isfinite(change) else state.width, NOISE * size)
        search = ThresholdSearch(expected, width, self.objective.threshold_form(n).tilt)
        curved = state.delta == 0
        for _ in range(ASKED):
            levels = search.next()
            found, error = _masses(federation, at, self._weighing(state, *levels), n)
            if not np.all(np.isfinite(found)) or (curved and found[0] > state.value + 4 * error):
                break
            search.take(levels, found[2::2], found[3::2])
            if (
                best := search.found(KINKED * change + 4 * error + NOISE * size, error)
            ) is not None:
                return replace(state, x=at.x, at=at, nu=best.nu, value=best.value)
        return replace(
            state, x=at.x, at=at, value=float(found[0]) if curved else np.inf
        )  # no step goes there

    def _answered(self, federation: Federation, state: MinimaxSumsState) -> MinimaxSumsState:
        """Ask for Σ λ_i c_i at the new point, and certify it."""
        if not math.isfinite(state.value):
            raise InputError(
                "losses-too-large", "The losses are too large, or not finite, at the start."
            )
        n = len(federation.names)
        d = len(state.x)
        name = secrets.randbits(48) + 1 if state.delta > 0 else 0
        asked = federation.ask(Response(state.at, self._weighing(state, state.nu, name=name)))
        found = asked.added("weighted", np.ones(n))
        error = _error(federation)
        numbers = found[d:].double().cpu().numpy()
        c = found[:d].to(state.x) / float(numbers[0])
        state = replace(state, direction=c, mass=float(numbers[0]), name=name)
        return self._proven(state, numbers, error, n)

    def _proven(
        self, state: MinimaxSumsState, sums: Vector, error: float, n: int
    ) -> MinimaxSumsState:
        """Return the state with its certificate; `error` is the most that every sum may be off."""
        form = self.objective.threshold_form(n)
        nothing = replace(state, certificate=np.inf, floor=np.inf)
        mass, gained, moment, bound, modulus, rounding = (float(v) for v in sums)
        slack = error + 4 * n * EPSILON * (1 + abs(gained) + abs(bound))
        least = mass - slack
        most = mass + slack
        if (
            self.uncertified(state)
            or not np.all(np.isfinite(sums))
            or not (least > 0 and modulus > 4 * slack)
        ):
            return nothing
        dual = _gain(form, state.nu, bound, gained, moment, mass)
        ends = (
            _gain(form, state.nu, bound + slack, gained - slack, moment + off, m)
            for off in (slack, -slack)
            for m in (least, most)
        )
        size = float(length(state.direction))
        wide = 1 + 16 * (n + 4) * EPSILON
        primal = size**2 * mass / modulus / 2
        longest = (
            (size * mass + rounding + 2 * error * math.sqrt(len(state.x) + SUMMARY)) / least * wide
        )
        floor = (
            max(*ends, dual)
            - dual
            + max(longest**2 * most / (modulus - slack) / 2 * wide - primal, 0.0)
        )
        floor += 8 * EPSILON * (abs(state.nu) + abs(bound) + abs(gained)) + LEAST
        if form.capped:  # λ/S may be beyond its caps by this share, and losses are not negative
            dual += max(1 / least - 1, 0.0) * (
                abs(state.nu) + abs(bound) + 2 * float(np.abs(form.offset).max())
            )
        dual = max(dual, 0.0)
        return replace(
            state, certificate=dual + primal + floor, floor=floor, primal=primal, dual=dual
        )


class ThresholdSearch:
    """Looks for ν with Σ λ_i(ν) = 1, from sums for a few thresholds at a time.

    Args:
        expected: where ν should be.
        width: how far from there it may be.
        tilt: ρ, where λ_i = p_i exp((L_i − ν)/ρ): then one threshold tells ν.
    """

    def __init__(self, expected: float, width: float, tilt: float) -> None:
        self.expected = expected
        self.width = width
        self.tilt = tilt
        self.levels: list[Threshold] = []

    def next(self) -> tuple[float, ...]:
        """Return the thresholds to ask for."""
        below, above = self._bracket()
        if below is not None and above is not None:
            h = above.nu - below.nu
            share = (below.mass - 1) / (below.mass - above.mass)
            return tuple(
                below.nu + h * (share + (1 - share) * k if k > 0 else share + share * k)
                for k in CLOSER
            )
        if below is None and above is None:
            return tuple(self.expected + self.width * step for step in GRID)
        self.width *= 16
        edge, sign = (below.nu, 1.0) if below is not None else (above.nu, -1.0)  # type: ignore[union-attr]
        return tuple(edge + sign * self.width * 2.0**-k for k in range(len(GRID)))

    def take(self, levels: tuple[float, ...], masses: Vector, bounds: Vector) -> None:
        """Take the sums for the thresholds: Σ λ_i(ν), and V(ν) − ν."""
        new = (
            Threshold(nu, float(m), nu + float(b))
            for nu, m, b in zip(levels, masses, bounds, strict=True)
        )
        self.levels = sorted([*self.levels, *new])

    def _bracket(self) -> tuple[Threshold | None, Threshold | None]:
        """Return the last threshold with Σ λ_i ≥ 1, and the first one with less."""
        return (
            next((one for one in reversed(self.levels) if one.mass >= 1), None),
            next((one for one in self.levels if one.mass < 1), None),
        )

    def found(self, fine: float, error: float) -> Threshold | None:
        """Return ν and Φ = V(ν), if enough is known; `fine` is the accuracy that V needs, `error` that of sums."""
        below, above = self._bracket()
        exact = next((one for one in self.levels if abs(one.mass - 1) <= 8 * EPSILON + error), None)
        if exact is not None:
            return exact
        if self.tilt > 0:
            near = min(
                (one for one in self.levels if 0.01 < one.mass <= 1),
                key=lambda one: -one.mass,
                default=None,
            )
            return None if near is None else self._tilted(near)
        if below is None or above is None:
            return None
        h = above.nu - below.nu
        fall = below.mass - above.mass
        share = (below.mass - 1) / fall
        if (
            h * fall > 4 * fine
            and h > 4 * EPSILON * abs(below.nu)
            and not self._straight(below, above)
        ):
            return None
        step = share * h
        return Threshold(
            below.nu + step, 1.0, below.value + step * (1 - below.mass) + 0.5 * share * step * fall
        )

    def _straight(self, below: Threshold, above: Threshold) -> bool:
        """Return whether Σ λ_i falls along a straight line: V bends as it should, and the next line is as steep."""
        h = above.nu - below.nu
        fall = below.mass - above.mass
        k = self.levels.index(below)
        bend = abs(above.value - below.value - h * (1 - (below.mass + above.mass) / 2))
        if bend > 64 * EPSILON * (abs(above.value) + abs(below.value)) + 1e-6 * h * fall:
            return False
        sides = [self.levels[i : i + 2] for i in (k - 1, k + 2) if 0 <= i < len(self.levels) - 1]
        sides += [self.levels[k + 1 : k + 3]] if k + 2 < len(self.levels) else []
        steep = [(one.mass - two.mass) / (two.nu - one.nu) for one, two in sides if two.nu > one.nu]
        return any(abs(slope * h - fall) <= 1e-6 * fall for slope in steep)

    def _tilted(self, near: Threshold) -> Threshold:
        """Return ν and V(ν) = ν from one threshold."""
        nu = near.nu + self.tilt * math.log(near.mass)
        return Threshold(nu, 1.0, nu)


def _gain(form: Any, nu: float, bound: float, gained: float, moment: float, mass: float) -> float:
    """Return how much another λ may gain: ν + Σ ψ_i*(L_i − ν) − Σ λ_i L_i/S + ψ(λ/S)."""
    return nu + bound - gained / mass + float(form.cost(moment, mass))


def able(objective: Objective) -> bool:
    """Return whether clients can find their own weights for this objective, whatever their number."""
    prior = objective.prior
    base = getattr(objective, "objective", objective)
    cap = getattr(base, "cap", None)
    n = len(prior) if prior is not None else max(2, math.ceil(1 / cap) if cap else 2)
    if isinstance(getattr(objective, "offset", None), str):
        return type(base).separable is not Objective.separable
    sizes = np.size(getattr(objective, "offset", 0.0))
    return objective.separable(sizes if sizes > 1 else n) is not None


def _masses(
    federation: Federation, at: GradientsAt, weighing: Weighing, n: int
) -> tuple[Vector, float]:
    """Ask for the sums of `Thresholds`, and return them with the most that each may be off."""
    found = federation.ask(Thresholds(at, weighing)).added("masses", np.ones(n))
    return found.double().cpu().numpy(), _error(federation)


def _error(federation: Federation) -> float:
    """Return the most that an entry of the last sum may be off by its number format."""
    return federation.sums.error(1, np.ones(1))
