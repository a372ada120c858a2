"""Accuracy round by round: Scaff-PD for several ρ, and SCAFFOLD."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.algorithms import ScaffPD
from scaffpd.comparison import compare
from scaffpd.comparison.setting import configured
from scaffpd.experiments.images.settings import RHOS, methods
from scaffpd.experiments.images.study import Ground, Place
from scaffpd.metrics import Summary
from scaffpd.objectives import ChiSquare
from scaffpd.progress import Tally
from scaffpd.training import Status, train

BASELINE = "SCAFFOLD"
COLUMNS = ("method", "seed", "round", "average", "worst_20", "best_20")


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        label: the method.
        seed: the partition.
        scores: (rounds + 1, 3): average, worst-20 % and best-20 % test accuracy.
    """

    label: str
    seed: int
    scores: NDArray[np.float64] = field(repr=False)


def curves(here: Ground, alpha: float, place: Place, out: Path) -> list[Curve]:
    """Scaff-PD for every ρ and SCAFFOLD with the rate that its validation images choose, on every partition."""
    plan, problem = here.plan, here.problem(alpha, place.device)
    contestants: dict[str, Any] = {
        f"Scaff-PD, ρ = {rho:g}": ScaffPD(ChiSquare(rho), local_steps=plan.local_steps) for rho in RHOS
    }
    chosen = compare(
        {BASELINE: methods(plan.local_steps)[BASELINE]}, problem, seeds=(0,), rounds=plan.rounds, tune=plan.tune,
        out=out / "tuning", progress=place.progress,
    )  # fmt: skip
    factors = chosen.finals[0].factors
    found = []
    with Tally(place.progress, plan.seeds * (len(contestants) + 1)) as bar:
        for seed in range(plan.seeds):
            cohort = problem.cohort(seed)
            tuned, _ = configured(chosen.setting.methods[BASELINE], factors, cohort)
            for label, method in (contestants | {BASELINE: tuned}).items():
                found.append(Curve(label, seed, follow(method, cohort, plan.rounds, seed)))
                bar.advance(label)
    return found


def follow(method: Any, cohort: Any, rounds: int, seed: int) -> NDArray[np.float64]:
    """Test accuracy at the start and after every round: NaN once it diverged, the last one once no step is taken."""
    scores = [_scores(cohort, cohort.start())]

    def look(moment: Any) -> None:
        scores.append(_scores(cohort, moment.state.x))

    with np.errstate(all="ignore"):  # a run overflows before it is called diverged
        result = train(method, cohort, rounds=rounds, seed=seed, progress=False, callbacks=[look])
    if result.status is Status.INTERRUPTED:  # half a run is none
        raise KeyboardInterrupt
    kept = scores[: result.rounds + 1]
    rest = (np.nan,) * 3 if result.status is Status.DIVERGED else kept[-1]
    return np.array(kept + [rest] * (rounds + 1 - len(kept)))


def _scores(cohort: Any, x: Any) -> tuple[float, float, float]:
    accuracy = Summary.of(cohort.evaluate(x, "test")).accuracy
    assert accuracy is not None
    return accuracy.mean, accuracy.worst_20, accuracy.best_20


def lines(found: Sequence[Curve]) -> list[tuple[Any, ...]]:
    """Every point of every curve, for a file."""
    return [
        (curve.label, curve.seed, r, *(f"{value:.6f}" for value in row))
        for curve in found
        for r, row in enumerate(curve.scores)
    ]


def verdict(found: Sequence[Curve]) -> Iterator[str]:
    """Where every curve ends, and how soon each of Scaff-PD's is where SCAFFOLD ends; all of means over partitions."""
    labels = dict.fromkeys(curve.label for curve in found)
    means = {name: np.mean([curve.scores for curve in found if curve.label == name], axis=0) for name in labels}
    rounds, goal = len(means[BASELINE]) - 1, means[BASELINE][-1, 1]
    for name, scores in means.items():
        average, worst = 100 * scores[-1, :2]
        said = f"{name}: after {rounds} rounds {average:.1f} % on average and {worst:.1f} % for the worst 20 %"
        best = int(scores[:, 1].argmax())
        said += f" (at most {100 * scores[best, 1]:.1f} %, after {best} rounds)"
        reached = np.flatnonzero(scores[:, 1] >= goal)
        if name != BASELINE:
            said += f"; it has {BASELINE}'s last {100 * goal:.1f} % " + (
                f"after {reached[0]} rounds" if len(reached) else "at no time"
            )
        yield f"{said}."


def markdown(found: Sequence[Curve], title: str, command: str, hardware: str) -> str:
    """A page with the picture."""
    return "\n".join([
        f"# {title}",
        "",
        f"Written by `{command}` on {hardware}. Features as in the tables; ρ is not tuned, {BASELINE}'s rate is, on "
        "validation images of the first partition.",
        "",
        "![accuracy over rounds](rho.png)",
        "",
        *(f"- {sentence}" for sentence in verdict(found)),
        "",
        "`rho.csv` has every round of every run.",
        "",
    ])  # fmt: skip
