r"""UCI Heart Disease: four hospitals that differ in patients, in habits of measuring and in the share of ill patients.

The data is part of the package (`files/heart_disease/README.md` names its donors and licence: CC BY 4.0, DOI
10.24432/C52P4X). The preparation is one that hospitals could carry out without sharing a row:

- a missing value is replaced by the hospital's own median (numbers) or most frequent value (yes/no and
  categories) among its own training rows;
- only if a hospital has no value of a column, by the hospitals' sums: Σ x / Σ n for numbers, the
  most frequent value of the added counts for the rest;
- columns are standardised by the training rows' sums (see `scaffpd.data.silos.standardiser`).

A serum cholesterol or a blood pressure of zero is not a measurement: both count as missing. All of
Switzerland's cholesterol is of this kind.
"""

from __future__ import annotations

import csv
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
    standardised,
)

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
CATEGORIES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}
NUMBERS = ("age", "trestbps", "chol", "thalach", "oldpeak", "ca")
# one of thalach, exang, trestbps and oldpeak stands for all four: they are missing in the same patients
INDICATORS = ("chol", "fbs", "thalach", "slope", "ca", "thal")
_ZERO_IS_MISSING = ("trestbps", "chol")


def heart_disease(test_fraction: float = 0.3, seed: int = 0) -> Silos:
    """Predict heart disease (label 1: diagnosis > 0) at four hospitals; 28 standardised columns made of 13.

    Args:
        test_fraction: share of each hospital's rows held out, stratified by label.
        seed: the same seed, the same split.
    """
    fraction = checked_fraction("heart_disease", test_fraction)
    random = generator("heart_disease", seed)
    hospitals = [read(name) for name in HOSPITALS]
    out = [held_out(y, fraction, random) for _, y in hospitals]
    return prepare(
        [(raw[~gone], y[~gone]) for (raw, y), gone in zip(hospitals, out, strict=True)],
        [(raw[gone], y[gone]) for (raw, y), gone in zip(hospitals, out, strict=True)]
        if fraction
        else None,
    )


def read(hospital: str) -> Client:
    """Read the 13 raw columns of one hospital, NaN where missing, and the labels diagnosis > 0."""
    file = (
        resources.files("scaffpd.data") / "files" / "heart_disease" / f"processed.{hospital}.data"
    )
    rows = csv.reader(file.read_text(encoding="ascii").splitlines())
    table = np.array([[float("nan" if cell == "?" else cell) for cell in row] for row in rows])
    raw = table[:, :-1]
    labels = (table[:, -1] > 0).astype(np.int64)
    for name in _ZERO_IS_MISSING:
        column = raw[:, COLUMNS.index(name)]
        column[column == 0] = np.nan
    return raw, labels


def prepare(train: Sequence[Client], test: Sequence[Client] | None = None) -> Silos:
    """Fill, encode and standardise raw rows; all statistics come from `train`."""
    fills = fill_values([raw for raw, _ in train])
    parts = [train] if test is None else [train, test]
    encoded = [
        [(encode(raw, fill), y) for (raw, y), fill in zip(part, fills, strict=True)]
        for part in parts
    ]
    return standardised(HOSPITALS[: len(train)], encoded, encoded_names())


def fill_values(train: Sequence[Matrix]) -> list[Matrix]:
    """Return, per hospital, the replacement of a missing value of each raw column."""
    fills = np.empty((len(train), len(COLUMNS)))
    for j, name in enumerate(COLUMNS):
        observed = [raw[~np.isnan(raw[:, j]), j] for raw in train]
        own = np.median if name in NUMBERS else _most_frequent
        common = _aggregate(observed, number=name in NUMBERS)
        fills[:, j] = [own(values) if len(values) else common for values in observed]
    return list(fills)


def encode(raw: Matrix, fill: Matrix) -> Matrix:
    """Fill numbers and yes/no columns, make a column per category, and add indicators of missing values."""
    missing = np.isnan(raw)
    filled = np.where(missing, fill, raw)
    columns = []
    for j, name in enumerate(COLUMNS):
        categories = CATEGORIES.get(name)
        columns += (
            [filled[:, j]]
            if categories is None
            else [filled[:, j] == value for value in categories]
        )
    columns += [missing[:, COLUMNS.index(name)] for name in INDICATORS]
    return np.column_stack(columns).astype(np.float64)


def encoded_names() -> tuple[str, ...]:
    """Name the columns that `encode` makes, in its order."""
    names: list[str] = []
    for name in COLUMNS:
        names += [f"{name}={value}" for value in CATEGORIES[name]] if name in CATEGORIES else [name]
    return (*names, *(f"{name} missing" for name in INDICATORS))


def _most_frequent(values: Matrix) -> float:
    """Return the most frequent value, the smallest of several."""
    distinct, counts = np.unique(values, return_counts=True)
    return float(distinct[counts.argmax()])


def _aggregate(observed: Sequence[Matrix], number: bool) -> float:
    """Fill a column by the hospitals' sums: Σ x / Σ n, or the most frequent value of the added counts."""
    n = sum(map(len, observed))
    if n == 0:
        return 0.0
    if number:
        return float(sum(values.sum() for values in observed) / n)
    distinct = np.unique(np.concatenate(observed))
    counts = sum(
        (np.array([(values == v).sum() for v in distinct]) for values in observed), 0 * distinct
    )
    return float(distinct[counts.argmax()])
