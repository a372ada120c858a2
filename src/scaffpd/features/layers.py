r"""Derivatives of single samples with respect to a few weights of one layer.

Where a layer has the input x and the scalar output of the network has the derivative δ with respect to the layer's
output, sample b's derivative is

    convolution   ∂/∂W[o, i, k] = Σ_p δ[b, o, p] x̃[b, i, p · stride + k · dilation]   (x̃: padded; i within o's group)
    linear        ∂/∂W[o, i]    = Σ_t δ[b, t, o] x[b, t, i]
    norms         ∂/∂γ[c]       = Σ_p δ[b, c, p] x̂[b, c, p]                          (x̂: before γ and β)
    any bias      ∂/∂β[c]       = Σ_p δ[b, c, p]

Only the coordinates that are asked for are computed, by picking their channels (cost: coordinates × positions); where
so many of a layer are wanted that one product of matrices is cheaper, all of it is computed and picked from.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scaffpd.features.convolution import conv
from scaffpd.features.rules import Part, dot, flat, full_is_cheaper, plane, wide


def part(layer: Any, name: str, numbers: Tensor, x: Tensor, y: Tensor) -> Part | None:
    """The rule for coordinates `numbers` of the parameter `name` of a layer that maps x to y; None: not known."""
    kind = type(layer)
    if x.ndim < 2 or len(x) != len(y):
        return None
    if kind is nn.Linear:
        return _linear_bias(numbers) if name == "bias" else _linear(layer, numbers, x)
    if kind is nn.LayerNorm:
        return _layer_norm(layer, name, numbers, x)
    if kind is nn.Conv2d and x.ndim == 4:
        return _bias(numbers, y) if name == "bias" else conv(layer, numbers, x, y)
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d) and layer.running_mean is not None and x.ndim != 3:
        return _bias(numbers, y) if name == "bias" else _batch_norm(layer, numbers, x)
    if kind is nn.GroupNorm:
        return _bias(numbers, y) if name == "bias" else _group_norm(layer, numbers, x)
    return None


def _bias(channels: Tensor, y: Tensor) -> Part:
    return Part(lambda delta, x: flat(delta.index_select(1, channels)).sum(-1, dtype=wide(delta.dtype)), plane(y))


def _batch_norm(layer: Any, channels: Tensor, x: Tensor) -> Part:
    mean = layer.running_mean.index_select(0, channels)[:, None]
    rate = (layer.running_var.index_select(0, channels) + layer.eps).rsqrt()[:, None]

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        centred = (flat(x.index_select(1, channels)) - mean) * rate  # in the statistics' own format
        return dot(flat(delta.index_select(1, channels)).to(centred.dtype), centred)

    return Part(rule, 5 * len(channels) * plane(x))


def _group_norm(layer: Any, channels: Tensor, x: Tensor) -> Part:
    def rule(delta: Tensor, x: Tensor) -> Tensor:
        normed = functional.group_norm(x.to(wide(x.dtype)), layer.num_groups, eps=layer.eps)
        return dot(flat(delta.index_select(1, channels)).to(normed.dtype), flat(normed.index_select(1, channels)))

    return Part(rule, 2 * x[0].numel())


def _layer_norm(layer: Any, name: str, numbers: Tensor, x: Tensor) -> Part | None:
    shape = layer.normalized_shape
    if x.ndim <= len(shape):
        return None
    size = math.prod(shape)

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        picked = delta.reshape(len(delta), -1, size).index_select(2, numbers).to(wide(delta.dtype))
        if name == "weight":
            normed = functional.layer_norm(x.to(wide(x.dtype)), shape, eps=layer.eps)
            picked = picked * normed.reshape(len(x), -1, size).index_select(2, numbers)
        return picked.sum(1)

    return Part(rule, 3 * x[0].numel())


def _linear_bias(numbers: Tensor) -> Part:
    def rule(delta: Tensor, x: Tensor) -> Tensor:
        return delta.reshape(len(delta), -1, delta.shape[-1]).index_select(2, numbers).sum(1, dtype=wide(delta.dtype))

    return Part(rule, len(numbers))


def _linear(layer: Any, numbers: Tensor, x: Tensor) -> Part:
    outs, ins, tokens = layer.out_features, layer.in_features, x[0].numel() // layer.in_features
    o, i = numbers // ins, numbers % ins
    full = tokens > 1 and full_is_cheaper(len(numbers), outs * ins, outs + ins, tokens, x.device)

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        delta = delta.reshape(len(delta), -1, outs)
        x = x.reshape(len(x), -1, ins).to(delta.dtype)
        if full:
            return torch.bmm(delta.mT, x).flatten(1).index_select(1, numbers)
        return (delta.index_select(2, o) * x.index_select(2, i)).sum(1, dtype=wide(delta.dtype))

    return Part(rule, outs * ins if full else 3 * len(numbers) * tokens)
