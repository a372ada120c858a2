r"""`fair`: the method for the problem at hand.

It is the first of these whose declared `needs` the federation meets:

    minimax Newton       convex losses, full gradients, clients in one process, unmasked, and a
                         Hessian is affordable: d² and N d ≤ 2²⁵ numbers, and d passes over the
                         data and d³ ≤ 10¹² multiplications
    subspace saddle      convex losses, full gradients: sums and scalars only, so for silos
    Scaff-PD             minibatches, or clients that hide their curvature: with `Auto` steps;
                         networks: the same, an epoch of minibatches a round;
                         answers with noise, by which no step can be judged: with η_ℓ = 1/L,
                         τ = J η_ℓ, σ = 1/N, θ = 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from scaffpd.algorithms.base import (
    CONVEX,
    EXACT,
    MATRICES,
    SLOPES,
    VECTORS,
    Algorithm,
)
from scaffpd.algorithms.minimax_newton import MinimaxNewton
from scaffpd.algorithms.scaff_pd import ScaffPD
from scaffpd.algorithms.steps import Auto, Fixed
from scaffpd.algorithms.subspace_saddle import SubspaceSaddle
from scaffpd.federation import Constants, Federation
from scaffpd.federation.plans import ReleaseCounts
from scaffpd.objectives.base import Objective

# numbers in a Hessian or in all gradients; multiplications for a Hessian, or to decompose it
NUMBERS = 2**25
AFFORDABLE = 10**12
STEPS = 100  # local steps of a round
BATCH = 32  # samples of a minibatch for networks


@dataclass(frozen=True)
class Fair(Algorithm):
    """The best method that this package has for a problem, chosen when it is seen.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        local_steps: J, where the choice is Scaff-PD; left out, 100, and for networks as many as a
            client of mean size needs for an epoch.
        batch_size: samples per local gradient; left out, all of them, and 32 for networks.
    """

    questions: ClassVar[frozenset[str]] = SubspaceSaddle.questions | ScaffPD.questions
    asks_losses: ClassVar[bool] = True
    proves: ClassVar[bool] = True

    objective: Objective
    local_steps: int | None = None
    batch_size: int | None = None

    def asks(self, convex: bool = True) -> frozenset[str]:
        """Return what Scaff-PD asks, which is the choice across organisations."""
        return ScaffPD(self.objective, self.local_steps or STEPS, self.batch_size).asks(convex)

    def measures(self, convex: bool = True) -> bool:
        """Return whether Scaff-PD does, which is the choice across organisations."""
        return ScaffPD(self.objective, self.local_steps or STEPS, self.batch_size).measures(convex)

    def choice(self, federation: Federation) -> Algorithm:
        """Return the method for this federation."""
        known = federation.constants()
        offered = self._offered(federation, known)
        for method in (MinimaxNewton, SubspaceSaddle):
            if method.needs <= offered:
                return method(self.objective)
        return self._scaff_pd(known)

    def reason(self, federation: Federation) -> str:
        """Say which method it is, and why."""
        known = federation.constants()
        offered = self._offered(federation, known)
        if MinimaxNewton.needs <= offered:
            named = "the minimax Newton method"
            why = "the losses are convex, gradients are full, and a Hessian is affordable"
        elif SubspaceSaddle.needs <= offered:
            named = "the subspace saddle method"
            why = "the losses are convex and gradients are full"
        else:
            named = "Scaff-PD"
            why = "clients answer no questions about curvature"
            if known.noisy:
                why = "losses and gradients carry noise, for privacy"
            elif CONVEX not in offered:
                why = "the losses are not known to be convex"
            elif EXACT not in offered:
                why = "local gradients are of minibatches"
        return f"Solved by {named}: {why}."

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count those of Scaff-PD, which is the choice where there is noise."""
        return ScaffPD(self.objective, self.local_steps or STEPS, self.batch_size).releases(rounds)

    def _offered(self, federation: Federation, known: Constants) -> frozenset[str]:
        """Return which needs of methods this federation meets.

        Across organisations single vectors are not offered, masked or not: a silo that takes part
        in `Fair` has agreed to sums, and `MinimaxNewton` has to be asked for by its name.
        """
        d = federation.dimension
        numbers = d * max(d, len(federation.names))
        work = d * max(federation.channel.work, d**2)
        facts = {
            CONVEX: known.convex,
            EXACT: not known.noisy and self.batch_size is None,
            SLOPES: not known.first_order,
            VECTORS: federation.channel.here and not federation.sums.hides_vectors,
            MATRICES: numbers <= NUMBERS and work <= AFFORDABLE,
        }
        return frozenset(need for need, met in facts.items() if met)

    def _scaff_pd(self, known: Constants) -> ScaffPD:
        number = self.local_steps or STEPS
        if known.noisy:
            eta = 1 / float(known.expected_smoothness(self.batch_size).max())
            rates = Fixed(number * eta, 1 / len(known.smoothness), theta=0.0, local_rate=eta)
            return ScaffPD(self.objective, number, self.batch_size, steps=rates)
        batch = self.batch_size
        if not known.convex:
            batch = BATCH if batch is None else batch
            number = self.local_steps or math.ceil(float(known.samples.mean()) / batch)
        return ScaffPD(self.objective, number, batch, steps=Auto())


def fair(
    objective: Objective, local_steps: int | None = None, batch_size: int | None = None
) -> Fair:
    """Return the best method for the problem at hand; see `Fair`."""
    return Fair(objective, local_steps, batch_size)
