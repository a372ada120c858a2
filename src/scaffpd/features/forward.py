"""Forward passes: their precision, and what a network makes of one image."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scaffpd.errors import InputError
from scaffpd.models.numerics import tensor_cores

PRECISIONS = ("float32", "tf32", "bfloat16")


def mixed(device: torch.device, precision: str) -> torch.autocast:
    """Run forward passes in bfloat16 where that was asked for."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def dimension(trunk: nn.Module, example: Tensor) -> int:
    """Return the number of features that the network makes of one image."""
    try:
        with torch.no_grad():
            h = trunk(example[:1])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(f"The network cannot take images of shape {tuple(example.shape[1:])}: {reason}.") from None
    if not isinstance(h, Tensor) or h.ndim != 2 or len(h) != 1:
        shape = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
        raise InputError(f"The features of one image must have the shape (1, dim), got {shape}.")
    return h.shape[1]


def watch(trunk: nn.Module, x: Tensor) -> tuple[dict[str, list[tuple[Tensor, Tensor]]], int]:
    """Return (input, output) of every call of every layer without parts, and the bytes of all their outputs."""
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
        raise InputError("The network has no parameters with respect to which a gradient could be taken.")
    return parameters


def owners_of(trunk: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """Return the layers that have each parameter, and their names for it; several where it is shared."""
    owners: dict[str, list[tuple[str, str]]] = {}
    same = {id(p): name for name, p in trunk.named_parameters()}
    for layer, module in trunk.named_modules():
        for attribute, p in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(same[id(p)], []).append((layer, attribute))
    return owners


class Penultimate:
    """x ↦ h(x), with the interface of `Entk`."""

    def __init__(self, trunk: nn.Module, example: Tensor, precision: str) -> None:
        self.trunk, self.device, self.precision = trunk, example.device, precision
        self.coordinates = dimension(trunk, example)
        self.bytes = watch(trunk, example)[1]
        self.method = "forward"

    def __call__(self, x: Tensor) -> Tensor:
        """(B, dim) in single precision."""
        with torch.no_grad(), tensor_cores(self.device, self.precision != "float32"):
            with mixed(self.device, self.precision):
                h: Tensor = self.trunk(x)
            return h.float()

    @property
    def groups(self) -> Tensor:
        """All of one kind."""
        return torch.zeros(self.coordinates, dtype=torch.int64, device=self.device)

    @property
    def room(self) -> int:
        """Bytes that one sample needs: nothing is kept, but one after the other, maps of all layers come and go."""
        return 48 * self.coordinates + self.bytes
