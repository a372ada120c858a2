"""How work runs: one piece per core, and on a GPU loops that are recorded once.

PyTorch synchronises all cores after every operation, which takes longer than an operation of
microseconds. So `parallel_map` gives each core its own work, with PyTorch on a single thread.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from scaffpd.errors import needed
from scaffpd.machine import cores

Item = TypeVar("Item")
Job = TypeVar("Job")
Answer = TypeVar("Answer")
# Numbers up to which one core is faster than all cores at one pass over them.
SMALL = 2**20
_allowed: ContextVar[int] = ContextVar("allowed", default=1)


@contextmanager
def limit_threads(numbers: float) -> Iterator[None]:
    """Run PyTorch on one thread if the data has few numbers; restore the setting afterwards."""
    before = torch.get_num_threads()
    if before == 1 or numbers > SMALL:
        yield
        return
    token = _allowed.set(before)
    try:
        with one_thread():
            yield
    finally:
        _allowed.reset(token)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: small matrices gain nothing from more, and lose on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def thread_count() -> int:
    return max(_allowed.get(), torch.get_num_threads())


def parallel_map(work: Callable[[Item], None], items: Sequence[Item], device: torch.device) -> None:
    """Call `work` for every item, on as many threads as PyTorch may use; `work` stores its results.

    All threads have ended when this returns, or raises the error of the first item to fail.
    """
    if device.type != "cpu" or thread_count() < 2 or len(items) < 2:
        for item in items:
            work(item)
        return
    before = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()

    def alone(item: Item) -> None:
        # Of this thread's operations; but some libraries apply it to all threads.
        torch.set_num_threads(1)
        with torch.inference_mode(inference):
            work(item)

    done = [_pool(thread_count()).submit(alone, item) for item in items]
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
    # Threads are not copied into a new process.
    os.register_at_fork(after_in_child=_pool.cache_clear)


# Calls with the same shapes before one is recorded: one or two are not worth it.
BEFORE = 2


class GraphReplay:
    """Function of tensors that becomes a CUDA graph when called again with the same shapes.

    Elsewhere than on a GPU it is called as it is.

    Args:
        function: operations on the device only, with one result; tensors that it uses besides its
            arguments stay in place.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self._forget()

    def __reduce__(self) -> tuple[type[GraphReplay], tuple[Callable[..., Tensor]]]:
        return GraphReplay, (self.function,)

    def _forget(self, key: object = None) -> None:
        self.key = key
        self.calls = 0
        self.recorded: tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor] | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        if not tensors[0].is_cuda:
            return self.function(*tensors)
        key = tuple((t.shape, t.dtype, t.device) for t in tensors)
        if key != self.key:
            self._forget(key)
        self.calls += 1
        if self.calls <= BEFORE:
            return self.function(*tensors)
        if self.recorded is None:
            self.recorded = self._record(tensors)
        graph, inputs, out = self.recorded
        for own, given in zip(inputs, tensors, strict=True):
            own.copy_(given)
        graph.replay()
        return out.clone()

    def _record(
        self, tensors: tuple[Tensor, ...]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        inputs = [t.clone() for t in tensors]
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # unused graphs must not be freed while another is recorded
        try:
            with torch.cuda.graph(graph):
                out = self.function(*inputs)
        finally:
            if collecting:
                gc.enable()
        return graph, inputs, out


def pooled(work: Callable[[Job], Answer], jobs: Sequence[Job], processes: int) -> Iterator[Answer]:
    """Yield what becomes of the jobs, in order, from so many processes of one thread each.

    Processes need joblib, which sends them classes of notebooks and of scripts as well; one
    process needs nothing.
    """
    workers = min(processes, len(jobs))
    if workers < 2:
        yield from (_on_one_thread(work, job) for job in jobs)
        return
    joblib = needed("joblib", "joblib", "sklearn")
    pool = joblib.Parallel(n_jobs=workers, return_as="generator")
    yield from pool(joblib.delayed(_on_one_thread)(work, job) for job in jobs)


def processes_at_a_time() -> int:
    """Return how many processes `pooled` takes unless it is said: one per core, if it can."""
    return cores() if find_spec("joblib") else 1


def _on_one_thread(work: Callable[[Job], Answer], job: Job) -> Answer:
    with one_thread():
        return work(job)
