"""How much memory there is, and sizes in words."""

from __future__ import annotations

import os

import torch

UNKNOWN = 4 * 2**30  # bytes that are taken to be free where the system does not say


def free(device: torch.device) -> int:
    """Bytes that can still be had: on a GPU also those that torch holds and does not use."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # what the page cache would give back counts as well
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        pass
    try:
        return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return UNKNOWN


def words(size: float) -> str:
    """6.0 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{int(size)} B"
        size /= 1000
    return f"{size:.3g} TB"
