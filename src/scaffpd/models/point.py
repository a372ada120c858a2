"""All clients of a linear model at one x: losses, gradients, curvature, and bounds on rounding."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from scaffpd.federation import Restriction
from scaffpd.models.layout import SHORT
from scaffpd.models.losses import Loss
from scaffpd.models.numerics import LEAST, SAFE, SINGLE, UNIT, gamma, norm_above, root_above
from scaffpd.models.samples import StackedSamples, product, transposed

# Vectors that a server adds up in double precision, one by one.
CLIENTS = 2**13


class LinearPoint:
    """L_i and c_i = A_iᵀ r_i / m_i + l2 x, held as residuals r and never as N vectors.

    With `fine` rows, which have the same losses, L_i and c_i are computed in double precision for
    any format of x: differences of losses near the optimum are below single precision.
    """

    def __init__(
        self,
        rows: StackedSamples,
        loss: Loss,
        l2: float,
        x: Tensor,
        outputs: int,
        fine: StackedSamples | None = None,
        constant: Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.loss = loss
        self.l2 = l2
        self.x = x
        self.outputs = outputs
        self.fine = fine
        X = x.view(-1, outputs)
        if fine is None:
            self.z = self.predictions = rows.A @ X
            value = loss.value(self.z, rows.y) * rows.share
            self.losses = rows.layout.segment_sum(value) + l2 / 2 * (x @ x)
            return
        y, share = fine.exact
        self.predictions = fine.products.times(X.to(fine.A.dtype))
        self.z = self.predictions.to(x.dtype)
        value = loss.value(self.predictions, y) * share
        self.losses = fine.layout.total(value) + l2 / 2 * self.square
        if constant is not None:
            self.losses = self.losses + constant

    @cached_property
    def square(self) -> Tensor:
        """‖x‖²."""
        return squares(self.x)

    @cached_property
    def slopes(self) -> Tensor:
        """Derivatives r = ∂ℓ/∂z, sample by sample, in the format of the predictions."""
        y = self.rows.y if self.fine is None else self.fine.exact[0]
        return self.loss.residual(self.predictions, y)

    @cached_property
    def residual(self) -> Tensor:
        """Derivatives in the format of x."""
        return self.slopes.to(self.x.dtype)

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i c_i = Aᵀ(w ∘ r) + l2 (Σ w) x by one matrix product, for any N."""
        if self.fine is None:
            out = transposed(self.rows.A, self._weighted(weights) * self.residual).flatten()
            return out + self.l2 * weights.sum() * self.x
        weights = weights.double()
        scaled = self.fine.layout.scaled(self.slopes, weights * self.fine.shares)
        out = self.fine.products.transposed(scaled).flatten()
        return (out + self.l2 * weights.sum() * self.x.double()).to(self.x.dtype)

    def _weighted(self, weights: Tensor) -> Tensor:
        """Return w_i/m_i per row, (M, 1)."""
        return (weights[self.rows.layout.owner] * self.rows.share)[:, None]

    def project(self, direction: Tensor) -> Tensor:
        """Return ⟨c_i, v⟩ per client."""
        return self._slopes(direction[:, None], self._along(direction[:, None]))[:, 0]

    def _along(self, V: Tensor) -> Tensor:
        """Return T = A V, the change of the predictions along V's columns: (rows, outputs, k)."""
        k = V.shape[1]
        features = self.rows.A.shape[1]
        return (self.rows.A @ V.reshape(features, self.outputs * k)).view(*self.z.shape, k)

    def _slopes(self, V: Tensor, T: Tensor) -> Tensor:
        """Return Vᵀc_i = Σ_j T_jᵀr_j / m_i + l2 Vᵀx, (N, k)."""
        slope = (self.residual[..., None] * T).sum(1) * self.rows.share[:, None]
        return self.rows.layout.segment_sum(slope) + self.l2 * (self.x @ V)

    def norms(self, scale: Tensor | None = None) -> Tensor:
        """Return Σ_k s_k c_ik² per client."""
        squares = self._vectors(self.residual).square()
        return squares.sum(1) if scale is None else squares @ scale

    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> Restriction[Tensor]:
        """Return slopes and Σ_i w_i VᵀH_iV = Σ_j (w/m) T_jᵀ ℓ''_j T_j + l2 (Σ w) VᵀV, T = A V."""
        T = self._along(V)
        bent = self._weighted(weights)[..., None] * self.bend(T)
        inner = T.flatten(0, 1).mT @ bent.flatten(0, 1)
        curvature = inner + self._ridged(weights, V)
        return Restriction(self._slopes(V, T), curvature, self.norms(1 / metric))

    def bend(self, T: Tensor) -> Tensor:
        """Return ∂²ℓ/∂z² T for T (M, k, c)."""
        return self.loss.bend(self.z, self.rows.y, T)

    def _ridged(self, weights: Tensor, V: Tensor) -> Tensor:
        """Return the regulariser's part of Σ_i w_i VᵀH_iV."""
        return self.l2 * weights.sum() * (V.mT @ V)

    def curvatures(self, V: Tensor) -> Tensor:
        """Return every client's VᵀH_iV = Σ_j T_jᵀ ℓ''_j T_j / m_i + l2 VᵀV, (N, k, k), T = A V."""
        k = V.shape[1]
        features = self.rows.A.shape[1]
        out = (self.l2 * (V.mT @ V)).repeat(len(self.rows.layout), 1, 1)
        for block in self.rows.blocks:
            z = block.of(self.z)
            A, y = self.rows.of(block)
            T = (A @ V.reshape(features, self.outputs * k)).view(*z.shape, k)
            bent = block.weight[..., None, None] * self.loss.bend(z, y, T)
            out[block.clients] += T.flatten(1, 2).mT @ bent.flatten(1, 2)
        return out

    def diagonal(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i diag H_i."""
        bends = self._weighted(weights) * self.loss.bends(self.z, self.rows.y)
        return (self.rows.A.square().mT @ bends).flatten() + self.l2 * weights.sum()

    def diagonals(self) -> Tensor:
        """Return every client's diag H_i, (N, d)."""
        bends = self.loss.bends(self.z, self.rows.y)
        out = bends.new_empty(len(self.rows.layout), self.rows.A.shape[1], self.outputs)
        for block in self.rows.blocks:
            A, _ = self.rows.of(block)
            own = block.weight[..., None] * block.of(bends)
            out[block.clients] = product(A.square().mT, own) + self.l2
        return out.flatten(1)

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the rounding errors of L_i and, in norm, of c_i, for stored data, x and l2."""
        loss, gradient = self.arithmetic(self.size)
        d = len(self.x)
        additions = d if d <= SHORT else 2 * math.isqrt(d) + 4  # as in `squares`
        square = SAFE * gamma(additions + 8) * self.size * self.size + d * LEAST
        ridge = square * self.l2 / 2
        return loss + ridge, gradient + self.scalings(self.l2 * self.size)

    @cached_property
    def size(self) -> Tensor | float:
        """‖x‖ from above, without waiting for a GPU."""
        size = root_above(self.square, len(self.x))
        return size if size.is_cuda else float(size)

    def arithmetic(self, size: Tensor | float) -> tuple[Tensor, Tensor]:
        """Bound the errors of sums, if the rows multiply vectors of length `size`.

        The error of a sum of n products is at most γ_n times the sum of their sizes (worst case:
        any order, any signs). With a relative error v and an absolute error o of ℓ, w and j of r
        (`Loss.accuracy`), m rows of a client, M of all, and means over a client's rows:

            δz = γ_d ‖a‖‖x‖
            δL = mean (‖r‖(1 + w) + j)δz + (curvature/2) mean δz² + (v + γ_{2√m})L + o
            δc = mean ‖a‖(curvature δz + (w + γ_M)‖r‖ + j)

        The code does not halve δz² in δL, which leaves room for products of errors.
        """
        fine = self.fine
        if fine is None:
            unknown = torch.full_like(self.losses, float("inf"))
            return unknown, unknown
        levers, a, aa = fine.levers
        m = fine.layout.additions
        value, offset, slope, jump = (UNIT * error for error in self.loss.accuracy(self.outputs))
        curvature = steepness(self.loss, fine)
        features = fine.A.shape[1]
        rows = len(levers)
        k = gamma(features + 4) * size
        tiny = LEAST * features * self.outputs
        ra = fine.layout.segment_sum(norm_above(self.slopes, 1).mul_(levers))
        loss = ((1 + slope) * k) * ra + (curvature * (k * k)) * aa
        loss = loss + (UNIT * SAFE * m + (value + tiny + 8 * UNIT * SAFE)) * self.losses.abs()
        loss = loss + (offset + curvature * tiny**2 + 2 * tiny + rows * LEAST)
        sums = gamma(rows + 4) + gamma(CLIENTS)
        gradient = (curvature * k) * aa + (slope + sums + self._format()) * ra
        gradient = gradient + (curvature * tiny + 2 * jump) * a
        if jump:
            loss = loss + (jump * k) * a
        least = LEAST if self._format() == 0 else 2.0**-126
        underflow = rows * least * (features * self.outputs) ** 0.5
        return SAFE * loss, SAFE * gradient + underflow

    def scalings(self, size: Tensor | float) -> Tensor | float:
        """Bound the error of l2 x in a sum over clients, for ‖l2 x‖."""
        return SAFE * (gamma(len(self.rows.layout) + CLIENTS + 8) + self._format()) * size

    def _format(self) -> float:
        """Rounding of vectors and weights in the format of x: λ_i, r_i, c_i, l2 x and their sum."""
        return 0.0 if self.x.dtype == torch.float64 else 4 * SINGLE

    def each(self) -> Tensor:
        """Return the c_i themselves, (N, d), for stochastic local steps; they stay with clients."""
        if self.fine is None:
            return self._vectors(self.residual)
        own = self.fine.each(self.fine.exact[1][:, None] * self.slopes).flatten(1)
        return own.add_(self.x.double(), alpha=self.l2).to(self.x.dtype)

    def _vectors(self, residual: Tensor) -> Tensor:
        own = self.rows.each(self.rows.share[:, None] * residual).flatten(1)
        return own.add(self.x, alpha=self.l2)


def steepness(loss: Loss, rows: StackedSamples) -> Tensor | float:
    """Bound ∂²ℓ/∂z² of every client's samples."""
    if not loss.uneven:
        return loss.curvature
    return rows.layout.segment_max(loss.steepness(rows.y).to(rows.share))


def squares(x: Tensor) -> Tensor:
    """Compute ‖x‖² in double precision, in blocks of about √d terms: its error grows like √d."""
    terms = x.double().square()
    d = len(terms)
    if d <= SHORT:
        return terms.sum()
    width = math.isqrt(d)
    cut = d - d % width
    return terms[:cut].view(-1, width).sum(1).sum() + terms[cut:].sum()
