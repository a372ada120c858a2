"""The tables of a study on images, ours beside the paper's, what they say about Scaff-PD, and its
files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.images import plans
from experiments.images.plans import METHODS, NUMBERS, Plan
from experiments.images.study import Study
from experiments.tables import markdown_table, versions, write_csv
from scaffpd.federation import Vector
from scaffpd.numbers import format_bytes
from scaffpd.study.comparison import FINAL, TAIL, Comparison, MethodRun, MethodSummary
from scaffpd.training.metrics import Summary, a_fifth

OURS = "Scaff-PD"
TUNING = ("α", "method", "chosen", "next value not tried", "diverged", "exchanges", "GB sent")
MEASURES = AVERAGE, WORST, BEST = tuple(
    f"test_accuracy_{name}" for name in ("mean", "worst_20", "best_20")
)
COLUMNS = (
    *(
        "table",
        "alpha",
        "method",
        "seeds",
        "average",
        "average_sd",
        "worst_20",
        "worst_20_sd",
        "best_20",
        "best_20_sd",
    ),
    *("paper_average", "paper_worst_20", "rounds", "exchanges", "seconds", "chosen"),
)
BACKBONE = "EfficientNet-Lite0 (ImageNet weights) takes the place of the paper's ResNet-18"


def header(study: Study) -> list[str]:
    """A group of four columns for every α."""
    names = ("average", "worst 20 %", "average (paper)", "worst 20 % (paper)")
    return ["method", *(f"α = {alpha:g}: {name}" for alpha in study.plan.alphas for name in names)]


def rows(study: Study) -> Iterator[list[str]]:
    """A row per method, the best of ours in every column between asterisks."""
    best = {
        (alpha, name): max(
            (row.mean[name] for row in comparison.table if not row.failures), default=math.nan
        )
        for alpha, comparison in study.comparisons.items()
        for name in (AVERAGE, WORST)
    }
    for method in METHODS:
        cells = []
        for alpha, comparison in study.comparisons.items():
            row = comparison.line(method)
            reported = NUMBERS.get((study.plan.name, alpha), {}).get(method)
            cells += [_cell(row, name, best[alpha, name]) for name in (AVERAGE, WORST)]
            cells += ["–", "–"] if reported is None else [f"{value:.2f}" for value in reported]
        yield [method, *cells]


def _cell(row: MethodSummary, name: str, best: float) -> str:
    if row.failures:
        return "failed"
    return f"**{percent(row, name)}**" if row.mean[name] >= best else percent(row, name)


def percent(row: MethodSummary, name: str) -> str:
    """Mean ± standard deviation in per cent."""
    deviation = row.deviation[name]
    return f"{100 * row.mean[name]:.2f}" + (
        "" if math.isnan(deviation) else f" ± {100 * deviation:.2f}"
    )


def verdict(study: Study) -> Iterator[str]:
    """For every α: is Scaff-PD's worst 20 % the best, by how much, and at what price."""
    for alpha, comparison in study.comparisons.items():
        ours = comparison.line(OURS)
        others = [row for row in comparison.table if row.method != OURS and not row.failures]
        if ours.failures or not others:
            yield f"α = {alpha:g}: {ours.failures or 'no other method is ranked'}"
            continue
        runs = _runs(comparison, OURS)
        said = (
            _standing(ours, others, comparison),
            _price(ours, comparison),
            _overlap(runs, comparison),
            _gap(runs),
        )
        yield f"α = {alpha:g}: {' '.join(filter(None, said))}"


def _runs(comparison: Comparison, method: str) -> list[MethodRun]:
    return [run for run in comparison.finals if run.method == method and not run.failed]


def _standing(ours: MethodSummary, others: list[MethodSummary], comparison: Comparison) -> str:
    """The difference to the best other method, partition by partition: all methods see the same
    ones.
    """
    rival = max(others, key=lambda row: row.mean[WORST])
    lead = 100 * (ours.mean[WORST] - rival.mean[WORST])
    place = 1 + sum(row.mean[WORST] > ours.mean[WORST] for row in others)
    pairs = 100 * (_by_seed(comparison, ours.method) - _by_seed(comparison, rival.method))
    range_ = f"; by partition {', '.join(f'{d:+.1f}' for d in pairs)}" if len(pairs) > 1 else ""
    where = (
        f"the best, {lead:.1f} points above"
        if lead >= 0
        else f"number {place}, {-lead:.1f} points below"
    )
    own = f"Scaff-PD's worst 20 % ({percent(ours, WORST)}) is {where}"
    return f"{own} {rival.method} ({percent(rival, WORST)}{range_})."


def _by_seed(comparison: Comparison, method: str) -> Vector:
    spreads = [Summary.of(run.scores["test"]).score for run in _runs(comparison, method)]
    return np.array([spread.worst_20 for spread in spreads if spread is not None])


def _price(ours: MethodSummary, comparison: Comparison) -> str:
    plain = comparison.line("FedAvg")
    if plain.failures:
        return "FedAvg failed."
    average, worst = (100 * (ours.mean[name] - plain.mean[name]) for name in (AVERAGE, WORST))
    return (
        f"Against FedAvg, which counts clients by their samples, it is {worst:+.1f} points for "
        "the worst 20 % and "
        f"{average:+.1f} on average."
    )


def _overlap(runs: Sequence[MethodRun], comparison: Comparison) -> str:
    """Whether the clients that fare worst on test images are those whose training loss is large."""
    both = 0
    fifth = a_fifth(len(runs[0].scores["test"].names))
    for run in runs:
        loss = run.scores["train"].loss
        accuracy = run.scores["test"].score
        largest, lowest = (
            np.argsort(values, kind="stable")[:fifth] for values in (-loss, accuracy)
        )
        both += len(np.intersect1d(largest, lowest))
    fitted = min(float(run.scores["train"].score.min()) for run in runs)
    return (
        f"Of its {fifth * len(runs)} worst clients on test images (all partitions), {both} are "
        "among the "
        f"{fifth * len(runs)} with the largest training loss, which is what it weighs clients by; "
        "the lowest training "
        f"accuracy of a client is {100 * fitted:.0f} %."
    )


def _gap(runs: Sequence[MethodRun]) -> str:
    worst = max((run.certificate for run in runs), default=math.inf)
    if not math.isfinite(worst):
        return ""
    empty = ", more than the losses at the start: nothing is proven" if worst > 1 else ""
    return f"Its certified gap is at most {worst:.1e}{empty}."


def tuning(study: Study) -> Iterator[list[str]]:
    """A row per method and α: what was chosen, whether at the edge of what was tried, how many
    diverged, the cost.
    """
    for alpha, comparison in study.comparisons.items():
        for method in METHODS:
            tried = [run for run in comparison.runs if run.method == method and run.phase != FINAL]
            final = next(run for run in comparison.finals if run.method == method)
            chosen = ", ".join(f"{name} = {value:.3g}" for name, value in final.rates.items())
            failed = sum(run.failed for run in tried)
            mean = comparison.line(method).mean
            sent = (mean.get("bytes_up", math.nan) + mean.get("bytes_down", math.nan)) / 1e9
            yield [
                f"{alpha:g}",
                method,
                chosen or "nothing to choose",
                ", ".join(_edges(final, tried)) or "–",
                f"{failed} of {len(tried)}",
                f"{mean.get('exchanges', math.nan):.0f}",
                f"{sent:.3g}",
            ]


def _edges(final: MethodRun, tried: Sequence[MethodRun]) -> Iterator[str]:
    """The rates and strengths whose next value, up or down, was not tried."""

    def steps(factors: Mapping[str, float]) -> tuple[int, ...]:
        return tuple(round(2 * math.log10(factor)) for factor in factors.values())

    done = {steps(run.factors) for run in tried}
    for name, factor in final.factors.items() if tried else ():
        for up in (False, True):
            near = final.factors | {name: factor * 10 ** (0.5 if up else -0.5)}
            ends = name == TAIL and final.rates[name] >= 1 and up  # all clients are all clients
            if steps(near) not in done and not ends:
                yield f"{name} {'↑' if up else '↓'}"


def save(study: Study, folder: Path, command: str) -> list[Path]:
    """Write `table.csv`, `about.json` and a README."""
    table = folder / "table.csv"
    about = folder / "about.json"
    readme = folder / "README.md"
    study = _timed(study, command, about)
    write_csv(table, COLUMNS, _csv_rows(study))
    about.write_text(
        json.dumps(facts(study, command), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    readme.write_text(markdown(study, command), encoding="utf-8")
    return [table, about, readme]


def _timed(study: Study, command: str, about: Path) -> Study:
    """With the seconds of the call that did the work, where this one only found it done."""
    try:
        there = json.loads(about.read_text(encoding="utf-8"))
        first = there.pop("seconds")
        features = float(first["features"])
        everything = float(first["all"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return study
    own = json.loads(json.dumps(facts(study, command)))
    if own.pop("seconds")["all"] >= everything or own != there:
        return study
    return replace(study, seconds=everything, ground=replace(study.ground, seconds=features))


def _csv_rows(study: Study) -> Iterator[tuple[Any, ...]]:
    for alpha, comparison in study.comparisons.items():
        for method in METHODS:
            row = comparison.line(method)
            numbers = [
                f"{part.get(name, np.nan):.6f}"
                for name in MEASURES
                for part in (row.mean, row.deviation)
            ]
            reported = NUMBERS.get((study.plan.name, alpha), {}).get(method, ("", ""))
            final = next(run for run in comparison.finals if run.method == method)
            costs = [
                f"{row.mean.get(name, np.nan):.6g}" for name in ("rounds", "exchanges", "seconds")
            ]
            chosen = " ".join(f"{name}={value:.3g}" for name, value in final.rates.items())
            yield (study.plan.name, alpha, method, row.seeds, *numbers, *reported, *costs, chosen)


def facts(study: Study, command: str) -> dict[str, Any]:
    """How the numbers came about."""
    ground = study.ground
    return {
        "command": command,
        "hardware": study.hardware,
        "seconds": {"features": round(ground.seconds, 1), "all": round(study.seconds, 1)},
        "plan": asdict(study.plan),
        "rho": plans.RHO,
        "images": ground.source,
        "precision": "float32; features in TF32 on a GPU",
        "features": {
            "backbone": BACKBONE,
            "shape": list(ground.table.values.shape),
        },
        "versions": versions(),
    }


def differences(plan: Plan) -> str:
    """How far from the paper's setting this is."""
    tiny = plan.dataset == "tinyimagenet"
    few = ", of Tiny-ImageNet's training images 150 of 500 a class" if tiny else ""
    part = ", of which Tiny-ImageNet is a part" if tiny else ""
    return (
        f"**{BACKBONE}**. Other differences from the paper's setting: images may be JPEG "
        f"copies{few} (see below), "
        f"partitions and tuning are our own, and the network has been trained on ImageNet{part}. "
        "So levels cannot be "
        "compared with the paper's, and orders only with care."
    )


def markdown(study: Study, command: str) -> str:
    """The README of the folder."""
    plan = study.plan
    ground = study.ground
    about = facts(study, command)
    values = ground.table.values
    listed = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return "\n".join(
        [
            f"# {ground.title}, {plan.clients} clients",
            "",
            f"Written by `{command}` on {study.hardware} in {about['seconds']['all']:.0f} s, of "
            "which "
            f"{about['seconds']['features']:.0f} s went into images and features ({listed}).",
            "",
            f"Accuracy in per cent on test images, mean ± standard deviation over {plan.seeds} "
            "partitions, after "
            f"{plan.rounds} rounds of J = {plan.local_steps} local steps; every method had at "
            f"most {plan.tune} "
            "configurations, chosen on validation images of the first partition. In the columns "
            "marked (paper), the "
            "paper's own numbers. So few partitions support no statement about significance; "
            "differences between methods "
            "are given partition by partition below.",
            "",
            differences(plan),
            "",
            *markdown_table(header(study), rows(study)),
            "",
            *(f"- {sentence}" for sentence in verdict(study)),
            "",
            "## What was chosen, and what it cost",
            "",
            "Exchanges are request-reply turns; GB are sent by and to all clients, in "
            f"{plan.rounds} rounds. "
            "An arrow: the next value in that direction was not among those tried.",
            "",
            *markdown_table(TUNING, tuning(study), words=4),
            "",
            f"Images: {ground.source} {len(ground.train):,} for training, {len(ground.test):,} "
            "for testing; "
            f"{values.shape[1]:,} coordinates of the eNTK at {plan.size} pixels, stored in "
            f"{plan.stored} "
            f"({format_bytes(values.nbytes)}).",
            "",
            f"![partition](partition-alpha-{plan.alphas[0]:g}.png)",
            "",
            "## How",
            "",
            *(plans.__doc__ or "").strip().splitlines()[2:],
            f"Here l2 = {plan.l2:g}.",
            "",
            "`table.csv` has these numbers, the best 20 %, costs and the chosen rates of the "
            "first seed; the folders "
            "`alpha-…` have every run, tuning included, and every client; `about.json` has the "
            "versions and the settings.",
            "",
        ]
    )
