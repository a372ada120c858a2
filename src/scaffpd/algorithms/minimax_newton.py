r"""Minimax Newton: the fewest rounds where d is small and the server may see every client's gradient and Hessian.

Round, at x with L_i, c_i and H_i = ∇²f_i(x) of every client, and smoothness constants ℓ_i:

    (p, λ⁺) = the saddle point of  Σ l_i q_i(p) − ψ(l)  over p ∈ R^d, l ∈ Λ,
              q_i(p) = L_i + ⟨c_i, p⟩ + ½pᵀ(H_i + δℓ_i I)p                           on the server, exactly
    x⁺ = x + p, where clients answer L_i, c_i                                       x⁺ down; L_i, c_i up
    x⁺ is taken where F(L) = max_{l∈Λ} ⟨L, l⟩ − ψ(l) falls by a tenth of the model's promise, and H_i comes up;
    else δ grows, and the next round is the same with the same H_i

Squared losses are their own model: one round solves the problem, whatever Λ is, and H_i comes up once. Elsewhere this
is Newton's method, with all weights free to move in every step.

It cannot stall. For δ ≥ 1 every q_i lies above f_i(x + ·), so F falls by the promise and the step is taken. On the
simplex, with ℓ = max ℓ_i and x* the optimum, trying p = t(x* − x) in the model shows that the promise is at least

    max_{0≤t≤1} t (F(x) − F*) − ½ t² (1 + δ) ℓ ‖x − x*‖²  ≥  ½ min(1, μ/(2(1 + δ)ℓ)) (F(x) − F*),

for F is μ-strongly convex: F falls linearly from any start, for any Λ. Few steps are taken because they halve the
lowest certificate so far. In the end, with δ = 0, the certificate falls with order 3/2 (docs/subspace-saddle.md).

No secure sums are possible. Up go d(d + 1)/2 numbers of every client a round: for d up to a few hundred.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.base import CURVATURE, GRADIENTS
from scaffpd.algorithms.minimax import EPSILON, PerClientMethod, PerClientState, nearest
from scaffpd.algorithms.saddle import Saddle, solve_quadratics
from scaffpd.errors import InputError
from scaffpd.federation import Federation, Gradients
from scaffpd.objectives.base import LARGEST

# of a promise: a step is taken; the damping falls
KEPT = 0.1
GOOD = 0.75
NOTHING = 0.01  # damping that changes the model by less than this share of its promise is left out
# accuracy of the saddle point, as a share of what it promises
FINE = 1e-9
ROUGH = 1e-2
SLACK = 64  # rounding in the acceptance test, in units of the number format
DIGITS = 16  # rounding in the server's problem, in the same


@dataclass(frozen=True, kw_only=True)
class MinimaxNewtonState(PerClientState):
    """A state of the method.

    Attributes:
        damping: δ.
        promise: what the last model promised.
        lowest: the lowest certificate of earlier points.
        at: the clients' answers at x; asked for anew when a run is resumed.
        hessians: the H_i, (N, d, d), where they have been asked for at x, or are the same everywhere.
    """

    damping: float = 0.0
    promise: float = np.inf
    lowest: float = np.inf
    at: Gradients = field(repr=False, metadata={"transient": True})
    hessians: Tensor | None = field(default=None, repr=False, metadata={"transient": True})


@dataclass(frozen=True)
class MinimaxNewton(PerClientMethod):
    """The minimax Newton method, without anything to tune; the server sees every client's gradient and Hessian.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
    """

    published: ClassVar[str] = "Minimax Newton"
    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS, CURVATURE})

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> MinimaxNewtonState:
        """Ask the clients at x⁰."""
        x, constants, at = self._open(federation, x0)
        if not constants.convex:
            raise InputError(
                "minimaxnewton-losses-known",
                "MinimaxNewton needs losses that are known to be convex: use ScaffPD for networks.",
            )
        state = MinimaxNewtonState(
            x=x,
            weights=(weights := self.objective.start(at.losses)),
            model_weights=weights,
            losses=at.losses,
            gradients=at.each().double(),
            seed=seed,
            constants=constants,
            at=at,
        )
        return self._certified_for(weights, state, at) if x0 is None else self._proven(state, at)

    def resume(self, federation: Federation, state: MinimaxNewtonState) -> MinimaxNewtonState:
        """Ask the clients again for what is not on disk: their answers at x, and their Hessians if they gave them."""
        state = super().resume(federation, state)
        given = not state.accepted or (state.constants.quadratic and state.rounds > 0)
        return replace(state, hessians=state.at.hessians()) if given else state

    def follow(
        self, federation: Federation, before: object, seed: int = 0
    ) -> MinimaxNewtonState | None:
        """Begin at the x and λ of a run for another objective, with its Hessians where they are the same everywhere."""
        if type(before) is not MinimaxNewtonState or before.at.federation is not federation:
            return None
        state = self.init(federation, seed, before.x)
        state = replace(state, model_weights=nearest(self.objective, before.weights, state.losses))
        return self._proven(
            replace(state, hessians=before.hessians if state.constants.quadratic else None),
            state.at,
        )

    def round(self, federation: Federation, state: MinimaxNewtonState) -> MinimaxNewtonState:
        """Solve the model, ask the clients about its saddle point, and judge it."""
        H = state.at.hessians() if state.hessians is None else state.hessians
        found = self._solved(state, H)
        x = state.x + torch.from_numpy(found.z).to(state.x)
        at = federation.gradients(x)
        level = self._level(found.weights, state.losses)
        before = self.objective._support(state.losses - level)
        promised = max(before - (found.value - level), 0.0)
        unit = promised / max(
            float(found.weights @ state.constants.smoothness * (found.z @ found.z)), 1e-300
        )
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
            ),
            at,
        )
        slack = (
            SLACK
            * torch.finfo(x.dtype).eps
            * float(found.weights.sum() * np.abs(state.losses).max())
        )
        lowest = min(state.lowest, state.certificate)
        if gained < KEPT * promised - slack and not taken.certificate < 0.5 * lowest:
            return asked
        less = state.damping / 4 if state.damping > NOTHING * unit else 0.0
        return replace(
            taken, damping=less if gained >= GOOD * promised else state.damping, lowest=lowest
        )

    def _solved(self, state: MinimaxNewtonState, H: Tensor) -> Saddle:
        """Solve for the saddle point of the model: roughly far from the optimum, exactly for squared losses."""
        size = float(state.model_weights.sum() * np.abs(state.losses).max())
        share = (
            0.0 if state.constants.quadratic else float(np.clip(state.promise / size, FINE, ROUGH))
        )
        if state.damping > 0:
            added = torch.from_numpy(state.damping * state.constants.smoothness).to(H)
            H = H + added[:, None, None] * torch.eye(H.shape[1]).to(H)
        C = state.gradients.cpu().numpy().T
        least = DIGITS * EPSILON * size
        return solve_quadratics(
            self.objective, state.losses, C, H.cpu().numpy(), state.model_weights, share, least
        )
