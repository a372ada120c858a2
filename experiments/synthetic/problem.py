r"""What is solved: the paper's robust regression, and how long everybody may work on it.

    min_x max_{λ∈simplex}  Σ λ_i f_i(x) − (ρ/2N) Σ (N λ_i − 1)²,
    f_i(x) = (1/m)‖A_i x − y_i‖² + (l2/2)‖x‖²

with N = 5, d = 10, m = 100 and J = 100 local steps, as the paper has them. It does not say what l2
and c are, nor σ where it varies ρ, nor ρ where it varies σ; here l2 = 0.1, c = 1 and both of the
others 0.1.

Methods are measured by ‖x − x*‖², with x* from `reference_optimum`, a second-order solver that
shares nothing with them; a test holds it against 50 digits: ‖x* − exact‖² < 1e-29 on every problem
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from scaffpd.data import synthetic
from scaffpd.data.datasets import Regression
from scaffpd.models import Linear
from scaffpd.objectives import ChiSquare
from scaffpd.training.cohort import Cohort
from tests.cases.reference import reference_optimum

N = 5
D = 10
M = 100
L2 = 0.1
SIGMA = 0.1
RHO = 0.1
J = 100
# what methods are tuned for, and what only linear convergence reaches
TARGET = 1e-6
DEEP = 1e-20


@dataclass(frozen=True)
class Setting:
    """One problem.

    Attributes:
        sigma: σ, how much clients differ.
        rho: ρ, the price of leaving equal weights.
        scaled: whether columns are multiplied by 10^U(−1, 1).
        seed: of the data, and of methods that draw.
    """

    sigma: float = SIGMA
    rho: float = RHO
    scaled: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """In words."""
        return f"{'badly scaled, ' if self.scaled else ''}σ = {self.sigma:g}, ρ = {self.rho:g}"

    def clients(self) -> list[Regression]:
        """Draw the data."""
        scaling = 1.0 if self.scaled else 0.0
        return synthetic(N=N, d=D, m=M, sigma=self.sigma, seed=self.seed, scaling=scaling)


@dataclass(frozen=True)
class Bench:
    """A problem with its clients and its solution."""

    setting: Setting
    cohort: Cohort
    objective: ChiSquare
    optimum: Tensor

    def error(self, x: Tensor) -> float:
        """‖x − x*‖²."""
        return float((x - self.optimum).square().sum())


@lru_cache(maxsize=32)
def bench(setting: Setting) -> Bench:
    """Draw the data and solve the problem."""
    clients = setting.clients()
    objective = ChiSquare(setting.rho)
    solution = reference_optimum(clients, "squared", L2, objective)
    return Bench(
        setting, Cohort(clients, Linear("squared", L2)), objective, torch.as_tensor(solution.x)
    )


@dataclass(frozen=True)
class Plan:
    """How much is run.

    Attributes:
        seed: of the data.
        rhos: ρ of the first figure.
        sigmas: σ of the second.
        local_steps: J of the third.
        rounds: of every run, and the most that a configuration may take while it is tuned.
        scaled_rounds: the same on the badly scaled problem.
        stride: every how manyth point of each grid is tried.
    """

    seed: int = 0
    rhos: tuple[float, ...] = (0.01, 0.05, 0.1)
    sigmas: tuple[float, ...] = (0.01, 0.05, 0.1)
    local_steps: tuple[int, ...] = (1, 10, 50, 100, 500)
    rounds: int = 500
    scaled_rounds: int = 1000
    stride: int = 1

    @property
    def paper(self) -> Setting:
        """The problem that the figures share."""
        return Setting(seed=self.seed)

    @property
    def hard(self) -> Setting:
        """The badly scaled problem."""
        return Setting(scaled=True, seed=self.seed)

    @property
    def rho_settings(self) -> tuple[Setting, ...]:
        """Those of the first figure."""
        return tuple(Setting(rho=rho, seed=self.seed) for rho in self.rhos)

    @property
    def sigma_settings(self) -> tuple[Setting, ...]:
        """Those of the second figure."""
        return tuple(Setting(sigma=sigma, seed=self.seed) for sigma in self.sigmas)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All of them, each once."""
        return tuple(dict.fromkeys((*self.rho_settings, *self.sigma_settings, self.hard)))

    def limit(self, setting: Setting) -> int:
        """The rounds of a run."""
        return self.scaled_rounds if setting.scaled else self.rounds


def quick(seed: int = 0) -> Plan:
    """A plan of seconds, whose numbers mean nothing."""
    return Plan(seed, (0.05, 0.1), (0.1,), (1, 100), rounds=12, scaled_rounds=12, stride=30)
