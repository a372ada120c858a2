"""What the parts of the subspace saddle method are worth: rounds to a certified gap of 1e-8 without each of them.

python benchmarks/ablations.py            prints a Markdown table (it stands in docs/subspace-saddle.md)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

import scaffpd as sp
from problems import families, objectives
from scaffpd.algorithms.subspace_saddle import SubspaceSaddle

CAP = 200
FAMILIES = (
    "synthetic", "badly scaled, σ=1", "rank-deficient", "N = 30, d = 60, badly scaled", "breast cancer", "digits",
)  # fmt: skip
CHOSEN = ("Average", "Agnostic", "ChiSquare")


@dataclass(frozen=True)
class WithoutRegulariser(SubspaceSaddle):
    """w = 0: λ is not held back by what V does not see."""

    def _model(self, *arguments: Any) -> Any:
        state, model = super()._model(*arguments)
        return state, replace(model, w=np.zeros_like(model.w))


@dataclass(frozen=True)
class Identity(SubspaceSaddle):
    """D = I for squared losses too."""

    def init(self, federation: Any, *arguments: Any) -> Any:
        state = super().init(federation, *arguments)
        ones, L = torch.ones_like(state.metric), state.constants.smoothness
        return replace(state, metric=ones, smoothness=L, pull=0.01 * float(L.mean()))


@dataclass(frozen=True)
class FixedPull(SubspaceSaddle):
    """β stays where it starts."""

    def _model(self, state: Any, *arguments: Any) -> Any:
        after, model = super()._model(state, *arguments)
        return replace(after, pull=state.pull), model


@dataclass(frozen=True)
class FixedScale(SubspaceSaddle):
    """s = 1."""

    def _model(self, state: Any, *arguments: Any) -> Any:
        return super()._model(replace(state, energy=np.nan), *arguments)


@dataclass(frozen=True)
class WithoutLocalWork(SubspaceSaddle):
    """d = D⁻¹c: no local solves."""

    def round(self, federation: Any, state: Any) -> Any:
        return super().round(_NoLocalWork(federation, state), state)


class _NoLocalWork:
    def __init__(self, federation: Any, state: Any) -> None:
        self.federation, self.metric = federation, state.metric
        self.size = float(state.smoothness.mean())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.federation, name)

    def proximal_steps(self, at: Any, correction: torch.Tensor, plan: Any) -> Any:
        done = self.federation.proximal_steps(at, correction, plan)
        done.sum = lambda weights: correction / (self.metric * self.size)
        return done


VARIANTS: dict[str, Callable[[Any], SubspaceSaddle]] = {
    "as it is (k = 20)": SubspaceSaddle,
    "k = 6": lambda objective: SubspaceSaddle(objective, memory=6),
    "k = 3": lambda objective: SubspaceSaddle(objective, memory=3),
    "k = 40": lambda objective: SubspaceSaddle(objective, memory=40),
    "no local work": WithoutLocalWork,
    "w = 0": WithoutRegulariser,
    "s = 1": FixedScale,
    "β fixed": FixedPull,
    "D = I": Identity,
}


def rounds(task: tuple[str, str, str, int]) -> tuple[str, str, str, str]:
    """One cell."""
    name, which, variant, seed = task
    torch.set_num_threads(1)
    family = families(seed)[name]()
    method = VARIANTS[variant](objectives(family)[which])
    result = sp.train(method, family.cohort(), rounds=CAP, tol=1e-8)
    return name, which, variant, str(result.rounds) if result.status == "converged" else "∞"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    tasks = [(name, which, variant, options.seed) for name in FAMILIES for which in CHOSEN for variant in VARIANTS]
    with get_context("spawn").Pool(options.processes) as pool:
        cells = {key[:3]: key[3] for key in pool.imap_unordered(rounds, tasks)}
    print("| family | objective | " + " | ".join(VARIANTS) + " |\n|" + "---|" * (2 + len(VARIANTS)))
    for name in FAMILIES:
        for which in CHOSEN:
            print(f"| {name} | {which} | " + " | ".join(cells[name, which, v] for v in VARIANTS) + " |")


if __name__ == "__main__":
    main()
