r"""Base class of objectives: a set Λ of client weights and a penalty ψ on them.

Every fair objective here is one choice of (Λ, ψ) in

    min_x max_{λ∈Λ}  Σ_i λ_i f_i(x) − ψ(λ),

so an algorithm needs only three things: the penalty ψ(λ), the proximal step

    prox_σ(s, l) = argmin_{λ∈Λ} ψ(λ) − ⟨s, λ⟩ + ‖λ − l‖² / (2σ),

or Σ_i (λ_i − l_i)² / (2σ_i) with a step σ_i for every client, and the support function

    support(L) = max_{λ∈Λ} ⟨L, λ⟩ − ψ(λ).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import InputError, positive, shortened

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Scale = float | Vector  # one σ, or one for each client

EPSILON = float(np.finfo(np.float64).eps)  # twice the relative error of one operation
UNDERFLOW = 1.5e-154  # a number whose square underflows
LEAST = 1e-300  # more than all underflows of a sum of fewer than 10^7 terms together
DEPENDENT = 1e-12  # normals with a smaller remainder are linearly dependent, but for rounding


# Sums with proven rounding errors, from which certificates are made.


def roundings(n: int) -> int:
    """Return how many operations a term of `total` goes through, for any order in a block."""
    return n if n <= 64 else 2 * math.isqrt(n) + 4


def total(terms: Vector) -> float:
    """Return Σ t_i, in about √n blocks of √n terms."""
    if (n := len(terms)) <= 64:
        return float(terms.sum())
    width = math.isqrt(n)
    cut = n - n % width
    return float(terms[:cut].reshape(-1, width).sum(1).sum() + terms[cut:].sum())


def above(terms: Vector, sizes: Vector | None = None, more: float = 8) -> float:
    """Bound Σ t_i from above, for terms known up to `more`·ε of their sizes, |t_i| if not given.

    Worst case: |computed − exact| ≤ k u Σ |t_i| for a sum in which no term takes part in more than
    k additions (Higham 2002, section 4.2). ε = 2u leaves room for the rounding of the bound itself.
    """
    size = total(np.abs(terms) if sizes is None else sizes)
    return total(terms) + EPSILON * (roundings(len(terms)) + more) * size + LEAST


def inner(a: Vector, b: Vector) -> float:
    """Return ⟨a, b⟩, summed pairwise: more exact than BLAS, the same for any memory layout."""
    return float(np.add.reduce(a * b))


@dataclass(frozen=True)
class ProxStep:
    r"""λ = prox_σ(s, l) and its derivative  ∂λ/∂s = D − DNᵀ(NDNᵀ)⁻¹ND  with D = diag(d).

    Attributes:
        weights: λ.
        slope: d, between 0 and σ: the derivative of λ_i by s_i alone; zero if λ_i stays at a bound.
        normals: N, one row for each constraint that ties the weights together, such as Σ λ_i = 1.
    """

    weights: Vector
    slope: Vector
    normals: Matrix

    def factors(self) -> tuple[Vector, Matrix]:
        """Return D^½ and Q, QQᵀ = I, with  ∂λ/∂s = D^½ (I − QᵀQ) D^½."""
        root = np.sqrt(self.slope)
        rows: list[Vector] = []
        for row in self.normals * root:
            size = float(np.sqrt(row @ row))
            for other in 2 * rows:  # twice, to correct rounding
                row = row - other * (other @ row)
            left = float(np.sqrt(row @ row))
            if left > DEPENDENT * size:
                rows.append(row / left)
        return root, np.array(rows).reshape(len(rows), len(root))

    def jacobian(self) -> Matrix:
        """Return ∂λ/∂s: N×N, symmetric and positive semidefinite."""
        root, Q = self.factors()
        scaled = root * Q
        jacobian: Matrix = np.diag(root**2) - scaled.T @ scaled
        return jacobian


class Objective(ABC):
    """(Λ, ψ) of the minimax problem, for any number of clients.

    Attributes:
        prior: reference weights p of the clients, positive, normalised to sum to one; `None` means
            1/N each.
        simplex: whether Λ is a subset of the probability simplex (then losses matter up to a common
            shift).
        positive: whether losses must not fall below zero.
        parameter: name of the argument that says how fair it is, if there is one, with its letter
            `symbol`, its default value `usual`, and what it means in a sentence, `meaning`.
        strengths: (losses of the average model, points) → so many values of it for a path, from
            nearly the average to nearly the worst case; `None` if there is no such rule.
    """

    simplex: ClassVar[bool] = True
    positive: ClassVar[bool] = False
    parameter = symbol = meaning = ""
    usual: ClassVar[float | None] = None
    strengths: ClassVar[Any] = None
    prior: Vector | None

    def __init__(self, prior: ArrayLike | None = None) -> None:
        self.prior = None if prior is None else _checked_prior(type(self).__name__, prior)

    @property
    def strength(self) -> float | None:
        """Value of its parameter; `None` without one."""
        return float(getattr(self, self.parameter)) if self.parameter else None

    def with_strength(self, value: float) -> Self:
        if not self.parameter:
            raise InputError(
                "objective-without-strength", f"{type(self).__name__} has no strength."
            )
        return self.with_arguments(**{self.parameter: value})

    def arguments(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def with_arguments(self, **changes: object) -> Self:
        """Return the same objective with some arguments changed, which are checked."""
        held = {name: value for name, value in self.arguments().items() if name not in changes}
        other = type(self)(**held, **changes)  # type: ignore[arg-type]  # checked there
        mine = vars(self).items()
        vars(other).update({k: v for k, v in mine if k in held or k not in vars(other)})
        return other

    def weights(self, n: int) -> Vector:
        """Return the prior p for `n` clients, read-only."""
        if self.prior is None:
            return _uniform(n)
        if len(self.prior) != n:
            raise InputError(
                "prior-length",
                f"{type(self).__name__} has a prior for {len(self.prior)} clients, but there are "
                f"{n}.",
            )
        return self.prior

    def value(self, weights: ArrayLike) -> float:
        """Return ψ(λ); +∞ if ψ is not defined."""
        return self._value(read_vector(self, "weights", weights))

    def prox(self, s: ArrayLike, l: ArrayLike, sigma: ArrayLike) -> Vector:
        """Return argmin_{λ∈Λ} ψ(λ) − ⟨s, λ⟩ + Σ (λ_i − l_i)²/(2σ_i), for one σ or one each."""
        return self._prox(*read_step(self, s, l, sigma))

    def prox_step(self, s: ArrayLike, l: ArrayLike, sigma: ArrayLike) -> ProxStep:
        """Return prox_σ(s, l) and its derivative in s, an element of the generalised Jacobian."""
        return self._prox_step(*read_step(self, s, l, sigma))

    def maximizer(self, losses: ArrayLike) -> Vector:
        """Return argmax_{λ∈Λ} ⟨L, λ⟩ − ψ(λ) (one of them if there are several)."""
        return self._maximizer(read_vector(self, "losses", losses))

    def support(self, losses: ArrayLike) -> float:
        """Return max_{λ∈Λ} ⟨L, λ⟩ − ψ(λ): what x minimises, as a function of the losses."""
        return self._support(read_vector(self, "losses", losses))

    # Methods that an objective defines: the same for checked vectors of finite numbers.

    def _value(self, weights: Vector) -> float:
        return 0.0

    @abstractmethod
    def _prox_step(self, s: Vector, old: Vector, sigma: Scale) -> ProxStep: ...

    def _prox(self, s: Vector, old: Vector, sigma: Scale) -> Vector:
        return self._prox_step(s, old, sigma).weights

    @abstractmethod
    def _maximizer(self, losses: Vector) -> Vector: ...

    def _support(self, losses: Vector) -> float:
        """Return ⟨L, λ⟩ − ψ(λ) at the maximizer, if λ sums to one."""
        weights = self._maximizer(losses)
        worst = losses.max()
        return float(worst + (inner(losses - worst, weights) - self._value(weights)))

    # Bounds for a certificate: the same numbers with their rounding errors, for p/Σp in place of p
    # and, on the simplex, λ/Σλ in place of λ. An objective without better bounds is assumed exact
    # up to a few last digits.

    def _ceiling(self, losses: Vector) -> float:
        """Bound support(L) from above."""
        value = self._support(losses)
        weights = self._maximizer(losses)
        size = total(np.abs(losses) * weights) + abs(self._value(weights)) + abs(value)
        return value + EPSILON * (2 * roundings(len(losses)) + 16) * size + LEAST

    def _cost(self, weights: Vector) -> float:
        """Bound ψ(λ) from above."""
        value = self._value(weights)
        return value + EPSILON * (2 * roundings(len(weights)) + 16) * abs(value)

    def _stretch(self, weights: Vector) -> float:
        """Return η ≥ 0 with ⟨λ, f⟩ ≤ (1 + η) max_{l∈Λ} ⟨l, f⟩ for every f ≥ 0.

        Rounding leaves λ a little outside Λ.
        """
        return 0.0

    # Where ψ and Λ separate by clients, ψ(λ) = Σ ψ_i(λ_i) and 0 ≤ λ_i ≤ κ_i (and Σ λ_i = 1 on the
    # simplex), a client knows its own weight from its own loss: federation/own_weights.py.

    @property
    def separable(self) -> bool:
        """Whether ψ and Λ separate, with a conjugate that has a derivative."""
        return False

    def _most(self, p: Vector) -> Vector:
        """Return κ_i of clients with these p_i."""
        return np.ones(len(p))

    def _least(self, p: Vector) -> Vector:
        """Return the least weights of clients with these p_i."""
        return np.zeros(len(p))

    def _penalties(self, weights: Vector, p: Vector) -> Vector:
        """Return ψ_i(λ_i)."""
        return np.zeros(len(p))

    def _conjugate(self, t: Vector, p: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        """Return φ_i(t) = max_{0≤l≤κ_i} l t − ψ_i(l), φ_i', φ_i'', and a bound on φ_i'' below t."""
        raise NotImplementedError

    def largest(self, n: int) -> float:
        """Return the largest share of Σ λ_i that one of n clients may have, over all of Λ."""
        return 1.0

    def strong_convexity(self, n: int) -> float:
        """Return μ_λ, the modulus of strong convexity of ψ on all of Λ; 0 if there is none."""
        return 0.0

    def curvature(self, weights: Vector) -> float:
        """Return the smallest curvature of ψ at λ itself (at least `strong_convexity`)."""
        return self.strong_convexity(len(weights))

    def start(self, losses: Vector) -> Vector:
        """Return λ⁰ for the first losses of a run: the prior, unless Λ is not the simplex."""
        return self.weights(len(losses)).copy()

    def check(self, losses: Vector, names: Sequence[str]) -> None:  # noqa: B027 - most objectives take any loss
        """Refuse losses that the objective is not defined for (see `Nash`)."""

    def __repr__(self) -> str:
        fields = {k: v for k, v in vars(self).items() if v is not None}
        return f"{type(self).__name__}({', '.join(f'{k}={_short(v)}' for k, v in fields.items())})"


@lru_cache(maxsize=8)
def _uniform(n: int) -> Vector:
    p = np.full(n, 1.0 / n)
    p.flags.writeable = False
    return p


def _short(value: object) -> str:
    return repr(value.tolist()) if isinstance(value, np.ndarray) else repr(value)


def _checked_prior(owner: str, prior: ArrayLike) -> Vector:
    p = finite_vector(owner, "prior", prior)
    if np.any(p <= 0):
        raise InputError(
            "prior-not-positive",
            f"{owner} needs prior weights that are positive, but client {np.argmin(p)} has "
            f"{p.min()}.",
        )
    if p.min() < 1e-50 * p.max():
        raise InputError(
            "prior-too-uneven",
            f"{owner} needs prior weights within a factor 1e50 of each other, got {p.min():g} and "
            f"{p.max():g}.",
        )
    p = p / p.max()  # its sum does not overflow
    return np.asarray(p / p.sum())


OUT_OF_REACH = 1e12  # in the place of +∞, where a sum has to be finite
LARGEST = 1e50  # larger losses mean divergence, and products of several of them would overflow


LIMITS = f"between {1.0 / LARGEST:g} and {LARGEST:g}"


def read_scale(owner: str, name: str, value: object) -> float:
    """Check that `value` is a positive number small enough to be multiplied without overflow."""
    number = positive(owner, name, value)
    if not 1.0 / LARGEST <= number <= LARGEST:
        raise InputError("scale-out-of-range", f"{owner} needs {name} {LIMITS}, got {value!r}.")
    return number


def read_scales(owner: str, name: str, values: ArrayLike, n: int) -> Scale:
    if np.ndim(values) == 0:
        return read_scale(owner, name, values)
    vector = finite_vector(owner, name, values)
    if len(vector) != n:
        raise InputError(
            "scales-length",
            f"{owner} needs one {name} or one for each of {n} clients, got {len(vector)}.",
        )
    usable = (vector >= 1.0 / LARGEST) & (vector <= LARGEST)
    if not usable.all():
        first = int(np.argmin(usable))
        raise InputError(
            "scale-out-of-range",
            f"{owner} needs {name} {LIMITS}, but client {first} has {vector[first]}.",
        )
    return vector


def finite_vector(owner: str, name: str, values: ArrayLike, largest: float = np.inf) -> Vector:
    """Convert to a float64 vector of one finite number per client, none beyond ±`largest`."""
    try:
        if np.asarray(values).dtype == bool:
            raise TypeError
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(
            "not-numbers", f"{owner} needs numbers in {name}, got {shortened(values)}."
        ) from None
    if vector.ndim != 1 or vector.size == 0:
        raise InputError(
            "not-a-vector",
            f"{owner} needs one number per client in {name}, got an array of shape {vector.shape}.",
        )
    usable = np.isfinite(vector) & (np.abs(vector) <= largest)
    if not usable.all():
        first = int(np.argmin(usable))
        limit = f" of at most {largest:g}" if np.isfinite(vector[first]) else ""
        raise InputError(
            "number-not-finite",
            f"{owner} needs finite {name}{limit}, but client {first} has {vector[first]}.",
        )
    return vector


def read_vector(objective: Objective, name: str, values: ArrayLike) -> Vector:
    """Check λ ("weights") or L ("losses"): one finite number for every client of the prior."""
    vector = finite_vector(
        type(objective).__name__, name, values, LARGEST if name == "losses" else np.inf
    )
    objective.weights(len(vector))
    return vector


def read_step(
    objective: Objective, s: ArrayLike, old: ArrayLike, sigma: ArrayLike
) -> tuple[Vector, Vector, Scale]:
    owner = type(objective).__name__
    slope = finite_vector(owner, "s", s, LARGEST)
    anchor = finite_vector(owner, "l", old)
    if len(slope) != len(anchor):
        raise InputError(
            "prox-lengths-differ",
            f"{owner} needs s and l of the same length, got {len(slope)} and {len(anchor)}.",
        )
    objective.weights(len(slope))
    return slope, anchor, read_scales(owner, "sigma", sigma, len(slope))
