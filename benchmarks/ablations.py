"""What the parts of the subspace saddle method are worth: rounds to a certified gap of 1e-8 without
each of them.

python benchmarks/ablations.py            prints a Markdown table (it stands in
ABLATIONS.md) python benchmarks/ablations.py --centre   prints what the waiting centre is
worth on regression in the maximum norm
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import scaffpd as sp
from problems import families, objectives
from scaffpd.algorithms.subspace_saddle import SubspaceSaddle
from scaffpd.models.execution import pooled

CAP = 200
HARD_CAP = 1000
HARD = {"N = 20, d = 12": (20, 12), "N = 60, d = 30": (60, 30), "N = 100, d = 50": (100, 50)}
FAMILIES = (
    "synthetic",
    "badly scaled, σ=1",
    "rank-deficient",
    "N = 30, d = 60, badly scaled",
    "breast cancer",
    "digits",
)
CHOSEN = ("Average", "Agnostic", "ChiSquare")


@dataclass(frozen=True)
class WithoutRegulariser(SubspaceSaddle):
    """w = 0: λ is not held back by what V does not see."""

    def _look(self, *arguments: Any) -> Any:
        sight = super()._look(*arguments)
        model = replace(sight.model, w=np.zeros_like(sight.model.w))
        return replace(sight, model=model, merit=model.merit(model.losses, 1e-14))


@dataclass(frozen=True)
class Identity(SubspaceSaddle):
    """D = I for squared losses too."""

    def init(self, *arguments: Any) -> Any:
        """The state with another metric."""
        state = super().init(*arguments)
        size = float(state.constants.smoothness.mean())
        ones = torch.ones_like(state.metric)
        return replace(state, metric=ones, diagonal=ones, uneven=False, size=size, pull=0.01 * size)


@dataclass(frozen=True)
class Diagonal(SubspaceSaddle):
    """D = B for all squared losses, and w always."""

    def init(self, *arguments: Any) -> Any:
        """The state with another metric."""
        state = super().init(*arguments)
        if not state.constants.quadratic:
            return state
        return replace(state, metric=state.diagonal, uneven=True, size=10.0, pull=0.1)


@dataclass(frozen=True)
class AlwaysHeld(SubspaceSaddle):
    """w where ψ is flat, too."""

    def _held(self, *arguments: Any) -> bool:
        return True


@dataclass(frozen=True)
class FixedPull(SubspaceSaddle):
    """β stays where it starts."""

    def _look(self, federation: Any, state: Any) -> Any:
        return replace(super()._look(federation, state), pull=state.pull)


@dataclass(frozen=True)
class FixedScale(SubspaceSaddle):
    """s = 1."""

    def _look(self, federation: Any, state: Any) -> Any:
        return super()._look(federation, replace(state, energy=np.nan))


@dataclass(frozen=True)
class WithoutLocalWork(SubspaceSaddle):
    """d = D⁻¹c: no local solves."""

    def _look(self, federation: Any, state: Any) -> Any:
        d = state.direction / (state.metric * state.size)
        return super()._look(Unasked(federation, d), state)


class Unasked:
    """A federation whose local work is known."""

    def __init__(self, federation: Any, d: torch.Tensor) -> None:
        self.federation = federation
        self.d = d

    def proximal_steps(self, *_: object) -> Any:
        """Return what `sum` makes d of."""
        return self

    def sum(self, _: object) -> torch.Tensor:
        """Return d, whatever the weights."""
        return self.d


@dataclass(frozen=True)
class MovingCentre(SubspaceSaddle):
    """ν = λ in every round, whatever the certificate does."""

    def _watched(self, state: Any, tol: float) -> Any:
        return state


VARIANTS: dict[str, Callable[[Any], SubspaceSaddle]] = {
    "as it is": SubspaceSaddle,
    "k = 20": lambda objective: SubspaceSaddle(objective, memory=20),
    "k = 6": lambda objective: SubspaceSaddle(objective, memory=6),
    "k = 3": lambda objective: SubspaceSaddle(objective, memory=3),
    "k = 60": lambda objective: SubspaceSaddle(objective, memory=60),
    "no local work": WithoutLocalWork,
    "w = 0": WithoutRegulariser,
    "w always": AlwaysHeld,
    "s = 1": FixedScale,
    "β fixed": FixedPull,
    "D = I": Identity,
    "D = B": Diagonal,
}


def rounds(task: tuple[str, str, str, int]) -> tuple[str, str, str, str]:
    """One cell."""
    name, which, variant, seed = task
    family = families(seed)[name]()
    method = VARIANTS[variant](objectives(family)[which])
    result = sp.train(method, family.cohort(), rounds=CAP, tol=1e-8)
    return name, which, variant, str(result.rounds) if result.status == "converged" else "∞"


def maximum_norm(n: int, d: int, seed: int) -> sp.Cohort:
    """One row a client: at the optimum of `Agnostic` about d clients are active."""
    random = np.random.default_rng(seed)
    X = random.standard_normal((n, d))
    w = random.standard_normal(d) / d**0.5
    y = X @ w + random.standard_normal(n)
    return sp.Cohort(
        [(X[i : i + 1], y[i : i + 1]) for i in range(n)], sp.Linear("squared", l2=0.01)
    )


def hard_rounds(task: tuple[str, str, str, int]) -> tuple[str, str, str, str]:
    """One cell of the second table."""
    name, which, variant, seed = task
    objective = sp.Agnostic() if which == "Agnostic" else sp.ChiSquare(rho=0.003)
    kind, memory = variant.split(", k = ")
    method = MovingCentre if kind == "moves" else SubspaceSaddle
    cohort = maximum_norm(*HARD[name], seed)
    result = sp.train(
        method(objective, None if memory == "20 …" else int(memory)),
        cohort,
        rounds=HARD_CAP,
        tol=1e-8,
    )
    return (
        name,
        which,
        variant,
        str(result.rounds) if result.status == "converged" else f"∞ ({result.certificate:.0e})",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--centre", action="store_true")
    options = parser.parse_args()
    table = (rounds, FAMILIES, CHOSEN, tuple(VARIANTS))
    if options.centre:
        variants = tuple(
            f"{kind}, k = {k}" for k in ("3", "6", "20 …") for kind in ("moves", "waits")
        )
        table = (hard_rounds, tuple(HARD), ("Agnostic", "ChiSquare"), variants)
    cell, names, chosen, variants = table
    tasks = [
        (name, which, variant, options.seed)
        for name in names
        for which in chosen
        for variant in variants
    ]
    cells = {key[:3]: key[3] for key in pooled(cell, tasks, options.processes)}
    print("| family | objective | " + " | ".join(variants) + " |\n|" + "---|" * (2 + len(variants)))
    for name in names:
        for which in chosen:
            print(
                f"| {name} | {which} | "
                + " | ".join(cells[name, which, v] for v in variants)
                + " |"
            )


if __name__ == "__main__":
    main()
