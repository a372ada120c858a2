r"""The convex losses of a linear model, each as a function of the predictions z = A x.

A client's loss is f_i(x) = (1/m_i) Σ_j ℓ(z_j, y_j) + (l2/2)‖x‖², so a loss only has to provide ℓ,
its derivative in z (the *residual*) and a bound on its second derivative. Every function acts on
the last axis, the outputs, and takes any leading axes, the last of them the samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, unknown
from scaffpd.models.arrays import Array

# Outputs along which torch does not vectorise the exponentials of a softmax.
SHORT = 32
# Below this, e^{2z} is negligible beside e^z.
LEFT = -30.0
# Points at which a custom loss is tried, and the error that is allowed there.
TRIED = 256
SLACK = 1e-9


class Accuracy(NamedTuple):
    """Errors of ℓ and, in norm, of its derivative: relative ones and absolute ones."""

    value: float
    offset: float
    slope: float
    jump: float


class Targets(NamedTuple):
    """Encoded targets, one array per client, and the number of outputs k of the linear map."""

    arrays: list[Array]
    outputs: int


class Loss(ABC):
    """ℓ(z, y) with its derivatives.

    `curvature` bounds the largest eigenvalue of ∂²ℓ/∂z². If that depends on y, the bound is
    curvature + `per_target`·y, for y >= 0. `quadratic` means that ∂²ℓ/∂z² is the same everywhere,
    `not_negative` that ℓ never falls below zero, as methods need it that leave losses at silos.
    """

    name: str
    curvature: float
    per_target: float = 0.0
    quadratic: bool = False
    called: str = ""  # the model that has it, in words
    labels: bool = False  # whether targets are labels
    binary: bool = False  # two of them
    not_negative: bool = False

    @abstractmethod
    def encode(self, labels: list[Array], names: Sequence[str], classes: int | None) -> Targets:
        """Check the clients' targets and bring them to the shape that other methods expect."""

    @abstractmethod
    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return ℓ(z, y) per sample."""

    @abstractmethod
    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        """Return ∂ℓ/∂z per sample and output."""

    def across(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the same for dense targets, with the outputs before the samples."""
        return self.residual(z.mT, y.mT).mT

    def dense(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Return targets in the shape of predictions, for frequent calls; `residual` takes both."""
        return y

    def bend(self, z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        """Return ∂²ℓ/∂z² t, for t with one more axis than z: (…, samples, outputs, columns)."""
        return self.bends(z, y)[..., None] * t

    @abstractmethod
    def bends(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the diagonal of ∂²ℓ/∂z², which is all of it unless `bend` is overridden."""

    @property
    def uneven(self) -> bool:
        """Return whether `steepness` differs from sample to sample."""
        return self.per_target != 0

    @property
    def even(self) -> bool:
        """Return whether ∂²ℓ/∂z² is a number times the identity, for any outputs."""
        return False

    def steepness(self, y: Tensor) -> Tensor:
        """Bound ∂²ℓ/∂z² of every sample, (samples,)."""
        if self.per_target == 0:
            return torch.full((len(y),), self.curvature, dtype=torch.float64, device=y.device)
        return self.curvature + self.per_target * y.double().amax(-1)

    def mean(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the expectation of y for a prediction z."""
        return z

    def link(self, mean: NDArray[np.float64], least: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return z for an expectation of y, of labels for shares of each, of `least` at least."""
        return mean

    def correct(self, z: Tensor, y: Tensor) -> Tensor | None:
        """Return whether each sample is classified correctly; `None` for regression."""
        return None

    def accuracy(self, outputs: int) -> Accuracy:
        """Bound the errors of `value` and `residual`, in units of rounding (2⁻⁵³)."""
        return Accuracy(64, 0, 64, 0)


class Squared(Loss):
    """Squared loss ℓ = ‖z − y‖²: f_i(x) = (1/m)‖A x − y‖² + (l2/2)‖x‖² as in the paper."""

    name = "squared"
    called = "least squares"
    not_negative = True
    curvature = 2.0
    quadratic = True

    def encode(self, labels: list[Array], names: Sequence[str], classes: int | None) -> Targets:
        """Encode real targets, one or more columns; with `classes`, labels as one-hot columns."""
        if classes is not None:
            numbers, _ = _class_numbers(labels, names, classes, "squared loss with classes")
            labels = [np.asarray(y == np.arange(classes), dtype=np.float64) for y in numbers]
        arrays: list[Array] = []
        for name, y in zip(names, labels, strict=True):
            if y.ndim not in (1, 2) or y.size == 0:
                raise InputError(
                    "targets-shape",
                    f"Client {name!r} has targets of shape {y.shape}; one or several columns are "
                    "expected.",
                )
            arrays.append(np.asarray(y, dtype=np.float64).reshape(len(y), -1))
            if arrays[-1].shape[1] != arrays[0].shape[1]:
                raise InputError(
                    "targets-differ",
                    f"Client {name!r} has {arrays[-1].shape[1]} target columns, but client "
                    f"{names[0]!r} has {arrays[0].shape[1]}.",
                )
        return Targets(arrays, arrays[0].shape[1])

    @property
    def even(self) -> bool:
        return type(self).bends is Squared.bends  # a subclass may be any function

    def accuracy(self, outputs: int) -> Accuracy:
        """Count one subtraction, one product, and a sum over outputs."""
        return Accuracy(outputs + 8, 0, 8, 0)

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return ‖z − y‖²."""
        squares = (z - y).square_()
        return squares.squeeze(-1) if squares.shape[-1] == 1 else squares.sum(-1)

    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        """Return 2(z − y)."""
        return (z - y).mul_(2)

    def bends(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(z, 2.0)

    def correct(self, z: Tensor, y: Tensor) -> Tensor | None:
        """Compare the largest output with the largest target if targets are one-hot."""
        binary = y.shape[-1] > 1 and bool(((y == 0) | (y == 1)).all())
        one_hot = binary and bool((y.sum(-1) == 1).all())
        return z.argmax(-1) == y.argmax(-1) if one_hot else None


class Logistic(Loss):
    """Logistic loss ℓ = log(1 + e^{s z}), s = 1 − 2y, y ∈ {0, 1}: log(1 + e^z) − y z.

    Targets are encoded as s, because the form in y loses all digits if a sample is fitted well.
    """

    name = "logistic"
    called = "logistic regression"
    labels = binary = not_negative = True
    curvature = 0.25

    def encode(self, labels: list[Array], names: Sequence[str], classes: int | None) -> Targets:
        """Encode labels 0 and 1 (or False and True), one per sample."""
        arrays: list[Array] = []
        for name, y in zip(names, labels, strict=True):
            flat = _one_label(name, y)
            wrong = flat[(flat != 0) & (flat != 1)]
            if wrong.size:
                raise InputError(
                    "label-not-binary",
                    f"Client {name!r} has the label {wrong[0]:.12g}; logistic loss takes labels 0 "
                    "and 1.",
                )
            arrays.append((1 - 2 * flat).reshape(-1, 1))
        return Targets(arrays, 1)

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return log(1 + e^{s z})."""
        return torch.logaddexp(y * z, z.new_zeros(())).squeeze(-1)

    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        """Return s/(1 + e^{−s z})."""
        return y * torch.sigmoid(y * z)

    def bends(self, z: Tensor, y: Tensor) -> Tensor:
        """Return σ(z) σ(−z)."""
        return torch.sigmoid(z) * torch.sigmoid(-z)

    def link(self, mean: NDArray[np.float64], least: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the log-odds of the second label."""
        logs = np.log(np.maximum(mean, least))
        return logs[:, 1:] - logs[:, :1]

    def correct(self, z: Tensor, y: Tensor) -> Tensor | None:
        """Return whether the label agrees with z > 0."""
        return ((z > 0) == (y < 0)).squeeze(-1)


class Softmax(Loss):
    """Softmax loss ℓ = log Σ_k e^{z_k} − z_y for integer labels y: the negative log-likelihood."""

    name = "softmax"
    called = "softmax regression"
    labels = not_negative = True
    curvature = 0.5

    def encode(self, labels: list[Array], names: Sequence[str], classes: int | None) -> Targets:
        """Encode whole numbers 0 … classes−1; without `classes`, the largest label decides."""
        arrays, outputs = _class_numbers(labels, names, classes, "softmax loss")
        return Targets([y.astype(np.int64) for y in arrays], outputs)

    def accuracy(self, outputs: int) -> Accuracy:
        """Bound the errors: if a sample is fitted well, ℓ and 1 − p_y are differences from one."""
        return Accuracy(64 + 2 * outputs, 64 + 4 * outputs, 0, 64 + 4 * outputs)

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return log Σ_k e^{z_k − z_y}: subtracting first leaves no rounding of large outputs."""
        return torch.logsumexp(z - z.gather(-1, y), -1)

    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        """Return softmax(z) − e_y, with e_y the unit vector of the label."""
        p = torch.softmax(z.mT, -2).mT if z.shape[-1] <= SHORT else torch.softmax(z, -1)
        if y.is_floating_point():
            return p.sub_(y)
        return p.scatter_add_(-1, y, torch.full_like(y, -1, dtype=p.dtype))

    def across(self, z: Tensor, y: Tensor) -> Tensor:
        """Return softmax(z) − e_y, without the views, which take a tenth of a local step."""
        return torch.softmax(z, -2).sub_(y)

    def dense(self, y: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Return the unit vectors e_y, stored output by output."""
        shape = (*y.shape[:-2], outputs, y.shape[-2])
        return torch.zeros(shape, dtype=dtype, device=y.device).scatter_(-2, y.mT, 1.0).mT

    def bend(self, z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        """Return p ∘ (t − ⟨p, t⟩) with p = softmax(z)."""
        p = torch.softmax(z, -1)[..., None]
        return p * (t - (p * t).sum(-2, keepdim=True))

    def bends(self, z: Tensor, y: Tensor) -> Tensor:
        """Return each p_k(1 − p_k)."""
        p = torch.softmax(z, -1)
        return p * (1 - p)

    def link(self, mean: NDArray[np.float64], least: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(np.maximum(mean, least))

    def correct(self, z: Tensor, y: Tensor) -> Tensor | None:
        """Return whether the largest output is the label."""
        return z.argmax(-1) == y.squeeze(-1)


class Poisson(Loss):
    r"""Poisson loss ℓ = y log(y/μ) + μ − y, μ = s(z) = log(1 + e^z), counts y >= 0.

    It is half of the Poisson deviance: the negative log-likelihood of y ~ Poisson(μ), up to a
    constant in x, and >= 0. With the usual μ = e^z the second derivative has no bound, and there is
    no step size and no certificate; s grows like e^z where counts are small, and like z where they
    are large. With σ = s' = 1/(1 + e^{−z}), σ' = σ(1 − σ):

        ℓ' = σ (1 − y/s),    ℓ'' = σ' + y h,    h = (log 1/s)'' = σ (σ − (1 − σ) s)/s².

    h >= 0, because σ/(1 − σ) = e^z >= log(1 + e^z) = s: ℓ is convex. h is e^z/2 far to the left,
    1/z² far to the right, and at most 0.1672 (at z = 0.50), so that ℓ'' <= 1/4 + 0.17 y.
    """

    name = "poisson"
    called = "Poisson regression"
    curvature = 0.25
    per_target = 0.17
    largest = float("inf")

    def encode(self, labels: list[Array], names: Sequence[str], classes: int | None) -> Targets:
        """Encode counts, one per sample; means of counts need not be whole."""
        arrays = [_one_label(name, y) for name, y in zip(names, labels, strict=True)]
        for name, y in zip(names, arrays, strict=True):
            if y.size and not y.min() >= 0:
                raise InputError(
                    "count-below-zero",
                    f"Client {name!r} has the target {y.min():.12g}; Poisson loss takes counts "
                    ">= 0.",
                )
        self.largest = max(float(y.max(initial=0.0)) for y in arrays)
        return Targets([y.reshape(-1, 1) for y in arrays], 1)

    def accuracy(self, outputs: int) -> Accuracy:
        """Bound the errors: at well-fitted samples numbers as large as y log y and y cancel."""
        y = self.largest
        offset = 64 * y * (1 + math.log1p(y)) if math.isfinite(y) else y
        return Accuracy(64, offset, 64, 64 * (1 + y))

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return y (log y − log s) + s − y, with log s = z − e^z/2 far to the left."""
        s = torch.logaddexp(z, z.new_zeros(()))
        log_s = torch.where(z < LEFT, z - z.exp() / 2, s.log())
        return (torch.where(y > 0, y * (y.log() - log_s), 0) + (s - y)).squeeze(-1)

    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        """Return σ − y σ/s."""
        return torch.sigmoid(z) - y * self._ratio(z)

    def bends(self, z: Tensor, y: Tensor) -> Tensor:
        """Return σ' + y h, with h = q (q − (1 − σ)) for q = σ/s, and e^z/2 far to the left."""
        other = torch.sigmoid(-z)
        q = self._ratio(z)
        h = torch.where(z < LEFT / 2, z.exp() / 2, q * (q - other).clamp(min=0))
        return torch.sigmoid(z) * other + y * h

    def mean(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return μ = log(1 + e^z)."""
        return np.logaddexp(z, 0.0)

    def link(self, mean: NDArray[np.float64], least: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return log(e^μ − 1)."""
        mean = np.maximum(mean, least)
        return mean + np.log(-np.expm1(-mean))

    @staticmethod
    def _ratio(z: Tensor) -> Tensor:
        """Return σ/s, from 1 far to the left to 1/z far to the right."""
        s = torch.logaddexp(z, z.new_zeros(()))
        return torch.where(z < LEFT, 1 - z.exp() / 2, torch.sigmoid(z) / s)


BUILT_IN = (Squared, Logistic, Softmax, Poisson)
LOSSES: dict[str, type[Loss]] = {loss.name: loss for loss in BUILT_IN}


def loss_named(name: str) -> Loss:
    if not isinstance(name, str) or name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    return LOSSES[name]()


def check_loss(loss: Loss, y: Tensor, outputs: int) -> None:
    """Refuse a custom loss that breaks its certificate's assumptions on sampled points.

    At pairs a, b of predictions of size 1e-2 to 1e2, with targets of the data:
    ⟨ℓ'(a) − ℓ'(b), a − b⟩ is between 0 (convex) and `curvature`·‖a − b‖² (smooth), and
    ℓ(b) ≥ ℓ(a) + ⟨ℓ'(a), b − a⟩ (ℓ' is the derivative of ℓ).
    """
    random = np.random.default_rng(0)
    own = y[torch.as_tensor(random.integers(0, len(y), TRIED))].cpu()
    own = own.double() if own.is_floating_point() else own
    size = 10.0 ** random.uniform(-2, 2, (2, TRIED, 1))
    a, b = torch.as_tensor(size * random.standard_normal((2, TRIED, outputs)))
    first = loss.residual(a, own)
    along = ((first - loss.residual(b, own)) * (a - b)).sum(-1)
    square = (a - b).square().sum(-1)
    values = loss.value(a, own), loss.value(b, own)
    above = values[1] - values[0] - (first * (b - a)).sum(-1)
    size_of = 1 + values[0].abs() + values[1].abs() + square
    steep = along > loss.steepness(own) * square + SLACK * (1 + square)
    for wrong, why in (
        (~(along >= -SLACK * (1 + square)), "it is not convex in z"),
        (steep, f"its second derivative exceeds curvature = {loss.curvature:g}"),
        (
            above < -SLACK * size_of,
            "`residual` is not the derivative of `value`, or it is not convex in z",
        ),
    ):
        if bool(wrong.any()):
            raise InputError(
                "loss-not-certifiable",
                f"The loss {loss.name!r} cannot be certified: {why}; use Module, which takes any "
                "loss.",
            )


def _class_numbers(
    labels: list[Array], names: Sequence[str], classes: int | None, what: str
) -> tuple[list[NDArray[np.float64]], int]:
    """Return class numbers, a column per client, and how many classes there are."""
    arrays = []
    for name, y in zip(names, labels, strict=True):
        flat = _one_label(name, y)
        wrong = flat[(flat < 0) | (flat != np.floor(flat))]
        if wrong.size:
            raise InputError(
                "label-not-a-class",
                f"Client {name!r} has the label {wrong[0]:.12g}; {what} takes whole numbers from "
                "0.",
            )
        arrays.append(flat.reshape(-1, 1))
    largest = [float(y.max()) for y in arrays]
    top = max(largest)
    client = names[int(np.argmax(largest))]
    if classes is not None and top >= classes:
        raise InputError(
            "label-beyond-classes",
            f"Client {client!r} has the label {top:.12g}, but {classes} classes allow 0 to "
            f"{classes - 1}.",
        )
    # Such as postcodes or dates: outputs for each would fill the memory.
    if classes is None and top >= max(1000, sum(map(len, arrays))):
        raise InputError(
            "label-beyond-samples",
            f"Client {client!r} has the label {top:.12g}, more than there are samples: number the "
            "classes from 0, or give `classes=`.",
        )
    return arrays, classes or max(2, 1 + int(top))


def _one_label(name: str, y: Array) -> NDArray[np.float64]:
    if y.ndim != 1 and not (y.ndim == 2 and y.shape[1] == 1):
        raise InputError(
            "labels-shape",
            f"Client {name!r} has labels of shape {y.shape}; one label per sample is expected.",
        )
    return np.asarray(y, dtype=np.float64).reshape(-1)
