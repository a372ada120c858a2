r"""Any `torch.nn.Module`: f_i(x) = mean loss of the network with parameters x on client i's samples + (l2/2)‖x‖².

Gradients and second derivatives by autograd, one client after the other. The loss need not be convex in x: then there
is no certificate.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.func import functional_call

from scaffpd.errors import InputError, real, unknown
from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Vector
from scaffpd.models.local_steps import LocalModel, pace
from scaffpd.models.losses import Logistic, Loss, Softmax, Squared
from scaffpd.models.numerics import Draws, power_iteration, random_direction
from scaffpd.models.oracle import (
    Arrays,
    ClientData,
    Oracle,
    StackedDisplacements,
    StackedPoint,
    SubspaceDerivatives,
    dtype_name,
    shift,
)

MeanLoss = Callable[[Tensor, Tensor], Tensor]
Correct = Callable[[Tensor, Tensor], Tensor | None]
CHUNK = 8192
TRIED = 16  # samples on which a network is tried out before any work

LOSSES: dict[str, type[Loss]] = {
    "cross_entropy": Softmax,
    "softmax": Softmax,
    "squared": Squared,
    "logistic": Logistic,
}


@dataclass(frozen=True)
class Module:
    """A network, described; bind it to data with a `Cohort`.

    Args:
        module: any `torch.nn.Module` from a batch of features to outputs; a copy is kept, x⁰ are its parameters.
        loss: "cross_entropy" (or "softmax"), "squared", "logistic", as in `Linear`; or a function (outputs, targets) →
            mean loss over the batch.
        l2: the regulariser (l2/2)‖x‖².
    """

    module: nn.Module
    loss: str | MeanLoss = "cross_entropy"
    l2: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise InputError(f"Module needs a torch.nn.Module, got {type(self.module).__name__}.")
        if not callable(self.loss) and (not isinstance(self.loss, str) or self.loss not in LOSSES):
            raise unknown("loss", self.loss, LOSSES)
        if not 0 <= real("Module", "l2", self.l2) < float("inf"):
            raise InputError(f"Module needs l2 >= 0 and finite, got {self.l2!r}.")
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in self.module.parameters()):
            raise InputError("Module needs a network whose lazy layers know their sizes: run it once first.")
        if not any(p.requires_grad for p in self.module.parameters()):
            raise InputError("Module needs at least one parameter that requires a gradient.")
        for name, part in self.module.named_modules():
            _refuse_random_or_stateful(name, part)

    def __repr__(self) -> str:
        """Architecture (a hash of it, where it is long), loss and l2, without addresses: the same in every process."""
        network = " ".join(repr(self.module).split())
        if len(network) > 100:
            network = f"{type(self.module).__name__} {hashlib.sha256(network.encode()).hexdigest()[:8]}"
        loss = self.loss if isinstance(self.loss, str) else getattr(self.loss, "__qualname__", type(self.loss).__name__)
        return f"Module({network}, loss={loss!r}, l2={self.l2!r})"

    def network(self, x: NDArray[np.floating[Any]] | Tensor) -> nn.Module:
        """Return a copy of the network with the parameters x."""
        network = copy.deepcopy(self.module)
        trained = [p for p in network.parameters() if p.requires_grad]
        flat, length = torch.as_tensor(x).detach(), sum(p.numel() for p in trained)
        if flat.shape != (length,):
            raise InputError(f"x has shape {tuple(flat.shape)}, but the network has {length} parameters.")
        nn.utils.vector_to_parameters(flat.to(trained[0]), trained)
        return network

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        """Bind to the clients' checked data."""
        names, device = data.names, data.device
        network = copy.deepcopy(self.module).to(device=device, dtype=data.dtype)
        kind = next(p.dtype for p in network.parameters() if p.requires_grad)
        X = [_tensor(np.asarray(a), device, kind) for a in data.features]
        outputs = _try_out(network, X[0][:TRIED])
        if isinstance(self.loss, str):
            loss = LOSSES[self.loss]()
            arrays = _encoded(self.loss, loss, data.labels, names, outputs)
            y = [_tensor(b, device, kind) for b in arrays]
            return ModuleOracle(network, _mean(loss), loss_correct(loss), float(self.l2), X, y, names)
        y = [_tensor(b, device, kind) for b in data.labels]
        _try_out_loss(self.loss, outputs, y[0][:TRIED])
        return ModuleOracle(network, self.loss, class_correct, float(self.l2), X, y, names)


def _refuse_random_or_stateful(name: str, part: nn.Module) -> None:
    batch_norm = isinstance(part, nn.modules.batchnorm._BatchNorm)
    if batch_norm and (part.training or not part.track_running_stats):
        raise InputError(
            f"Module layer {name!r} is a batch norm that uses its batch's own statistics, which differ from site to "
            "site: use GroupNorm, or freeze it with .eval()."
        )
    if isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.training and part.track_running_stats:
        raise InputError(
            f"Module layer {name!r} keeps running statistics while it trains: set track_running_stats=False, or call "
            ".eval()."
        )
    dropout = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
    if part.training and (isinstance(part, nn.RReLU) or (isinstance(dropout, float) and dropout > 0)):
        raise InputError(
            f"Module layer {name!r} has dropout or other noise in training mode; losses would be random: call .eval()."
        )


def _tensor(array: np.ndarray, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy to the device, floats in the network's own type; whole numbers stay, for embeddings."""
    values = torch.tensor(array, device=device)
    return values.to(dtype) if values.is_floating_point() else values


def _try_out(network: nn.Module, X: Tensor) -> Tensor:
    """Return the network's outputs on a few samples, or say why there are none."""
    try:
        with torch.no_grad():
            first, again = network(X), network(X)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"The network cannot take samples of shape {tuple(X.shape[1:])} and type {dtype_name(X.dtype)}: {reason}."
        ) from None
    if not isinstance(first, Tensor) or first.ndim == 0 or len(first) != len(X):
        raise InputError("The network must return one tensor with a row of outputs for every sample.")
    if not torch.equal(first.nan_to_num(), again.nan_to_num()):
        raise InputError(
            "The network gives other outputs when it is asked again: switch off what is random with .eval()."
        )
    return first


def _encoded(name: str, loss: Loss, labels: Arrays, names: list[str], outputs: Tensor) -> Arrays:
    width = outputs.numel() // len(outputs)
    if outputs.ndim > 2:
        raise InputError(
            f"Loss {name!r} takes a vector of outputs for every sample, but the network gives shape "
            f"{tuple(outputs.shape[1:])}: hand over a function (outputs, targets) → mean loss."
        )
    targets = loss.encode(labels, names, None if isinstance(loss, Squared) else width)
    if targets.outputs != width:
        raise InputError(
            f"Loss {name!r} needs {targets.outputs} outputs for these targets, but the network has {width}."
        )
    return targets.arrays


def _try_out_loss(loss: MeanLoss, outputs: Tensor, y: Tensor) -> None:
    try:
        value = loss(outputs, y)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(f"The loss function fails on the network's outputs: {reason}.") from None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError("The loss function must return the mean loss of the batch, a tensor with a single number.")


def _has_own_function(value: Tensor) -> bool:
    """Return whether a user's own `Function` has a part in the value.

    Where its gradient cannot be differentiated, autograd leaves that part of the Hessian out and says nothing.
    """
    nodes: list[Any] = [value.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, BackwardCFunction):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return False


def _mean(loss: Loss) -> MeanLoss:
    return lambda output, y: loss.value(output.reshape(len(y), -1), y).mean()


def loss_correct(loss: Loss) -> Correct:
    """Which samples a network with one of the named losses gets right."""
    return lambda output, y: loss.correct(output.reshape(len(y), -1), y)


def class_correct(output: Tensor, y: Tensor) -> Tensor | None:
    """With the user's own loss: the largest output against class numbers; else nothing is known."""
    labels = output.ndim == 2 and output.shape[1] > 1 and y.ndim == 1 and not y.is_floating_point()
    return output.argmax(-1) == y if labels else None


class ModulePoint(StackedPoint):
    """All clients at one x: losses and the stacked (N, d) gradients, over the given rows of each client."""

    def __init__(
        self, oracle: ModuleOracle, x: Tensor, rows: list[Tensor | None], losses: Tensor, gradients: Tensor
    ) -> None:
        super().__init__(x, losses, gradients)
        self.oracle, self.rows = oracle, rows

    def norms(self, scale: Tensor | None = None) -> Tensor:
        """Σ_k s_k c_ik² per client."""
        return torch.stack([c @ (c if scale is None else scale * c) for c in self.gradients])

    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> SubspaceDerivatives:
        """By k Hessian-vector products of every client that has weight."""
        Q = V.new_zeros(V.shape[1], V.shape[1])
        for i, w in enumerate(weights.tolist()):
            if w != 0:
                Q += w * self.oracle.curvature(i, self.x, V, self.rows[i])
        return SubspaceDerivatives(self.project(V), Q, self.norms(1 / metric))

    def curvatures(self, V: Tensor) -> Tensor:
        """By k Hessian-vector products of every client."""
        return torch.stack([self.oracle.curvature(i, self.x, V, rows) for i, rows in enumerate(self.rows)])

    def diagonal(self, weights: Tensor) -> Tensor:
        """Refuse: it would take d Hessian-vector products."""
        raise InputError("The diagonal of a network's Hessian is not known; take D = I instead.")

    def diagonals(self) -> Tensor:
        """Refuse as `diagonal` does."""
        return self.diagonal(self.losses)


class ModuleOracle:
    """N clients that share a network's architecture."""

    most_rows: float | None = None

    def __init__(
        self,
        network: nn.Module,
        loss: MeanLoss,
        correct: Correct,
        l2: float,
        X: list[Tensor],
        y: list[Tensor],
        names: list[str],
    ) -> None:
        self.network, self.loss, self.correct, self.l2 = network, loss, correct, l2
        self.X, self.y, self.names = X, y, names
        self.parameters = {k: p for k, p in network.named_parameters() if p.requires_grad}
        self.sizes = [p.numel() for p in self.parameters.values()]
        self.dimension = sum(self.sizes)
        self._smoothness: Vector | None = None
        self._twice = True  # whether every operation's derivative has one itself, as far as is known

    def start(self) -> Tensor:
        """x⁰: the network's own parameters, flattened."""
        return torch.cat([p.detach().flatten() for p in self.parameters.values()])

    def contents(self) -> list[Tensor]:
        """The network's parameters and buffers, and the samples."""
        return [*self.network.state_dict().values(), *self.X, *self.y]

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        """A flat x as the network's named parameters."""
        parts = torch.split(x, self.sizes)
        return {k: part.view_as(p) for (k, p), part in zip(self.parameters.items(), parts, strict=True)}

    def constants(self) -> Constants:
        """L_i by power iteration on the Hessian at x⁰ (gradient differences); no convexity is claimed."""
        if self._smoothness is None:
            x = self.start()
            self._smoothness = np.array([self._largest_curvature(i, x) for i in range(len(self.X))])
        samples = np.array([len(X) for X in self.X])
        return Constants(self._smoothness, np.zeros(len(samples)), False, self._smoothness, samples)

    def only(self, clients: list[int]) -> ModuleOracle:
        """The same for some of the clients."""
        X, y = ([part[i] for i in clients] for part in (self.X, self.y))
        names = [self.names[i] for i in clients]
        chosen = ModuleOracle(self.network, self.loss, self.correct, self.l2, X, y, names)
        if self._smoothness is not None:
            chosen._smoothness = self._smoothness[clients]
        return chosen

    def _largest_curvature(self, client: int, x: Tensor) -> float:
        _, g = self.gradient(client, x)
        step = float(torch.finfo(x.dtype).eps) ** 0.5 * (1 + float(x.norm()))

        def hessian_times(v: Tensor) -> Tensor:
            slope: Tensor = (self.gradient(client, x + step * v)[1] - g) / step
            return slope

        value = float(power_iteration(hessian_times, random_direction(x), steps=20, tolerance=0.01))
        return max(value, self.l2, 1e-6)

    def gradient(self, client: int, x: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """f_i(x) and ∇f_i(x), over all samples of the client or the given rows."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            total, gradient = x.new_zeros(()), torch.zeros_like(x)
            for value in self._values(client, leaf, rows):
                gradient += torch.autograd.grad(value, leaf)[0]
                total += value.detach()
        return total + self.l2 / 2 * (x @ x), gradient + self.l2 * x

    def curvature(self, client: int, x: Tensor, V: Tensor, rows: Tensor | None = None) -> Tensor:
        """VᵀH_iV for the columns of V, (d, k), by k Hessian-vector products that are not kept."""
        if self._twice:
            try:
                return self._differentiated(client, x, V, rows) + self.l2 * (V.mT @ V)
            except RuntimeError:  # an operation without a second derivative, such as fused attention
                self._twice = False
        Q = V.new_zeros(V.shape[1], V.shape[1])
        for row, v in zip(Q, V.mT, strict=True):
            row += self._differences(client, x, v, rows) @ V
        return Q

    def _differentiated(self, client: int, x: Tensor, V: Tensor, rows: Tensor | None) -> Tensor:
        """The derivatives of ⟨∇f_i, v⟩."""
        Q = V.new_zeros(V.shape[1], V.shape[1])
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            for value in self._values(client, leaf, rows):
                if _has_own_function(value):
                    raise RuntimeError("a function of the user's own")
                slope = torch.autograd.grad(value, leaf, create_graph=True)[0]
                for row, v in zip(Q, V.mT, strict=True):
                    row += torch.autograd.grad(slope, leaf, v, retain_graph=True)[0] @ V
        return Q

    def _differences(self, client: int, x: Tensor, v: Tensor, rows: Tensor | None) -> Tensor:
        """H_i v ≈ (∇f_i(x + hv) − ∇f_i(x − hv))/2h with h = ε^⅓ (1 + ‖x‖)/‖v‖, where rounding (ε/h) meets h²."""
        h = torch.finfo(x.dtype).eps ** (1 / 3) * (1 + float(x.norm())) / max(float(v.norm()), 1e-30)
        ahead, behind = (self.gradient(client, x + s * v, rows)[1] for s in (h, -h))
        slope: Tensor = (ahead - behind) / (2 * h)
        return slope

    def _values(self, client: int, x: Tensor, rows: Tensor | None) -> Iterator[Tensor]:
        """The mean loss in parts: one for every chunk of samples, their sum is f_i without the regulariser."""
        for X, y, share in self._chunks(client, rows):
            yield share * self.loss(functional_call(self.network, self.unflatten(x), (X,)), y)

    def _chunks(self, client: int, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor, float]]:
        X, y = self.X[client], self.y[client]
        if rows is not None:
            X, y = X[rows], y[rows]
        for first in range(0, len(X), CHUNK):
            part = X[first : first + CHUNK]
            yield part, y[first : first + CHUNK], len(part) / len(X)

    def evaluate(self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)) -> ModulePoint:
        """Losses and gradients of all clients at x."""
        rows = [self._draw(i, batch_size, Draws(key, [name])) for i, name in enumerate(self.names)]
        losses, gradients = x.new_empty(len(rows)), x.new_empty(len(rows), len(x))
        for i, picked in enumerate(rows):
            losses[i], gradients[i] = self.gradient(i, x, picked)
        return ModulePoint(self, x, rows, losses, gradients)

    def _draw(self, client: int, batch_size: int | None, draws: Draws) -> Tensor | None:
        """The client's next batch, as `Ragged.minibatch` draws it; `None` for all rows."""
        m = len(self.X[client])
        if batch_size is None or batch_size >= m:
            return None
        return (draws.uniform(batch_size)[0] * m).long().to(self.X[client].device)

    def losses(self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)) -> Tensor:
        """f_i(x) without the gradients."""
        zero = x.new_zeros(())
        with torch.no_grad():
            values = [
                sum(self._values(i, x, self._draw(i, batch_size, Draws(key, [name]))), zero)
                for i, name in enumerate(self.names)
            ]
        return torch.stack(values) + self.l2 / 2 * (x @ x)

    def local_updates(
        self, x: Tensor, at: ModulePoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> StackedDisplacements:
        """J local steps of every client, one client after the other."""
        rates = plan.scale / self.constants().smoothness if plan.rate is None else np.full(len(self.X), plan.rate)
        each = x.new_zeros(len(self.X), len(x))
        pull = each + shift(at, correction)
        for i, name in enumerate(self.names):
            draws = Draws(plan.key, [name])
            for _ in range(plan.of(i)):
                _, g = self.gradient(i, x - each[i], self._draw(i, plan.batch_size, draws))
                each[i] += float(rates[i]) * (g + pull[i] - plan.prox * each[i])
        return StackedDisplacements(each)

    def proximal_steps(self, at: ModulePoint, correction: Tensor, plan: ProximalPlan) -> StackedDisplacements:
        """The accelerated steps of `LinearOracle.proximal_steps`, one client after the other."""
        go, each = pace(plan, self.constants().smoothness, self.l2), torch.empty_like(at.gradients)
        for i, (c, rows) in enumerate(zip(at.gradients, at.rows, strict=True)):
            gradient = partial(self.gradient, i, rows=rows)
            model = LocalModel(gradient, at.x, float(at.losses[i]), correction - c, plan)
            each[i] = model.approach(float(go.rates[i]), float(go.momenta[i]), go.steps)
        return StackedDisplacements(each)

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """f_i(x), and the share of rightly classified samples where there are classes (else NaN)."""
        losses, accuracy = [], []
        parameters = self.unflatten(x)
        with torch.no_grad():
            for i in range(len(self.X)):
                loss, right = 0.0, 0.0
                for X, y, share in self._chunks(i, None):
                    output = functional_call(self.network, parameters, (X,))
                    correct = self.correct(output, y)
                    loss += share * float(self.loss(output, y))
                    right += float("nan") if correct is None else int(correct.sum())
                losses.append(loss + self.l2 / 2 * float(x @ x))
                accuracy.append(right / len(self.X[i]))
        return np.array(losses), np.array(accuracy)
