"""Convolutions: derivatives of single samples with respect to a few weights (the equation is in `layers`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from scaffpd.features.rules import Part, Rule, dot, full_is_cheaper, plane


def conv(layer: Any, numbers: Tensor, x: Tensor, y: Tensor) -> Part | None:
    """The rule for some weights; None where the padding is not of zeros, so many a side."""
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    places, pointwise = plane(y), layer.kernel_size == (1, 1) and layer.padding == (0, 0)
    columns = 0 if pointwise else x.shape[1] * math.prod(layer.kernel_size)
    size = layer.weight.numel()
    if full_is_cheaper(len(numbers), size, x.shape[1] + y.shape[1] + 3 * columns, places, x.device):
        return Part(_full_conv(layer, numbers, pointwise), size + columns * places)
    rule = _pointwise(layer, numbers) if pointwise else _picked_conv(layer, numbers, x, y)
    return Part(rule, 3 * len(numbers) * places)


def _full_conv(layer: Any, numbers: Tensor, pointwise: bool) -> Rule:
    groups, (high, wide) = layer.groups, layer.stride

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        x = x.to(delta.dtype)
        if pointwise:
            columns = x[:, :, ::high, ::wide].flatten(2)
        else:
            columns = functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        delta = delta.flatten(2)
        if groups == 1:
            return torch.bmm(delta, columns.mT).flatten(1).index_select(1, numbers)
        shape = (len(delta), groups, -1, delta.shape[2])
        product = torch.matmul(delta.reshape(shape), columns.reshape(shape).mT)
        return product.flatten(1).index_select(1, numbers)

    return rule


def _channels(layer: Any, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every coordinate: its channel out, its channel in among all, and its place in the kernel."""
    places, each = math.prod(layer.kernel_size), layer.in_channels // layer.groups
    o, i = numbers // (each * places), numbers // places % each
    return o, o // (layer.out_channels // layer.groups) * each + i, numbers % places


def _pointwise(layer: Any, numbers: Tensor) -> Rule:
    (o, i, _), (high, wide) = _channels(layer, numbers), layer.stride

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        picked = x[:, :, ::high, ::wide].index_select(1, i).flatten(2)
        return dot(delta.index_select(1, o).flatten(2), picked)

    return rule


def _picked_conv(layer: Any, numbers: Tensor, x: Tensor, y: Tensor) -> Rule:
    """One long list of numbers into a padded sample: of every coordinate, where each position finds its input."""
    o, i, k = _channels(layer, numbers)
    (high, wide), (below, beside) = layer.padding, layer.dilation
    rows, columns = x.shape[2] + 2 * high, x.shape[3] + 2 * wide
    down = torch.arange(y.shape[2], device=x.device) * layer.stride[0]
    right = torch.arange(y.shape[3], device=x.device) * layer.stride[1]
    grid = (down[:, None] * columns + right).flatten()
    first = i * (rows * columns) + k // layer.kernel_size[1] * below * columns + k % layer.kernel_size[1] * beside
    where = (first[:, None] + grid).flatten()

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        padded = functional.pad(x, (wide, wide, high, high)) if high or wide else x
        picked = padded.flatten(1).index_select(1, where).reshape(len(x), len(o), -1)
        return dot(delta.index_select(1, o).flatten(2), picked)

    return rule
