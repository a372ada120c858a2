r"""`Module`: any `torch.nn.Module`, f_i(x) = mean loss with parameters x at client i + (l2/2)‖x‖².

Gradients come from autograd, for many clients at once (`network.py`, `network_oracle.py`). The loss
need not be convex in x: then there is no certificate.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from scaffpd.errors import (
    BELOW_ONE,
    NOT_NEGATIVE,
    InputError,
    first_line,
    positive,
    ranged,
    unknown,
)
from scaffpd.models.arrays import Array, dtype_name
from scaffpd.models.losses import Logistic, Loss, Softmax, Squared
from scaffpd.models.network import MeanLoss, NetworkFunction
from scaffpd.models.network_oracle import Correct, ModuleOracle, StackedRows
from scaffpd.models.oracle import ClientData, Oracle

TRIED = 16  # samples on which a network is tried out before any work
PRECISIONS = {"bf16": torch.bfloat16}
LOSSES: dict[str, type[Loss]] = {
    "cross_entropy": Softmax,
    "softmax": Softmax,
    "squared": Squared,
    "logistic": Logistic,
}
FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


@dataclass(frozen=True)
class Module:
    """Description of a network; bind it to data with a `Cohort`.

    Dropout is on in local steps, with masks that follow from the client's name and the round, and
    off in losses. Layers in .eval() mode do not change, and parameters that require no gradient
    stay out of x. Batch norm must be in .eval() mode: a sample's loss would depend on the others of
    its batch.

    With a momentum β local steps are v ← βv + (1 − β)g, u ← u − ηv, where v starts at zero in every
    round and g = g_i(u) − c_i + c is the corrected gradient. The factor 1 − β leaves η what it is
    without momentum: PyTorch's rate is η(1 − β). Clipping comes before the correction. So means
    over local steps remain means of gradients, as SCAFFOLD's option II and Scaff-PD on networks
    need them; active clipping makes them biased.

    Args:
        module: any `torch.nn.Module` from a batch of features to outputs; it is copied, x⁰ are its
            parameters.
        loss: "cross_entropy" (or "softmax"), "squared", "logistic", as in `Linear`; or a function
            (outputs, targets) → mean loss over the batch.
        l2: the regulariser (l2/2)‖x‖².
        momentum: β in [0, 1).
        clip: upper bound on ‖g_i(u)‖ in local steps.
        precision: "bf16" computes products in that format (autocast); x has its own.
    """

    module: nn.Module
    loss: str | MeanLoss = "cross_entropy"
    l2: float = 0.0
    momentum: float = 0.0
    clip: float | None = None
    precision: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise InputError(
                "not-a-network",
                f"Module needs a torch.nn.Module, got {type(self.module).__name__}.",
            )
        if not callable(self.loss) and (not isinstance(self.loss, str) or self.loss not in LOSSES):
            raise unknown("loss", self.loss, LOSSES)
        ranged("Module", "l2", self.l2, NOT_NEGATIVE, "l2-out-of-range")
        ranged("Module", "momentum", self.momentum, BELOW_ONE, "momentum-out-of-range")
        if self.clip is not None:
            positive("Module", "clip", self.clip)
        if self.precision is not None and self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        parameters = list(self.module.parameters())
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise InputError(
                "lazy-layers",
                "Module needs a network whose lazy layers know their sizes: run it once first.",
            )
        if not any(p.requires_grad for p in parameters):
            raise InputError(
                "nothing-to-train",
                "Module needs at least one parameter that requires a gradient.",
            )
        for name, part in self.module.named_modules():
            _refuse_random_or_stateful(name, part)

    def __repr__(self) -> str:
        """Name architecture (a hash, if it is long) and settings, the same in every process."""
        network = " ".join(repr(self.module).split())
        if len(network) > 100:
            mark = hashlib.sha256(network.encode()).hexdigest()[:8]
            network = f"{type(self.module).__name__} {mark}"
        loss = self.loss
        if not isinstance(loss, str):
            loss = getattr(loss, "__qualname__", type(loss).__name__)
        parts = [f"Module({network}, loss={loss!r}, l2={self.l2!r}"]
        options = {"momentum": 0.0, "clip": None, "precision": None}
        given = {name: getattr(self, name) for name in options}
        parts += [f"{name}={value!r}" for name, value in given.items() if value != options[name]]
        return ", ".join(parts) + ")"

    def network(self, x: ArrayLike | Tensor) -> nn.Module:
        network = copy.deepcopy(self.module)
        trained = [p for p in network.parameters() if p.requires_grad]
        flat = torch.as_tensor(x).detach()
        length = sum(p.numel() for p in trained)
        if flat.shape != (length,):
            raise InputError(
                "point-length",
                f"x has shape {tuple(flat.shape)}, but the network has {length} parameters.",
            )
        with torch.no_grad():
            parts = torch.split(flat, [p.numel() for p in trained])
            for p, part in zip(trained, parts, strict=True):
                p.copy_(part.view_as(p))
        return network

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        network = copy.deepcopy(self.module).to(device=data.device, dtype=data.dtype)
        kind = next(p for p in network.parameters() if p.requires_grad).dtype
        named = LOSSES[self.loss]() if isinstance(self.loss, str) else None
        loss = self.loss if named is None else _mean(named)
        assert callable(loss)
        precision = None if self.precision is None else PRECISIONS[self.precision]
        function = NetworkFunction(network, loss, named, precision)
        X = _stacked([np.asarray(a) for a in data.features], data.device, kind)
        outputs = _try_out(function, X[: min(TRIED, len(data.features[0]))])
        labels = data.labels
        correct: Correct = class_correct
        if named is not None:
            labels = _encoded(str(self.loss), named, labels, data.names, outputs)
            correct = _loss_correct(named)
        y = _stacked(labels, data.device, kind)
        if named is None:
            _try_out_loss(function.loss, outputs, y[: len(outputs)])
        rows = StackedRows(X, y, [len(a) for a in data.features])
        return ModuleOracle(
            function, float(self.l2), correct, rows, data.names, self.momentum, self.clip
        )


def _refuse_random_or_stateful(name: str, part: nn.Module) -> None:
    """Refuse layers whose outputs depend on other samples, on the past, or on unseeded noise."""
    by_batch = isinstance(part, _BatchNorm) and (part.training or not part.track_running_stats)
    instance = isinstance(part, _InstanceNorm) and part.training and part.track_running_stats
    if by_batch or instance:
        raise InputError(
            "layer-with-statistics",
            f"Module layer {name!r} normalises by its batch or changes its running statistics "
            "while it trains: use GroupNorm, or running statistics and .eval().",
        )
    known = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    dropout = part.p if isinstance(part, _DropoutNd) else getattr(part, "dropout", 0.0)
    other = isinstance(dropout, float) and dropout > 0 and not isinstance(part, known)
    if part.training and (other or isinstance(part, nn.RReLU)):
        raise InputError(
            "layer-with-noise",
            f"Module layer {name!r} has noise in training mode that cannot be seeded per client: "
            "use nn.Dropout, or call .eval().",
        )


def _stacked(arrays: list[Array], device: torch.device, dtype: torch.dtype) -> Tensor:
    floats = any(a.dtype.kind == "f" for a in arrays)
    common = np.result_type(*{a.dtype for a in arrays})
    kind = dtype if floats else torch.from_numpy(np.empty(0, dtype=common)).dtype
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    out = torch.empty(shape, dtype=kind, device=device)
    parts = torch.split(out, [len(array) for array in arrays])
    for part, array in zip(parts, arrays, strict=True):
        part.copy_(torch.from_numpy(np.require(array, requirements=["C", "W"])))
    return out


def _try_out(function: NetworkFunction, X: Tensor) -> Tensor:
    x = function.start()
    try:
        with torch.no_grad():
            first = function.outputs(x, X)
            again = function.outputs(x, X)
    except FAILURES as error:
        shape = tuple(X.shape[1:])
        raise InputError(
            "samples-do-not-fit",
            f"The network cannot take samples of shape {shape} and type {dtype_name(X.dtype)}: "
            f"{first_line(error)}.",
        ) from None
    if not isinstance(first, Tensor) or first.ndim == 0 or len(first) != len(X):
        raise InputError(
            "outputs-not-rows",
            "The network must return one tensor with a row of outputs for every sample.",
        )
    if not torch.equal(first.nan_to_num(), again.nan_to_num()):
        raise InputError(
            "random-outputs",
            "The outputs of the network differ from call to call: switch its randomness off with "
            ".eval().",
        )
    return first


def _encoded(
    name: str, loss: Loss, labels: list[Array], names: list[str], outputs: Tensor
) -> list[Array]:
    """Encode labels for a named loss, and refuse outputs that do not fit them."""
    width = outputs.numel() // len(outputs)
    if outputs.ndim > 2:
        raise InputError(
            "outputs-not-vectors",
            f"Loss {name!r} takes a vector of outputs for every sample, but the network gives "
            f"shape {tuple(outputs.shape[1:])}: pass a function (outputs, targets) → mean loss.",
        )
    targets = loss.encode(labels, names, None if isinstance(loss, Squared) else width)
    if targets.outputs != width:
        raise InputError(
            "wrong-number-of-outputs",
            f"Loss {name!r} needs {targets.outputs} outputs for these targets, but the network "
            f"has {width}.",
        )
    return targets.arrays


def _try_out_loss(loss: MeanLoss, outputs: Tensor, y: Tensor) -> None:
    try:
        value = loss(outputs, y)
    except FAILURES as error:
        raise InputError(
            "loss-fails",
            f"The loss function fails on the network's outputs: {first_line(error)}.",
        ) from None
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError(
            "loss-not-a-mean",
            "The loss function must return the mean loss of the batch, a tensor with a single "
            "number.",
        )


def _mean(loss: Loss) -> MeanLoss:
    return lambda output, y: loss.value(output.reshape(len(y), -1), y).mean()


def _loss_correct(loss: Loss) -> Correct:
    return lambda output, y: loss.correct(output.reshape(len(y), -1), y)


def class_correct(output: Tensor, y: Tensor) -> Tensor | None:
    """Compare the largest output with class numbers, for a user's loss; `None` without classes."""
    labels = output.ndim == 2 and output.shape[1] > 1 and y.ndim == 1 and not y.is_floating_point()
    return output.argmax(-1) == y if labels else None
