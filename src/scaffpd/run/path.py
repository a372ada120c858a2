"""A fairness path: from the average model to the worst case, each point from its neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scaffpd.errors import InputError
from scaffpd.objectives import Average, Objective
from scaffpd.run.prepare import Prepared
from scaffpd.run.record import PathRecord
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.train import Trained, Watcher, main_model, trained
from scaffpd.study.gains import AVERAGE
from scaffpd.study.path import WALKABLE, WarmStart, grid
from scaffpd.training.cohort import Cohort
from scaffpd.training.metrics import Spread

# of a share (0.2 points of accuracy) or of an error: less is no reason to leave the average
LEAST = 0.002


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


def walkable(config: RunConfig) -> None:
    """Refuse settings that no path goes along."""
    if config.privacy is not None:
        raise InputError(
            "path-with-privacy",
            "A fairness path trains many models, which would share one ε: "
            "train a single one privately.",
        )
    if config.goal is None or config.goal.strengths is None:
        kind = type(config.method if config.goal is None else config.goal).__name__
        raise InputError(
            "path-without-strength",
            f"A fairness path varies {', '.join(WALKABLE)}, not {kind}.",
        )


def walk(config: RunConfig, prepared: Prepared, cohort: Cohort, watcher: Watcher) -> list[Trained]:
    """Train a grid of objectives of the kind that the settings name, one after the other."""
    walkable(config)
    assert config.goal is not None
    settings = config.training
    tol = settings.tol or None
    models: list[Trained] = []
    start = WarmStart()
    points: dict[str, Objective] = {AVERAGE: Average(prior=config.goal.prior)}
    while len(models) < len(points):
        name, objective = list(points.items())[len(models)]
        algorithm = config.method_for(objective)
        watcher.begin(name, cohort.names, settings.rounds, tol)
        result = start.train(
            algorithm, cohort, settings.rounds, tol, settings.seed, False, [watcher.show]
        ).uninterrupted()
        strength = objective.strength if type(objective) is type(config.goal) else None
        role = "" if models else "before"
        models.append(trained(name, role, algorithm, result, prepared, cohort, strength))
        if name == AVERAGE:  # its losses set the scale of all others
            points = grid(config.goal, result.history.last_losses, config.path.points)
    return suggested(models, prepared)


def suggested(models: Sequence[Trained], prepared: Prepared) -> list[Trained]:
    """Mark the knee; nothing is marked where the average is as good, on either kind of rows.

    Training rows choose it, so that held-out rows can tell what it is worth.
    """
    at = _chosen(models, prepared)
    if not knee([models[k].spread(prepared) for k in (0, at)], prepared.task.measure.upwards):
        at = 0
    return [
        replace(one, role="after") if k == at and k > 0 else one for k, one in enumerate(models)
    ]


def _chosen(models: Sequence[Trained], prepared: Prepared) -> int:
    up = prepared.task.measure.upwards
    return knee([Spread.of(one.train.names, one.train.score, up) for one in models], up)


def about(config: RunConfig, prepared: Prepared, models: Sequence[Trained]) -> PathRecord:
    """Describe the path, what the suggested point brings, and what it costs."""
    assert config.goal is not None
    return PathRecord(
        parameter=config.goal.parameter,
        objective=type(config.goal).__name__,
        knee=main_model(models).name,
        why=_reason(models, prepared),
        rounds=sum(one.result.rounds for one in models),
    )


def _reason(models: Sequence[Trained], prepared: Prepared) -> str:
    chosen = models[_chosen(models, prepared)]
    if chosen is models[0]:
        return (
            f"{AVERAGE}; on training rows no point gives the worst-served fifth "
            "more than it takes from the mean."
        )
    before = models[0].spread(prepared)
    after = chosen.spread(prepared)
    step = prepared.task.measure.step
    worst = step(after.worst_20 - before.worst_20)
    moved = f"{worst} for the worst-served fifth, {step(after.mean - before.mean)} for the mean"
    if main_model(models) is models[0]:
        return (
            f"{AVERAGE}; {chosen.name}, chosen on training rows, "
            f"is no better on held-out rows: {moved}."
        )
    rows = "held-out" if prepared.test else "training"
    return f"{chosen.name}, chosen on training rows; on {rows} rows {moved}."
