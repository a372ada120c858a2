"""A fairness path: from the average model to the worst case, each point from where the last one ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from scaffpd.errors import InputError
from scaffpd.objectives import Average, Objective
from scaffpd.run.prepare import Prepared
from scaffpd.run.settings.run import RunConfig
from scaffpd.run.train import AVERAGE, Scorer, Trained, Watcher, judged, main_model, trained
from scaffpd.study.path import WALKABLE, WarmStart, grid
from scaffpd.training.cohort import Cohort
from scaffpd.training.loop import Callback, train
from scaffpd.training.metrics import Spread, spread

LEAST = 0.002  # of a share (0.2 points of accuracy) or of an error: less is no reason to leave the average


def knee(points: Sequence[Spread], upwards: bool) -> int:
    """Return the point with the largest gain − cost; 0, the average model, where that is hardly anything.

    Gain is that of the worst 20 %, cost that of the mean, both against the first point: a point of the worst-served
    fifth counts as much as a point of the mean. A mean that rises is no cost, and no reason either.
    """
    sign = 1.0 if upwards else -1.0
    mean, worst = (
        sign * np.array([getattr(p, name) for p in points]) for name in ("mean", "worst_20")
    )
    score = worst - worst[0] - np.maximum(mean[0] - mean, 0.0)
    least = LEAST * (1.0 if upwards else abs(float(worst[0])))
    return 0 if score.max() <= least else int(np.flatnonzero(score >= score.max() - 1e-12)[0])


def walk(config: RunConfig, prepared: Prepared, cohort: Cohort, watcher: Watcher) -> list[Trained]:
    """Train a grid of objectives of the kind that the settings name, each from where the last one ended."""
    walkable(config)
    assert config.goal is not None
    settings = config.training
    prior = config.goal.prior
    models = list[Trained]()
    start = WarmStart()
    tol = settings.tol or None
    points = {AVERAGE: cast(Objective, Average(prior=prior))}
    while len(models) < len(points):
        name, objective = list(points.items())[len(models)]
        algorithm = config.method_for(objective)
        scorer = Scorer(prepared, cohort)
        watcher.begin(name, cohort.names, settings.rounds, tol)
        callbacks: list[Callback] = [scorer, watcher.show]
        result = start.train(
            algorithm, cohort, settings.rounds, tol, settings.seed, False, callbacks
        ).uninterrupted()
        strength = objective.strength if type(objective) is type(config.goal) else None
        role = "" if models else "before"
        models.append(trained(name, role, algorithm, result, prepared, cohort, scorer, strength))
        if name == AVERAGE:  # its losses set the scale of all others
            points = grid(config.goal, result.history.last_losses, config.path.points)
    return suggested(models, prepared)


def walkable(config: RunConfig) -> None:
    """Refuse settings that no path goes along."""
    if config.privacy is not None:
        raise InputError(
            "fairness-path-trains",
            "A fairness path trains many models, which would share one ε: train a single one privately.",
        )
    if config.goal is None or config.goal.strengths is None:
        kind = type(config.method if config.goal is None else config.goal).__name__
        raise InputError(
            "fairness-path-goes",
            f"A fairness path goes along {', '.join(WALKABLE)}, not along {kind}.",
        )


def suggested(models: Sequence[Trained], prepared: Prepared) -> list[Trained]:
    """Mark the knee; nothing is marked where the average is as good, on training rows or on those held out.

    Training rows choose it, so that held-out rows can tell what it is worth.
    """
    at = _chosen(models, prepared)
    upwards = prepared.measure == "accuracy"
    at = at if knee([models[k].spread(prepared) for k in (0, at)], upwards) else 0
    marked = [
        replace(one, role="after") if k == at and k > 0 else one for k, one in enumerate(models)
    ]
    return judged(marked, prepared)


def _chosen(models: Sequence[Trained], prepared: Prepared) -> int:
    upwards = prepared.measure == "accuracy"
    return knee([spread(one.train, one.train.accuracy, upwards) for one in models], upwards)


def reason(models: Sequence[Trained], prepared: Prepared) -> str:
    """Say what the suggested point brings, and what it costs."""
    chosen = models[_chosen(models, prepared)]
    rows = "held-out" if prepared.test else "training"
    if chosen is models[0]:
        return f"{AVERAGE}; on training rows no point gives the worst-served fifth more than it takes from the mean."
    before, after = (one.spread(prepared) for one in (models[0], chosen))
    gains = [getattr(after, name) - getattr(before, name) for name in ("worst_20", "mean")]
    accuracy = prepared.measure == "accuracy"
    texts = [
        f"{100 * gain * (1 + 1e-9):+.1f} points" if accuracy else f"{gain:+.3g} in error"
        for gain in gains
    ]
    worst, mean = (text.replace("-", "−") for text in texts)
    moved = f"{worst} for the worst-served fifth, {mean} for the mean"
    if main_model(models) is models[0]:
        return f"{AVERAGE}; {chosen.name}, chosen on training rows, is no better on held-out rows: {moved}."
    return f"{chosen.name}, chosen on training rows; on {rows} rows {moved}."


def cold_rounds(config: RunConfig, cohort: Cohort, models: Sequence[Trained]) -> int:
    """Count the rounds that the same points take when each is trained on its own."""
    settings = config.training
    total = 0
    for one in models:
        assert one.objective is not None
        algorithm = config.method_for(one.objective)
        result = train(
            algorithm, cohort, settings.rounds, settings.tol or None, settings.seed, progress=False
        )
        total += result.uninterrupted().rounds
    return total


def about(
    config: RunConfig, prepared: Prepared, models: Sequence[Trained], alone: int | None
) -> dict[str, Any]:
    """Describe the path for `summary.json`."""
    goal: Any = config.goal
    return {
        "parameter": goal.parameter,
        "symbol": goal.symbol or goal.parameter,
        "objective": type(goal).__name__,
        "average": AVERAGE,
        "knee": main_model(models).name,
        "why": reason(models, prepared),
        "rounds_warm": sum(one.result.rounds for one in models),
        "rounds_cold": alone,
    }
