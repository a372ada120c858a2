"""Several runs on the same clients, read as one: a model per run, what differs between them, and who is best for whom.

Runs that hold out the same rows are compared row by row, with intervals; others are set side by side without.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.numbers import NOTHING, several
from scaffpd.run.page import read
from scaffpd.run.page.data import ModelSummary, PredictionReport, ReportData, brief
from scaffpd.training.metrics import (
    NO,
    NOISE,
    YES,
    HeldOutMoments,
    RelativeGain,
    disagree,
    every,
    worst_fifth,
)

HELD_OUT = "held_out.npz"
UNTOLD = (
    "name",
    "folder",
    "data.file",
    "data.beside",
)  # settings that say where a run is, not what it does
KINDS = ("train", "path", "demo")


@dataclass(frozen=True)
class OneRun:
    """A run, and the model that it is about."""

    label: str
    folder: Path
    data: ReportData
    main: ModelSummary

    @property
    def settings(self) -> dict[str, str]:
        """All settings by name, as text."""
        text = dict(self.data.files).get("config.toml", "")
        try:
            return {key: value for key, value in _flat(tomllib.loads(text)) if key not in UNTOLD}
        except tomllib.TOMLDecodeError:
            return {}


@dataclass(frozen=True)
class Paired:
    """Losses and errors of all runs on the same rows."""

    losses: HeldOutMoments
    wrong: list[NDArray[Any]] | None  # of labels: (runs × rows) per client

    def gain(self, a: int, b: int, of: Any) -> RelativeGain:
        """Return how much lower the loss of run b is than that of run a."""
        return RelativeGain.of(self.losses.difference(a, b, of))

    def client(self, a: int, b: int, i: int) -> RelativeGain:
        """Return the same for one client."""
        return self.gain(a, b, lambda losses: np.eye(len(losses))[i])

    def clear(self, a: int, b: int, i: int) -> bool:
        """Tell whether a client's change from run a to b is clear of noise: McNemar's test of labels, else the loss."""
        wrong = self.wrong[i] if self.wrong else None
        return (
            self.client(a, b, i).pays != NOISE
            if wrong is None
            else disagree(wrong[a] == 0, wrong[b] == 0)
        )


def read_several(folders: Sequence[Path]) -> ReportData:
    """Read runs on the same clients as one report with a model per run, or refuse them with one sentence."""
    runs = _opened(folders)
    first = runs[0].data
    clients = runs[0].data.clients
    for one in runs[1:]:
        _comparable(runs[0], one)
    known = {
        one.label: {s.client: replace(s, clear=None) for s in one.data.scores[one.main.name]}
        for one in runs
    }
    scores = {label: tuple(own[client] for client in clients) for label, own in known.items()}
    totals = {one.label: one.data.overall[one.main.name] for one in runs}
    order = [one.label for one in runs]
    paired = _paired(runs)
    before = next((one.label for one in runs if one.main.objective.startswith("Average")), order[0])
    others = [label for label in order if label != before]
    a = order.index(before)
    gains: dict[str, list[RelativeGain]] = {}
    for b, label in enumerate(order):
        if paired is not None and label != before:
            gains[label] = [paired.gain(a, b, of) for of in (every, worst_fifth)]
            clear = [paired.clear(a, b, i) for i in range(len(clients))]
            scores[label] = tuple(
                replace(s, clear=own) for s, own in zip(scores[label], clear, strict=True)
            )
    after = max(
        others, key=lambda label: _merit(gains.get(label), first.sign * totals[label].worst_20)
    )
    roles = {before: "before", after: "after"}
    models = tuple(replace(one.main, name=one.label, role=roles.get(one.label, "")) for one in runs)
    made = ReportData(
        kind="runs",
        title=f"{len(runs)} runs on {several(len(clients), first.word)}",
        command="",
        measure=first.measure,
        split=first.split,
        word=first.word,
        models=models,
        scores=scores,
        overall=totals,
        rounds=tuple(
            replace(r, model=one.label)
            for one in runs
            for r in one.data.rounds
            if r.model == one.main.name
        ),
        partition=first.partition,
        settings=tuple((one.label, str(one.folder)) for one in runs),
        files=tuple(
            (f"{one.label}: config.toml", dict(one.data.files).get("config.toml", ""))
            for one in runs
        ),
        differences=_differences(runs),
        against={label: f"{own[0].words} ({own[0].range})" for label, own in gains.items()},
        predictions=_predictions(runs, first),
    )
    advice = {} if paired is None else _advice(made, paired, before, after)
    return replace(made, answers=advice, remarks=(_best(made), *_remarks(runs, paired)))


def _advice(run: ReportData, paired: Paired, before: str, after: str) -> dict[str, str]:
    """Say which run to take and whom that costs, by losses on the same held-out rows."""
    a = run.names.index(before)
    b = run.names.index(after)
    old = f"“{brief(before)}”"
    new = f"“{brief(after)}”"
    mean, fifth = (paired.gain(a, b, of) for of in (every, worst_fifth))
    of, gain = ("mean loss", mean) if mean.pays == YES else (f"loss for the {run.bottom}", fifth)
    use = f"Use {new}: its {of} on held-out rows is {gain.words} ({gain.range})."
    do = use if _merit([mean, fifth], 0.0)[0] else f"Keep {old}: no other run is clearly better."
    lose = [
        brief(client) for i, client in enumerate(run.clients) if paired.client(a, b, i).pays == NO
    ]
    cost = f"{', '.join(lose[:4])}{' and others' * (len(lose) > 4)}: clearly higher losses with {new} than with {old}."
    return {
        "do": do,
        "cost": cost if lose else f"Nobody: no {run.word} has a clearly higher loss with {new}.",
    }


def _merit(gains: list[RelativeGain] | None, worst: float) -> tuple[bool, float]:
    """Rank a run: first whether its losses are clearly lower, then by how much, else by the worst-served fifth."""
    clearly = gains is not None and {gain.pays for gain in gains} in ({YES}, {YES, NOISE})
    return clearly, sum(gain.value for gain in gains or ()) if clearly else worst


def _opened(folders: Sequence[Path]) -> list[OneRun]:
    """Read every folder, named as shortly as tells them apart."""
    if len(set(map(Path.resolve, folders))) < len(folders):
        raise InputError("run-named-twice", "A run is named twice: name each folder once.")
    names = [folder.resolve().name for folder in folders]
    runs = []
    for folder, name in zip(folders, names, strict=True):
        found = read.read(folder)
        if found.kind not in KINDS or not found.overall:
            raise InputError(
                "finished-run-train",
                f"{str(folder)!r} is no finished run of train or path: only these are put side by side.",
            )
        main = found.role("after") or found.role("before") or found.names[-1]
        label = name if names.count(name) == 1 else str(folder)
        runs.append(OneRun(label, folder, found, found.models[found.names.index(main)]))
    return runs


def _comparable(a: OneRun, b: OneRun) -> None:
    """Refuse runs on other clients, of another target, or scored by something else."""
    pair = f"{str(a.folder)!r} and {str(b.folder)!r}"
    if set(a.data.clients) != set(b.data.clients):
        raise InputError(
            "about-other-clients",
            f"{pair} are about other clients: only runs on the same table can stand side by side.",
        )
    scored = [
        f"{one.data.measure} on {'held-out' if one.data.split == 'test' else 'training'} rows"
        for one in (a, b)
    ]
    if scored[0] != scored[1]:
        raise InputError("scored-alike", f"{pair} are not scored alike: {' and '.join(scored)}.")
    target, other = (one.settings.get("data.target", "") for one in (a, b))
    if target != other:
        raise InputError("other-targets", f"{pair} have other targets: {target!r} and {other!r}.")


def _paired(runs: Sequence[OneRun]) -> Paired | None:
    """Read losses of single rows, where all runs have held out the same; `None` elsewhere."""
    losses = []
    wrong = []
    counts = None
    rows = set()
    for one in runs:
        try:
            with np.load(one.folder / HELD_OUT, allow_pickle=False) as file:
                losses.append(file[f"loss {one.main.name}"] * float(file["unit"]) ** 2)
                wrong += (
                    [file[f"wrong {one.main.name}"]] if f"wrong {one.main.name}" in file else []
                )
                counts = file["counts"]
                rows.add((str(file["rows"]), one.data.clients))
        except (OSError, KeyError, ValueError):
            return None
    if len(rows) > 1 or counts is None:
        return None
    ends = np.cumsum([0, *counts])
    parts = [np.stack([loss[start:end] for loss in losses]) for start, end in pairwise(ends)]
    hits = (
        [np.stack([own[start:end] for own in wrong]) for start, end in pairwise(ends)]
        if wrong
        else None
    )
    return Paired(HeldOutMoments.of(parts), hits)


def _flat(values: Mapping[str, Any], start: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in values.items():
        found += (
            _flat(value, f"{start}{key}.")
            if isinstance(value, dict)
            else [(f"{start}{key}", f"{value}")]
        )
    return found


def _differences(runs: Sequence[OneRun]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the settings that are not the same in all runs, with that of each."""
    known = [one.settings for one in runs]
    names = dict.fromkeys(name for own in known for name in own)
    found = [(name, tuple(own.get(name, NOTHING) for own in known)) for name in names]
    return tuple((name, values) for name, values in found if len(set(values)) > 1)


def _remarks(runs: Sequence[OneRun], paired: Paired | None) -> tuple[str, ...]:
    data = list(dict.fromkeys(dict(one.data.settings).get("Data", "") for one in runs))
    said = [f"The runs read different tables: {'; '.join(data)}."] if len(data) > 1 else []
    if paired is None and runs[0].data.split == "test":
        said.append(
            "The runs have held out different rows, or do not say which: hold out the same in all of them (the same "
            "table, --seed and --test) to see which differences are clear of noise."
        )
    return tuple(said)


def _predictions(runs: Sequence[OneRun], first: ReportData) -> PredictionReport | None:
    """Put the scores of every run's model together, under the run's name."""
    known = {one.label: (one.data.predictions, one.main.name) for one in runs}
    if any(found is None or model not in found.models for found, model in known.values()):
        return None
    scores = dict[Any, Any]()
    bins = list[Any]()
    columns = dict[Any, dict[str, Any]]()
    for label, (found, model) in known.items():
        assert found is not None
        scores |= {
            (label, by, group): row for (m, by, group), row in found.scores.items() if m == model
        }
        bins += [{**row, "model": label} for row in found.bins if row["model"] == model]
        for row in found.coefficients:
            if model in row:
                start = {"column": row["column"], "label": row.get("label", "")}
                columns.setdefault((row["column"], row.get("label", "")), start)[label] = row[model]
    common = set.intersection(
        *({key[1:] for key in scores if key[0] == one.label} for one in runs)
    )  # scored by all
    whole = [row for row in columns.values() if all(one.label in row for one in runs)]
    kept = {key: row for key, row in scores.items() if key[1:] in common}
    return PredictionReport(kept, bins, whole, first.predictions.label if first.predictions else "")


def _best(run: ReportData) -> str:
    """Say which run is best at how many clients."""
    values = {
        label: [run.sign * (s.value or 0.0) for s in scores] for label, scores in run.scores.items()
    }
    top = [max(values, key=lambda label: values[label][i]) for i in range(len(run.clients))]
    wins = sorted({(-top.count(label), label) for label in top})
    said = ", ".join(f"“{brief(label)}” at {-n}" for n, label in wins)
    return f"By {run.measure} alone, the best is {said} of {several(len(top), run.word)}."
