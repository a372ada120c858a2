r"""Linear models of N clients at once, by hand-batched matrix products and without autograd.

    f_i(x) = (1/m_i) Σ_j ℓ(⟨a_j, x⟩, y_j) + (l2/2)‖x‖²,    c_i = ∇f_i(x) = A_iᵀ r_i / m_i + l2 x,   r = ∂ℓ/∂z
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation import Constants, LocalPlan, Vector
from scaffpd.models.losses import Loss
from scaffpd.models.ragged import Block, Ragged
from scaffpd.models.spectral import largest_eigenvalue


@dataclass(frozen=True)
class Rows:
    """The stacked samples of all clients: features A, targets y, and each row's share in its client's mean."""

    A: Tensor
    y: Tensor
    layout: Ragged
    share: Tensor

    @cached_property
    def blocks(self) -> list[tuple[Block, Tensor, Tensor]]:
        """The same samples padded for batched products: (block, its A, its y)."""
        return [(block, self.A[block.rows], self.y[block.rows]) for block in self.layout.blocks(self.share)]

    def take(self, block: Block) -> Rows:
        """The rows of one block as a stack of their own."""
        picked = block.rows.flatten()
        layout = Ragged([block.rows.shape[1]] * len(block.rows), self.A.device, self.A.dtype)
        return Rows(self.A[picked], self.y[picked], layout, block.weight.flatten())


class LinearPoint:
    """All clients at one x: L_i and c_i = A_iᵀ r_i / m_i + l2 x, held as residuals r and never as N vectors."""

    def __init__(self, rows: Rows, loss: Loss, l2: float, x: Tensor, outputs: int, constant: Tensor | None = None) -> None:
        self.rows, self.l2, self.x = rows, l2, x
        self.z = rows.A @ x.view(-1, outputs)
        self.residual = loss.residual(self.z, rows.y)
        value = loss.value(self.z, rows.y) * rows.share
        self.losses = rows.layout.segment_sum(value) + l2 / 2 * (x @ x)
        if constant is not None:
            self.losses = self.losses + constant

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i c_i = Aᵀ(w ∘ r) + l2 (Σ w) x: one matrix product, whatever N is."""
        scale = (weights[self.rows.layout.owner] * self.rows.share)[:, None]
        return (self.rows.A.T @ (scale * self.residual)).flatten() + self.l2 * weights.sum() * self.x

    def project(self, direction: Tensor) -> Tensor:
        """⟨c_i, v⟩ = Σ_j r_j · (A v)_j / m_i + l2⟨x, v⟩."""
        slope = (self.residual * (self.rows.A @ direction.view(-1, self.residual.shape[1]))).sum(1)
        return self.rows.layout.segment_sum(slope * self.rows.share) + self.l2 * (self.x @ direction)

    def norms(self) -> Tensor:
        """‖c_i‖² per client."""
        return self.each().square().sum((1, 2))

    def each(self) -> Tensor:
        """The c_i themselves, (N, d, k): what stochastic local steps subtract. They stay with the clients."""
        X = self.x.view(-1, self.residual.shape[1])
        out = X.new_empty((len(self.rows.layout), *X.shape))
        for block, A, _ in self.rows.blocks:
            out[block.clients] = A.mT @ (block.weight[..., None] * self.residual[block.rows]) + self.l2 * X
        return out


class LinearDisplacements:
    """d_i of all clients as one (N, d, k) array."""

    def __init__(self, each: Tensor) -> None:
        self.each = each

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i d_i."""
        return torch.tensordot(weights, self.each, 1).flatten()


class LinearOracle:
    """N clients with a linear model: batched matrix products over clients, never a loop over them."""

    def __init__(self, rows: Rows, loss: Loss, l2: float, outputs: int) -> None:
        self.rows, self.loss, self.l2, self.outputs = rows, loss, l2, outputs
        self.dimension = rows.A.shape[1] * outputs

    def start(self) -> Tensor:
        """x⁰ = 0."""
        return self.rows.A.new_zeros(self.dimension)

    def constants(self) -> Constants:
        """L_i = curvature · λ_max(A_iᵀA_i)/m_i + l2 and μ_i = l2."""
        smoothness = self.smoothness.cpu().numpy().astype(np.float64)
        return Constants(smoothness, np.full(len(smoothness), self.l2), convex=True)

    @cached_property
    def smoothness(self) -> Tensor:
        """L_i per client."""
        tops = [largest_eigenvalue(A) / len(A) for A in self.rows.A.split(self.rows.layout.sizes.tolist())]
        return self.loss.curvature * torch.stack(tops) + self.l2

    def evaluate(self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)) -> LinearPoint:
        """Losses and gradients at x over all samples, or over a seeded minibatch of each client."""
        rows = self.rows
        if batch_size is not None:
            rows = rows.take(rows.layout.minibatch(batch_size, np.random.default_rng(key)))
        return LinearPoint(rows, self.loss, self.l2, x, self.outputs)

    def local_updates(
        self, x: Tensor, at: LinearPoint, correction: Tensor, plan: LocalPlan
    ) -> LinearDisplacements:
        """J corrected steps of every client; each d_i is accumulated as such, so that nothing cancels near the optimum."""
        c = correction.view(-1, self.outputs)
        if plan.batch_size is not None:
            return LinearDisplacements(self._stochastic(x, at, c, plan))
        each = c.new_empty((len(self.rows.layout), *c.shape))
        rates = self.rates(plan)
        for block, A, y in self.rows.blocks:
            each[block.clients] = self._descend(block, A, y, at, c, rates[block.clients], plan.steps)
        return LinearDisplacements(each)

    def rates(self, plan: LocalPlan) -> Tensor:
        """η_i per client, shaped to multiply (N, d, k)."""
        rate = plan.scale / self.smoothness if plan.rate is None else torch.full_like(self.smoothness, plan.rate)
        return rate[:, None, None]

    def _descend(
        self, block: Block, A: Tensor, y: Tensor, at: LinearPoint, c: Tensor, rate: Tensor, steps: int
    ) -> Tensor:
        # g_i(u) − c_i = A_iᵀ(r(u) − r(x))/m_i − l2·d with d = x − u; the first corrected gradient is c exactly.
        z, r, share = at.z[block.rows], at.residual[block.rows], block.weight[..., None]
        d = rate * c
        for _ in range(steps - 1):
            change = share * (self.loss.residual(z - A @ d, y) - r)
            d = d + rate * (torch.baddbmm(c.expand_as(d), A.mT, change) - self.l2 * d)
        return d

    def _stochastic(self, x: Tensor, at: LinearPoint, c: Tensor, plan: LocalPlan) -> Tensor:
        assert plan.batch_size is not None
        X, correction, rate = x.view_as(c), c - at.each(), self.rates(plan)
        generator, d = np.random.default_rng(plan.key), torch.zeros_like(correction)
        for _ in range(plan.steps):
            block = self.rows.layout.minibatch(plan.batch_size, generator)
            A, y, u = self.rows.A[block.rows], self.rows.y[block.rows], X - d
            gradient = A.mT @ (block.weight[..., None] * self.loss.residual(A @ u, y)) + self.l2 * u
            d = d + rate * (gradient + correction)
        return d

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """f_i(x) and the share of rightly classified samples (NaN for regression)."""
        point = LinearPoint(self.rows, self.loss, self.l2, x, self.outputs)
        right = self.loss.correct(point.z, self.rows.y)
        accuracy = (
            torch.full_like(point.losses, float("nan"))
            if right is None
            else self.rows.layout.segment_sum(right.to(point.losses.dtype) * self.rows.share)
        )
        return point.losses.double().cpu().numpy(), accuracy.double().cpu().numpy()
