r"""`Module`: any `torch.nn.Module`, f_i(x) = mean loss of the network with parameters x at client i + (l2/2)‖x‖².

Gradients come from autograd, for many clients at once (`models/network.py`). The loss need not be convex in x: then
there is no certificate. This file has the user's description, its checks, and the local training on top of gradients:
`LocalSGD`, `LocalAdam`, dropout seeded by a client's name and the round, and batch norm whose statistics travel with x.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scaffpd.errors import InputError, count, positive, real, unknown
from scaffpd.models.losses import Logistic, Loss, Softmax, Squared
from scaffpd.models.network import SEEN, MeanLoss, NetworkFunction, StackedRows, StreamedRows
from scaffpd.models.network_oracle import Correct, ModuleOracle
from scaffpd.models.numerics import uniform_at
from scaffpd.models.oracle import Arrays, ClientData, Oracle, dtype_name

TRIED = 16  # samples on which a network is tried out before any work
STATISTICS = ("averaged", "own")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSSES: dict[str, type[Loss]] = {
    "cross_entropy": Softmax,
    "softmax": Softmax,
    "squared": Squared,
    "logistic": Logistic,
}


@dataclass(frozen=True)
class LocalSGD:
    """Local steps by SGD: v ← βv + (1 − β)g, u ← u − ηv (Nesterov: u − η(βv + (1 − β)g) with the new v).

    v starts at zero in every round. The factor 1 − β keeps η as it is without momentum: PyTorch's rate is η(1 − β).
    g is the corrected gradient g_i(u) − c_i + c; clipping comes before the correction, weight decay after it. So means
    over local steps remain means of gradients, as SCAFFOLD's option II and Scaff-PD on networks need them; active
    clipping makes them biased.

    Args:
        momentum: β in [0, 1).
        nesterov: look ahead.
        weight_decay: like l2, but in local steps only.
        clip: upper bound on ‖g_i(u)‖.
    """

    corrects: ClassVar[bool] = True

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        _check_optimizer(self, momentum=self.momentum)

    def start(self, D: Tensor) -> tuple[Tensor, ...]:
        """Return a zero velocity."""
        return (torch.zeros_like(D),) if self.momentum else ()

    def clipped(self, g: Tensor) -> Tensor:
        """Scale every client's gradient, (n, d), to at most `clip`."""
        return (
            g
            if self.clip is None
            else g * (self.clip / g.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1)
        )

    def direction(
        self, g: Tensor, U: Tensor, state: tuple[Tensor, ...], step: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the direction to subtract, in units of η, and the next state."""
        g = g + self.weight_decay * U if self.weight_decay else g
        if not self.momentum:
            return g, state
        v = self.momentum * state[0] + (1 - self.momentum) * g
        return (self.momentum * v + (1 - self.momentum) * g if self.nesterov else v), (v,)


@dataclass(frozen=True)
class LocalAdam(LocalSGD):
    """Local steps by AdamW (Kingma, Ba, 2015; Loshchilov, Hutter, 2019), with moments reset in every round.

    Adam divides by √v, so that neither c − c_i in g nor a mean over its steps would cancel drift: methods that always
    correct local steps (SCAFFOLD, ProxSkip) are refused, and Scaff-PD leaves corrections out.

    Args:
        momentum: β₁.
        second: β₂.
        epsilon: added to √v.
        weight_decay: u ← (1 − η·decay) u.
        clip: see `LocalSGD`.
    """

    corrects: ClassVar[bool] = False

    momentum: float = 0.9
    nesterov: bool = field(default=False, init=False, repr=False)
    second: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_optimizer(self, momentum=self.momentum, second=self.second)
        positive("LocalAdam", "epsilon", self.epsilon)

    def start(self, D: Tensor) -> tuple[Tensor, ...]:
        """Return zero moments."""
        return torch.zeros_like(D), torch.zeros_like(D)

    def direction(
        self, g: Tensor, U: Tensor, state: tuple[Tensor, ...], step: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return m̂/(√v̂ + ε) + decay·u."""
        first = self.momentum * state[0] + (1 - self.momentum) * g
        second = self.second * state[1] + (1 - self.second) * g.square()
        m = first / (1 - self.momentum ** (step + 1))
        v = second / (1 - self.second ** (step + 1))
        return m / (v.sqrt() + self.epsilon) + self.weight_decay * U, (first, second)


def _check_optimizer(own: LocalSGD, **shares: float) -> None:
    name = type(own).__name__
    for what, value in shares.items():
        if not 0 <= real(name, what, value) < 1:
            raise InputError("check-optimizer", f"{name} needs 0 <= {what} < 1, got {value!r}.")
    if own.nesterov and not own.momentum:
        raise InputError("momentum-nesterov-true", f"{name} needs momentum > 0 with nesterov=True.")
    if not 0 <= real(name, "weight_decay", own.weight_decay) < float("inf"):
        raise InputError(
            "weight-decay-finite",
            f"{name} needs weight_decay >= 0 and finite, got {own.weight_decay!r}.",
        )
    if own.clip is not None:
        positive(name, "clip", own.clip)


class SeededLayer(nn.Module):
    """Layer whose random numbers depend only on `seed`, that is on the client and the step, not on the batch."""

    seeded = True

    def __init__(self, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.seed: Tensor
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64), persistent=False)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers in [0, 1)."""
        return uniform_at(self.seed + self.layer * 1_000_003, shape)


class SeededDropout(SeededLayer):
    """Seeded dropout of entries, or of whole channels."""

    def __init__(self, p: float, whole: bool, layer: int) -> None:
        super().__init__(layer)
        self.p = p
        self.whole = whole

    def forward(self, X: Tensor) -> Tensor:
        """Drop entries, or whole channels, and scale up the others, in training mode."""
        if not self.training:
            return X
        shape = (*X.shape[:2], *(1 for _ in X.shape[2:])) if self.whole else X.shape
        return X * (self.uniform(*shape) >= self.p).to(X.dtype) / (1 - self.p)


class Augment(SeededLayer):
    """Layer that changes its input at random in local steps, and passes it on unchanged in losses.

        flip = sp.Augment(lambda X, u: torch.where(u[:, :1, None, None] < 0.5, X.flip(-1), X))
        model = sp.Module(nn.Sequential(flip, network))

    Args:
        function: (batch, u) ↦ batch of the same shape, with `numbers` independent u in [0, 1) for every sample, which
            follow from the client's name, the round and the step.
        numbers: how many.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], numbers: int = 1) -> None:
        super().__init__()
        self.function, self.numbers = function, count("Augment", "numbers", numbers)

    def forward(self, X: Tensor) -> Tensor:
        """Return the changed batch in training mode."""
        if not self.training:
            return X
        return self.function(X, self.uniform(len(X), self.numbers).float())


class SeenBatchNorm(nn.Module):
    """Batch norm in local steps: normalises by the batch, and stores mean and variance in `SEEN`.

    Args:
        layer: the layer whose parameters and statistics it takes, under the same names.
        number: its place among the network's layers, in any order of the pass.
    """

    def __init__(self, layer: Any, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.weight = layer.weight
        self.bias = layer.bias
        self.eps = layer.eps
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)
        self.seen_momentum = 0.1 if layer.momentum is None else float(layer.momentum)

    def forward(self, X: Tensor) -> Tensor:
        """Return (X − mean)/√(variance + ε), times weight plus bias."""
        axes = [k for k in range(X.ndim) if k != 1]
        count = X.numel() // X.shape[1]
        shape = [1, -1, *(1 for _ in X.shape[2:])]
        mean = X.mean(axes)
        variance = X.var(axes, correction=0)
        SEEN.found[self.number] = mean.detach(), variance.detach() * (count / max(count - 1, 1))
        out: Tensor = (X - mean.view(shape)) / (variance.view(shape) + self.eps).sqrt()
        return out if self.weight is None else out * self.weight.view(shape) + self.bias.view(shape)


def training_copy(network: nn.Module) -> nn.Module:
    """Copy the network for local steps: replace random layers and batch norm by seeded ones."""
    trained = copy.deepcopy(network)
    for number, (path, part) in enumerate(list(trained.named_modules())):
        new: nn.Module | None = None
        if isinstance(part, Augment):
            part.layer = number
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
            new = SeededDropout(part.p, not isinstance(part, nn.Dropout), number)
        elif isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:
            new = SeenBatchNorm(part, number)
        if new is not None and not path:
            return new
        if new is not None:
            parent, _, name = path.rpartition(".")
            setattr(trained.get_submodule(parent), name, new)
    return trained


@dataclass(frozen=True)
class Module:
    """Description of a network; bind it to data with a `Cohort`.

    Dropout is on in local steps, with masks that follow from the client's name and the round, and off in losses, and so
    is `Augment`. Batch norm normalises local steps by their batch; losses use statistics, see below. Layers in .eval()
    mode do not change, and parameters that require no gradient stay out of x.

    Args:
        module: any `torch.nn.Module` from a batch of features to outputs; it is copied, x⁰ are its parameters.
        loss: "cross_entropy" (or "softmax"), "squared", "logistic", as in `Linear`; or a function (outputs, targets) →
            mean loss over the batch.
        l2: the regulariser (l2/2)‖x‖².
        optimizer: how local steps use a gradient, `LocalSGD(...)` or `LocalAdam(...)`.
        transform: a function of a batch of features, before the network (`lambda X: X.float() / 255` for bytes).
        precision: "bf16" or "fp16" computes products in that format (autocast); x keeps its own.
        statistics: of batch norm: "averaged" as part of x, or "own" (FedBN): a client's losses, and those of its
            held-out rows, use the statistics of its training rows at x, from a pass without dropout and `Augment`.
            ∇f_i treats these s_i(x) as constants.
    """

    module: nn.Module
    loss: str | MeanLoss = "cross_entropy"
    l2: float = 0.0
    optimizer: LocalSGD = field(default_factory=LocalSGD)
    transform: Callable[[Tensor], Tensor] | None = None
    precision: str | None = None
    statistics: str = "averaged"

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise InputError(
                "module-torch-nn",
                f"Module needs a torch.nn.Module, got {type(self.module).__name__}.",
            )
        if not callable(self.loss) and (not isinstance(self.loss, str) or self.loss not in LOSSES):
            raise unknown("loss", self.loss, LOSSES)
        if not 0 <= real("Module", "l2", self.l2) < float("inf"):
            raise InputError(
                "module-l2-finite", f"Module needs l2 >= 0 and finite, got {self.l2!r}."
            )
        if not isinstance(self.optimizer, LocalSGD):
            raise InputError(
                "module-optimizer-localsgd",
                f"Module needs optimizer=LocalSGD(...) or LocalAdam(...), got {self.optimizer!r}.",
            )
        if self.transform is not None and not callable(self.transform):
            raise InputError(
                "module-function-transform",
                f"Module needs a function for transform, got {self.transform!r}.",
            )
        if self.precision is not None and self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.statistics not in STATISTICS:
            raise unknown("statistics", self.statistics, STATISTICS)
        if any(
            isinstance(p, nn.parameter.UninitializedParameter) for p in self.module.parameters()
        ):
            raise InputError(
                "module-network-whose",
                "Module needs a network whose lazy layers know their sizes: run it once first.",
            )
        if not any(p.requires_grad for p in self.module.parameters()):
            raise InputError(
                "module-least-parameter",
                "Module needs at least one parameter that requires a gradient.",
            )
        for name, part in self.module.named_modules():
            _refuse_random_or_stateful(name, part)

    def __repr__(self) -> str:
        """Name architecture (a hash, if it is long), loss and l2, without addresses: the same in every process."""
        network = " ".join(repr(self.module).split())
        if len(network) > 100:
            network = (
                f"{type(self.module).__name__} {hashlib.sha256(network.encode()).hexdigest()[:8]}"
            )
        said = [f"Module({network}, loss={_name(self.loss)!r}, l2={self.l2!r}"]
        if self.optimizer != LocalSGD():
            said.append(f"optimizer={self.optimizer!r}")
        if self.transform is not None:
            said.append(f"transform={_name(self.transform)}")
        if self.statistics != "averaged":
            said.append(f"statistics={self.statistics!r}")
        return (
            ", ".join(said if self.precision is None else [*said, f"precision={self.precision!r}"])
            + ")"
        )

    def network(self, x: NDArray[np.floating[Any]] | Tensor) -> nn.Module:
        """Return a copy of the network with the parameters x, and its statistics if x has them."""
        network = copy.deepcopy(self.module)
        flat = torch.as_tensor(x).detach()
        function = self._function(network)
        length = function.length if self.statistics == "own" else sum(function.sizes)
        if flat.shape != (length,):
            raise InputError(
                "shape-network-parameters",
                f"x has shape {tuple(flat.shape)}, but the network has {length} parameters.",
            )
        with torch.no_grad():
            for name, values in function.unflatten(flat).items():
                target = function.parameters.get(name, network.state_dict(keep_vars=True).get(name))
                assert target is not None
                target.copy_(values)
        return network

    def _function(self, network: nn.Module) -> NetworkFunction:
        """Return the network's loss as a function of x; `network` itself holds the start."""
        trained = training_copy(network)
        loss: MeanLoss | str = self.loss
        named = LOSSES[loss]() if isinstance(loss, str) else None
        mean = _mean(named) if named is not None else loss
        assert callable(mean)
        precision = None if self.precision is None else PRECISIONS[self.precision]
        return NetworkFunction(
            network, trained, mean, named, float(self.l2), self.transform, precision
        )

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        """Bind to the clients' checked data."""
        names = data.names
        device = data.device
        network = copy.deepcopy(self.module).to(device=device, dtype=data.dtype)
        function = self._function(network)
        network.eval()
        kind = next(iter(function.parameters.values())).dtype
        held = like if isinstance(like, ModuleOracle) else None
        bind = partial(
            ModuleOracle,
            names=names,
            optimizer=self.optimizer,
            fed_bn=self.statistics == "own",
            like=held,
        )
        if not data.labels:
            return self._streamed(function, data, kind, bind)
        features = _stacked([np.asarray(a) for a in data.features], device, kind)
        y = _stacked(data.labels, device, kind) if function.named is None else None
        outputs = _try_out(function, features[: min(TRIED, len(data.features[0]))])
        sizes = [len(a) for a in data.features]
        if y is not None:
            _try_out_loss(function.loss, outputs, y[: len(outputs)])
            return bind(function, class_correct, StackedRows(features, y, sizes))
        assert function.named is not None
        arrays = _encoded(str(self.loss), function.named, data.labels, names, outputs)
        rows = StackedRows(features, _stacked(arrays, device, kind), sizes)
        return bind(function, loss_correct(function.named), rows)

    def _streamed(
        self,
        function: NetworkFunction,
        data: ClientData,
        kind: torch.dtype,
        bind: Callable[..., ModuleOracle],
    ) -> ModuleOracle:
        """Bind to clients whose rows are read when needed."""
        correct = class_correct if function.named is None else loss_correct(function.named)
        name = str(self.loss)
        width = list[Tensor]()

        def read(source: Any, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
            pairs = [source[int(row)] for row in rows]
            X, y = (np.stack([np.asarray(pair[k]) for pair in pairs]) for k in (0, 1))
            features = _stacked([X], torch.device("cpu"), kind)
            if function.named is None or not width:
                return features, _stacked([y], torch.device("cpu"), kind)
            arrays = _encoded(name, function.named, [y], ["client"], width[0])
            return features, _stacked(arrays, torch.device("cpu"), kind)

        rows = StreamedRows(data.features, read, data.device)
        X, y = rows.part(0, 0, min(TRIED, rows.sizes[0]))
        width.append(_try_out(function, X))
        if function.named is None:
            _try_out_loss(function.loss, width[0], y)
        return bind(function, correct, rows)


def _name(function: Any) -> str:
    return (
        function
        if isinstance(function, str)
        else getattr(function, "__qualname__", type(function).__name__)
    )


def _refuse_random_or_stateful(name: str, part: nn.Module) -> None:
    batch_norm = isinstance(part, nn.modules.batchnorm._BatchNorm)
    if batch_norm and not part.track_running_stats:
        raise InputError(
            "module-layer-batch",
            f"Module layer {name!r} is a batch norm without running statistics, so that a sample's output depends on "
            "the others of its batch: set track_running_stats=True, or use GroupNorm.",
        )
    if (
        isinstance(part, nn.modules.instancenorm._InstanceNorm)
        and part.training
        and part.track_running_stats
    ):
        raise InputError(
            "module-layer-keeps",
            f"Module layer {name!r} keeps running statistics while it trains: set track_running_stats=False, or call "
            ".eval().",
        )
    known = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    dropout = (
        part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
    )
    noise = isinstance(part, nn.RReLU) or (
        isinstance(dropout, float) and dropout > 0 and not isinstance(part, known)
    )
    if part.training and noise:
        raise InputError(
            "module-layer-noise",
            f"Module layer {name!r} has noise in training mode that cannot be seeded per client: use nn.Dropout, or "
            "call .eval().",
        )


def _stacked(arrays: Arrays, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy all clients' rows into one tensor, floats in the network's own type; whole numbers stay, for embeddings."""
    floats = any(a.dtype.kind == "f" for a in arrays)
    common = np.result_type(*{a.dtype for a in arrays})
    kind = dtype if floats else torch.from_numpy(np.empty(0, dtype=common)).dtype
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    out = torch.empty(shape, dtype=kind, device=device)
    first = 0
    for array in arrays:
        out[first : first + len(array)] = torch.from_numpy(
            np.require(array, requirements=["C", "W"])
        )
        first += len(array)
    return out


def _try_out(function: NetworkFunction, X: Tensor) -> Tensor:
    """Return the network's outputs on a few samples, or raise with the reason."""
    x = function.start()
    try:
        with torch.no_grad():
            first = function.outputs(x, X)
            again = function.outputs(x, X)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            "network-take-samples",
            f"The network cannot take samples of shape {tuple(X.shape[1:])} and type {dtype_name(X.dtype)}: {reason}.",
        ) from None
    if not isinstance(first, Tensor) or first.ndim == 0 or len(first) != len(X):
        raise InputError(
            "network-must-return",
            "The network must return one tensor with a row of outputs for every sample.",
        )
    if not torch.equal(first.nan_to_num(), again.nan_to_num()):
        raise InputError(
            "outputs-network-differ",
            "The outputs of the network differ from call to call: switch its randomness off with .eval().",
        )
    return first


def _encoded(name: str, loss: Loss, labels: Arrays, names: list[str], outputs: Tensor) -> Arrays:
    width = outputs.numel() // len(outputs)
    if outputs.ndim > 2:
        raise InputError(
            "loss-takes-vector",
            f"Loss {name!r} takes a vector of outputs for every sample, but the network gives shape "
            f"{tuple(outputs.shape[1:])}: hand over a function (outputs, targets) → mean loss.",
        )
    targets = loss.encode(labels, names, None if isinstance(loss, Squared) else width)
    if targets.outputs != width:
        raise InputError(
            "loss-outputs-these",
            f"Loss {name!r} needs {targets.outputs} outputs for these targets, but the network has {width}.",
        )
    return targets.arrays


def _try_out_loss(loss: MeanLoss, outputs: Tensor, y: Tensor) -> None:
    try:
        value = loss(outputs, y)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            "loss-function-fails", f"The loss function fails on the network's outputs: {reason}."
        ) from None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError(
            "loss-function-must",
            "The loss function must return the mean loss of the batch, a tensor with a single number.",
        )


def _mean(loss: Loss) -> MeanLoss:
    return lambda output, y: loss.value(output.reshape(len(y), -1), y).mean()


def loss_correct(loss: Loss) -> Correct:
    """Return the function that marks correctly classified samples, for a named loss."""
    return lambda output, y: loss.correct(output.reshape(len(y), -1), y)


def class_correct(output: Tensor, y: Tensor) -> Tensor | None:
    """Compare the largest output with class numbers, for a user's own loss; `None` without classes."""
    labels = output.ndim == 2 and output.shape[1] > 1 and y.ndim == 1 and not y.is_floating_point()
    return output.argmax(-1) == y if labels else None
