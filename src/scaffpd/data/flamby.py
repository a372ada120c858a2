"""FLamby's tabular benchmarks with natural sites and its own splits: TCGA-BRCA and heart disease.

J. Ogier du Terrail et al. 2022, "FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning
in Realistic Healthcare Settings" (`files/flamby/README.md` names sources).
"""

from __future__ import annotations

import csv
import lzma
from importlib import resources

import numpy as np

from scaffpd.data.hospitals import COLUMNS, HOSPITALS
from scaffpd.data.silos import (
    Client,
    Matrix,
    Silos,
    generator,
    held_out,
    standardised,
    unless_constant,
)

TEST = 0.2  # of a site's rows, of fresh splits
GONE = ("slope", "ca", "thal")
CODED = {"cp": (2, 3, 4), "restecg": (1, 2)}


def _rows(name: str) -> list[dict[str, str]]:
    file = resources.files("scaffpd.data") / "files" / "flamby" / f"{name}.csv.xz"
    return list(csv.DictReader(lzma.decompress(file.read_bytes()).decode().splitlines()))


def tcga_brca(seed: int | None = None) -> Silos:
    """Predict the survival of 1,088 patients with breast cancer in six regions; 39 columns.

    y has two columns, days and whether death was observed, as `Linear("cox")` takes them; 12
    patients who left on day 0 count half a day. Columns are standardised by all regions' training
    rows.

    Args:
        seed: of a fresh split with a fifth of every region's rows held out, as many events on
            both sides as can be; FLamby's split without one.
    """
    rows = _rows("tcga_brca")
    columns = [name for name in rows[0] if name not in ("region", "set", "died", "days")]
    parts: tuple[list[Client], list[Client]] = ([], [])
    random = None if seed is None else generator("tcga_brca", seed)
    names = sorted({row["region"] for row in rows})
    for region in names:
        own = [row for row in rows if row["region"] == region]
        X = np.array([[float(row[name]) for name in columns] for row in own])
        y = np.array([[max(float(row["days"]), 0.5), float(row["died"])] for row in own])
        held = np.array([row["set"] == "test" for row in own])
        if random is not None:
            held = held_out(y[:, 1].astype(np.int64), TEST, random)
        for part, chosen in zip(parts, (~held, held), strict=True):
            part.append((X[chosen], y[chosen]))
    return standardised(tuple(f"region {name}" for name in names), parts, tuple(columns))


def flamby_heart(seed: int | None = None) -> Silos:
    """Predict heart disease at four hospitals as FLamby prepares it: 13 columns of 10, its split.

    Slope, ca and thal are dropped, then rows with a missing value; chest pain and ECG become
    indicators without their first value; each hospital standardises by its own training rows.

    Args:
        seed: of a fresh split with a third held out; FLamby's split without one.
    """
    tests = {(r["hospital"], int(r["line"])) for r in _rows("heart_split") if r["set"] == "test"}
    used = {(r["hospital"], int(r["line"])) for r in _rows("heart_split")}
    files = resources.files("scaffpd.data") / "files" / "heart_disease"
    random = None if seed is None else generator("flamby_heart", seed)
    train: list[Client] = []
    test: list[Client] = []
    for hospital in HOSPITALS:
        text = (files / f"processed.{hospital}.data").read_text(encoding="ascii")
        lines = [k for k in range(len(text.splitlines())) if (hospital, k) in used]
        cells = [text.splitlines()[k].split(",") for k in lines]
        y = np.array([float(row[-1]) > 0 for row in cells]).astype(np.int64)
        X = np.array([_encoded(row) for row in cells])
        held = np.array([(hospital, k) in tests for k in lines])
        if random is not None:
            held = held_out(y, 1 / 3, random)
        mean = X[~held].mean(0)
        deviation = unless_constant(mean, X[~held].std(0), int((~held).sum()))
        scaled: Matrix = (X - mean) / deviation
        train.append((scaled[~held], y[~held]))
        test.append((scaled[held], y[held]))
    names = [c for c in COLUMNS if c not in GONE]
    features = [f"{c}={v}" if v else c for c in names for v in CODED.get(c, (0,))]
    return Silos(HOSPITALS, train, test, tuple(features))


def _encoded(row: list[str]) -> list[float]:
    found: list[float] = []
    for name, cell in zip(COLUMNS, row, strict=False):
        if name not in GONE:
            value = float(cell)
            found += [float(value == v) for v in CODED[name]] if name in CODED else [value]
    return found
