r"""`fair`: the method for the problem at hand.

Convex losses and full gradients go to the subspace saddle method, which needs the fewest rounds and no step size;
minibatches and networks, for which it has no proof, and clients that hide their curvature, go to Scaff-PD. Where
answers carry noise, no step can be judged by them, and the rates are public numbers:

    η_ℓ = 1/L,    τ = J η_ℓ,    σ = 1/N,    θ = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from scaffpd.algorithms.base import MinimaxMethod
from scaffpd.algorithms.scaff_pd import ScaffPD
from scaffpd.algorithms.subspace_saddle import SubspaceSaddle
from scaffpd.federation import Constants, Federation
from scaffpd.objectives.base import Objective
from scaffpd.privacy.accountant import ReleaseCounts
from scaffpd.steps import Auto, Fixed


@dataclass(frozen=True)
class Fair(MinimaxMethod):
    """The best method that this package has for a problem, chosen when it is seen.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        local_steps: J, where the choice is Scaff-PD.
        batch_size: samples per local gradient; `None` uses all of them.
    """

    questions: ClassVar[frozenset[str]] = SubspaceSaddle.questions | ScaffPD.questions
    asks_losses: ClassVar[bool] = True

    local_steps: int = 100
    batch_size: int | None = None

    def choice(self, federation: Federation) -> SubspaceSaddle | ScaffPD:
        """The method for this federation."""
        return self._method(federation.constants())

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> Any:
        """The state of the chosen method, which asks for the constants itself: they are counted once."""
        before = federation.traffic.snapshot()
        method = self.choice(federation)
        federation.traffic.restore(before)
        return method.init(federation, seed, x0)

    def follow(self, federation: Federation, before: Any, seed: int = 0) -> Any:
        """As the chosen method does; `None` where it takes nothing but x from an earlier run."""
        traffic = federation.traffic.snapshot()
        method = self.choice(federation)
        federation.traffic.restore(traffic)
        return method.follow(federation, before, seed) if isinstance(method, SubspaceSaddle) else None

    def resume(self, federation: Federation, state: Any) -> Any:
        """As the chosen method does."""
        return self._method(state.constants).resume(federation, state)

    def round(self, federation: Federation, state: Any) -> Any:
        """As the chosen method does."""
        return self._method(state.constants).round(federation, state)

    def uncertified(self, state: Any) -> str | None:
        """As the chosen method does."""
        return self._method(state.constants).uncertified(state)

    def releases(self, rounds: int) -> ReleaseCounts:
        """As Scaff-PD does, which is the choice where there is noise."""
        return ScaffPD(self.objective, self.local_steps, self.batch_size).releases(rounds)

    def explain(self, state: Any) -> str:
        """Which method it is, and why."""
        if state.constants.noisy:
            return "Solved by Scaff-PD: losses and gradients carry noise, for privacy."
        if not state.constants.convex:
            return "Solved by Scaff-PD: the losses are not known to be convex."
        if self.batch_size is not None:
            return "Solved by Scaff-PD: local gradients are of minibatches."
        if state.constants.first_order:
            return "Solved by Scaff-PD: clients answer no questions about curvature."
        return "Solved by the subspace saddle method: the losses are convex and gradients are full."

    def _method(self, known: Constants) -> SubspaceSaddle | ScaffPD:
        if self.batch_size is None and known.convex and not (known.noisy or known.first_order):
            return SubspaceSaddle(self.objective)
        steps = self._steady(known) if known.noisy else Auto()
        return ScaffPD(self.objective, local_steps=self.local_steps, batch_size=self.batch_size, steps=steps)

    def _steady(self, known: Constants) -> Fixed:
        """Rates that look at no answer."""
        eta = 1 / float(known.expected_smoothness(self.batch_size).max())
        return Fixed(tau=self.local_steps * eta, sigma=1 / len(known.smoothness), theta=0.0, local_rate=eta)


def fair(objective: Objective, local_steps: int = 100, batch_size: int | None = None) -> Fair:
    """The best method for the problem at hand; see `Fair`."""
    return Fair(objective, local_steps, batch_size)
