"""CUDA graphs: loops of small operations, recorded once and replayed without the host."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

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

    def __getstate__(self) -> dict[str, Callable[..., Tensor]]:
        """Leave out the graph: a copy records its own."""
        return {"function": self.function}

    def __setstate__(self, state: dict[str, Callable[..., Tensor]]) -> None:
        self.function = state["function"]
        self._forget()

    def _forget(self, key: object = None) -> None:
        self.key = key
        self.calls = 0
        self.recorded: tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor] | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Compute the function; record or replay it."""
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
