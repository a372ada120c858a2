"""A table on disk that is written row by row, survives interruptions and detects damage.

<folder>/values.npy          the rows
<folder>/state.npz           progress; only while it is being written
<folder>/piece-K-SHA.npy     a copy of the piece from row K on that is being corrected in place, and its checksum
<folder>/normalisation.npz   mean and deviation by which raw values were standardised
<folder>/meta.json           written last: description of the rows, and checksums of pieces
<folder>/verified.json       size and time of values.npy when all pieces last had their checksums
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scaffpd.data.folder import checksum, checksums
from scaffpd.errors import InputError, real
from scaffpd.files import atomic_write, clear_drafts, write_file
from scaffpd.machine import free_memory
from scaffpd.numbers import format_bytes

SHARE = {"cpu": 0.25, "cuda": 0.6}  # share of free memory for one chunk
LARGEST = {"cpu": 64, "cuda": 1024}  # samples: larger chunks are not faster
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}I": 1024**k for k, unit in enumerate("KMGT", start=1)}


def parse_memory(memory: int | float | str | None) -> int | None:
    """Return bytes, from a number, or from "4GB" or "512MiB"."""
    if memory is None:
        return None
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?I?)B?\s*", memory.upper())
        if match is None or match[1].count(".") > 1 or match[2] not in UNITS or match[1] == ".":
            raise InputError(
                "memory-must-size",
                f"Memory must be a size such as '4GB' or '512MiB', got {memory!r}.",
            )
        memory = float(match[1]) * UNITS[match[2]]
    if not 0 < real("features", "memory", memory) < float("inf"):
        raise InputError(
            "memory-must-size", f"Memory must be a size such as '4GB' or '512MiB', got {memory!r}."
        )
    return int(memory)


def chunk(each: int, memory: int | None, device: torch.device, wanted: int | None = None) -> int:
    """Return samples at a time, if each needs `each` bytes: `wanted`, or fewer if `memory` was given as well."""
    if wanted is not None and memory is None:
        return wanted
    budget = int(SHARE.get(device.type, 0.25) * free_memory(device)) if memory is None else memory
    if budget < each:
        raise InputError(
            "image-time-about",
            f"One image at a time needs about {format_bytes(each)} of memory, and {format_bytes(budget)} may be "
            "used: set memory="
            f"'{-(-each // 10**6)}MB' or more, or take smaller images (size) or fewer coordinates.",
        )
    return min(budget // each, LARGEST.get(device.type, 64) if wanted is None else wanted)


def check_table(
    where: Path | None, rows: int, columns: int, itemsize: int, there: int = 0, piece: int = 0
) -> None:
    """Refuse a table that does not fit on the disk (or without a folder, into memory), with `there` bytes written.

    On disk, a copy of the rows that are being corrected needs space as well: at least one row, at most `piece` bytes.
    """

    def need_with(itemsize: int) -> int:
        """Count the bytes of all rows and of the largest piece."""
        row = columns * itemsize
        return row * (rows + (min(rows, max(1, piece // row)) if piece else 0))

    need = need_with(itemsize)
    if where is None:
        room = free_memory(torch.device("cpu"))
        place = "in memory"
        remedy = "a cache folder on a disk, "
    else:
        room = shutil.disk_usage(where).free + there
        place = f"on the disk of {str(where)!r}"
        remedy = ""
    if need <= room:
        return
    half = "dtype='float16', " if itemsize > 2 and need_with(2) <= room else ""
    each = rows * itemsize
    fits = max((room - piece) // each, room // (2 * each))
    fewer = f"coordinates={fits}" if fits > 0 else "fewer images"
    raise InputError(
        "images-coordinates-free",
        f"{rows} images × {columns} coordinates need {format_bytes(need)} and {format_bytes(room)} are free "
        f"{place}: {remedy}{half}"
        f"{'or ' if remedy or half else ''}{fewer} would fit.",
    )


VALUES = "values.npy"
STATE = "state.npz"
META = "meta.json"
NORMALISATION = "normalisation.npz"
VERIFIED = "verified.json"
PIECE = 64 * 2**20  # bytes
State = dict[str, NDArray[Any]]


def corrupt(folder: Path, why: str) -> InputError:
    """Return an error that names the folder to delete."""
    return InputError(
        "cached-features-damaged",
        f"The cached features in {str(folder)!r} are damaged ({why}): delete that folder and run again.",
    )


def unreadable(folder: Path, error: OSError) -> InputError:
    """Return an error with the system's message."""
    return InputError(
        "cached-features-read",
        f"The cached features in {str(folder)!r} cannot be read: {error.strerror or error}.",
    )


def finished(
    folder: Path | None, about: dict[str, Any], rows: int
) -> tuple[FeatureStore, dict[str, Any]] | None:
    """Return a complete table and the contents of meta.json; None if there is none yet."""
    if folder is None:
        return None
    try:
        if not (folder / META).exists():
            return None
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
        store = FeatureStore(folder, int(meta["shape"][0]), int(meta["shape"][1]), meta["dtype"])
        same = {name: meta[name] for name in about} == about and store.shape[0] == rows
        whole = len(meta["sha256"]) == len(store.pieces)
    except PermissionError as error:
        raise unreadable(folder, error) from None
    except (ValueError, KeyError, TypeError, IndexError, OSError):
        raise corrupt(folder, f"{META} cannot be read") from None
    if not same or not whole:
        raise corrupt(folder, f"{META} describes another table")
    return store, meta


class FeatureStore:
    """Rows × columns of one dtype in a folder, or without one in memory."""

    def __init__(self, folder: Path | None, rows: int, columns: int, dtype: str) -> None:
        self.stored, self.folder = folder is not None, folder or Path()
        self.shape, self.dtype = (rows, columns), np.dtype(dtype)
        self.piece = max(1, PIECE // (columns * self.dtype.itemsize))
        self.pieces = range(0, rows, self.piece)

    def create(self) -> tuple[NDArray[Any], State | None]:
        """Return the values to write to, and the state of an earlier run."""
        if not self.stored:
            check_table(None, *self.shape, self.dtype.itemsize)
            return np.empty(self.shape, self.dtype), None
        path = self.folder / VALUES
        there = sum(_allocated(file) for file in (path, *self._copies()))
        check_table(self.folder, *self.shape, self.dtype.itemsize, there, PIECE)
        if path.exists() and (self.folder / STATE).exists():
            return self.open("r+"), self._state()
        self._clear()  # leftovers of an earlier run belong to other rows
        values = np.lib.format.open_memmap(path, "w+", self.dtype, self.shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return values, None

    def _copies(self, start: int | None = None) -> list[Path]:
        """List the copies of pieces, or of one piece."""
        if not self.stored:
            return []
        names = (
            ("piece-*.npy",) if start is None else (f"piece-{start}.npy", f"piece-{start}-*.npy")
        )
        return [path for name in names for path in self.folder.glob(name)]

    def _clear(self) -> None:
        """Remove the files that only an unfinished run needs."""
        if self.stored:
            clear_drafts(self.folder)
            for path in (self.folder / STATE, self.folder / VERIFIED, *self._copies()):
                path.unlink(missing_ok=True)

    def open(self, mode: Any = "r") -> NDArray[Any]:
        """Map the values from disk."""
        try:
            values = np.load(self.folder / VALUES, mmap_mode=mode)
        except PermissionError as error:
            raise unreadable(self.folder, error) from None
        except (OSError, ValueError, EOFError):
            raise corrupt(self.folder, f"{VALUES} is missing or cut off") from None
        if values.shape != self.shape or values.dtype != self.dtype:
            raise corrupt(self.folder, f"{VALUES} has another shape or format")
        return values  # type: ignore[no-any-return]

    def _state(self) -> State:
        try:
            with (
                (self.folder / STATE).open("rb") as file,
                np.load(file, allow_pickle=False) as state,
            ):
                return {name: state[name] for name in state.files}
        except Exception:  # a damaged archive can make NumPy and zipfile raise anything
            raise corrupt(self.folder, f"{STATE} cannot be read") from None

    def commit(self, values: NDArray[Any], **state: NDArray[Any]) -> None:
        """Flush the rows to disk, then record them."""
        if self.stored:
            if isinstance(values, np.memmap):
                values.flush()
            with atomic_write(self.folder / STATE) as file:
                np.savez(file, **state)  # type: ignore[arg-type]

    def replace(self, values: NDArray[Any], start: int, piece: NDArray[Any]) -> None:
        """Overwrite rows such that an interruption leaves either the old ones or a copy of the new ones on disk."""
        if self.stored:
            with atomic_write(self.folder / f"piece-{start}-{checksum(piece)}.npy") as file:
                np.save(file, piece)
        values[start : start + len(piece)] = piece

    def restore(self, values: NDArray[Any], start: int) -> bool:
        """Restore rows whose overwriting was interrupted from their copy, if its checksum is right."""
        copies = self._copies(start)
        if not copies:
            return False
        try:
            piece = np.load(copies[0], allow_pickle=False)
            shape = (min(self.piece, self.shape[0] - start), self.shape[1])
            whole = (
                piece.shape == shape
                and piece.dtype == self.dtype
                and checksum(piece) == copies[0].stem[-64:]
            )
        except PermissionError as error:
            raise unreadable(self.folder, error) from None
        except Exception:  # a damaged file can make NumPy raise anything
            whole = False
        if not whole:
            raise corrupt(
                self.folder, f"the copy of rows from {start} on does not have its checksum"
            )
        values[start : start + len(piece)] = piece
        return True

    def forget(self, start: int) -> None:
        """Remove the copy of a piece whose checksum has been recorded."""
        for copy in self._copies(start):
            copy.unlink(missing_ok=True)

    def finish(
        self,
        values: NDArray[Any],
        meta: dict[str, Any],
        sums: list[str],
        fresh: bool = False,
        **normalisation: Any,
    ) -> None:
        """Write meta.json, after which the table is read-only; `fresh`: all sums are of rows written just now."""
        if not self.stored:
            return
        if isinstance(values, np.memmap):
            values.flush()
        with atomic_write(self.folder / NORMALISATION) as file:
            np.savez(file, **normalisation)
        text = (
            json.dumps(
                meta | {"shape": self.shape, "dtype": self.dtype.name, "sha256": sums}, indent=2
            )
            + "\n"
        )
        write_file(self.folder / META, text)
        self._clear()
        if fresh:
            self._note(self._stamp())

    def verify(self, values: NDArray[Any], sums: list[str], again: bool = True) -> None:
        """Compare every piece with its checksum; with `again` False only if values.npy has changed since the last time.

        Changes are detected by size and time of change of values.npy, from `verified.json`; a disk that loses bits by
        itself changes neither. All values are read, on all cores (see `scaffpd.data.folder`).
        """
        stamp = self._stamp()
        if not again and stamp == self._noted():
            return
        with closing(checksums(values, self.pieces, self.piece)) as found:
            for start, expected, there in zip(self.pieces, sums, found, strict=True):
                if there != expected:
                    raise corrupt(self.folder, f"rows from {start} on do not have their checksum")
        self._note(stamp)

    def _stamp(self) -> dict[str, int]:
        """Return the size of the values and the time of their last change."""
        about = (self.folder / VALUES).stat()
        return {"size": about.st_size, "mtime_ns": about.st_mtime_ns}

    def _noted(self) -> Any:
        """Return `_stamp` of the last successful verification; None if unknown."""
        try:
            return json.loads((self.folder / VERIFIED).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _note(self, stamp: dict[str, int]) -> None:
        with suppress(InputError, OSError):
            write_file(self.folder / VERIFIED, json.dumps(stamp) + "\n")


def _allocated(path: Path) -> int:
    """Return the bytes that a file takes on disk; 0 if unknown."""
    try:
        return 512 * path.stat().st_blocks
    except (AttributeError, FileNotFoundError):
        return 0
