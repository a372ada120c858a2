r"""How many variances should the evidence set? Simulated clients whose true models are known.

u_i ~ N(x, T), eight columns and an intercept, N clients; either all columns differ between clients
(τ = .36), or none, or two, or four of them by random τ; the intercept always does. Printed is the
excess loss over the true models' times 1000: squared error with σ² = 1, or log loss of labels.

    one         one model for all, ridge by evidence
    alone       every client by itself, ridge by its own evidence
    a column    a τ and an ω per column
    joined      one τ and one ω for all columns, and the intercept's
    rule        joined, until a variance per column gains a nat each (the package's default)

    python benchmarks/strengths.py [--loss squared|logistic] [--rows 30] [--draws 20] [--clients 2,4]
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

import scaffpd as sp
from scaffpd.algorithms.evidence import Strengths, strengths
from scaffpd.study.alone import fit_alone

Array = NDArray[np.float64]
COLUMNS = 8
GROUPS = [*map(str, range(COLUMNS)), "intercept"]
DIFFERENCES = ("all", "none", "two", "four")
RULES = {"a column": -np.inf, "joined": np.inf, "rule": None}


def variances(rng: np.random.Generator, what: str) -> Array:
    """Return τ of every column, the intercept's last."""
    tau = np.append(np.zeros(COLUMNS), 0.5)
    if what == "all":
        tau[:COLUMNS] = 0.36
    elif what == "two":
        tau[:2] = 0.36
    elif what == "four":
        tau[:4] = rng.exponential(0.36, 4)
    return tau


def drawn(rng: np.random.Generator, U: Array, rows: int, loss: str) -> list[tuple[Array, Array]]:
    """Draw every client's rows."""
    clients = []
    for u in U:
        X = rng.normal(size=(rows, COLUMNS))
        z = X @ u[:-1] + u[-1]
        noise = rng.normal(size=rows) if loss == "squared" else rng.logistic(size=rows)
        clients.append((X, z + noise if loss == "squared" else (z + noise > 0).astype(float)))
    return clients


def excess(rng: np.random.Generator, U: Array, own: Array, loss: str) -> float:
    """Return the mean excess loss of the clients' models."""
    if loss == "squared":
        return float(((own - U) ** 2).sum(1).mean())
    X = np.column_stack([rng.normal(size=(2000, COLUMNS)), np.ones(2000)])
    z = X @ U.T
    p = expit(z)
    found = X @ own.T
    return float((np.logaddexp(0, found) - p * found - np.logaddexp(0, z) + p * z).mean())


def fitted(clients: list[tuple[Array, Array]], loss: str) -> dict[str, Array]:
    """Return the clients' models by all rules."""
    model = sp.Linear(loss, 0.0, intercept=True)
    cohort = sp.Cohort(clients, sp.Personal(model, 1.0))

    def fit(**options: object) -> Strengths:
        return strengths(cohort, GROUPS, loss, **options)  # type: ignore[arg-type]

    one = fit(strength=np.full(len(GROUPS), np.inf)).x
    found = {
        "one": np.tile(one, (len(clients), 1)),
        "alone": fit_alone(sp.Linear(loss, "auto", intercept=True), clients)[0],
    }
    for name, worth in RULES.items():
        settled = fit() if worth is None else fit(worth=worth)
        clients_own = cohort.using(settled.l2.tolist(), settled.strength.tolist())
        own = clients_own.own_models(settled.x)
        assert own is not None
        found[name] = own.numpy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loss", default="squared")
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--clients", default="2,3,4,6,8,10")
    chosen = parser.parse_args()
    print("clients  differ   " + "".join(f"{name:>10}" for name in ("one", "alone", *RULES)))
    for n in map(int, chosen.clients.split(",")):
        for what in DIFFERENCES:
            sums: dict[str, list[float]] = {}
            for draw in range(chosen.draws):
                rng = np.random.default_rng((77, n, DIFFERENCES.index(what), draw))
                tau = variances(rng, what)
                x = 0.7 * np.append(rng.normal(size=COLUMNS), 0.3)
                U = x + np.sqrt(tau) * rng.normal(size=(n, len(tau)))
                rows = drawn(rng, U, chosen.rows, chosen.loss)
                for name, own in fitted(rows, chosen.loss).items():
                    lost = excess(np.random.default_rng(draw), U, own, chosen.loss)
                    sums.setdefault(name, []).append(lost)
            means = "".join(f"{1000 * np.mean(values):10.0f}" for values in sums.values())
            print(f"{n:7d}  {what:6s}   {means}", flush=True)


if __name__ == "__main__":
    main()
