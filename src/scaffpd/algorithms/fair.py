r"""`fair`: the method for the problem at hand.

Convex losses and full gradients go to the subspace saddle method, which needs the fewest rounds and no step size;
minibatches and networks, for which it has no proof and no second derivatives, go to Scaff-PD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from scaffpd.algorithms.base import check_settings
from scaffpd.algorithms.scaff_pd import ScaffPD
from scaffpd.algorithms.subspace_saddle import SubspaceSaddle, SubspaceSaddleState
from scaffpd.federation import Federation
from scaffpd.objectives.base import Objective

REASONS = {
    SubspaceSaddle: "Solved by the subspace saddle method: the losses are convex and gradients are full.",
    ScaffPD: "Solved by Scaff-PD: the subspace saddle method needs convex losses and full gradients.",
}


@dataclass(frozen=True)
class Fair:
    """The best method that this package has for a problem, chosen when it is seen.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        local_steps: J, where the choice is Scaff-PD.
        batch_size: samples per local gradient; `None` uses all of them.
    """

    knobs: ClassVar[tuple[str, ...]] = ()

    objective: Objective
    local_steps: int = 100
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_settings(self)

    def automatic(self, federation: Federation) -> dict[str, float]:
        """There is nothing to tune."""
        return {}

    def choice(self, federation: Federation) -> SubspaceSaddle | ScaffPD:
        """The method for this federation."""
        return self._method(self.batch_size is None and federation.constants().convex)

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> Any:
        """The state of the chosen method."""
        return self.choice(federation).init(federation, seed, x0)

    def resume(self, federation: Federation, state: Any) -> Any:
        """As the chosen method does."""
        return self._of(state).resume(federation, state)

    def round(self, federation: Federation, state: Any) -> Any:
        """As the chosen method does."""
        return self._of(state).round(federation, state)

    def uncertified(self, state: Any) -> str | None:
        """As the chosen method does."""
        return self._of(state).uncertified(state)

    def explain(self, state: Any) -> str:
        """Which method it is, and why."""
        return REASONS[type(self._of(state))]

    def _of(self, state: Any) -> SubspaceSaddle | ScaffPD:
        return self._method(isinstance(state, SubspaceSaddleState))

    def _method(self, subspace: bool) -> SubspaceSaddle | ScaffPD:
        if subspace:
            return SubspaceSaddle(self.objective)
        return ScaffPD(self.objective, local_steps=self.local_steps, batch_size=self.batch_size)


def fair(objective: Objective, local_steps: int = 100, batch_size: int | None = None) -> Fair:
    """The best method for the problem at hand; see `Fair`."""
    return Fair(objective, local_steps, batch_size)
