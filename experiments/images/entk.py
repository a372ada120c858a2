r"""The gradient of a network with respect to some of its parameters, for every image of a batch at
once.

The network's head is replaced by one random number

    s(x) = ⟨w, h(x)⟩,    w ~ N(0, 1/dim),    h: the features of the last layer but one,

and an image's representation is ∂s/∂(θ, w) at a random subset of coordinates that is drawn once:
rows of the empirical neural tangent kernel's feature map. In evaluation mode images do not mix, so
one backward pass of Σ_b s(x_b) gives every layer's δ (the derivative by its output) for all images.
With the layer's input x, image b's derivative is

    convolution   ∂/∂W[o, i, k] = Σ_p δ[b, o, p] x̃[b, i, p · stride + k · dilation]
    batch norm    ∂/∂γ[c]       = Σ_p δ[b, c, p] x̂[b, c, p]
    any bias      ∂/∂β[c]       = Σ_p δ[b, c, p],

(x̃: padded, i within o's group; x̂: before γ and β), and only the coordinates that were drawn are
computed. That costs less than the gradient of all weights, which a plain backward pass computes;
`torch.func.vmap(grad(…))`, which computes every image's whole gradient, takes twenty times as long.
It serves networks with other layers, which here are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

Rule = Callable[[Tensor, Tensor], Tensor]  # (δ, x) ↦ derivatives (B, coordinates)
PRECISIONS = ("float32", "tf32", "bfloat16")
MOVES = 8  # numbers read and written for each one that is picked, multiplied and summed
PACE = {"cpu": 16, "cuda": 40}  # multiplications in a matrix product in the time of one such move
NEAR = {"cpu": 2**18, "cuda": 2**28}  # numbers that fit into a processor's cache; 1 GiB on a GPU
WHOLE = 2**28  # bytes of whole gradients at a time


@contextmanager
def tensor_cores(allowed: bool) -> Iterator[None]:
    """Allow or forbid single-precision products on a GPU's matrix units (TF32: ten bits of each
    factor).
    """
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = allowed
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


class Entk:
    """Map x (B, 3, H, W) to ∂⟨w, h(x_b)⟩/∂(θ, w) at chosen coordinates, (B, coordinates), in
    float32.

    Args:
        trunk: the network in evaluation mode, images ↦ features (B, dim).
        example: one or more normalised images of the final size, on the device.
        coordinates: how many to draw; all, if the network has no more. They ascend, in the order of
            `named_parameters()` of the parameters that the features depend on, then w.
        seed: of w and of the coordinates.
        precision: "float32", or on a GPU "tf32" (products rounded to 10 bits) or "bfloat16".
    """

    def __init__(
        self,
        trunk: nn.Module,
        example: Tensor,
        coordinates: int = 50_000,
        seed: int = 0,
        precision: str = "float32",
    ) -> None:
        self.trunk = trunk
        self.device = example.device
        self.precision = precision
        self.example = example[:1]
        random = np.random.default_rng(seed)
        leaves = {name: p.detach().requires_grad_() for name, p in trunk.named_parameters()}
        h = functional_call(trunk, leaves, (self.example,))
        w = random.standard_normal(h.shape[1]) / h.shape[1] ** 0.5
        self.w = torch.tensor(w, dtype=torch.float32, device=self.device)
        found = torch.autograd.grad((h @ self.w).sum(), list(leaves.values()), allow_unused=True)
        # the features do not depend on a head that is never called
        used = [name for name, g in zip(leaves, found, strict=True) if g is not None]
        sizes = {name: leaves[name].numel() for name in used} | {"": h.shape[1]}  # "": w
        total = sum(sizes.values())
        self.coordinates = min(coordinates, total)
        chosen = np.arange(total)
        if self.coordinates < total:
            chosen = np.sort(random.choice(total, coordinates, replace=False))
        self.chosen = chosen
        self.spans: dict[str, tuple[Tensor, slice]] = {}  # positions in the parameter, columns here
        start = 0
        for name, size in sizes.items():
            a, b = np.searchsorted(chosen, [start, start + size]).tolist()
            if b > a:
                numbers = torch.from_numpy(chosen[a:b] - start).to(self.device)
                self.spans[name] = numbers, slice(a, b)
            start += size
        self.rules = self._plan()

    @property
    def groups(self) -> Tensor:
        """Return the number of every coordinate's parameter."""
        spans = self.spans.values()
        return torch.cat([torch.full_like(numbers, k) for k, (numbers, _) in enumerate(spans)])

    def __call__(self, x: Tensor) -> Tensor:
        """Return the chosen derivatives of every image, (B, coordinates)."""
        with tensor_cores(self.precision != "float32"):
            return self._whole(x) if self.rules is None else self._by_layers(x, self.rules)

    # ---------------------------------------------------------------- layer by layer

    def _plan(self) -> dict[str, dict[str, tuple[Rule, int, slice]]] | None:
        """Return a rule for every parameter, by layer, and the numbers it stores; None where one
        has none.
        """
        shapes: dict[str, tuple[Tensor, Tensor]] = {}
        calls = 0

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
                nonlocal calls
                calls += 1
                shapes[name] = given[0], y

            return hook

        owners = {name: name.rpartition(".")[::2] for name in self.spans if name}
        with ExitStack() as stack, torch.no_grad():
            for layer in {layer for layer, _ in owners.values()}:
                module = self.trunk.get_submodule(layer)
                stack.callback(module.register_forward_hook(note(layer)).remove)
            self.trunk(self.example)
        names = [name for name, _ in self.trunk.named_parameters(remove_duplicate=False)]
        shared = len(names) > len(dict(self.trunk.named_parameters()))
        if shared or calls != len({layer for layer, _ in owners.values()}):
            return None  # a layer is called twice, or a parameter belongs to two
        plan: dict[str, dict[str, tuple[Rule, int, slice]]] = {}
        for name, (layer, attribute) in owners.items():
            module = self.trunk.get_submodule(layer)
            numbers, where = self.spans[name]
            rule = rule_for(module, attribute, numbers, *shapes[layer])
            if rule is None:
                return None
            plan.setdefault(layer, {})[attribute] = (*rule, where)
        return plan

    def _by_layers(self, x: Tensor, rules: dict[str, dict[str, tuple[Rule, int, slice]]]) -> Tensor:
        rows = torch.empty(len(x), self.coordinates, device=self.device)
        with ExitStack() as stack, torch.enable_grad():
            for layer in rules:
                stack.callback(self._attach(layer, rules[layer], rows).remove)
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"
            ):
                h = self.trunk(x)
        if "" in self.spans:
            numbers, where = self.spans[""]
            rows[:, where] = h.detach().index_select(1, numbers).float()
        if h.requires_grad:
            (h.float() @ self.w).sum().backward()
        return rows

    def _attach(
        self, layer: str, rules: dict[str, tuple[Rule, int, slice]], rows: Tensor
    ) -> RemovableHandle:
        """When δ arrives, write the derivatives into their columns; the input is freed with the
        graph.
        """

        def forward(module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> None:
            x = given[0].detach()
            if not y.requires_grad:
                y.requires_grad_()  # the first layer of interest: earlier layers need no graph

            def backward(delta: Tensor) -> None:
                for rule, stored, where in rules.values():
                    # batches whose temporary storage stays in the cache
                    step = max(1, NEAR.get(self.device.type, NEAR["cpu"]) // max(stored, 1))
                    for k in range(0, len(x), step):
                        rows[k : k + step, where] = rule(delta[k : k + step], x[k : k + step])

            y.register_hook(backward)  # type: ignore[no-untyped-call]

        return self.trunk.get_submodule(layer).register_forward_hook(forward)

    # ---------------------------------------------------------------- every image's whole gradient

    def _whole(self, x: Tensor) -> Tensor:
        parameters = {name: p.detach() for name, p in self.trunk.named_parameters()}

        def score(values: dict[str, Tensor], image: Tensor) -> tuple[Tensor, Tensor]:
            h = functional_call(self.trunk, values, (image[None],))[0]
            return h.float() @ self.w, h

        gradients = vmap(grad(score, has_aux=True), in_dims=(None, 0))
        rows = torch.empty(len(x), self.coordinates, device=self.device)
        step = max(1, WHOLE // (4 * sum(p.numel() for p in parameters.values())))
        for k in range(0, len(x), step):
            found, h = gradients(parameters, x[k : k + step])
            for name, (numbers, where) in self.spans.items():
                whole = found[name] if name else h
                rows[k : k + step, where] = whole.flatten(1).index_select(1, numbers).float()
        return rows


def rule_for(
    layer: nn.Module, attribute: str, numbers: Tensor, x: Tensor, y: Tensor
) -> tuple[Rule, int] | None:
    """Return the rule for some coordinates of a layer's parameter, and the numbers that it stores a
    sample.
    """
    if not isinstance(layer, nn.Conv2d | nn.BatchNorm2d):
        return None
    positions = math.prod(y.shape[2:])
    if attribute == "bias":

        def bias(delta: Tensor, x: Tensor) -> Tensor:
            return delta.index_select(1, numbers).sum((2, 3), dtype=torch.float32)

        return bias, len(numbers) * positions
    if isinstance(layer, nn.BatchNorm2d):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean = layer.running_mean[numbers][:, None, None]
        rate = (layer.running_var[numbers] + layer.eps).rsqrt()[:, None, None]

        def gamma(delta: Tensor, x: Tensor) -> Tensor:
            normed = (x.index_select(1, numbers) - mean) * rate
            return (delta.index_select(1, numbers) * normed).sum((2, 3), dtype=torch.float32)

        return gamma, 5 * len(numbers) * positions
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    return _conv(layer, numbers, x, y)


def _conv(layer: nn.Conv2d, numbers: Tensor, x: Tensor, y: Tensor) -> tuple[Rule, int]:
    """Pick channels, place by place in the kernel; or multiply all channels where so many are
    wanted.
    """
    kernel = math.prod(layer.kernel_size)
    each = layer.in_channels // layer.groups
    o = numbers // (each * kernel)
    i = o // (layer.out_channels // layer.groups) * each + numbers // kernel % each
    k = numbers % kernel
    height, width = y.shape[2:]
    positions = height * width
    # by place in the kernel: its offset in x̃, and the columns, output and input channels there
    picks = []
    for place in torch.unique(k).tolist():
        here = torch.nonzero(k == place)[:, 0]
        offset = divmod(place, layer.kernel_size[1])
        picks.append((offset, here, o[here], i[here]))
    moved = (x.shape[1] + y.shape[1]) * len(picks)
    size = layer.out_channels * layer.in_channels * len(picks)
    product = size / PACE.get(x.device.type, PACE["cpu"])
    full = layer.groups == 1 and (moved + product) * positions + size < (
        MOVES * len(numbers) * positions
    )

    def rule(delta: Tensor, x: Tensor) -> Tensor:
        result = torch.empty(len(x), len(numbers), device=x.device)
        high, wide = layer.padding
        padded = functional.pad(x, (wide, wide, high, high)) if high or wide else x
        for (down, right), here, outs, ins in picks:
            top = down * layer.dilation[0]
            left = right * layer.dilation[1]
            rows = slice(top, top + (height - 1) * layer.stride[0] + 1, layer.stride[0])
            columns = slice(left, left + (width - 1) * layer.stride[1] + 1, layer.stride[1])
            if full:
                window = padded[:, :, rows, columns].flatten(2).to(delta.dtype)
                whole = torch.bmm(delta.flatten(2), window.mT).flatten(1)
                found = whole.index_select(1, outs * layer.in_channels + ins).float()
            else:
                # channels first: to select from a window would copy all of it
                window = padded.index_select(1, ins)[:, :, rows, columns]
                found = (delta.index_select(1, outs) * window).sum((2, 3), dtype=torch.float32)
            result[:, here] = found
        return result

    stored = size + moved * positions if full else 3 * len(numbers) // len(picks) * positions
    return rule, stored
