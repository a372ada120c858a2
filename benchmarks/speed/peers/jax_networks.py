"""The networks of `experiments/images/small_networks.py` in JAX: the same parameters under the same
names, channels last.

XLA's convolutions on a CPU want channels last, and the maximum over a window is taken by reshaping,
whose derivative is faster there than that of `reduce_window`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

P = Mapping[str, jax.Array]


def cnn(p: P, x: jax.Array) -> jax.Array:
    """Two convolutions and a linear layer."""
    for layer in ("0", "3"):
        x = pooled(jax.nn.relu(convolved(p[f"{layer}.weight"], x, 2) + p[f"{layer}.bias"]))
    return x.reshape(len(x), -1) @ p["7.weight"] + p["7.bias"]


def resnet(p: P, x: jax.Array) -> jax.Array:
    """ResNet-8 with group norm."""
    x = jax.nn.relu(normed(p, "norm", convolved(p["first.weight"], x, 1)))
    for k, stride in enumerate((1, 2, 2)):
        x = block(p, f"blocks.{k}", x, stride)
    return x.mean((1, 2)) @ p["fc.weight"] + p["fc.bias"]


NETWORKS: dict[str, Callable[[P, jax.Array], jax.Array]] = {"cnn": cnn, "resnet": resnet}


def block(p: P, name: str, x: jax.Array, stride: int) -> jax.Array:
    """Two convolutions, and a way around them."""
    inner = jax.nn.relu(
        normed(p, f"{name}.norm1", convolved(p[f"{name}.conv1.weight"], x, 1, stride))
    )
    around = p.get(f"{name}.around.weight")
    aside = x if around is None else convolved(around, x, 0, stride)
    return jax.nn.relu(
        aside + normed(p, f"{name}.norm2", convolved(p[f"{name}.conv2.weight"], inner, 1))
    )


def convolved(kernel: jax.Array, x: jax.Array, padding: int, stride: int = 1) -> jax.Array:
    """A convolution without bias."""
    edges = ((padding, padding),) * 2
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), edges, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def pooled(x: jax.Array) -> jax.Array:
    """The maximum of 2 × 2 pixels."""
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))


def normed(p: P, name: str, x: jax.Array) -> jax.Array:
    """Group norm, eight channels to a group."""
    grouped = x.reshape(*x.shape[:3], -1, 8)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    variance = grouped.var((1, 2, 4), keepdims=True)
    scaled = ((grouped - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def to_jax(start: Mapping[str, Any]) -> dict[str, jax.Array]:
    """PyTorch's parameters, with channels last."""
    return {name: jnp.asarray(turned(name, value)) for name, value in start.items()}


def turned(name: str, value: Any) -> Any:
    """Convolutions from (out, in, height, width) to (height, width, in, out), linear layers
    transposed.
    """
    if name == "7.weight":  # its inputs are channels × 8 × 8
        return value.reshape(len(value), -1, 8, 8).transpose(2, 3, 1, 0).reshape(-1, len(value))
    return value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T


def to_numpy(p: P) -> dict[str, Any]:
    """The way back."""
    back = {}
    for name, value in jax.device_get(dict(p)).items():
        if name == "7.weight":
            back[name] = (
                value.reshape(8, 8, -1, value.shape[1])
                .transpose(3, 2, 0, 1)
                .reshape(value.shape[1], -1)
            )
        else:
            back[name] = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
    return {name: np.ascontiguousarray(value) for name, value in back.items()}
