r"""Minimax Newton: the fewest rounds, where the server may see every gradient, and d² numbers.

Round, at x with L_i and c_i of every client, and H = Σ λ_i ∇²f_i(x) for the last λ:

    (p, λ⁺) = the saddle point of  Σ l_i (L_i + ⟨c_i, p⟩) + ½pᵀ(H + δD)p − ψ(l)
              over p ∈ R^d, l ∈ Λ, D = diag H                          on the server, exactly
    x⁺ = x + p, where clients answer L_i, c_i                          x⁺ down; L_i, c_i up
    x⁺ is taken where F(L) = max_{l∈Λ} ⟨L, l⟩ − ψ(l) falls by a tenth of the model's promise, and
    H comes up for λ⁺; else δ grows, and the next round is the same with the same H

This is sequential quadratic programming for min t: t ≥ ⟨L(x), l⟩ − ψ(l) (R. B. Wilson, 1963;
J. Nocedal and S. J. Wright, "Numerical Optimization", 2006, ch. 18): H is the Hessian of the
Lagrange function, so steps are Newton's for x and λ together, all weights are free to move in every
step, and how many clients are active does not matter. A change of the scales of columns changes
nothing, D included. Off the simplex H and δD are for Σ l_i = Σ λ_i, and go with Σ λ⁺_i.

**Single Hessians.** Where N d² numbers are no more than those of the rows, or losses are squared,
and there are at most 10⁷, the server sees every H_i, and the model is

    Σ l_i (L_i + ⟨c_i, p⟩ + ½pᵀ(H_i + δD)p) − ψ(l),

which saves a round or two. Squared losses are their own models: H_i comes up once, and one round
solves the problem for any Λ.

From some δ on the model lies above F(x + ·), for D is at least l2: F falls linearly from any start,
for any Λ, and the certificate in the end with order 3/2 (docs/subspace-saddle.md, Theorems 1, 4 and
5). No secure sums are possible: the server sees every c_i. The work of a round is d times a pass
over the rows, for H, and d³/3 for its Cholesky decomposition.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from scaffpd.algorithms.base import (
    CONVEX,
    EXACT,
    GRADIENTS,
    HESSIAN,
    MATRICES,
    SLOPES,
    VECTORS,
    RunState,
)
from scaffpd.algorithms.minimax import (
    SLACK,
    TAKEN,
    AnsweredState,
    MinimaxMethod,
    asked_again,
    nearest,
)
from scaffpd.algorithms.saddle import (
    COARSE,
    TINY,
    factor,
    level_of,
    solve_quadratics,
    solve_saddle,
)
from scaffpd.errors import InputError
from scaffpd.federation import Federation, Vector
from scaffpd.objectives.base import EPSILON, LARGEST, LEAST, Matrix

GOOD = 0.75  # share of a promise from which on the damping falls
NOTHING = 0.01  # damping that changes the model by less than this share of its promise is left out
# accuracy of the saddle point, as a share of its promise, or of the last one times what that was of
# the losses
FINE = 1e-9
ROUGH = 1e-2
ACCURACY = 1e-3
DIGITS = 16  # rounding in the server's problem, in units of the number format
SINGLE = 10**7  # numbers N d² in all Hessians up to which they go up
# trials of Σ λ⁺_i off the simplex, and how close two of them are in the end
MASSES = 5
ALIKE = 0.1


class Step(NamedTuple):
    """Saddle point of a model."""

    p: Vector  # the step
    weights: Vector  # λ⁺
    value: float  # of the model, an upper bound
    bend: float  # pᵀDp, times Σ λ⁺_i


@dataclass(frozen=True, kw_only=True)
class MinimaxNewtonState(AnsweredState):
    """`weights` are λ of the last model, and of the certificate."""

    gradients: Tensor  # the c_i at x, (N, d)
    damping: float = 0.0  # δ
    promise: float = np.inf  # what the last model promised
    lowest: float = np.inf  # the lowest certificate of earlier points
    # H, (d, d), or all H_i, (N, d, d), where they have been asked for at x or are constant
    hessian: Tensor | None = field(default=None, repr=False, metadata={"transient": True})


@dataclass(frozen=True)
class MinimaxNewton(MinimaxMethod[MinimaxNewtonState]):
    """The minimax Newton method, without anything to tune.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
    """

    published = "Minimax Newton"
    questions = frozenset({GRADIENTS, HESSIAN})
    needs = frozenset({CONVEX, EXACT, SLOPES, VECTORS, MATRICES})

    def init(
        self, federation: Federation, seed: int = 0, x0: Tensor | None = None
    ) -> MinimaxNewtonState:
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
            losses=at.losses,
            gradients=at.each().double(),
            seed=seed,
            constants=constants,
            at=at,
        )
        return self._proven(state)

    def resume(self, federation: Federation, state: MinimaxNewtonState) -> MinimaxNewtonState:
        """Ask the clients again for what is not on disk: answers at x, and Hessians if given."""
        state = asked_again(federation, state)
        given = not state.accepted or (self._constant(state) and state.rounds > 0)
        return replace(state, hessian=self._hessian(state)) if given else state

    def follow(
        self, federation: Federation, before: RunState, seed: int = 0
    ) -> MinimaxNewtonState | None:
        """Begin at the x and λ of a run for another objective, with its Hessians if constant."""
        if type(before) is not MinimaxNewtonState or before.at.federation is not federation:
            return None
        state = self.init(federation, seed, before.x)
        hessian = before.hessian if self._constant(state) else None
        weights = nearest(self.objective, before.weights, state.losses)
        return self._proven(replace(state, weights=weights, hessian=hessian))

    def round(self, federation: Federation, state: MinimaxNewtonState) -> MinimaxNewtonState:
        H = self._hessian(state) if state.hessian is None else state.hessian
        step = self._step(state, H)
        x = state.x + torch.from_numpy(step.p).to(state.x)
        at = federation.gradients(x)
        level = level_of(self.objective, step.weights, state.losses)
        before = self.objective._support(state.losses - level)
        promised = max(before - (step.value - level), 0.0)
        # With δ = `unit`, the damping ½δpᵀDp takes back half of the promise.
        unit = promised / max(step.bend, LEAST)
        lowest = min(state.lowest, state.certificate)
        taken = False
        if np.all(np.abs(at.losses) < LARGEST / 4):
            gained = before - self.objective._support(at.losses - level)
            size = float(step.weights.sum() * np.abs(state.losses).max())
            slack = SLACK * torch.finfo(x.dtype).eps * size
            gradients = at.each().double()
            c = mixed(gradients, step.weights)
            proof = self._proof(state.constants, at.losses, step.weights, at, c)
            taken = gained >= TAKEN * promised - slack or proof.gap < 0.5 * lowest
        state = replace(state, rounds=state.rounds + 1, accepted=bool(taken), promise=promised)
        if not taken:
            return replace(state, hessian=H, damping=max(4 * state.damping, unit))
        damping = state.damping
        if gained >= GOOD * promised:
            damping = damping / 4 if damping > NOTHING * unit else 0.0
        return replace(
            state,
            x=x,
            weights=step.weights,
            losses=at.losses,
            gradients=gradients,
            at=at,
            certificate=proof.gap,
            floor=proof.floor,
            lowest=lowest,
            hessian=H if self._constant(state) else None,
            damping=damping,
        )

    def _single(self, state: MinimaxNewtonState) -> bool:
        """Return whether every client's Hessian goes up."""
        N, d = state.gradients.shape
        few = state.constants.quadratic or N * d <= state.constants.samples.sum()
        return few and N * d**2 <= SINGLE

    def _constant(self, state: MinimaxNewtonState) -> bool:
        return state.constants.quadratic and self._single(state)

    def _hessian(self, state: MinimaxNewtonState) -> Tensor:
        single = self._single(state)
        return state.at.hessians() if single else state.at.hessian(state.weights)

    def _step(self, state: MinimaxNewtonState, H: Tensor) -> Step:
        """Solve for the model's saddle point, roughly at first."""
        size = float(state.weights.sum() * np.abs(state.losses).max())
        C = state.gradients.cpu().numpy()
        if H.ndim == 3:
            return self._of_quadratics(state, C, H.cpu().numpy(), size)
        promise = min(state.promise, size)
        share = ACCURACY * min(promise / max(size, LEAST), 1.0)
        tol = max(share * promise, DIGITS * EPSILON * size)
        try:
            unit, root = rooted(H.cpu().numpy(), state.damping)
        except np.linalg.LinAlgError:
            nothing = np.zeros(len(H))
            return Step(nothing, state.weights, self.objective._support(state.losses), 0.0)
        E = lapack.dtrtrs(root, (unit * C).T, lower=1)[0]
        Q = None
        if len(E) > E.shape[1]:  # p lies in the span of N vectors
            Q, E = np.linalg.qr(E)
        total = mass = float(state.weights.sum())
        for _ in range(1 if self.objective.simplex else MASSES):
            scale = (total / mass) ** 0.5
            found = solve_saddle(self.objective, state.losses, scale * E, state.weights, tol)
            last, mass = mass, float(found.weights.sum())
            if abs(mass - last) <= ALIKE * mass:
                break
        z = scale * (found.z if Q is None else Q @ found.z)
        p = lapack.dtrtrs(root, z, lower=1, trans=1)[0]
        return Step(unit * p, found.weights, found.value, float(p @ p) / scale**2)

    def _of_quadratics(self, state: MinimaxNewtonState, C: Matrix, H: Matrix, size: float) -> Step:
        """Solve for the saddle point with single Hessians: exactly for squared losses."""
        least = DIGITS * EPSILON * size
        share = 0.0
        if not state.constants.quadratic:
            share = float(np.clip(state.promise / max(size, LEAST), FINE, ROUGH))
        bends = state.weights @ H.diagonal(axis1=1, axis2=2)
        unit = 1 / np.sqrt(np.where(bends > 0, bends, 1))
        scaled = unit[:, None] * H * unit
        if state.damping > 0:
            scaled = scaled + state.damping * np.eye(len(unit))
        found = solve_quadratics(
            self.objective, state.losses, (unit * C).T, scaled, state.weights, share, least
        )
        bend = float(found.weights.sum() * (found.z @ found.z))
        return Step(unit * found.z, found.weights, found.value, bend)

    def _proven(self, state: MinimaxNewtonState) -> MinimaxNewtonState:
        return self._certified(state, state.at, mixed(state.gradients, state.weights))


def mixed(gradients: Tensor, weights: Vector) -> Tensor:
    return torch.from_numpy(weights).to(gradients) @ gradients


def rooted(H: Matrix, damping: float) -> tuple[Vector, Matrix]:
    """Return s and the lower factor of s ∘ (H + δ diag H) ∘ s, which has a diagonal of 1 + δ.

    A ridge grows from rounding until there is a factor.
    """
    bends = H.diagonal()
    unit = 1 / np.sqrt(np.where(bends > 0, bends, 1))
    scaled = unit[:, None] * H
    scaled *= unit
    ridge = TINY
    while True:
        scaled.flat[:: len(H) + 1] = 1 + damping + ridge
        try:
            return unit, factor(scaled.T)
        except np.linalg.LinAlgError:
            if ridge >= COARSE:
                raise
            ridge *= 100
