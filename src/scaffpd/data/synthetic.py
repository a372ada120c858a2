r"""The paper's synthetic regression problem, and two harder relatives.

    a_i^j ~ N(0, I),   x̂ ~ N(0, c² I),   δ_i ~ N(0, σ² I),   y_i^j = ⟨a_i^j, x̂ + δ_i⟩

(section "Results on Synthetic Datasets"; the paper takes N=5, d=10, m=100). Clients differ in what they
want of x by δ_i, a concept shift. The paper's μ is no part of the data: it is the model's `l2`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.silos import generator
from scaffpd.errors import InputError, count, real

Regression = tuple[NDArray[np.float64], NDArray[np.float64]]


def synthetic(
    N: int = 5,
    d: int = 10,
    m: int = 100,
    c: float = 1.0,
    sigma: float = 0.1,
    seed: int = 0,
    scaling: float = 0.0,
    sizes: Sequence[int] | None = None,
) -> list[Regression]:
    """Draw (X, y) for each of N clients.

    Args:
        N: number of clients.
        d: number of features.
        m: samples per client; less than d makes every client rank-deficient.
        c: standard deviation of the common truth x̂.
        sigma: standard deviation of each client's own shift δ_i.
        seed: the same seed, the same data.
        scaling: after y is made, column k is multiplied by 10^u_k with u_k uniform on (−scaling, scaling);
            the Hessians' condition number grows to about 10^(4·scaling).
        sizes: m_i per client, in place of `m`.
    """
    rows = _sizes(count("synthetic", "N", N), m, sizes)
    count("synthetic", "d", d)
    for name, value in (("c", c), ("sigma", sigma), ("scaling", scaling)):
        if not 0 <= real("synthetic", name, value) < float("inf"):
            raise InputError(f"synthetic needs {name} >= 0 and finite, got {value!r}.")
    random = generator("synthetic", seed)
    truth = c * random.standard_normal(d)
    scale = 10 ** random.uniform(-scaling, scaling, d) if scaling else np.ones(d)
    clients = []
    for size in rows:
        X = random.standard_normal((size, d))
        clients.append((X * scale, X @ (truth + sigma * random.standard_normal(d))))
    return clients


def badly_scaled(N: int = 5, d: int = 10, m: int = 100, sigma: float = 0.1, seed: int = 0) -> list[Regression]:
    """`synthetic` with columns times 10^U(−1, 1), where one gradient step is worth little."""
    return synthetic(N=N, d=d, m=m, sigma=sigma, seed=seed, scaling=1.0)


def rank_deficient(N: int = 5, d: int = 200, m: int = 30, sigma: float = 0.1, seed: int = 0) -> list[Regression]:
    """`synthetic` with fewer samples than features at every client: no Hessian is like another."""
    if m >= d:
        raise InputError(f"rank_deficient needs fewer samples than features, got m={m} and d={d}.")
    return synthetic(N=N, d=d, m=m, sigma=sigma, seed=seed)


def _sizes(N: int, m: int, sizes: Sequence[int] | None) -> list[int]:
    if sizes is None:
        return [count("synthetic", "m", m)] * N
    if len(sizes) != N:
        raise InputError(f"synthetic needs one entry of sizes per client, got {len(sizes)} for N={N}.")
    return [count("synthetic", f"sizes[{i}]", size) for i, size in enumerate(sizes)]
