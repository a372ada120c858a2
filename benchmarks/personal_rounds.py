"""Rounds to a certified gap of 1e-8 of personal problems, beside those of one model for all.

    python benchmarks/personal_rounds.py                 writes benchmarks/PERSONAL_ROUNDS.md
    python benchmarks/personal_rounds.py --families synthetic digits --no-write

Every family and objective of benchmarks/problems.py, by `fair`, with nothing set; a strength κ gives client i the pull
γ_i = κ/n_i.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import numpy as np
import torch

import scaffpd as sp
from problems import OBJECTIVES, chosen, families, objectives

TOL = 1e-8
CAP = 300
STRENGTHS = (0.1, 10.0, 1000.0)


def rounds(objective: sp.Average, clients: list, model: object) -> float:
    """What the certified gap took; infinite where the cap came first."""
    result = sp.train(sp.fair(objective), sp.Cohort(clients, model), rounds=CAP, tol=TOL)
    return result.rounds if result.status == "converged" else np.inf


def measured(names: list[str], seed: int) -> dict[tuple[str, str], list[float]]:
    """Rounds of one model, and of personal models for every strength, by family and objective."""
    table = {}
    for name in names:
        family = families(seed)[name]()
        for which in OBJECTIVES:
            objective = objectives(family)[which]
            models = [family.model, *(sp.Personal(family.model, kappa) for kappa in STRENGTHS)]
            table[name, which] = [rounds(objective, family.clients, model) for model in models]
            print(name, which, *table[name, which], flush=True)
    return table


def page(table: dict[tuple[str, str], list[float]], seed: int) -> str:
    """The table, with what it comes to."""
    cells = np.array(list(table.values()))
    medians = [f"{m:g}" for m in np.median(cells, axis=0)]
    more = [int(np.sum(cells[:, k] > cells[:, 0])) for k in range(1, cells.shape[1])]
    head = ["one model", *(f"κ = {kappa:g}" for kappa in STRENGTHS)]
    lines = [
        "# Rounds of personal problems",
        "",
        f"Written by `python benchmarks/personal_rounds.py --seed {seed}` (scaffpd {sp.__version__}, torch "
        f"{torch.__version__}, Python {platform.python_version()}): rounds to a certified gap of {TOL:g} by `fair`, "
        f"with nothing set, of one model for all and of `Personal(model, κ)`. ∞: not within {CAP} rounds.",
        "",
        f"- Median over {len(cells)} problems: "
        + ", ".join(f"{name} {median}" for name, median in zip(head, medians, strict=True))
        + ".",
        "- Problems on which personal models need more rounds than one model: "
        + ", ".join(f"{name} {n}" for name, n in zip(head[1:], more, strict=True))
        + ".",
        "",
        f"| family | objective | {' | '.join(head)} |",
        "|---|---|" + "---|" * len(head),
    ]
    for (name, which), row in table.items():
        lines.append(
            f"| {name} | {which} | {' | '.join('∞' if np.isinf(n) else f'{n:g}' for n in row)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--families", nargs="+", help="those with one of these in their names; all by default"
    )
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    text = page(measured(chosen(given.families), given.seed), given.seed)
    print(text)
    if not given.no_write:
        Path(__file__).with_name("PERSONAL_ROUNDS.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
