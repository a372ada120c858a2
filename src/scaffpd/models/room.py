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
SHARE = 0.8  # of free memory is taken for copies of rows that can also be read from where they are


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


def fits(features: Sequence[NDArray[Any] | Selection], width: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether rows of tables can be copied; on a GPU, where they cannot be read from disk, they have to.

    Args:
        features: of every client.
        width: columns of the copy, an intercept included.
        device: where the copy would be.
        dtype: its number format.
    """
    if not any(isinstance(x, Selection) for x in features):
        return True
    rows = sum(map(len, features))
    have, want = free(device), rows * width * dtype.itemsize
    if device.type == "cpu":
        return want <= SHARE * have
    if want > have:
        raise InputError(
            f"This model copies its {rows:,} × {width:,} features to {device}, {words(want)} in {_name(dtype)}, and "
            f"{words(have)} are free there: on device='cpu' they are read from where they are stored; squared loss "
            "without intercept, on wide rows of one table, needs them in the table's own number format only."
        )
    return True


def check_kept(sizes: Sequence[int], width: int, dtype: torch.dtype) -> None:
    """Refuse squared loss on rows that stay on disk where the rows that it keeps of every client do not fit."""
    device = torch.device("cpu")
    have, want = free(device), 2 * sum(min(size, width) for size in sizes) * width * dtype.itemsize
    if want > have:
        raise InputError(
            f"Squared loss keeps up to {width:,} rows of {width:,} numbers for each of {len(sizes):,} clients, twice: "
            f"{words(want)} in {_name(dtype)}, and {words(have)} are free. Take fewer features or clients."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
