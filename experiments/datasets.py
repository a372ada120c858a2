"""Data sets with natural clients that are no part of the package: schools and Adult.

Put `adult/adult.data.csv.gz` and `adult/adult.test.csv.gz` (the UCI files with a header row,
gzipped), or `school/school.mat`, into a folder and name it by `folder=` or the environment variable
SCAFFPD_DATA.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scaffpd.data.silos import Client, Matrix, Silos, checked_fraction, generator, standardised
from scaffpd.errors import InputError, unknown


def school(
    test_fraction: float = 0.3, seed: int = 0, folder: str | os.PathLike[str] | None = None
) -> Silos:
    """Load 139 schools in London, 15,362 students: predict an exam score from 27 columns.

    Score and columns are standardised by the training rows. The file is that of the Inner London
    Education Authority as papers on multi-task learning use it (MALSAR): `X` and `Y`, a cell of
    (n_i, 28) and (n_i, 1) per school; its constant column is left out.

    Args:
        test_fraction: share of each school's students held out.
        seed: the same seed, the same split.
        folder: where `school/school.mat` is; by default SCAFFPD_DATA.
    """
    fraction = checked_fraction("school", test_fraction)
    random = generator("school", seed)
    from scipy.io import loadmat  # half a second

    file = data_file(folder, "school/school.mat")
    try:
        cells = loadmat(file)
        pairs = [
            (np.asarray(X, float), np.ravel(y).astype(float))
            for X, y in zip(cells["X"].ravel(), cells["Y"].ravel(), strict=True)
        ]
    except (KeyError, ValueError, TypeError, NotImplementedError):
        raise InputError(
            "data-file-damaged", f"{str(file)!r} has no cell of X and Y per school."
        ) from None
    varies = np.ptp(np.concatenate([X for X, _ in pairs]), axis=0) > 0
    parts: list[list[Client]] = [[], []]
    for X, y in pairs:
        rows = random.permutation(len(y))
        cut = max(1, len(y) - round(fraction * len(y)))
        for part, chosen in zip(parts, (rows[:cut], rows[cut:]), strict=True):
            part.append((X[chosen][:, varies], y[chosen]))
    scale = float(np.concatenate([y for _, y in parts[0]]).std())
    parts = [[(X, y / scale) for X, y in part] for part in (parts if fraction else parts[:1])]
    names = tuple(f"school {k}" for k in range(1, len(pairs) + 1))
    columns = tuple(f"column {k}" for k in np.flatnonzero(varies) + 1)
    return standardised(names, parts, columns, centred=True)


NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
CATEGORIES = ("workclass", "marital-status", "occupation", "relationship", "race", "sex")
GROUPS = (*CATEGORIES, "native-country")  # the country is not a feature: most values are rare
TARGET = "classification"
FEWEST = 100  # rows of a client: the armed forces have nine


def adult(by: str = "occupation", folder: str | os.PathLike[str] | None = None) -> Silos:
    """Load Adult: 32,561 people to train on and 16,281 to test on; label 1: over 50,000 dollars.

    Columns are standardised by the training rows.

    Args:
        by: the column whose values are the clients; it is not a feature then. Unknown values and
            those with fewer than 100 people to train on are left out: by "native-country", eight
            countries remain.
        folder: where the data is; by default SCAFFPD_DATA.
    """
    if by not in GROUPS:
        raise unknown("column", by, GROUPS)
    train, test = (_people(data_file(folder, f"adult/adult.{p}.csv.gz")) for p in ("data", "test"))
    sizes = Counter(row[by] for row in train)
    names = tuple(sorted(g for g, number in sizes.items() if g != "?" and number >= FEWEST))
    levels = {c: sorted({row[c] for row in train}) for c in CATEGORIES if c != by}
    features = (*NUMBERS, *(f"{c}={level}" for c, values in levels.items() for level in values))
    parts = [[_client(rows, by, name, levels) for name in names] for rows in (train, test)]
    return standardised(names, parts, features)


def _people(file: Path) -> list[dict[str, str]]:
    """Read the rows of one file by column, or refuse it with one sentence."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") as text:
            rows = list(csv.DictReader(text, skipinitialspace=True))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError("data-file-damaged", f"{str(file)!r} cannot be read: {error}.") from None
    if not rows or not {*NUMBERS, *GROUPS, TARGET} <= rows[0].keys():
        raise InputError("data-file-damaged", f"{str(file)!r} is not UCI's file with a header row.")
    return rows


def _client(
    rows: Sequence[dict[str, str]], by: str, name: str, levels: dict[str, list[str]]
) -> Client:
    own = [row for row in rows if row[by] == name]
    numbers = np.array([[float(row[c]) for c in NUMBERS] for row in own])
    hot = [
        np.array([row[c] for row in own])[:, None] == np.array(values)
        for c, values in levels.items()
    ]
    X: Matrix = np.hstack([numbers, *hot]).astype(np.float64)
    return X, np.array([row[TARGET].startswith(">50K") for row in own]).astype(np.int64)


def data_root(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """Return the folder that `folder`, or else SCAFFPD_DATA, names."""
    root = folder or os.environ.get("SCAFFPD_DATA")
    if not root:
        raise InputError(
            "data-folder-not-named",
            f"{name} is not part of the package: name its folder by folder= or SCAFFPD_DATA.",
        )
    if not Path(root).is_dir():
        raise InputError("data-folder-missing", f"There is no data folder {str(root)!r}.")
    return Path(root)


def data_file(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """Return a file such as "school/school.mat" in the data folder."""
    file = data_root(folder, name) / name
    if not file.is_file():
        raise InputError("data-file-missing", f"There is no file {str(file)!r}.")
    return file
