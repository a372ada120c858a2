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

from scaffpd.algorithms.base import CONVEX, EXACT, MATRICES, SLOPES, VECTORS, Algorithm
from scaffpd.algorithms.minimax_newton import MinimaxNewton
from scaffpd.algorithms.scaff_pd import ScaffPD
from scaffpd.algorithms.steps import Auto, Fixed
from scaffpd.algorithms.subspace_saddle import SubspaceSaddle
from scaffpd.federation import Constants, Federation
from scaffpd.federation.plans import ReleaseCounts
from scaffpd.objectives.base import Objective

# numbers in a Hessian or in all gradients (256 MB); multiplications for a Hessian, or to solve
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

    questions = SubspaceSaddle.questions | ScaffPD.questions
    asks_losses = True
    proves = True

    objective: Objective
    local_steps: int | None = None
    batch_size: int | None = None

    def asks(self, convex: bool = True) -> frozenset[str]:
        """Return what Scaff-PD asks, which is the choice across organisations."""
        return ScaffPD(self.objective, self.local_steps or STEPS, self.batch_size).asks(convex)

    def measures(self, convex: bool = True) -> bool:
        return ScaffPD(self.objective, self.local_steps or STEPS, self.batch_size).measures(convex)

    def choice(self, federation: Federation) -> Algorithm:
        return self._chosen(federation)[0]

    def reason(self, federation: Federation) -> str:
        return f"Solved by {self._chosen(federation)[1]}."

    def _chosen(self, federation: Federation) -> tuple[Algorithm, str]:
        known = federation.constants()
        offered = self._offered(federation, known)
        # fewest rounds first: Newton sees every client's gradient, the saddle method sums of them,
        # Scaff-PD needs nothing but local steps
        if MinimaxNewton.needs <= offered:
            why = "the losses are convex, gradients are full, and a Hessian is affordable"
            return MinimaxNewton(self.objective), f"the minimax Newton method: {why}"
        if SubspaceSaddle.needs <= offered:
            why = "the losses are convex and gradients are full"
            return SubspaceSaddle(self.objective), f"the subspace saddle method: {why}"
        why = "clients answer no questions about curvature"
        if known.noisy:
            why = "losses and gradients carry noise, for privacy"
        elif CONVEX not in offered:
            why = "the losses are not known to be convex"
        elif EXACT not in offered:
            why = "local gradients are of minibatches"
        return self._scaff_pd(known), f"Scaff-PD: {why}"

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count those of Scaff-PD, which is the choice where there is noise."""
        return ScaffPD(self.objective, self.local_steps or STEPS, self.batch_size).releases(rounds)

    def _offered(self, federation: Federation, known: Constants) -> frozenset[str]:
        """Return which needs of methods this federation meets.

        Across organisations single vectors are not offered, masked or not: a silo that takes part
        in `Fair` has agreed to sums, and `MinimaxNewton` has to be asked for by its name.
        """
        d = federation.dimension
        # a Hessian or all gradients, whichever is larger; d products with the data, or d³ to solve
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
            # whether a step was too long shows in losses, which are noisy: take none that may be
            eta = 1 / float(known.expected_smoothness(self.batch_size).max())
            rates = Fixed(number * eta, 1 / len(known.smoothness), theta=0.0, local_rate=eta)
            return ScaffPD(self.objective, number, self.batch_size, steps=rates)
        batch = self.batch_size
        if not known.convex:
            # a network learns from a few rows nearly what all of them say: many short steps
            batch = BATCH if batch is None else batch
            number = self.local_steps or math.ceil(float(known.samples.mean()) / batch)
        return ScaffPD(self.objective, number, batch, steps=Auto())


def fair(
    objective: Objective, local_steps: int | None = None, batch_size: int | None = None
) -> Fair:
    """Return the best method for the problem at hand; see `Fair`."""
    return Fair(objective, local_steps, batch_size)
