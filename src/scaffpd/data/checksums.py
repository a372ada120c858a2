"""SHA-256 of large matrices, piece by piece on all cores: hashlib lets go of the interpreter while it computes.

A core manages about 1.5 GB/s with the SHA instructions of today's processors and 0.3 to 0.5 GB/s without, if the disk
keeps up: 6 GB take half a second to a few seconds on eight cores.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.cores import cores

THREADS = 16  # beyond, memory is the limit


def checksum(piece: NDArray[Any]) -> str:
    """SHA-256 (hexadecimal) of the bytes of some rows."""
    return hashlib.sha256(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data).hexdigest()


def checksums(values: NDArray[Any], starts: Iterable[int], size: int) -> Generator[str, None, None]:
    """Those of values[k : k + size] for k in `starts`, in order."""
    threads = ThreadPoolExecutor(min(THREADS, cores()))
    try:
        yield from threads.map(lambda k: checksum(values[k : k + size]), starts)
    finally:
        threads.shutdown(cancel_futures=True)
