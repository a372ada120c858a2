r"""Convolutions of many clients' networks as matrix products, where those are faster.

vmap turns n clients' convolutions into one grouped convolution. PyTorch's grouped convolutions are
slow on 64-bit ARM: there the products below, with reused memory and channels last, train two to
three times as many images a second (`docs/networks.md`). On x86_64 PyTorch's own are faster, so
`PRODUCTS` is off.
"""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

PRODUCTS = platform.machine() in ("aarch64", "arm64")
PATCHES = 2**25  # numbers in all patches, above which PyTorch's own convolution takes less memory
Pair = tuple[int, int]


class Buffers(threading.local):
    """Memory of patches, reused by the next step: allocating it costs as much as a product."""

    def __init__(self) -> None:
        self.free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, like: Tensor, size: int) -> Tensor:
        """Return a free buffer."""
        free = self.free.get((size, like.dtype))
        return free.pop() if free else like.new_empty(size)

    def give(self, used: Tensor) -> None:
        """Put a buffer back."""
        flat = used.as_strided((used.numel(),), (1,))
        self.free.setdefault((used.numel(), used.dtype), []).append(flat)


BUFFERS = Buffers()


class Window(NamedTuple):
    """Kernel size, stride, padding and dilation of a convolution."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    def places(self, *sizes: int) -> list[int]:
        """Return the number of positions along each axis."""
        kinds = zip(sizes, *self, strict=True)
        return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in kinds]

    def patches(self, X: Tensor) -> Tensor:
        """Unfold images (n, b, C, H, W) into patches, (n, b·places, k·k·C)."""
        n, b, C, H, W = X.shape
        p, q = self.padding
        high, wide = self.places(H, W)
        last = X.new_zeros(n, b, H + 2 * p, W + 2 * q, C)
        last[:, :, p : p + H, q : q + W] = X.permute(0, 1, 3, 4, 2)
        *outer, down, along, one = last.stride()
        places = (b, high, wide)
        own = (*self.kernel, C)
        out = BUFFERS.take(X, n * math.prod(places + own))
        # A single channel is copied fastest along the image, several along the channels.
        if C > 1:
            out = out.view(n, *places, *own)
        else:
            out = out.view(n, *own, *places).permute(0, 4, 5, 6, 1, 2, 3)
        down_step, along_step = self.stride
        steps = (*outer, down * down_step, along * along_step, along * self.dilation[1], one)
        for i in range(self.kernel[0]):
            row = out[:, :, :, :, i]
            row.copy_(last.as_strided(row.shape, steps, i * self.dilation[0] * down))
        return out.flatten(4).flatten(1, 3)

    def turned(self) -> Window | None:
        """Return the convolution with turned kernels that differentiates by the images, if any.

        There is none for strides, nor for paddings wider than the kernel.
        """
        sides = zip(self.kernel, self.padding, self.dilation, strict=True)
        p, q = (d * (k - 1) - p for k, p, d in sides)
        known = self.stride == (1, 1) and p >= 0 and q >= 0
        return self._replace(padding=(p, q)) if known else None


class Convolution(torch.autograd.Function):
    """Convolutions of n clients as matrix products, with their patches; channels last."""

    @staticmethod
    def forward(X: Tensor, weight: Tensor, bias: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Convolve images (n, b, C, H, W) with weights (n, m, C, k, k) and a bias (n, m)."""
        patches = window.patches(X)
        out = torch.baddbmm(bias[:, None], patches, weight.permute(0, 3, 4, 2, 1).flatten(1, 3))
        out = out.view(*X.shape[:2], *window.places(*X.shape[3:]), -1)
        return out.permute(0, 1, 4, 2, 3), patches

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Window], output: tuple[Tensor, Tensor]
    ) -> None:
        """Save the patches, which have no gradient of their own."""
        X, weight, _, ctx.window = inputs
        ctx.size = X.shape[3:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(weight, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, G: Tensor, _: None) -> tuple[Tensor | None, ...]:
        """Multiply by the transposed matrices."""
        weight, patches = ctx.saved_tensors
        window: Window = ctx.window
        n, b, m = G.shape[:3]
        C = weight.shape[2]
        flat = G.permute(0, 1, 3, 4, 2).reshape(n, -1, m)
        W = torch.bmm(flat.mT, patches).view(n, m, *window.kernel, C).permute(0, 1, 4, 2, 3)
        BUFFERS.give(patches)
        X = None
        turned = window.turned()
        if ctx.needs_input_grad[0] and turned is not None:
            around = turned.patches(G)
            X = torch.bmm(around, weight.flip(3, 4).permute(0, 3, 4, 1, 2).reshape(n, -1, C))
            X = X.view(n, b, *ctx.size, C).permute(0, 1, 4, 2, 3)
            BUFFERS.give(around)
        elif ctx.needs_input_grad[0]:
            shape = (b, C, *ctx.size)
            pairs = zip(weight, G, strict=True)
            slopes = [
                conv2d_input(shape, w, g, window.stride, window.padding, window.dilation)  # type: ignore[no-untyped-call]
                for w, g in pairs
            ]
            X = torch.stack(slopes)
        return X, W, flat.sum(1), None

    @staticmethod
    def vmap(
        _info: object, dims: tuple[int | None, ...], *parts: Any
    ) -> tuple[tuple[Tensor, Tensor], Pair]:
        """Batch the clients."""
        *tensors, window = parts
        count = next(part.shape[d] for part, d in zip(parts, dims, strict=True) if d is not None)
        moved = [
            (part.expand(count, *part.shape) if d is None else part.movedim(d, 0)).flatten(0, 1)
            for part, d in zip(tensors, dims[:3], strict=True)
        ]
        out, patches = Convolution.apply(*moved, window)  # type: ignore[no-untyped-call]
        return (out.unflatten(0, (count, -1)), patches.unflatten(0, (count, -1))), (0, 0)


class PatchProducts(TorchFunctionMode):
    """Mode in which convolutions of n clients are matrix products, with channels last."""

    def __init__(self, clients: int) -> None:
        super().__init__()
        self.clients = clients

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace convolutions, and what would refuse images with channels last."""
        named = kwargs or {}
        if function is torch.conv2d:
            return self.convolution(*args, **named)
        if function is Tensor.view and not named and not isinstance(args[1], torch.dtype):
            function = Tensor.reshape
        if function in (nn.functional.group_norm, torch.group_norm) and args:
            # it asks for a layout that vmap hides
            args = args[0].contiguous(), *args[1:]
        return function(*args, **named)

    def convolution(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Pair = 1,
        padding: int | Pair | str = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
    ) -> Tensor:
        """Compute `torch.conv2d`, as matrix products where those are known and fit into memory."""
        plain = partial(torch.conv2d, input, weight, bias, stride, padding, dilation, groups)
        alike = input.ndim == 4 and input.dtype == weight.dtype
        if not alike or groups != 1 or isinstance(padding, str):
            return plain()
        kernel = (weight.shape[2], weight.shape[3])
        b, C, H, W = input.shape
        window = Window(kernel, _pair(stride), _pair(padding), _pair(dilation))
        if self.clients * b * math.prod(window.places(H, W)) * C * math.prod(kernel) > PATCHES:
            return plain()
        added = weight.new_zeros(len(weight)) if bias is None else bias
        out: Tensor = Convolution.apply(input[None], weight[None], added[None], window)[0]  # type: ignore[no-untyped-call]
        return out.squeeze(0)  # out[0] would be differentiated by a copy


def _pair(given: int | Pair) -> Pair:
    return (given, given) if isinstance(given, int) else (int(given[0]), int(given[-1]))
