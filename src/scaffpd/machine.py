"""The machine of a run: processor cores, free memory, and the versions that a record names."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import psutil

import scaffpd

if TYPE_CHECKING:
    import torch

# packages whose version is recorded if installed, without importing them
PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "scikit-learn",
    "pandas",
    "pyarrow",
    "pydantic",
    "nvflare",
    "cryptography",
    "dp-accounting",
    "vl-convert-python",
)
CONTAINER = Path("/sys/fs/cgroup")  # a container sees its own control group here (version 2)


class Gpu(TypedDict):
    """A GPU and its bytes of memory."""

    name: str
    memory: int


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(device: torch.device) -> int:
    """Return the free bytes: on a GPU with torch's unused ones, in a container within its limit."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return min(int(psutil.virtual_memory().available), _left_in_container())


def _left_in_container() -> int:
    """Return limit − use + page cache of this container; the machine's memory without a limit."""
    try:
        limit = int((CONTAINER / "memory.max").read_text())
        used = int((CONTAINER / "memory.current").read_text())
        fields = (line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        # files that were read count as used, and give way when memory is needed
        cache = sum(int(size) for name, size in fields if name in ("inactive_file", "active_file"))
    except (OSError, ValueError):  # no container, or the limit is "max"
        return int(psutil.virtual_memory().total)
    return max(0, limit - max(0, used - cache))


def version(package: str) -> str | None:
    """Return the installed version of a package, without importing it; `None` if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Return names and plain values, ready for JSON; packages that are not installed are left out.

    `threads` are those of PyTorch, `cores` those that this process may use, `memory` is the
    machine's in bytes.
    """
    import torch

    found = ((name, version(name)) for name in PACKAGES)
    return {
        "scaffpd": scaffpd.__version__,
        "python": platform.python_version(),
        **{name: number for name, number in found if number is not None},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory": psutil.virtual_memory().total,
        "gpus": _gpus(),
    }


def _gpus() -> list[Gpu]:
    import torch

    try:
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError:  # an incompatible driver
        return []
    return [{"name": gpu.name, "memory": int(gpu.total_memory)} for gpu in found]
