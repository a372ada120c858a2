"""Many methods on one problem: tuned with the same budget, trained, scored on test rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from scaffpd.algorithms import Algorithm, Fair
from scaffpd.errors import InputError, count
from scaffpd.machine import cores
from scaffpd.study.comparison.grid import Factors, grid
from scaffpd.study.comparison.problem import Problem
from scaffpd.study.comparison.runs import FINAL, TUNE, MethodRun, carry_out, pooled
from scaffpd.study.comparison.table import Comparison
from scaffpd.training.progress import Tally

VALIDATION = 0.25  # share of every client's training rows that rates are chosen by
Trial = tuple[str, int, list[Factors]]  # label, seed, configurations


def compare(
    methods: Mapping[str, Algorithm] | Iterable[Algorithm],
    problem: Problem,
    seeds: Sequence[int] = (0,),
    rounds: int = 100,
    tune: int = 5,
    *,
    processes: int | None = None,
    progress: bool | None = None,
    strengths: bool = False,
    choosing: int | None = None,
) -> Comparison:
    """Run every method on the same rows, from the same start, for the same number of rounds.

    Rates are chosen for each seed by itself, by the worst fifth of the clients on a quarter of the
    training rows: no test row takes part (a choice shared between seeds would see other seeds' test
    rows). The method is then trained on all training rows, with the chosen factors on the automatic
    rates, and scored on the test rows. How many local steps, samples and exchanges a round of each
    method takes is up to the caller, and is in the table.

    Args:
        methods: a mapping from labels to methods, or a list.
        problem: data and model.
        seeds: for each, a partition (where the data is a function), a training seed, a choice.
        rounds: communication rounds of every run.
        tune: configurations that every method may try (see `scaffpd.study.comparison.grid`); 1
            takes the automatic rates.
        processes: how many runs at a time; by default one per core, and one on a GPU. The numbers
            are the same.
        progress: show a progress bar; by default where standard error is a terminal.
        strengths: whether the budget may also go to how fair a method is: ρ of its objective, q, θ,
            μ. Otherwise they stay as given.
        choosing: how many of the seeds choose, by the mean of their measures, for all of them; by
            default each for itself. Only where all seeds have the same test rows.
    """
    contestants = labelled(methods)
    if not isinstance(problem, Problem):
        raise InputError("no-problem", f"compare needs a Problem(data, model), got {problem!r}.")
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError("seeds-differ", f"compare needs seeds that differ, got {seeds!r}.")
    count("compare", "rounds", rounds)
    count("compare", "tune", tune)
    cohort = problem.cohort(seeds[0])  # what is wrong with the data is said before any work
    # `fair` is compared as the method that it chooses here, so that the table has its J
    for label, method in contestants.items():
        if isinstance(method, Fair):
            contestants[label] = method.choice(cohort)
    workers = processes or (cores() if problem.device == "cpu" else 1)
    grids = {label: grid(method, tune, strengths) for label, method in contestants.items()}
    pairs = [(label, seed) for seed in seeds for label in grids]
    choosers = seeds[:choosing]
    tuning = [(n, s, grids[n]) for n, s in pairs if s in choosers and len(grids[n]) > 1]
    runs: list[MethodRun] = []
    with Tally(progress, len(tuning) + len(pairs)) as tally:

        def all_of(phase: str, trials: Sequence[Trial]) -> None:
            work = partial(_tried, contestants, problem, rounds, phase)
            for found in pooled(work, trials, workers):
                runs.extend(found)
                tally.advance(found[0].method)

        all_of(TUNE, tuning)
        finals = [
            (n, s, [_best(runs, n, choosers if choosing else [s]) or grids[n][0]]) for n, s in pairs
        ]
        all_of(FINAL, finals)
    about = (problem.name, repr(problem.model), contestants, tuple(seeds), rounds, tune, strengths)
    return Comparison(*about, tuple(runs))


def _tried(
    methods: Mapping[str, Algorithm], problem: Problem, rounds: int, phase: str, trial: Trial
) -> list[MethodRun]:
    """Carry out the runs of one method on one seed, whose rows are bound once."""
    label, seed, points = trial
    final = phase == FINAL
    cohort = problem.cohort(seed) if final else problem.rehearsal(seed, VALIDATION)
    method = methods[label]
    return [carry_out(MethodRun(label, seed, phase, f), method, cohort, rounds) for f in points]


def _best(runs: Sequence[MethodRun], label: str, seeds: Sequence[int]) -> Factors:
    """Return the configuration with the best mean measure over seeds, the first of equals.

    Nothing where all have failed, or nothing was tuned.
    """
    merits: dict[tuple[tuple[str, float], ...], list[tuple[float, ...] | None]] = {}
    for run in runs:
        if run.method == label and run.seed in seeds:
            merits.setdefault(tuple(run.factors.items()), []).append(run.merit)
    means = {
        point: tuple(np.mean([m for m in found if m is not None], axis=0).tolist())
        for point, found in merits.items()
        if None not in found
    }
    best = max(means, key=means.__getitem__, default=())
    return dict(best)


def labelled(methods: Mapping[str, Algorithm] | Iterable[Algorithm]) -> dict[str, Algorithm]:
    """Return methods by label; of a list, the class, with all settings where two share one."""
    if isinstance(methods, Mapping):
        table = {str(label): method for label, method in methods.items()}
    else:
        listed = list(methods)
        kinds = [type(m).__name__ for m in listed]
        names = [k if kinds.count(k) == 1 else repr(m) for k, m in zip(kinds, listed, strict=True)]
        table = dict(zip(names, listed, strict=True))
        if len(table) < len(listed):
            raise InputError("equal-methods", "Two of the methods are equal.")
    if not table:
        raise InputError("no-methods", "compare needs at least one method.")
    for method in table.values():
        if not isinstance(method, Algorithm):
            raise InputError("no-method", f"compare needs methods as FedAvg(), got {method!r}.")
    return table


__all__ = ["Comparison", "Problem", "compare"]
