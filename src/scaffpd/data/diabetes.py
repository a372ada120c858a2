"""The diabetes set that scikit-learn carries, with clients that its own columns name: small, real, offline."""

from __future__ import annotations

import numpy as np

from scaffpd.data.partition import natural
from scaffpd.data.seeds import generator
from scaffpd.data.silos import Silos, checked_fraction, held_out, standardiser
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
