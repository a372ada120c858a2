r"""Which rows are held out: by marks from a stored secret, and by nothing that is in a row.

A row has a mark in [0, 1), and one below `data.test` is held out. Marks come from `split.key`, in
the silo's folder, so that they are the same in every run, whatever columns it uses and whatever
cells have changed since.

by place      row k of the file has the k-th mark, which rows without a target take as well. Of
              every `BLOCK` rows equally many are held out, but for one: a share that chance alone
              would miss by a fifth at 120 rows. Rows that are appended get further marks; those
              behind a removed row take each other's.
by subject    all rows with one name in `data.subject` have one mark, wherever they are and however
              many. A row without a name has one by its place.

Fewer than `limits.rows` are none: scores of few rows would say much about each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.tabular.columns import Mask, Matrix

BLOCK = 20


def row_places(secret: bytes, rows: int) -> Matrix:
    """Return the marks of rows by their places: (rank in the block + u)/BLOCK, u of the block."""
    blocks = -(-rows // BLOCK)
    drawn = _drawn(secret, [f"row {k}" for k in range(blocks * BLOCK)]).reshape(blocks, BLOCK)
    shift = _drawn(secret, [f"block {k}" for k in range(blocks)])
    ranks = drawn.argsort(1).argsort(1)
    found: Matrix = ((ranks + shift[:, None]) / BLOCK).ravel()[:rows]
    return found


def drawn_marks(secret: bytes, rows: int, subjects: Sequence[str | None] | None = None) -> Matrix:
    """Return the mark of every row of a table: its subject's, or that of its place."""
    marks = row_places(secret, rows)
    if subjects is None:
        return marks
    names = sorted({name for name in subjects if name is not None})
    drawn = dict(zip(names, _drawn(secret, [f"subject {name}" for name in names]), strict=True))
    return np.array(
        [mark if name is None else drawn[name] for mark, name in zip(marks, subjects, strict=True)]
    )


def held_rows(marks: Matrix, share: float, least: int) -> Mask:
    """Return which rows are held out: those of the smallest marks, or none where they are few."""
    held: Mask = marks < share
    return held if held.sum() >= least else np.zeros_like(held)


def _drawn(secret: bytes, names: Sequence[str]) -> NDArray[np.float64]:
    found = [hashlib.blake2b(name.encode(), key=secret, digest_size=8).digest() for name in names]
    return np.frombuffer(b"".join(found), np.uint64).astype(np.float64) * 2.0**-64
