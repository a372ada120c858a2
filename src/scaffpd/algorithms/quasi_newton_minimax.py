r"""Quasi-Newton minimax: the fewest exchanges where the server may see every client's gradient.

One exchange a round: x down; c_i and scalars up. With C = [c_1 … c_N] at x, H a limited-memory BFGS model of the
inverse Hessian of Σ λ_i f_i, and F(L) = support(L),

    λ  = argmax_{l∈Λ} ⟨L, l⟩ − ψ(l) − ½ lᵀ(CᵀHC)l / κ                     the promise: p = F(L) less this value
    x⁺ = x − HCλ/κ
    accepted where F(L⁺) ≤ F(L) − p/20, or the certificate halves; else κ grows by 2, then by 4
    κ ← max(1, κ/4) after a step that has kept half of its promise

The server keeps every client's gradient at the last K + 1 points asked about, so the pairs of H, y_k = Σ λ_i Δc_i, are
those of *this* λ however λ has moved: λ and H are found together, in a few passes, without communication. The pairs are
conjugated (see below). H_0 is the inverse of Σ λ_i diag ∇²f_i where that is constant (squared losses; one
more vector up, once) and of a multiple of I elsewhere, scaled by the newest pair.

No secure sums are possible: the server sees every c_i. It keeps K·N·d numbers: for small and medium d. With K = 3
it is `MinimaxGradient`; with K = 0 it would be the gradient method for min max f_i (Y. Nesterov, "Introductory Lectures
on Convex Optimization", 2004, section 2.3).

*The inverse Hessian.* From pairs (s_k, y_k) of steps and of changes of the gradient, oldest first, and a diagonal H_0,

    H_{k+1} = (I − s_k y_kᵀ/ρ_k) H_k (I − y_k s_kᵀ/ρ_k) + s_k s_kᵀ/ρ_k,        ρ_k = ⟨s_k, y_k⟩

(J. Nocedal, "Updating quasi-Newton matrices with limited storage", 1980). With q_K = v and q_k = q_{k+1} − α_k y_k,
α_k = ⟨s_k, q_{k+1}⟩/ρ_k, the recursion shows vᵀHv as a sum of squares,

    vᵀHv = Σ_k ρ_k α_k² + q_0ᵀH_0q_0,

which gives CᵀHC a factor (`InverseHessian.factor`) that costs one loop and loses no digits.

A BFGS update spoils what older pairs say, except where the new one is conjugate to them, ⟨s_j, y_k⟩ = 0. `conjugated`
makes them so, newest to oldest; of a quadratic function, H is then exact on the span of all steps. Of another function
the y_k do not belong to one matrix, and pairs whose asymmetry max_j |⟨s_j, y_k⟩ − ⟨s_k, y_j⟩|/√(ρ_j ρ_k) is large stay
as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.base import DIAGONAL, GRADIENTS, steepest
from scaffpd.algorithms.minimax import EPSILON, PerClientMethod, PerClientState, combined, compact
from scaffpd.algorithms.saddle import solve_saddle
from scaffpd.federation import Constants, Federation, Gradients, Vector
from scaffpd.objectives.base import LARGEST
from scaffpd.privacy.accountant import ReleaseCounts

# of λ and H: at most so many, until λ moves by less
PASSES = 3
SETTLED = 1e-3
INEXACT = 1e-3  # accuracy of λ, as a share of the promise
SLACK = 64  # rounding in the acceptance test, in units of the number format

ASYMMETRY = 0.1  # from here on, a pair is not conjugated
LOST = 1e-5  # a step with less than this share outside the span of the newer ones is rounding
STEEP = 1e-10  # ρ below this share of ‖s‖‖y‖ is rounding


@dataclass(frozen=True, kw_only=True)
class QuasiNewtonMinimaxState(PerClientState):
    """A state of the method.

    Attributes:
        points: the last points asked about, accepted or not, oldest first, (≤ K + 1, d).
        answers: the clients' gradients there, (≤ K + 1, N, d).
        diagonals: diag ∇²f_i where that is constant, (N, d); else no rows.
        damping: κ.
        began: the round in which it took over from another method.
    """

    points: Tensor
    answers: Tensor
    diagonals: Tensor
    damping: float
    began: int = 0


@dataclass(frozen=True)
class QuasiNewtonMinimax(PerClientMethod):
    """The quasi-Newton minimax method, without anything to tune; the server sees every client's gradient.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        pairs: K, how many steps the model of the Hessian is made of; more than d bring nothing.
    """

    published: ClassVar[str] = "Quasi-Newton minimax"
    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS, DIAGONAL})

    pairs: int = 60

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count losses and gradients at every point."""
        return ReleaseCounts.points(rounds + 1)

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> QuasiNewtonMinimaxState:
        """Ask the clients at x⁰."""
        _, constants, at = self._open(federation, x0)
        steepest(constants.smoothness)
        first = self.objective.maximizer if self.objective.simplex else self.objective.start
        return self._begun(at, constants, first(at.losses), seed)

    def take_over(self, state: Any) -> QuasiNewtonMinimaxState:
        """Return the first state of a run that goes on from another method's: its x, λ and answers `at`."""
        began = state.rounds
        constants = state.constants
        return replace(
            self._begun(state.at, constants, state.weights, state.seed), rounds=began, began=began
        )

    def _begun(
        self, at: Gradients, constants: Constants, weights: Vector, seed: int
    ) -> QuasiNewtonMinimaxState:
        C = at.each().double()
        return self._proven(
            QuasiNewtonMinimaxState(
                x=at.x,
                weights=weights,
                model_weights=weights,
                losses=at.losses,
                gradients=C,
                points=at.x.double()[None],
                answers=C[None],
                diagonals=at.diagonals().double() if constants.quadratic else C[:0],
                damping=1.0,
                seed=seed,
                constants=constants,
            ),
            at,
        )

    def resume(
        self, federation: Federation, state: QuasiNewtonMinimaxState
    ) -> QuasiNewtonMinimaxState:
        """Return the state, which is complete."""
        return state

    def round(
        self, federation: Federation, state: QuasiNewtonMinimaxState
    ) -> QuasiNewtonMinimaxState:
        """Find λ and H, ask the clients about the minimiser of that model, and judge it."""
        weights, H, promised = self._model(state)
        step = H.apply(combined(weights, state.gradients)) / state.damping
        x = state.x - step.to(state.x)
        at = federation.gradients(x)
        C = at.each().double()
        asked = replace(
            state,
            model_weights=weights,
            rounds=state.rounds + 1,
            accepted=False,
            damping=(2 if state.accepted else 4) * state.damping,
        )
        if not (np.all(np.abs(at.losses) < LARGEST / 4) and bool(torch.isfinite(C).all())):
            return asked
        points = torch.cat([state.points, x.double()[None]])
        answers = torch.cat([state.answers, C[None]])
        asked = replace(asked, points=points[-self.pairs - 1 :], answers=answers[-self.pairs - 1 :])
        taken = self._proven(replace(asked, x=x, losses=at.losses, gradients=C, accepted=True), at)
        level = self._level(weights, state.losses)
        gained = self.objective.support(state.losses - level) - self.objective.support(
            at.losses - level
        )
        slack = SLACK * torch.finfo(x.dtype).eps * float(weights.sum() * np.abs(state.losses).max())
        if gained < 0.05 * promised - slack and not taken.certificate < 0.5 * state.certificate:
            return asked
        return replace(
            taken,
            damping=max(1.0, state.damping / 4) if gained >= 0.5 * promised else state.damping,
        )

    def _model(self, state: QuasiNewtonMinimaxState) -> tuple[Vector, InverseHessian, float]:
        """Return λ, the H of this λ, and the promise p."""
        weights = state.model_weights
        losses = state.losses
        for _ in range(PASSES):
            last = weights
            H = inverse_hessian(state, weights)
            E = (H.factor(state.gradients) / state.damping**0.5).cpu().numpy()
            tol = INEXACT * self._promise(losses, weights, E) + EPSILON * float(
                weights.sum() * np.abs(losses).max()
            )
            weights = solve_saddle(self.objective, losses, E, weights, tol).weights
            if np.abs(weights - last).max() < SETTLED * max(1.0, np.abs(weights).max()):
                break
        return weights, H, self._promise(losses, weights, E)

    def _promise(self, losses: Vector, weights: Vector, E: NDArray[np.float64]) -> float:
        """Return F(L) − ⟨L, λ⟩ + ψ(λ) + ½‖Eλ‖²: for any λ ∈ Λ at least what the model can promise."""
        losses = losses - self._level(weights, losses)
        pull = E @ weights
        short = (
            self.objective.support(losses) - float(weights @ losses) + self.objective.value(weights)
        )
        return max(short, 0.0) + 0.5 * float(pull @ pull)


@dataclass(frozen=True)
class MinimaxGradient(QuasiNewtonMinimax):
    """The quasi-Newton minimax method that remembers three steps; arguments as for `QuasiNewtonMinimax`."""

    published: ClassVar[str] = ""

    pairs: int = 3


def inverse_hessian(state: QuasiNewtonMinimaxState, weights: Vector) -> InverseHessian:
    """Return H of Σ λ_i f_i, from the points asked about.

    H_0 = D⁻¹/t with D = Σ λ_i diag ∇²f_i or Σ λ_i L_i, and t = ⟨y, D⁻¹y⟩/⟨s, y⟩ of the newest pair (Barzilai and
    Borwein) within reason: a diagonal is nearly right as it is, and no curvature lies outside [Σ λ_i μ_i, Σ λ_i L_i].
    """
    known = state.constants
    least = float(weights @ known.strong_convexity)
    most = float(weights @ known.smoothness)
    raw = Pairs(state.points.diff(dim=0), combined(weights, state.answers).diff(dim=0))
    pairs = conjugated(raw, least, most if known.convex else np.inf)
    D = (
        combined(weights, state.diagonals)
        if known.quadratic
        else torch.full_like(state.points[0], most)
    )
    initial = torch.where(D > 0, 1 / D, 0)
    if len(pairs):
        s = pairs.steps[-1]
        y = pairs.changes[-1]
        low, high = (
            (0.1, 3.0)
            if known.quadratic
            else (least / most, 1.0)
            if known.convex
            else (0.0, np.inf)
        )
        initial = initial / float(np.clip(float((initial * y) @ y / (s @ y)), low, high))
    return InverseHessian(pairs, initial)


@dataclass(frozen=True)
class Pairs:
    """Steps and changes of the gradient, oldest first.

    Attributes:
        steps: s_k, (K, d).
        changes: y_k, (K, d).
    """

    steps: Tensor
    changes: Tensor

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def curvatures(self) -> Tensor:
        """ρ_k, (K,)."""
        return (self.steps * self.changes).sum(1)

    def down(self, C: Tensor) -> tuple[Tensor, Tensor]:
        """Return q_0 for every row of C, (N, d), and the α_k, (K, N)."""
        q = C.clone()
        rho = self.curvatures
        alphas = C.new_empty(len(rho), len(C))
        for k in reversed(range(len(rho))):
            alphas[k] = q @ self.steps[k] / rho[k]
            q.addr_(alphas[k], self.changes[k], alpha=-1)
        return q, alphas

    def applied(self, v: Tensor, initial: Callable[[Tensor], Tensor]) -> Tensor:
        """Return Hv, with H_0 a function: the two loops of L-BFGS around it."""
        q, alphas = self.down(v[None])
        out = initial(q[0])
        rho = self.curvatures
        for k, (s, y) in enumerate(zip(self.steps, self.changes, strict=True)):
            out = out + (alphas[k] - y @ out / rho[k]) * s
        return out


@dataclass(frozen=True)
class InverseHessian:
    """H.

    Attributes:
        pairs: (s_k, y_k).
        initial: the diagonal of H_0, (d,).
    """

    pairs: Pairs
    initial: Tensor

    def apply(self, v: Tensor) -> Tensor:
        """Return Hv."""
        return self.pairs.applied(v, lambda q: self.initial * q)

    def factor(self, C: Tensor) -> Tensor:
        """Return E with EᵀE = CᵀHC for vectors c_1 … c_N, given as rows: ⟨c_i, Hc_j⟩ is a product of columns of E."""
        q, alphas = self.pairs.down(C)
        return compact(
            torch.cat(
                [self.pairs.curvatures.sqrt()[:, None] * alphas, (self.initial.sqrt() * q).mT]
            )
        )


def conjugated(pairs: Pairs, convexity: float, smoothness: float) -> Pairs:
    """Return the pairs that are of use, made conjugate newest to oldest as far as they are symmetric.

    A μ-strongly convex and L-smooth function has ρ ≥ μ‖s‖² and ‖y‖² ≤ Lρ. These tell what rounding, or a Hessian that
    changes, has made of a pair.
    """
    found: list[tuple[Tensor, Tensor]] = []
    basis = _Conjugate(pairs.steps.new_empty(2, *pairs.steps.shape))
    for s, y in zip(pairs.steps.flip(0), pairs.changes.flip(0), strict=True):
        rho = float(s @ y)
        size = float(s @ s)
        if not rho > max(0.5 * convexity * size, STEEP * (size * float(y @ y)) ** 0.5):
            continue
        if basis.asymmetry(s, y, rho) < ASYMMETRY:
            rest, change = basis.remainder(s, y)
            left = float(rest @ rest)
            along = float(rest @ change)
            if left < LOST**2 * size:
                continue
            if (
                along >= 0.9 * convexity * left
                and 0 < float(change @ change) <= 2 * smoothness * along
            ):
                basis.add(rest, change, along)
                s = rest
                y = change
        found.append((s, y))
    if not found:
        return Pairs(pairs.steps[:0], pairs.changes[:0])
    return Pairs(*(torch.stack(vectors) for vectors in zip(*reversed(found), strict=True)))


class _Conjugate:
    """Pairs that are conjugate to each other: the first rows of a (2, K, d) buffer."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.rho, self.n = buffer, buffer.new_empty(buffer.shape[1]), 0

    def add(self, s: Tensor, y: Tensor, rho: float) -> None:
        self.buffer[0, self.n] = s
        self.buffer[1, self.n] = y
        self.rho[self.n] = rho
        self.n += 1

    def asymmetry(self, s: Tensor, y: Tensor, rho: float) -> float:
        S, Y = self.buffer[:, : self.n]
        return (
            float(((Y @ s - S @ y).abs() / (self.rho[: self.n] * rho).sqrt()).max())
            if self.n
            else 0.0
        )

    def remainder(self, s: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return (s, y) without its part along the others; twice, to make up for rounding."""
        S, Y = self.buffer[:, : self.n]
        for _ in range(2):
            share = (Y @ s) / self.rho[: self.n]
            s = s - share @ S
            y = y - share @ Y
        return s, y
