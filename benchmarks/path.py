"""What a fairness path saves against training each of its points alone: writes PATH.md.

Run with `OMP_NUM_THREADS=1 python benchmarks/path.py [problems]`: hospitals, digits, breast-cancer and, where
SCAFFPD_DATA names a folder with it, adult. Rounds are counted, not timed: they are the same on every machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

import scaffpd as sp
from scaffpd.objectives import named
from scaffpd.study.comparison.problem import problem
from scaffpd.study.path import WALKABLE, grid

TOL = 1e-6
POINTS = 9
HEAD = (
    "problem",
    "N",
    "d",
    "objective",
    "rounds, alone",
    "rounds, x handed over",
    "rounds, path",
    "alone / path",
)


def cohorts(names: Sequence[str]) -> dict[str, sp.Cohort]:
    """The problems by name."""
    made = {
        name: _known(name) for name in ("hospitals", "digits", "breast-cancer") if name in names
    }
    if "adult" in names and os.environ.get("SCAFFPD_DATA"):
        made["adult"] = sp.Cohort(
            sp.data.adult().train, sp.Linear("logistic", l2=1e-3, intercept=True)
        )
    return made


def _known(name: str) -> sp.Cohort:
    asked = problem(name)
    return sp.Cohort(asked.silos(0).train, asked.model)


def measure(cohort: sp.Cohort, kind: str) -> tuple[int, int, int]:
    """Rounds of all points: each alone, each from the x of the last, and along the path."""
    average = sp.train(sp.fair(sp.Average()), cohort, tol=TOL, progress=False)
    objectives = list(grid(named(kind), average.history.last_losses, POINTS).values())
    run = partial(sp.path, objectives, cohort, tol=TOL, progress=False)
    alone = run(warm=False)
    warm = run()
    x = None
    near = []
    for objective in objectives:
        near.append(sp.train(sp.fair(objective), cohort, tol=TOL, x0=x, progress=False))
        x = near[-1].x
    assert {r.status for r in [*alone, *near, *warm]} == {sp.Status.CONVERGED}
    for objective, one, two in zip(objectives, alone, warm, strict=True):
        values = [objective.support(r.history.last_losses) for r in (one, two)]
        assert abs(values[0] - values[1]) <= 2 * TOL
    return tuple(sum(r.rounds for r in results) for results in (alone, near, warm))


def main(names: Sequence[str]) -> None:
    lines = []
    ratios = []
    for name, cohort in cohorts(names).items():
        for kind in WALKABLE:
            alone, near, warm = measure(cohort, kind)
            ratios.append(alone / warm)
            cells = (
                name,
                len(cohort.names),
                cohort.dimension,
                kind,
                alone,
                near,
                warm,
                f"{alone / warm:.1f}",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
            print(lines[-1], flush=True)
    versions = f"scaffpd {sp.__version__}, torch {torch.__version__}, NumPy {np.__version__}"
    text = (
        "# Rounds of a fairness path\n\n"
        f"Written by `OMP_NUM_THREADS=1 python benchmarks/path.py {' '.join(names)}` ({versions}): {POINTS + 2} models "
        f"from the average to the worst case, each to a certified gap of {TOL:g}; all reach the same optimum to twice "
        "that. Alone: every model from zero. x handed over: from the x of the last one. Path: `sp.path`, which hands "
        "over λ, the subspace and β too.\n\n"
        f"Median of alone / path: {np.median(ratios):.1f}, from {min(ratios):.1f} to {max(ratios):.1f}.\n\n"
        f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}\n" + "\n".join(lines) + "\n"
    )
    (Path(__file__).parent / "PATH.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    known = ["hospitals", "digits", "breast-cancer", "adult"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("problems", nargs="*", help=f"among {', '.join(known)}; all by default")
    torch.set_num_threads(1)
    main(parser.parse_args().problems or known)
