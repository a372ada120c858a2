"""Sums with proven rounding errors, from which certificates are made."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
EPSILON = float(np.finfo(np.float64).eps)  # twice the relative error of one operation
LEAST = 1e-300  # more than all underflows of a sum of fewer than 10^7 terms together


def roundings(n: int) -> int:
    """Return how many operations a term of `total` goes through: twice √n, for any order of
    additions in a block.
    """
    return n if n <= 64 else 2 * math.isqrt(n) + 4


def total(terms: Vector) -> float:
    """Return Σ t_i, in about √n blocks of √n terms."""
    if (n := len(terms)) <= 64:
        return float(terms.sum())
    width = math.isqrt(n)
    cut = n - n % width
    return float(terms[:cut].reshape(-1, width).sum(1).sum() + terms[cut:].sum())


def above(terms: Vector, sizes: Vector | None = None, more: float = 8) -> float:
    """Bound Σ t_i from above, for terms that are known up to `more`·ε of their sizes, |t_i| if not
    given.

    Worst case: |computed − exact| ≤ k u Σ |t_i| for a sum in which no term takes part in more than
    k additions (Higham 2002, section 4.2). ε = 2u leaves room for the rounding of the bound itself.
    """
    size = total(np.abs(terms) if sizes is None else sizes)
    return total(terms) + EPSILON * (roundings(len(terms)) + more) * size + LEAST


def inner(a: Vector, b: Vector) -> float:
    """Return ⟨a, b⟩, summed pairwise: more exact than a BLAS product, and the same for any memory
    layout.
    """
    return float(np.add.reduce(a * b))
