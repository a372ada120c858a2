"""Several runs on the same clients, side by side: a model per run, and which to take.

Runs that hold out the same rows are compared row by row, with intervals; others without.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from scaffpd.errors import InputError
from scaffpd.numbers import NOTHING, brief, several
from scaffpd.run.record import ModelRecord, RunRecord
from scaffpd.training.metrics import (
    NO,
    NOISE,
    YES,
    HeldOutMoments,
    RelativeGain,
    every,
    worst_fifth,
)

HELD_OUT = "held_out.npz"
# settings that say where a run is, not what it does
IGNORED_KEYS = ("name", "folder", "data.file", "data.beside")


@dataclass(frozen=True)
class SideBySide:
    """Several runs as one record with a model per run, and what differs between them."""

    run: RunRecord
    differences: dict[str, list[str]] = field(default_factory=dict)  # setting → that of each run
    # by run: its mean loss against that of the run before
    against: dict[str, str] = field(default_factory=dict)


def _client(rows: HeldOutMoments, a: int, b: int, i: int) -> RelativeGain:
    """Return how much lower the loss of run b is than that of run a at one client."""
    return RelativeGain.of(rows.difference(a, b, lambda losses: np.eye(len(losses))[i]))


def side_by_side(runs: Sequence[tuple[Path, RunRecord]]) -> SideBySide:
    """Put runs on the same clients side by side, or refuse them with one sentence."""
    if len({folder.resolve() for folder, _ in runs}) < len(runs):
        raise InputError("run-named-twice", "A run is named twice: name each folder once.")
    for one in runs:
        _comparable(runs[0], one)
    first = runs[0][1]
    names = [folder.resolve().name for folder, _ in runs]
    labels = [
        name if names.count(name) == 1 else str(folder)
        for name, (folder, _) in zip(names, runs, strict=True)
    ]
    mains = [run.main for _, run in runs]
    a = next((k for k, m in enumerate(mains) if m.objective.startswith("Average")), 0)
    rows = _paired(runs)
    others = [k for k in range(len(runs)) if k != a]
    gains: dict[int, list[RelativeGain]] = {}
    for k in others if rows else ():
        assert rows is not None
        gains[k] = [RelativeGain.of(rows.difference(a, k, of)) for of in (every, worst_fifth)]
    b = max(others, key=lambda k: _merit(gains.get(k), first.sign * _worst(mains[k])))
    models = []
    for k, (label, main) in enumerate(zip(labels, mains, strict=True)):
        changes: dict[str, object] = {"name": label}
        changes["role"] = "before" if k == a else "after" if k == b else ""
        known = main.by_client
        changes["clients"] = [
            known[client].model_copy(
                update={"clear": _client(rows, a, k, i).pays != NOISE if rows and k != a else None}
            )
            for i, client in enumerate(first.clients)
        ]
        models.append(main.model_copy(update=changes))
    pair = labels[a], labels[b]
    run = RunRecord(
        kind="runs",
        title=f"{len(runs)} runs on {several(len(first.clients), first.word)}",
        measure=first.measure,
        split=first.split,
        word=first.word,
        labels=first.labels,
        clients=first.clients,
        models=models,
        answers={} if rows is None else _advice(first, rows, (a, b), pair, gains[b]),
        remarks=_remarks(runs, rows),
        settings={label: str(folder) for label, (folder, _) in zip(labels, runs, strict=True)},
        scores=[
            row.model_copy(update={"model": label})
            for label, main, (_, run) in zip(labels, mains, runs, strict=True)
            for row in run.scores
            if row.model == main.name
        ],
    )
    against = {labels[k]: f"{own[0].words} ({own[0].range})" for k, own in gains.items()}
    return SideBySide(run, _differences([own.config for _, own in runs]), against)


def _comparable(first: tuple[Path, RunRecord], other: tuple[Path, RunRecord]) -> None:
    """Refuse runs without scores, on other clients, of another target, or of another measure."""
    folder, run = other
    if run.kind not in ("train", "path", "demo") or run.main.overall is None:
        raise InputError(
            "not-comparable",
            f"{str(folder)!r} is no finished run of train or path: "
            "only these are put side by side.",
        )
    pair = f"{str(first[0])!r} and {str(folder)!r}"
    a, b = first[1], run
    if set(a.clients) != set(b.clients):
        raise InputError(
            "other-clients",
            f"{pair} are about other clients: only runs on the same table can stand side by side.",
        )
    scored = [
        f"{one.measure} on {'held-out' if one.split == 'test' else 'training'} rows"
        for one in (a, b)
    ]
    if scored[0] != scored[1]:
        raise InputError("other-measures", f"{pair} are not scored alike: {' and '.join(scored)}.")
    targets = [one.reading.target if one.reading else "" for one in (a, b)]
    if targets[0] != targets[1]:
        raise InputError(
            "other-targets", f"{pair} have other targets: {targets[0]!r} and {targets[1]!r}."
        )


def _paired(runs: Sequence[tuple[Path, RunRecord]]) -> HeldOutMoments | None:
    """Read losses of single rows, where all runs have held out the same; `None` elsewhere."""
    losses = []
    counts = np.empty(0)
    rows = set()
    for folder, run in runs:
        try:
            with np.load(folder / HELD_OUT, allow_pickle=False) as file:
                # losses are in units of the target's variance, which another split may change
                losses.append(file[f"loss {run.main.name}"] * float(file["unit"]) ** 2)
                counts = file["counts"]
                rows.add((str(file["rows"]), *run.clients))
        except (OSError, KeyError, ValueError):
            return None
    if len(rows) > 1:
        return None
    parts = pairwise(np.cumsum([0, *counts]).tolist())
    return HeldOutMoments.of([np.stack([own[start:end] for own in losses]) for start, end in parts])


def _worst(model: ModelRecord) -> float:
    assert model.overall is not None
    return model.overall.worst_20


def _merit(gains: Sequence[RelativeGain] | None, worst: float) -> tuple[bool, float]:
    """Rank a run: clearly lower losses first, by how much; else by the worst-served fifth."""
    clearly = gains is not None and {gain.pays for gain in gains} in ({YES}, {YES, NOISE})
    return clearly, sum(gain.value for gain in gains or ()) if clearly else worst


def _advice(
    run: RunRecord,
    rows: HeldOutMoments,
    places: tuple[int, int],
    names: tuple[str, str],
    gains: Sequence[RelativeGain],
) -> dict[str, str]:
    """Say which run to take and whom that costs, by losses on the same held-out rows."""
    old, new = (f"“{brief(name)}”" for name in names)
    mean, fifth = gains
    of, gain = ("mean loss", mean) if mean.pays == YES else (f"loss for the {run.bottom}", fifth)
    do = f"Keep {old}: no other run is clearly better."
    if _merit(gains, 0.0)[0]:
        do = f"Use {new}: its {of} on held-out rows is {gain.words} ({gain.range})."
    lose = [
        brief(client)
        for i, client in enumerate(run.clients)
        if _client(rows, *places, i).pays == NO
    ]
    cost = f"Nobody: no {run.word} has a clearly higher loss with {new}."
    if lose:
        more = " and others" if len(lose) > 4 else ""
        cost = f"{', '.join(lose[:4])}{more}: clearly higher losses with {new} than with {old}."
    return {"do": do, "cost": cost}


def _differences(configs: Sequence[str]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all runs, with that of each."""
    known = [dict(_flat(tomllib.loads(text))) for text in configs]
    names = dict.fromkeys(name for own in known for name in own if name not in IGNORED_KEYS)
    found = {name: [own.get(name, NOTHING) for own in known] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _flat(values: Mapping[str, object], start: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{start}{key}.")
        else:
            found.append((f"{start}{key}", str(value)))
    return found


def _remarks(runs: Sequence[tuple[Path, RunRecord]], rows: HeldOutMoments | None) -> list[str]:
    data = list(dict.fromkeys(run.settings.get("Data", "") for _, run in runs))
    found = [f"The runs read different tables: {'; '.join(data)}."] if len(data) > 1 else []
    if rows is None and runs[0][1].split == "test":
        found.append(
            "The runs have held out different rows: hold out the same in all of them (the same "
            "table, --seed and --test) to see which differences are clear of noise."
        )
    return found
