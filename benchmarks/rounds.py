"""Rounds, exchanges and megabytes to a certified gap of 1e-8, for every objective on every family
of problems.

    python benchmarks/rounds.py                      all of it; can be interrupted: the same command goes on
    python benchmarks/rounds.py --families synthetic digits --no-write
    python benchmarks/rounds.py --check              our methods anew, held against rounds.csv; fails on two rounds more

Writes benchmarks/ROUNDS.md, benchmarks/rounds.csv and benchmarks/rounds.png. Methods: `fair`, which
is minimax Newton on all of these; the subspace saddle method by itself;
Scaff-PD with `Auto()` steps, with the best of a grid of `Fixed` steps, chosen with hindsight for
each single problem, and with the steps of the paper's `Theory()`; and without local steps, the
accelerated primal-dual method, extragradient and descent-ascent.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import scaffpd as sp
from problems import ADULT, HARD, OBJECTIVES, Family, chosen, families, objectives, tolerance
from scaffpd.models.execution import pooled

sys.path.append(str(Path(__file__).resolve().parents[1]))

from experiments.central import Extragradient, GradientDescentAscent

J = 100
CAP = {"few": 400, "many": 3000, "fixed": 400, "theory": 5000}
SLOW = {
    "few": 300,
    "many": 1000,
    "fixed": 100,
    "theory": 150,
}  # where a round costs J passes over the data
REAL = ("breast cancer", "digits", "hospitals", ADULT)
GLOBAL = (1.0, 0.5, 2.0, 0.2, 0.05)
FEW_GLOBAL = (2.0, 1.0, 0.5)
SIGMA = (1.0, 0.1, 10.0, 0.01, 100.0, 1e-3, 1e-4)
FEW_SIGMA = (10.0, 1.0, 0.1, 100.0, 0.01)
THETA = (0.0, 1.0)
OURS = "fair"
SUBSPACE = "subspace saddle"
FIXED = "Scaff-PD, best Fixed"
AUTO = "Scaff-PD, Auto"
THEORY = "Scaff-PD, Theory"
PLAIN: dict[
    str, tuple[str, Callable[[Any], Any]]
] = {  # methods that run as they are, and their limit
    OURS: ("few", sp.fair),
    SUBSPACE: ("few", sp.SubspaceSaddle),
    AUTO: ("many", lambda objective: sp.ScaffPD(objective, local_steps=J)),
    f"{AUTO}, θ = 1": (
        "many",
        lambda objective: sp.ScaffPD(objective, local_steps=J, steps=sp.Auto(1.0)),
    ),
    THEORY: ("theory", lambda objective: sp.ScaffPD(objective, local_steps=J, steps=sp.Theory())),
    "APD": ("many", lambda objective: sp.ScaffPD(objective, local_steps=1)),
    "APD, θ = 1": (
        "many",
        lambda objective: sp.ScaffPD(objective, local_steps=1, steps=sp.Auto(1.0)),
    ),
    "extragradient": ("many", Extragradient),
    "descent-ascent": ("many", GradientDescentAscent),
}
METHODS = (OURS, SUBSPACE, FIXED, *list(PLAIN)[2:])
SEES_ALL = (OURS,)  # its server sees every client's gradient
Cost = tuple[int, int, float]  # rounds, exchanges, megabytes both ways
Row = dict[str, Any]  # a problem and what every method needs for it


def cost(method: Any, cohort: sp.Cohort, cap: int, tol: float = 1e-8) -> Cost | None:
    """What the certified gap took, or `None` where the cap came first or the run failed."""
    with np.errstate(all="ignore"):
        result = sp.train(method, cohort, rounds=cap, tol=tol)
    if result.status != "converged":
        return None
    sent = cohort.traffic
    return result.rounds, sent.exchanges, (sent.bytes_up + sent.bytes_down) / 1e6


def best_fixed(
    objective: sp.Average, cohort: sp.Cohort, cap: int, slow: bool, tol: float
) -> Cost | None:
    """A coarse grid over (η_g, σ, θ) with η_ℓ = 1/max L_i, smaller η_ℓ with the best of it, then a
    finer grid.
    """
    safe = 1 / cohort.constants().smoothness.max()
    total = objective.start(cohort.gradients(cohort.start()).losses).sum()
    best: tuple[Cost | None, tuple[float, ...]] = (None, (1.0, 1.0, 0.0, 1.0))

    def attempt(point: tuple[float, ...]) -> tuple[Cost | None, tuple[float, ...]]:
        limit = cap if best[0] is None else best[0][0] - 1
        if limit < 1:
            return best
        local = safe * point[3]
        steps = sp.Fixed(point[0] * local * J / total, point[1], point[2], local)
        found = cost(sp.ScaffPD(objective, local_steps=J, steps=steps), cohort, limit, tol)
        return best if found is None else (found, point)

    sigmas = (1.0,) if isinstance(objective, sp.Average) else FEW_SIGMA if slow else SIGMA
    for point in itertools.product(
        FEW_GLOBAL if slow else GLOBAL, sigmas, THETA[:1] if slow else THETA, (1.0,)
    ):
        best = attempt(point)
    (eta, sigma, theta, _), known = best[1], best[0] is not None
    for smaller, b in itertools.product(
        (0.3, 0.1, 0.03), (1.0, 2.0) if known else (1.0, 10.0, 0.1)
    ):
        best = attempt((eta * b, sigma, theta, smaller) if known else (eta, b, theta, smaller))
    if best[0] is not None:
        eta, sigma, theta, smaller = best[1]
        for a, b in itertools.product((1.0, 0.7, 1.4), (1.0, 0.3, 3.0, 0.5, 2.0)):
            best = attempt((eta * a, sigma * b, theta, smaller))
    return best[0]


def measure(task: tuple[str, str, str, int]) -> Row:
    """One cell: what one method needs on one problem."""
    name, which, method, seed = task
    family: Family = families(seed)[name]()
    objective = objectives(family)[which]
    cohort = family.cohort()
    slow = name in REAL or name in HARD
    cap = SLOW if slow else CAP
    tol = tolerance(family, objective)
    if method == FIXED:
        found = best_fixed(objective, cohort, cap["fixed"], slow, tol)
    else:
        limit, make = PLAIN[method]
        found = cost(make(objective), cohort, cap[limit], tol)
    return {"family": name, "objective": which, "method": method, "cost": found}


def rows_file(seed: int) -> Path:
    """Where finished cells are kept, so that an interrupted benchmark goes on where it stopped."""
    return Path(__file__).with_name(f".rounds-{seed}.jsonl")


def read_cells(seed: int) -> dict[tuple[str, str, str], Any]:
    """The cells of earlier, interrupted calls."""
    if not rows_file(seed).exists():
        return {}
    cells = [json.loads(line) for line in rows_file(seed).read_text(encoding="utf-8").splitlines()]
    return {(cell["family"], cell["objective"], cell["method"]): cell["cost"] for cell in cells}


def applies(which: str, method: str) -> bool:
    """`Theory` is for objectives on the simplex."""
    return method != THEORY or which not in ("QFair", "Nash")


def entry(row: Row, method: str, part: int) -> str:
    """A cell: a number, `∞` where the cap came first, `–` where a method does not apply."""
    if method not in row["costs"]:
        return "–"
    found = row["costs"][method]
    return "∞" if found is None else f"{found[part]:.3g}" if part == 2 else str(found[part])


def table(rows: list[Row], part: int) -> list[str]:
    """A Markdown table of rounds (part 0), exchanges (1) or megabytes (2)."""
    lines = [
        "| family | objective | " + " | ".join(METHODS) + " |",
        "|" + "---|" * (2 + len(METHODS)),
    ]
    for row in rows:
        cells = [row["family"], row["objective"], *(entry(row, method, part) for method in METHODS)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def numbers(rows: list[Row], method: str, part: int) -> np.ndarray:
    """One column; ∞ where the cap came first, NaN where a method does not apply."""
    found = [row["costs"].get(method, (np.nan,) * 3) for row in rows]
    return np.array([np.inf if cost_ is None else cost_[part] for cost_ in found], dtype=float)


def summary(rows: list[Row]) -> list[str]:
    """What the tables say, in sentences with numbers."""
    ours, subspace, fixed, auto = (
        numbers(rows, method, 0) for method in (OURS, SUBSPACE, FIXED, AUTO)
    )
    both = np.isfinite(auto) & np.isfinite(fixed)
    worse = [
        f"{row['family']} / {row['objective']}"
        for row, a, b in zip(rows, ours, fixed, strict=True)
        if a > b
    ]
    ratio = auto[both] / fixed[both]
    return [
        *(
            f"- {name} reaches the gap on {np.isfinite(column).sum()} of {len(rows)} problems; "
            "rounds: median "
            f"{np.median(column):.3g}, most {column[np.isfinite(column)].max():.3g}."
            for name, column in (
                ("`fair`", ours),
                ("The subspace saddle method, which needs sums only,", subspace),
            )
        ),
        f"- `fair` needs more rounds than the best constants of Scaff-PD on {len(worse)} problems"
        + (f": {'; '.join(worse)}." if worse else "."),
        "- Scaff-PD with `Auto` against its best constants: median ratio of rounds "
        f"{np.median(ratio):.2f}, largest "
        f"{ratio.max():.2f}, over {both.sum()} problems where both reach the gap.",
        *(accelerated(rows, method) for method in (AUTO, "APD")),
    ]


def accelerated(rows: list[Row], method: str) -> str:
    """Whether the paper's extrapolation pays."""
    without = numbers(rows, method, 0)
    with_it = numbers(rows, f"{method}, θ = 1", 0)
    solved = np.isfinite(without) | np.isfinite(with_it)
    both = np.isfinite(without) & np.isfinite(with_it)
    ratio = with_it[both] / without[both]
    return (
        f"- {method} with the paper's extrapolation (θ = 1 in place of 0): fewer rounds on "
        f"{(with_it < without)[solved].sum()} of {solved.sum()} problems that either solves, by a "
        "tenth or more on "
        f"{(with_it <= 0.9 * without)[solved].sum()}; more on "
        f"{(with_it > without)[solved].sum()}; median ratio "
        f"{np.median(ratio):.2f}, smallest {ratio.min():.2f}."
    )


def report(rows: list[Row], seed: int) -> str:
    """The Markdown file."""
    lines = [
        "# Rounds, exchanges and megabytes to a certified gap of 1e-8",
        "",
        f"Written by `python benchmarks/rounds.py --seed {seed}` "
        f"(scaffpd {sp.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}).",
        "",
        f"Scaff-PD makes J = {J} local steps. `best Fixed`: the best of a grid of constant (η_g, "
        "σ, θ, η_ℓ), found "
        "with hindsight for each row (up to 94 runs; up to 39 on the real data). `Theory`: the "
        "steps with the paper's "
        "proof, for objectives on the simplex. Everything else runs as it is, with nothing set. "
        "∞: not within the "
        f"limit of {CAP['few']} (the first two), {CAP['fixed']} (`best Fixed`), {CAP['theory']} "
        "(`Theory`) or "
        f"{CAP['many']} rounds; on real data {SLOW['few']}, {SLOW['fixed']}, {SLOW['theory']} and "
        f"{SLOW['many']}. A "
        "trial point that was rejected counts as a round. Runs that end because the bound on "
        "rounding is above the "
        "gap (N = 30, d = 60) count as ∞ too. On the last five families, on which methods stall, "
        "the gap "
        "is 1e-8 of the first value, and the limits are those of real data.",
        "",
        *summary(rows),
        "",
        "![Rounds, exchanges and megabytes of all methods](rounds.png)",
    ]
    for part, title in enumerate(("Rounds", "Exchanges", "Megabytes, up and down, all clients")):
        lines += ["", f"## {title}", "", *table(rows, part)]
    return "\n".join([*lines, ""])


def write_csv(rows: list[Row], path: Path) -> None:
    """The same numbers for machines."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["family", "objective", "method", "rounds", "exchanges", "megabytes"])
        for row in rows:
            for method, found in row["costs"].items():
                writer.writerow([row["family"], row["objective"], method, *(found or ("", "", ""))])


def draw(rows: list[Row], path: Path) -> None:
    """One strip per method: a dot per problem, the median as a bar; problems that were not solved
    at the right edge.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.2), sharey=True, layout="constrained")
    random = np.random.default_rng(0)
    for part, (axis, title) in enumerate(
        zip(axes, ("rounds", "exchanges", "megabytes"), strict=True)
    ):
        columns = [numbers(rows, method, part) for method in METHODS]
        finite = np.concatenate([column[np.isfinite(column)] for column in columns])
        edge = 2.5 * finite.max()
        for place, column in enumerate(columns):
            known = column[~np.isnan(column)]
            height = len(METHODS) - place + random.uniform(-0.22, 0.22, len(known))
            colour = "#0072b2" if place == 0 else "#777777"
            solved = np.isfinite(known)
            axis.scatter(known[solved], height[solved], s=9, color=colour, alpha=0.7, linewidths=0)
            axis.scatter(
                np.full((~solved).sum(), edge),
                height[~solved],
                s=14,
                marker="x",
                color="#d55e00",
                linewidths=0.8,
            )
            middle = np.median(known)
            if np.isfinite(middle):
                axis.plot(
                    [middle] * 2,
                    [len(METHODS) - place - 0.35, len(METHODS) - place + 0.35],
                    color="black",
                    lw=1.6,
                )
        axis.set_xscale("log")
        axis.set_xlabel(f"{title} to a certified gap of 1e-8")
        axis.grid(axis="x", which="major", color="#dddddd", lw=0.6)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(
        range(len(METHODS), 0, -1), [f"{m} †" if m in SEES_ALL else m for m in METHODS]
    )
    figure.suptitle(
        f"{len(rows)} problems, one dot each; bars are medians, crosses were not solved within "
        "the limit; "
        "† the server sees every client's gradient",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def costly(task: tuple[str, str, str, int]) -> int:
    """Long tasks first."""
    slow = (ADULT, "digits", "breast cancer", "hospitals")
    order = slow.index(task[0]) if task[0] in slow else len(slow)
    return order if task[2] == FIXED else 10 + order if task[2] == AUTO else 20 + order


def check(tasks: list[tuple[str, str, str, int]], processes: int) -> list[str]:
    """Measure these cells anew and return those that need over one round more than rounds.csv says."""
    with Path(__file__).with_name("rounds.csv").open(encoding="utf-8", newline="") as file:
        before = {
            (r["family"], r["objective"], r["method"]): r["rounds"] for r in csv.DictReader(file)
        }
    worse = []
    same = 0
    for cell in pooled(measure, sorted(tasks, key=costly), processes):
        was = float(before.get((cell["family"], cell["objective"], cell["method"])) or np.inf)
        now = np.inf if cell["cost"] is None else float(cell["cost"][0])
        same += was == now
        if was != now:
            print(
                cell["family"],
                cell["objective"],
                cell["method"],
                f"{was:g} -> {now:g}",
                sep=" | ",
                flush=True,
            )
        if now > was + 1:
            worse.append(
                f"{cell['family']} / {cell['objective']} / {cell['method']}: {was:g} -> {now:g}"
            )
    print(f"{same} of {len(tasks)} cells as before, {len(worse)} over one round worse")
    return worse


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--families", nargs="*", default=None, help="parts of family names; all by default"
    )
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--fresh", action="store_true", help="measure anew what an earlier call has measured"
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument(
        "--check", nargs="*", default=None, help="methods; by default ours", metavar="METHOD"
    )
    options = parser.parse_args()
    names = chosen(options.families)
    problems = [(name, which) for name in names for which in HARD.get(name, OBJECTIVES)]
    tasks = [
        (*problem, method, options.seed)
        for problem in problems
        for method in METHODS
        if applies(problem[1], method)
    ]
    if options.check is not None:
        wanted = options.check or [OURS, SUBSPACE, AUTO]
        sys.exit(
            "\n".join(check([task for task in tasks if task[2] in wanted], options.processes))
            or None
        )
    if options.fresh:
        rows_file(options.seed).unlink(missing_ok=True)
    known = read_cells(options.seed)
    open_tasks = sorted((task for task in tasks if task[:3] not in known), key=costly)
    started = time.perf_counter()
    with rows_file(options.seed).open("a") as file:
        for cell in pooled(measure, open_tasks, options.processes):
            known[cell["family"], cell["objective"], cell["method"]] = cell["cost"]
            file.write(json.dumps(cell) + "\n")
            file.flush()
            print(f"[{time.perf_counter() - started:6.0f} s]", *cell.values(), flush=True)
    rows = [
        {
            "family": name,
            "objective": which,
            "costs": {m: known[name, which, m] for m in METHODS if applies(which, m)},
        }
        for name, which in problems
    ]
    print("\n".join(summary(rows)))
    if not options.no_write:
        here = Path(__file__)
        here.with_name("ROUNDS.md").write_text(report(rows, options.seed), encoding="utf-8")
        write_csv(rows, here.with_name("rounds.csv"))
        draw(rows, here.with_name("rounds.png"))


if __name__ == "__main__":
    main()
