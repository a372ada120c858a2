"""`fair` on problems with many columns or clients, and in CPU seconds beside SciPy's L-BFGS-B.

    python benchmarks/solver.py             both tables of docs/speed.md, some three minutes
    python benchmarks/solver.py --quick     small members of the same

The first table: rounds to a certificate of 1e-6 of the objective. The second: CPU seconds on one
thread from arrays to such a certificate, and those of L-BFGS-B for as many iterations as bring it
within 1e-6 of the optimum, known with hindsight; it proves nothing. Both take the least of several
turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize
import torch
from scipy.special import expit
from threadpoolctl import threadpool_limits

import scaffpd as sp

SHARE = 1e-6
L2 = 1e-3
TURNS = 7
Clients = list[tuple[np.ndarray, np.ndarray]]


def labelled(seed: int, N: int, m: int, d: int, scales: Any = 1.0) -> Clients:
    """Clients with rules of their own, noisy labels, and scaled columns."""
    random = np.random.default_rng(seed)
    rule = random.standard_normal(d)
    clients = []
    for _ in range(N):
        A = random.standard_normal((m, d))
        own = A @ (rule + 0.5 * random.standard_normal(d)) / d**0.5
        clients.append((A * scales, (own + random.standard_normal(m) > 0).astype(float)))
    return clients


def one_hot(seed: int, N: int, m: int, columns: int, levels: int) -> Clients:
    """Clients with categorical columns, most rows of which have few of the levels."""
    random = np.random.default_rng(seed)
    rule = random.standard_normal(columns * levels)
    clients = []
    for _ in range(N):
        A = np.zeros((m, columns * levels))
        for c in range(columns):
            level = np.minimum(random.pareto(1.0, m) * levels / 25, levels - 1).astype(int)
            A[np.arange(m), c * levels + level] = 1
        own = A @ rule / columns**0.5 + 0.5 * random.standard_normal(m)
        clients.append((A, (own > 0).astype(float)))
    return clients


def large(quick: bool) -> dict[str, tuple[Clients, float]]:
    """Return the problems of the first table, by name, with their l2."""
    k = 10 if quick else 1
    scales = 10.0 ** np.random.default_rng(1).uniform(-4, 4, 400 // k)
    return {
        "N = 20, m = 60, d = 400, columns of 10^±4": (
            labelled(0, 20, 60 // k, 400 // k, scales),
            1e-6,
        ),
        "N = 10, m = 30, d = 1,000": (labelled(0, 10, 30, 1000 // k), L2),
        "N = 2,000, m = 50, d = 500": (labelled(0, 2000 // k, 50, 500 // k), L2),
        "N = 20, m = 200, d = 5,000, one-hot": (one_hot(0, 20, 200 // k, 10, 500 // k), L2),
    }


def rounds(quick: bool) -> None:
    """Print the first table."""
    print(
        "| problem | objective | rounds | certificate ÷ objective | CPU s |\n|---|---|---|---|---|"
    )
    for name, (clients, l2) in large(quick).items():
        for objective in (sp.Agnostic(), sp.CVaR(0.3), sp.ChiSquare(0.1)):
            cohort = sp.Cohort(clients, sp.Linear("logistic", l2=l2))
            stop = lambda now, o=objective: bool(
                now.state.certificate <= SHARE * o.support(now.state.losses)
            )
            begun = time.process_time()
            result = sp.train(sp.fair(objective), cohort, rounds=40, callbacks=[stop])
            spent = time.process_time() - begun
            value = objective.support(cohort.evaluate(result.x).loss)
            share = result.certificate / value
            print(
                f"| {name} | {objective} | {result.rounds} | {share:.0e} | {spent:.2f} |",
                flush=True,
            )


def lbfgs(clients: Clients, loss: str, objective: Any, iterations: int) -> Any:
    """Minimise F(x) = max_λ ⟨f(x), λ⟩ − ψ(λ) by SciPy, on stacked rows."""
    N = len(clients)
    m = len(clients[0][1])
    A = np.concatenate([rows for rows, _ in clients])
    y = np.concatenate([targets for _, targets in clients])

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        z = A @ x
        if loss == "squared":
            each, slope = (z - y) ** 2, 2 * (z - y)
        else:
            each, slope = np.logaddexp(0, z) - y * z, expit(z) - y
        losses = each.reshape(N, m).mean(1) + L2 / 2 * (x @ x)
        weights = objective.maximizer(losses)
        pulled = A.T @ (np.repeat(weights / m, m) * slope)
        return objective.support(losses), pulled + weights.sum() * L2 * x

    options = {"maxiter": iterations, "maxfun": 10**5, "ftol": 0, "gtol": 0}
    return scipy.optimize.minimize(
        value, np.zeros(A.shape[1]), jac=True, method="L-BFGS-B", options=options
    )


def least(run: Callable[[], object], turns: int) -> float:
    """Return the least CPU milliseconds of several turns."""
    spent = []
    for _ in range(turns):
        begun = time.process_time()
        run()
        spent.append(time.process_time() - begun)
    return 1e3 * min(spent)


def compared(clients: Clients, loss: str, objective: Any, turns: int) -> tuple[int, float, float]:
    """Return the rounds of `fair`, its milliseconds and those of L-BFGS-B."""
    model = sp.Linear(loss, l2=L2)

    def ours(tol: float) -> sp.Result:
        return sp.train(sp.fair(objective), sp.Cohort(clients, model), tol=tol)

    optimum = objective.support(sp.Cohort(clients, model).evaluate(ours(1e-10).x).loss)
    tol = SHARE * abs(optimum)
    done = ours(tol)
    assert done.certificate <= tol
    near = optimum + tol
    enough = next(k for k in range(1, 999) if lbfgs(clients, loss, objective, k).fun <= near)
    milliseconds = least(lambda: ours(tol), turns)
    return done.rounds, milliseconds, least(lambda: lbfgs(clients, loss, objective, enough), turns)


def beside(quick: bool) -> None:
    """Print the second table."""
    names = ("Average", "ChiSquare", "Tilted", "QFair", "Nash")
    print("| N, m, d | loss | rounds | `fair`, ms | ratio:", " | ".join(names), "|")
    print("|---|---|---|---|---|---|---|---|---|")
    sizes = [(10, 100, 20), (20, 200, 30), (20, 1000, 50), (10, 5000, 50)]
    for N, m, d in [(5, 40, 8)] if quick else sizes:
        clients = labelled(0, N, m, d, np.arange(1, d + 1) ** -0.6)
        for loss in ("squared", "logistic"):
            first = sp.Cohort(clients, sp.Linear(loss, l2=L2)).evaluate(np.zeros(d)).loss
            nash = sp.Nash(2 * float(first.max()))
            objectives = (sp.Average(), sp.ChiSquare(0.1), sp.Tilted(0.1), sp.QFair(1.0), nash)
            found = [compared(clients, loss, one, 1 if quick else TURNS) for one in objectives]
            most = max(number for number, _, _ in found)
            ours = sorted(spent for _, spent, _ in found)
            ratios = " | ".join(f"{spent / peer:.2f}" for _, spent, peer in found)
            row = f"| {N}, {m:,}, {d} | {loss} | {most} | {ours[0]:.0f} to {ours[-1]:.0f} |"
            print(row, ratios, "|", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with threadpool_limits(1):
        rounds("--quick" in sys.argv)
        print()
        beside("--quick" in sys.argv)
