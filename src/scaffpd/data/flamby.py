"""FLamby's tabular benchmarks with natural sites and its own splits: TCGA-BRCA and heart disease.

J. Ogier du Terrail et al. 2022, "FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning
in Realistic Healthcare Settings" (`files/flamby/README.md` names sources).
"""

from __future__ import annotations

import numpy as np

from scaffpd.data.hospitals import COLUMNS, HOSPITALS, table_of
from scaffpd.data.silos import (
    Client,
    Silos,
    generator,
    held_out,
    packed,
    parted,
    standardised,
    unless_constant,
)

TEST = 0.2  # of a site's rows, of fresh splits
GONE = ("slope", "ca", "thal")
CODED = {"cp": (2, 3, 4), "restecg": (1, 2)}


def tcga_brca(seed: int | None = None) -> Silos:
    """Predict the survival of 1,088 patients with breast cancer in six regions; 39 columns.

    y has two columns, days and whether death was observed, as `Linear("cox")` takes them; 12
    patients who left on day 0 count half a day. Columns are standardised by all regions' training
    rows.

    Args:
        seed: of a fresh split with a fifth of every region's rows held out, as many events on
            both sides as can be; FLamby's split without one.
    """
    rows = packed("flamby", "tcga_brca")
    columns = [name for name in rows[0] if name not in ("region", "set", "died", "days")]
    sites: list[Client] = []
    out = []
    random = None if seed is None else generator("tcga_brca", seed)
    names = sorted({row["region"] for row in rows})
    for region in names:
        own = [row for row in rows if row["region"] == region]
        X = np.array([[float(row[name]) for name in columns] for row in own])
        y = np.array([[max(float(row["days"]), 0.5), float(row["died"])] for row in own])
        held = np.array([row["set"] == "test" for row in own])
        if random is not None:
            held = held_out(y[:, 1].astype(np.int64), TEST, random)
        sites.append((X, y))
        out.append(held)
    parts = parted(sites, out)
    return standardised(tuple(f"region {name}" for name in names), parts, tuple(columns))


def flamby_heart(seed: int | None = None) -> Silos:
    """Predict heart disease at four hospitals as FLamby prepares it: 13 columns of 10, its split.

    Slope, ca and thal are dropped, then rows with a missing value; chest pain and ECG become
    indicators without their first value; each hospital standardises by its own training rows.

    Args:
        seed: of a fresh split with a third held out; FLamby's split without one.
    """
    split = packed("flamby", "heart_split")
    names = [c for c in COLUMNS if c not in GONE]
    random = None if seed is None else generator("flamby_heart", seed)
    sites: list[Client] = []
    out = []
    for hospital in HOSPITALS:
        own = [row for row in split if row["hospital"] == hospital]
        own.sort(key=lambda row: int(row["line"]))
        table = table_of(hospital)[[int(row["line"]) for row in own]]
        y = (table[:, -1] > 0).astype(np.int64)
        cells = [(table[:, COLUMNS.index(c)], CODED.get(c)) for c in names]
        X = np.column_stack(
            [one for v, codes in cells for one in ([v == k for k in codes] if codes else [v])]
        ).astype(np.float64)
        held = np.array([row["set"] == "test" for row in own])
        if random is not None:
            held = held_out(y, 1 / 3, random)
        mean = X[~held].mean(0)
        deviation = unless_constant(mean, X[~held].std(0), int((~held).sum()))
        sites.append(((X - mean) / deviation, y))
        out.append(held)
    features = [f"{c}={v}" if v else c for c in names for v in CODED.get(c, (0,))]
    train, test = parted(sites, out)
    return Silos(HOSPITALS, train, test, tuple(features))
