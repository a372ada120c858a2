"""Room in memory and on disk, counted before any work."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch

from scaffpd.errors import InputError, real
from scaffpd.memory import free, words

SHARE = {"cpu": 0.25, "cuda": 0.6}  # of what is free, for one chunk
LARGEST = {"cpu": 64, "cuda": 1024}  # samples: beyond, nothing gets faster
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}I": 1024**k for k, unit in enumerate("KMGT", start=1)}


def parse(memory: int | float | str | None) -> int | None:
    """Bytes: a number, or "4GB", "512MiB"."""
    if memory is None:
        return None
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?I?)B?\s*", memory.upper())
        if match is None or match[1].count(".") > 1 or match[2] not in UNITS or match[1] == ".":
            raise InputError(f"Memory must be a size such as '4GB' or '512MiB', got {memory!r}.")
        memory = float(match[1]) * UNITS[match[2]]
    if not 0 < real("features", "memory", memory) < float("inf"):
        raise InputError(f"Memory must be a size such as '4GB' or '512MiB', got {memory!r}.")
    return int(memory)


def chunk(each: int, memory: int | None, device: torch.device, wanted: int | None = None) -> int:
    """Samples at a time, of which each needs so many bytes: `wanted`, or fewer where `memory` was given as well."""
    if wanted is not None and memory is None:
        return wanted
    budget = int(SHARE.get(device.type, 0.25) * free(device)) if memory is None else memory
    if budget < each:
        raise InputError(
            f"One image at a time needs about {words(each)} of memory, and {words(budget)} may be used: set memory="
            f"'{-(-each // 10**6)}MB' or more, or take smaller images (size) or fewer coordinates."
        )
    return min(budget // each, LARGEST.get(device.type, 64) if wanted is None else wanted)


def check_table(where: Path | None, rows: int, columns: int, itemsize: int, there: int = 0, piece: int = 0) -> None:
    """Refuse a table that does not fit on the disk (or without a folder, into memory), `there` bytes being there.

    On disk, a copy of the rows that are being corrected takes room as well: at least one row, at most `piece` bytes.
    """
    need = _need(rows, columns, itemsize, piece)
    if where is None:
        room, place, remedy = free(torch.device("cpu")), "in memory", "a cache folder on a disk, "
    else:
        room, place, remedy = shutil.disk_usage(where).free + there, f"on the disk of {str(where)!r}", ""
    if need <= room:
        return
    half = "dtype='float16', " if itemsize > 2 and _need(rows, columns, 2, piece) <= room else ""
    each = rows * itemsize
    fits = max((room - piece) // each, room // (2 * each))
    fewer = f"coordinates={fits}" if fits > 0 else "fewer images"
    raise InputError(
        f"{rows} images × {columns} coordinates need {words(need)} and {words(room)} are free {place}: {remedy}{half}"
        f"{'or ' if remedy or half else ''}{fewer} would fit."
    )


def _need(rows: int, columns: int, itemsize: int, piece: int) -> int:
    """Bytes of all rows and of the largest piece."""
    row = columns * itemsize
    return row * (rows + (min(rows, max(1, piece // row)) if piece else 0))
