"""The tables of a study: ours beside the paper's, and what they say about Scaff-PD."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from scaffpd.comparison import Comparison
from scaffpd.comparison.runs import Run
from scaffpd.comparison.setting import LATTICE, TAIL, grid, neighbours
from scaffpd.comparison.tables import MethodSummary
from scaffpd.experiments.images.paper import NUMBERS
from scaffpd.experiments.images.settings import METHODS
from scaffpd.experiments.images.study import Study
from scaffpd.federation import Vector
from scaffpd.metrics import Summary, a_fifth

OURS = "Scaff-PD"
TUNING = ("α", "method", "chosen", "next value not tried", "diverged", "exchanges", "GB sent")
AVERAGE, WORST, BEST = (f"test_accuracy_{name}" for name in ("mean", "worst_20", "best_20"))


def header(study: Study) -> list[str]:
    """A group of four columns for every α."""
    groups = [f"α = {alpha:g}: {name}" for alpha in study.plan.alphas for name in ("average", "worst 20 %")]
    paper = [f"{group} (paper)" for group in groups]
    pairs = [(groups[k], groups[k + 1], paper[k], paper[k + 1]) for k in range(0, len(groups), 2)]
    return ["method", *(column for pair in pairs for column in pair)]


def rows(study: Study) -> Iterator[list[str]]:
    """A line per method, the best of ours in every column between asterisks."""
    best = {
        (alpha, name): max((line.mean[name] for line in comparison.table if not line.failures), default=math.nan)
        for alpha, comparison in study.comparisons.items()
        for name in (AVERAGE, WORST)
    }
    for method in METHODS:
        cells = []
        for alpha, comparison in study.comparisons.items():
            line, reported = comparison.line(method), NUMBERS.get((study.plan.name, alpha), {}).get(method)
            ours = [_cell(line, name, best[alpha, name]) for name in (AVERAGE, WORST)]
            cells += [*ours, *(["–", "–"] if reported is None else [f"{value:.2f}" for value in reported])]
        yield [method, *cells]


def _cell(line: MethodSummary, name: str, best: float) -> str:
    if line.failures:
        return "failed"
    text = percent(line, name)
    return f"**{text}**" if line.mean[name] >= best else text


def percent(line: MethodSummary, name: str) -> str:
    """Mean ± standard deviation in per cent."""
    deviation = line.deviation[name]
    return f"{100 * line.mean[name]:.2f}" + ("" if math.isnan(deviation) else f" ± {100 * deviation:.2f}")


def verdict(study: Study) -> Iterator[str]:
    """For every α: is Scaff-PD's worst 20 % the best, by how much, and what does the average pay."""
    for alpha, comparison in study.comparisons.items():
        ours = comparison.line(OURS)
        others = [line for line in comparison.table if line.method != OURS and not line.failures]
        if ours.failures or not others:
            yield f"α = {alpha:g}: {ours.failures or 'no other method is ranked'}"
            continue
        said = (_standing(ours, others, comparison), _price(ours, comparison), _overlap(comparison), _gap(comparison))
        yield f"α = {alpha:g}: {' '.join(filter(None, said))}"


def _standing(ours: MethodSummary, others: list[MethodSummary], comparison: Comparison) -> str:
    """The difference to the best other method, partition by partition: all methods see the same ones."""
    rival = max(others, key=lambda line: line.mean[WORST])
    lead = 100 * (ours.mean[WORST] - rival.mean[WORST])
    place = 1 + sum(line.mean[WORST] > ours.mean[WORST] for line in others)
    pairs = 100 * (_by_seed(comparison, ours.method) - _by_seed(comparison, rival.method))
    range_ = f"; by partition {', '.join(f'{d:+.1f}' for d in pairs)}" if len(pairs) > 1 else ""
    said = f"Scaff-PD's worst 20 % ({percent(ours, WORST)}) is "
    if lead >= 0:
        return f"{said}the best, {lead:.1f} points above {rival.method} ({percent(rival, WORST)}{range_})."
    return f"{said}number {place}, {-lead:.1f} points below {rival.method} ({percent(rival, WORST)}{range_})."


def _by_seed(comparison: Comparison, method: str) -> Vector:
    runs = [run for run in comparison.finals if run.job.method == method and not run.failed]
    return np.array([Summary.of(run.scores["test"]).accuracy.worst_20 for run in runs])  # type: ignore[union-attr]


def _price(ours: MethodSummary, comparison: Comparison) -> str:
    plain = comparison.line("FedAvg")
    if plain.failures:
        return "FedAvg failed."
    average, worst = (100 * (ours.mean[name] - plain.mean[name]) for name in (AVERAGE, WORST))
    return (
        f"Against FedAvg, which counts clients by their samples, it is {worst:+.1f} points for the worst 20 % and "
        f"{average:+.1f} on average."
    )


def _overlap(comparison: Comparison) -> str:
    """Whether the clients that fare worst on test images are those whose training loss is large."""
    runs = [run for run in comparison.finals if run.job.method == OURS and not run.failed]
    both, fifth = 0, a_fifth(comparison.clients)
    for run in runs:
        loss, accuracy = run.scores["train"].loss, run.scores["test"].accuracy
        both += len(set(np.argsort(-loss)[:fifth].tolist()) & set(np.argsort(accuracy)[:fifth].tolist()))
    fitted = min(float(run.scores["train"].accuracy.min()) for run in runs)
    return (
        f"Of its {fifth * len(runs)} worst clients on test images (all partitions), {both} are among the "
        f"{fifth * len(runs)} with the largest training loss, which is what it weighs clients by; the lowest training "
        f"accuracy of a client is {100 * fitted:.0f} %."
    )


def _gap(comparison: Comparison) -> str:
    gaps = [run.certificate for run in comparison.finals if run.job.method == OURS and not run.failed]
    worst = max(gaps, default=math.inf)
    if not math.isfinite(worst):
        return ""
    empty = ", more than the losses at the start: nothing is proven" if worst > 1 else ""
    return f"Its certified gap is at most {worst:.1e}{empty}."


def tuning(study: Study) -> Iterator[list[str]]:
    """A line per method and α: what was chosen, whether at the edge of what was tried, how many diverged, the cost."""
    for alpha, comparison in study.comparisons.items():
        for method in METHODS:
            tried = [run for run in comparison.runs if run.job.method == method and run.job.phase == "tune"]
            final = next(run for run in comparison.finals if run.job.method == method)
            chosen = ", ".join(f"{name} = {value:.3g}" for name, value in final.rates.items())
            edge = ", ".join(_edges(comparison, final, tried))
            failed, line = sum(run.failed for run in tried), comparison.line(method)
            sent = (line.mean.get("megabytes_up", math.nan) + line.mean.get("megabytes_down", math.nan)) / 1000
            yield [
                f"{alpha:g}", method, chosen or "nothing to choose", edge or "–", f"{failed} of {len(tried)}",
                f"{line.mean.get('exchanges', math.nan):.0f}", f"{sent:.3g}",
            ]  # fmt: skip


def _edges(comparison: Comparison, final: Run, tried: Sequence[Run]) -> Iterator[str]:
    """The rates and strengths whose next value, up or down, was not tried."""
    lattice, done = grid(comparison.setting.methods[final.job.method], LATTICE, True), {run.job.point for run in tried}
    if not tried:
        return
    for point in neighbours(lattice, final.job.point):
        if point not in done:
            name = next(name for name, factor in final.factors.items() if lattice[point][name] != factor)
            if name == TAIL and final.rates[name] >= 1 and lattice[point][name] > final.factors[name]:
                continue  # all clients are all clients
            yield f"{name} {'↑' if lattice[point][name] > final.factors[name] else '↓'}"
