r"""The gradient of a network with respect to some of its parameters, for every sample of a batch at once.

The network's head is replaced by one random number

    s(x) = ⟨w, h(x)⟩,    w ~ N(0, 1/dim),    h: the features of the last layer but one,

and a sample's representation is ∂s/∂(θ, w) at a random subset of coordinates that is drawn once: rows of the
empirical neural tangent kernel's feature map. In evaluation mode samples do not mix, so one backward pass of Σ_b s(x_b)
gives every layer's δ for all samples; `layers` turns δ and the layer's input into the few derivatives that are used.
The parameters themselves need no gradient, and no whole gradient is ever stored.

A network whose parameters are not all used by known layers, once each, is differentiated by `torch.func` instead. In
any case the result is compared with plain automatic differentiation on two samples before it is used.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.hooks import RemovableHandle

from scaffpd.errors import InputError, count, unknown
from scaffpd.features import layers
from scaffpd.features.layers import PRECISIONS, CoordinateRule
from scaffpd.models.numerics import tensor_cores

AGREE = 1e-3  # largest difference, relative to the largest entry of a parameter's gradient
FAINT = 1e-6  # relative to the largest entry of all: smaller ones are rounding


@dataclass(frozen=True)
class ParameterCoordinates:
    """Coordinates of one parameter: their positions in it, and in a row of the result."""

    name: str  # of the parameter; "" is w, the random head
    numbers: Tensor  # positions in the flattened parameter, on the device
    where: slice  # columns of the result


def split_by_parameter(
    chosen: NDArray[np.int64], sizes: dict[str, int], device: torch.device
) -> list[ParameterCoordinates]:
    """Split the chosen coordinates by parameter, without empty ones."""
    starts = np.concatenate([[0], np.cumsum(list(sizes.values()))])
    cuts = np.searchsorted(chosen, starts).tolist()
    return [
        ParameterCoordinates(name, torch.from_numpy(chosen[a:b] - start).to(device), slice(a, b))
        for name, start, a, b in zip(sizes, starts[:-1], cuts[:-1], cuts[1:], strict=True)
        if b > a
    ]


def agree(found: Tensor, reference: Tensor, parts: list[ParameterCoordinates]) -> bool:
    """Return whether two derivatives with respect to parameters agree up to rounding."""
    found = found.cpu()
    reference = reference.cpu()
    floor = FAINT * float(reference.abs().max())
    for part in parts:
        there = reference[:, part.where]
        gap = float((found[:, part.where] - there).abs().max())
        if part.name and not gap <= AGREE * float(there.abs().max()) + floor:
            return False
    return True


Parameters = dict[str, Tensor]
MOST = 2**28  # bytes of whole gradients at a time


def one_by_one(trunk: nn.Module, parameters: Parameters, w: Tensor, x: Tensor) -> list[Parameters]:
    """Return ∂⟨w, h(x_b)⟩/∂θ for one sample b after the other; leave out parameters without influence."""
    rows = []
    for b in range(len(x)):
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        with torch.enable_grad():
            score = functional_call(trunk, leaves, (x[b : b + 1],)).to(w.dtype) @ w
            found = torch.autograd.grad(score.sum(), list(leaves.values()), allow_unused=True)
        rows.append({name: g for name, g in zip(leaves, found, strict=True) if g is not None})
    return rows


def at_once(trunk: nn.Module, parameters: Parameters, w: Tensor, x: Tensor) -> Parameters:
    """Return every parameter's gradients (B, …), a few samples at a time, by `torch.func`."""

    def score(values: Parameters, image: Tensor) -> Tensor:
        features: Tensor = functional_call(trunk, values, (image[None],))
        return features[0].to(w.dtype) @ w

    found: Parameters = vmap(grad(score), in_dims=(None, 0))(parameters, x)
    return found


METHODS = ("layers", "vmap", "loop")
TRIED = 2  # samples for comparing a method with plain differentiation


class UncoveredError(Exception):
    """Network that cannot be differentiated layer by layer; the message says why."""


class Entk:
    """Map x (B, 3, H, W) to ∂⟨w, h(x_b)⟩/∂(θ, w) at chosen coordinates, (B, coordinates), at least in float32.

    Args:
        trunk: the network in evaluation mode, images ↦ features (B, dim).
        example: a few normalised images of the final size, on the device.
        coordinates: number to keep; all, if the network has no more. Ascending, in the order of
            `named_parameters()` of the parameters that the features depend on, then w.
        seed: seed of w and of the choice.
        precision: "float32", or on a GPU "tf32" (products rounded to 10 bits) or "bfloat16" (forward pass, δ and
            products in bfloat16, sums in float32).
        method: "layers", "vmap" or "loop"; None takes the first of them that is right for this network.

    Attributes:
        method: the method used; `why` lists the reasons against those before it.
    """

    def __init__(
        self,
        trunk: nn.Module,
        example: Tensor,
        coordinates: int = 50_000,
        seed: int = 0,
        precision: str = "float32",
        method: str | None = None,
    ) -> None:
        for what, given, known in (
            ("precision", precision, PRECISIONS),
            ("method", method or METHODS[0], METHODS),
        ):
            if given not in known:
                raise unknown(what, given, known)
        self.trunk = trunk
        self.device = example.device
        self.precision = precision
        random = np.random.default_rng(seed)
        self.parameters = layers.parameters_of(trunk)
        self.features = layers.dimension(trunk, example)
        w = random.standard_normal(self.features) / self.features**0.5
        self.dtype = layers.wide(next(iter(self.parameters.values())).dtype)
        self.w = torch.tensor(w, dtype=self.dtype, device=self.device)
        with tensor_cores(self.device, False):
            self.example = example[:TRIED]
            reference = one_by_one(trunk, self.parameters, self.w, self.example)
            self.parameters = {name: self.parameters[name] for name in reference[0]}
            sizes = {name: p.numel() for name, p in self.parameters.items()} | {"": self.features}
            self.total = sum(sizes.values())
            self.coordinates = min(count("Entk", "coordinates", coordinates), self.total)
            every = self.coordinates == self.total
            self.chosen = (
                np.arange(self.total)
                if every
                else random.choice(self.total, coordinates, replace=False)
            )
            self.chosen.sort()
            self.spans = split_by_parameter(self.chosen, sizes, self.device)
            self._settle(torch.stack([self._pick(row) for row in reference]), method)

    def _pick(self, gradients: dict[str, Tensor]) -> Tensor:
        """Pick the chosen coordinates of one sample's whole gradients; leave those of w, which are h(x), at zero."""
        row = torch.zeros(self.coordinates, dtype=self.dtype, device=self.device)
        for span in self.spans:
            if span.name:
                row[span.where] = gradients[span.name].flatten()[span.numbers]
        return row

    def _settle(self, reference: Tensor, method: str | None) -> None:
        """Choose the first method that agrees with plain differentiation."""
        self.why: list[str] = []
        self.parts: dict[str, dict[str, tuple[CoordinateRule, slice]]] = {}
        for self.method in METHODS if method is None else (method,):
            try:
                if self.method == "layers":
                    self._plan()
                found = self._compute(self.example, "float32")
            except (UncoveredError, RuntimeError, NotImplementedError, ValueError) as error:
                self.why.append(f"{self.method}: {str(error).strip().splitlines()[0]}")
                continue
            if agree(found, reference, self.spans):
                return
            self.why.append(f"{self.method}: it does not agree with plain differentiation")
        raise InputError(
            "network-gradients-computed",
            f"This network's gradients cannot be computed sample by sample ({'; '.join(self.why)}); give another "
            "method or network.",
        )

    def _plan(self) -> None:
        """Find a rule for every parameter, or raise `UncoveredError`."""
        owners = layers.owners_of(self.trunk)
        seen, self.bytes = layers.watch(self.trunk, self.example)
        self.parts = {}
        for span in self.spans:
            if not span.name:
                continue
            if len(owners[span.name]) > 1:
                raise UncoveredError(f"{span.name} is shared")
            layer, attribute = owners[span.name][0]
            if len(seen.get(layer, ())) != 1:
                raise UncoveredError(f"{layer or 'the network'} is not called once")
            rule = layers.rule_for(
                self.trunk.get_submodule(layer), attribute, span.numbers, *seen[layer][0]
            )
            if rule is None:
                raise UncoveredError(f"{layer or 'the network'} is of a type without a rule")
            self.parts.setdefault(layer, {})[attribute] = (rule, span.where)

    def _by_layers(self, x: Tensor, precision: str) -> Tensor:
        rows = torch.empty(len(x), self.coordinates, dtype=self.dtype, device=self.device)
        kept: dict[str, Tensor] = {}
        with ExitStack() as stack, torch.enable_grad():
            for layer in self.parts:
                handle = self._attach(layer, kept, rows)
                stack.callback(handle.remove)
            with layers.mixed(self.device, precision):
                h = self.trunk(x)
        if self.spans[-1].name == "":
            rows[:, self.spans[-1].where] = h.detach().index_select(1, self.spans[-1].numbers)
        if h.requires_grad:
            (h.to(self.dtype) @ self.w).sum().backward()
        if kept:
            raise UncoveredError(f"no gradient reaches {next(iter(kept))}")
        return rows

    def _attach(self, layer: str, kept: dict[str, Tensor], rows: Tensor) -> RemovableHandle:
        """Save the layer's input; when δ arrives, write the derivatives into their columns and free the input."""

        def forward(module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
            kept[layer] = given[0].detach()
            version = given[0]._version
            if not y.requires_grad:
                y.requires_grad_()  # the first layer of interest: earlier layers need no graph

            def backward(delta: Tensor) -> None:
                x = kept.pop(layer)
                if x._version != version:
                    raise UncoveredError(f"the input of {layer} is overwritten")
                for one, where in self.parts[layer].values():
                    one.write(delta, x, rows[:, where])

            y.register_hook(backward)  # type: ignore[no-untyped-call]

        return self.trunk.get_submodule(layer).register_forward_hook(forward)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the chosen derivatives of every sample, (B, coordinates)."""
        with tensor_cores(self.device, self.precision != "float32"):
            return self._compute(x, self.precision)

    def _compute(self, x: Tensor, precision: str) -> Tensor:
        if self.method == "layers":
            return self._by_layers(x, precision)
        size = (
            max(1, MOST // (4 * sum(p.numel() for p in self.parameters.values())))
            if self.method == "vmap"
            else 1
        )
        rows = [self._whole(x[k : k + size], precision) for k in range(0, len(x), size)]
        return (
            torch.cat(rows)
            if rows
            else torch.empty(0, self.coordinates, dtype=self.dtype, device=self.device)
        )

    def _whole(self, x: Tensor, precision: str) -> Tensor:
        with layers.mixed(self.device, precision):
            if self.method == "vmap":
                gradients = at_once(self.trunk, self.parameters, self.w, x)
            else:
                gradients = {
                    k: v[None]
                    for k, v in one_by_one(self.trunk, self.parameters, self.w, x)[0].items()
                }
            rows = torch.empty(len(x), self.coordinates, dtype=self.dtype, device=self.device)
            for span in self.spans:
                if span.name:
                    rows[:, span.where] = (
                        gradients[span.name].reshape(len(x), -1).index_select(1, span.numbers)
                    )
                else:
                    with torch.no_grad():
                        rows[:, span.where] = self.trunk(x).index_select(1, span.numbers)
        return rows

    @property
    def groups(self) -> Tensor:
        """Return the number of every coordinate's parameter."""
        return torch.cat([torch.full_like(span.numbers, k) for k, span in enumerate(self.spans)])

    @property
    def room(self) -> int:
        """Upper estimate of the bytes that one sample needs while it is computed."""
        rows = 48 * self.coordinates
        if self.method != "layers":
            return rows + 8 * self.total + 4 * layers.watch(self.trunk, self.example)[1]
        work = max(
            (one.work for parts in self.parts.values() for one, _ in parts.values()), default=0
        )
        return rows + 4 * work + 3 * self.bytes
