"""Rows on their way from the device to the table, while the device goes on with the next ones."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

UNDER_WAY = 2  # chunks that may wait to be written


class Writer(AbstractContextManager["Writer"]):
    """Writes chunks of rows in order, in a thread of its own where they come from a GPU."""

    def __init__(self, values: NDArray[Any], device: torch.device) -> None:
        self.values, self.thread = values, ThreadPoolExecutor(1) if device.type == "cuda" else None
        self.waiting: list[Future[None]] = []

    def __exit__(self, *_: object) -> None:
        if self.thread is not None:
            self.thread.shutdown(cancel_futures=True)

    def put(self, start: int, rows: Tensor) -> None:
        """Rows from `start` on; they are copied before this returns or in the background."""
        if self.thread is None:
            self.values[start : start + len(rows)] = rows.numpy()
            return
        while len(self.waiting) >= UNDER_WAY:
            self.waiting.pop(0).result()
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(rows.device))
        self.waiting.append(self.thread.submit(self._write, start, host, copied))

    def _write(self, start: int, host: Tensor, copied: torch.cuda.Event) -> None:
        copied.synchronize()
        self.values[start : start + len(host)] = host.numpy()

    def wait(self) -> None:
        """Until everything is written."""
        while self.waiting:
            self.waiting.pop(0).result()
