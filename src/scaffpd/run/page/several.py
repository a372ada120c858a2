"""Several runs on the same clients, side by side: one record with a model per run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scaffpd.errors import InputError
from scaffpd.numbers import brief, measured, several
from scaffpd.run.record import RunRecord, is_run, runs_below


def read_runs(folders: Sequence[Path]) -> list[tuple[Path, RunRecord]]:
    """Read the runs that are named, or all of those in one folder that is itself no run."""
    places = list(folders)
    if len(places) == 1 and not is_run(places[0]):
        places = runs_below(places[0]) or places
    return [(place, RunRecord.read(place)) for place in places]


def side_by_side(runs: Sequence[tuple[Path, RunRecord]]) -> RunRecord:
    """Put the main models of runs on the same clients side by side, or refuse with a sentence."""
    folder, first = runs[0]
    for place, run in runs:
        if run.kind not in ("train", "path", "demo") or run.main.overall is None:
            raise InputError(
                "not-comparable",
                f"{str(place)!r} is no finished run of train or path: "
                "only those can be put side by side.",
            )
        if _about(run) != _about(first):
            raise InputError(
                "runs-differ",
                f"{str(folder)!r} and {str(place)!r} differ in their clients, their target or "
                "their measure: only runs that share them can be put side by side.",
            )
    names = [place.resolve().name for place, _ in runs]
    labels = [
        name if names.count(name) == 1 else str(place)
        for name, (place, _) in zip(names, runs, strict=True)
    ]
    if len(set(labels)) < len(labels):
        raise InputError("run-named-twice", "A run is named twice: name each folder once.")
    models = [
        run.main.model_copy(update={"name": label, "role": "", "history": []})
        for label, (_, run) in zip(labels, runs, strict=True)
    ]
    found = RunRecord(
        kind="runs",
        title=f"{len(runs)} runs on {several(len(first.clients), first.word)}",
        measure=first.measure,
        split=first.split,
        word=first.word,
        labels=first.labels,
        clients=first.clients,
        models=models,
        remarks=["Every run is scored on its own held-out rows; differences are not tested."],
        settings={label: str(place) for label, (place, _) in zip(labels, runs, strict=True)},
    )
    return found.model_copy(update={"verdict": [_best(found)]})


def _about(run: RunRecord) -> tuple[object, ...]:
    target = run.reading.target if run.reading else ""
    return {*run.clients}, run.measure, run.split, target


def _best(run: RunRecord) -> str:
    """Name the run that serves the worst-served fifth best, and the one with the best mean."""
    parts = []
    for field, what in (("worst_20", run.bottom), ("mean", "mean")):
        best = max(run.models, key=lambda m: run.sign * float(getattr(m.overall, field)))
        score = measured(getattr(best.overall, field), run.measure)
        parts.append(f"the {what} is best with “{brief(best.name)}”: {score}")
    return f"On {run.scored_rows}, {'; '.join(parts)}."
