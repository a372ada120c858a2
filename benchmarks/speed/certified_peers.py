r"""The candidates of `certified.py`: each takes raw arrays and returns x of the same problem,

    min_x max_{λ∈simplex} Σ λ_i f_i(x) − (ρ/2) Σ (λ_i − p)²/p,   f_i = (1/m)‖A_i x − y_i‖² + (l2/2)‖x‖²,   p = 1/N.

The maximum over λ is, by duality, the smallest ν + ρ/2 + Σ p [f_i − ν]₊²/(2ρ) over ν: what conic
solvers are given. Run as a script, this file solves one problem once in a process of its own and
prints seconds and x: `python certified_peers.py CANDIDATE N m d`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import scaffpd as sp

Array = NDArray[np.float64]
Clients = list[tuple[Array, Array]]
# TOL is also Clarabel's own default for gap and feasibility
RHO = 0.1
L2 = 1e-3
TOL = 1e-8


def problem(N: int, m: int, d: int, seed: int = 0) -> Clients:
    """Clients with models of their own, unlike noise, and features of falling size."""
    random = np.random.default_rng(seed)
    sizes = np.arange(1, d + 1) ** -0.6
    common = random.standard_normal(d)
    clients = []
    for _ in range(N):
        A = random.standard_normal((m, d)) * sizes
        own = common + 0.3 * random.standard_normal(d)
        noise = random.uniform(0.2, 1.0)
        clients.append((A, A @ own + noise * random.standard_normal(m)))
    return clients


def primal(clients: Clients, x: Array) -> tuple[float, Array]:
    """F(x) = max_λ … and its gradient Σ λ_i ∇f_i(x), from the raw rows."""
    residuals = [A @ x - y for A, y in clients]
    losses = np.array([r @ r / len(r) for r in residuals]) + L2 / 2 * (x @ x)
    chi = sp.ChiSquare(RHO)
    weights = chi.maximizer(losses)
    slopes = (
        w * 2 / len(r) * (A.T @ r) for w, r, (A, _) in zip(weights, residuals, clients, strict=True)
    )
    return chi.support(losses), sum(slopes, L2 * x)


def compressed(clients: Clients) -> Clients:
    """(A_i, y_i) as min(m, d + 1) rows with the same ‖A_i x − y_i‖²/m for all x, by QR."""
    small = []
    for A, y in clients:
        R = np.linalg.qr(np.column_stack([A, y]), mode="r") / np.sqrt(len(y))
        small.append((R[:, :-1] * np.sqrt(len(R)), R[:, -1] * np.sqrt(len(R))))
    return small


def ours(clients: Clients) -> Array:
    """`fair`, the default of this package."""
    return _trained(sp.fair(sp.ChiSquare(RHO)), clients)


def _trained(method: Any, clients: Clients) -> Array:
    result = sp.train(
        method, sp.Cohort(clients, sp.Linear("squared", l2=L2)), tol=TOL, progress=False
    )
    if not result.certificate <= TOL:
        raise RuntimeError(
            f"{type(method).__name__} proved no more than {result.certificate:.1e}: "
            f"{result.status}."
        )
    return np.asarray(result.x)


def plain_cvxpy(clients: Clients) -> Array:
    """CVXPY as one would write the problem down.

    A common term of all f_i leaves λ alone, so the regulariser is taken out of the sum: inside,
    Clarabel fails.
    """
    import cvxpy as cp

    N = len(clients)
    d = clients[0][0].shape[1]
    x = cp.Variable(d)
    nu = cp.Variable()
    losses = cp.hstack([cp.sum_squares(A @ x - y) / len(y) for A, y in clients])
    total = (
        nu
        + RHO / 2
        + cp.sum_squares(cp.pos(losses - nu)) / (2 * RHO * N)
        + L2 / 2 * cp.sum_squares(x)
    )
    _solved(cp.Problem(cp.Minimize(total)))
    return np.asarray(x.value)


def best_cvxpy(clients: Clients) -> Array:
    """CVXPY with QR first, one cone per client, and all else that is quadratic in the objective."""
    import cvxpy as cp

    N = len(clients)
    d = clients[0][0].shape[1]
    x = cp.Variable(d)
    nu = cp.Variable()
    losses = cp.Variable(N)
    above = cp.Variable(N, nonneg=True)
    cones = [
        cp.sum_squares(A @ x - y) <= len(y) * losses[i]
        for i, (A, y) in enumerate(compressed(clients))
    ]
    total = nu + RHO / 2 + cp.sum_squares(above) / (2 * RHO * N) + L2 / 2 * cp.sum_squares(x)
    _solved(cp.Problem(cp.Minimize(total), [*cones, losses - nu <= above]))
    return np.asarray(x.value)


def _solved(problem: Any) -> None:
    problem.solve(solver="CLARABEL")
    if problem.status not in (
        "optimal",
        "optimal_inaccurate",
    ):  # how far off is measured afterwards
        raise RuntimeError(f"CVXPY ended with {problem.status}.")


def clarabel_alone(clients: Clients) -> Array:
    """The form of `best_cvxpy`, handed to Clarabel as matrices: nothing is spent on modelling.

    Variables (x, ν, ℓ, s): s ≥ 0, ℓ_i − ν ≤ s_i and ‖(2 (A_i x − y_i)/√m, ℓ_i − 1)‖ ≤ ℓ_i + 1.
    """
    import clarabel
    from scipy import sparse

    N = len(clients)
    d = clients[0][0].shape[1]
    quadratic = sparse.diags_array(
        np.r_[np.full(d, L2), np.zeros(1 + N), np.full(N, 1 / (RHO * N))]
    ).tocsc()
    linear = np.r_[np.zeros(d), 1.0, np.zeros(2 * N)]
    one = np.ones((N, 1))
    eye = sparse.eye_array(N)
    upper = [sparse.hstack([sparse.csr_array((N, d + 1 + N)), -eye])]
    upper += [sparse.hstack([sparse.csr_array((N, d)), -one, eye, -eye])]
    sides = [np.zeros(2 * N)]
    cones = [clarabel.NonnegativeConeT(2 * N)]
    for i, (A, y) in enumerate(compressed(clients)):
        rows = len(y)
        scale = 2 / np.sqrt(len(y))
        pick = sparse.csr_array(
            ([-1.0, -1.0], ([0, rows + 1], [d + 1 + i, d + 1 + i])), (rows + 2, d + 1 + 2 * N)
        )
        spread = sparse.vstack(
            [sparse.csr_array((1, d)), sparse.csr_array(-scale * A), sparse.csr_array((1, d))]
        )
        upper.append(pick + sparse.hstack([spread, sparse.csr_array((rows + 2, 1 + 2 * N))]))
        sides.append(np.r_[1.0, -scale * y, -1.0])
        cones.append(clarabel.SecondOrderConeT(rows + 2))
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    matrix = sparse.vstack(upper).tocsc()
    found = clarabel.DefaultSolver(
        quadratic, linear, matrix, np.concatenate(sides), cones, settings
    ).solve()
    if str(found.status) not in ("Solved", "AlmostSolved"):  # how far off is measured afterwards
        raise RuntimeError(f"Clarabel ended with {found.status}.")
    return np.asarray(found.x[:d])


def scipy_rows(clients: Clients) -> Array:
    """SciPy's L-BFGS-B on F until ‖∇F‖² ≤ 2 l2 TOL, which proves the gap: F is l2-strongly convex."""
    from scipy.optimize import minimize

    start = np.zeros(clients[0][0].shape[1])
    largest = np.sqrt(2 * L2 * TOL / len(start))
    options = {"maxiter": 20_000, "maxfun": 20_000, "ftol": 0.0, "gtol": largest, "maxcor": 30}
    return np.asarray(
        minimize(
            lambda x: primal(clients, x), start, jac=True, method="L-BFGS-B", options=options
        ).x
    )


def scipy_compressed(clients: Clients) -> Array:
    """The same after QR."""
    return scipy_rows(compressed(clients))


CANDIDATES: dict[str, Callable[[Clients], Array]] = {
    "scaffpd, fair": ours,
    "CVXPY + Clarabel, plain": plain_cvxpy,
    "CVXPY + Clarabel, QR and cones": best_cvxpy,
    "Clarabel alone, QR and cones": clarabel_alone,
    "SciPy L-BFGS-B": scipy_rows,
    "SciPy L-BFGS-B, QR": scipy_compressed,
}


def timed(name: str, size: tuple[int, int, int]) -> tuple[float, Array]:
    """Seconds and x, after a tiny problem that loads everything."""
    solve = CANDIDATES[name]
    clients = problem(*size)
    solve(problem(3, 12, 4))
    begun = time.perf_counter()
    x = solve(clients)
    return time.perf_counter() - begun, x


if __name__ == "__main__":
    seconds, x = timed(sys.argv[1], (int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    print(json.dumps({"seconds": seconds, "x": x.tolist()}))
