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
# The largest z whose e^z is a number.
HIGHEST = 700.0
TINY = 1e-30  # of a mean whose quotients are still numbers, in single precision as well
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

    `curvature` bounds the largest eigenvalue of ∂²ℓ/∂z²; it is infinite where nothing does.
    `concordance` is R with |D³ℓ[t,t,v]| <= R max_{k,l} |v_k − v_l| D²ℓ[t,t], of one output R|v|,
    for certificates that need no curvature everywhere (infinite if unknown). `quadratic` means that
    ∂²ℓ/∂z² is the same everywhere, `not_negative` that ℓ never falls below zero, as methods need it
    that leave losses at silos.
    """

    name: str
    curvature: float
    concordance: float = math.inf
    fastest: float = 1.0  # the most that `widening` returns
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
    def smooth(self) -> bool:
        """Return whether ∂²ℓ/∂z² has a bound; else steps look at where they are."""
        return math.isfinite(self.curvature)

    @property
    def even(self) -> bool:
        """Return whether ∂²ℓ/∂z² is a number times the identity, for any outputs."""
        return False

    def steepness(self, y: Tensor) -> Tensor:
        """Bound ∂²ℓ/∂z² of every sample, (samples,); estimate it if it is not `smooth`."""
        return torch.full((len(y),), self.curvature, dtype=torch.float64, device=y.device)

    def widening(self, z: Tensor, y: Tensor) -> Tensor | float:
        """Return what `concordance` is to be multiplied by per sample, for ∂²ℓ/∂z² at z to fall no
        faster than by e^{−R|v|} on the way to any z + v.
        """
        return 1.0

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
    concordance = 0.0
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
    concordance = 1.0

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
    concordance = 1.0

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
    r"""Half the deviance of counts with the log link: the mean is μ = e^z, of rates y >= 0.

        ℓ = (μ − y)/(1 + αy) φ(x) + y log(1 + w),    φ(x) = log(1 + x)/x,
                x = α(μ − y)/(1 + αy),  w = (y − μ)/(μ(1 + αy))
        ℓ' = (μ − y)/(1 + αμ),    ℓ'' = μ (1 + αy)/(1 + αμ)²,    |ℓ‴| <= ℓ''

    With α = 0 it is Poisson's, μ − y + y log(y/μ); else the negative binomial's of size 1/α, with
    the variance μ + αμ². It is the negative log-likelihood up to a constant in z, and >= 0. A count
    of exposure E has the loss E ℓ(z, y/E) with αE for α (`Weighted`). ℓ'' has no bound: `steepness`
    is what it is near z = 0 or a good fit, and local steps look at where they are
    (`local_steps.py`).

    Args:
        dispersion: α.
        exposed: whether targets are rates with their exposures beside them.
    """

    name = "poisson"
    called = "Poisson regression"
    curvature = math.inf
    concordance = 1.0
    not_negative = True

    def __init__(self, dispersion: float = 0.0, exposed: bool = False) -> None:
        self.dispersion = dispersion
        self.columns = 1 + exposed
        self.called = "negative binomial regression" if dispersion else self.called
        self.largest = self.offset = math.inf

    def encode(self, labels: list[Array], names: Sequence[str], classes: int | None) -> Targets:
        """Encode rates, one per sample, beside exposures where α is not zero; they need not be
        whole.
        """
        arrays = []
        for name, y in zip(names, labels, strict=True):
            flat = _one_label(name, y if self.columns == 1 else y[:, 0])
            E = np.ones(len(y)) if self.columns == 1 else np.asarray(y[:, 1], np.float64)
            arrays.append(np.column_stack([flat, E] if self.dispersion else [flat]))
            y = flat
            if y.size and not y.min() >= 0:
                raise InputError(
                    "count-below-zero",
                    f"Client {name!r} has the target {y.min():.12g}; Poisson loss takes counts "
                    ">= 0.",
                )
        every = np.concatenate(arrays)
        y = every[:, 0]
        terms = y * (1 + np.abs(np.log(np.maximum(y, 1e-300))))
        if self.dispersion:
            alpha = self.dispersion * every[:, 1]
            terms = terms + (y + 1 / alpha) * np.log1p(alpha * y)
        self.largest = float(y.max(initial=0.0))
        self.offset = float(terms.max(initial=0.0))
        return Targets(list[Array](arrays), 1)

    def accuracy(self, outputs: int) -> Accuracy:
        """Bound the errors: at well-fitted samples numbers as large as y log y and y cancel."""
        return Accuracy(64, 64 * self.offset, 64, 64 * self.largest)

    def steepness(self, y: Tensor) -> Tensor:
        return 1 + y[..., 0].double()

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        y, alpha, mu = self._parts(z, y)
        x = alpha * (mu - y) / (1 + alpha * y)
        share = torch.where(x == 0, 1.0, torch.log1p(x) / torch.where(x == 0, 1.0, x))
        seen = torch.where(y > 0, y, 1.0)  # log y of zero is not looked at
        w = (seen - mu) / (mu * (1 + alpha * seen))
        far = (seen / mu * ((1 + alpha * mu) / (1 + alpha * seen))).log()
        least = seen.log() - z - torch.log1p(alpha * seen)
        near = torch.where(w.abs() < 0.5, w, 0.0)
        logs = torch.where(w == near, torch.log1p(near), torch.where(mu > TINY, far, least))
        value = (mu - y) / (1 + alpha * y) * share + torch.where(y > 0, y * logs, 0.0)
        beyond = (z - highest(z)).clamp_min(0)  # where e^z is no number, ℓ' is 1/α
        if not self.dispersion:
            return value.masked_fill(beyond > 0, math.inf).squeeze(-1)
        return (value + beyond / alpha).squeeze(-1)

    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        y, alpha, mu = self._parts(z, y)
        return (mu - y) / (1 + alpha * mu)

    def bends(self, z: Tensor, y: Tensor) -> Tensor:
        y, alpha, mu = self._parts(z, y)
        return mu / (1 + alpha * mu) * ((1 + alpha * y) / (1 + alpha * mu))

    def mean(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return μ = e^z."""
        return np.exp(np.minimum(z, HIGHEST))

    def link(self, mean: NDArray[np.float64], least: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(np.maximum(mean, least))

    def _parts(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, α and μ, which is no infinity."""
        alpha = self.dispersion * y[..., 1:2] if self.dispersion else z.new_zeros(())
        return y[..., :1], alpha, z.clamp(max=highest(z)).exp()


def highest(z: Tensor) -> float:
    """Return the largest z whose e^z is a number."""
    return HIGHEST if z.dtype == torch.float64 else HIGHEST / 8


def concordance(loss: Loss) -> float:
    """Return R of a loss that says so itself: a subclass may be any function."""
    own = type(loss) in BUILT_IN or "concordance" in vars(type(loss)) | vars(loss)
    return loss.concordance if own else math.inf


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
