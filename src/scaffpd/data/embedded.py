r"""Data that need no folder: the paper's synthetic problem, and three data sets that scikit-learn carries.

    a_i^j ~ N(0, I),   x̂ ~ N(0, c² I),   δ_i ~ N(0, σ² I),   y_i^j = ⟨a_i^j, x̂ + δ_i⟩

(section "Results on Synthetic Datasets"; the paper takes N=5, d=10, m=100). Clients differ in what they
want of x by δ_i, a concept shift. The paper's μ is no part of the data: it is the model's `l2`.
The real ones are cut into clients by a column or by label skew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.partition import Indices, dirichlet, natural
from scaffpd.data.silos import Labels, Matrix, Silos, checked_fraction, generator, held_out, standardiser
from scaffpd.errors import InputError, count, not_installed, real, unknown

Regression = tuple[NDArray[np.float64], NDArray[np.float64]]
COLUMNS = ("age", "sex")


def diabetes(by: str = "age", test_fraction: float = 0.0, seed: int = 0) -> Silos:
    """442 patients, one client per decade of age or per sex; label 1: the disease progressed more than the median.

    The label is y > 140.5, the median of all patients a year later. Columns are standardised by the training rows.

    Args:
        by: "age" (clients "to 29", "30 to 39", …, "60 and more") or "sex" (clients "1" and "2", as the file codes it);
            that column is no feature then.
        test_fraction: share of each client's rows held out, of both labels alike.
        seed: the same seed, the same split.
    """
    if by not in COLUMNS:
        raise unknown("column", by, COLUMNS)
    fraction = checked_fraction("diabetes", test_fraction)
    data = _bundled("load_diabetes", scaled=False)
    column = data.feature_names.index(by)
    X, y = np.delete(data.data, column, axis=1), (data.target > np.median(data.target)).astype(np.int64)
    values = data.data[:, column].astype(np.int64)
    codes, parts = natural(np.clip(values // 10, 2, 6) if by == "age" else values)
    decades = {"2": "to 29", "6": "60 and more"} | {k: f"{k}0 to {k}9" for k in "345"}
    names = tuple(decades[code] if by == "age" else code for code in codes)
    features = tuple(name for name in data.feature_names if name != by)
    return _silos(X, y, features, names, parts, generator("diabetes", seed), fraction)


def breast_cancer(
    clients: int = 10, alpha: float = 0.1, seed: int = 0, test_fraction: float = 0.0, minimum: int = 2
) -> Silos:
    """Wisconsin breast cancer: 569 biopsies, 30 measurements, label 1 = benign; columns standardised.

    `clients`, `alpha`, `seed` and `minimum` (the fewest rows of a client, test rows included) go to `dirichlet`.
    """
    data = _bundled("load_breast_cancer")
    return _skewed(data, tuple(map(str, data.feature_names)), clients, alpha, seed, test_fraction, minimum)


def digits(clients: int = 10, alpha: float = 0.1, seed: int = 0, test_fraction: float = 0.0, minimum: int = 2) -> Silos:
    """Handwritten digits: 1,797 pictures of 8×8 pixels, ten labels; standardised, then times 2/√64.

    The factor makes ‖a‖ ≈ 2 for every picture a, so that the smoothness of a softmax loss is of order one. `clients`,
    `alpha`, `seed` and `minimum` (the fewest rows of a client, test rows included) go to `dirichlet`.
    """
    names = tuple(f"pixel {row},{column}" for row in range(8) for column in range(8))
    return _skewed(_bundled("load_digits"), names, clients, alpha, seed, test_fraction, minimum, factor=2 / np.sqrt(64))


def _bundled(loader: str, **options: Any) -> Any:
    """Load a data set of scikit-learn."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        raise not_installed("scikit-learn", "sklearn") from None
    return getattr(datasets, loader)(**options)


def _skewed(
    data: Any, features: tuple[str, ...], clients: int, alpha: float, seed: int, test_fraction: float, minimum: int,
    factor: float = 1.0,
) -> Silos:  # fmt: skip
    fraction = checked_fraction("A dataset", test_fraction)
    labels: Labels = data.target.astype(np.int64)
    parts = dirichlet(data.data, labels, clients, alpha, seed, minimum)
    names = tuple(f"client {i}" for i in range(clients))
    return _silos(data.data, labels, features, names, parts, np.random.default_rng([seed, 1]), fraction, factor)


def _silos(
    X: Matrix, y: Labels, features: tuple[str, ...], names: tuple[str, ...], parts: list[Indices],
    random: np.random.Generator, fraction: float, factor: float = 1.0,
) -> Silos:  # fmt: skip
    """Hold out rows of every client, and standardise by the training rows of all clients."""
    out = [held_out(y[rows], fraction, random) for rows in parts]
    train = [rows[~gone] for rows, gone in zip(parts, out, strict=True)]
    test = [rows[gone] for rows, gone in zip(parts, out, strict=True)]
    mean, deviation = standardiser([X[rows] for rows in train])
    scaled = (X - mean) / deviation * factor
    split = [[(scaled[rows], y[rows]) for rows in part] for part in (train, test if fraction else [])]
    return Silos(names, split[0], split[1], features)


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
