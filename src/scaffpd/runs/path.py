"""A fairness path: from the average model to the worst case, each point from where the last one ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from scaffpd.cohort import Cohort
from scaffpd.config.run import RunConfig
from scaffpd.errors import InputError
from scaffpd.fairness_path import PARAMETERS, SYMBOLS, along, grid
from scaffpd.metrics import Spread, spread
from scaffpd.objectives import Average, Objective
from scaffpd.runs.prepare import Prepared
from scaffpd.runs.train import AVERAGE, Scorer, Trained, Watcher, judged, main_model, trained
from scaffpd.training import Callback, Result, Status, train

LEAST = 0.002  # of a share (0.2 points of accuracy) or of an error: less is no reason to leave the average


def knee(points: Sequence[Spread], upwards: bool) -> int:
    """The point with the largest gain − cost, the first one being the average model; 0 where that is hardly anything.

    Gain is that of the worst 20 %, cost that of the mean, both against the first point: a point of the worst-served
    fifth counts as much as a point of the mean. A mean that rises is no cost, and no reason either.
    """
    sign = 1.0 if upwards else -1.0
    mean, worst = (sign * np.array([getattr(p, name) for p in points]) for name in ("mean", "worst_20"))
    score = worst - worst[0] - np.maximum(mean[0] - mean, 0.0)
    least = LEAST * (1.0 if upwards else abs(float(worst[0])))
    return 0 if score.max() <= least else int(np.flatnonzero(score >= score.max() - 1e-12)[0])


def walk(config: RunConfig, prepared: Prepared, cohort: Cohort, watcher: Watcher) -> list[Trained]:
    """Train a grid of objectives of the kind that the settings name."""
    walkable(config)
    kind = type(config.objective).__name__
    walker, settings = _Walker(config, prepared, cohort, watcher), config.training
    for result in along(
        walker.objectives(kind, config.points), cohort, settings.rounds, settings.tol or None, settings.seed,
        config.algorithm_for, False, walker.watching, True,
    ):  # fmt: skip
        walker.arrive(result)
    return suggested(walker.models, prepared)


def walkable(config: RunConfig) -> None:
    """Refuse what no path goes along."""
    if config.privacy is not None:
        raise InputError("A fairness path trains many models, which would share one ε: train a single one privately.")
    kind = type(config.algorithm if config.objective is None else config.objective).__name__
    if kind not in SYMBOLS:
        raise InputError(f"A fairness path goes along {', '.join(SYMBOLS)}, not along {kind}.")


class _Walker:
    """Where a path has come to."""

    def __init__(self, config: RunConfig, prepared: Prepared, cohort: Cohort, watcher: Watcher) -> None:
        self.config, self.prepared, self.cohort, self.watcher = config, prepared, cohort, watcher
        self.models: list[Trained] = []
        prior = None if config.objective is None else config.objective.prior
        self.name, self.objective = AVERAGE, cast(Objective, Average(prior=prior))
        self.scorer = Scorer(prepared, self.cohort)

    def objectives(self, kind: str, points: int) -> Iterator[Objective]:
        """The average, and then what its losses suggest."""
        yield self.objective
        known = grid(kind, self.models[0].result.history.losses[-1], points, self.objective.prior)
        for self.name, self.objective in list(known.items())[1:]:
            yield self.objective

    def watching(self, _: Objective) -> Sequence[Callback]:
        """A point is about to be trained."""
        self.scorer = Scorer(self.prepared, self.cohort)
        settings = self.config.training
        self.watcher.begin(self.name, self.cohort.names, settings.rounds, settings.tol or None)
        return [self.scorer, self.watcher.show]

    def arrive(self, result: Result) -> None:
        """A point is trained."""
        if result.status is Status.INTERRUPTED:  # half a path is none
            raise KeyboardInterrupt
        parameter = PARAMETERS.get(type(self.objective).__name__)
        strength = None if parameter is None else float(getattr(self.objective, parameter))
        algorithm, role = self.config.algorithm_for(self.objective), "" if self.models else "before"
        about = (self.prepared, self.cohort, self.scorer, strength)
        self.models.append(trained(self.name, role, algorithm, result, *about))


def suggested(models: Sequence[Trained], prepared: Prepared) -> list[Trained]:
    """The same, with the knee marked; nothing is where the average itself is the best.

    Training rows choose it, so that held-out rows can tell what it is worth.
    """
    upwards = prepared.measure == "accuracy"
    at = knee([spread(one.train, one.train.accuracy, upwards) for one in models], upwards)
    marked = [replace(one, role="after") if k == at and k > 0 else one for k, one in enumerate(models)]
    return judged(marked, prepared)


def reason(models: Sequence[Trained], prepared: Prepared) -> str:
    """What the suggested point brings, and what it costs."""
    chosen, rows = main_model(models), "held-out" if prepared.test else "training"
    if chosen is models[0]:
        return "On training rows no point serves the worst-served fifth better by more than the mean loses by it."
    before, after = (one.spread(prepared) for one in (models[0], chosen))
    sign, percent = (1, True) if prepared.measure == "accuracy" else (-1, False)
    gain, cost = sign * (after.worst_20 - before.worst_20), sign * (before.mean - after.mean)
    moved = f"{_moved(gain, percent)} for the worst-served fifth, {_moved(-cost, percent)} for the mean"
    return f"{chosen.name}, chosen on training rows; on {rows} rows {moved}."


def _moved(change: float, percent: bool) -> str:
    text = f"{100 * change * (1 + 1e-9):+.1f} points" if percent else f"{-change:+.3g} in error"
    return text.replace("-", "−")


def cold_rounds(config: RunConfig, cohort: Cohort, models: Sequence[Trained]) -> int:
    """How many rounds the same points take when each is trained on its own."""
    settings, total = config.training, 0
    for one in models:
        assert one.objective is not None
        algorithm = config.algorithm_for(one.objective)
        total += train(algorithm, cohort, settings.rounds, settings.tol or None, settings.seed, progress=False).rounds
    return total


def about(config: RunConfig, prepared: Prepared, models: Sequence[Trained], alone: int | None) -> dict[str, Any]:
    """The path in `summary.json`."""
    kind = type(config.objective).__name__
    return {
        "parameter": PARAMETERS[kind], "symbol": SYMBOLS[kind], "objective": kind, "average": AVERAGE,
        "knee": main_model(models).name, "why": reason(models, prepared),
        "rounds_warm": sum(one.result.rounds for one in models), "rounds_cold": alone,
    }  # fmt: skip
