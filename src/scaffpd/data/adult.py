"""UCI Adult (census income), one client per occupation or country: who earns more than 50,000 dollars a year?

The data is not part of the package. Put `adult/adult.data.csv.gz` and `adult/adult.test.csv.gz` (the UCI files with a
header row, gzipped) into a folder and name it by `folder=` or by the environment variable SCAFFPD_DATA.
"""

from __future__ import annotations

import csv
import gzip
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scaffpd.data.folder import data_folder
from scaffpd.data.silos import Client, Matrix, Silos, standardiser
from scaffpd.errors import InputError, unknown

NUMBERS = ("age", "education-num", "capital-gain", "capital-loss", "hours-per-week")
CATEGORIES = ("workclass", "marital-status", "occupation", "relationship", "race", "sex")
GROUPS = (*CATEGORIES, "native-country")  # the country is no feature: most values are rare
TARGET = "classification"
FEWEST = 100  # rows of a client: the armed forces have nine


def adult(by: str = "occupation", folder: str | os.PathLike[str] | None = None) -> Silos:
    """32,561 people to train on and 16,281 to test on; label 1: more than 50,000 dollars; columns standardised.

    Args:
        by: the column whose values are the clients; it is no feature then. Unknown values and those with fewer than
            100 people to train on are left out: by "native-country", eight countries remain.
        folder: where the data is; by default what SCAFFPD_DATA names.
    """
    if by not in GROUPS:
        raise unknown("column", by, GROUPS)
    place = data_folder(folder, "adult")
    train, test = (read(place / f"adult.{part}.csv.gz") for part in ("data", "test"))
    groups = [row[by] for row in train]
    names = clients(groups)
    levels = {c: sorted({row[c] for row in train}) for c in CATEGORIES if c != by}
    features = (*NUMBERS, *(f"{c}={level}" for c, values in levels.items() for level in values))
    parts = [[_client(rows, by, name, levels) for name in names] for rows in (train, test)]
    mean, deviation = standardiser([X for X, _ in parts[0]])
    scaled = [[((X - mean) / deviation, y) for X, y in part] for part in parts]
    return Silos(names, scaled[0], scaled[1], features)


def clients(groups: Sequence[str]) -> tuple[str, ...]:
    """The values that become clients: known ones, with enough people to train on."""
    return tuple(sorted(g for g, number in Counter(groups).items() if g != "?" and number >= FEWEST))


def read(file: Path) -> list[dict[str, str]]:
    """The rows of one file by column, or a sentence on what is wrong with it."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") as text:
            rows = list(csv.DictReader(text, skipinitialspace=True))
    except gzip.BadGzipFile:
        raise InputError(f"{str(file)!r} is not gzipped: compress it by gzip.") from None
    except OSError as error:
        raise InputError(f"{str(file)!r} cannot be read: {error.strerror or error}.") from None
    except (EOFError, UnicodeDecodeError, zlib.error):
        raise InputError(f"{str(file)!r} is cut off or damaged; copy it once more.") from None
    for number, row in enumerate(rows or [{}], 2):  # the header is line 1
        missing = [name for name in (*NUMBERS, *GROUPS, TARGET) if row.get(name) is None]
        if missing:
            where = f"line {number}" if missing[0] in row else "its header row"
            raise InputError(f"{str(file)!r} has no {missing[0]!r} in {where}: it is not UCI's file with a header.")
    return rows


def _client(rows: Sequence[dict[str, str]], by: str, name: str, levels: dict[str, list[str]]) -> Client:
    own = [row for row in rows if row[by] == name]
    numbers = np.array([[float(row[c]) for c in NUMBERS] for row in own])
    hot = [np.array([row[c] for row in own])[:, None] == np.array(values) for c, values in levels.items()]
    X: Matrix = np.hstack([numbers, *hot]).astype(np.float64)
    return X, np.array([row[TARGET].startswith(">50K") for row in own]).astype(np.int64)
