r"""A network's layers: forward passes, and derivatives of single samples with respect to a few weights of one layer.

If a layer has the input x and the scalar output of the network has the derivative δ with respect to the layer's
output, sample b's derivative is

    convolution   ∂/∂W[o, i, k] = Σ_p δ[b, o, p] x̃[b, i, p · stride + k · dilation]   (x̃: padded; i within o's group)
    linear        ∂/∂W[o, i]    = Σ_t δ[b, t, o] x[b, t, i]
    norms         ∂/∂γ[c]       = Σ_p δ[b, c, p] x̂[b, c, p]                          (x̂: before γ and β)
    any bias      ∂/∂β[c]       = Σ_p δ[b, c, p]

Only the requested coordinates are computed, by picking their channels (cost: coordinates × positions); if so many of
a layer are wanted that one matrix product is cheaper, all of it is computed and picked from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from scaffpd.errors import InputError
from scaffpd.models.numerics import tensor_cores

Rule = Callable[[Tensor, Tensor], Tensor]  # (δ, x) -> (B, coordinates)

MOVES = 8  # numbers read and written for each one that is picked, multiplied and summed
PACE = {"cpu": 16, "cuda": 40}  # multiplications in a matrix product in the time of one such move
NEAR = {"cpu": 2**18, "cuda": 2**28}  # numbers that fit into a processor's cache; 1 GiB on a GPU


@dataclass(frozen=True)
class CoordinateRule:
    """Rule that computes some coordinates of one parameter."""

    rule: Rule  # (δ, x) ↦ the derivatives (B, coordinates)
    work: int  # numbers of temporary storage per sample

    def write(self, delta: Tensor, x: Tensor, rows: Tensor) -> None:
        """Write the derivatives into `rows`, in batches whose temporary storage stays in the cache."""
        step = max(1, NEAR.get(x.device.type, NEAR["cpu"]) // max(self.work, 1))
        for k in range(0, len(x), step):
            rows[k : k + step] = self.rule(delta[k : k + step], x[k : k + step])


def flat(x: Tensor) -> Tensor:
    """Reshape (B, C, *) to (B, C, P)."""
    return x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ_p a[b, s, p] b[b, s, p], at least in single precision."""
    return (a * b).sum(-1, dtype=wide(a.dtype))


def wide(kind: torch.dtype) -> torch.dtype:
    """Return the format of sums: at least single precision."""
    return torch.promote_types(kind, torch.float32)


def plane(x: Tensor) -> int:
    """Count the positions of one channel."""
    return math.prod(x.shape[2:])


def full_is_cheaper(wanted: int, size: int, moved: int, places: int, device: torch.device) -> bool:
    """Decide whether to compute all `size` weights of a layer, which moves `moved` numbers per position."""
    full = (moved + size / PACE.get(device.type, PACE["cpu"])) * places + size
    return full < MOVES * wanted * places


def conv(layer: Any, numbers: Tensor, x: Tensor, y: Tensor) -> CoordinateRule | None:
    """Return the rule for some weights of a convolution; None if the padding is not a number of zeros."""
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    places = plane(y)
    pointwise = layer.kernel_size == (1, 1) and layer.padding == (0, 0)
    columns = 0 if pointwise else x.shape[1] * math.prod(layer.kernel_size)
    size = layer.weight.numel()
    if full_is_cheaper(len(numbers), size, x.shape[1] + y.shape[1] + 3 * columns, places, x.device):
        return CoordinateRule(_full_conv(layer, numbers, pointwise), size + columns * places)
    if not pointwise:
        return CoordinateRule(_picked_conv(layer, numbers, x, y), 3 * len(numbers) * places)
    (o, i, _), (high, wide) = _channels(layer, numbers), layer.stride

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        return dot(flat(delta.index_select(1, o)), flat(x[:, :, ::high, ::wide].index_select(1, i)))

    return CoordinateRule(rule, 3 * len(numbers) * places)


def _full_conv(layer: Any, numbers: Tensor, pointwise: bool) -> Rule:
    groups, (high, wide) = layer.groups, layer.stride

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        x = x.to(delta.dtype)
        if pointwise:
            columns = x[:, :, ::high, ::wide].flatten(2)
        else:
            columns = functional.unfold(
                x, layer.kernel_size, layer.dilation, layer.padding, layer.stride
            )
        delta = delta.flatten(2)
        if groups == 1:
            return torch.bmm(delta, columns.mT).flatten(1).index_select(1, numbers)
        shape = (len(delta), groups, -1, delta.shape[2])
        product = torch.matmul(delta.reshape(shape), columns.reshape(shape).mT)
        return product.flatten(1).index_select(1, numbers)

    return rule


def _channels(layer: Any, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output channel, the input channel and the position in the kernel of every coordinate."""
    places = math.prod(layer.kernel_size)
    each = layer.in_channels // layer.groups
    o = numbers // (each * places)
    i = numbers // places % each
    return o, o // (layer.out_channels // layer.groups) * each + i, numbers % places


def _picked_conv(layer: Any, numbers: Tensor, x: Tensor, y: Tensor) -> Rule:
    """Build one long index into a padded sample: for every coordinate, the input of each position."""
    o, i, k = _channels(layer, numbers)
    (high, wide), (below, beside) = layer.padding, layer.dilation
    rows = x.shape[2] + 2 * high
    columns = x.shape[3] + 2 * wide
    down = torch.arange(y.shape[2], device=x.device) * layer.stride[0]
    right = torch.arange(y.shape[3], device=x.device) * layer.stride[1]
    grid = (down[:, None] * columns + right).flatten()
    first = (
        i * (rows * columns)
        + k // layer.kernel_size[1] * below * columns
        + k % layer.kernel_size[1] * beside
    )
    where = (first[:, None] + grid).flatten()

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        padded = functional.pad(x, (wide, wide, high, high)) if high or wide else x
        picked = padded.flatten(1).index_select(1, where).reshape(len(x), len(o), -1)
        return dot(delta.index_select(1, o).flatten(2), picked)

    return rule


def rule_for(layer: Any, name: str, numbers: Tensor, x: Tensor, y: Tensor) -> CoordinateRule | None:
    """Return the rule for coordinates `numbers` of the parameter `name` of a layer that maps x to y, if known."""
    kind = type(layer)
    known = kind in (nn.Linear, nn.GroupNorm) or (kind is nn.Conv2d and x.ndim == 4)
    known |= kind is nn.LayerNorm and x.ndim > len(layer.normalized_shape)
    known |= (
        kind in (nn.BatchNorm1d, nn.BatchNorm2d) and layer.running_mean is not None and x.ndim != 3
    )
    if not known or x.ndim < 2 or len(x) != len(y):
        return None
    if name == "bias":
        positions = y[0].numel() // layer.bias.numel()
        return CoordinateRule(
            lambda delta, x: _picked(layer, delta, numbers).sum(-1, dtype=wide(delta.dtype)),
            len(numbers) * positions,
        )
    if kind is nn.Conv2d:
        return conv(layer, numbers, x, y)
    return _linear(layer, numbers, x) if kind is nn.Linear else _norm(layer, numbers, x)


def _picked(layer: Any, t: Tensor, channels: Tensor) -> Tensor:
    """Return channels of (B, …) as (B, channels, positions); linear layers and layer norms have channels last."""
    if isinstance(layer, nn.Linear | nn.LayerNorm):
        size = (
            layer.out_features
            if isinstance(layer, nn.Linear)
            else math.prod(layer.normalized_shape)
        )
        return t.reshape(len(t), -1, size).index_select(2, channels).mT
    return flat(t.index_select(1, channels))


def _norm(layer: Any, channels: Tensor, x: Tensor) -> CoordinateRule:
    """Return the rule for γ; a batch norm's x̂ is in the format of its statistics, for the wanted channels only."""
    batch = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    if batch:
        mean = layer.running_mean.index_select(0, channels)[:, None]
        rate = (layer.running_var.index_select(0, channels) + layer.eps).rsqrt()[:, None]

    def normed(x: Tensor) -> Tensor:
        if batch:
            centred: Tensor = (_picked(layer, x, channels) - mean) * rate
            return centred
        if isinstance(layer, nn.GroupNorm):
            whole = functional.group_norm(x.to(wide(x.dtype)), layer.num_groups, eps=layer.eps)
        else:
            whole = functional.layer_norm(
                x.to(wide(x.dtype)), layer.normalized_shape, eps=layer.eps
            )
        return _picked(layer, whole, channels)

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        own = normed(x)
        return dot(_picked(layer, delta, channels).to(own.dtype), own)

    return CoordinateRule(rule, 5 * len(channels) * plane(x) if batch else 3 * x[0].numel())


def _linear(layer: Any, numbers: Tensor, x: Tensor) -> CoordinateRule:
    outs = layer.out_features
    ins = layer.in_features
    tokens = x[0].numel() // layer.in_features
    o = numbers // ins
    i = numbers % ins
    full = tokens > 1 and full_is_cheaper(len(numbers), outs * ins, outs + ins, tokens, x.device)

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        delta, x = delta.reshape(len(delta), -1, outs), x.reshape(len(x), -1, ins).to(delta.dtype)
        if full:
            return torch.bmm(delta.mT, x).flatten(1).index_select(1, numbers)
        return (delta.index_select(2, o) * x.index_select(2, i)).sum(1, dtype=wide(delta.dtype))

    return CoordinateRule(rule, outs * ins if full else 3 * len(numbers) * tokens)


PRECISIONS = ("float32", "tf32", "bfloat16")


def mixed(device: torch.device, precision: str) -> torch.autocast:
    """Run forward passes in bfloat16 if requested."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def dimension(trunk: nn.Module, example: Tensor) -> int:
    """Return the number of features of one image."""
    try:
        with torch.no_grad():
            h = trunk(example[:1])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            "network-take-images",
            f"The network cannot take images of shape {tuple(example.shape[1:])}: {reason}.",
        ) from None
    if not isinstance(h, Tensor) or h.ndim != 2 or len(h) != 1:
        shape = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
        raise InputError(
            "features-image-must",
            f"The features of one image must have the shape (1, dim), got {shape}.",
        )
    return h.shape[1]


def watch(trunk: nn.Module, x: Tensor) -> tuple[dict[str, list[tuple[Tensor, Tensor]]], int]:
    """Return (input, output) of every call of every leaf layer, and the bytes of all their outputs."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    total = 0

    def attach(name: str, module: nn.Module) -> RemovableHandle:
        def note(module: nn.Module, given: tuple[object, ...], y: object) -> None:
            nonlocal total
            if isinstance(y, Tensor):
                total += y.element_size() * y.numel()
                if len(given) == 1 and isinstance(given[0], Tensor):
                    seen.setdefault(name, []).append((given[0], y))

        return module.register_forward_hook(note)

    with ExitStack() as stack, torch.no_grad():
        for name, module in trunk.named_modules():
            if not list(module.children()):
                stack.callback(attach(name, module).remove)
        trunk(x)
    return seen, total // len(x)


def parameters_of(trunk: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by name, each once."""
    parameters = {name: p.detach() for name, p in trunk.named_parameters()}
    if not parameters:
        raise InputError(
            "network-parameters-respect",
            "The network has no parameters with respect to which a gradient could be taken.",
        )
    return parameters


def owners_of(trunk: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """Return the layers that have each parameter, and their names for it; several if it is shared."""
    owners: dict[str, list[tuple[str, str]]] = {}
    same = {id(p): name for name, p in trunk.named_parameters()}
    for layer, module in trunk.named_modules():
        for attribute, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(same[id(p)], []).append((layer, attribute))
    return owners


class Penultimate:
    """Last features x ↦ h(x), with the interface of `Entk`."""

    def __init__(self, trunk: nn.Module, example: Tensor, precision: str) -> None:
        self.trunk = trunk
        self.device = example.device
        self.precision = precision
        self.coordinates = dimension(trunk, example)
        self.bytes = watch(trunk, example)[1]
        self.method = "forward"

    def __call__(self, x: Tensor) -> Tensor:
        """Return features (B, dim) in single precision."""
        with torch.no_grad(), tensor_cores(self.device, self.precision != "float32"):
            with mixed(self.device, self.precision):
                h: Tensor = self.trunk(x)
            return h.float()

    @property
    def groups(self) -> Tensor:
        """One group for all columns."""
        return torch.zeros(self.coordinates, dtype=torch.int64, device=self.device)

    @property
    def room(self) -> int:
        """Bytes that one sample needs: only one layer's maps are in memory at a time."""
        return 48 * self.coordinates + self.bytes
