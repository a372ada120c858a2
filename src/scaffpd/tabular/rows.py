"""Rows of one client: a table, a target, and which of them are held out; asked for sums only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scaffpd.data.silos import held_out
from scaffpd.errors import InputError
from scaffpd.tabular import encoding
from scaffpd.tabular.columns import Mask, Table
from scaffpd.tabular.encoding import Encoded
from scaffpd.tabular.schema import CLASSIFICATION
from scaffpd.tabular.target import Target


@dataclass(frozen=True)
class Rows:
    """All rows of a client that have a target.

    Attributes:
        name: the client.
        table: the features.
        target: what is to be predicted.
        held: which rows are held out.
        dropped: how many rows had no target.
        rarest: categories with fewer training rows than this are "other".
    """

    name: str
    table: Table
    target: Target
    held: Mask = field(repr=False)
    dropped: int = 0
    rarest: int = 1

    @property
    def rows(self) -> tuple[int, int]:
        """How many training rows and held-out rows there are."""
        return int((~self.held).sum()), int(self.held.sum())

    def describe(self) -> dict[str, Any]:
        """What the others have to know of this client's columns and labels, and nothing else."""
        return encoding.describe(self)

    def totals(self, schema: Mapping[str, Any], mean: Any = None) -> dict[str, Any]:
        """Per encoded column n and Σx of the training rows, or n and Σ(x − mean)² once the mean is known."""
        return encoding.totals(self, schema, mean)

    def encoded(self, schema: Mapping[str, Any], mean: Any, deviation: Any) -> Encoded:
        """Rows as the agreement has them: filled, encoded and, if agreed, standardised."""
        return encoding.encoded(self, schema, mean, deviation)


def held_rows(name: str, target: Target, fraction: float, seed: int) -> Mask:
    """The rows to hold out that seed and name choose, label by label."""
    if fraction > 0 and len(target.values) < 2:
        raise InputError(f"{name!r} has a single row, which cannot be split; use test = 0.")
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    labels = target.values if target.task == CLASSIFICATION else np.zeros(len(target.values), dtype=np.int64)
    return held_out(labels, fraction, np.random.default_rng(int.from_bytes(digest[:16])))
