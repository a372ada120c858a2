"""A run on disk: written atomically, read without executing anything (NumPy's npz, no pickle)."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.errors import InputError, count
from scaffpd.system import atomic_write

FORMAT = 1
Arrays = dict[str, NDArray[Any]]
State = TypeVar("State")


@dataclass(frozen=True)
class Checkpoint:
    """Where a run is kept and how often it is written.

    Args:
        path: the file; a run that finds it there goes on from it.
        every: rounds between two writes.
    """

    path: str | os.PathLike[str]
    every: int = 10

    def __post_init__(self) -> None:
        count("Checkpoint", "every", self.every)
        if not Path(self.path).resolve().parent.is_dir():
            raise InputError(f"The checkpoint's folder {str(Path(self.path).parent)!r} does not exist.")

    def exists(self) -> bool:
        """Whether there is something to resume."""
        return Path(self.path).exists()


def pack(state: Any, prefix: str = "state") -> Arrays:
    """A (nested) dataclass of tensors, arrays and numbers as named arrays; fields marked transient are left out."""
    arrays: Arrays = {}
    for item in dataclasses.fields(state):
        name, value = f"{prefix}.{item.name}", getattr(state, item.name)
        if item.metadata.get("transient"):
            continue
        if dataclasses.is_dataclass(value):
            arrays |= pack(value, name)
        elif isinstance(value, torch.Tensor):
            arrays[name] = value.detach().cpu().numpy()
        else:
            arrays[name] = np.asarray(value)
    return arrays


def unpack(like: State, arrays: Arrays, prefix: str = "state") -> State:
    """The packed values in a dataclass of the same structure as `like`; transient fields keep `like`'s values."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(like):  # type: ignore[arg-type]
        name, old = f"{prefix}.{item.name}", getattr(like, item.name)
        if item.metadata.get("transient"):
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


def write(path: str | os.PathLike[str], arrays: Arrays, about: dict[str, Any]) -> None:
    """Write all of it or nothing."""
    text = np.array(json.dumps({"format": FORMAT, **about}))
    with atomic_write(Path(path)) as file:
        np.savez(file, about=text, **arrays)  # type: ignore[arg-type]


def read(path: str | os.PathLike[str]) -> tuple[Arrays, dict[str, Any]]:
    """The arrays and the description of a checkpoint, or one sentence when the file is something else."""
    try:
        with open(path, "rb") as handle, np.load(handle, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        about = json.loads(arrays.pop("about").item())
        if not isinstance(about, dict):
            raise TypeError("it has no description")
    except (OSError, ValueError, TypeError, KeyError, zipfile.BadZipFile, EOFError):
        raise InputError(f"{str(path)!r} is not a readable scaffpd checkpoint; remove it to start anew.") from None
    if about.get("format") != FORMAT:
        raise InputError(f"{str(path)!r} has checkpoint format {about.get('format')}; this version reads {FORMAT}.")
    return arrays, about
