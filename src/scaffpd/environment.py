"""What a run stands on: versions, processor, memory and GPUs, for `environment.json` and `scaffpd doctor`."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import scaffpd
from scaffpd.cores import cores

PACKAGES = (  # of which a version is noted where it is installed; nothing is imported for it
    *("torch", "numpy", "scipy", "scikit-learn", "safetensors", "threadpoolctl", "matplotlib", "pillow"),
    *("vl-convert-python", "rich", "typer", "click", "pandas", "pyarrow", "nvflare", "flwr", "tensorboard"),
    *("mlflow", "mlflow-skinny"),
)


def environment() -> dict[str, Any]:
    """Names and plain values, ready for JSON; packages that are not installed are left out.

    `threads` are those that PyTorch computes with, `cores` those that this process may use, `memory` is the machine's
    in bytes (None where the system does not say), `gpus` has a name and bytes of memory for each.
    """
    threads, gpus = _torch()
    return {
        "scaffpd": scaffpd.__version__,
        "python": platform.python_version(),
        **versions(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": cores(),
        "threads": threads,
        "memory": physical_memory(),
        "gpus": gpus,
    }


def versions() -> dict[str, str]:
    """The version of every package in `PACKAGES` that is installed."""
    found = ((name, version(name)) for name in PACKAGES)
    return {name: number for name, number in found if number is not None}


def version(package: str) -> str | None:
    """The version that is installed, without importing anything."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def physical_memory() -> int | None:
    """Bytes of memory of the machine."""
    try:
        return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return None


def _torch() -> tuple[int | None, list[dict[str, Any]]]:
    """Threads that PyTorch uses and the GPUs that it sees; None and none where it cannot be loaded."""
    try:
        import torch
    except (ImportError, OSError):  # not there, or a library that it needs is not
        return None, []
    return torch.get_num_threads(), _gpus()


def _gpus() -> list[dict[str, Any]]:
    import torch

    try:
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError:  # a driver that does not fit
        return []
    return [{"name": gpu.name, "memory": int(gpu.total_memory)} for gpu in found]
