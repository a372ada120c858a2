"""One piece of work per core: threads of our own, each with PyTorch on a single thread.

PyTorch would rather have all cores meet after every operation. Where an operation takes a few microseconds the meetings
take longer than the work, and on a busy machine a hundred times as long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TypeVar

import torch

Item = TypeVar("Item")
SMALL = 2**20  # numbers in the data up to which all cores together are slower at one pass over them than one is
_allowed: ContextVar[int] = ContextVar("allowed", default=1)


@contextmanager
def suited(numbers: float) -> Iterator[None]:
    """Operations on one thread where the data has few numbers; what was set before holds again afterwards."""
    before = torch.get_num_threads()
    if before == 1 or numbers > SMALL:
        yield
        return
    token = _allowed.set(before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _allowed.reset(token)


def threads() -> int:
    """How many pieces of work there may be at a time."""
    return max(_allowed.get(), torch.get_num_threads())


def shared(work: Callable[[Item], None], items: Sequence[Item], device: torch.device) -> None:
    """`work` for every item, on as many threads as PyTorch may use; results go where `work` puts them.

    Nothing runs any more when this returns, or raises what the first item to fail has raised.
    """
    if device.type != "cpu" or threads() < 2 or len(items) < 2:
        for item in items:
            work(item)
        return
    before, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def alone(item: Item) -> None:
        torch.set_num_threads(1)  # of this thread's operations; but some libraries take it for everybody's
        with torch.inference_mode(inference):
            work(item)

    done = [_pool(threads()).submit(alone, item) for item in items]
    try:
        for one in done:
            one.result()
    finally:
        for one in done:
            one.cancel()
        wait(done)
        torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _pool(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, "scaffpd")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads are not copied into a new process
