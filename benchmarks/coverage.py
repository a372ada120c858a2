r"""How often do 95 % intervals of `sp.coefficients` cover the truth? Writes benchmarks/COVERAGE.md.

Twelve designs of simulated tables: u_i ~ N(x, T) with known x and T, rows from the model's own
distribution. Counted are slopes and the intercept of x, and every client's own intercept, in the
mean over clients. A cell fails where its coverage is outside its limits (93 to 97 %, with fewer
than ten clients 92 to 99 %) by more than a Monte Carlo error of all cells together allows
(Bonferroni, 5 %). Columns are given: what choosing them by the same rows costs is not in here.

    OMP_NUM_THREADS=1 python benchmarks/coverage.py --tables 2000 --workers 2
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtri

import scaffpd as sp

Array = NDArray[np.float64]
PAGE = Path(__file__).with_name("COVERAGE.md")
CELLS = ("slopes", "intercept", "own intercepts")
TRUTH = np.array([1.0, -0.5, 0.5])  # the intercept last
LIMITS = {True: (92.0, 99.0), False: (93.0, 97.0)}  # with fewer than ten clients; with more
ALPHA = 0.05  # of one false alarm among all cells


@dataclass(frozen=True)
class Design:
    """Clients with two columns; deviations of the intercept and of both slopes between them."""

    loss: str
    clients: int
    rows: int
    intercept: float = 0.0
    slope: float = 0.0
    effects: str | None = None
    constant: int = 0  # columns that are constant within a client

    def drawn(self, rng: np.random.Generator) -> tuple[list[tuple[Array, Array]], Array]:
        """Draw rows of all clients, and their true coefficients."""
        spread = np.array([self.slope, self.slope, self.intercept])
        u = TRUTH + spread * rng.standard_normal((self.clients, 3))
        found = []
        for own in u:
            X = rng.standard_normal((self.rows, 2))
            X[:, : self.constant] = X[0, : self.constant]
            found.append((X, self.targets(rng, X @ own[:2] + own[2])))
        return found, u

    def targets(self, rng: np.random.Generator, z: Array) -> Array:
        if self.loss == "squared":
            return z + rng.standard_normal(len(z))
        if self.loss == "logistic":
            return (rng.random(len(z)) < expit(z)).astype(float)
        if self.loss == "poisson":
            mean = sp.Linear("poisson").means(z[:, None])[:, 0]
            return rng.poisson(mean).astype(float)
        time = rng.exponential(size=len(z)) * np.exp(-z)
        end = 2 * rng.exponential(size=len(z))
        return np.column_stack([np.minimum(time, end), time <= end])

    def covered(self, seed: int) -> list[float]:
        """Return the shares of slopes, of intercepts and of own intercepts that are covered."""
        clients, u = self.drawn(np.random.default_rng([seed, self.clients, self.rows]))
        cox = self.loss == "cox"
        model = sp.Linear(self.loss, 0.0, intercept=not cox)
        found = sp.coefficients(sp.Cohort(clients, model), effects=self.effects)
        rows = zip(found.table(), TRUTH, strict=False)
        hits = [row["low"] <= x <= row["high"] for row, x in rows]
        own = math.nan
        if self.intercept and not cox:
            tables = (found.table(name)[2] for name in found.clients)
            rows = zip(tables, u[:, 2], strict=True)
            own = np.mean([row["low"] <= x <= row["high"] for row, x in rows])
        return [float(np.mean(hits[:2])), math.nan if cox else float(hits[2]), float(own)]

    @property
    def words(self) -> str:
        what = {"poisson": "counts", "cox": "Cox"}.get(self.loss, self.loss)
        kind = self.effects or "by evidence"
        columns = ", columns of clients" if self.constant == 2 else ""
        columns = ", a column of clients" if self.constant == 1 else columns
        return (
            f"{what}, {self.clients} × {self.rows}, deviations {self.intercept:g} and "
            f"{self.slope:g}: {kind}{columns}"
        )


DESIGNS = (
    Design("squared", 6, 40, effects="fixed"),
    Design("squared", 8, 10, 0.7, effects="intercepts"),
    Design("squared", 30, 10, 0.7, effects="intercepts", constant=1),
    Design("squared", 10, 30, 0.5, 0.5, effects="slopes"),
    Design("squared", 6, 30, effects="slopes"),
    Design("squared", 10, 20, 0.7),
    Design("logistic", 6, 60, effects="fixed"),
    Design("logistic", 111, 4, 1.98, effects="intercepts", constant=2),
    Design("logistic", 12, 30, 0.7, effects="intercepts"),
    Design("logistic", 20, 40, 0.5, 0.5, effects="slopes"),
    Design("poisson", 8, 10, 0.7, effects="intercepts"),
    Design("cox", 6, 40, effects="fixed"),
)


def verdict(mean: float, error: float, few: bool, cells: int) -> str:
    """Say whether a cell's coverage is clearly outside its limits."""
    low, high = LIMITS[few]
    slack = -float(ndtri(ALPHA / (2 * cells))) * error
    if mean < low - slack:
        return "**too low**"
    return "**too high**" if mean > high + slack else ""


def rows(results: Sequence[Array]) -> Iterable[str]:
    """Write a line for every design: coverage in percent with its Monte Carlo error."""
    cells = sum(int(np.isfinite(found).any(0).sum()) for found in results)
    for design, found in zip(DESIGNS, results, strict=True):
        texts = []
        for values in found.T:
            if np.isnan(values).all():
                texts.append("")
                continue
            mean = 100 * float(values.mean())
            # at least that of one miss: no error of 0 where everything is covered
            spread = max(float(values.std()), math.sqrt(1 / len(values) * (1 - 1 / len(values))))
            error = 100 * spread / math.sqrt(len(values))
            said = verdict(mean, error, design.clients < 10, cells)
            texts.append(f"{mean:.1f} ± {error:.1f} {said}".strip())
        yield f"| {design.words} | {len(found)} | {' | '.join(texts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=2000, help="simulated tables a design")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop designs early")
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args()
    results = []
    with ProcessPoolExecutor(chosen.workers) as pool:
        for design in DESIGNS:
            began = time.perf_counter()
            found: list[list[float]] = []
            while len(found) < chosen.tables:
                if time.perf_counter() - began > chosen.seconds / len(DESIGNS):
                    break
                ahead = range(len(found), min(len(found) + 20 * chosen.workers, chosen.tables))
                found += pool.map(partial(Design.covered, design), ahead, chunksize=5)
            results.append(np.array(found))
            print(f"{design.words}: {time.perf_counter() - began:.0f} s", flush=True)
    table = "\n".join(rows(results))
    command = f"python benchmarks/coverage.py --tables {chosen.tables}"
    if chosen.seconds < math.inf:
        command += f" --seconds {chosen.seconds:g}"
    cells = sum(int(np.isfinite(found).any(0).sum()) for found in results)
    failed = table.count("**")
    page = f"""# Coverage of 95 % intervals

`{command}` simulates tables whose coefficients are known, and counts how often the intervals of `sp.coefficients` cover them: of the slopes and the intercept x, and of the clients' own intercepts in the mean over clients. Monte Carlo errors stand beside the numbers. Limits are 93 to 97 %, with fewer than ten clients 92 to 99 %; a cell fails where it is outside by more than chance in any of the {cells} cells allows (Bonferroni, 5 %). {failed // 2} of {cells} cells fail.

| design: clients × rows, deviations of intercept and slopes | tables | {" | ".join(CELLS)} |
|---|--:|--:|--:|--:|
{table}

Errors are conditional on the columns: curves, pairs and categories that are chosen by the same rows make intervals too short, and no simulation here chooses any.
"""
    chosen.page.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
