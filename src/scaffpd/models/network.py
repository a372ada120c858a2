r"""The loss of a network as a function of one vector, for many clients at once, and the rows that it is computed on.

A step of n clients is one call of vmap(∇f)(U, X, y) with U (n, d) and a minibatch each, (n, b, …), in place of n calls:
small operations cost as much as their launch, so that n of them cost little more than one. If an operation does not
batch, or gives other numbers batched, clients go one after the other, and the log says why.
"""

from __future__ import annotations

import copy
import logging
import math
import platform
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

from scaffpd.models.losses import Loss

log = logging.getLogger(__name__)
MeanLoss = Callable[[Tensor, Tensor], Tensor]
ROOM = 4  # numbers for every output of a layer: it, its derivative, and saved tensors
ALIKE = 1e-3  # largest difference of batched from sequential results in single precision, relative to the largest entry
PRODUCTS = platform.machine() in (
    "aarch64",
    "arm64",
)  # on x86_64 PyTorch's own convolutions are faster
PATCHES = (
    2**25
)  # numbers of all patches of a convolution, above which PyTorch's own takes less memory
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
        self.free.setdefault((used.numel(), used.dtype), []).append(
            used.as_strided((used.numel(),), (1,))
        )


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
        (n, b, C, H, W), (p, q), (high, wide) = X.shape, self.padding, self.places(*X.shape[3:])
        last = X.new_zeros(n, b, H + 2 * p, W + 2 * q, C)
        last[:, :, p : p + H, q : q + W] = X.permute(0, 1, 3, 4, 2)
        *outer, down, along, one = last.stride()
        places = (b, high, wide)
        own = (*self.kernel, C)
        out = BUFFERS.take(X, n * math.prod(places + own))
        out = (
            out.view(n, *places, *own)
            if C > 1
            else out.view(n, *own, *places).permute(0, 4, 5, 6, 1, 2, 3)
        )
        steps = (
            *outer,
            down * self.stride[0],
            along * self.stride[1],
            along * self.dilation[1],
            one,
        )
        for i in range(self.kernel[0]):
            out[:, :, :, :, i] = last.as_strided(
                out[:, :, :, :, i].shape, steps, i * self.dilation[0] * down
            )
        return out.flatten(4).flatten(1, 3)

    def turned(self) -> Window | None:
        """Return the convolution with turned kernels that is the derivative by the images; `None` for strides."""
        p, q = (
            d * (k - 1) - p
            for k, p, d in zip(self.kernel, self.padding, self.dilation, strict=True)
        )
        return (
            self._replace(padding=(p, q)) if self.stride == (1, 1) and p >= 0 and q >= 0 else None
        )


class Convolution(torch.autograd.Function):
    """Convolutions of n clients as matrix products, with their patches: images (n, b, C, H, W), channels last."""

    @staticmethod
    def forward(X: Tensor, weight: Tensor, bias: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Convolve with weights (n, m, C, k, k) and a bias (n, m)."""
        patches = window.patches(X)
        out = torch.baddbmm(bias[:, None], patches, weight.permute(0, 3, 4, 2, 1).flatten(1, 3))
        return out.view(*X.shape[:2], *window.places(*X.shape[3:]), -1).permute(
            0, 1, 4, 2, 3
        ), patches

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the patches."""
        X, weight, _, ctx.window = inputs
        ctx.size = X.shape[3:]
        ctx.set_materialize_grads(False)  # patches have none
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(weight, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, G: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        """Multiply by the transposed matrices."""
        (weight, patches), window = ctx.saved_tensors, ctx.window
        (n, b, m, *_), C = G.shape, weight.shape[2]
        flat = G.permute(0, 1, 3, 4, 2).reshape(n, -1, m)
        X = None
        turned = window.turned()
        W = torch.bmm(flat.mT, patches).view(n, m, *window.kernel, C).permute(0, 1, 4, 2, 3)
        BUFFERS.give(patches)
        if ctx.needs_input_grad[0] and turned is not None:
            around = turned.patches(G)
            X = torch.bmm(around, weight.flip(3, 4).permute(0, 3, 4, 1, 2).reshape(n, -1, C))
            X = X.view(n, b, *ctx.size, C).permute(0, 1, 4, 2, 3)
            BUFFERS.give(around)
        elif ctx.needs_input_grad[0]:
            shape, (_, *moves) = (b, C, *ctx.size), window
            parts = zip(weight, G, strict=True)
            X = torch.stack([conv2d_input(shape, w, g, *moves) for w, g in parts])  # type: ignore[no-untyped-call]
        return X, W, flat.sum(1), None

    @staticmethod
    def vmap(
        _info: Any, dims: tuple[int | None, ...], *parts: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
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
    """Mode in which convolutions of n clients are matrix products, with channels last; so `.view` may have to copy."""

    def __init__(self, clients: int) -> None:
        super().__init__()
        self.clients = clients

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replace the operations that have a faster form."""
        if function is torch.conv2d:
            return self.convolution(*args, **kwargs or {})
        if function is Tensor.view and not kwargs and not isinstance(args[1], torch.dtype):
            function = Tensor.reshape
        if (
            function in (nn.functional.group_norm, torch.group_norm) and args
        ):  # it asks for a layout that vmap hides
            args = args[0].contiguous(), *args[1:]
        return function(*args, **kwargs or {})

    def convolution(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """Compute `torch.conv2d`, as matrix products where those are faster."""
        plain = partial(torch.conv2d, input, weight, bias, stride, padding, dilation, groups)
        if (
            input.ndim != 4
            or groups != 1
            or isinstance(padding, str)
            or input.dtype != weight.dtype
        ):
            return plain()
        kernel, (b, C, H, W) = (weight.shape[2], weight.shape[3]), input.shape
        window = Window(kernel, _pair(stride), _pair(padding), _pair(dilation))
        if self.clients * b * math.prod(window.places(H, W)) * C * math.prod(kernel) > PATCHES:
            return plain()
        added = weight.new_zeros(len(weight)) if bias is None else bias
        out: Tensor = Convolution.apply(input[None], weight[None], added[None], window)[0]  # type: ignore[no-untyped-call]
        return out.squeeze(0)  # out[0] would be differentiated by a copy


def _pair(given: Any) -> Pair:
    return (given, given) if isinstance(given, int) else (int(given[0]), int(given[-1]))


class _SeenStatistics(threading.local):
    """Statistics seen by the batch norm layers in this thread's pass."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[Tensor, Tensor]] = {}


SEEN = _SeenStatistics()
LOCK = threading.Lock()


class StackedRows:
    """Samples of all clients in one stack; selecting clients does not copy it.

    Args:
        X: (M, …).
        y: (M, …).
        sizes: number of rows of every client.
        starts: first row of every client; one client after the other, if not given.
    """

    stored = True

    def __init__(
        self, X: Tensor, y: Tensor, sizes: Sequence[int], starts: Tensor | None = None
    ) -> None:
        self.all_X, self.all_y, self.sizes = X, y, list(sizes)
        first = (
            torch.tensor([0, *np.cumsum(self.sizes)[:-1]], device=X.device)
            if starts is None
            else starts
        )
        self.starts, self._offsets = first, first.tolist()

    def only(self, clients: list[int]) -> StackedRows:
        """Select some of the clients."""
        return StackedRows(
            self.all_X, self.all_y, [self.sizes[i] for i in clients], self.starts[clients]
        )

    def take(self, who: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the given rows of each of n clients, (n, b, …)."""
        rows = self.starts[who][:, None] + positions
        return self.all_X[rows], self.all_y[rows]

    def part(self, client: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return consecutive rows of one client."""
        inside = slice(self._offsets[client] + first, self._offsets[client] + last)
        return self.all_X[inside], self.all_y[inside]

    def contents(self) -> list[Tensor]:
        """Return all rows, for a fingerprint."""
        parts = [self.part(i, 0, size) for i, size in enumerate(self.sizes)]
        return [*(X for X, _ in parts), *(y for _, y in parts)]


class StreamedRows:
    """Clients whose rows are read when needed: `torch.utils.data.Dataset`s, which may be larger than memory.

    Args:
        sources: data set of every client.
        read: reads rows of a source as tensors of the right type.
        device: device to compute on.
    """

    stored = False

    def __init__(
        self,
        sources: Sequence[Any],
        read: Callable[[Any, Sequence[int]], tuple[Tensor, Tensor]],
        device: Any,
    ) -> None:
        self.sources = list(sources)
        self.read = read
        self.device = device
        self.sizes = [len(source) for source in self.sources]

    def only(self, clients: list[int]) -> StreamedRows:
        """Select some of the clients."""
        return StreamedRows([self.sources[i] for i in clients], self.read, self.device)

    def take(self, who: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the given rows of each of n clients, (n, b, …)."""
        pairs = zip(who.tolist(), positions.tolist(), strict=True)
        parts = [self._rows(client, rows) for client, rows in pairs]
        return torch.stack([X for X, _ in parts]), torch.stack([y for _, y in parts])

    def part(self, client: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return consecutive rows of one client."""
        return self._rows(client, range(first, last))

    def contents(self) -> list[Tensor]:
        """Return the numbers of rows, and the first and the last row of every client."""
        ends = [self._rows(i, [0, size - 1]) for i, size in enumerate(self.sizes)]
        return [torch.tensor(self.sizes), *(part for pair in ends for part in pair)]

    def _rows(self, client: int, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        X, y = self.read(self.sources[client], rows)
        return X.to(self.device), y.to(self.device)


class NetworkFunction:
    """Loss of a network as a function of its parameters in one vector, followed by its layers' statistics.

    Args:
        network: network for losses: dropout is off, batch norm has the statistics of x.
        trained: network for local steps.
        loss: the mean loss over a batch.
        named: loss per sample, for a loss known by name.
        l2: the regulariser.
        transform: function of the features before the network.
        precision: number format of products on matrix units; `None` for that of x.
    """

    def __init__(
        self,
        network: nn.Module,
        trained: nn.Module,
        loss: MeanLoss,
        named: Loss | None,
        l2: float,
        transform: Callable[[Tensor], Tensor] | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        self.network = network
        self.trained = trained
        self.loss = loss
        self.named = named
        self.l2 = l2
        self.transform = transform
        self.precision = precision
        self.parameters = {k: p for k, p in network.named_parameters() if p.requires_grad}
        layers = [
            (f"{k}." if k else "", m)
            for k, m in trained.named_modules()
            if hasattr(m, "seen_momentum")
        ]
        self.statistics = {
            f"{k}{part}": getattr(m, part)
            for k, m in layers
            for part in ("running_mean", "running_var")
        }
        momenta = [
            torch.full_like(getattr(m, part), m.seen_momentum)
            for _, m in layers
            for part in ("running_mean", "running_var")
        ]
        self.momenta = torch.cat([m.flatten() for m in momenta]) if momenta else None
        self.noisy = [
            (f"{k}." if k else "") + "seed"
            for k, m in trained.named_modules()
            if hasattr(m, "seeded")
        ]
        every = [*self.parameters.items(), *self.statistics.items()]
        self.names = [k for k, _ in every]
        self.shapes = [t.shape for _, t in every]
        self.sizes, self.length = (
            [t.numel() for _, t in every],
            sum(p.numel() for p in self.parameters.values()),
        )
        self._copies: dict[
            int, tuple[nn.Module, nn.Module]
        ] = {}  # `functional_call` replaces a module's parameters
        self.width: int | None = None
        self.products = False  # whether convolutions are computed as matrix products
        self.together: bool | None = (
            None  # whether clients are batched; `None` until it has been tried
        )

    def start(self) -> Tensor:
        """Return x⁰: the network's own parameters, flattened, and its statistics."""
        return torch.cat(
            [t.detach().flatten() for t in (*self.parameters.values(), *self.statistics.values())]
        )

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        """Split a flat x into the network's named parameters, and its statistics, which have no derivative.

        Without statistics in x, the network's own are used.
        """
        some = len(self.parameters) if x.shape[-1] == self.length else len(self.sizes)
        split = torch.split(x, self.sizes[:some])
        parts = zip(self.names[:some], self.shapes[:some], split, strict=True)
        return {
            k: (part if k in self.parameters else _statistic(k, part.detach())).view(shape)
            for k, shape, part in parts
        }

    def penalty(self, x: Tensor) -> Tensor:
        """Return (l2/2)‖x‖² of the parameters, (…)."""
        return self.l2 / 2 * x[..., : self.length].square().sum(-1)

    def pull(self, x: Tensor) -> Tensor:
        """Return the derivative of `penalty`, zero for statistics."""
        if self.length == x.shape[-1]:
            return self.l2 * x
        return torch.cat(
            [self.l2 * x[..., : self.length], torch.zeros_like(x[..., self.length :])], -1
        )

    def _own(self) -> tuple[nn.Module, nn.Module]:
        """Return the two networks, copied for every thread but the main one: a pass replaces their parameters."""
        if threading.current_thread() is threading.main_thread():
            return self.network, self.trained
        thread = threading.get_ident()
        if thread not in self._copies:
            with LOCK:
                self._copies[thread] = copy.deepcopy(self.network), copy.deepcopy(self.trained)
        return self._copies[thread]

    def outputs(self, x: Tensor, X: Tensor, seed: Tensor | None = None) -> Tensor:
        """Evaluate the network at x; with a `seed` as in local steps."""
        named, (network, trained) = self.unflatten(x), self._own()
        if seed is not None:
            network = trained
            named = named | dict.fromkeys(self.noisy, seed)
        X = X if self.transform is None else self.transform(X)
        if self.precision is None:
            return functional_call(network, named, (X,))  # type: ignore[no-any-return]
        with torch.autocast(X.device.type, self.precision, cache_enabled=False):
            output: Tensor = functional_call(network, named, (X,))
        return output.to(x.dtype)

    def weighed(self, output: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Return Σ_j w_j ℓ_j of outputs; if the loss is a function, all weights are equal."""
        if self.named is None:
            return self.loss(output, y).squeeze() * weight.sum()
        return (self.named.value(output.reshape(len(y), -1), y) * weight).sum()

    def local_value(
        self, x: Tensor, X: Tensor, y: Tensor, weight: Tensor, seed: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss in a local step, and the statistics that layers have seen."""
        SEEN.found = {}
        value = self.weighed(self.outputs(x, X, seed), y, weight)
        found = tuple(part for _, pair in sorted(SEEN.found.items()) for part in pair)
        SEEN.found = {}
        return value, found

    def seen(self, x: Tensor, X: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return mean and variance of the input of every batch norm layer, in a pass without dropout and `Augment`."""
        modes = [(part, part.training) for part in self._own()[1].modules()]
        SEEN.found = {}
        try:
            for part, _ in modes:
                part.training = False
            with torch.no_grad():
                self.outputs(x, X, torch.zeros((), dtype=torch.int64, device=x.device))
        finally:
            for part, mode in modes:
                part.training = mode
        found = [pair for _, pair in sorted(SEEN.found.items())]
        SEEN.found = {}
        return found

    def gradient(self, x: Tensor, piece: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return values and gradients of n clients at one x, (d,), or each at its own, (n, d)."""

        def value(
            x: Tensor, X: Tensor, y: Tensor, weight: Tensor
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            return self.weighed(self.outputs(x, X), y, weight), ()

        gradients, (values, _) = self._gradients(value, x, *piece)
        return values.detach(), gradients

    def local_gradient(
        self, U: Tensor, piece: tuple[Tensor, Tensor, Tensor], seeds: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of n clients in a local step, and the statistics of their layers, (n, ·)."""
        gradients, (_, seen) = self._gradients(self.local_value, U, *piece, seeds)
        return gradients, torch.cat([s.flatten(1) for s in seen], 1) if seen else U.new_empty(
            len(U), 0
        )

    def _gradients(
        self, function: Callable[..., Any], x: Tensor, *parts: Tensor
    ) -> tuple[Tensor, Any]:
        """Return gradients of n clients, and the pairs (value, aux) of all of them."""
        n = len(parts[0])
        shared = None if x.ndim == 1 else 0
        points = x.expand(n, x.shape[-1])
        together = self.together and n > 1
        with PatchProducts(n) if self.products else nullcontext():
            if together and x.is_cuda:
                dims = (shared, *(0 for _ in parts))
                return vmap(grad_and_value(function, has_aux=True), in_dims=dims)(x, *parts)
            if together:  # gradient of a sum by every client's own point
                return _derived(vmap(function), points, *parts)
            found = [_derived(function, u, *own) for u, *own in zip(points, *parts, strict=True)]
        auxiliary = zip(*(aux for _, (_, aux) in found), strict=True)
        values = (
            torch.stack([value for _, (value, _) in found]),
            tuple(torch.stack(part) for part in auxiliary),
        )
        return torch.stack([g for g, _ in found]), values

    def room(self, X: Tensor) -> int:
        """Estimate how many numbers a gradient of one sample needs."""
        if self.width is None:
            counted: list[int] = []
            hooks = [
                part.register_forward_hook(
                    lambda _m, _i, out: counted.append(
                        out.numel() if isinstance(out, Tensor) else 0
                    )
                )
                for part in self.network.modules()
                if not any(True for _ in part.children())
            ]
            try:
                with torch.no_grad():
                    self.outputs(self.start(), X[:1])
            finally:
                for hook in hooks:
                    hook.remove()
            self.width = ROOM * (sum(counted) + X[0].numel())
        return self.width

    def try_together(self, x: Tensor, piece: tuple[Tensor, Tensor, Tensor]) -> None:
        """Compute two clients at once, and compare with one after the other."""
        points = x.expand(2, x.shape[-1])
        seeds = torch.arange(2, device=x.device)

        def both() -> tuple[Tensor, Tensor]:
            return self.gradient(points, piece)[1], self.local_gradient(points, piece, seeds)[0]

        allowed = ALIKE if self.precision is None else ALIKE**0.5
        for products in (
            (True, False)
            if PRODUCTS and x.device.type == "cpu" and self.precision is None
            else (False,)
        ):
            self.together = True
            self.products = products
            try:
                with warnings.catch_warnings(record=True) as heard:
                    warnings.simplefilter("always")
                    beside = both()
                self.together = self.products = False
                pairs = zip(beside, both(), strict=True)
                off = max(float((a - b).abs().max() - allowed * b.abs().max()) for a, b in pairs)
                reason = next(
                    (str(w.message) for w in heard if "batching rule" in str(w.message)), ""
                )
                reason = reason or ("" if off <= 0 else "it gives other numbers side by side")
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                reason = str(error).strip().split("\n")[0] or type(error).__name__
            self.together = not reason
            self.products = products and not reason
            if self.together:
                return
        log.info("The network's clients are computed one after the other: %s", reason)


def _derived(function: Callable[..., Any], x: Tensor, *parts: Tensor) -> tuple[Tensor, Any]:
    """Return the gradient of the sum of a function's first result, and all its results; by plain autograd."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        found = function(leaf, *parts)
        (gradient,) = torch.autograd.grad(found[0].sum(), leaf)
    return gradient, found


def _statistic(name: str, value: Tensor) -> Tensor:
    """Return a layer's statistic; clip variances at zero, for any weights of a mean."""
    return value.clamp_min(0) if name.endswith("var") else value
