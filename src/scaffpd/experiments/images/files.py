"""What a study leaves in its folder, besides the runs themselves: the table with the paper's numbers, and how."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import scaffpd
from scaffpd.experiments.images import settings, tables
from scaffpd.experiments.images.paper import NUMBERS
from scaffpd.experiments.images.study import Study
from scaffpd.experiments.writing import csv_file, markdown_table
from scaffpd.system import format_bytes

COLUMNS = (
    *("table", "alpha", "method", "seeds", "average", "average_sd", "worst_20", "worst_20_sd", "best_20", "best_20_sd"),
    *("paper_average", "paper_worst_20", "rounds", "exchanges", "seconds", "chosen"),
)
MEASURES = (tables.AVERAGE, tables.WORST, tables.BEST)
BACKBONE = "EfficientNet-Lite0 (ImageNet weights) takes the place of the paper's ResNet-18"


def differences(plan: settings.Plan) -> str:
    """How far from the paper's setting this is."""
    tiny = plan.dataset == "tinyimagenet"
    few = ", of Tiny-ImageNet's training images 150 of 500 a class" if tiny else ""
    part = ", of which Tiny-ImageNet is a part" if tiny else ""
    return (
        f"**{BACKBONE}**. Other differences from the paper's setting: images may be JPEG copies{few} (see below), "
        f"partitions and tuning are our own, and the network has been trained on ImageNet{part}. So levels cannot be "
        "compared with the paper's, and orders only with care."
    )


def save(study: Study, folder: Path, command: str) -> list[Path]:
    """Write `table.csv`, `about.json` and a README."""
    table, about, readme = folder / "table.csv", folder / "about.json", folder / "README.md"
    study = _timed(study, command, about)
    csv_file(table, COLUMNS, _lines(study))
    about.write_text(json.dumps(facts(study, command), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    readme.write_text(markdown(study, command), encoding="utf-8")
    return [table, about, readme]


def _timed(study: Study, command: str, about: Path) -> Study:
    """With the seconds of the call that did the work, where this one only found it done."""
    try:
        there = json.loads(about.read_text(encoding="utf-8"))
        first = there.pop("seconds")
        features, everything = float(first["features"]), float(first["all"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return study
    own = json.loads(json.dumps(facts(study, command)))
    if own.pop("seconds")["all"] >= everything or own != there:
        return study
    return replace(study, seconds=everything, ground=replace(study.ground, seconds=features))


def _lines(study: Study) -> list[tuple[Any, ...]]:
    lines = []
    for alpha, comparison in study.comparisons.items():
        for method in settings.METHODS:
            line = comparison.line(method)
            numbers = [f"{part.get(name, np.nan):.6f}" for name in MEASURES for part in (line.mean, line.deviation)]
            reported = NUMBERS.get((study.plan.name, alpha), {}).get(method, ("", ""))
            final = next(run for run in comparison.finals if run.job.method == method)
            costs = [f"{line.mean.get(name, np.nan):.6g}" for name in ("rounds", "exchanges", "seconds")]
            chosen = " ".join(f"{name}={value:.3g}" for name, value in final.rates.items())
            lines.append((study.plan.name, alpha, method, line.seeds, *numbers, *reported, *costs, chosen))
    return lines


def facts(study: Study, command: str) -> dict[str, Any]:
    """How the numbers came about."""
    plan, ground = study.plan, study.ground
    return {
        "command": command,
        "hardware": study.hardware,
        "seconds": {"features": round(ground.seconds, 1), "all": round(study.seconds, 1)},
        "plan": {name: getattr(plan, name) for name in plan.__dataclass_fields__},
        "rho": settings.RHO,
        "images": ground.source,
        "precision": "float32 products on stored values; features in TF32 on a GPU, in float32 elsewhere",
        "features": {"backbone": BACKBONE, "shape": list(ground.table.values.shape), "key": ground.table.key},
        "versions": {
            "scaffpd": scaffpd.__version__, "torch": torch.__version__, "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }  # fmt: skip


def markdown(study: Study, command: str) -> str:
    """The README of the folder."""
    plan, about, columns = study.plan, facts(study, command), tables.header(study)
    train, test = len(study.ground.train), len(study.ground.test)
    coordinates, size = study.ground.table.values.shape[1], study.ground.table.values.nbytes
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    picture = f"partition-alpha-{plan.alphas[0]:g}.png"
    return "\n".join([
        f"# {study.ground.title}, {plan.clients} clients",
        "",
        f"Written by `{command}` on {study.hardware} in {about['seconds']['all']:.0f} s, of which "
        f"{about['seconds']['features']:.0f} s went into images and features ({versions}).",
        "",
        f"Accuracy in per cent on test images, mean ± standard deviation over {plan.seeds} partitions, after "
        f"{plan.rounds} rounds of J = {plan.local_steps} local steps; every method had at most {plan.tune} "
        "configurations, chosen on validation images of the first partition. In the columns marked (paper), the "
        "paper's own numbers. So few partitions support no statement about significance; differences between methods "
        "are given partition by partition below.",
        "",
        differences(plan),
        "",
        *markdown_table(columns, tables.rows(study)),
        "",
        *(f"- {sentence}" for sentence in tables.verdict(study)),
        "",
        "## What was chosen, and what it cost",
        "",
        f"Exchanges are request-reply turns; GB are sent by and to all clients, in {plan.rounds} rounds. "
        "An arrow: the next value in that direction was not among those tried.",
        "",
        *markdown_table(tables.TUNING, tables.tuning(study), words=4),
        "",
        f"Images: {study.ground.source} {train:,} for training, {test:,} for testing; {coordinates:,} coordinates of "
        f"the eNTK at {plan.size} pixels, stored in {plan.stored} ({format_bytes(size)}).",
        "",
        f"![partition]({picture})",
        "",
        "## How",
        "",
        *(line for line in (settings.__doc__ or "").strip().splitlines()[2:]),
        f"Here l2 = {plan.l2:g}.",
        "",
        "`table.csv` has these numbers, the best 20 %, costs and the chosen rates of the first seed; the folders "
        "`alpha-…` have every run, tuning included, and every client; `about.json` has the versions and the settings.",
        "",
    ])  # fmt: skip
