"""Many methods on one problem: tuned with the same budget, trained, scored on test rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

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
    methods: Mapping[str, Algorithm],
    problem: Problem,
    seeds: Sequence[int] = (0,),
    rounds: int = 100,
    tune: int = 5,
    *,
    processes: int | None = None,
    progress: bool | None = None,
    strengths: bool = False,
    one_choice: bool = False,
) -> Comparison:
    """Run every method on the same rows, from the same start, for the same number of rounds.

    Rates are chosen for each seed by itself, by the worst fifth of the clients on a quarter of the
    training rows: no test row takes part (a choice shared between seeds would see other seeds' test
    rows). The method is then trained on all training rows, with the chosen factors on the automatic
    rates, and scored on the test rows. How many local steps and samples a round of each method
    takes is up to the caller, and is in `rows`.

    Args:
        methods: by the label that each has in the table.
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
        one_choice: the first seed chooses for all, where all have the same test rows.
    """
    if not isinstance(methods, Mapping) or not methods:
        raise InputError(
            "no-methods",
            f'compare needs methods by label, as {{"FedAvg": FedAvg()}}, got {methods!r}.',
        )
    if not seeds or len(set(seeds)) < len(seeds):
        raise InputError("seeds-differ", f"compare needs seeds that differ, got {seeds!r}.")
    count("compare", "rounds", rounds)
    count("compare", "tune", tune)
    cohort = problem.cohort(seeds[0])  # what is wrong with the data is said before any work
    # `fair` is compared as the method that it chooses here, whose settings can be tuned
    contestants = {
        label: method.choice(cohort) if isinstance(method, Fair) else method
        for label, method in methods.items()
    }
    workers = processes or (cores() if problem.device == "cpu" else 1)
    grids = {label: grid(method, tune, strengths) for label, method in contestants.items()}
    pairs = [(label, seed) for seed in seeds for label in grids]
    chooser = {seed: seeds[0] if one_choice else seed for seed in seeds}
    tuning = [(n, s, grids[n]) for n, s in pairs if s in chooser.values() and len(grids[n]) > 1]
    runs: list[MethodRun] = []
    with Tally(progress, len(tuning) + len(pairs)) as tally:

        def all_of(phase: str, trials: Sequence[Trial]) -> None:
            work = partial(_tried, contestants, problem, rounds, phase)
            for found in pooled(work, trials, workers):
                runs.extend(found)
                tally.advance(found[0].method)

        all_of(TUNE, tuning)
        all_of(FINAL, [(n, s, [_best(runs, n, chooser[s]) or grids[n][0]]) for n, s in pairs])
    about = (problem.name, repr(problem.model), contestants, tuple(seeds), rounds, tune)
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


def _best(runs: Sequence[MethodRun], label: str, seed: int) -> Factors:
    """Return the best configuration, the first of equals; nothing if none is tuned or all fail."""
    own = [run for run in runs if (run.method, run.seed) == (label, seed) and not run.failed]
    return max(own, key=lambda run: run.merit).factors if own else {}


__all__ = ["Comparison", "Problem", "compare"]
