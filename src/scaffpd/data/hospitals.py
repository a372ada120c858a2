r"""UCI Heart Disease: four hospitals that differ in patients, in measuring and in the share of ill.

The data is part of the package (`files/heart_disease/README.md` names its donors and licence: CC BY
4.0, DOI 10.24432/C52P4X). The preparation is one that hospitals could carry out without sharing a
row:

- a missing value is replaced by the hospital's own median (numbers) or most frequent value (yes/no
  and categories) among its own training rows;
- only if a hospital has no value of a column, by the hospitals' sums: Σ x / Σ n for numbers, the
  most frequent value of the added counts for the rest;
- columns are standardised by the training rows' sums (see `scaffpd.data.silos.standardiser`).

A serum cholesterol or a blood pressure of zero is not a measurement: both count as missing. All of
Switzerland's cholesterol is of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import numpy as np

from scaffpd.data.silos import (
    Client,
    Matrix,
    Silos,
    checked_fraction,
    generator,
    held_out,
    parted,
    standardised,
)

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
CATEGORIES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}
NUMBERS = ("age", "trestbps", "chol", "thalach", "oldpeak", "ca")
# one of thalach, exang, trestbps and oldpeak stands for all four: the same patients lack them
INDICATORS = ("chol", "fbs", "thalach", "slope", "ca", "thal")
NAMES = (
    *(f"{c}={v}" if v is not None else c for c in COLUMNS for v in CATEGORIES.get(c, (None,))),
    *(f"{name} missing" for name in INDICATORS),
)


def heart_disease(test_fraction: float = 0.3, seed: int = 0) -> Silos:
    """Predict heart disease (label 1: diagnosis > 0) at four hospitals; 28 columns made of 13.

    Args:
        test_fraction: share of each hospital's rows held out, stratified by label.
        seed: the same seed, the same split.
    """
    fraction = checked_fraction("heart_disease", test_fraction)
    random = generator("heart_disease", seed)
    whole = [read(name) for name in HOSPITALS]
    return prepare(*parted(whole, [held_out(y, fraction, random) for _, y in whole]))


def table_of(hospital: str) -> Matrix:
    """Return the cells of a hospital's file, NaN where missing, with the diagnosis last."""
    files = resources.files("scaffpd.data") / "files" / "heart_disease"
    text = (files / f"processed.{hospital}.data").read_text(encoding="ascii").replace("?", "nan")
    return np.array([line.split(",") for line in text.splitlines()], dtype=np.float64)


def read(hospital: str) -> Client:
    """Read the 13 raw columns of one hospital, NaN where missing, and the labels diagnosis > 0."""
    table = table_of(hospital)
    raw = table[:, :-1]
    for name in ("trestbps", "chol"):
        column = raw[:, COLUMNS.index(name)]
        column[column == 0] = np.nan
    return raw, (table[:, -1] > 0).astype(np.int64)


def prepare(train: Sequence[Client], test: Sequence[Client] | None = None) -> Silos:
    """Fill, encode and standardise raw rows; all statistics come from `train`."""
    fills = fill_values([raw for raw, _ in train])
    encoded = [
        [(encode(raw, fill), y) for (raw, y), fill in zip(part, fills, strict=True)]
        for part in ([train] if test is None else [train, test])
    ]
    return standardised(HOSPITALS[: len(train)], encoded, NAMES)


def fill_values(train: Sequence[Matrix]) -> list[Matrix]:
    """Return, per hospital, the replacement of a missing value of each raw column."""
    fills = np.empty((len(train), len(COLUMNS)))
    for j, name in enumerate(COLUMNS):
        observed = [raw[~np.isnan(raw[:, j]), j] for raw in train]
        everyone = np.concatenate(observed)
        own, common = (np.median, np.mean) if name in NUMBERS else (_most_frequent,) * 2
        fallback = float(common(everyone)) if len(everyone) else 0.0
        fills[:, j] = [own(values) if len(values) else fallback for values in observed]
    return list(fills)


def encode(raw: Matrix, fill: Matrix) -> Matrix:
    """Fill gaps, make a column per category, and add indicators of missing values."""
    missing = np.isnan(raw)
    filled = np.where(missing, fill, raw)
    columns = []
    for j, name in enumerate(COLUMNS):
        values = CATEGORIES.get(name)
        columns += [filled[:, j]] if values is None else [filled[:, j] == v for v in values]
    columns += [missing[:, COLUMNS.index(name)] for name in INDICATORS]
    return np.column_stack(columns).astype(np.float64)


def _most_frequent(values: Matrix) -> float:
    distinct, counts = np.unique(values, return_counts=True)
    return float(distinct[counts.argmax()])
