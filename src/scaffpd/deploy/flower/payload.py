"""Bytes inside Flower's records.

Flower moves every record of a message as an object of its own, with a call for each at every hop. So a small payload is
one `ConfigRecord`: three objects a message. A large one is the buffer of an `Array`, which Flower cuts into pieces of
5 MB: there is no limit on its size, and equal pieces for several sites (a broadcast x) go to the SuperLink once.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

_RECORD = "scaffpd"
_KEY = "bytes"
_KIND = "scaffpd.bytes"
_SMALL = 2**20


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
    if len(data) <= _SMALL:
        records[name] = ConfigRecord({_KEY: data})
    else:
        records[name] = ArrayRecord({_KEY: Array("uint8", (len(data),), _KIND, data)})


def get(records: RecordDict, name: str) -> bytes | None:
    """What is kept under a name, or None if there is nothing of our kind."""
    record = records.get(name)
    if not isinstance(record, (ArrayRecord, ConfigRecord)) or list(record) != [_KEY]:
        return None
    value = record[_KEY]
    if isinstance(value, Array):
        return bytes(value.data) if value.stype == _KIND and value.shape == (len(value.data),) else None
    return value if isinstance(value, bytes) else None
