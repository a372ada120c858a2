r"""Test accuracy round by round: Scaff-PD for several ρ, SCAFFOLD, and what differences between
methods are due to.

FedAvg as published counts clients by their samples, SCAFFOLD counts them alike, Scaff-PD weighs
them by λ, and all are stopped after the same number of rounds, which regularises slow methods more
than fast ones. So each is run with both ways of counting, Scaff-PD from ρ = 0.1 to the plain
average (ρ = ∞), all with their automatic rates, for several l2, and scored on test images after
several numbers of rounds. Nothing is chosen by these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.images.plans import RHOS, methods
from experiments.images.study import Ground, Place
from experiments.tables import markdown_table
from scaffpd.algorithms import FedAvg, Scaffold, ScaffPD
from scaffpd.files import make_folder
from scaffpd.objectives import Average, ChiSquare
from scaffpd.study.comparison import compare, configured
from scaffpd.training.loop import RoundInfo, Status, train
from scaffpd.training.metrics import Summary
from scaffpd.training.progress import Tally

BASELINE = "SCAFFOLD"
# FACTORS: on the plan's l2
FACTORS = (1.0, 3.0, 10.0)
STOPS = (10, 30, 100)
CAUSE_RHOS = (0.1, 1.0, 10.0)
COLUMNS = ("method", "seed", "round", "average", "worst_20", "best_20")
CAUSE_COLUMNS = ("method", "l2", *COLUMNS[1:])


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        label: the method.
        seed: the partition.
        scores: (rounds + 1, 3): average, worst-20 % and best-20 % test accuracy.
        l2: of the regulariser.
    """

    label: str
    seed: int
    scores: NDArray[np.float64] = field(repr=False)
    l2: float = 0.0


def scaff_pds(rhos: Sequence[float], local_steps: int) -> dict[str, Any]:
    """Scaff-PD for every ρ, by label."""
    return {
        f"Scaff-PD, ρ = {rho:g}": ScaffPD(ChiSquare(rho), local_steps=local_steps) for rho in rhos
    }


def contestants(local_steps: int) -> dict[str, Any]:
    """The same methods with both ways of counting clients, and Scaff-PD from fair to average."""
    return {
        "FedAvg, by samples": FedAvg(local_steps=local_steps),
        "FedAvg, clients alike": FedAvg(local_steps=local_steps, weights="uniform"),
        "SCAFFOLD, by samples": Scaffold(local_steps=local_steps, weights="samples"),
        "SCAFFOLD, clients alike": Scaffold(local_steps=local_steps),
        **scaff_pds(CAUSE_RHOS, local_steps),
        "Scaff-PD, average": ScaffPD(Average(), local_steps=local_steps),
    }


def curves(here: Ground, alpha: float, place: Place, out: Path) -> list[Curve]:
    """Run Scaff-PD for every ρ, and SCAFFOLD with the rate that its validation images choose, on
    every partition.
    """
    plan = here.plan
    problem = here.problem(alpha, place.device)
    chosen = compare(
        {BASELINE: methods(plan.local_steps)[BASELINE]},
        problem,
        seeds=(0,),
        rounds=plan.rounds,
        tune=plan.tune,
        progress=place.progress,
    )
    chosen.to_csv(make_folder(out / "tuning") / "runs.csv")
    fixed = scaff_pds(RHOS, plan.local_steps)
    found = []
    with Tally(place.progress, plan.seeds * (len(fixed) + 1)) as bar:
        for seed in range(plan.seeds):
            cohort = problem.cohort(seed)
            tuned, _ = configured(chosen.methods[BASELINE], chosen.finals[0].factors, cohort)
            for label, method in (fixed | {BASELINE: tuned}).items():
                found.append(Curve(label, seed, follow(method, cohort, plan.rounds, seed), plan.l2))
                bar.advance(label)
    return found


def causes(here: Ground, alpha: float, place: Place) -> list[Curve]:
    """Run all contestants for every l2 on every partition."""
    plan = here.plan
    methods = contestants(here.plan.local_steps)
    found = []
    with Tally(place.progress, len(FACTORS) * plan.seeds * len(methods)) as bar:
        for l2 in (factor * plan.l2 for factor in FACTORS):
            problem = replace(here, plan=replace(plan, l2=l2)).problem(alpha, place.device)
            for seed in range(plan.seeds):
                cohort = problem.cohort(seed)
                for label, method in methods.items():
                    found.append(Curve(label, seed, follow(method, cohort, plan.rounds, seed), l2))
                    bar.advance(f"{label}, l2 = {l2:g}")
    return found


def follow(method: Any, cohort: Any, rounds: int, seed: int) -> NDArray[np.float64]:
    """Test accuracy at the start and after every round: NaN once it diverged, the last one once no
    step is taken.
    """
    scores = [_scores(cohort, cohort.start())]

    def look(moment: RoundInfo) -> None:
        scores.append(_scores(cohort, moment.state.x))

    with np.errstate(all="ignore"):  # a run overflows before it is called diverged
        result = train(
            method, cohort, rounds=rounds, seed=seed, progress=False, callbacks=[look]
        ).uninterrupted()
    scores = scores[: result.rounds + 1]
    rest = (np.nan,) * 3 if result.status is Status.DIVERGED else scores[-1]
    return np.array(scores + [rest] * (rounds + 1 - len(scores)))


def _scores(cohort: Any, x: Any) -> tuple[float, float, float]:
    accuracy = Summary.of(cohort.evaluate(x, "test")).score
    assert accuracy is not None
    return accuracy.mean, accuracy.worst_20, accuracy.best_20


def lines(found: Sequence[Curve], with_l2: bool = False) -> Iterator[tuple[Any, ...]]:
    """Every point of every curve, for a CSV file."""
    for curve in found:
        for r, row in enumerate(curve.scores):
            first = (curve.label, f"{curve.l2:g}") if with_l2 else (curve.label,)
            yield (*first, curve.seed, r, *(f"{value:.6f}" for value in row))


def verdict(found: Sequence[Curve]) -> Iterator[str]:
    """Where every curve ends, and how soon each of Scaff-PD's is where SCAFFOLD ends; all of means
    over partitions.
    """
    labels = dict.fromkeys(curve.label for curve in found)
    means = {
        name: np.mean([curve.scores for curve in found if curve.label == name], axis=0)
        for name in labels
    }
    rounds = len(means[BASELINE]) - 1
    goal = means[BASELINE][-1, 1]
    for name, scores in means.items():
        average, worst = 100 * scores[-1, :2]
        said = f"{name}: after {rounds} rounds {average:.1f} % on average"
        said += f" and {worst:.1f} % for the worst 20 %"
        best = int(scores[:, 1].argmax())
        said += f" (at most {100 * scores[best, 1]:.1f} %, after {best} rounds)"
        reached = np.flatnonzero(scores[:, 1] >= goal)
        if name != BASELINE:
            said += f"; it has {BASELINE}'s last {100 * goal:.1f} % " + (
                f"after {reached[0]} rounds" if len(reached) else "at no time"
            )
        yield f"{said}."


def cause_table(found: Sequence[Curve]) -> tuple[list[str], list[list[str]]]:
    """Worst-20 % (and average) test accuracy for every l2 after every number of rounds, mean over
    partitions.
    """
    last = len(found[0].scores) - 1
    columns = [
        (l2, r)
        for l2 in dict.fromkeys(c.l2 for c in found)
        for r in [r for r in STOPS if r <= last] or [last]
    ]
    header = ["method", *(f"l2 = {l2:g}, {r} rounds" for l2, r in columns)]
    rows = []
    for label in dict.fromkeys(curve.label for curve in found):
        cells = [
            [c.scores[r] for c in found if (c.label, c.l2) == (label, l2)] for l2, r in columns
        ]
        means = [100 * np.mean(scores, axis=0) for scores in cells]
        rows.append(
            [label, *("failed" if np.isnan(m[1]) else f"{m[1]:.1f} ({m[0]:.1f})" for m in means)]
        )
    return header, rows


def curves_page(found: Sequence[Curve], title: str, command: str, hardware: str) -> str:
    """A page with the picture."""
    return "\n".join(
        [
            f"# {title}",
            "",
            f"Written by `{command}` on {hardware}. Features as in the tables; ρ is not tuned, "
            f"{BASELINE}'s rate is, on "
            "validation images of the first partition.",
            "",
            "![accuracy over rounds](rho.png)",
            "",
            *(f"- {sentence}" for sentence in verdict(found)),
            "",
            "`rho.csv` has every round of every run.",
            "",
        ]
    )


def causes_page(found: Sequence[Curve], title: str, command: str, hardware: str) -> str:
    """A page with the table."""
    seeds = len({curve.seed for curve in found})
    return "\n".join(
        [
            f"# {title}",
            "",
            f"Written by `{command}` on {hardware}. Test accuracy in per cent, worst 20 % of the "
            "clients and, in brackets, "
            f"the average over clients; mean over {seeds} partitions; automatic rates.",
            "",
            *markdown_table(*cause_table(found)),
            "",
            *(__doc__ or "").strip().splitlines()[2:],
            "",
            "`causes.csv` has every round of every run.",
            "",
        ]
    )
