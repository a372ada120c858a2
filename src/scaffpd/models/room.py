r"""Memory that a problem needs, found out before the work rather than in the middle of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scaffpd.data.table import Selection
from scaffpd.errors import InputError

GIGABYTE = 1e9
VECTORS = 6  # x, c, d, the last two points, and what an update needs besides


def available(device: torch.device) -> int:
    """Bytes that can still be had on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + held)
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            table = dict(line.split(":") for line in lines)
        return 1024 * int(table["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 2**63  # nobody knows: let the allocator say so


def needed(features: int, stored: int, sizes: Sequence[int], outputs: int, number: int) -> int:
    """Bytes of one copy of the data, of the clients' eigenvectors (and the largest one's workspace), and of vectors.

    Args:
        features: d.
        stored: bytes of a number in the table.
        sizes: the clients' numbers of samples.
        outputs: columns of x.
        number: bytes of a number of x.
    """
    samples, squares = sum(sizes), sum(m * m for m in sizes) + 3 * max(sizes) ** 2
    vectors = outputs * ((VECTORS + len(sizes)) * features + VECTORS * samples)
    return stored * samples * features + number * (squares + vectors)


def check_room(one: Selection, sizes: Sequence[int], outputs: int, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a problem that does not fit, with the figures and what would."""
    d, stored, number = one.shape[1], one.dtype.itemsize, dtype.itemsize
    have, want = available(device), needed(d, stored, sizes, outputs, number)
    if want <= have:
        return
    fixed = needed(0, stored, sizes, outputs, number)
    fits = int(0.95 * d * (have - fixed) / (want - fixed))
    advice = f"about {fits:,} features would fit" if fits > 0 else "take fewer samples"
    if stored > 2 and needed(d, 2, sizes, outputs, number) <= have:
        advice = "a table in float16 would fit"
    raise InputError(
        f"{sum(sizes):,} samples × {d:,} features × {outputs} outputs in {len(sizes)} clients need "
        f"{want / GIGABYTE:.1f} GB on {device}, of which {have / GIGABYTE:.1f} GB are free: {advice}."
    )
