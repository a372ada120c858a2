"""Bytes inside Flower's records: one `Array` whose buffer is the payload itself.

Flower cuts the buffer of an `Array` into objects of 5 MB, so there is no limit on a message, and equal objects for
several sites (a broadcast x) go to the SuperLink once. A `ConfigRecord` would travel as a single piece.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

_RECORD = "scaffpd"
_KEY = "bytes"
_KIND = "scaffpd.bytes"


def pack(data: bytes) -> RecordDict:
    """`data` as the content of a message."""
    content = RecordDict()
    put(content, _RECORD, data)
    return content


def unpack(content: RecordDict) -> bytes:
    """What `pack` packed; a `ValueError` for anything else."""
    data = get(content, _RECORD)
    if data is None:
        raise ValueError("the message does not hold one array of bytes")
    return data


def put(records: RecordDict, name: str, data: bytes) -> None:
    """Keep `data` under a name, in place of what was there."""
    records[name] = ArrayRecord({_KEY: Array("uint8", (len(data),), _KIND, data)})


def get(records: RecordDict, name: str) -> bytes | None:
    """What is kept under a name, or None if there is nothing of our kind."""
    record = records.get(name)
    if not isinstance(record, ArrayRecord) or list(record) != [_KEY]:
        return None
    array = record[_KEY]
    if array.stype != _KIND or array.shape != (len(array.data),):
        return None
    return bytes(array.data)
