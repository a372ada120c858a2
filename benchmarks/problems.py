"""The problem families and objectives on which methods are measured, shared by benchmarks and
tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import scaffpd as sp
from scaffpd.data import breast_cancer, digits, heart_disease, synthetic

sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.datasets import adult

ADULT = "Adult by occupation"
HARD = {  # families on which methods stall, and the objectives with which they do
    "separable": ("Agnostic", "CVaR"),
    "one separable sample each": ("Agnostic", "CVaR"),
    "ℓ∞ regression": ("Agnostic", "CVaR"),
    "one sample each": ("Agnostic", "CVaR"),
    "Nash near the start": ("Nash",),
}
OBJECTIVES = (
    "Average",
    "Agnostic",
    "ChiSquare",
    "ChiSquareBall",
    "CVaR",
    "Tilted",
    "QFair",
    "Nash",
)


@dataclass(frozen=True)
class Family:
    """Clients and the model that they share."""

    name: str
    clients: list[tuple[Any, Any]]
    model: sp.Linear

    def cohort(self) -> sp.Cohort:
        """The clients in this process."""
        return sp.Cohort(self.clients, self.model)

    def first_losses(self) -> np.ndarray:
        """L(x⁰)."""
        cohort = self.cohort()
        return cohort.gradients(cohort.start()).losses


def single(
    seed: int, N: int, d: int, m: int = 1, noise: float | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """N clients with m samples of one linear rule each: labels that it separates, or targets with
    noise.
    """
    random = np.random.default_rng(seed)
    rule = random.standard_normal(d)
    clients = []
    for _ in range(N):
        X = random.standard_normal((m, d))
        clients.append(
            (
                X,
                (X @ rule > 0).astype(float)
                if noise is None
                else X @ rule + noise * random.normal(size=m),
            )
        )
    return clients


def families(seed: int = 0) -> dict[str, Callable[[], Family]]:
    """Every family by name; building one is put off until it is asked for."""
    squared = sp.Linear("squared", l2=0.1)
    soft = sp.Linear("squared", l2=0.01)
    logistic = sp.Linear("logistic", l2=1e-3, intercept=True)
    softmax = sp.Linear("softmax", l2=1e-3, intercept=True, classes=10)
    sizes = (20, 50, 100, 200, 400)
    make: dict[str, tuple[Callable[[], Any], sp.Linear]] = {
        "synthetic": (lambda: synthetic(seed=seed), squared),
        "heterogeneous": (lambda: synthetic(sigma=1.0, seed=seed), squared),
        "badly scaled": (lambda: synthetic(seed=seed, scaling=1.0), squared),
        "badly scaled, σ=1": (lambda: synthetic(sigma=1.0, seed=seed, scaling=1.0), soft),
        "unequal sizes": (lambda: synthetic(sizes=sizes, seed=seed), squared),
        "rank-deficient": (lambda: synthetic(d=200, m=30, seed=seed), squared),
        "N = 30, d = 60, badly scaled": (
            lambda: synthetic(N=30, d=60, sigma=0.3, scaling=1.0, seed=seed),
            sp.Linear("squared", l2=0.05),
        ),
        "breast cancer": (lambda: breast_cancer(seed=seed).train, logistic),
        "digits": (lambda: digits(seed=seed).train, softmax),
        "hospitals": (
            lambda: heart_disease(seed=seed).train,
            sp.Linear("logistic", l2=0.01, intercept=True),
        ),
        ADULT: (lambda: adult().train, logistic),
        "separable": (lambda: single(seed, 10, 20, 50), sp.Linear("logistic", l2=1e-8)),
        "one separable sample each": (
            lambda: single(seed, 400, 80),
            sp.Linear("logistic", l2=1e-6),
        ),
        "ℓ∞ regression": (lambda: single(seed, 300, 150, noise=1.0), sp.Linear("squared", l2=1e-6)),
        "one sample each": (lambda: single(seed, 200, 100), sp.Linear("logistic", l2=1e-2)),
        "Nash near the start": (
            lambda: synthetic(N=10, d=10, seed=seed),
            sp.Linear("squared", l2=1e-2),
        ),
    }
    return {
        name: (lambda name=name, d=data, m=model: Family(name, d(), m))
        for name, (data, model) in make.items()
    }


def chosen(parts: list[str] | None) -> list[str]:
    """The families whose names have one of the parts in them, all by default; without data that is
    not there.
    """
    names = [name for name in families() if not parts or any(part in name for part in parts)]
    if not names:
        sys.exit(
            f"No family has {' or '.join(map(repr, parts or []))} in its name: choose among "
            f"{', '.join(families())}."
        )
    if ADULT in names and not os.environ.get("SCAFFPD_DATA"):
        print(
            f"{ADULT} is left out: set SCAFFPD_DATA to a folder that has it (see "
            "experiments/datasets.py)."
        )
        names.remove(ADULT)
    return names


def objectives(family: Family) -> dict[str, Any]:
    """Every objective by name, with parameters that make it bite; b of Nash lies above the first
    losses.
    """
    return {
        "Average": sp.Average(),
        "Agnostic": sp.Agnostic(),
        "ChiSquare": sp.ChiSquare(rho=0.05),
        "ChiSquareBall": sp.ChiSquareBall(delta=0.5),
        "CVaR": sp.CVaR(alpha=0.3),
        "Tilted": sp.Tilted(rho=0.1),
        "QFair": sp.QFair(q=1.0),
        "Nash": sp.Nash(b=bargain(family)),
    }


def bargain(family: Family) -> Any:
    """Return b of Nash: twice the largest first loss; in its own family, at most 1e-6 above every
    client's.
    """
    first = family.first_losses()
    if family.name != "Nash near the start":
        return 2 * float(first.max())
    return first + 1e-6 * np.random.default_rng(len(first)).uniform(0.1, 1, len(first))


def tolerance(family: Family, objective: Any) -> float:
    """1e-8, or 1e-8 of the first value on the hard families, where losses are large or very small."""
    relative = family.name in HARD and not isinstance(objective, sp.Nash)
    return 1e-8 * (float(objective.support(family.first_losses())) if relative else 1.0)
