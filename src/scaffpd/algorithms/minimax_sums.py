r"""Minimax from sums: no loss, weight, gradient or Hessian of a client leaves it by itself.

Where ψ and Λ separate by clients (`Objective.separable`), the problem has two variables,

    min_{x,ν} G(x, ν) = ν + Σ φ_i(f_i(x) − ν),    φ_i(t) = max_{0≤l≤κ_i} l t − ψ_i(l),

with λ_i = φ_i'(f_i(x) − ν), which a client knows and nobody else does. G is convex, and min over ν
is F(x) = max_{λ∈Λ} Σ λ_i f_i(x) − ψ(λ). Off the simplex there is no ν.

Round, at (x, ν) with S = Σ λ_i, g = Σ λ_i c_i/S, A = Σ λ_i H_i/S and B = A + M:
    (1)  x⁺ = x − B⁻¹g, and ν for it                    x⁺, ν down
    (2)  S and Σ φ_i'' at (x⁺, ν)                       a masked sum of three numbers up
    (3)  ν⁺ = ν + (S − 1)/Σ φ_i''                       ν⁺ down
    (4)  G(x⁺, ν⁺), g⁺ and A⁺                           a masked sum up
         x⁺ is taken where G falls by a tenth of the promise ½gᵀB⁻¹g; else A is stretched
    (5)  M: the change of B by which B (x⁺ − x) = g⁺ − g (BFGS)

The Hessian of F is A + C(D − dd ᵀ/Σd)Cᵀ with d_i = φ_i''. Its last part has rank N − 1 at most, and
M learns it from differences of g ("structured" quasi-Newton, Dennis, Gay and Welsch 1981), for a
sum Σ d_i c_i could be one client's gradient: d_i is zero for a client with λ_i = 0 or κ_i. So all
vectors at a point are summed with one weighting, and as S ≥ `LEAST` nobody has more than
κ_i/`LEAST` of it: (4) is left out where S is below, and (3) goes no farther, by a bound on φ_i''
above ν. At the start ν = 0: losses are not negative, so that λ_i ≥ p_i and S ≥ 1.

Where ρ is small beside the losses, λ jumps with every step. So ρ begins at the mean loss, and falls
to the objective's own as fast as the promise does. G with another ρ is not known: the first step
after it is taken as it is. Where losses are `steep`, that may overflow. There G with the next ρ is
at most what ψ loses above G with the last, no step goes beyond, and ρ waits for a judged step.

**Certificate.** λ is as good as any multiplier. With μ = min μ_i, K = Σ ψ_i(λ_i), f_i ≥ 0 and ψ
convex,

    S ≥ 1:  F* ≥ ω [Σ λ_i L_i − K − S ‖g‖²/(2μ)] − (1 − ω) ψ(β)               for β + ω(λ − β)
    S < 1:  F* ≥ Σ λ_i L_i − (1 − θ)K − θ ψ(κ) − S ‖g‖²/(2μ)                  for λ + θ(κ − λ)

with the least weights β of Λ, such as c p behind a floor c, B = Σ β_i, ω = (1 − B)/(S − B) and
θ = (1 − S)/(Σ κ_i − S), and F(x) ≤ G(x, ν). In the place of ‖g‖²/(2μ) may stand
what A proves (`concordant.py`); how far rows reach follows from sums, too.
All of it comes from sums, and meets F* in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import CONVEX, EXACT, OWN_SUMS, OWN_WEIGHTS, PRODUCTS
from scaffpd.algorithms.concordant import Root, RowsModel, proven, reached
from scaffpd.algorithms.minimax import (
    SLACK,
    TAKEN,
    MinimaxMethod,
    MinimaxState,
    length,
    shrinkage,
    spread,
)
from scaffpd.errors import InputError
from scaffpd.federation import Federation, Vector
from scaffpd.federation.answers import width_of
from scaffpd.federation.own_weights import LEAST, NUMBERS, OwnSums, OwnWeights
from scaffpd.federation.questions import ColumnProducts, GradientsAt, Widths
from scaffpd.objectives.base import EPSILON, OUT_OF_REACH, Objective, roundings

GOOD = 0.5  # share of a promise from which on A is not stretched
NOTHING = 0.01  # a smaller stretch is left out
NEAR = 4.0  # ρ, in promises
FALL = 16.0  # of ρ in a round, at most
STEEP = 4.0  # the same of steep losses
CURVED = 1e-10  # of ‖s‖‖y‖: a smaller ⟨s, y⟩ is rounding
TINY = 1e-250
NEARLY = 1e-9  # share by which rounding may move a sum


@dataclass(frozen=True)
class SumsAt:
    """Sums at one (x, ν).

    Attributes:
        level: ν.
        mass: S = Σ λ_i.
        value: G(x, ν) from above.
        gained: Σ λ_i (L_i − ν) from below.
        cost: Σ ψ_i(λ_i).
        error: Σ λ_i ε_i.
        size: of all terms.
        gradient: Σ λ_i c_i/S, on the simplex; else without S.
        hessian: Σ λ_i H_i/S, the same.
    """

    level: float
    mass: float
    value: float
    gained: float
    cost: float
    error: float
    size: float
    gradient: Vector
    hessian: Vector


@dataclass(frozen=True, kw_only=True)
class MinimaxSumsState(MinimaxState):
    """A state of the method; `weights` and `losses` are NaN, for nobody sees them.

    Attributes:
        sums: at x.
        best: where ν seems to be best at x.
        jump: how far ν goes where nothing says how far.
        rho: ρ of the sums, which falls to the objective's own; zero without one.
        merit: G(x, ν) with that ρ, or a bound on it.
        known: whether `sums` are with that ρ, which has else changed since.
        bent: M.
        stretch: by how much A is enlarged.
        lowest: the lowest certificate of earlier points.
        products: sums over all rows of the products of columns; empty where nobody was asked.
    """

    shows_losses: ClassVar[bool] = False

    sums: SumsAt
    best: float
    jump: float
    rho: float
    merit: float
    bent: Vector
    known: bool = True
    stretch: float = 0.0
    lowest: float = np.inf
    products: Vector = field(default_factory=lambda: np.zeros((0, 0)))


@dataclass(frozen=True)
class MinimaxSums(MinimaxMethod[MinimaxSumsState]):
    """Minimax from sums, without anything to tune; see the module.

    Args:
        objective: (Λ, ψ) that separates: `ChiSquare`, `Tilted`, `Average`, `QFair` or `Nash`.
        steep: whether curvature has no bound, as that of counts: more rounds, each of them safe.
    """

    steep: bool = False

    questions: ClassVar[frozenset[str]] = frozenset({OWN_WEIGHTS, OWN_SUMS, PRODUCTS})
    needs: ClassVar[frozenset[str]] = frozenset({CONVEX, EXACT})
    asks_losses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.objective.separable:
            raise InputError(
                "objective-not-separable",
                f"MinimaxSums needs weights that clients know by themselves, and "
                f"{self.objective!r} has none: use ScaffPD, which shows losses.",
            )

    def asks(self, convex: bool = True) -> frozenset[str]:
        """Leave out how far Σ λ_i is from one where it may be anything, and sums of products, which
        are asked for once where they show nothing more (`_products`).
        """
        less = frozenset() if self.objective.simplex else {OWN_WEIGHTS}
        return self.questions - {PRODUCTS} - less

    def uncertified(self, state: MinimaxSumsState) -> str | None:
        """Say why nothing is proven about the result, or return `None`."""
        known = _here(state) or len(state.products) > 0
        if known and state.constants.convex and not state.constants.noisy:
            return None
        return super().uncertified(replace(state, weights=np.ones(len(state.weights))))

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> MinimaxSumsState:
        """Ask at x⁰ with ν = 0."""
        x = federation.start() if x0 is None else x0
        constants = federation.constants()
        if not constants.convex or constants.noisy:
            raise InputError(
                "not-convex", "MinimaxSums needs convex losses without noise: use ScaffPD."
            )
        found = self._summed(federation, self._question(federation, x, 0.0, self.objective), 0.0)
        if not found.value < OUT_OF_REACH / 2:
            raise InputError(
                "start-not-finite",
                "A loss is negative at the start, or too large for the objective: with Nash raise "
                "b, else use ScaffPD.",
            )
        unseen = np.full(len(federation.names), np.nan)
        mean = found.gained / found.mass
        state = MinimaxSumsState(
            x=x,
            weights=unseen,
            losses=unseen,
            seed=seed,
            constants=constants,
            sums=found,
            best=mean,
            jump=mean,
            rho=max(self._target, mean) if self._target else 0.0,
            merit=found.value if self.steep or not self._target else np.inf,
            known=not self._target,
            bent=np.zeros_like(found.hessian),
            products=self._products(federation, x, bool(constants.strong_convexity.min() > 0)),
        )
        return self._proven(state, federation, GradientsAt(x))

    def round(self, federation: Federation, state: MinimaxSumsState) -> MinimaxSumsState:
        """Ask about the point that B promises most of, and judge it."""
        here = state.sums
        step, promise = _step(here, state.bent, state.stretch)
        x = state.x + torch.from_numpy(step).to(state.x)
        known = state.known
        asked = replace(
            state,
            rounds=state.rounds + 1,
            accepted=False,
            best=(state.best + here.level) / 2 if known else state.best,
            stretch=max(4 * state.stretch, 1.0),
        )
        question = self._question(federation, x, state.best - promise, self._objective(state.rho))
        mass, slope, most = self._masses(federation, question)
        nu = float(question.level)  # as the first silo has it
        if mass < LEAST and known:
            return asked
        if mass < LEAST:
            fall = (1 - mass) / slope if slope > 0 else state.jump
            fall = min(fall, state.jump) if self.steep else fall
            return replace(asked, best=nu + promise - fall, jump=2 * state.jump)
        there = self._summed(federation, question, nu + _correction(mass, slope, most))
        if there.value >= OUT_OF_REACH / 2:
            return asked
        change = there.gradient - here.gradient if known else np.zeros(len(step))
        lowest = min(state.lowest, state.certificate)
        best, jump = _ahead(there, slope, state.jump, self.steep)
        taken = self._proven(
            replace(
                asked,
                x=x,
                sums=there,
                merit=there.value,
                known=True,
                bent=learned(there.hessian, state.bent, step, change),
                accepted=True,
                lowest=lowest,
                best=best,
                jump=jump,
            ),
            federation,
            question.at,
        )
        gained = state.merit - there.value
        slack = SLACK * EPSILON * (abs(there.value) + here.size)
        if gained < TAKEN * promise - slack and not taken.certificate < 0.5 * lowest:
            return replace(asked, bent=learned(here.hessian, state.bent, step, change))
        stretch = state.stretch / 2 if state.stretch > NOTHING else 0.0
        return self._sharper(
            replace(taken, stretch=stretch if gained >= GOOD * promise else state.stretch), known
        )

    @property
    def _target(self) -> float:
        """ρ of the objective; zero without one."""
        return float(getattr(self.objective, "rho", 0.0))

    def _objective(self, rho: float) -> Objective:
        return self.objective if rho == self._target else self.objective.with_strength(rho)

    def _sharper(self, state: MinimaxSumsState, judged: bool) -> MinimaxSumsState:
        """Lower ρ as far as the next step is short beside it."""
        if state.rho == self._target or (self.steep and not judged):
            return state
        promise = _step(state.sums, state.bent, 0.0 if self.steep else state.stretch)[1]
        fall = STEEP if self.steep else FALL
        rho = max(min(state.rho, NEAR * promise), state.rho / fall, self._target)
        if rho == state.rho:
            return state
        if not self.steep:
            return replace(state, rho=rho, merit=np.inf, known=False, jump=rho)
        n = len(state.weights)
        p = np.array(self.objective.weights(n))
        ends = self.objective._least(p), self.objective._most(p)
        # of ψ, which is ρ times what is convex: the largest at the ends of [0, κ_i]
        most = sum(np.maximum(*(self._objective(1.0)._penalties(end, p) for end in ends)))
        merit = state.merit + (state.rho - rho) * float(most)
        return replace(state, rho=rho, merit=merit, known=False, jump=rho)

    def _question(
        self, federation: Federation, x: Tensor, level: float, objective: Objective
    ) -> OwnWeights:
        prior = torch.from_numpy(np.array(objective.weights(len(federation.names))))
        nu = level if objective.simplex else 0.0
        return OwnWeights(x, torch.tensor([nu], dtype=torch.float64), prior, objective)

    def _masses(self, federation: Federation, question: OwnWeights) -> tuple[float, float, float]:
        """Return Σ λ_i, Σ φ_i'' and its bound; off the simplex nobody has to be asked."""
        if not self.objective.simplex:
            return 1.0, 0.0, 0.0
        ones = np.ones(len(federation.names))
        mass, slope, most = federation.ask(question).added("terms", ones).tolist()
        self._check_mass(mass, question)
        _possible(0 <= slope <= most * (1 + NEARLY) + NEARLY)
        return mass, slope, most

    def _check_mass(self, mass: float, question: OwnWeights) -> None:
        """Refuse a Σ λ_i that clients cannot have; off the simplex there is no largest."""
        p = question.prior.numpy()
        most = float(self.objective._most(p).sum()) if self.objective.simplex else np.inf
        least = float(self.objective._least(p).sum())
        _possible(least * (1 - NEARLY) <= mass <= most * (1 + NEARLY))

    def _summed(self, federation: Federation, first: OwnWeights, nu: float) -> SumsAt:
        level = torch.tensor([nu], dtype=torch.float64)
        answers = federation.ask(OwnSums(first, level))
        found = answers.added("sums", np.ones(len(federation.names))).double().cpu().numpy()
        nu = float(level)  # as the first silo has it
        mass, value, gained, cost, error, size = found[:NUMBERS].tolist()
        self._check_mass(mass, first)
        _possible(min(error, size) >= 0 and bool(np.isfinite(found).all()))
        d = federation.dimension
        gradient, upper = np.split(found[NUMBERS:], [d])
        hessian = np.zeros((d, d))
        hessian[np.triu_indices(d)] = upper
        hessian = hessian + np.triu(hessian, 1).T
        unit = mass if self.objective.simplex else 1.0
        return SumsAt(
            nu, mass, nu + value, gained, cost, error, size, gradient / unit, hessian / unit
        )

    def _products(self, federation: Federation, x: Tensor, convex: bool) -> Vector:
        """Ask for sums of products, which bound how far rows reach, where they show no more.

        At x = 0 Hessians of labels are such sums. Where x is not zero strengths were found by
        evidence, which has asked for them there with the same weights; else they are one more
        weighting, for which there has to be room, and a need.
        """
        channel = federation.channel
        free = bool(x.any()) or (federation.sums.allows_reweighting and not convex)
        if channel.here or not (free and isinstance(channel.model, RowsModel)):
            return np.zeros((0, 0))
        features = len(x) // channel.model.outputs_each
        asked = federation.ask(ColumnProducts(torch.zeros_like(x), features))
        found = asked.added("products", np.ones(len(federation.names))).double().cpu().numpy()
        _possible(bool(np.isfinite(found).all() and found.diagonal().min() >= 0))
        bent = convex or Root.of(found[:-1, :-1], found[-1, -1]).factor is not None
        return found if bent else np.zeros((0, 0))  # columns that say the same

    def _proven(
        self, state: MinimaxSumsState, federation: Federation, at: GradientsAt
    ) -> MinimaxSumsState:
        """Return the state with its certificate; there is none before ρ is the objective's own."""
        if self.uncertified(state) or (state.rho != self._target):
            return replace(state, certificate=np.inf, floor=np.inf)
        n = len(state.weights)
        found = state.sums
        p = np.array(self.objective.weights(n))
        lower, mass, ends = self._lower(found, p)
        even = np.full(n, state.constants.strong_convexity.min())
        short = shrinkage(replace(state.constants, strong_convexity=even), p)
        unit = found.mass if self.objective.simplex else 1.0
        g = float(length(torch.from_numpy(found.gradient), short.factors))
        error = short.errors * found.error / unit
        primal = most = np.inf
        if even[0] > 0:
            primal = mass * g**2 / (2 * even[0])
            most = mass * (g + error) ** 2 / (2 * even[0]) * (1 + 64 * EPSILON)
        if np.isinf(most) or primal > most / 2:

            def width(root: Tensor) -> float:
                if federation.channel.here:
                    return width_of(federation.ask(Widths(at, root, None)))
                model = federation.channel.model
                if not (len(state.products) and isinstance(model, RowsModel)):
                    return np.inf
                R, alone = model.widening(state.x)
                return R * reached(root.numpy(), state.products, alone) if R else 0.0

            constants = state.constants
            if len(state.products):  # silos may count for fewer rows than they have
                constants = replace(constants, samples=np.rint(state.products[-1:, -1]).astype(int))
            off = spread(constants) * found.error / unit
            H = torch.from_numpy(found.hessian)
            # of personal models, which this bounds no reach of, there is no inexactness either
            bound = proven(width, constants, H, found.gradient, off, 0.0, primal / mass)
            if mass * bound.most < most:
                primal, most = mass * bound.value, mass * bound.most
        if np.isinf(most):
            return replace(state, certificate=np.inf, floor=np.inf)
        size = found.size + abs(found.level) * (1 + found.mass) + ends
        floor = EPSILON * (2 * roundings(n) + 64) * size / min(unit, 1.0) + (most - primal)
        gap = max(found.value - lower, 0.0) + primal + floor
        return replace(state, certificate=float(gap), floor=float(floor))

    def _lower(self, found: SumsAt, p: Vector) -> tuple[float, float, float]:
        """Return ⟨L, λ⟩ − ψ(λ) from below for the λ of the certificate, what ‖g‖²/(2μ) counts for,
        and the size of ψ at the ends of Λ.
        """
        S = found.mass
        if not self.objective.simplex:
            return found.gained - found.cost, 1 / S, 0.0
        top = self.objective._most(p)
        bottom = self.objective._least(p)
        nothing = float(self.objective._penalties(bottom, p).sum())
        full = float(self.objective._penalties(top, p).sum())
        if S >= 1:
            least = float(bottom.sum())
            omega = (1 - least) / (S - least) if S > least < 1 else 1.0
            inner = omega * (found.gained - found.cost) - (1 - omega) * nothing
            return omega * S * found.level + inner, omega * S, nothing + full
        theta = (1 - S) / max(float(top.sum()) - S, EPSILON)
        cost = (1 - theta) * found.cost + theta * full
        return found.gained + found.level * S - cost, S, nothing + full


def _here(state: MinimaxSumsState) -> bool:
    """Return whether clients are in this process, which tells how curved their losses are."""
    return not bool(np.isnan(state.constants.smoothness).any())


def _possible(found: bool) -> None:
    """Refuse sums that no losses have, whoever has added to them."""
    if not found:
        raise InputError(
            "sum-impossible",
            "A sum over all clients is one that no losses have: one of them does not keep to the "
            "protocol.",
        )


def _correction(mass: float, slope: float, most: float) -> float:
    """Return how far ν goes towards Σ λ_i = 1, and no farther than `LEAST` surely allows."""
    if mass > 1 and most > 0:
        wanted = (mass - 1) / (slope if slope > 0 else most)
        return min(wanted, (mass - LEAST) / most)
    return (mass - 1) / slope if slope > 0 else 0.0


def _ahead(there: SumsAt, slope: float, jump: float, steep: bool) -> tuple[float, float]:
    """Return where ν seems to be best, and how far it goes where the slope hardly says."""
    away = there.mass - 1
    if slope > 0 and not steep:
        return there.level + away / slope, jump
    if away >= 0 and not steep:
        return there.level, jump
    if abs(away) <= jump * slope:
        return there.level + away / slope if away else there.level, jump
    return there.level + np.sign(away) * jump, 2 * jump


def _step(here: SumsAt, M: Vector, stretch: float) -> tuple[Vector, float]:
    """Return −B⁻¹g and ½gᵀB⁻¹g."""
    step: Vector = np.linalg.solve((1 + stretch) * here.hessian + M, -here.gradient).astype(float)
    return step, -0.5 * float(here.gradient @ step)


def learned(A: Vector, M: Vector, step: Vector, change: Vector) -> Vector:
    """Return M by which (A + M) s = y: the BFGS update of A + M, where M stays convex."""
    curved = float(step @ change)
    least = CURVED * float(np.linalg.norm(step) * np.linalg.norm(change))
    if not curved > max(least, TINY):
        return M
    values, vectors = np.linalg.eigh((M + M.T) / 2)
    B = A + (vectors * np.maximum(values, 0.0)) @ vectors.T  # the part it stands for is convex
    along = B @ step
    bent = B - np.outer(along, along) / float(step @ along) + np.outer(change, change) / curved
    return np.asarray(bent - A)
