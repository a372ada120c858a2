"""The machine of a run: processor cores, memory, and the versions that a record names."""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib import metadata
from typing import Any, TypedDict

import scaffpd

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


class Gpu(TypedDict):
    """A GPU and its bytes of memory."""

    name: str
    memory: int


def cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def version(package: str) -> str | None:
    """Return the installed version of a package, without importing it; `None` if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Return names and plain values, ready for JSON; packages that are not installed are left out.

    `threads` are those of PyTorch, `cores` those that this process may use, `memory` is the
    machine's in bytes, and None where the system does not say.
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
        "memory": _memory(),
        "gpus": _gpus(),
    }


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows; a system without these names
        return None


def _gpus() -> list[Gpu]:
    import torch

    try:
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError:  # an incompatible driver
        return []
    return [{"name": gpu.name, "memory": int(gpu.total_memory)} for gpu in found]
