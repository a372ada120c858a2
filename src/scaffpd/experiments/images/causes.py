r"""What the differences between methods are due to: whose average, how fair, how strongly regularised, how long.

FedAvg as published counts clients by their samples, SCAFFOLD counts them alike, Scaff-PD weighs them by λ, and all are
stopped after the same number of rounds, which regularises slow methods more than fast ones. So each is run with both
ways of counting, Scaff-PD from ρ = 0.1 to the plain average (ρ = ∞), all with their automatic rates, for several l2,
and scored on test images after several numbers of rounds. Nothing is chosen by these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scaffpd.algorithms import FedAvg, Scaffold, ScaffPD
from scaffpd.experiments.images.curves import Curve, follow
from scaffpd.experiments.images.study import Ground, Place
from scaffpd.experiments.writing import markdown_table
from scaffpd.objectives import Average, ChiSquare
from scaffpd.progress import Tally

L2S, STOPS, RHOS = (1.0, 3.0, 10.0), (10, 30, 100), (0.1, 1.0, 10.0)  # L2S: multiples of the plan's
COLUMNS = ("method", "l2", "seed", "round", "average", "worst_20", "best_20")


@dataclass(frozen=True)
class Cause:
    """Curves of all partitions for one l2."""

    l2: float
    curves: list[Curve]


def contestants(local_steps: int) -> dict[str, Any]:
    """The same methods with both ways of counting clients, and Scaff-PD from fair to average."""
    return {
        "FedAvg, by samples": FedAvg(local_steps=local_steps),
        "FedAvg, clients alike": FedAvg(local_steps=local_steps, weights="uniform"),
        "SCAFFOLD, by samples": Scaffold(local_steps=local_steps, weights="samples"),
        "SCAFFOLD, clients alike": Scaffold(local_steps=local_steps),
        **{f"Scaff-PD, ρ = {rho:g}": ScaffPD(ChiSquare(rho), local_steps=local_steps) for rho in RHOS},
        "Scaff-PD, average": ScaffPD(Average(), local_steps=local_steps),
    }


def causes(here: Ground, alpha: float, place: Place) -> list[Cause]:
    """All runs."""
    plan, methods, found = here.plan, contestants(here.plan.local_steps), []
    with Tally(place.progress, len(L2S) * plan.seeds * len(methods)) as bar:
        for factor in L2S:
            l2, curves = factor * plan.l2, []
            problem = replace(here, plan=replace(plan, l2=l2)).problem(alpha, place.device)
            for seed in range(plan.seeds):
                cohort = problem.cohort(seed)
                for label, method in methods.items():
                    curves.append(Curve(label, seed, follow(method, cohort, plan.rounds, seed)))
                    bar.advance(f"{label}, l2 = {l2:g}")
            found.append(Cause(l2, curves))
    return found


def lines(found: Sequence[Cause]) -> Iterator[tuple[Any, ...]]:
    """Every point, for a file."""
    for cause in found:
        for curve in cause.curves:
            for r, row in enumerate(curve.scores):
                yield (curve.label, f"{cause.l2:g}", curve.seed, r, *(f"{value:.6f}" for value in row))


def table(found: Sequence[Cause]) -> tuple[list[str], list[list[str]]]:
    """Worst-20 % (and average) test accuracy for every l2 after every number of rounds, mean over partitions."""
    last = len(found[0].curves[0].scores) - 1
    rounds = [r for r in STOPS if r <= last] or [last]
    header = ["method", *(f"l2 = {cause.l2:g}, {r} rounds" for cause in found for r in rounds)]
    labels = dict.fromkeys(curve.label for curve in found[0].curves)
    return header, [[label, *(_cell(cause, label, r) for cause in found for r in rounds)] for label in labels]


def _cell(cause: Cause, label: str, r: int) -> str:
    scores = 100 * np.array([curve.scores[r] for curve in cause.curves if curve.label == label])
    average, worst = scores.mean(0)[:2]
    return "failed" if np.isnan(worst) else f"{worst:.1f} ({average:.1f})"


def markdown(found: Sequence[Cause], title: str, command: str, hardware: str) -> str:
    """A page with the table."""
    header, rows = table(found)
    seeds = len({curve.seed for curve in found[0].curves})
    return "\n".join([
        f"# {title}",
        "",
        f"Written by `{command}` on {hardware}. Test accuracy in per cent, worst 20 % of the clients and, in brackets, "
        f"the average over clients; mean over {seeds} partitions; automatic rates.",
        "",
        *markdown_table(header, rows),
        "",
        *(__doc__ or "").strip().splitlines()[2:],
        "",
        "`causes.csv` has every round of every run.",
        "",
    ])  # fmt: skip
