"""Constant steps, chosen by the user (or by a grid search)."""

from __future__ import annotations

from dataclasses import dataclass

from scaffpd.errors import InputError, positive, real
from scaffpd.steps.base import Rates, StepProblem, Trial


@dataclass(frozen=True)
class FixedState:
    """Nothing changes."""


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
            raise InputError(f"Fixed needs theta between 0 and 1, got {self.theta!r}.")

    def start(self, problem: StepProblem) -> FixedState:
        """No state."""
        return FixedState()

    def rates(self, state: FixedState) -> Rates:
        """The same numbers every round."""
        return Rates(sigma=self.sigma, theta=self.theta, tau=self.tau, local_rate=self.local_rate)

    def judge(self, state: FixedState, trial: Trial) -> tuple[FixedState, bool]:
        """Every step is taken."""
        return state, True
