"""The table that a run leaves behind: one row a round, the starting point as row 0."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import unknown
from scaffpd.federation import Traffic, Vector

if TYPE_CHECKING:
    import pandas

SCALARS = {
    "round": np.int64, "certificate": np.float64, "accepted": np.bool_, "exchanges": np.int64,
    "bytes_up": np.int64, "bytes_down": np.int64, "absent": np.int64, "seconds": np.float64,
}  # fmt: skip


class History:
    """Losses and weights per client, certificate, traffic and time of every round.

    `history["certificate"]` is a column as an array; `history.losses` and `history.weights` are (rows × clients).
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._scalars: dict[str, list[Any]] = {name: [] for name in SCALARS}
        self._losses: list[Vector] = []
        self._weights: list[Vector] = []

    def append(self, state: Any, traffic: Traffic, seconds: float, absent: int = 0) -> None:
        """Add the row of a finished round; `absent` clients stood in it with earlier answers."""
        row = {
            "round": state.rounds, "certificate": state.certificate, "accepted": state.accepted,
            "exchanges": traffic.exchanges, "bytes_up": traffic.bytes_up, "bytes_down": traffic.bytes_down,
            "absent": absent, "seconds": seconds,
        }  # fmt: skip
        for name, value in row.items():
            self._scalars[name].append(value)
        self._losses.append(state.losses)
        self._weights.append(state.weights)

    def truncate(self, rows: int) -> None:
        """Keep the first `rows` rows."""
        for column in (*self._scalars.values(), self._losses, self._weights):
            del column[rows:]

    def __len__(self) -> int:
        return len(self._losses)

    @property
    def first_losses(self) -> Vector:
        """L_i at the start."""
        return self._losses[0]

    @property
    def losses(self) -> NDArray[np.float64]:
        """L_i of every round, (rows × clients)."""
        return np.array(self._losses).reshape(len(self), len(self.names))

    @property
    def weights(self) -> NDArray[np.float64]:
        """λ_i of every round, (rows × clients)."""
        return np.array(self._weights).reshape(len(self), len(self.names))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns, as in the CSV."""
        losses, weights = (f"loss[{n}]" for n in self.names), (f"weight[{n}]" for n in self.names)
        return (*SCALARS, *losses, *weights)

    def __getitem__(self, column: str) -> NDArray[Any]:
        if column in SCALARS:
            return np.array(self._scalars[column], dtype=SCALARS[column])
        if column not in self.columns:
            raise unknown("column", column, self.columns)
        kind, client = column[:-1].split("[", 1)
        table = self.losses if kind == "loss" else self.weights
        return table[:, self.names.index(client)]

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a pandas data frame (needs pandas)."""
        import pandas

        return pandas.DataFrame({name: self[name] for name in self.columns})

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table; floats are written so that they read back exactly."""
        table = [self[name].tolist() for name in self.columns]
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(zip(*table, strict=True))

    def pack(self) -> dict[str, NDArray[Any]]:
        """The table as arrays, for a checkpoint."""
        scalars = {f"history.{name}": self[name] for name in SCALARS}
        return {**scalars, "history.losses": self.losses, "history.weights": self.weights}

    @classmethod
    def unpack(cls, names: Sequence[str], arrays: dict[str, NDArray[Any]]) -> History:
        """The table that `pack` wrote."""
        history = cls(names)
        nobody = np.zeros(len(arrays["history.round"]), dtype=np.int64)  # what files without that column mean
        arrays = {"history.absent": nobody, **arrays}
        history._scalars = {name: arrays[f"history.{name}"].tolist() for name in SCALARS}
        history._losses, history._weights = list(arrays["history.losses"]), list(arrays["history.weights"])
        return history

    def __repr__(self) -> str:
        return f"History of {len(self)} rows, {len(self.names)} clients"
