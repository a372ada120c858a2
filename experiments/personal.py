"""Alone, one model, or a model of one's own: stations and schools, judged on rows held out.

python -m experiments.personal stations|schools [--seeds 8] [--data FOLDER] [--out FOLDER]

Every seed draws new rows: at the stations which four are new and their forty days (tested on the
following year), at the schools which 30 % of the students are held out. Strengths are set by the
evidence of the training rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import scaffpd as sp
from experiments.datasets import school
from experiments.tables import append_csv, markdown_table, read_csv
from scaffpd.study.verdict import ALONE, AVERAGE, FAIR, MODELS, PERSONAL
from scaffpd.training.metrics import half_interval, worst_fifth

Array = NDArray[np.float64]
MODEL = sp.Linear("squared", "auto", intercept=True)


def study(load: Callable[[int], Any], seeds: int) -> list[dict[str, Any]]:
    """A row for every seed, model and client."""
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        silos = load(seed)
        found = sp.joining(silos.train, silos.test, MODEL, sp.CVaR(0.2), names=silos.names)
        for model, losses in zip(found.models, found.loss, strict=True):
            rows += [
                {
                    "seed": seed,
                    "model": model,
                    "client": client,
                    "train_rows": size,
                    "loss": float(loss),
                }
                for client, (size, _), loss in zip(found.names, found.rows, losses, strict=True)
            ]
        print(f"seed {seed}: {found}", flush=True)
    return rows


def measures(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Array]]:
    """By model: the mean over clients, the worst fifth, and the most that joining costs a client;
    one per seed.
    """
    table: dict[str, list[Array]] = {}
    for name in MODELS:
        own = [row for row in rows if row["model"] == name]
        seeds = sorted({row["seed"] for row in own})
        table[name] = [
            np.array([row["loss"] for row in own if row["seed"] == seed]) for seed in seeds
        ]
    return {
        name: {
            "mean": np.array([each.mean() for each in losses]),
            "worst fifth": np.array([worst_fifth(each) @ each for each in losses]),
            "rounded": np.array(
                [np.sort(each)[-max(1, round(len(each) / 5)) :].mean() for each in losses]
            ),
            "worst": np.array([each.max() for each in losses]),
            "cost": np.array([(a - b).max() for a, b in zip(losses, table[ALONE], strict=True)]),
        }
        for name, losses in table.items()
    }


def interval(after: Array, before: Array) -> tuple[float, float, float]:
    """By how many per cent `after` is lower, with Student's 95 % interval over seeds, paired."""
    share = 100 * (1 - after / before)
    reach = half_interval(share)
    return float(share.mean()), float(share.mean() - reach), float(share.mean() + reach)


def page(found: dict[str, dict[str, dict[str, Array]]]) -> str:
    """The tables of all data sets as Markdown."""
    lines = [ABOUT]
    lower = "lower than one average model"
    for name, models in found.items():
        seeds = len(next(iter(models.values()))["mean"])
        lines += [
            f"\n## {TITLES[name]}\n",
            f"`python -m experiments.personal {name} --seeds {seeds}`\n",
        ]
        header = [
            "model",
            "mean",
            lower,
            "worst fifth",
            lower,
            "the most that joining costs a client",
        ]
        rows = []
        for model, own in models.items():
            cells = [model]
            for measure in ("mean", "worst fifth"):
                share = (
                    ""
                    if model == AVERAGE
                    else words(interval(own[measure], models[AVERAGE][measure]))
                )
                cells += [f"{own[measure].mean():.4f}", share]
            cells.append("" if model == ALONE else f"{own['cost'].mean():.4f}")
            rows.append(cells)
        lines += [*markdown_table(header, rows, words=len(header)), ""]
        lines += [verdict(models, model) for model in (FAIR, PERSONAL)]
    return "\n".join(lines) + "\n"


def words(share: tuple[float, float, float]) -> str:
    """A share and its interval."""
    value, low, high = (f"{v:+.1f}".replace("-", "−") for v in share)
    return f"{value} % ({low} to {high})"


def verdict(models: dict[str, dict[str, Array]], model: str) -> str:
    """In words, what a personal model brings against one average model and alone."""
    parts = []
    for other in (AVERAGE, ALONE):
        shares = {m: interval(models[model][m], models[other][m]) for m in ("mean", "worst fifth")}
        said = (
            f"{m} {words(v) if v[1] > 0 or v[2] < 0 else 'no clear difference'}"
            for m, v in shares.items()
        )
        parts.append(f"lower than {other}: {', '.join(said)}")
    rounded, worst = (
        words(interval(models[model][m], models[AVERAGE][m])) for m in ("rounded", "worst")
    )
    parts.append(
        f"worst client against {AVERAGE}: {worst}; a fifth rounded to the nearest number of "
        f"clients: {rounded}"
    )
    cost, before = (float(models[m]["cost"].mean()) for m in (model, AVERAGE))
    share = f"{100 * cost / before:.0f} % of one average model's {before:.4f}"
    parts.append(f"the most that joining costs a client is {cost:.4f}, {share}")
    return f"- **{model}**: {'; '.join(parts)}."


TITLES = {
    "stations": "Twelve stations in Beijing, four of them new, tested on the following year",
    "schools": "139 schools in London, 30 % of the students held out",
}
ABOUT = """# A model of one's own, on new rows

Mean squared error of log(1 + PM2.5) and of the standardised exam score, on test rows that nothing
was chosen by. Written by `python -m experiments.personal stations` and `schools` (the schools need
`--data` or SCAFFPD_DATA). Strengths are set by the evidence of the training rows, alone by every
client's own; fair is CVaR(0.2). The worst fifth is the mean over the ⌈N/5⌉ clients with the largest
losses (3 stations, 28 schools). "Lower" is in per cent with its 95 % interval over seeds, paired.
The last column is the largest (loss − loss alone) of any client, mean over seeds. Every client's
losses are in the CSV files.
[Images](../decisive/cifar100/README.md) are `python -m experiments.images decisive`."""


def written(folder: Path) -> str:
    """Write the page of the CSV files in a folder, and return it."""
    found = {}
    for name in TITLES:
        if (folder / f"{name}.csv").exists():
            rows = read_csv(folder / f"{name}.csv")
            found[name] = measures(
                [{**row, "seed": int(row["seed"]), "loss": float(row["loss"])} for row in rows]
            )
    (folder / "README.md").write_text(page(found), encoding="utf-8")
    return page(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a study, and write its CSV and the page."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.personal", description=__doc__.split("\n")[0]
    )
    parser.add_argument("what", choices=tuple(TITLES))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--data", help="the folder that has school/school.mat; by default SCAFFPD_DATA"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/personal"))
    given = parser.parse_args(arguments)
    loaders = {
        "stations": lambda seed: sp.data.beijing_air(new=4, days=40, seed=seed),
        "schools": lambda seed: school(seed=seed, folder=given.data),
    }
    rows = study(loaders[given.what], given.seeds)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{given.what}.csv"
    file.unlink(missing_ok=True)
    append_csv(
        file, list(rows[0]), [[*{**row, "loss": f"{row['loss']:.6f}"}.values()] for row in rows]
    )
    text = written(given.out)
    print(text[text.index(f"## {TITLES[given.what]}") :])


if __name__ == "__main__":
    main()
