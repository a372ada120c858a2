r"""A certificate without strong convexity: generalised self-concordance.

Where |ℓ‴| ≤ R ℓ″ (logistic, softmax and Cox's losses, counts with the log link: R = 1; squared
loss: R = 0), Φ = Σ λ_i f_i with g = ∇Φ(x), H = ∇²Φ(x), Λ = √(gᵀH⁻¹g), and s = ρΛ < 1 for

    ρ = R max ‖v‖_{H⁻¹},  v the rows a_j; of a softmax (e_k − e_l)⊗a_j; of a risk set a_j − a_k,

    Φ(x) − min Φ ≤ [(1 − s) log(1 − s) + s]/ρ²        (Λ²/2 as s → 0).

For along Δ, with δ = ‖Δ‖_H, every ℓ″ falls by e^{−ρδt} at most, and so Φ(x + Δ) − Φ(x) ≥ gᵀΔ +
(e^{−ρδ} + ρδ − 1)/ρ² ≥ −Λδ + (e^{−ρδ} + ρδ − 1)/ρ², whose least value over δ is that. Quadratic
terms such as ridges are in H, and need not be there. Of personal models it is the same for all of
(x, u_1 … u_N) at once (`models/newton.py`).

Across organisations nobody is asked for a single row: there ρ is bounded by sums (`reached`).

**Rounding.** Every entry of a computed H errs by at most η√(H_jj H_kk), H is at least as large as
what is left when d η of the diagonal is taken off, and that is what is factored. Triangular solves
are exact for a factor that is as near. Where no factor is left, nothing is proven: some combination
of columns does not change the losses. Where a column separates two labels, they change ever less
along it, and s stays above one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from scaffpd.federation import Constants, Vector
from scaffpd.federation.questions import REACH
from scaffpd.objectives.base import EPSILON, Matrix

MOST = 0.999  # of s, which the bound needs below one
WIDE = 1.0005  # what clients may err by in ρ and in √H
FORMAT = 1e-18  # of the largest entry: the format of masked sums
SINGLE = 2.0**-24
SERIES = 1e-3  # of s, below which the logarithm loses digits


class Root(NamedTuple):
    """R, lower triangular, with RRᵀ ≤ H; or the first coefficient that has no curvature left."""

    factor: Matrix | None
    flat: int = -1

    @classmethod
    def of(cls, H: Matrix, terms: float, single: bool = False) -> Root:
        """Take off the diagonal what a sum of so many terms may have lost."""
        sizes = H.diagonal()
        if not (np.isfinite(H).all() and sizes.min() > 0):
            return cls(None, int(np.argmin(np.where(np.isfinite(sizes), sizes, -1.0))))
        scale = np.sqrt(sizes)
        d = len(H)
        each = 2 * EPSILON * (terms + 16 * d + 64) + 64 * SINGLE * single
        lost = d * (each + FORMAT * float(sizes.max() / sizes.min()))
        scaled = H / scale / scale[:, None]
        np.fill_diagonal(scaled, 1 - lost)
        factor, failed = lapack.dpotrf(scaled, lower=1, clean=1)
        return cls(None, failed - 1) if failed else cls(scale[:, None] * factor)

    def solved(self, g: Matrix) -> Matrix:
        """Return R⁻¹g."""
        found: Matrix = lapack.dtrtrs(self.factor, g, lower=1)[0]
        return found


def gap(decrement: float, width: float) -> float:
    """Return [(1 − s) log(1 − s) + s]/ρ² with s = ρΛ; +∞ beyond the largest s."""
    s = width * decrement
    if not s <= MOST:
        return math.inf
    if s < SERIES:
        return decrement**2 * (0.5 + s / 6 * (1 + s))
    return ((1 - s) * math.log1p(-s) + s) / width**2 * (1 + 1e-9)


def reached(root: Matrix, products: Matrix, alone: Matrix) -> float:
    """Bound max ‖v‖_{H⁻¹} of all rows by sums over rows, [A 1]ᵀ[A 1]: with G = AᵀA it is
    a aᵀ ⪯ G, so that ‖a‖²_{H⁻¹} is at most λ_max(H⁻¹G). Coordinates count `alone` times their own.
    """
    sizes = products.diagonal()[:-1]
    k = len(sizes)
    most = sizes + k * FORMAT * sizes.max()
    scale = np.sqrt(most)
    scaled = products[:-1, :-1] / scale / scale[:, None]
    np.fill_diagonal(scaled, 1 + 4 * k * EPSILON * (products[-1, -1] + 16 * k + 64))
    factor, failed = lapack.dpotrf(scaled, lower=1, clean=1)
    if failed:  # no sum of squares
        return math.inf
    C = scale[:, None] * factor
    outputs = len(root) // k
    far = [0.0]
    for one, other in combinations(range(outputs), 2) if outputs > 1 else [(0, 0)]:
        V = np.zeros((len(root), k))
        V[other::outputs] = -C
        V[one::outputs] = C
        far.append(float(np.linalg.norm(lapack.dtrtrs(root, V, lower=1)[0], 2)))
    own = lapack.dtrtrs(root, np.eye(len(root)), lower=1)[0]
    return float(max(*far, *(np.linalg.norm(own, axis=0) * alone)))


@runtime_checkable
class RowsModel(Protocol):
    """A description of losses of rows that multiply x."""

    @property
    def outputs_each(self) -> int: ...
    def widening(self, x: Tensor) -> tuple[float, Matrix]: ...


class Proof(NamedTuple):
    """A bound on Φ(x) − min Φ as if nothing were rounded, and one that holds."""

    value: float = math.inf
    most: float = math.inf
    flat: int = -1  # the coefficient for which there is none


def proven(
    width: Callable[[Tensor], float],
    constants: Constants,
    H: Tensor,
    g: Vector,
    error: Vector,
    inexact: float,
    better: float,
    single: bool = False,
) -> Proof:
    """Bound Φ(x) − min Φ; clients are asked only if that can be below `better`.

    Args:
        width: asks the clients for ρ, given R.
        constants: of the clients.
        H: ∇²Φ(x).
        g: ∇Φ(x).
        error: of g, in norm, times a factor for every coordinate.
        inexact: Λ of what is left in the clients' own models.
        better: what is known already.
        single: whether clients compute in single precision.
    """
    if not np.isfinite(error).all():
        return Proof()
    terms = float(constants.samples.sum()) + len(constants.samples)
    root = Root.of(H.double().cpu().numpy(), terms, single)
    if root.factor is None:
        return Proof(flat=root.flat)
    solved = root.solved(g)
    decrement = WIDE * float(np.linalg.norm(solved))
    wrong = WIDE * float(np.linalg.norm(root.solved(np.eye(len(g)) * error))) + inexact
    if not decrement**2 / 2 < better:
        return Proof()
    rho = 0.0
    if not constants.quadratic:
        rho = WIDE * width(torch.from_numpy(root.factor).to(H.device))
    most = gap(decrement + wrong, rho) if rho < REACH else math.inf
    if most < math.inf:
        return Proof(gap(decrement, rho), most)
    # the losses fall for ever, perhaps: along the column that a Newton step moves most by
    step = lapack.dtrtrs(root.factor, solved, lower=1, trans=1)[0]
    sizes = np.linalg.norm(root.factor, axis=1)
    return Proof(flat=int(np.argmax(np.abs(step) * sizes)))
