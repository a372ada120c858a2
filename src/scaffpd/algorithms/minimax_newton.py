r"""Minimax Newton: the fewest rounds, where d is small and the server may see all Hessians.

Round, at x with L_i, c_i and H_i = ∇²f_i(x) of every client, and smoothness constants ℓ_i:

    (p, λ⁺) = the saddle point of  Σ l_i q_i(p) − ψ(l)  over p ∈ R^d, l ∈ Λ,
              q_i(p) = L_i + ⟨c_i, p⟩ + ½pᵀ(H_i + δℓ_i I)p              on the server, exactly
    x⁺ = x + p, where clients answer L_i, c_i                          x⁺ down; L_i, c_i up
    x⁺ is taken where F(L) = max_{l∈Λ} ⟨L, l⟩ − ψ(l) falls by a tenth of the model's promise, and
    H_i comes up; else δ grows, and the next round is the same with the same H_i

Squared losses are their own model: one round solves the problem, whatever Λ is, and H_i comes up
once. Elsewhere this is Newton's method, with all weights free to move in every step.

It cannot stall. For δ ≥ 1 every q_i lies above f_i(x + ·), so F falls by the promise and the step
is taken. On the simplex, with ℓ = max ℓ_i and x* the optimum, trying p = t(x* − x) in the model
shows that the promise is at least

    max_{0≤t≤1} t (F(x) − F*) − ½ t² (1 + δ) ℓ ‖x − x*‖²  ≥  ½ min(1, μ/(2(1 + δ)ℓ)) (F(x) − F*),

for F is μ-strongly convex: F falls linearly from any start, for any Λ. Few steps are taken because
they halve the lowest certificate so far. In the end, with δ = 0, the certificate falls with order
3/2 (docs/subspace-saddle.md).

The certificate is that of the better of two λ: the model's, and the one that proves most at this x,
argmax_{l∈Λ} ⟨L, l⟩ − ψ(l) − ½ Σ_j (Cl)_j²/D_j (`minimax.py` has D).

No secure sums are possible. Up go d(d + 1)/2 numbers of every client a round: for d up to a few
hundred.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import (
    CONVEX,
    CURVATURE,
    EXACT,
    GRADIENTS,
    HESSIANS,
    SLOPES,
    VECTORS,
    RunState,
)
from scaffpd.algorithms.minimax import (
    AnsweredState,
    MinimaxMethod,
    asked_again,
    nearest,
    shrinkage,
)
from scaffpd.algorithms.saddle import Saddle, solve_quadratics, solve_saddle
from scaffpd.errors import InputError
from scaffpd.federation import Federation, Vector
from scaffpd.objectives.base import LARGEST
from scaffpd.objectives.rounding import EPSILON

# shares of a promise: from the first on a step is taken, from the second on the damping falls
TAKEN = 0.1
GOOD = 0.75
NOTHING = 0.01  # damping that changes the model by less than this share of its promise is left out
# accuracy of the saddle point, as a share of what it promises
FINE = 1e-9
ROUGH = 1e-2
SLACK = 64  # rounding in the acceptance test, in units of the number format
DIGITS = 16  # rounding in the server's problem, in the same
CERTIFIED = 0.1  # accuracy of the certificate's λ, as a share of what the model's λ proves
PROVEN = 2.0  # times its floor: a certificate that another λ cannot improve


@dataclass(frozen=True, kw_only=True)
class MinimaxNewtonState(AnsweredState):
    """A state of the method; `weights` are those of the certificate.

    Attributes:
        model_weights: the λ of the last model.
        gradients: the c_i at x, (N, d).
        damping: δ.
        promise: what the last model promised.
        lowest: the lowest certificate of earlier points.
        hessians: the H_i, (N, d, d), where they have been asked for at x, or are constant.
    """

    model_weights: Vector
    gradients: Tensor
    damping: float = 0.0
    promise: float = np.inf
    lowest: float = np.inf
    hessians: Tensor | None = field(default=None, repr=False, metadata={"transient": True})


@dataclass(frozen=True)
class MinimaxNewton(MinimaxMethod[MinimaxNewtonState]):
    """The minimax Newton method, without anything to tune.

    The server sees every client's gradient and Hessian.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
    """

    published: ClassVar[str] = "Minimax Newton"
    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS, CURVATURE})
    needs: ClassVar[frozenset[str]] = frozenset({CONVEX, EXACT, SLOPES, VECTORS, HESSIANS})

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> MinimaxNewtonState:
        """Ask the clients at x⁰."""
        x, constants, at = self._open(federation, x0)
        if not constants.convex:
            raise InputError(
                "not-convex",
                "MinimaxNewton needs losses that are known to be convex: use ScaffPD for networks.",
            )
        weights = self.objective.start(at.losses)
        state = MinimaxNewtonState(
            x=x,
            weights=weights,
            model_weights=weights,
            losses=at.losses,
            gradients=at.each().double(),
            seed=seed,
            constants=constants,
            at=at,
        )
        return self._certified_for(weights, state) if x0 is None else self._proven(state)

    def resume(self, federation: Federation, state: MinimaxNewtonState) -> MinimaxNewtonState:
        """Ask the clients again for what is not on disk: answers at x, and Hessians if given."""
        state = asked_again(federation, state)
        given = not state.accepted or (state.constants.quadratic and state.rounds > 0)
        return replace(state, hessians=state.at.hessians()) if given else state

    def follow(
        self, federation: Federation, before: RunState, seed: int = 0
    ) -> MinimaxNewtonState | None:
        """Begin at the x and λ of a run for another objective, with its Hessians if constant."""
        if type(before) is not MinimaxNewtonState or before.at.federation is not federation:
            return None
        state = self.init(federation, seed, before.x)
        hessians = before.hessians if state.constants.quadratic else None
        weights = nearest(self.objective, before.weights, state.losses)
        return self._proven(replace(state, model_weights=weights, hessians=hessians))

    def round(self, federation: Federation, state: MinimaxNewtonState) -> MinimaxNewtonState:
        """Solve the model, ask the clients about its saddle point, and judge it."""
        H = state.at.hessians() if state.hessians is None else state.hessians
        found = self._solved(state, H)
        x = state.x + torch.from_numpy(found.z).to(state.x)
        at = federation.gradients(x)
        # On the simplex a common shift of all losses changes nothing but the rounding.
        level = 0.0
        if self.objective.simplex:
            level = float(found.weights @ state.losses / found.weights.sum())
        before = self.objective._support(state.losses - level)
        promised = max(before - (found.value - level), 0.0)
        # With δ = `unit`, the damping ½δ Σ λ_i ℓ_i ‖p‖² takes back half of the promise.
        bend = float(found.weights @ state.constants.smoothness * (found.z @ found.z))
        unit = promised / max(bend, 1e-300)
        asked = replace(
            state,
            rounds=state.rounds + 1,
            accepted=False,
            hessians=H,
            model_weights=found.weights,
            promise=promised,
            damping=max(4 * state.damping, unit),
        )
        if not np.all(np.abs(at.losses) < LARGEST / 4):
            return asked
        gained = before - self.objective._support(at.losses - level)
        taken = self._proven(
            replace(
                asked,
                x=x,
                losses=at.losses,
                gradients=at.each().double(),
                at=at,
                accepted=True,
                hessians=H if state.constants.quadratic else None,
            )
        )
        size = float(found.weights.sum() * np.abs(state.losses).max())
        slack = SLACK * torch.finfo(x.dtype).eps * size
        lowest = min(state.lowest, state.certificate)
        if gained < TAKEN * promised - slack and not taken.certificate < 0.5 * lowest:
            return asked
        damping = state.damping
        if gained >= GOOD * promised:
            damping = damping / 4 if damping > NOTHING * unit else 0.0
        return replace(taken, damping=damping, lowest=lowest)

    def _solved(self, state: MinimaxNewtonState, H: Tensor) -> Saddle:
        """Solve for the model's saddle point: roughly at first, exactly for squared losses."""
        size = float(state.model_weights.sum() * np.abs(state.losses).max())
        share = 0.0
        if not state.constants.quadratic:
            share = float(np.clip(state.promise / max(size, 1e-300), FINE, ROUGH))
        if state.damping > 0:
            added = torch.from_numpy(state.damping * state.constants.smoothness).to(H)
            H = H + added[:, None, None] * torch.eye(H.shape[1]).to(H)
        # In units of its own curvature every coordinate keeps its digits.
        weights = torch.from_numpy(state.model_weights).to(H)
        bends = weights @ H.diagonal(dim1=1, dim2=2)
        unit = torch.where(bends > 0, bends, 1).rsqrt()
        C = (unit * state.gradients).cpu().numpy().T
        scaled = (unit[:, None] * H * unit).cpu().numpy()
        least = DIGITS * EPSILON * size
        found = solve_quadratics(
            self.objective, state.losses, C, scaled, state.model_weights, share, least
        )
        return replace(found, z=unit.cpu().numpy() * found.z)

    def _proven(self, state: MinimaxNewtonState) -> MinimaxNewtonState:
        """Return the state with the better certificate of the two λ, unless one is rounding."""
        own = self._certified_for(state.model_weights, state)
        if not np.isfinite(own.certificate) or own.certificate <= PROVEN * own.floor:
            return own
        modulus = float(own.weights @ state.constants.strong_convexity)
        short = shrinkage(state.constants, own.weights).factors
        E = (torch.as_tensor(short).to(state.gradients) * state.gradients).mT / modulus**0.5
        if len(E) > E.shape[1]:  # only EᵀE matters: R of E = QR has fewer rows
            E = torch.linalg.qr(E, mode="r")[1]
        tol = CERTIFIED * own.certificate
        other = solve_saddle(self.objective, state.losses, E.cpu().numpy(), own.weights, tol)
        second = self._certified_for(other.weights, state)
        return second if second.certificate < own.certificate else own

    def _certified_for(self, weights: Vector, state: MinimaxNewtonState) -> MinimaxNewtonState:
        c = torch.from_numpy(weights).to(state.gradients) @ state.gradients
        return self._certified(replace(state, weights=weights), state.at, c)
