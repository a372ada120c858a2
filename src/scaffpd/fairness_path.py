r"""One objective after the other on the same clients, each from where the last one ended.

From the average to the worst case the optimum moves little from one objective to the next, and the subspace saddle
method hands over more than x: the weights λ, the vectors that everybody knows, and β. Two or three rounds a point do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaffpd.algorithms import Fair
from scaffpd.errors import InputError, count
from scaffpd.federation import Federation, Vector
from scaffpd.objectives import USUAL, Agnostic, Average, ChiSquare, ChiSquareBall, CVaR, Objective, QFair, Tilted
from scaffpd.training import Algorithm, Callback, Result, Status, train

SYMBOLS = {"ChiSquare": "ρ", "Tilted": "ρ", "ChiSquareBall": "δ", "CVaR": "α", "QFair": "q"}
PARAMETERS = {kind: parameter for kind, (parameter, _) in USUAL.items()}
WIDEST, NARROWEST = 10.0, 1 / 30  # ρ in units of how far the losses of the average model are apart


def path(
    objectives: Sequence[Objective],
    federation: Federation,
    rounds: int = 1000,
    tol: float | None = None,
    seed: int = 0,
    make: Callable[[Objective], Algorithm] = Fair,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
    warm: bool = True,
) -> list[Result]:
    """Train for each of the objectives; a list of results in their order, which ends where a run is interrupted.

    Args:
        objectives: neighbours should be alike, such as those of `grid`.
        federation: such as a `Cohort`.
        rounds: the most rounds for each.
        tol: the certified gap at which to go on to the next.
        seed: seeds all randomness.
        make: the algorithm for an objective.
        progress: show a progress bar for each.
        callbacks: as for `train`.
        warm: start each where the last one ended; `False` to see what that is worth.
    """
    if not isinstance(objectives, Sequence) or not objectives:
        raise InputError("path needs a list of objectives, such as [Average(), ChiSquare(0.1), Agnostic()].")
    results, start = list[Result](), WarmStart()
    for objective in objectives:
        start = start if warm else WarmStart()
        results.append(start.train(make(objective), federation, rounds, tol, seed, progress, callbacks))
        if results[-1].status is Status.INTERRUPTED:
            break
    return results


@dataclass
class WarmStart:
    """Train one algorithm after the other, each from where the last one ended."""

    state: Any = None  # the last one with finite losses; at first an x, or nothing

    def train(
        self, algorithm: Algorithm, federation: Federation, rounds: int, tol: float | None, seed: int,
        progress: bool | None, callbacks: Sequence[Callback],
    ) -> Result:  # fmt: skip
        """Train the next one."""
        result = train(algorithm, federation, rounds, tol, seed, self.state, progress, None, [*callbacks, self._keep])
        self.state = None if result.status is Status.DIVERGED else self.state
        return result

    def _keep(self, info: Any) -> None:
        if np.all(np.isfinite(info.state.losses)):
            self.state = info.state


def grid(kind: str, average: Vector, points: int = 9, prior: Any = None) -> dict[str, Objective]:
    """Return objectives by name from the average to the worst case, given the losses of the average model.

    Args:
        kind: "ChiSquare", "Tilted", "ChiSquareBall", "CVaR" or "QFair".
        average: L_i of the average model; how far they are apart sets the scale of ρ.
        points: how many between the average and the worst case.
        prior: p of all of them.
    """
    count("A fairness path", "points", points)
    made = {"ChiSquare": ChiSquare, "Tilted": Tilted, "ChiSquareBall": ChiSquareBall, "CVaR": CVaR, "QFair": QFair}
    values = _rounded(_strengths(kind, np.asarray(average), points))
    inner: dict[str, Objective] = {f"{SYMBOLS[kind]} = {v:.15g}": made[kind](v, prior=prior) for v in values}
    return {"average": Average(prior=prior), **inner, "worst case": Agnostic(prior=prior)}


def _rounded(values: Vector) -> list[float]:
    """Round to as few digits as tell values apart, at least two."""
    for digits in range(2, 16):
        rounded = [float(f"{value:.{digits}g}") for value in values]
        if len(set(rounded)) == len(rounded):
            return rounded
    return list(dict.fromkeys(map(float, values)))


def _strengths(kind: str, losses: Vector, points: int) -> Vector:
    N, apart = len(losses), float(np.abs(losses - losses.mean()).max())
    if kind in ("ChiSquare", "Tilted"):
        scale = max(apart, 1e-9 * (1 + float(np.abs(losses).max())))
        return np.geomspace(WIDEST * scale, NARROWEST * scale, points)
    if kind == "CVaR":
        return np.geomspace(1.0, 1.0 / N, points + 2)[1:-1]
    if kind == "ChiSquareBall":
        return np.geomspace(0.01, 0.9, points) * (N - 1)
    if kind == "QFair":
        return np.geomspace(0.1, 5.0, points)
    raise InputError(f"A fairness path goes along {', '.join(SYMBOLS)}, not along {kind!r}.")
