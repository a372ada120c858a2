r"""How often do 95 % intervals of `sp.coefficients` cover the truth? Writes benchmarks/COVERAGE.md.

Thirteen designs of simulated tables: u_i ~ N(x, T) with known x and T, rows from the model's own
distribution. Counted are slopes and the intercept of x, and every client's own intercept, in the
mean over clients. A cell fails where its coverage is outside its limits (93 to 97 %, with fewer
than ten clients 92 to 99 %) by more than a Monte Carlo error of all cells together allows
(Bonferroni, 5 %). Columns are given: what choosing them by the same rows costs is not in here.

    python benchmarks/coverage.py --tables 2000 --workers 2

Workers share the tables of all designs. What they find is appended to `coverage.jsonl` beside the
page, and a run that was killed goes on from there; remove that file to begin anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtri

import scaffpd as sp
from scaffpd.errors import InputError

Array = NDArray[np.float64]
PAGE = Path(__file__).with_name("COVERAGE.md")
CELLS = ("slopes", "intercept", "own intercepts")
TRUTH = np.array([1.0, -0.5, 0.5])  # the intercept last
LIMITS = {True: (92.0, 99.0), False: (93.0, 97.0)}  # with fewer than ten clients; with more
ALPHA = 0.05  # of one false alarm among all cells
CUT = 1.0  # between the last two of three ordered categories
TOGETHER = 10  # tables of a job


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
        if self.loss == "ordinal":
            latent = z + rng.logistic(size=len(z))
            return (latent > 0) + (latent > CUT) * 1.0
        time = rng.exponential(size=len(z)) * np.exp(-z)
        end = 2 * rng.exponential(size=len(z))
        return np.column_stack([np.minimum(time, end), time <= end])

    def covered(self, seed: int) -> list[float]:
        """Return the shares of slopes, of intercepts and of own intercepts that are covered."""
        clients, u = self.drawn(np.random.default_rng([seed, self.clients, self.rows]))
        cox = self.loss == "cox"
        classes = 3 if self.loss == "ordinal" else None
        model = sp.Linear(self.loss, 0.0, intercept=not cox, classes=classes)
        counted = [1.0, math.nan if cox else 1.0, 1.0 if self.intercept and not cox else math.nan]
        try:
            found = sp.coefficients(sp.Cohort(clients, model), effects=self.effects)
        except InputError:  # no interval covers nothing
            return [0.0 * one for one in counted]
        table = found.table()
        rows = zip([*table[:2], table[-1]], TRUTH, strict=True)
        hits = [row["low"] <= x <= row["high"] for row, x in rows]
        tables = (found.table(name)[-1] for name in found.clients)
        rows = zip(tables, u[:, 2], strict=True)
        own = [row["low"] <= x <= row["high"] for row, x in rows]
        means = np.mean(hits[:2]), hits[2], np.mean(own)
        return [float(one * mean) for one, mean in zip(counted, means, strict=True)]

    @property
    def words(self) -> str:
        named = {"poisson": "counts", "cox": "Cox", "ordinal": "ordered labels"}
        what = named.get(self.loss, self.loss)
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
    Design("ordinal", 12, 20, 0.7, effects="intercepts"),
    Design("cox", 6, 40, effects="fixed"),
)


def verdict(mean: float, error: float, few: bool, cells: int) -> str:
    """Say whether a cell's coverage is clearly outside its limits."""
    low, high = LIMITS[few]
    slack = -float(ndtri(ALPHA / (2 * cells))) * error
    if mean < low - slack:
        return "**too low**"
    return "**too high**" if mean > high + slack else ""


def rows(results: Mapping[int, Array]) -> Iterable[str]:
    """Write a line for every design: coverage in percent with its Monte Carlo error."""
    cells = cells_of(results)
    for k, found in sorted(results.items()):
        design = DESIGNS[k]
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


def cells_of(results: Mapping[int, Array]) -> int:
    return sum(int(np.isfinite(found).any(0).sum()) for found in results.values())


def job(number: int, first: int, last: int) -> tuple[int, dict[int, list[float]], float]:
    """Return the number of a design, what its tables from `first` to `last` cover, and seconds."""
    began = time.process_time()
    found = {seed: DESIGNS[number].covered(seed) for seed in range(first, last)}
    return number, found, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=2000, help="simulated tables a design")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--page", type=Path, default=PAGE)
    chosen = parser.parse_args()
    kept = chosen.page.with_suffix(".jsonl")
    results: dict[int, dict[int, list[float]]] = {k: {} for k in range(len(DESIGNS))}
    seconds = dict.fromkeys(results, 0.0)

    def seen(line: str) -> None:
        number, found, spent = json.loads(line)
        results[number] |= {int(seed): values for seed, values in found.items()}
        seconds[number] += spent

    if kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            seen(line)
    jobs = [
        (k, first, min(first + TOGETHER, chosen.tables))
        for first in range(0, chosen.tables, TOGETHER)
        for k in results
        if first not in results[k]
    ]
    os.environ["OMP_NUM_THREADS"] = "1"  # of workers, which start anew
    with ProcessPoolExecutor(chosen.workers, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(job, *each) for each in jobs]):
            line = json.dumps(done.result())
            with kept.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            seen(line)
            chosen.page.write_text(page(results, chosen.tables), encoding="utf-8")
    for k, spent in seconds.items():
        print(f"{DESIGNS[k].words}: {spent:.0f} CPU seconds, {spent / len(results[k]):.2f} a table")
    print(f"{sum(seconds.values()) / 60:.1f} CPU minutes")
    chosen.page.write_text(page(results, chosen.tables), encoding="utf-8")
    print(chosen.page.read_text(encoding="utf-8"))
    kept.unlink()


def page(results: Mapping[int, Mapping[int, list[float]]], tables: int) -> str:
    """Return the page of what is known."""
    known = {k: np.array([*found.values()]) for k, found in results.items() if found}
    table = "\n".join(rows(known))
    cells = cells_of(known)
    return f"""# Coverage of 95 % intervals

`python benchmarks/coverage.py --tables {tables}` simulates tables whose coefficients are known, and counts how often the intervals of `sp.coefficients` cover them: of the slopes and the intercept x, and of the clients' own intercepts in the mean over clients. Monte Carlo errors stand beside the numbers. Limits are 93 to 97 %, with fewer than ten clients 92 to 99 %; a cell fails where it is outside by more than chance in any of the {cells} cells allows (Bonferroni, 5 %). {table.count("**") // 2} of {cells} cells fail.

| design: clients × rows, deviations of intercept and slopes | tables | {" | ".join(CELLS)} |
|---|--:|--:|--:|--:|
{table}

Errors are conditional on the columns: curves, pairs and categories that are chosen by the same rows make intervals too short, and no simulation here chooses any.
"""


if __name__ == "__main__":
    main()
