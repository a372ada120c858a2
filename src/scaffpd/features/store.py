"""A table on disk that is written row by row, survives interruptions and knows when it is not what it was.

<folder>/values.npy          the rows
<folder>/state.npz           how far it is; only while it is being written
<folder>/piece-K.npy         a piece that is being corrected in place; likewise
<folder>/normalisation.npz   mean and deviation by which raw values were standardised
<folder>/meta.json           written last: what the rows are, and checksums of pieces
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.features.room import check_table

VALUES, STATE, META, NORMALISATION = "values.npy", "state.npz", "meta.json", "normalisation.npz"
PIECE = 64 * 2**20  # bytes
State = dict[str, NDArray[Any]]


def corrupt(folder: Path, why: str) -> InputError:
    """One sentence that says which folder to delete."""
    return InputError(f"The cached features in {str(folder)!r} are damaged ({why}): delete that folder and run again.")


def finished(folder: Path | None, about: dict[str, Any], rows: int) -> tuple[Store, dict[str, Any]] | None:
    """A table that is complete, and what meta.json says about it; None where there is none yet."""
    if folder is None or not (folder / META).exists():
        return None
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
        store = Store(folder, int(meta["shape"][0]), int(meta["shape"][1]), meta["dtype"])
        same = {name: meta[name] for name in about} == about and store.shape[0] == rows
        whole = len(meta["sha256"]) == len(store.pieces)
    except (ValueError, KeyError, TypeError, IndexError, OSError):
        raise corrupt(folder, f"{META} cannot be read") from None
    if not same or not whole:
        raise corrupt(folder, f"{META} describes another table")
    return store, meta


class Store:
    """Rows × columns of one dtype in a folder, or without one in memory."""

    def __init__(self, folder: Path | None, rows: int, columns: int, dtype: str) -> None:
        self.folder, self.shape, self.dtype = folder, (rows, columns), np.dtype(dtype)
        self.piece = max(1, PIECE // (columns * self.dtype.itemsize))
        self.pieces = range(0, rows, self.piece)

    @property
    def size(self) -> int:
        """Bytes of the values."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def create(self) -> tuple[NDArray[Any], State | None]:
        """Values to be written to, and the state in which they were left, if they were."""
        if self.folder is None:
            check_table(None, *self.shape, self.dtype.itemsize)
            return np.empty(self.shape, self.dtype), None
        path = self.folder / VALUES
        there = path.stat().st_blocks * 512 if path.exists() and hasattr(os.stat_result, "st_blocks") else 0
        check_table(self.folder, *self.shape, self.dtype.itemsize, there)
        if path.exists() and (self.folder / STATE).exists():
            return self.open("r+"), self._state()
        values = np.lib.format.open_memmap(path, "w+", self.dtype, self.shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return values, None

    def open(self, mode: Any = "r") -> NDArray[Any]:
        """The values, mapped from disk."""
        assert self.folder is not None
        try:
            values = np.load(self.folder / VALUES, mmap_mode=mode)
        except (OSError, ValueError, EOFError):
            raise corrupt(self.folder, f"{VALUES} is missing or cut off") from None
        if values.shape != self.shape or values.dtype != self.dtype:
            raise corrupt(self.folder, f"{VALUES} has another shape or format")
        return values  # type: ignore[no-any-return]

    def _state(self) -> State:
        assert self.folder is not None
        try:
            with (self.folder / STATE).open("rb") as file, np.load(file, allow_pickle=False) as state:
                return {name: state[name] for name in state.files}
        except Exception:  # whatever a damaged archive makes NumPy and zipfile raise
            raise corrupt(self.folder, f"{STATE} cannot be read") from None

    def commit(self, values: NDArray[Any], **state: NDArray[Any]) -> None:
        """Have the rows on disk, then say so."""
        if self.folder is not None:
            if isinstance(values, np.memmap):
                values.flush()
            with_arrays(self.folder / STATE, state)

    def replace(self, values: NDArray[Any], start: int, piece: NDArray[Any]) -> None:
        """Overwrite rows so that an interruption leaves either the old ones or a copy of the new ones on disk."""
        if self.folder is None:
            values[start : start + len(piece)] = piece
            return
        copy = self.folder / f"piece-{start}.npy"
        atomically(copy, lambda path: np.save(path, piece))
        self.restore(values, start)

    def restore(self, values: NDArray[Any], start: int) -> bool:
        """Rows from the copy of a piece whose overwriting was interrupted."""
        copy = None if self.folder is None else self.folder / f"piece-{start}.npy"
        if copy is None or not copy.exists():
            return False
        piece = np.load(copy)
        values[start : start + len(piece)] = piece
        return True

    def finish(self, values: NDArray[Any], meta: dict[str, Any], sums: list[str], **normalisation: Any) -> None:
        """Write what it is; from now on it is only read."""
        if self.folder is None:
            return
        if isinstance(values, np.memmap):
            values.flush()
        with_arrays(self.folder / NORMALISATION, normalisation)
        text = json.dumps(meta | {"shape": self.shape, "dtype": self.dtype.name, "sha256": sums}, indent=2) + "\n"
        atomically(self.folder / META, lambda path: path.write_text(text, encoding="utf-8"))
        for name in (self.folder / STATE, *self.folder.glob("piece-*.npy")):
            name.unlink(missing_ok=True)

    def verify(self, values: NDArray[Any], sums: list[str]) -> None:
        """Compare every piece with its checksum."""
        for start, expected in zip(self.pieces, sums, strict=True):
            if checksum(values[start : start + self.piece]) != expected:
                assert self.folder is not None
                raise corrupt(self.folder, f"rows from {start} on do not have their checksum")


def checksum(piece: NDArray[Any]) -> str:
    """SHA-256 of the bytes of some rows."""
    return hashlib.sha256(np.ascontiguousarray(piece).view(np.uint8).data).hexdigest()


def with_arrays(path: Path, arrays: State) -> None:
    """All arrays into one file, all of it or nothing."""
    atomically(path, lambda draft: np.savez(draft, **arrays))  # type: ignore[arg-type]


def atomically(path: Path, write: Any) -> None:
    """Write a draft beside it, and put it in its place when it is on disk."""
    draft = path.with_name(f"draft-{path.name}")
    write(draft)
    with draft.open("r+b") as file:
        os.fsync(file.fileno())
    os.replace(draft, path)
