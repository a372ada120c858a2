"""A fairness path: from the average model to the worst case, each point from its neighbour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from scaffpd.errors import InputError
from scaffpd.objectives import Average, Objective
from scaffpd.pipeline.columns import Ready
from scaffpd.pipeline.models import Contest, Contests, Trained, main_model
from scaffpd.pipeline.prepared import Prepared
from scaffpd.pipeline.sites import Encoding
from scaffpd.program.prepare import Source
from scaffpd.report.record import PathRecord
from scaffpd.settings.run import RunConfig
from scaffpd.study.newcomers import Newcomers, candidates, newcomers
from scaffpd.study.path import WALKABLE, grid, knee
from scaffpd.study.verdict import AVERAGE
from scaffpd.training.cohort import Cohort
from scaffpd.training.metrics import Spread


def walkable(config: RunConfig) -> None:
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


def walk(config: RunConfig, prepared: Prepared, ready: Ready) -> Contests:
    """Go along a grid of objectives of the kind that the settings name, one after the other."""
    walkable(config)
    goal = config.goal
    assert goal is not None
    points: dict[str, Objective] = {AVERAGE: Average(prior=goal.prior)}

    def following(_: Encoding, models: Sequence[Trained]) -> Contest | None:
        if len(models) == 1:  # its losses set the scale of all others
            points.update(grid(goal, models[0].result.history.last_losses, config.path.points))
        if len(models) == len(points):
            return None
        name, objective = list(points.items())[len(models)]
        return Contest(
            name,
            ready.asked,
            config.method_for(objective),
            "" if models else "before",
            config.training.tol or None,
            objective.strength if type(objective) is type(goal) else None,
            follows=True,
        )

    return following


def new_sites(
    config: RunConfig,
    source: Source,
    prepared: Prepared,
    models: Sequence[Trained],
    phase: Callable[[str, float], None],
) -> Newcomers:
    """Leave every client out, and its rows out of columns, scales, pairs and strengths."""
    assert config.goal is not None

    def cohort(rows: Prepared, settle: bool = False) -> Cohort:
        device = config.training.device
        return Cohort(rows.train, rows.model, rows.names, device=device, settle=settle)

    return newcomers(
        cohort(prepared, True),
        candidates(config.goal, models[0].result.history.last_losses),
        seed=config.training.seed,
        without=lambda left: cohort(source.prepared(left=left)),
        phase=lambda share: phase("Leaving every client out", share),
    )


def suggested(models: Sequence[Trained], prepared: Prepared) -> list[Trained]:
    """Mark the knee; nothing is marked where the average is as good, on either kind of rows.

    Training rows choose it, so that held-out rows can tell what it is worth.
    """
    at = _chosen(models, prepared)
    if not knee([_spread(models[k], prepared) for k in (0, at)], prepared.task.measure.upwards):
        at = 0
    marked = list(models)
    if at:
        marked[at] = replace(marked[at], contest=replace(marked[at].contest, role="after"))
    return marked


def _chosen(models: Sequence[Trained], prepared: Prepared) -> int:
    spreads = [_spread(one, prepared, "train") for one in models]
    return knee(spreads, prepared.task.measure.upwards)


def _spread(one: Trained, prepared: Prepared, split: str = "") -> Spread:
    shown = one.scores.get(split, one.shown)
    return Spread.of(shown.names, shown.score, prepared.task.measure.upwards)


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
    before = _spread(models[0], prepared)
    after = _spread(chosen, prepared)
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
