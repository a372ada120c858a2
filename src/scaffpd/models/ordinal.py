r"""Proportional odds (P. McCullagh 1980): categories 0 … K−1 in their order, as a sum over rows.

    P(y > k) = σ(⟨a, x⟩ + b − Σ_{1 ≤ j ≤ k} δ_j),    δ_j > 0, the distances of cut points

With z_k for the bracket, P(y = k) = σ(z_{k−1}) − σ(z_k) = σ(z_{k−1}) σ(−z_k) (1 − e^{−δ_k}), as
z_{k−1} − z_k = δ_k: the negative logarithm is that of two logistic rows and of one that knows δ_k
alone. So a person is `TERMS` rows, of zeros where an outermost category has fewer, f_i is a third
of its mean negative log-likelihood, and sums over rows are likelihoods.

Below δ = ε, −log(1 − e^{−δ}) is continued by its parabola there: it is then convex and twice
differentiable everywhere, ℓ″ <= 1/(4 sinh²(ε/2)) = g″(ε), and as −g‴ = coth(δ/2) g″ falls in δ,
g″(δ + v) >= g″(δ) e^{−Rv} with R = coth(max(δ, ε)/2), which is what a certificate needs. Nothing is
changed at an optimum whose cut points are at least ε from each other; others have a category with a
probability below ε/4 for every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit, log_expit, logsumexp
from torch import Tensor

from scaffpd.models.arrays import Array
from scaffpd.models.losses import LOSSES, Accuracy, Loss, Targets

Matrix = NDArray[np.float64]
ORDINAL = "ordinal"
TERMS = 3  # rows of a person
CLOSEST = 1e-3  # ε
DISTANCE, NOTHING = 2, 0  # kinds of rows, beside the signs −1 and 1 of logistic ones


class Ordinal(Loss):
    """Rows of `terms`: log(1 + e^{sz}) of the kinds s = ±1, −log(1 − e^{−z}) of distances."""

    name = ORDINAL
    called = "proportional odds"
    labels = not_negative = True
    curvature = 0.25 / math.sinh(CLOSEST / 2) ** 2
    concordance = 1.0
    fastest = 1 / math.tanh(CLOSEST / 2)

    def encode(self, labels: list[Array], names: Sequence[str], classes: int | None) -> Targets:
        return Targets([np.asarray(y, dtype=np.float64).reshape(-1, 1) for y in labels], 1)

    def accuracy(self, outputs: int) -> Accuracy:
        """The parabola is a sum of three numbers of one sign."""
        return Accuracy(128, 0, 128, 0)

    def steepness(self, y: Tensor) -> Tensor:
        kind = y[..., 0].double()
        return torch.where(kind == DISTANCE, self.curvature, 0.25 * kind.abs())

    def widening(self, z: Tensor, y: Tensor) -> Tensor:
        """Distances may grow, at the rate that they begin with: where they shrink, ℓ″ does not."""
        kind = y[..., 0].double()
        rate = 1 / torch.tanh(z[..., 0].double().clamp_min(CLOSEST) / 2)
        return torch.where(kind == DISTANCE, rate, kind.abs())

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        d = z.clamp_min(CLOSEST)
        less = d - z
        gaps = torch.where(d > 0.5, -torch.log1p(-torch.exp(-d)), -torch.log(-torch.expm1(-d)))
        gaps = gaps + less * (1 / torch.expm1(d) + less / 2 * self._bend(d))
        odds = y.abs() * torch.logaddexp(y * z, z.new_zeros(()))
        return torch.where(y == DISTANCE, gaps, odds).squeeze(-1)

    def residual(self, z: Tensor, y: Tensor) -> Tensor:
        d = z.clamp_min(CLOSEST)
        gaps = -1 / torch.expm1(d) - (d - z) * self._bend(d)
        return torch.where(y == DISTANCE, gaps, y * torch.sigmoid(y * z))

    def bends(self, z: Tensor, y: Tensor) -> Tensor:
        odds = y.abs() * torch.sigmoid(z) * torch.sigmoid(-z)
        return torch.where(y == DISTANCE, self._bend(z.clamp_min(CLOSEST)), odds)

    def link(self, mean: Matrix, least: Matrix) -> Matrix:
        """Return the distances of cut points, and the first of them, for shares of categories."""
        share = np.maximum(mean, least)
        later = share[:, ::-1].cumsum(1)[:, -2::-1]
        odds = np.log(later / np.maximum(share.sum(1, keepdims=True) - later, least))
        return np.column_stack([-np.diff(odds), odds[:, :1]])

    @staticmethod
    def _bend(d: Tensor) -> Tensor:
        """Return 1/(4 sinh²(d/2)), without overflow."""
        e = torch.exp(-d)
        return e / torch.expm1(-d).square()


LOSSES[ORDINAL] = Ordinal


def terms(X: Array, y: Array, categories: int) -> tuple[Matrix, Matrix]:
    """Return the `TERMS` rows of every person, [a, distances, 1], and their kinds."""
    n, d = X.shape
    k = np.asarray(y).astype(np.int64)
    later = np.arange(1, categories - 1)
    kinds = np.zeros((n, TERMS))
    kinds[:, 0] = -1.0 * (k > 0)  # −log σ(z_{k−1})
    kinds[:, 1] = 1.0 * (k < categories - 1)  # −log σ(−z_k)
    kinds[:, 2] = DISTANCE * ((k > 0) & (k < categories - 1))
    rows = np.zeros((n, TERMS, d + len(later) + 1))
    rows[:, :2, :d] = np.asarray(X)[:, None]
    rows[:, :2, -1] = 1.0
    for term, cut in enumerate((k - 1, k)):
        rows[:, term, d : d + len(later)] = -1.0 * (later <= cut[:, None])
    rows[:, 2, d : d + len(later)] = later == k[:, None]
    rows *= (kinds != NOTHING)[..., None]
    return rows.reshape(n * TERMS, -1), kinds.reshape(-1)


def above(z: Matrix, distances: Matrix) -> Matrix:
    """Return z_0 … z_{K−2} of every row."""
    found: Matrix = z[:, None] - np.append(0.0, np.cumsum(distances))
    return found


def chances(z: Matrix, distances: Matrix) -> Matrix:
    """Return log P(y = k) of rows with z_0, (rows × categories).

    They add up to one by themselves where cut points are `CLOSEST` or more from each other.
    """
    cuts = above(z, distances)
    d = torch.tensor(distances, dtype=torch.float64)[:, None]
    logs = np.zeros((len(z), len(distances) + 2))
    logs[:, 1:] += log_expit(cuts)
    logs[:, :-1] += log_expit(-cuts)
    logs[:, 1:-1] -= Ordinal().value(d, torch.full_like(d, DISTANCE)).numpy()
    logs -= logsumexp(logs, axis=1, keepdims=True)
    return logs


def residuals(z: Matrix, distances: Matrix, y: Array) -> tuple[Matrix, Matrix]:
    """Return the first two derivatives of −log P(y) in z, each (rows × 1)."""
    p = np.pad(expit(above(z, distances)), ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0)))
    k = np.asarray(y).astype(np.int64)[:, None]
    low, high = (np.take_along_axis(p, at, 1) for at in (k, k + 1))
    return low + high - 1, low * (1 - low) + high * (1 - high)
