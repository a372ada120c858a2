"""How much memory there is, and sizes in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

UNKNOWN = 4 * 2**30  # bytes that are taken to be free where the system does not say
GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # limits of containers, and which of them are ours
NAMES = {  # of limit, use and what the page cache would give back, in versions 2 and 1 of control groups
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def free(device: torch.device) -> int:
    """Bytes that can still be had: on a GPU also those that torch holds and does not use, in a container its own."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return min([_of_machine(), *_of_containers()])


def _of_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # what the page cache would give back counts as well
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        pass
    try:
        return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return UNKNOWN


def _of_containers() -> Iterator[int]:
    """Bytes: limit - use + page cache, of every control group around us whose limit is below physical memory."""
    for kind, (limit, use, cached) in NAMES.items():
        for folder in _groups(kind):
            most, used = _number(folder / limit), _number(folder / use)
            if most is not None and used is not None and most < _physical():
                yield max(0, most - max(0, used - _cache(folder, cached)))


def _groups(kind: str) -> Iterator[Path]:
    """The folders of this process's own group and of those around it, of one version."""
    root = GROUPS / kind
    yield root
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if kind in controllers.split(","):  # a line of version 2 names none
            own = root / path.strip("/")
            yield from (folder for folder in (own, *own.parents) if folder != root and folder.is_relative_to(root))


def _number(file: Path) -> int | None:
    """What a file says; None for "max" and for no file."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _cache(folder: Path, names: tuple[str, ...]) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.split()[:1] and line.split()[0] in names)
    except (OSError, ValueError, IndexError):
        return 0


def _physical() -> float:
    try:
        return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return float("inf")


def words(size: float) -> str:
    """6.0 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{int(size)} B"
        size /= 1000
    return f"{size:.3g} TB"
