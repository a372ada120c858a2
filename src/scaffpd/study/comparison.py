"""Many methods on one problem: tuned with the same budget, trained, scored on test rows.

A method names its rates in `knobs`, and where strengths may be tuned as well, these are ρ of its
objective and what it names in `strengths` (q, μ, θ). With k of them and a budget of n, the grid is
the n points of

    { 10^(±z/2) : z ∈ Z^k }

that are nearest to z = (½, …, ½), with + for rates and − for strengths: automatic rates are safe by
theory, hence often cautious, so the grid leans towards larger ones, and towards weaker strengths.
The settings as they are, z = 0, always come first. With one rate and n = 5 the factors are 0.32, 1,
3.2, 10 and 32; with two they are (1, 1), (3.2, 1), (1, 3.2), (3.2, 3.2) and (10, 1).
Methods with nothing to tune run once.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from scaffpd.algorithms import Algorithm, Fair
from scaffpd.data.silos import Client, Silos, carve
from scaffpd.errors import InputError, count
from scaffpd.federation import ClientScores, Federation, Traffic
from scaffpd.files import csv_text, write_file
from scaffpd.models import Linear
from scaffpd.models.execution import pooled, processes_at_a_time
from scaffpd.models.personal import base_of
from scaffpd.numbers import aligned, several
from scaffpd.tasks import solving
from scaffpd.tasks.base import Measure
from scaffpd.tasks.classification import ACCURACY
from scaffpd.training.cohort import Cohort, ModelSpec
from scaffpd.training.loop import Status, train
from scaffpd.training.metrics import Spread, Summary
from scaffpd.training.progress import Tally

Factors = dict[str, float]
RHO = "rho"  # of an objective
TAIL = "tail"  # of Δ-FL, where more than all clients is none


def grid(method: Algorithm, budget: int, strong: bool = False) -> list[Factors]:
    """Return at most `budget` configurations, as factors on the settings as they are."""
    signs = dict.fromkeys(method.knobs, 1)
    if strong:
        rho = [RHO] * hasattr(getattr(method, "objective", None), RHO)
        signs |= dict.fromkeys([*method.strengths, *rho], -1)
    if not signs:
        return [{}]
    reach = next(r for r in itertools.count() if (2 * r + 1) ** len(signs) >= budget)
    points = itertools.product(range(-2 * reach, 2 * reach + 2), repeat=len(signs))
    return [
        {name: 10 ** (sign * k / 2) for (name, sign), k in zip(signs.items(), z, strict=True)}
        for z in sorted(points, key=_order)[:budget]
    ]


def _order(z: tuple[int, ...]) -> tuple[int | bool | tuple[int, ...], ...]:
    """Order by distance from (½, …, ½); among equals z = 0 comes first, then fewer changes."""
    distance = sum((2 * k - 1) ** 2 for k in z)
    return distance, any(z), sum(k < 0 for k in z), sum(map(abs, z)), tuple(-k for k in z)


def configured(
    method: Algorithm, factors: Mapping[str, float], federation: Federation
) -> tuple[Algorithm, dict[str, float]]:
    """Return the method with everything at factor · value, and those values.

    The value is the method's own where its user has set one, else the automatic one for this
    federation. Factors of one leave the method as it is.
    """
    goal = getattr(method, "objective", None)
    own = {name: getattr(goal if name == RHO else method, name) for name in factors}
    automatic = method.automatic(federation) if None in own.values() else {}
    values = {
        name: float(factor * (automatic[name] if own[name] is None else own[name]))
        for name, factor in factors.items()
    }
    if TAIL in values:
        values[TAIL] = min(values[TAIL], 1.0)
    if all(factor == 1 for factor in factors.values()):
        return method, values
    changes: dict[str, object] = {name: value for name, value in values.items() if name != RHO}
    if factors.get(RHO, 1.0) != 1 and goal is not None:
        changes["objective"] = goal.with_strength(values[RHO])
    changed = replace(method, **changes)  # type: ignore[type-var]  # every algorithm is a dataclass
    return changed, values


VALIDATION = 0.25  # share of every client's training rows that rates are chosen by
TUNE = "tune"
FINAL = "final"
REFUSED = "refused"
SPLITS = ("train", "validation", "test")
MEASURES = tuple(f.name for f in fields(Spread))
COSTS = ("rounds", "exchanges", "bytes_up", "bytes_down", "seconds")

Trial = tuple[str, int, list[Factors]]  # label, seed, configurations
Row = dict[str, object]


@dataclass(frozen=True)
class Problem:
    """Problem on which methods are compared.

    Args:
        data: `Silos` with test rows, or a function of `seed` that returns them, such as
            `partial(sp.data.digits, clients=20, alpha=0.05, test_fraction=0.3)`.
        model: such as `Linear("softmax", l2=1e-3, intercept=True, classes=10)`.
        name: what to call it.
        device: where to compute, such as "cpu" or "cuda".
        dtype: the number format; by default the model's own.
    """

    data: Silos | Callable[..., Silos] = field(repr=False)
    model: ModelSpec
    name: str = "problem"
    device: str = "cpu"
    dtype: torch.dtype | None = None

    @property
    def measure(self) -> Measure:
        """What models are scored by, if they are: accuracy, or concordance of times."""
        base = base_of(self.model)
        return solving(base.loss, not base.timed).measure if isinstance(base, Linear) else ACCURACY

    def silos(self, seed: int) -> Silos:
        """Return the rows of one seed, the same for every method."""
        silos = self.data(seed=seed) if callable(self.data) else self.data
        if not isinstance(silos, Silos):
            raise InputError(
                "problem-without-silos",
                f"Problem needs Silos or a function of `seed` that returns them, got {silos!r}.",
            )
        return silos

    def cohort(self, seed: int) -> Cohort:
        """Bind all training rows, and the test rows to score on."""
        silos = self.silos(seed)
        if not silos.test:
            raise InputError(
                "problem-without-test-rows",
                f"The problem {self.name!r} has no test rows: give it a test_fraction above 0.",
            )
        return self._bound(silos, silos.train, silos.test)

    def rehearsal(self, seed: int, fraction: float) -> Cohort:
        """Bind training rows only, a fraction of every client's in the place of the test rows."""
        silos = self.silos(seed)
        random = np.random.default_rng([seed, 2])
        parts = [carve(pair, fraction, random) for pair in silos.train]
        return self._bound(silos, [p[0] for p in parts], [p[1] for p in parts])

    def _bound(self, silos: Silos, train: Sequence[Client], test: Sequence[Client]) -> Cohort:
        return Cohort(
            train, self.model, names=silos.names, device=self.device, dtype=self.dtype, test=test
        )


@dataclass(frozen=True)
class MethodRun:
    """One method with one configuration on one seed."""

    method: str  # its label
    seed: int
    phase: str  # "tune" or "final"
    factors: Factors = field(default_factory=dict)  # on the automatic rates, by knob
    rates: dict[str, float] = field(default_factory=dict)  # the rates themselves
    status: str = REFUSED  # as of `train`; "refused" where the method cannot work here
    message: str = ""
    rounds: int = 0
    exchanges: int = 0
    bytes_up: int = 0  # from all clients
    bytes_down: int = 0  # to all clients
    seconds: float = 0.0  # of training
    certificate: float = np.inf  # the proven optimality gap
    weights: list[float] = field(default_factory=list, repr=False)  # λ of every client
    # by split: "train" and "validation" of a tuning run, "train" and "test" of a final one
    scores: dict[str, ClientScores] = field(default_factory=dict, repr=False)

    @property
    def failed(self) -> bool:
        return self.status in (REFUSED, Status.DIVERGED)

    @property
    def merit(self) -> tuple[float, ...]:
        found = Summary.of(self.scores["validation"])
        if found.score is None:
            return -found.loss.worst_20, -found.loss.mean
        return found.score.worst_20, found.score.mean, -found.loss.worst_20


def carry_out(run: MethodRun, method: Algorithm, cohort: Cohort, rounds: int) -> MethodRun:
    """Train and score a method; a refusal is an outcome as well, and so is a bug of one method."""
    try:
        # rates that are too large overflow before they are called diverged
        with np.errstate(all="ignore"):
            return _train(run, method, cohort, rounds)
    except Exception as error:
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        return replace(run, message=f"{kind}{error}")


def _train(run: MethodRun, method: Algorithm, cohort: Cohort, rounds: int) -> MethodRun:
    cohort.traffic.restore(Traffic())
    scaled, rates = configured(method, run.factors, cohort)
    # the questions that automatic rates take are paid for, as `init` would have paid for them
    asked = cohort.traffic.snapshot() if scaled is not method else Traffic()
    result = train(scaled, cohort, rounds=rounds, seed=run.seed, progress=False).uninterrupted()
    sent = cohort.traffic
    sent.add(up=asked.bytes_up, down=asked.bytes_down, exchanges=asked.exchanges)
    held = "test" if run.phase == FINAL else "validation"
    return replace(
        run,
        rates=rates,
        status=str(result.status),
        message=result.message,
        rounds=result.rounds,
        exchanges=sent.exchanges,
        bytes_up=sent.bytes_up,
        bytes_down=sent.bytes_down,
        seconds=float(result.history["seconds"][-1]),
        certificate=result.certificate,
        weights=result.weights.tolist(),
        scores={
            "train": cohort.evaluate(result.x, "train"),
            held: cohort.evaluate(result.x, "test"),
        },
    )


@dataclass(frozen=True)
class MethodSummary:
    """One method over all seeds."""

    method: str  # its label
    seeds: int  # how many seeds have a final model
    failures: str  # why others have none; only where it is empty is the method ranked
    mean: dict[str, float]  # over those seeds, of every number of a final run
    deviation: dict[str, float]  # n − 1 in the denominator; NaN for a single seed


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`; `print` it."""

    problem: str
    model: str
    methods: Mapping[str, Algorithm] = field(repr=False)
    seeds: tuple[int, ...]
    rounds: int
    tune: int
    runs: tuple[MethodRun, ...] = field(repr=False)  # those for tuning first

    measure: Measure = ACCURACY  # of models that have scores

    @property
    def finals(self) -> tuple[MethodRun, ...]:
        return tuple(run for run in self.runs if run.phase == FINAL)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row per run: its rates, how it ended, what it cost, every measure on every split."""
        names = list(dict.fromkeys(name for run in self.runs for name in run.factors))
        return tuple(self._row(run, names) for run in self.runs)

    def _row(self, run: MethodRun, names: Sequence[str]) -> Row:
        method = self.methods[run.method]
        row: Row = {"model": run.method, "seed": run.seed, "phase": run.phase}
        row |= {f"factor_{name}": run.factors.get(name) for name in names}
        row |= {name: run.rates.get(name) for name in names}
        row |= {name: getattr(method, name, None) for name in ("local_steps", "batch_size")}
        row |= {name: getattr(run, name) for name in ("status", "message", *COSTS, "certificate")}
        for split in SPLITS:
            summary = Summary.of(run.scores[split]) if split in run.scores else None
            for kind, part in (("loss", "loss"), (self.measure.name, "score")):
                spread = getattr(summary, part, None)
                row |= {f"{split}_{kind}_{name}": getattr(spread, name, None) for name in MEASURES}
        return row

    @cached_property
    def table(self) -> tuple[MethodSummary, ...]:
        """One line per method, by the worst 20 % on test rows; failures come last."""
        sign = -1 if self.scored else 1
        names = (self.criterion, self.criterion.replace("worst_20", "mean"))

        def rank(line: MethodSummary) -> tuple[bool | float, ...]:
            return line.failures != "", *(sign * line.mean.get(name, np.inf) for name in names)

        return tuple(sorted(map(self._line, self.methods), key=rank))

    def line(self, label: str) -> MethodSummary:
        return next(line for line in self.table if line.method == label)

    @cached_property
    def scored(self) -> bool:
        """Return whether there are accuracies, or concordances."""
        return any(not np.isnan(run.scores["train"].score).all() for run in self.runs if run.scores)

    @property
    def criterion(self) -> str:
        """The number that methods are ranked by."""
        return f"test_{self.measure.name if self.scored else 'loss'}_worst_20"

    def _line(self, label: str) -> MethodSummary:
        finals = [run for run in self.finals if run.method == label]
        good = [self._row(run, ()) for run in finals if not run.failed]
        values = {
            name: np.array([row[name] for row in good], dtype=np.float64)
            for name, first in (good[0] if good else {}).items()
            if name in COSTS or (name.startswith(("test_", "train_")) and isinstance(first, float))
        }.items()
        mean = {name: float(v.mean()) for name, v in values}
        spread = {n: float(v.std(ddof=1)) if len(v) > 1 else math.nan for n, v in values}
        return MethodSummary(label, len(good), _failures(finals), mean, spread)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        write_file(Path(path), csv_text(self.rows))

    def __str__(self) -> str:
        kind = self.criterion.removesuffix("worst_20")
        lines = [["method", "worst 20 %", "mean", "best 20 %", "exchanges", "MB"]]
        for line in self.table:
            if not line.failures:
                measures = [self._shown(line, kind + n) for n in ("worst_20", "mean", "best_20")]
                sent = (line.mean["bytes_up"] + line.mean["bytes_down"]) / 1e6
                asked = f"{line.mean['exchanges']:.0f}"
                lines.append([line.method, *measures, asked, f"{sent:.3g}"])
        failed = [f"{line.method}: {line.failures}" for line in self.table if line.failures]
        what = f"{self.measure.name.capitalize()} in %" if self.scored else "Loss"
        over = f"mean ± standard deviation over {several(len(self.seeds), 'seed')}"
        caption = f"{what} on test rows, {over}, after {several(self.rounds, 'round')}."
        return "\n".join([*aligned(lines), "", caption, *failed])

    def _shown(self, line: MethodSummary, name: str) -> str:
        """Write mean ± deviation, or the mean alone where there is no deviation."""
        numbers = [n for n in (line.mean[name], line.deviation[name]) if not math.isnan(n)]
        scale, form = (100, ".1f") if self.scored else (1, ".3g")
        return " ± ".join(f"{scale * number:{form}}" for number in numbers)


def _failures(runs: Sequence[MethodRun]) -> str:
    """Say what went wrong, and for how many seeds; return nothing where nothing did."""
    bad = [run for run in runs if run.failed]
    if not bad:
        return ""
    diverged = bad[0].status == Status.DIVERGED
    reason = "It diverged with the rates that were chosen." if diverged else bad[0].message
    return reason if len(bad) == len(runs) else f"On {len(bad)} of {len(runs)} seeds: {reason}"


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
    rates, and scored on the test rows.

    Args:
        methods: by the label that each has in the table.
        problem: data and model.
        seeds: for each, a partition (where the data is a function), a training seed, a choice.
        rounds: communication rounds of every run.
        tune: configurations that every method may try (see `scaffpd.study.comparison`); 1
            takes the automatic rates.
        processes: how many runs at a time; by default one per core, where joblib is installed (the
            extra sklearn), and one on a GPU. The numbers are the same.
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
    workers = processes or (processes_at_a_time() if problem.device == "cpu" else 1)
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
    return Comparison(*about, tuple(runs), problem.measure)


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
