r"""Derivatives of single samples for any network: slower ways that need to know nothing about its layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Parameters = dict[str, Tensor]
ROOM = 2**28  # bytes of whole gradients at a time


def one_by_one(trunk: nn.Module, parameters: Parameters, w: Tensor, x: Tensor) -> list[Parameters]:
    """∂⟨w, h(x_b)⟩/∂θ for one sample b after the other; what the features do not depend on is left out."""
    rows = []
    for b in range(len(x)):
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        with torch.enable_grad():
            score = functional_call(trunk, leaves, (x[b : b + 1],)).to(w.dtype) @ w
            found = torch.autograd.grad(score.sum(), list(leaves.values()), allow_unused=True)
        rows.append({name: g for name, g in zip(leaves, found, strict=True) if g is not None})
    return rows


def at_once(trunk: nn.Module, parameters: Parameters, w: Tensor, x: Tensor) -> Parameters:
    """The same for all samples of a few at a time, by `torch.func`: every parameter's gradients (B, …)."""

    def score(values: Parameters, image: Tensor) -> Tensor:
        features: Tensor = functional_call(trunk, values, (image[None],))
        return features[0].to(w.dtype) @ w

    found: Parameters = vmap(grad(score), in_dims=(None, 0))(parameters, x)
    return found


def piece(parameters: Parameters) -> int:
    """Samples at a time whose whole gradients fit into `ROOM`."""
    return max(1, ROOM // (4 * sum(p.numel() for p in parameters.values())))
