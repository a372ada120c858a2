r"""Extragradient: look one step ahead, then step from where you were with what you saw there.

G. M. Korpelevich, "The extragradient method for finding saddle points and other problems", 1976.

    x̄ = x^r − τ Σ λ_i^r ∇f_i(x^r),              λ̄ = prox_σ(L(x^r), λ^r)
    x^{r+1} = x^r − τ Σ λ̄_i ∇f_i(x̄),            λ^{r+1} = prox_σ(L(x̄), λ^r)

It converges where descent-ascent circles, for two exchanges a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scaffpd.algorithms.base import dual_step
from scaffpd.algorithms.central import CentralMethod, CentralState, descent
from scaffpd.federation import Federation
from scaffpd.privacy.accountant import ReleaseCounts


@dataclass(frozen=True)
class Extragradient(CentralMethod):
    """The extragradient method; see `CentralMethod` for the arguments."""

    published: ClassVar[str] = "Extragradient"

    def releases(self, rounds: int) -> ReleaseCounts:
        """Two points a round."""
        return ReleaseCounts.points(2 * rounds + 1)

    def round(self, federation: Federation, state: CentralState) -> CentralState:
        """A trial step, and the step."""
        ahead = federation.gradients(state.x - state.server_rate * descent(state.at, state.weights))
        middle = dual_step(self.objective, state.losses, state.weights, state.dual_rate)
        x = state.x - state.server_rate * descent(ahead, middle)
        weights = dual_step(self.objective, ahead.losses, state.weights, state.dual_rate)
        return self._moved(federation, state, x, weights)
