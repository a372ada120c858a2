r"""`fair`: the method for the problem at hand, and another one where that stalls.

| the problem | the method |
|---|---|
| convex losses, full gradients, clients in one process, unmasked, d ≤ 300 and N d² ≤ 10⁷ | minimax Newton |
| convex losses, full gradients, otherwise (so across organisations) | subspace saddle: sums and scalars only |
| clients that hide their losses | minimax from sums |
| minibatches, clients that hide their curvature | Scaff-PD with `Auto` steps |
| networks | the same, an epoch of minibatches a round: `Auto` takes the steps of `Nonconvex` there |
| answers that carry noise, by which no step can be judged | Scaff-PD with η_ℓ = 1/L, τ = J η_ℓ, σ = 1/N, θ = 0 |

Where the subspace saddle method's certificate has not fallen to a tenth in 15 rounds, and clients are in one process
and unmasked, the quasi-Newton minimax method goes on from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from scaffpd.algorithms.minimax import MinimaxMethod
from scaffpd.algorithms.minimax_newton import MinimaxNewton, MinimaxNewtonState
from scaffpd.algorithms.minimax_sums import MinimaxSums, MinimaxSumsState
from scaffpd.algorithms.quasi_newton_minimax import QuasiNewtonMinimax, QuasiNewtonMinimaxState
from scaffpd.algorithms.scaff_pd import ScaffPD
from scaffpd.algorithms.steps import Auto, Fixed
from scaffpd.algorithms.subspace_saddle import SubspaceSaddle, SubspaceSaddleState
from scaffpd.errors import InputError
from scaffpd.federation import Constants, Federation, Vector
from scaffpd.objectives.base import Objective
from scaffpd.privacy.accountant import ReleaseCounts

# d, and the numbers N d² of all Hessians, up to which they go up
WIDEST = 300
LARGEST = 10**7
# rounds in which a certificate should fall to this share
PATIENCE = 15
PROGRESS = 0.1
# local steps of a round; samples of a minibatch for networks
STEPS = 100
BATCH = 32
HIDDEN_STEPS = 20  # local steps where losses are hidden
MEMORY = 2 * 10**8  # numbers that the quasi-Newton method may keep
Method = MinimaxNewton | SubspaceSaddle | QuasiNewtonMinimax | ScaffPD | MinimaxSums
REASONS: dict[type[Method], str] = {
    MinimaxNewton: "minimax Newton method: the losses are convex, gradients are full, and d is small",
    SubspaceSaddle: "subspace saddle method: the losses are convex and gradients are full",
    QuasiNewtonMinimax: "subspace saddle method, and from round {began} on by the quasi-Newton minimax method: the "
    f"certificate had not fallen to a tenth in {PATIENCE} rounds",
    MinimaxSums: "minimax method from sums: losses are hidden",
}


@dataclass(frozen=True)
class Fair(MinimaxMethod):
    """The best method that this package has for a problem, chosen when it is seen.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        local_steps: J, where the choice is Scaff-PD; left out, 100, and for networks as many as a client of mean size
            needs for an epoch.
        batch_size: samples per local gradient; left out, all of them, and 32 for networks.
    """

    questions: ClassVar[frozenset[str]] = (
        SubspaceSaddle.questions | ScaffPD.questions | MinimaxSums.questions
    )
    asks_losses: ClassVar[bool] = True

    local_steps: int | None = None
    batch_size: int | None = None

    def choice(self, federation: Federation) -> Method:
        """Return the method for this federation."""
        known = federation.constants()
        if federation.sums.hides_losses:
            return self._sums()
        if self.batch_size is not None or not known.convex or known.noisy or known.first_order:
            return self._scaff_pd(known)
        n = len(federation.names)
        d = federation.dimension
        newton = _open(federation) and d <= WIDEST and n * d**2 <= LARGEST
        return MinimaxNewton(self.objective) if newton else SubspaceSaddle(self.objective)

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> Any:
        """Return the state of the chosen method, which asks for the constants itself: they are counted once."""
        return self._quietly(federation).init(federation, seed, x0)

    def follow(self, federation: Federation, before: Any, seed: int = 0) -> Any:
        """Do as the chosen method does; return `None` where it takes nothing but x from an earlier run."""
        return self._quietly(federation).follow(federation, before, seed)

    def like(self, federation: Federation, state: Any, kind: str) -> Any:
        """Return a state of the quasi-Newton method where that has been saved."""
        later = kind == QuasiNewtonMinimaxState.__name__ != type(state).__name__
        return QuasiNewtonMinimax(self.objective).take_over(state) if later else state

    def resume(self, federation: Federation, state: Any) -> Any:
        """Do as the method of this state does."""
        return self._method(state).resume(federation, state)

    def round(self, federation: Federation, state: Any) -> Any:
        """Do as the method of this state does, or let the quasi-Newton method go on in its place."""
        state = self._method(state).round(federation, state)
        if not isinstance(state, SubspaceSaddleState) or not np.isfinite(state.certificate):
            return state
        if state.certificate < PROGRESS * state.mark:
            return replace(state, mark=state.certificate, marked=state.rounds)
        other = QuasiNewtonMinimax(self.objective)
        fits = (other.pairs + 1) * len(state.weights) * len(state.x) <= MEMORY
        stalled = state.rounds - state.marked >= PATIENCE
        return other.take_over(state) if stalled and fits and _open(federation) else state

    def uncertified(self, state: Any) -> str | None:
        """Do as the method of this state does."""
        return self._method(state).uncertified(state)

    def stalled(self, state: Any) -> bool:
        """Do as the method of this state does."""
        return self._method(state).stalled(state)

    def advise(self, state: Any, certificates: Vector) -> str:
        """Do as Scaff-PD does on networks."""
        return self._method(state).advise(state, certificates) if self.stalled(state) else ""

    def releases(self, rounds: int) -> ReleaseCounts:
        """Count those of Scaff-PD, which is the choice where there is noise."""
        return ScaffPD(self.objective, self.local_steps or STEPS, self.batch_size).releases(rounds)

    def explain(self, state: Any) -> str:
        """Say which method it is, and why."""
        method = self._method(state)
        if isinstance(method, ScaffPD):
            return (
                f"Solved by Scaff-PD: {self._why(state.constants)} {method.explain(state)}".strip()
            )
        return f"Solved by the {REASONS[type(method)].format(began=getattr(state, 'began', 0))}."

    def _why(self, known: Constants) -> str:
        """Say why it is Scaff-PD."""
        if known.noisy:
            return "losses and gradients carry noise, for privacy."
        if not known.convex:
            return "the losses are not known to be convex."
        if self.batch_size is not None:
            return "local gradients are of minibatches."
        return "clients answer no questions about curvature."

    def _quietly(self, federation: Federation) -> Method:
        """Choose without counting the exchange in which the constants come."""
        before = federation.traffic.snapshot()
        method = self.choice(federation)
        federation.traffic.restore(before)
        return method

    def _method(self, state: Any) -> Method:
        """Return the method that a state belongs to."""
        if isinstance(state, MinimaxSumsState):
            return self._sums()
        for kind, method in (
            (MinimaxNewtonState, MinimaxNewton),
            (SubspaceSaddleState, SubspaceSaddle),
            (QuasiNewtonMinimaxState, QuasiNewtonMinimax),
        ):
            if isinstance(state, kind):
                return method(self.objective)
        return self._scaff_pd(state.constants)

    def _sums(self) -> MinimaxSums:
        if self.batch_size is not None:
            raise InputError(
                "losses-hidden-those",
                "Losses that are hidden are those of all rows: leave batch_size out.",
            )
        return MinimaxSums(self.objective, min(self.local_steps or HIDDEN_STEPS, HIDDEN_STEPS))

    def _scaff_pd(self, known: Constants) -> ScaffPD:
        steps = self._steady(known) if known.noisy else Auto()
        number = self.local_steps or STEPS
        batch = self.batch_size
        if not known.convex and not known.noisy:
            batch = BATCH if batch is None else batch
            number = self.local_steps or math.ceil(float(known.samples.mean()) / batch)
        return ScaffPD(self.objective, local_steps=number, batch_size=batch, steps=steps)

    def _steady(self, known: Constants) -> Fixed:
        """Return rates that look at no answer."""
        eta = 1 / float(known.expected_smoothness(self.batch_size).max())
        return Fixed(
            tau=(self.local_steps or STEPS) * eta,
            sigma=1 / len(known.smoothness),
            theta=0.0,
            local_rate=eta,
        )


def _open(federation: Federation) -> bool:
    """Return whether the server may look at single vectors: no mask hides them, and clients are in this process.

    A silo that takes part in `Fair` has agreed to sums of vectors; `MinimaxNewton` has to be asked for by its name.
    """
    here: bool = federation.channel.here
    return here and not federation.sums.hides_vectors


def fair(
    objective: Objective, local_steps: int | None = None, batch_size: int | None = None
) -> Fair:
    """Return the best method for the problem at hand; see `Fair`."""
    return Fair(objective, local_steps, batch_size)
