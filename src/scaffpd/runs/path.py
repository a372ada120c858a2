"""A fairness path: from the average model to the worst case, each point from where the last one ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, cast

from scaffpd.cohort import Cohort
from scaffpd.errors import InputError
from scaffpd.fairness_path import SYMBOLS, along, grid
from scaffpd.objectives import Average, Objective
from scaffpd.runs.config import RunConfig
from scaffpd.runs.knee import Knee, knee
from scaffpd.runs.prepared import Prepared
from scaffpd.runs.train import AVERAGE, Watcher
from scaffpd.runs.trained import Scorer, Trained, trained
from scaffpd.training import Callback, Result, Status, train

PARAMETERS = {"ChiSquare": "rho", "Tilted": "rho", "ChiSquareBall": "delta", "CVaR": "alpha", "QFair": "q"}


def walk(config: RunConfig, prepared: Prepared, cohort: Cohort, points: int, watcher: Watcher) -> list[Trained]:
    """Train a grid of objectives of the kind that the settings name."""
    walkable(config)
    kind = type(config.objective).__name__
    walker, settings = _Walker(config, prepared, cohort, watcher), config.training
    for result in along(
        walker.objectives(kind, points), cohort, settings.rounds, settings.tol or None, settings.seed,
        lambda objective: made(config, objective), False, walker.watching, True,
    ):  # fmt: skip
        walker.arrive(result)
    return suggested(walker.models, prepared)


def walkable(config: RunConfig) -> None:
    """Refuse what no path goes along."""
    kind = type(config.algorithm if config.objective is None else config.objective).__name__
    if kind not in SYMBOLS:
        raise InputError(f"A fairness path goes along {', '.join(SYMBOLS)}, not along {kind}.")


def made(config: RunConfig, objective: Objective) -> Any:
    """The algorithm of the settings, for another objective."""
    if not is_dataclass(config.algorithm):
        raise InputError("A fairness path needs an algorithm that is given an objective.")
    return replace(config.algorithm, objective=objective)  # type: ignore[type-var]


class _Walker:
    """Where a path has come to."""

    def __init__(self, config: RunConfig, prepared: Prepared, cohort: Cohort, watcher: Watcher) -> None:
        self.config, self.prepared, self.cohort, self.watcher = config, prepared, cohort, watcher
        self.models: list[Trained] = []
        self.name, self.objective = AVERAGE, cast(Objective, Average())
        self.scorer = Scorer(prepared, self.cohort)

    def objectives(self, kind: str, points: int) -> Iterator[Objective]:
        """The average, and then what its losses suggest."""
        yield self.objective
        losses = self.models[0].result.history.losses[-1]
        for self.name, self.objective in list(grid(kind, losses, points).items())[1:]:
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
        algorithm, role = made(self.config, self.objective), "" if self.models else "before"
        about = (self.prepared, self.cohort, self.scorer, strength)
        self.models.append(trained(self.name, role, algorithm, result, *about))


def suggested(models: Sequence[Trained], prepared: Prepared) -> list[Trained]:
    """The same, with the knee marked; the average itself where nothing is better."""
    at = best(models, prepared).index
    return [replace(one, role="after") if k == at and k > 0 else one for k, one in enumerate(models)]


def best(models: Sequence[Trained], prepared: Prepared) -> Knee:
    """The knee of a path."""
    return knee([one.spread(prepared) for one in models], prepared.measure == "accuracy")


def reason(models: Sequence[Trained], prepared: Prepared) -> str:
    """Why that point is suggested."""
    found = best(models, prepared)
    if found.index == 0:
        return "No point of the path serves the worst-served fifth clearly better than the average model does."
    name = models[found.index].name
    if prepared.measure == "accuracy":
        gain, cost = f"{100 * found.gain:.1f} points", f"{100 * found.cost:.1f} points"
    else:
        gain, cost = f"{found.gain:.4g} less error", f"{found.cost:.4g}"
    if found.cost <= 0:
        return f"{name}: the worst-served fifth gains {gain}, and the mean gives up nothing."
    return f"{name}: the worst-served fifth gains {gain} for {cost} of the mean; beyond it, fairness costs more."


def cold_rounds(config: RunConfig, cohort: Cohort, models: Sequence[Trained]) -> int:
    """How many rounds the same points take when each is trained on its own."""
    settings, total = config.training, 0
    for one in models:
        assert one.objective is not None
        algorithm = made(config, one.objective)
        total += train(algorithm, cohort, settings.rounds, settings.tol or None, settings.seed, progress=False).rounds
    return total


def about(config: RunConfig, prepared: Prepared, models: Sequence[Trained], alone: int | None) -> dict[str, Any]:
    """The path in `summary.json`."""
    kind = type(config.objective).__name__
    return {
        "parameter": PARAMETERS[kind], "symbol": SYMBOLS[kind], "objective": kind, "average": AVERAGE,
        "knee": models[best(models, prepared).index].name, "why": reason(models, prepared),
        "rounds_warm": sum(one.result.rounds for one in models), "rounds_cold": alone,
    }  # fmt: skip
