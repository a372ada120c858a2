"""Alone, one model, or a model of one's own: stations and schools, judged on rows that nothing was
chosen by.

python -m experiments.personal stations|schools [--seeds 8] [--data FOLDER] [--out FOLDER]

Every seed draws new rows: at the stations which four are new and their forty days (tested on the
following year), at the schools which 30 % of the students are held out. l2 and κ are chosen by
three folds of the training rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import scaffpd as sp
from experiments.tables import append_csv, markdown_table, read_csv
from scaffpd.study.choosing import MEAN, Folds, GridPoint, simplest, with_strengths
from scaffpd.study.joining import fit_alone
from scaffpd.training.metrics import half_interval, worst_fifth

Array = NDArray[np.float64]
FOLDS = 3
L2S = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
KAPPAS = (math.inf, 1000.0, 300.0, 100.0, 30.0, 10.0)
FAIR = sp.CVaR(0.2)
MODEL = sp.Linear("squared", intercept=True)


def _one(p: Any) -> bool:
    return math.isinf(p.strength)


def _average(p: Any) -> bool:
    return isinstance(p.objective, sp.Average)


ARMS: dict[str, Callable[[Any], bool]] = {
    "one model, average": lambda p: _one(p) and _average(p),
    "one model, fair": lambda p: _one(p) and not _average(p),
    "personal, average": lambda p: not _one(p) and _average(p),
    "personal, fair": lambda p: not _one(p) and not _average(p),
}
FIRST = "alone"
BEFORE = "one model, average"


def alone(silos: Any, seed: int) -> tuple[Array, Array]:
    """Loss of every client by itself on its test rows, and its κ, which folds of its own rows
    choose.
    """
    models, kappas = fit_alone(Folds.of(silos.train, MODEL, silos.names, FOLDS, seed))
    outputs = [MODEL.outputs(u, X)[:, 0] for u, (X, _) in zip(models, silos.test, strict=True)]
    losses = [np.mean((z - y) ** 2) for z, (_, y) in zip(outputs, silos.test, strict=True)]
    return np.array(losses), np.array(kappas)


def arm(silos: Any, choice: GridPoint) -> Array:
    """Train with what was chosen, on all training rows; every client's loss on its test rows."""
    model = with_strengths(MODEL, choice.l2, choice.strength)
    cohort = sp.Cohort(silos.train, model, silos.names, test=silos.test)
    result = sp.train(sp.fair(choice.objective), cohort, rounds=500, tol=1e-5, progress=False)
    return cohort.evaluate(result.x, "test").loss - sp.models.regulariser(model, result.x)


def study(load: Callable[[int], Any], seeds: int) -> list[dict[str, Any]]:
    """A row for every seed, model and client."""
    rows: list[dict[str, Any]] = []

    def add(seed: int, silos: Any, name: str, losses: Array, l2: Any, strength: Any) -> None:
        sizes = [len(y) for _, y in silos.train]
        clients = enumerate(silos.names)
        rows.extend(
            {
                "seed": seed,
                "model": name,
                "client": client,
                "train_rows": sizes[i],
                "l2": l2,
                "strength": float(np.broadcast_to(strength, len(sizes))[i]),
                "loss": float(losses[i]),
            }
            for i, client in clients
        )

    for seed in range(seeds):
        silos = load(seed)
        losses, kappas = alone(silos, seed)
        add(seed, silos, FIRST, losses, 0.0, kappas)
        grid = sp.choose(
            silos.train,
            MODEL,
            [sp.Average(), FAIR],
            L2S,
            KAPPAS,
            folds=FOLDS,
            seed=seed,
            names=silos.names,
        )
        for name, keep in ARMS.items():
            point = simplest([one for one in grid.tried if keep(one)], MEAN)
            add(seed, silos, name, arm(silos, point), point.l2, point.strength)
            print(f"seed {seed}, {name}: {point.words()}", flush=True)
    return rows


def measures(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Array]]:
    """By model: the mean over clients, the worst fifth, and the most that joining costs a client;
    one per seed.
    """
    table: dict[str, list[Array]] = {}
    for name in (FIRST, *ARMS):
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
            "cost": np.array([(a - b).max() for a, b in zip(losses, table[FIRST], strict=True)]),
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
    lower = "lower than one model, average"
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
                    if model == BEFORE
                    else words(interval(own[measure], models[BEFORE][measure]))
                )
                cells += [f"{own[measure].mean():.4f}", share]
            cells.append("" if model == FIRST else f"{own['cost'].mean():.4f}")
            rows.append(cells)
        lines += [*markdown_table(header, rows, words=len(header)), ""]
        lines += [*(verdict(models, model) for model in ("personal, average", "personal, fair"))]
    return "\n".join(lines) + "\n"


def words(share: tuple[float, float, float]) -> str:
    """A share and its interval."""
    value, low, high = (f"{v:+.1f}".replace("-", "−") for v in share)
    return f"{value} % ({low} to {high})"


def verdict(models: dict[str, dict[str, Array]], model: str) -> str:
    """In words, what a personal model brings against one average model and alone."""
    parts = []
    for other in (BEFORE, FIRST):
        shares = {m: interval(models[model][m], models[other][m]) for m in ("mean", "worst fifth")}
        said = (
            f"{m} {words(v) if v[1] > 0 or v[2] < 0 else 'no clear difference'}"
            for m, v in shares.items()
        )
        parts.append(f"lower than {other}: {', '.join(said)}")
    rounded, worst = (
        words(interval(models[model][m], models[BEFORE][m])) for m in ("rounded", "worst")
    )
    parts.append(
        f"worst client against {BEFORE}: {worst}; a fifth rounded to the nearest number of "
        f"clients: {rounded}"
    )
    cost, before = (float(models[m]["cost"].mean()) for m in (model, BEFORE))
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
`--data` or SCAFFPD_DATA). l2 and κ were chosen by three folds of the training rows (`sp.choose`, by
the mean, one standard error rule), and alone by every client for itself; fair is CVaR(0.2). The
worst fifth is the mean over the ⌈N/5⌉ clients with the largest losses (3 stations, 28 schools).
"Lower" is in per cent with its 95 % interval over seeds, paired. The last column is the largest
(loss − loss alone) of any client, mean over seeds. Every client's losses are in the CSV files.
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
        "schools": lambda seed: sp.data.school(seed=seed, folder=given.data),
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
