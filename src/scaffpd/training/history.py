"""Results of a run: its history, one row a round with the starting point as row 0, and its
checkpoint.

A checkpoint is written atomically and read without executing anything (NumPy's npz, no pickle).
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.errors import InputError, count, unknown
from scaffpd.federation import Traffic, Vector
from scaffpd.files import atomic_write, csv_text, write_file

if TYPE_CHECKING:
    from scaffpd.algorithms.base import RunState

SCALARS = {
    "round": np.int64,
    "certificate": np.float64,
    "accepted": np.bool_,
    "exchanges": np.int64,
    "bytes_up": np.int64,
    "bytes_down": np.int64,
    "seconds": np.float64,
}
MANY = 10_000  # clients, above which a history does not list every one by default
FORMAT = 1  # version of checkpoints
Array = NDArray[np.generic]
Arrays = dict[str, Array]
State = TypeVar("State")


class History:
    """Losses and weights per client, certificate, traffic and time of every round.

    `history["certificate"]` is a column as an array; `history.losses` and `history.weights` are
    (rows × clients). Without `every_client`, single clients are available for the first and the
    last row only (`first_losses`, `last_losses`).
    """

    def __init__(self, names: Sequence[str], every_client: bool = True) -> None:
        self.names = tuple(names)
        self.every_client = every_client
        self._scalars: dict[str, list[float]] = {name: [] for name in SCALARS}
        self._clients: dict[int, tuple[Vector, Vector]] = {}  # losses and weights by row

    def append(self, state: RunState, traffic: Traffic, seconds: float) -> None:
        sent = traffic.exchanges, traffic.bytes_up, traffic.bytes_down
        row = state.rounds, state.certificate, state.accepted, *sent, seconds
        n = len(self)
        for column, value in zip(self._scalars.values(), row, strict=True):
            column.append(value)
        self._clients[n] = state.losses, state.weights
        if not self.every_client and n > 2:
            self._clients.pop(n - 2)  # the row before stays, for an interrupted round is undone

    def look_up(self, losses: Vector) -> None:
        self._clients[len(self) - 1] = losses, self._clients[len(self) - 1][1]

    def truncate(self, rows: int) -> None:
        for column in self._scalars.values():
            del column[rows:]
        self._clients = {row: held for row, held in self._clients.items() if row < rows}

    def __len__(self) -> int:
        return len(self._scalars["round"])

    @property
    def first_losses(self) -> Vector:
        """L_i at the start."""
        return self._clients[0][0]

    @property
    def last_losses(self) -> Vector:
        """L_i after the last round."""
        return self._clients[len(self) - 1][0]

    @property
    def losses(self) -> NDArray[np.float64]:
        return self._table(0)

    @property
    def weights(self) -> NDArray[np.float64]:
        return self._table(1)

    def _table(self, which: int) -> NDArray[np.float64]:
        if not self.every_client:
            raise InputError(
                "history-without-clients",
                f"This history does not list every one of {len(self.names)} clients: record all "
                "with train(..., every_client=True).",
            )
        return np.array([held[which] for held in self._clients.values()]).reshape(
            len(self), len(self.names)
        )

    @property
    def columns(self) -> tuple[str, ...]:
        if not self.every_client:
            return tuple(SCALARS)
        losses = (f"loss[{n}]" for n in self.names)
        weights = (f"weight[{n}]" for n in self.names)
        return (*SCALARS, *losses, *weights)

    def __getitem__(self, column: str) -> Array:
        if column in SCALARS:
            return np.array(self._scalars[column], dtype=SCALARS[column])
        kind, _, client = column.removesuffix("]").partition("[")
        if column not in (f"loss[{client}]", f"weight[{client}]") or client not in self.names:
            raise unknown("column", column, self.columns)
        return self._table(kind == "weight")[:, self.names.index(client)]

    def table(self) -> dict[str, list[float]]:
        columns = [self[name].tolist() for name in SCALARS]
        if self.every_client:
            columns += np.concatenate([self.losses, self.weights], 1).T.tolist()
        return dict(zip(self.columns, columns, strict=True))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table as CSV; floats read back exactly."""
        table = self.table()
        rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
        write_file(Path(path), csv_text(rows, self.columns))

    def pack(self) -> Arrays:
        arrays = {f"history.{name}": self[name] for name in SCALARS}
        held = [
            np.array(part).reshape(len(self._clients), -1)
            for part in zip(*self._clients.values(), strict=True)
        ]
        arrays |= dict(zip(("history.losses", "history.weights"), held, strict=True))
        return arrays | {"history.every_client": np.array(self.every_client)}

    @classmethod
    def unpack(cls, names: Sequence[str], arrays: Arrays) -> History:
        history = cls(names, bool(arrays["history.every_client"]))
        rows = len(arrays["history.round"])
        history._scalars = {name: arrays[f"history.{name}"].tolist() for name in SCALARS}
        held = range(rows) if history.every_client else [0, *range(max(1, rows - 2), rows)]
        clients = zip(arrays["history.losses"], arrays["history.weights"], strict=True)
        history._clients = dict(zip(held, clients, strict=True))
        return history

    def __repr__(self) -> str:
        return f"History of {len(self)} rows, {len(self.names)} clients"


@dataclass(frozen=True)
class Checkpoint:
    """File of a run, and how often to write it.

    Args:
        path: the file; a run continues from it if it exists.
        every: rounds between two writes.
    """

    path: str | os.PathLike[str]
    every: int = 10

    def __post_init__(self) -> None:
        count("Checkpoint", "every", self.every)
        if not Path(self.path).resolve().parent.is_dir():
            raise InputError(
                "checkpoint-folder-missing",
                f"The checkpoint's folder {str(Path(self.path).parent)!r} does not exist.",
            )

    def exists(self) -> bool:
        return Path(self.path).exists()


def pack(state: object, prefix: str = "state") -> Arrays:
    """Return a (nested) dataclass of tensors, arrays and numbers as named arrays, without transient
    fields.
    """
    arrays: Arrays = {}
    for item in dataclasses.fields(state):  # type: ignore[arg-type]
        name = f"{prefix}.{item.name}"
        value = getattr(state, item.name)
        if item.metadata.get("transient") or value is None:  # no array holds a None
            continue
        if dataclasses.is_dataclass(value):
            arrays |= pack(value, name)
        elif isinstance(value, torch.Tensor):
            arrays[name] = value.detach().cpu().numpy()
        else:
            arrays[name] = np.asarray(value)
    return arrays


def unpack(like: State, arrays: Arrays, prefix: str = "state") -> State:
    """Put packed values into a dataclass with the structure of `like`; transient fields keep
    `like`'s values.
    """
    values: dict[str, object] = {}
    for item in dataclasses.fields(like):  # type: ignore[arg-type]
        name = f"{prefix}.{item.name}"
        old = getattr(like, item.name)
        if item.metadata.get("transient") or old is None:
            continue
        if dataclasses.is_dataclass(old):
            values[item.name] = unpack(old, arrays, name)
        elif isinstance(old, torch.Tensor):
            values[item.name] = torch.from_numpy(arrays[name].copy()).to(old)
        elif isinstance(old, np.ndarray):
            values[item.name] = arrays[name]
        else:
            values[item.name] = type(old)(arrays[name].item())
    return dataclasses.replace(like, **values)  # type: ignore[type-var]


def write(path: str | os.PathLike[str], arrays: Arrays, about: dict[str, object]) -> None:
    text = np.array(json.dumps({"format": FORMAT, **about}))
    with atomic_write(Path(path)) as file:
        np.savez(file, about=text, **arrays)  # type: ignore[arg-type]


def read(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, Any]]:
    """Read the arrays and the description of a checkpoint; refuse another file in one sentence."""
    try:
        with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("about").item())
        if not isinstance(about, dict):
            raise TypeError("it has no description")
    except (OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile, EOFError):
        raise InputError(
            "checkpoint-unreadable",
            f"{str(path)!r} is not a readable scaffpd checkpoint; remove it to start over.",
        ) from None
    if about.get("format") != FORMAT:
        raise InputError(
            "checkpoint-format",
            f"{str(path)!r} has checkpoint format {about.get('format')}; this version reads "
            f"{FORMAT}.",
        )
    return arrays, about
