r"""Memory that a problem needs, found out before the work rather than in the middle of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scaffpd.data.table import Selection
from scaffpd.errors import InputError
from scaffpd.memory import free, words

VECTORS = 6  # x, c, d, the last two points, and what an update needs besides; as many of every client's own


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
    vectors = VECTORS * outputs * ((1 + len(sizes)) * features + samples)
    return stored * samples * features + number * (squares + vectors)


def check_room(one: Selection, sizes: Sequence[int], outputs: int, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a problem that does not fit, with the figures and what would."""
    d, stored, number = one.shape[1], one.dtype.itemsize, dtype.itemsize
    have, want = free(device), needed(d, stored, sizes, outputs, number)
    if want <= have:
        return
    fixed = needed(0, stored, sizes, outputs, number)
    fits = int(0.95 * d * (have - fixed) / (want - fixed))
    advice = f"about {fits:,} features would fit" if fits > 0 else "take fewer samples"
    if stored > 2 and needed(d, 2, sizes, outputs, number) <= have:
        advice = "a table in float16 would fit"
    raise InputError(
        f"{sum(sizes):,} samples × {d:,} features × {outputs} outputs in {len(sizes)} clients need "
        f"{words(want)} on {device}, of which {words(have)} are free: {advice}."
    )
