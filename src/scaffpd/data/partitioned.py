"""Two classification sets that scikit-learn carries, cut into clients by label skew: small, real, offline.

Both hand `clients`, `alpha`, `seed` and `minimum` (the fewest rows of a client, test rows included) to `dirichlet`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.partition import dirichlet
from scaffpd.data.silos import Labels, Matrix, Silos, checked_fraction, held_out, standardiser


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
