r"""One objective after the other on the same clients, each from where the last one ended.

From the average to the worst case the optimum moves little from one objective to the next, and the
subspace saddle method hands over more than x: the weights λ, the vectors that everybody knows, and
β. Two or three rounds a point do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaffpd.algorithms import Fair
from scaffpd.errors import InputError, count
from scaffpd.federation import Federation, Vector
from scaffpd.objectives import OBJECTIVES, Agnostic, Average, CVaR, Objective
from scaffpd.training.history import Checkpoint
from scaffpd.training.loop import Algorithm, Callback, Result, RoundInfo, StartPoint, Status, train
from scaffpd.training.metrics import Spread

# of a share (0.2 points of accuracy) or of an error: less is no reason to leave the average
LEAST = 0.002
WALKABLE = tuple(name for name, kind in OBJECTIVES.items() if kind.strengths is not None)


def path(
    objectives: Sequence[Objective],
    federation: Federation,
    rounds: int = 1000,
    tol: float | None = None,
    seed: int = 0,
) -> list[Result]:
    """Train for each of the objectives; results in their order, up to one that is interrupted.

    Args:
        objectives: neighbours should be alike, such as those of `grid`.
        federation: such as a `Cohort`.
        rounds: the most rounds for each.
        tol: the certified gap at which to go on to the next.
        seed: seeds all randomness.
    """
    if not isinstance(objectives, Sequence) or not objectives:
        raise InputError(
            "path-without-objectives",
            "path needs a list of objectives, such as [Average(), ChiSquare(0.1), Agnostic()].",
        )
    results = list[Result]()
    start = WarmStart()
    for objective in objectives:
        results.append(start.train(Fair(objective), federation, rounds, tol, seed, None))
        if results[-1].status is Status.INTERRUPTED:
            break
    return results


@dataclass
class WarmStart:
    """Train one algorithm after the other, each from where the last one ended."""

    state: StartPoint = None  # the last one with finite losses; at first an x, or nothing

    def train(
        self,
        algorithm: Algorithm,
        federation: Federation,
        rounds: int,
        tol: float | None,
        seed: int,
        progress: bool | None = False,
        callbacks: Sequence[Callback] = (),
        checkpoint: Checkpoint | None = None,
    ) -> Result:
        about = (algorithm, federation, rounds, tol, seed, self.state)
        seen = [*callbacks, self._store]
        result = train(*about, progress=progress, checkpoint=checkpoint, callbacks=seen)
        self.state = None if result.status is Status.DIVERGED else self.state
        return result

    def _store(self, info: RoundInfo) -> None:
        if np.all(np.isfinite(info.state.losses)):
            self.state = info.state


def grid(objective: Objective, average: Vector, points: int = 9) -> dict[str, Objective]:
    """Return objectives by name from the average to the worst case.

    Args:
        objective: one such as `ChiSquare(rho=0.1)`: all have its prior, and its cap.
        average: L_i of the average model; how far they differ sets the scale of ρ.
        points: how many between the average and the worst case.
    """
    count("A fairness path", "points", points)
    if objective.strengths is None:
        raise InputError(
            "path-without-strength",
            f"A fairness path varies {', '.join(WALKABLE)}, not {type(objective).__name__}.",
        )
    losses = np.asarray(average)
    prior = objective.prior
    cap = getattr(objective, "cap", None)
    name = objective.symbol or objective.parameter
    values = _rounded(objective.strengths(losses, points))
    inner = {f"{name} = {v:.15g}": objective.with_strength(v) for v in values}
    worst: Objective = Agnostic(prior=prior)
    if cap is not None:  # as ρ → 0, any λ_i ≤ cap: the mean of the 1/cap largest losses
        worst = CVaR(min(1.0, 1 / (cap * len(losses))))
    return {"average": Average(prior=prior), **inner, "worst case": worst}


def _rounded(values: Vector) -> list[float]:
    """Round to as few digits as keep values different, at least two."""
    for digits in range(2, 16):
        rounded = [float(f"{value:.{digits}g}") for value in values]
        if len(set(rounded)) == len(rounded):
            return rounded
    return list(dict.fromkeys(map(float, values)))


def knee(points: Sequence[Spread], upwards: bool) -> int:
    """Return the point with the largest gain − cost; 0, the average, where that is hardly anything.

    Gain is that of the worst 20 %, cost that of the mean, both against the first point: a point of
    the worst-served fifth counts as much as a point of the mean. A mean that rises is no cost, and
    no reason either.
    """
    sign = 1.0 if upwards else -1.0
    mean = sign * np.array([point.mean for point in points])
    worst = sign * np.array([point.worst_20 for point in points])
    score = worst - worst[0] - np.maximum(mean[0] - mean, 0.0)
    least = LEAST * (1.0 if upwards else abs(float(worst[0])))
    return 0 if score.max() <= least else int(np.flatnonzero(score >= score.max() - 1e-12)[0])
