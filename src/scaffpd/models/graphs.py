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
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """A copy records for itself."""
        return {"function": self.function}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.function = state["function"]
        self._forget()

    def _forget(self, key: tuple[Any, ...] = ()) -> None:
        self.key, self.calls = key, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []
        self.out: Tensor | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The function's value; recorded, replayed or simply computed."""
        if not tensors[0].is_cuda:
            return self.function(*tensors)
        key = tuple((t.shape, t.dtype, t.device) for t in tensors)
        if key != self.key:
            self._forget(key)
        self.calls += 1
        if self.calls <= BEFORE:
            return self.function(*tensors)
        if self.graph is None or self.out is None:
            self._record(tensors)
        assert self.graph is not None
        assert self.out is not None
        for held, given in zip(self.inputs, tensors, strict=True):
            held.copy_(given)
        self.graph.replay()
        return self.out.clone()

    def _record(self, tensors: tuple[Tensor, ...]) -> None:
        inputs, graph, collecting = [t.clone() for t in tensors], torch.cuda.CUDAGraph(), gc.isenabled()
        gc.collect()
        gc.disable()  # graphs that nobody needs any more must not be freed while another is recorded
        try:
            with torch.cuda.graph(graph):
                out = self.function(*inputs)
        finally:
            if collecting:
                gc.enable()
        self.inputs, self.graph, self.out = inputs, graph, out
