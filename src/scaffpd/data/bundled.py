"""Three data sets that scikit-learn carries, cut into clients by a column or by label skew: small, real, offline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.partition import dirichlet, natural
from scaffpd.data.silos import Labels, Matrix, Silos, checked_fraction, generator, held_out, standardiser
from scaffpd.errors import unknown

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
    from sklearn.datasets import load_diabetes

    if by not in COLUMNS:
        raise unknown("column", by, COLUMNS)
    fraction = checked_fraction("diabetes", test_fraction)
    data = load_diabetes(scaled=False)
    column = data.feature_names.index(by)
    X, y = np.delete(data.data, column, axis=1), (data.target > np.median(data.target)).astype(np.int64)
    values = data.data[:, column].astype(np.int64)
    codes, parts = natural(np.clip(values // 10, 2, 6) if by == "age" else values)
    random = generator("diabetes", seed)
    out = [held_out(y[rows], fraction, random) for rows in parts]
    kept = [rows[~gone] for rows, gone in zip(parts, out, strict=True)]
    mean, deviation = standardiser([X[rows] for rows in kept])
    scaled = (X - mean) / deviation
    return Silos(
        names=tuple(_decade(int(code)) if by == "age" else code for code in codes),
        train=[(scaled[rows], y[rows]) for rows in kept],
        test=[(scaled[rows[gone]], y[rows[gone]]) for rows, gone in zip(parts, out, strict=True)] if fraction else [],
        features=tuple(name for name in data.feature_names if name != by),
    )


def _decade(code: int) -> str:
    return {2: "to 29", 6: "60 and more"}.get(code, f"{code}0 to {code}9")


def breast_cancer(
    clients: int = 10, alpha: float = 0.1, seed: int = 0, test_fraction: float = 0.0, minimum: int = 2
) -> Silos:
    """Wisconsin breast cancer: 569 biopsies, 30 measurements, label 1 = benign; columns standardised."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    names = tuple(map(str, data.feature_names))
    return _silos(data.data, data.target, names, clients, alpha, seed, test_fraction, minimum)


def digits(clients: int = 10, alpha: float = 0.1, seed: int = 0, test_fraction: float = 0.0, minimum: int = 2) -> Silos:
    """Handwritten digits: 1,797 pictures of 8×8 pixels, ten labels; standardised, then times 2/√64.

    The factor makes ‖a‖ ≈ 2 for every picture a, so that the smoothness of a softmax loss is of order one.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    names = tuple(f"pixel {row},{column}" for row in range(8) for column in range(8))
    return _silos(data.data, data.target, names, clients, alpha, seed, test_fraction, minimum, factor=2 / np.sqrt(64))


def _silos(
    X: Matrix,
    y: NDArray[np.int_],
    features: tuple[str, ...],
    clients: int,
    alpha: float,
    seed: int,
    test_fraction: float,
    minimum: int,
    factor: float = 1.0,
) -> Silos:
    """Partition, hold out rows, and standardise by the training rows of all clients."""
    fraction = checked_fraction("A dataset", test_fraction)
    labels: Labels = y.astype(np.int64)
    parts = dirichlet(X, labels, clients, alpha, seed, minimum)
    random = np.random.default_rng([seed, 1])
    out = [rows[held_out(labels[rows], fraction, random)] for rows in parts]
    kept = [np.setdiff1d(rows, gone, assume_unique=True) for rows, gone in zip(parts, out, strict=True)]
    mean, deviation = standardiser([X[rows] for rows in kept])
    scaled = (X - mean) / deviation * factor
    return Silos(
        names=tuple(f"client {i}" for i in range(clients)),
        train=[(scaled[rows], labels[rows]) for rows in kept],
        test=[(scaled[rows], labels[rows]) for rows in out] if fraction else [],
        features=features,
    )
