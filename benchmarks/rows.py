"""CPU seconds and memory of many rows, beside scikit-learn's gradient boosting and logistic model.

    OMP_NUM_THREADS=1 python benchmarks/rows.py [--rows 1000000] [--columns 20] [--only personal]

Labels of rows whose columns act by lines and by a bend, with a model of its own for each of twenty
clients. Every model is fitted in a process of its own; memory is the most that the process held
while fitting, less what it held before (the rows, and what was imported). Log loss is of as many
rows again, at most 100,000.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CLIENTS = 20
MODELS = ("one model", "personal lines", "personal curves", "logistic regression", "boosting")


def drawn(rows: int, columns: int, seed: int) -> tuple[Array, NDArray[np.int64], Array]:
    """Return rows, their clients and labels."""
    rule = np.random.default_rng(0)
    x = rule.standard_normal((CLIENTS, columns)) * 0.3 + rule.standard_normal(columns) * 0.4
    random = np.random.default_rng(seed)
    X = random.standard_normal((rows, columns))
    owner = random.integers(CLIENTS, size=rows)
    z = np.abs(X[:, 0]) - 0.8
    for k in range(CLIENTS):  # a copy of all rows would count as held before fitting
        z[owner == k] += X[owner == k] @ x[k]
    return X, owner, (random.random(rows) < 1 / (1 + np.exp(-z))).astype(float)


def fitted(
    model: str, X: Array, owner: NDArray[np.int64], y: Array
) -> Callable[[Array, NDArray[np.int64]], Array]:
    """Fit a model; return what answers with probabilities."""
    if model in MODELS[:3]:
        import scaffpd as sp

        ours = sp.FairFederatedClassifier(
            personal=model != "one model", curves=model == "personal curves"
        ).fit(X, y, clients=owner)
        if model == "one model":
            return lambda A, _: ours.predict_proba(A)[:, 1]
        return lambda A, who: ours.predict_proba(A, clients=who)[:, 1]
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    def beside(A: Array, who: NDArray[np.int64]) -> Array:
        return np.column_stack([A, who])

    if model == "boosting":
        peer = HistGradientBoostingClassifier(categorical_features=[X.shape[1]], random_state=0)
    else:
        peer = LogisticRegression()
    peer.fit(beside(X, owner), y)
    return lambda A, who: peer.predict_proba(beside(A, who))[:, 1]


def held() -> float:
    """Return the most memory that this process has held, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(model: str, rows: int, columns: int) -> None:
    """Fit once, and print a line of the table."""
    few = drawn(2000, columns, 1)
    fitted(model, *few)  # imports
    X, owner, y = drawn(rows, columns, 2)
    before = held()
    began = time.process_time()
    answers = fitted(model, X, owner, y)
    spent = time.process_time() - began
    most = held() - before
    A, who, labels = drawn(min(rows, 100_000), columns, 3)
    p = np.clip(answers(A, who), 1e-12, 1 - 1e-12)
    loss = -np.mean(np.where(labels > 0, np.log(p), np.log1p(-p)))
    print(f"| {model} | {spent:.1f} | {most:.2f} | {loss:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--only", default="", help="models whose names begin so")
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        measure(given.one, given.rows, given.columns)
        return
    size = 8 * given.rows * given.columns / 1e9
    print(f"{given.rows:,} rows × {given.columns} columns ({size:.2f} GB), {CLIENTS} clients\n")
    print("| model | CPU s | GB | log loss |\n|---|--:|--:|--:|", flush=True)
    for model in MODELS:
        if model.startswith(given.only):
            more = ["--rows", str(given.rows), "--columns", str(given.columns)]
            subprocess.run([sys.executable, __file__, "--one", model, *more], check=True)


if __name__ == "__main__":
    main()
