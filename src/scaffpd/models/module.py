r"""Any `torch.nn.Module`: f_i(x) = mean loss of the network with parameters x on client i's samples + (l2/2)‖x‖².

Gradients by autograd, one client after the other. The loss need not be convex in x: then there is no certificate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from scaffpd.errors import InputError, real, unknown
from scaffpd.federation import Constants, LocalPlan, Vector
from scaffpd.models.oracle import Arrays, Oracle
from scaffpd.models.spectral import power_iteration

MeanLoss = Callable[[Tensor, Tensor], Tensor]
CHUNK = 8192

NAMED_LOSSES: dict[str, MeanLoss] = {
    "cross_entropy": lambda output, target: nn.functional.cross_entropy(output, target.long()),
    "squared": lambda output, target: (output - target.reshape(output.shape)).square().sum(-1).mean(),
    "logistic": lambda output, target: nn.functional.binary_cross_entropy_with_logits(
        output, target.reshape(output.shape).to(output.dtype)
    ),
}


@dataclass(frozen=True)
class Module:
    """A network, described; bind it to data with a `Cohort`.

    Args:
        module: any `torch.nn.Module` from a batch of features to outputs; a copy is kept, x⁰ are its parameters.
        loss: "cross_entropy", "squared", "logistic", or a function (outputs, targets) → mean loss over the batch.
        l2: the regulariser (l2/2)‖x‖².
    """

    module: nn.Module = field(repr=False)
    loss: str | MeanLoss = "cross_entropy"
    l2: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise InputError(f"Module needs a torch.nn.Module, got {type(self.module).__name__}.")
        if not callable(self.loss) and self.loss not in NAMED_LOSSES:
            raise unknown("loss", self.loss, NAMED_LOSSES)
        if not 0 <= real("Module", "l2", self.l2) < float("inf"):
            raise InputError(f"Module needs l2 >= 0 and finite, got {self.l2!r}.")
        if not any(p.requires_grad for p in self.module.parameters()):
            raise InputError("Module needs at least one parameter that requires a gradient.")
        for name, part in self.module.named_modules():
            _refuse_random_or_stateful(name, part)

    def oracle(
        self, features: Arrays, labels: Arrays, names: list[str], device: torch.device, dtype: torch.dtype | None
    ) -> Oracle:
        """Bind to the clients' checked features and raw labels."""
        network = copy.deepcopy(self.module).to(device=device)
        network = network if dtype is None else network.to(dtype=dtype)
        kind = next(p.dtype for p in network.parameters() if p.requires_grad)
        X = [torch.as_tensor(a, device=device) for a in features]
        X = [a.to(kind) if a.is_floating_point() else a for a in X]
        y = [torch.as_tensor(b, device=device) for b in labels]
        y = [b.to(kind) if b.is_floating_point() else b for b in y]
        loss = self.loss if callable(self.loss) else NAMED_LOSSES[self.loss]
        return ModuleOracle(network, loss, float(self.l2), X, y)


def _refuse_random_or_stateful(name: str, part: nn.Module) -> None:
    if not part.training:
        return
    if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
        raise InputError(
            f"Module layer {name!r} is a batch norm in training mode, whose statistics differ from site to site: "
            "use GroupNorm, or freeze it with .eval()."
        )
    if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
        raise InputError(f"Module layer {name!r} is a dropout in training mode, which makes losses random: call .eval().")


class ModulePoint:
    """All clients at one x: losses and the stacked (N, d) gradients."""

    def __init__(self, losses: Tensor, each: Tensor) -> None:
        self.losses, self.each = losses, each

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i c_i."""
        return weights.to(self.each.dtype) @ self.each

    def project(self, direction: Tensor) -> Tensor:
        """⟨c_i, v⟩ per client."""
        return self.each @ direction

    def norms(self) -> Tensor:
        """‖c_i‖² per client."""
        return self.each.square().sum(1)


class ModuleDisplacements:
    """The stacked (N, d) displacements of all clients."""

    def __init__(self, each: Tensor) -> None:
        self.each = each

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i d_i."""
        return weights.to(self.each.dtype) @ self.each


class ModuleOracle:
    """N clients that share a network's architecture."""

    def __init__(self, network: nn.Module, loss: MeanLoss, l2: float, X: list[Tensor], y: list[Tensor]) -> None:
        self.network, self.loss, self.l2, self.X, self.y = network, loss, l2, X, y
        self.parameters = {k: p for k, p in network.named_parameters() if p.requires_grad}
        self.dimension = sum(p.numel() for p in self.parameters.values())
        self._smoothness: Vector | None = None

    def start(self) -> Tensor:
        """x⁰: the network's own parameters, flattened."""
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        """A flat x as the network's named parameters."""
        parts = x.split([p.numel() for p in self.parameters.values()])
        return {k: part.view_as(p) for (k, p), part in zip(self.parameters.items(), parts, strict=True)}

    def constants(self) -> Constants:
        """L_i by power iteration on the Hessian at x⁰ (gradient differences); no convexity is claimed."""
        if self._smoothness is None:
            x = self.start()
            self._smoothness = np.array([self._largest_curvature(i, x) for i in range(len(self.X))])
        return Constants(self._smoothness, np.zeros(len(self.X)), convex=False)

    def _largest_curvature(self, client: int, x: Tensor) -> float:
        _, g = self.gradient(client, x)
        step = float(torch.finfo(x.dtype).eps) ** 0.5 * (1 + float(x.norm()))

        def hessian_times(v: Tensor) -> Tensor:
            return (self.gradient(client, x + step * v)[1] - g) / step

        value = float(power_iteration(hessian_times, g, steps=20, tolerance=0.05))
        return max(value, self.l2, 1e-6)

    def gradient(self, client: int, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """f_i(x) and ∇f_i(x), over all samples of the client or the given rows."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            total, gradient = x.new_zeros(()), torch.zeros_like(x)
            for X, y, share in self._chunks(client, rows):
                value = share * self.loss(functional_call(self.network, self.unflatten(leaf), (X,)), y)
                gradient = gradient + torch.autograd.grad(value, leaf)[0]
                total = total + value.detach()
        return total + self.l2 / 2 * (x @ x), gradient + self.l2 * x

    def _chunks(self, client: int, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, float]]:
        X, y = self.X[client], self.y[client]
        if rows is not None:
            X, y = X[rows], y[rows]
        for first in range(0, len(X), CHUNK):
            part = X[first : first + CHUNK]
            yield part, y[first : first + CHUNK], len(part) / len(X)

    def evaluate(self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)) -> ModulePoint:
        """Losses and gradients of all clients at x."""
        generator = np.random.default_rng(key)
        answers = [self.gradient(i, x, self._draw(i, batch_size, generator)) for i in range(len(self.X))]
        losses, gradients = zip(*answers, strict=True)
        return ModulePoint(torch.stack(losses), torch.stack(gradients))

    def _draw(self, client: int, batch_size: int | None, generator: np.random.Generator) -> Tensor | None:
        m = len(self.X[client])
        if batch_size is None or batch_size >= m:
            return None
        return torch.from_numpy(generator.integers(m, size=batch_size)).to(self.X[client].device)

    def local_updates(self, x: Tensor, at: ModulePoint, correction: Tensor, plan: LocalPlan) -> ModuleDisplacements:
        """J corrected steps of every client, one client after the other."""
        generator = np.random.default_rng(plan.key)
        smoothness = self.constants().smoothness
        each = torch.zeros_like(at.each)
        for i in range(len(self.X)):
            rate = plan.scale / smoothness[i] if plan.rate is None else plan.rate
            for _ in range(plan.steps):
                _, g = self.gradient(i, x - each[i], self._draw(i, plan.batch_size, generator))
                each[i] += rate * (g - at.each[i] + correction)
        return ModuleDisplacements(each)

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """f_i(x) and accuracy where targets are class numbers (or one output's sign for 0/1 labels); else NaN."""
        losses, accuracy = [], []
        with torch.no_grad():
            for i in range(len(self.X)):
                loss, right, known = 0.0, 0.0, True
                for X, y, share in self._chunks(i, None):
                    output = functional_call(self.network, self.unflatten(x), (X,))
                    loss += share * float(self.loss(output, y))
                    correct = _correct(output, y)
                    known = known and correct is not None
                    right += share * float(correct.double().mean()) if correct is not None else 0.0
                losses.append(loss + self.l2 / 2 * float(x @ x))
                accuracy.append(right if known else float("nan"))
        return np.array(losses), np.array(accuracy)


def _correct(output: Tensor, y: Tensor) -> Tensor | None:
    if output.ndim == 2 and output.shape[1] > 1 and y.ndim == 1 and not y.is_floating_point():
        return output.argmax(-1) == y
    binary = bool(((y == 0) | (y == 1)).all())
    return (output.flatten() > 0) == (y.flatten() > 0.5) if binary and output.numel() == y.numel() else None
