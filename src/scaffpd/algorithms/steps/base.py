r"""Interface of step rules: set {τ_r, σ_r, θ_r, η_ℓ} before a round, and see its outcome after it.

One round of Scaff-PD, in the form that all rules share (S = Σ λ_i, which is 1 on the simplex):

    λ⁺ = prox_σ(L + θ (L − L_prev), λ),   c = Σ λ⁺_i c_i,   d = Σ (λ⁺_i/S) d_i,   x⁺ = x − step · d,

where d_i = x − u_{i,J} = η_i J Δu_i. With one η_ℓ for all clients, step = τ S/(η_ℓ J) gives the
paper's x⁺ = x − τ Σ λ⁺_i Δu_i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from scaffpd.errors import InputError, positive, real
from scaffpd.federation import Constants, Vector
from scaffpd.objectives.base import LARGEST, Objective


@dataclass(frozen=True)
class StepProblem:
    """Data of the problem before the first round.

    Attributes:
        objective: (Λ, ψ).
        constants: L_i and μ_i.
        local_steps: J.
        stochastic: whether local steps use minibatches.
        losses: L(x⁰).
        gradient_norms: ‖c_i(x⁰)‖² per client; asking costs N scalars.
    """

    objective: Objective
    constants: Constants
    local_steps: int
    stochastic: bool
    losses: Vector
    gradient_norms: Callable[[], Vector]


@dataclass(frozen=True)
class Rates:
    """Numbers of one round.

    Attributes:
        sigma: σ of the dual step; 0 keeps λ as it is.
        theta: θ of the extrapolation.
        step: the factor on d; `None` derives it from `tau`.
        tau: the paper's τ, if `step` is `None`.
        local_rate: η_ℓ; `None` lets each client take `local_scale`/L_i.
        local_scale: see `local_rate`.
        correction: correction of local steps: "gradients" c_i = ∇f_i(x) as in the paper,
            "variates" that clients update from their local steps (SCAFFOLD's option II), or
            "none", FedAvg's.
    """

    sigma: float
    theta: float
    step: float | None = None
    tau: float | None = None
    local_rate: float | None = None
    local_scale: float = 1.0
    correction: str = "gradients"

    def primal(self, total: float, local_steps: int) -> float:
        """Return the factor on d = Σ (λ_i/S) d_i for S = `total`."""
        if self.step is not None:
            return self.step
        assert self.tau is not None
        assert self.local_rate is not None
        return self.tau * total / (self.local_rate * local_steps)


@dataclass(frozen=True)
class Trial:
    """One attempted round, as the server saw it.

    Attributes:
        objective: (Λ, ψ).
        before: L at x.
        after: L at x⁺.
        weights: λ⁺.
        step: the factor on d.
        slope: ⟨c, d⟩.
        precision: the machine epsilon of the losses' number format.
        secants: ⟨c_i, x⁺ − x⟩ at x and at x⁺ per client; asking costs 2N scalars. `None` if sums
            hide them.
        bend: ½ Σ_i λ⁺_i ⟨c_i(x⁺) − c_i(x), x⁺ − x⟩ from two sums instead; `None` if masks allow
            only one sum.
    """

    objective: Objective
    before: Vector
    after: Vector
    weights: Vector
    step: float
    slope: float
    precision: float
    secants: Callable[[], tuple[Vector, Vector]] | None = None
    bend: Callable[[], float] | None = None

    def value(self) -> float:
        """Objective at x⁺; +∞ if losses are not finite, or so large that the run diverges."""
        sane = bool(np.all(np.abs(self.after) < LARGEST / 4))
        return self.objective._support(self.after) if sane else np.inf


class StepRule(Protocol):
    """Step rule: a pure state machine of plain numbers; every rule has a state of its own type."""

    def start(self, problem: StepProblem) -> Any:
        """Return the rule's state before the first round."""

    def rates(self, state: Any) -> Rates:
        """Return the numbers of the next round."""

    def judge(self, state: Any, trial: Trial) -> tuple[Any, bool]:
        """Return the next state, and whether x⁺ is taken."""


@dataclass(frozen=True)
class FixedState:
    """Empty state."""


@dataclass(frozen=True)
class Fixed:
    """Algorithm 1 with constant τ, σ, θ and one local rate η_ℓ for all clients.

    Args:
        tau: primal step τ = J η_ℓ η_g.
        sigma: dual step σ.
        theta: extrapolation θ, in [0, 1].
        local_rate: η_ℓ; it must stay below 2/L_i for every client.
    """

    tau: float
    sigma: float
    theta: float = 1.0
    local_rate: float = 0.1

    def __post_init__(self) -> None:
        for name in ("tau", "sigma", "local_rate"):
            positive("Fixed", name, getattr(self, name))
        if not 0 <= real("Fixed", "theta", self.theta) <= 1:
            raise InputError(
                "setting-out-of-range", f"Fixed needs theta between 0 and 1, got {self.theta!r}."
            )

    def start(self, problem: StepProblem) -> FixedState:
        """Return the empty state."""
        return FixedState()

    def rates(self, state: FixedState) -> Rates:
        """Return the same numbers every round."""
        return Rates(sigma=self.sigma, theta=self.theta, tau=self.tau, local_rate=self.local_rate)

    def judge(self, state: FixedState, trial: Trial) -> tuple[FixedState, bool]:
        """Take every step."""
        return state, True
