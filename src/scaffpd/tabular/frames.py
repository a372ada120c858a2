"""Data frames and arrays: Parquet files, NPZ files, and what an entry returns."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError, unknown
from scaffpd.tabular.columns import Column, Matrix, Table, categorical, is_missing, numeric, spelt

Parts = Sequence[Any]  # the same thing of training and of held-out rows, or of all rows


def read_parquet(path: Path) -> Any:
    """A data frame."""
    if not path.is_file():
        raise InputError(f"Cannot read the data file {str(path)!r}: No such file or directory.")
    try:
        import pandas

        return pandas.read_parquet(path)
    except ImportError:
        raise InputError(
            f"Reading {path.name!r} needs pandas and pyarrow: pip install 'scaffpd[parquet]', or use CSV."
        ) from None
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(f"{path.name!r} cannot be read as Parquet: {reason}.") from None


def read_npz(path: Path, features: str, target: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two arrays of an NPZ file; nothing in it is executed."""
    try:
        with path.open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise InputError(f"{path.name!r} is not an NPZ file of several arrays; write one with numpy.savez.")
            for name in (features, target):
                if name not in arrays.files:
                    raise unknown(f"array of {path.name!r},", name, arrays.files)
            return arrays[features], arrays[target]
    except OSError as error:
        raise InputError(f"Cannot read the data file {str(path)!r}: {error.strerror or 'it is cut off'}.") from None
    except (zipfile.BadZipFile, EOFError):
        raise InputError(f"{path.name!r} is not an NPZ file, or is cut off.") from None
    except InputError:
        raise
    except ValueError:
        raise InputError(
            f"{path.name!r} is no NPZ file of plain arrays: save numbers or texts by numpy.savez, no Python objects."
        ) from None


def is_frame(X: Any) -> bool:
    """Whether X has named columns."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def table(owner: str, parts: Parts, columns: Sequence[str] | None, categories: Sequence[str]) -> Table:
    """Features of one or several parts, one below the other."""
    if not is_frame(parts[0]):
        if columns is not None or categories:
            raise InputError(f"{owner} has features without names, so data.columns and data.categories cannot be used.")
        return _block(owner, parts)
    header = [str(name) for name in parts[0].columns]
    for part in parts:
        if not is_frame(part) or sorted(map(str, part.columns)) != sorted(header):
            raise InputError(f"{owner} has other columns in its held-out rows than in its training rows.")
    names = header if columns is None else list(columns)
    for name in names:
        if header.count(name) > 1:
            raise InputError(f"{owner} has two columns named {name!r}; names must differ.")
    for name in (*names, *categories):
        if name not in header:
            raise unknown(f"column of {owner},", name, header)
    place = [[str(name) for name in part.columns] for part in parts]
    chosen = [
        column(owner, name, [part.iloc[:, at.index(name)] for part, at in zip(parts, place, strict=True)], categories)
        for name in names
    ]
    return Table(sum(len(part) for part in parts), tuple(chosen))


def column(owner: str, name: str, parts: Parts, categories: Sequence[str] = ()) -> Column:
    """One column of one or several parts."""
    arrays = [values(owner, f"column {name!r}", part) for part in parts]
    if name not in categories and all(array.dtype.kind == "f" for array in arrays):
        return numeric(owner, name, np.concatenate(arrays))
    cells: list[str | None] = []
    for array in arrays:
        cells += [None if cell is None or cell != cell else spelt(cell) for cell in array.tolist()]
    cells = [None if cell is None or is_missing(cell) else cell for cell in cells]
    return categorical(name, cells)


def values(owner: str, what: str, given: Any) -> NDArray[Any]:
    """One column as float64 with NaN, or as an array of texts and `None`."""
    objects: NDArray[Any]
    if hasattr(given, "isna") and hasattr(given, "to_numpy"):  # a pandas series, whatever it keeps its values in
        objects = np.array(given.astype(object), dtype=object)
        objects[np.asarray(given.isna())] = None
    else:
        objects = _array(owner, what, given)
    if objects.ndim != 1:
        raise InputError(f"{owner} has a {what} of shape {objects.shape}; one value per row is expected.")
    if objects.dtype.kind in "fiub":
        return np.asarray(objects, dtype=np.float64)
    if objects.dtype.kind in "mM" or any(type(cell).__name__ in ("Timestamp", "datetime", "date") for cell in objects):
        raise InputError(f"{owner} has dates in {what}, which are neither numbers nor categories; leave it out.")
    present = [cell for cell in objects.tolist() if cell is not None]
    if all(isinstance(cell, bool | int | float | np.number | np.bool_) for cell in present):
        return np.array([np.nan if cell is None else float(cell) for cell in objects.tolist()])
    return np.asarray(objects, dtype=object)


def _array(owner: str, what: str, given: Any) -> NDArray[Any]:
    given = given.detach().cpu().numpy() if hasattr(given, "detach") else given
    if isinstance(given, np.ma.MaskedArray):
        given = np.ma.filled(given.astype(np.float64), np.nan)
    try:
        return np.asarray(given)
    except (TypeError, ValueError):
        raise InputError(f"{owner} has a {what} that does not form an array.") from None


def _block(owner: str, parts: Parts) -> Table:
    arrays = [_array(owner, "feature array", part) for part in parts]
    for array in arrays:
        if array.dtype.kind not in "fiub":
            raise InputError(
                f"{owner} has features that are not numbers ({array.dtype}); encode them, or use a CSV file."
            )
        if array.ndim < 2 or array.shape[1:] != arrays[0].shape[1:] or 0 in array.shape[1:]:
            raise InputError(f"{owner} has features of shape {array.shape}; rows × features are expected.")
    block: Matrix = np.concatenate(arrays).astype(np.float64, copy=False)
    if np.isinf(block).any():
        place = np.unravel_index(int(np.isinf(block).argmax()), block.shape)
        raise InputError(f"{owner} has an infinite feature in row {int(place[0]) + 1}.")
    return Table(len(block), block=block.reshape(len(block), -1), shape=block.shape[1:])
