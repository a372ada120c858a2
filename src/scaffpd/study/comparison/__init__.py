"""Many methods on one problem: tuned within the same budget, trained with what was chosen, scored on test rows.

The folder of a comparison:

about.json    the setting, the grid of every method, versions
runs.jsonl    one line per run, flushed to disk when it is done; the same call again continues after the last of them
runs.csv, clients.csv, table.csv    written when all is done
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scaffpd.algorithms import Fair
from scaffpd.errors import InputError, count
from scaffpd.files import JsonLines, make_folder, write_file
from scaffpd.machine import cores, environment
from scaffpd.study.comparison.problem import Problem, fingerprint
from scaffpd.study.comparison.runs import FINAL, REFUSED, SKIPPED, TUNE, Pool, Run, RunKey, Runner
from scaffpd.study.comparison.setting import Setting, climb, neighbours
from scaffpd.study.comparison.tables import Comparison
from scaffpd.training.loop import Algorithm
from scaffpd.training.progress import Tally

ABOUT = "about.json"
LOG = "runs.jsonl"
TABLES = ("runs.csv", "clients.csv", "table.csv")


class Journal:
    """The runs that are done, on disk where there is a folder."""

    def __init__(self, folder: str | os.PathLike[str] | None, about: dict[str, Any]) -> None:
        self.runs: dict[RunKey, Run] = {}
        self.folder = None if folder is None else Path(folder)
        self._lines = JsonLines((self.folder or Path()) / LOG, 0o666)
        if folder is not None:
            self._open(make_folder(Path(folder)), about)

    def _open(self, folder: Path, about: dict[str, Any]) -> None:
        if (folder / ABOUT).exists():
            _compare(folder, about)
            self._read()
            return
        for name in (LOG, *TABLES):
            if (folder / name).exists():
                raise InputError(
                    "folder-something-else",
                    f"The folder {str(folder)!r} has a {name} of something else; use another folder.",
                )
        note = {"setting": about, "versions": versions()}
        write_file(folder / ABOUT, f"{json.dumps(note, indent=2, ensure_ascii=False)}\n")

    def _read(self) -> None:
        try:
            self.runs = {run.job: run for run in map(Run.from_json, self._lines.read())}
        except (ValueError, KeyError, TypeError):
            log = str(self._lines.file)
            raise InputError(
                "readable-record-runs",
                f"{log!r} is not a readable record of runs; remove it to start anew.",
            ) from None

    def add(self, run: Run) -> None:
        """Add a run, on disk before anything else happens."""
        self.runs[run.job] = run
        if self.folder is not None:
            self._lines.append(run.to_json())


def _compare(folder: Path, about: dict[str, Any]) -> None:
    try:
        note = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        there = note["setting"]
        ours = versions()["scaffpd"]
        theirs = note["versions"]["scaffpd"]
        other = [name for name in about if there.get(name) != json.loads(json.dumps(about[name]))]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            "comparison-use-another",
            f"{str(folder / ABOUT)!r} is not of a comparison; use another folder.",
        ) from None
    if other:
        by = (
            ""
            if theirs == ours
            else f", written by scaffpd {theirs}, whose comparisons do not go on in {ours}"
        )
        raise InputError(
            "comparison-other-use",
            f"{str(folder)!r} has a comparison with other {' and '.join(other)}{by}; use another folder.",
        )


def versions() -> dict[str, str]:
    """Return what the numbers were computed with."""
    found = environment()
    return {name: found[name] for name in ("scaffpd", "python", "torch", "numpy")}


def compare(
    methods: Mapping[str, Algorithm] | Sequence[Algorithm],
    problem: Problem,
    seeds: Sequence[int] = (0,),
    rounds: int = 100,
    tune: int = 5,
    out: str | os.PathLike[str] | None = None,
    processes: int | None = None,
    progress: bool | None = None,
    validation: float = 0.25,
    select: str = "worst_20",
    strengths: bool = False,
    choosing: int | None = None,
    climb: bool = False,
) -> Comparison:
    """Run every method on the same rows, from the same start, for the same number of rounds.

    Rates are chosen for each seed by itself, on validation rows that are taken out of the clients' training rows: no
    test row takes part (a choice shared between seeds would see other seeds' test rows). The method is then trained on
    all training rows, with the chosen factors on the automatic rates, and scored on the test rows. How many local
    steps, samples and exchanges a round of each method takes is up to the caller, and is in the table.

    Args:
        methods: a mapping from labels to methods, or a list.
        problem: data and model.
        seeds: for each, a partition (where the data is a function), a training seed and a choice of rates.
        rounds: communication rounds of every run.
        tune: configurations that every method may try (see `scaffpd.study.comparison.setting`); 1 takes the automatic rates.
        out: a folder for the results. The same call again goes on where it stopped.
        processes: how many runs at a time; by default one per core, and one on a GPU. The numbers are the same.
        progress: show a progress bar; by default where standard error is a terminal.
        validation: the share of every client's training rows to choose rates by, of every label alike.
        select: choose by this measure of accuracy over clients, "worst_20", "worst" or "mean"; ties by the mean, then
            by the same measure of the loss (which regression chooses by in the first place).
        strengths: whether the budget may also go to how fair a method is: ρ of its objective, q, θ, μ. Otherwise they
            stay as given.
        choosing: how many of the seeds choose, by the mean of their measures, for all of them; by default each for
            itself. Only where all seeds have the same test rows and the same training rows, partitioned differently.
        climb: whether to go on from the best configuration to its untried neighbours, with as large a budget again.
    """
    setting = _settled(
        Setting(
            methods, problem, seeds, rounds, tune, validation, select, strengths, choosing, climb
        )
    )
    alone = (
        cores() if setting.problem.device == "cpu" else 1
    )  # processes would not share a device's memory
    workers = alone if processes is None else count("compare", "processes", processes)
    journal = Journal(out, setting.about() | {"data": _checked_data(setting)})
    tuning = _tuning(setting)
    carry_out = Runner(setting).carry_out
    total = len(tuning) + len(_labels(setting))
    with Pool(carry_out, workers, setting.problem.name) as pool, Tally(progress, total) as tally:
        _work(pool, tuning, journal, tally)
        while further := _further(setting, journal, tuning):
            tally.expect(len(further))
            _work(pool, further, journal, tally)
            tuning += further
        finals = [_final(setting, journal, label, seed) for seed, label in _labels(setting)]
        for run in (item for item in finals if isinstance(item, Run)):
            journal.runs[run.job] = run
            tally.advance(run.job.method)
        _work(pool, [item for item in finals if isinstance(item, RunKey)], journal, tally)
    order = [*tuning, *(item.job if isinstance(item, Run) else item for item in finals)]
    comparison = Comparison(setting, tuple(journal.runs[job] for job in order))
    if journal.folder is not None:
        comparison.to_csv(journal.folder)
    return comparison


def _settled(setting: Setting) -> Setting:
    """Replace `fair` by the method it chooses for this problem, so that tables have its J and its batch."""
    open_ = {label: method for label, method in setting.methods.items() if isinstance(method, Fair)}
    if not open_:
        return setting
    cohort = setting.problem.cohort(setting.seeds[0])
    return replace(
        setting, methods=setting.methods | {label: m.choice(cohort) for label, m in open_.items()}
    )


def _checked_data(setting: Setting) -> list[str]:
    """Bind every seed's rows once, so that mistakes are reported before any work; return their fingerprints."""
    prints = []
    for seed in setting.seeds:
        cohort = setting.problem.cohort(seed)
        prints.append(fingerprint(setting.problem, cohort, seed))
        if seed in setting.choosers and _tuning(setting):
            setting.problem.rehearsal(seed, setting.validation)
    return prints


def _labels(setting: Setting) -> list[tuple[int, str]]:
    return [(seed, label) for seed in setting.seeds for label in setting.methods]


def _tuning(setting: Setting) -> list[RunKey]:
    """Return all runs that choose rates; a method with a single configuration needs none."""
    return [
        RunKey(label, seed, TUNE, point)
        for seed, label in _labels(setting)
        if seed in setting.choosers and len(setting.grid(label)) > 1
        for point in range(len(setting.grid(label)))
    ]


def _work(pool: Pool, jobs: Sequence[RunKey], journal: Journal, tally: Tally) -> None:
    missing = [job for job in jobs if job not in journal.runs]
    tally.advance("resuming" if len(missing) < len(jobs) else "starting", len(jobs) - len(missing))
    for run in pool.work(missing):
        journal.add(run)
        tally.advance(run.job.method)


def _choosers(setting: Setting, seed: int) -> tuple[int, ...]:
    return (seed,) if setting.choosing is None else setting.choosers


def _tried(setting: Setting, journal: Journal, label: str, seed: int) -> dict[int, list[Run]]:
    """Return the tuning runs of one method that a seed's choice is made from, by configuration."""
    table: dict[int, list[Run]] = {}
    for point in range(len(setting.lattice[label])):
        jobs = [RunKey(label, s, TUNE, point) for s in _choosers(setting, seed)]
        if all(job in journal.runs for job in jobs):
            table[point] = [journal.runs[job] for job in jobs]
    return table


def _climbed(
    setting: Setting, journal: Journal, label: str, seed: int
) -> tuple[int | None, list[int]]:
    """Return the configuration with the best mean measure over seeds, and its neighbours where climbing goes on."""
    merits: dict[int, Any] = {}
    for point, runs in _tried(setting, journal, label, seed).items():
        found: list[Any] = [run.merit(setting.select) for run in runs]
        merits[point] = None if None in found else tuple(np.mean(found, axis=0).tolist())
    most = 2 * setting.tune if setting.climb else 0
    return climb(merits, partial(neighbours, setting.lattice[label]), most)


def _further(setting: Setting, journal: Journal, done: Sequence[RunKey]) -> list[RunKey]:
    """Return what climbing tries next: the untried neighbours of every method's best, within its second budget."""
    jobs: list[RunKey] = []
    for label in dict.fromkeys(job.method for job in done):
        for seed in setting.choosers if setting.choosing is None else setting.choosers[:1]:
            _, near = _climbed(setting, journal, label, seed)
            jobs += [
                RunKey(label, s, TUNE, point) for point in near for s in _choosers(setting, seed)
            ]
    return jobs


def _final(setting: Setting, journal: Journal, label: str, seed: int) -> RunKey | Run:
    """Return the final run with the best configuration; where none survived, say why."""
    if len(setting.grid(label)) == 1:
        return RunKey(label, seed, FINAL, 0)
    best, _ = _climbed(setting, journal, label, seed)
    if best is not None:
        return RunKey(label, seed, FINAL, best)
    table = _tried(setting, journal, label, seed)
    refusals = [run.message for runs in table.values() for run in runs if run.status == REFUSED]
    reason = (
        refusals[0] if refusals else f"It diverged with each of its {len(table)} configurations."
    )
    return Run(RunKey(label, seed, FINAL, 0), {}, {}, SKIPPED, reason)


__all__ = ["Comparison", "Problem", "compare"]
