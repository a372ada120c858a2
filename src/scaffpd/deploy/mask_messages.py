r"""Messages of secure sums: keys, shares and masked vectors as arrays.

card     who a silo is, to the other silos; its public key
meet     everybody's cards
open     begin an exchange: a public key and a mark (`shown`), and shares sealed for every neighbour (`sealed`)
masked   the vector that another question is `about`, scaled and masked; or how large it is
reveal   shares that open the sum, and the opening of the exchange that follows
sizes    the squared length of such a vector; project is its product with a direction

Bytes travel as 64-bit numbers, the only format for them that messages have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scaffpd.deploy.messages import Array
from scaffpd.errors import InputError
from scaffpd.masking import FixedPoint, Opened, Terms
from scaffpd.masking.exchange import KEY, SEALED, SHOWN
from scaffpd.masking.keys import SHARE_BYTES


def numbers_of(data: bytes, rows: int) -> Array:
    """Bytes as a table of 64-bit numbers."""
    return np.frombuffer(data, dtype="<i8").reshape(rows, -1)


def bytes_of(array: Array | None, rows: int, each: int) -> list[bytes]:
    """The rows of such a table, or a sentence where it is none."""
    if array is None or array.dtype != np.int64 or array.shape != (rows, each // 8):
        raise InputError("A part of a secure sum is missing, or of another size.")
    return [row.astype("<i8").tobytes() for row in array]


def opened_arrays(opened: Opened, terms: Terms, name: str) -> dict[str, Array]:
    """How a silo opens an exchange."""
    around = terms.neighbours(name)
    sealed = b"".join(opened.sealed[other] for other in around)
    return {"shown": numbers_of(opened.key + opened.mark, 1), "sealed": numbers_of(sealed, len(around))}


def opened_of(arrays: Mapping[str, Array], terms: Terms, name: str) -> Opened:
    """What `opened_arrays` made."""
    around = terms.neighbours(name)
    (shown,) = bytes_of(arrays.get("shown"), 1, SHOWN)
    sealed = bytes_of(arrays.get("sealed"), len(around), SEALED)
    return Opened(shown[:KEY], shown[KEY:], dict(zip(around, sealed, strict=True)))


def around_arrays(around: Mapping[str, Opened], terms: Terms, name: str) -> dict[str, Array]:
    """What a silo needs of its neighbours."""
    rows = [around[other].key + around[other].mark + around[other].sealed[name] for other in terms.neighbours(name)]
    return {"around": numbers_of(b"".join(rows), len(rows))}


def around_of(arrays: Mapping[str, Array], terms: Terms, name: str) -> dict[str, Opened]:
    """What `around_arrays` made."""
    others = terms.neighbours(name)
    rows = bytes_of(arrays.get("around"), len(others), SHOWN + SEALED)
    cut = [(row[:KEY], row[KEY:SHOWN], {name: row[SHOWN:]}) for row in rows]
    return {other: Opened(*parts) for other, parts in zip(others, cut, strict=True)}


def share_arrays(shares: Mapping[str, int], terms: Terms, name: str) -> dict[str, Array]:
    """A silo's shares of its neighbours' secrets."""
    others = terms.neighbours(name)
    return {"shares": numbers_of(b"".join(shares[o].to_bytes(SHARE_BYTES, "big") for o in others), len(others))}


def shares_of(arrays: Mapping[str, Array], terms: Terms, name: str) -> dict[str, int]:
    """What `share_arrays` made."""
    others = terms.neighbours(name)
    rows = bytes_of(arrays.get("shares"), len(others), SHARE_BYTES)
    return {other: int.from_bytes(row, "big") for other, row in zip(others, rows, strict=True)}


def format_values(numbers: FixedPoint | None) -> dict[str, int] | None:
    """A number format as JSON has it."""
    if numbers is None:
        return None
    return {"clients": numbers.clients, "exponent": numbers.exponent, "bits": numbers.bits}


def format_of(values: Any) -> FixedPoint | None:
    """What `format_values` made, checked."""
    if values is None:
        return None
    try:
        parts = [values[name] for name in ("clients", "exponent", "bits")]
    except (KeyError, TypeError):
        parts = []
    if len(parts) != 3 or not all(type(part) is int for part in parts):
        raise InputError("The number format of a secure sum cannot be read.")
    return FixedPoint(*parts)
