"""Loops of small operations on a GPU, recorded once and replayed as one: launching them takes longer than they do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BEFORE = 2  # calls with the same shapes that go as usual: what is called only once or twice is not worth recording


class Replay:
    """A function of tensors, which on a GPU becomes a CUDA graph when it is called again with the same shapes.

    Args:
        function: operations on the device and nothing else; what it uses besides its arguments stays in place.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.key: tuple[Any, ...] = ()
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []
        self.out: Tensor

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The function's value; recorded, replayed or simply computed."""
        if not tensors[0].is_cuda:
            return self.function(*tensors)
        key = tuple((t.shape, t.dtype) for t in tensors)
        if key != self.key:
            self.key, self.calls, self.graph = key, 0, None
        self.calls += 1
        if self.calls <= BEFORE:
            return self.function(*tensors)
        if self.graph is None:
            self._record(tensors)
        assert self.graph is not None
        for held, given in zip(self.inputs, tensors, strict=True):
            held.copy_(given)
        self.graph.replay()
        return self.out.clone()

    def _record(self, tensors: tuple[Tensor, ...]) -> None:
        self.inputs, self.graph = [t.clone() for t in tensors], torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()  # graphs that nobody needs any more must not be freed while another is recorded
        try:
            with torch.cuda.graph(self.graph):
                self.out = self.function(*self.inputs)
        finally:
            gc.enable()
