r"""Quasi-Newton minimax: the fewest exchanges where the server may see every client's gradient.

One exchange a round: x down; c_i and scalars up. With C = [c_1 … c_N] at x, H a limited-memory BFGS model of the
inverse Hessian of Σ λ_i f_i, and F(L) = support(L),

    λ  = argmax_{l∈Λ} ⟨L, l⟩ − ψ(l) − ½ lᵀ(CᵀHC)l / κ                     the promise: p = F(L) less this value
    x⁺ = x − HCλ/κ
    accepted where F(L⁺) ≤ F(L) − p/20, or the certificate halves; else κ grows by 2, then by 4
    κ ← max(1, κ/4) after a step that has kept half of its promise

The server keeps every client's gradient at the last K + 1 points asked about, so the pairs of H, y_k = Σ λ_i Δc_i, are
those of *this* λ however λ has moved: λ and H are found together, in a few passes, without communication. The pairs are
conjugated (`scaffpd.quasi_newton`). H_0 is the inverse of Σ λ_i diag ∇²f_i where that is constant (squared losses; one
more vector up, once) and of a multiple of I elsewhere, scaled by the newest pair.

The certificate is that of the better of λ and argmax_{l∈Λ} ⟨L⁺, l⟩ − ψ(l) − ‖C⁺l‖²/(2 Σ λ_i μ_i).

No secure sums are possible: the server sees every c_i. It keeps K·N·d numbers: for small and medium d.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.base import DIAGONAL, GRADIENTS, MinimaxMethod, MinimaxState
from scaffpd.certificate import EPSILON
from scaffpd.errors import count
from scaffpd.federation import Federation, Gradients, Vector
from scaffpd.objectives.base import LARGEST
from scaffpd.privacy.accountant import ReleaseCounts
from scaffpd.quasi_newton import InverseHessian, Pairs, compact, conjugated
from scaffpd.saddle import solve_saddle

PASSES, SETTLED = 3, 1e-3  # of λ and H: at most so many, until λ moves by less
INEXACT = 1e-3  # accuracy of λ, as a share of the promise
CERTIFIED = 0.1  # accuracy of the certificate's λ, as a share of what the other λ proves
SLACK = 64  # rounding in the acceptance test, in units of the number format


@dataclass(frozen=True, kw_only=True)
class QuasiNewtonMinimaxState(MinimaxState):
    """`weights` are those of the certificate.

    Attributes:
        model_weights: the λ of the last model.
        gradients: C at x^r, (N, d).
        points: the last points asked about, accepted or not, oldest first, (≤ K + 1, d).
        answers: the clients' gradients there, (≤ K + 1, N, d).
        diagonals: diag ∇²f_i where that is constant, (N, d); else no rows.
        damping: κ.
    """

    model_weights: Vector
    gradients: Tensor
    points: Tensor
    answers: Tensor
    diagonals: Tensor
    damping: float


@dataclass(frozen=True)
class QuasiNewtonMinimax(MinimaxMethod):
    """The quasi-Newton minimax method, without anything to tune; the server sees every client's gradient.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        pairs: K, how many steps the model of the Hessian is made of; more than d bring nothing.
    """

    published: ClassVar[str] = "Quasi-Newton minimax"
    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS, DIAGONAL})
    sees_vectors: ClassVar[bool] = True

    pairs: int = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        count("QuasiNewtonMinimax", "pairs", self.pairs)

    def releases(self, rounds: int) -> ReleaseCounts:
        """Losses and gradients at every point."""
        return ReleaseCounts.points(rounds + 1)

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> QuasiNewtonMinimaxState:
        """The clients' answers at x⁰."""
        x, constants, at = self._open(federation, x0)
        first = self.objective.maximizer if self.objective.simplex else self.objective.start
        weights, C = first(at.losses), at.each().double()
        return self._proven(QuasiNewtonMinimaxState(
            x=x, weights=weights, model_weights=weights, losses=at.losses, gradients=C, points=x.double()[None],
            answers=C[None], diagonals=at.diagonals().double() if constants.quadratic else C[:0], damping=1.0,
            seed=seed, constants=constants,
        ), at)  # fmt: skip

    def resume(self, federation: Federation, state: QuasiNewtonMinimaxState) -> QuasiNewtonMinimaxState:
        """Return the state, which is complete."""
        return state

    def round(self, federation: Federation, state: QuasiNewtonMinimaxState) -> QuasiNewtonMinimaxState:
        """Find λ and H, ask the clients about the minimiser of that model, and judge it."""
        weights, H, promised = self._model(state)
        step = H.apply(combined(weights, state.gradients)) / state.damping
        x = state.x - step.to(state.x)
        at = federation.gradients(x)
        C = at.each().double()
        asked = replace(
            state, model_weights=weights, rounds=state.rounds + 1, accepted=False,
            damping=(2 if state.accepted else 4) * state.damping,
        )  # fmt: skip
        if not (np.all(np.abs(at.losses) < LARGEST / 4) and bool(torch.isfinite(C).all())):
            return asked
        points, answers = torch.cat([state.points, x.double()[None]]), torch.cat([state.answers, C[None]])
        asked = replace(asked, points=points[-self.pairs - 1 :], answers=answers[-self.pairs - 1 :])
        taken = self._proven(replace(asked, x=x, losses=at.losses, gradients=C, accepted=True), at)
        level = self._level(weights, state.losses)
        gained = self.objective.support(state.losses - level) - self.objective.support(at.losses - level)
        slack = SLACK * torch.finfo(x.dtype).eps * float(weights.sum() * np.abs(state.losses).max())
        if gained < 0.05 * promised - slack and not taken.certificate < 0.5 * state.certificate:
            return asked
        return replace(taken, damping=max(1.0, state.damping / 4) if gained >= 0.5 * promised else state.damping)

    def _model(self, state: QuasiNewtonMinimaxState) -> tuple[Vector, InverseHessian, float]:
        """λ, the H of this λ, and the promise p."""
        weights, losses = state.model_weights, state.losses
        for _ in range(PASSES):
            last, H = weights, inverse_hessian(state, weights)
            E = (H.factor(state.gradients) / state.damping**0.5).cpu().numpy()
            tol = INEXACT * self._promise(losses, weights, E) + EPSILON * float(weights.sum() * np.abs(losses).max())
            weights = solve_saddle(self.objective, losses, E, weights, tol).weights
            if np.abs(weights - last).max() < SETTLED * max(1.0, np.abs(weights).max()):
                break
        return weights, H, self._promise(losses, weights, E)

    def _promise(self, losses: Vector, weights: Vector, E: NDArray[np.float64]) -> float:
        """F(L) − ⟨L, λ⟩ + ψ(λ) + ½‖Eλ‖²: for any λ ∈ Λ at least what the model can promise."""
        losses, pull = losses - self._level(weights, losses), E @ weights
        short = self.objective.support(losses) - float(weights @ losses) + self.objective.value(weights)
        return max(short, 0.0) + 0.5 * float(pull @ pull)

    def _level(self, weights: Vector, losses: Vector) -> float:
        """On the simplex, what is best taken off all losses: a common shift changes nothing but the rounding."""
        return float(weights @ losses / weights.sum()) if self.objective.simplex else 0.0

    def _proven(self, state: QuasiNewtonMinimaxState, at: Gradients) -> QuasiNewtonMinimaxState:
        """The better certificate of the two λ."""
        own = self._certified_for(state.model_weights, state, at)
        if not np.isfinite(own.certificate):
            return own
        modulus = float(own.weights @ state.constants.strong_convexity)
        E = compact(state.gradients.mT / modulus**0.5).cpu().numpy()
        other = solve_saddle(self.objective, state.losses, E, own.weights, CERTIFIED * own.certificate).weights
        return min(own, self._certified_for(other, state, at), key=lambda proven: proven.certificate)

    def _certified_for(self, weights: Vector, state: QuasiNewtonMinimaxState, at: Gradients) -> QuasiNewtonMinimaxState:
        return self._certified(replace(state, weights=weights), at, combined(weights, state.gradients.double()))


def inverse_hessian(state: QuasiNewtonMinimaxState, weights: Vector) -> InverseHessian:
    """H of Σ λ_i f_i, from the points asked about.

    H_0 = D⁻¹/t with D = Σ λ_i diag ∇²f_i or Σ λ_i L_i, and t = ⟨y, D⁻¹y⟩/⟨s, y⟩ of the newest pair (Barzilai and
    Borwein) within reason: a diagonal is nearly right as it is, and no curvature lies outside [Σ λ_i μ_i, Σ λ_i L_i].
    """
    known = state.constants
    least, most = float(weights @ known.strong_convexity), float(weights @ known.smoothness)
    raw = Pairs(state.points.diff(dim=0), combined(weights, state.answers).diff(dim=0))
    pairs = conjugated(raw, least, most if known.convex else np.inf)
    D = combined(weights, state.diagonals) if known.quadratic else torch.full_like(state.points[0], most)
    initial = torch.where(D > 0, 1 / D, 0)
    if len(pairs):
        s, y = pairs.steps[-1], pairs.changes[-1]
        low, high = (0.1, 3.0) if known.quadratic else (least / most, 1.0) if known.convex else (0.0, np.inf)
        initial = initial / float(np.clip(float((initial * y) @ y / (s @ y)), low, high))
    return InverseHessian(pairs, initial)


def combined(weights: Vector, vectors: Tensor) -> Tensor:
    """Σ_i w_i v_i over the last axis but one."""
    return torch.from_numpy(weights).to(vectors) @ vectors
