r"""Memory that a problem needs, found out before the work rather than in the middle of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

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


def check_room(
    one: Selection, sizes: Sequence[int], outputs: int, device: torch.device, dtype: torch.dtype, testing: bool
) -> None:
    """Refuse a problem that does not fit, with the figures and what would; test rows need the data alone."""
    d, stored, number = one.shape[1], one.dtype.itemsize, dtype.itemsize

    def need(features: int, stored: int) -> int:
        if testing:
            return stored * sum(sizes) * features + 2 * number * outputs * sum(sizes)
        return needed(features, stored, sizes, outputs, number)

    have, want = free(device), need(d, stored)
    if want <= have:
        return
    fits = int(0.95 * d * (have - need(0, stored)) / (want - need(0, stored)))
    advice = f"about {fits:,} features would fit" if fits > 0 else "take fewer samples"
    if stored > 2 and need(d, 2) <= have:
        advice = "a table in float16 would fit"
    raise InputError(
        f"{sum(sizes):,} samples × {d:,} features × {outputs} outputs in {len(sizes)} clients need "
        f"{words(want)} on {device}, of which {words(have)} are free: {advice}."
    )


def check_copy(features: Sequence[NDArray[Any] | Selection], device: torch.device, dtype: torch.dtype) -> None:
    """Refuse rows of tables that this model has to copy where the copy does not fit."""
    if not any(isinstance(x, Selection) for x in features):
        return
    rows, d = sum(map(len, features)), features[0].shape[1]
    have, want = free(device), rows * d * dtype.itemsize
    if want > have:
        raise InputError(
            f"This model copies its {rows:,} × {d:,} features, {words(want)} in {str(dtype).removeprefix('torch.')}, "
            f"and {words(have)} are free on {device}: squared loss without intercept, on rows of one table, does not."
        )
