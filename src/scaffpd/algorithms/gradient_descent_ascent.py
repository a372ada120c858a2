r"""Gradient descent-ascent: the simplest method for a saddle point, with every client's full gradient.

K. J. Arrow, L. Hurwicz, H. Uzawa, "Studies in Linear and Non-Linear Programming", 1958; as the proximal form
A. Nemirovski, "Prox-method with rate of convergence O(1/t)", 2004, calls its single step.

    x^{r+1} = x^r − τ Σ λ_i^r ∇f_i(x^r)
    λ^{r+1} = argmin_{λ∈Λ} ψ(λ) − ⟨L(x^r), λ⟩ + ‖λ − λ^r‖²/(2σ)

Both players move at once; without strong concavity the last iterate may circle. One exchange a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scaffpd.algorithms.base import dual_step
from scaffpd.algorithms.central import CentralMethod, CentralState, descent
from scaffpd.federation import Federation


@dataclass(frozen=True)
class GradientDescentAscent(CentralMethod):
    """Simultaneous gradient descent-ascent; see `CentralMethod` for the arguments."""

    published: ClassVar[str] = "GDA"

    def round(self, federation: Federation, state: CentralState) -> CentralState:
        """One step of both players."""
        x = state.x - state.server_rate * descent(state.at, state.weights)
        weights = dual_step(self.objective, state.losses, state.weights, state.dual_rate)
        return self._moved(federation, state, x, weights)
