r"""Convexify (Yu, Wei, Karimireddy, Ma, Jordan, 2022): the middle stage of train, convexify, train.

Stay at a network's parameters θ and represent every sample by the gradient of a random output of
its last features h there, a_j = ∂⟨w, h(x_j)⟩/∂(θ, w), at random coordinates: the network made
linear in its parameters. Columns are standardised by sums that clients add up; nobody sees anybody
else's rows. A linear model on these rows, with squared loss on one-hot labels, is a convex problem:
any method applies, and the result comes with a certificate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.images.entk import Entk
from experiments.images.features import CHUNK, ColumnMoments, scales
from experiments.images.networks import Features, trunk


@dataclass(frozen=True)
class Representation:
    """x ↦ (g(x) − mean) / deviation, g the gradient at the chosen coordinates."""

    entk: Entk = field(repr=False)
    chunk: int
    mean: Tensor = field(repr=False)
    deviation: Tensor = field(repr=False)


def representation(
    network: nn.Module,
    features: Sequence[NDArray[np.generic]],
    head: str | Features | None,
    coordinates: int = 50_000,
    device: str = "cpu",
    chunk: int | None = None,
    seed: int = 0,
) -> Representation:
    """Draw coordinates, and add up mean and deviation over all clients' samples."""
    body = trunk(network, head).to(device)
    example = torch.as_tensor(np.asarray(features[0][:1])).to(device, torch.float32)
    entk = Entk(body, example, coordinates, seed)
    size = chunk or CHUNK.get(entk.device.type, 32)
    sums = ColumnMoments.zeros(entk.coordinates, entk.device)
    for X in features:  # each client adds its own n, Σ g and Σ g²
        for g in gradients(entk, X, size):
            sums.add(g)
    return Representation(entk, size, *scales(sums, entk.groups))


def gradients(entk: Entk, X: NDArray[np.generic], chunk: int) -> Iterator[Tensor]:
    """Yield the chosen derivatives, so many samples at a time."""
    for k in range(0, len(X), chunk):
        yield entk(torch.as_tensor(np.asarray(X[k : k + chunk])).to(entk.w))
