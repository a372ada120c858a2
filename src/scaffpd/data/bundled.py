"""Three data sets that scikit-learn carries, cut into clients by a column or by label skew: small, real, offline."""

from __future__ import annotations

from typing import Any

import numpy as np

from scaffpd.data.partition import Indices, dirichlet, natural
from scaffpd.data.silos import Labels, Matrix, Silos, checked_fraction, generator, held_out, standardiser
from scaffpd.errors import not_installed, unknown

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
