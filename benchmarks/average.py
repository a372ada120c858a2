"""Rounds, exchanges and megabytes to a gap of 1e-8 where Λ is a single point: the average loss, no fairness.

    python benchmarks/average.py --processes 16
    python benchmarks/average.py --families synthetic hospitals --no-write

Writes benchmarks/AVERAGE.md. Methods: the subspace saddle method and Scaff-PD with `Auto()` steps, with nothing set;
SCAFFOLD with the best of a grid of local and server rates, and DANE with the best of a grid of (η, μ), both chosen with
hindsight for each single problem. The gap is f(x) − f*, with f* from a run to a certified 1e-12.

DANE: O. Shamir, N. Srebro, T. Zhang, "Communication-Efficient Distributed Optimization using an Approximate Newton-type
Method", 2014.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import scaffpd as sp
from problems import ADULT, chosen, families
from scaffpd.algorithms.base import Algorithm, ServerState, begin, moved
from scaffpd.federation import Federation, ProximalPlan
from scaffpd.study.comparison.runs import Pool

TOL = 1e-8
J = 100  # local steps of Scaffold and Scaff-PD, and the most of DANE
SLOW = ("digits", "breast cancer", "hospitals")  # a local step is a pass over the data
SUBSPACE = "subspace saddle"
SCAFFOLD = "SCAFFOLD, best rates"
DANE = "DANE, best (η, μ)"
AUTO = "Scaff-PD, Auto"
METHODS = (SUBSPACE, SCAFFOLD, DANE, AUTO)
# η_ℓ max L_i and η_g of Scaffold
LOCAL = (1.0, 0.3, 0.1, 0.03, 0.01)
SERVER = (1.0, 2.0, 4.0, 0.5)
# η and μ/max L_i of DANE
ETA = (1.0, 0.5, 0.2)
MU = (0.0, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
POINTS: dict[str, tuple[tuple[float, ...], ...]] = {
    SUBSPACE: ((),),
    AUTO: ((),),
    SCAFFOLD: tuple(itertools.product(LOCAL, SERVER)),
    DANE: tuple(itertools.product(ETA, MU)),
}
Cost = tuple[int, int, float]  # rounds, exchanges, megabytes both ways
Rows = dict[str, dict[str, tuple[Cost | None, tuple[float, ...]]]]


@dataclass(frozen=True)
class Dane(Algorithm):
    """DANE, all clients alike.

    Round:
        c = Σ c_i/N                                                                    x down; c_i up
        u_i ≈ argmin f_i(u) + ⟨ηc − c_i, u⟩ + (μ/2)‖u − x‖²,  x ← Σ u_i/N              c down; u_i up

    For squared losses u_i = x − η (H_i + μI)⁻¹ c exactly; elsewhere accelerated steps approach it, ⌈2√κ⌉ of them.
    """

    eta: float
    mu: float

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> ServerState:
        """Nothing but x⁰."""
        x, losses, _ = begin(federation, x0)
        weights = np.full(len(losses), 1 / len(losses))
        return ServerState(
            x=x, weights=weights, losses=losses, rounds=0, seed=seed, local_rate=self.mu
        )

    def round(self, federation: Federation, state: ServerState) -> ServerState:
        """A gradient, and everybody's minimum."""
        at = federation.gradients(state.x)
        plan = ProximalPlan(self.mu, torch.ones_like(state.x), limit=J)
        updates = federation.proximal_steps(at, self.eta * at.sum(state.weights), plan)
        return moved(federation, state, state.x - updates.sum(state.weights), state.weights)


class Task(NamedTuple):
    """One run."""

    family: str
    method: str
    point: tuple[float, ...]
    seed: int


def cap(family: str, method: str) -> int:
    """The most rounds of a run: a minute or so of one core."""
    if method == SUBSPACE:
        return 300
    if family == ADULT:
        return 100
    few, many = (150, 300) if family in SLOW else (400, 1000)
    return few if method == DANE else many


def algorithm(task: Task, steepest: float) -> Any:
    """The method with the rates of a point of its grid."""
    if task.method == SCAFFOLD:
        return sp.Scaffold(
            local_steps=J, local_rate=task.point[0] / steepest, server_rate=task.point[1]
        )
    if task.method == DANE:
        return Dane(task.point[0], task.point[1] * steepest)
    average = sp.Average()
    return (
        sp.SubspaceSaddle(average)
        if task.method == SUBSPACE
        else sp.ScaffPD(average, local_steps=J)
    )


def optimum(cohort: sp.Cohort) -> float:
    """f*, to 1e-12 or to what rounding allows."""
    result = sp.train(
        sp.SubspaceSaddle(sp.Average()), cohort, rounds=1000, tol=1e-12, progress=False
    )
    if not result.certificate < 0.01 * TOL:
        raise RuntimeError(f"f* is only known to {result.certificate:.1e}: {result}")
    return float(result.history.losses.mean(1).min())


def measure(task: Task) -> tuple[Task, Cost | None]:
    """What the gap took in one run, or `None` where the cap came first or the run failed."""
    cohort = families(task.seed)[task.family]().cohort()
    goal = optimum(cohort) + TOL
    method = algorithm(task, float(cohort.constants().smoothness.max()))

    def there(moment: Any) -> bool:
        return bool(moment.state.losses.mean() <= goal)

    with np.errstate(all="ignore"):
        result = sp.train(
            method, cohort, cap(task.family, task.method), progress=False, callbacks=[there]
        )
    if not result.history.losses[-1].mean() <= goal:
        return task, None
    sent = cohort.traffic
    return task, (result.rounds, sent.exchanges, (sent.bytes_up + sent.bytes_down) / 1e6)


def gather(found: dict[Task, Cost | None], names: list[str]) -> Rows:
    """For every family and method the run with the fewest rounds, and where on its grid that was."""
    rows: Rows = {name: dict.fromkeys(METHODS, (None, ())) for name in names}
    for task in sorted(found):
        cost = found[task]
        best = rows[task.family][task.method][0]
        if cost is not None and (best is None or cost[0] < best[0]):
            rows[task.family][task.method] = cost, task.point
    return rows


def numbers(rows: Rows, method: str, part: int) -> np.ndarray:
    """One column; ∞ where the cap came first."""
    found = [row[method][0] for row in rows.values()]
    return np.array([np.inf if cost is None else cost[part] for cost in found])


def shown(number: float) -> str:
    """A cell."""
    return "∞" if np.isinf(number) else f"{number:.3g}"


def table(rows: Rows, part: int) -> list[str]:
    """A Markdown table of rounds (part 0), exchanges (1) or megabytes (2), medians last."""
    columns = [numbers(rows, method, part) for method in METHODS]
    lines = ["| family | " + " | ".join(METHODS) + " |", "|" + "---|" * (1 + len(METHODS))]
    for name, *cells in zip(
        [*rows, "**median**"], *(np.append(c, np.median(c)) for c in columns), strict=True
    ):
        lines.append(f"| {name} | " + " | ".join(map(shown, cells)) + " |")
    return lines


def rates(rows: Rows) -> list[str]:
    """Where on the grids the best runs were."""
    lines = [f"| family | {SCAFFOLD}: η_ℓ max L_i, η_g | {DANE}: η, μ/max L_i |", "|---|---|---|"]
    for name, row in rows.items():
        cells = [", ".join(f"{v:g}" for v in row[method][1]) or "–" for method in (SCAFFOLD, DANE)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def report(rows: Rows, command: str) -> str:
    """The Markdown file."""
    versions = f"scaffpd {sp.__version__}, torch {torch.__version__}, NumPy {np.__version__}"
    lines = [
        "# The average loss: rounds, exchanges and megabytes to a gap of 1e-8",
        "",
        f"Written by `{command}` ({versions}, Python {sys.version.split()[0]}).",
        "",
        f"The gap is f(x) − f* of the average loss; all start from zero. SCAFFOLD and Scaff-PD make {J} local steps. "
        f"The best of {len(POINTS[SCAFFOLD])} pairs of rates (SCAFFOLD) and of {len(POINTS[DANE])} pairs (η, μ) (DANE) "
        "was chosen with hindsight for each row, by rounds; the subspace saddle method and `Auto` run as they are. "
        "DANE's local problems are solved exactly for squared losses and approached by ⌈2√κ⌉ accelerated steps, at "
        f"most {J}, elsewhere. ∞: not within {cap('', SUBSPACE)} (subspace saddle), {cap('', DANE)} (DANE) or "
        f"{cap('', AUTO)} rounds; on real data {cap(SLOW[0], DANE)} (DANE) and {cap(SLOW[0], AUTO)}; on Adult "
        f"{cap(ADULT, DANE)}. For the subspace saddle method and Scaff-PD a rejected trial point counts as a round.",
    ]
    for part, title in enumerate(("Rounds", "Exchanges", "Megabytes, up and down, all clients")):
        lines += ["", f"## {title}", "", *table(rows, part)]
    return "\n".join([*lines, "", "## The best rates", "", *rates(rows), ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--families", nargs="*", default=None, help="parts of family names; all by default"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    names = chosen(options.families)
    slow = {name: place for place, name in enumerate((ADULT, *SLOW))}
    tasks = [
        Task(name, m, point, options.seed) for name in names for m in METHODS for point in POINTS[m]
    ]
    tasks.sort(key=lambda task: slow.get(task.family, len(slow)))
    found = {}
    started = time.perf_counter()
    with Pool(measure, options.processes, "average") as pool:
        for task, cost in pool.work(tasks):
            found[task] = cost
            words = (
                "∞" if cost is None else f"{cost[0]} rounds, {cost[1]} exchanges, {cost[2]:.3g} MB"
            )
            clock = f"[{time.perf_counter() - started:4.0f} s]"
            print(f"{clock} {task.family}, {task.method} {task.point}: {words}", flush=True)
    rows = gather(found, names)
    print("\n".join(table(rows, 0)))
    if not options.no_write:
        command = shlex.join(["python", "benchmarks/average.py", *sys.argv[1:]])
        Path(__file__).with_name("AVERAGE.md").write_text(report(rows, command), encoding="utf-8")


if __name__ == "__main__":
    main()
