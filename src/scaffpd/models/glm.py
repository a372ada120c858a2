r"""Linear models of N clients at once, by hand-batched matrix products and without autograd:

f_i(x) = (1/m_i) Σ_j ℓ(⟨a_j, x⟩, y_j) + (l2/2)‖x‖²,    c_i = ∇f_i(x) = A_iᵀ r_i / m_i + l2 x,   r = ∂ℓ/∂z
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Vector
from scaffpd.models.draws import Draws
from scaffpd.models.losses import Loss, Squared
from scaffpd.models.oracle import Displacements, Seen, Stack, same, shift
from scaffpd.models.proximal import pace
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
        blocks = self.layout.blocks(self.share, self.A.shape[1])
        return [(block, block.of(self.A), block.of(self.y)) for block in blocks]

    @cached_property
    def norms(self) -> Tensor:
        """‖a_j‖ per row."""
        norms: Tensor = self.A.norm(dim=1)
        return norms

    @cached_property
    def target_norms(self) -> Tensor:
        """‖y_j‖ per row; class numbers have no size."""
        return self.y.norm(dim=1) if self.y.is_floating_point() else torch.zeros_like(self.share)

    def slack(self, terms: int) -> float:
        """s(n): how many ε a sum of n products with A may be off."""
        return float(self.A.slack(terms)) if hasattr(self.A, "slack") else 4 * terms**0.5

    def take(self, block: Block) -> Rows:
        """The rows of one block as a stack of their own."""
        picked = block.rows.flatten()
        layout = Ragged([block.rows.shape[1]] * len(block.rows), self.A.device, self.A.dtype)
        return Rows(self.A[picked], self.y[picked], layout, block.weight.flatten())

    def only(self, clients: list[int]) -> Rows:
        """The rows of some clients as a stack of their own."""
        picked = self.layout.rows_of(clients)
        layout = Ragged(self.layout.sizes[clients].tolist(), self.A.device, self.A.dtype)
        return Rows(self.A[picked], self.y[picked], layout, self.share[picked])


class LinearPoint:
    """All clients at one x: L_i and c_i = A_iᵀ r_i / m_i + l2 x, held as residuals r and never as N vectors."""

    def __init__(
        self, rows: Rows, loss: Loss, l2: float, x: Tensor, outputs: int, constant: Tensor | None = None
    ) -> None:
        self.rows, self.loss, self.l2, self.x, self.outputs = rows, loss, l2, x, outputs
        self.z = rows.A @ x.view(-1, outputs)
        value = loss.value(self.z, rows.y) * rows.share
        self.losses = rows.layout.segment_sum(value) + l2 / 2 * (x @ x)
        if constant is not None:
            self.losses = self.losses + constant

    @cached_property
    def residual(self) -> Tensor:
        """The derivatives r = ∂ℓ/∂z, sample by sample."""
        return self.loss.residual(self.z, self.rows.y)

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i c_i = Aᵀ(w ∘ r) + l2 (Σ w) x: one matrix product, whatever N is."""
        scale = (weights[self.rows.layout.owner] * self.rows.share)[:, None]
        return (self.rows.A.T @ (scale * self.residual)).flatten() + self.l2 * weights.sum() * self.x

    def project(self, direction: Tensor) -> Tensor:
        """⟨c_i, v⟩ per client."""
        return self._slopes(direction[:, None], self._along(direction[:, None]))[:, 0]

    def _along(self, V: Tensor) -> Tensor:
        """T = A V, the change of the predictions along the columns of V: (rows, outputs, k)."""
        k, features = V.shape[1], self.rows.A.shape[1]
        return (self.rows.A @ V.reshape(features, self.outputs * k)).view(*self.z.shape, k)

    def _slopes(self, V: Tensor, T: Tensor) -> Tensor:
        """Vᵀc_i = Σ_j T_jᵀr_j / m_i + l2 Vᵀx, (N, k)."""
        slope = (self.residual[..., None] * T).sum(1) * self.rows.share[:, None]
        return self.rows.layout.segment_sum(slope) + self.l2 * (self.x @ V)

    def norms(self, scale: Tensor | None = None) -> Tensor:
        """Σ_k s_k c_ik² per client."""
        squares = self.each().square()
        return squares.sum(1) if scale is None else squares @ scale

    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> Seen:
        """Σ_i w_i VᵀH_iV = Σ_j (w/m) T_jᵀ ℓ''_j T_j + l2 (Σ w) VᵀV, and the slopes, from one product T = A V."""
        T = self._along(V)
        scale = (weights[self.rows.layout.owner] * self.rows.share)[:, None, None]
        inner = T.flatten(0, 1).mT @ (scale * self.loss.bend(self.z, T)).flatten(0, 1)
        curvature = inner + self.l2 * weights.sum() * (V.mT @ V)
        return Seen(self._slopes(V, T), curvature, self.norms(1 / metric))

    def diagonal(self, weights: Tensor) -> Tensor:
        """Σ_i w_i diag H_i."""
        scale = (weights[self.rows.layout.owner] * self.rows.share)[:, None]
        return (self.rows.A.square().mT @ (scale * self.loss.bends(self.z))).flatten() + self.l2 * weights.sum()

    def diagonals(self) -> Tensor:
        """Every client's diag H_i, (N, d)."""
        bends = self.loss.bends(self.z)
        out = bends.new_empty(len(self.rows.layout), self.rows.A.shape[1], self.outputs)
        for block, A, _ in self.rows.blocks:
            out[block.clients] = product(A.square().mT, block.weight[..., None] * block.of(bends)) + self.l2
        return out.flatten(1)

    def rounding(self) -> tuple[Tensor, Tensor]:
        """How far off rounding may have put L_i and, in norm, c_i (for the data as stored).

        A sum of n terms is off by at most about s(n) ε times their sizes, s(n) = 4√n (Higham and Mary, 2019; less
        friendly hardware has an s of its own), so that, with M samples of all clients in one sum,
        δz = s(d) ε (‖a‖‖x‖ + ‖y‖),  δL = mean ‖r‖δz + (curvature/2) δz² + 4√m ε L,
        δc = mean ‖a‖(curvature δz + s(M) ε ‖r‖) + 4ε l2‖x‖.
        """
        layout, share = self.rows.layout, self.rows.share
        epsilon, size = torch.finfo(self.x.dtype).eps, self.x.norm()
        r, a = self.residual.norm(dim=1), self.rows.norms
        z = epsilon * self.rows.slack(self.rows.A.shape[1]) * (a * size + self.rows.target_norms)
        mean = 4 * epsilon * layout.sizes.to(self.x.dtype).sqrt()
        loss = layout.segment_sum(share * (r * z + self.loss.curvature / 2 * z.square())) + mean * self.losses
        gradient = layout.segment_sum(share * a * (self.loss.curvature * z + epsilon * self.rows.slack(len(a)) * r))
        return loss, gradient + 4 * epsilon * self.l2 * size

    def each(self) -> Tensor:
        """The c_i themselves, (N, d): what stochastic local steps subtract. They stay with the clients."""
        X = self.x.view(-1, self.outputs)
        out = X.new_empty((len(self.rows.layout), *X.shape))
        for block, A, _ in self.rows.blocks:
            out[block.clients] = product(A.mT, block.weight[..., None] * block.of(self.residual)) + self.l2 * X
        return out.flatten(1)


class LinearOracle:
    """N clients with a linear model: batched matrix products over clients, never a loop over them."""

    def __init__(self, rows: Rows, loss: Loss, l2: float, outputs: int, names: list[str]) -> None:
        self.rows, self.loss, self.l2, self.outputs, self.names = rows, loss, l2, outputs, names
        self.dimension = rows.A.shape[1] * outputs

    def start(self) -> Tensor:
        """x⁰ = 0."""
        return self.rows.A.new_zeros(self.dimension)

    def contents(self) -> list[Tensor]:
        """Samples, targets and whose they are."""
        return [self.rows.A, self.rows.y, self.rows.layout.sizes]

    def constants(self) -> Constants:
        """L_i = curvature · λ_max(A_iᵀA_i)/m_i + l2 and μ_i = l2."""
        return self._known(torch.full_like(self.smoothness, self.l2))

    def _known(self, strong_convexity: Tensor) -> Constants:
        L, mu, steepest = (t.double().cpu().numpy() for t in (self.smoothness, strong_convexity, self.steepest))
        quadratic = isinstance(self.loss, Squared)
        return Constants(L, mu, True, steepest, self.rows.layout.sizes.cpu().numpy(), quadratic)

    def only(self, clients: list[int]) -> LinearOracle:
        """The same for some of the clients."""
        return type(self)(self.rows.only(clients), self.loss, self.l2, self.outputs, [self.names[i] for i in clients])

    @cached_property
    def smoothness(self) -> Tensor:
        """L_i per client."""
        parts = torch.split(self.rows.A, self.rows.layout.sizes.tolist())
        tops = [largest_eigenvalue(A) / len(A) for A in parts]
        return self.loss.curvature * torch.stack(tops) + self.l2

    @cached_property
    def steepest(self) -> Tensor:
        """max_j L_ij per client: the smoothness of its steepest single sample."""
        return self.loss.curvature * self.rows.layout.segment_max(self.rows.A.square().sum(1)) + self.l2

    def evaluate(self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)) -> LinearPoint:
        """Losses and gradients at x over all samples, or over a seeded minibatch of each client."""
        if batch_size is None:
            return self.samples(x)
        uniform = Draws(key, self.names).uniform(batch_size)
        rows = self.rows.take(self.rows.layout.minibatch(uniform))
        return LinearPoint(rows, self.loss, self.l2, x, self.outputs)

    def losses(self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)) -> Tensor:
        """f_i(x): a point's gradients are not formed before they are asked for."""
        return self.evaluate(x, batch_size, key).losses

    def samples(self, x: Tensor) -> LinearPoint:
        """Every sample of every client at x."""
        return LinearPoint(self.rows, self.loss, self.l2, x, self.outputs)

    def local_updates(
        self, x: Tensor, at: LinearPoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> Displacements:
        """J local steps of every client; d_i is accumulated as such, so that nothing cancels near the optimum."""
        if plan.batch_size is not None:
            return Stack(self._stochastic(x, at, correction, plan).flatten(1))
        here, first = self._first(x, at, correction)
        each, rates = torch.empty_like(first, memory_format=torch.contiguous_format), self.rates(plan)
        for block, A, y in self.rows.blocks:
            chosen = block.clients
            each[chosen] = self._descend(block, A, y, here, first[chosen], rates[chosen], plan)
        return Stack(each.flatten(1))

    def _first(
        self, x: Tensor, at: LinearPoint | Tensor | None, correction: Tensor | None
    ) -> tuple[LinearPoint, Tensor]:
        """The clients at x, and their first corrected gradients g_i(x) − c_i + c, (N, d, k)."""
        shape = (len(self.rows.layout), -1, self.outputs)
        if isinstance(at, LinearPoint) and at.rows is self.rows and same(at.x, x):
            c = torch.zeros_like(x) if correction is None else correction
            return at, c.expand(len(self.rows.layout), -1).view(shape)
        here = self.samples(x)
        return here, (here.each() + shift(at, correction)).view(shape)

    def rates(self, plan: LocalPlan) -> Tensor:
        """η_i per client, shaped to multiply (N, d, k); 0 where the loss is flat."""
        if plan.rate is not None:
            own = self.rows.share.new_full((len(self.rows.layout),), plan.rate)
        else:
            L = self.smoothness
            if plan.batch_size is not None:
                L = torch.from_numpy(self.constants().expected_smoothness(plan.batch_size)).to(L)
            own = torch.where(L > 0, plan.scale / L, 0)
        return own[:, None, None]

    def _descend(
        self, block: Block, A: Tensor, y: Tensor, at: LinearPoint, first: Tensor, rate: Tensor, plan: LocalPlan
    ) -> Tensor:
        # With d = x − u and c the first corrected gradient g_i(x) − c_i + c, the corrected gradient at u is
        # c + A_iᵀ(r(u) − r(x))/m_i − (l2 + μ)·d, so that d ← (1 − η(l2 + μ))·d + η c + A_iᵀ (η/m_i)(r(u) − r(x)).
        # All is held transposed, (n, k, ·): batched BLAS multiplies rows by matrices faster than matrices by columns.
        z, r = (block.of(t).mT.contiguous() for t in (at.z, at.residual))
        push, pull, keep = rate * first.mT, rate * block.weight[:, None], 1 - rate * (self.l2 + plan.prox)
        d = push
        for _ in range(plan.steps - 1):
            change = self.loss.residual((z - d @ A.mT).mT, y).mT.sub_(r).mul_(pull)
            d = torch.addcmul(push, keep, d).add_(change @ A)
        return d.mT

    def _stochastic(
        self, x: Tensor, at: LinearPoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> Tensor:
        assert plan.batch_size is not None
        X, rate, d = x.view(-1, self.outputs), self.rates(plan), x.new_zeros(len(self.names), len(x))
        d = d.view(len(d), *X.shape)
        pull, draws = (d.flatten(1) + shift(at, correction)).view_as(d), Draws(plan.key, self.names)
        for _ in range(plan.steps):
            block = self.rows.layout.minibatch(draws.uniform(plan.batch_size))
            A, y, u = self.rows.A[block.rows], self.rows.y[block.rows], X - d
            residual = self.loss.residual(product(A, u), y)
            gradient = product(A.mT, block.weight[..., None] * residual) + self.l2 * u
            d = d + rate * (gradient + pull - plan.prox * d)
        return d

    def proximal_steps(self, at: LinearPoint, correction: Tensor, plan: ProximalPlan) -> Displacements:
        """Accelerated corrected steps in the metric D with the pull βD(u − x): J of them, as many as √κ asks for.

        With d = x − u they read d⁺ = e + D⁻¹(c + ∇f_i(x − e) − ∇f_i(x) − βD e)/(L_i + β),  e = d + m (d − d_prev).
        """
        shape = (-1, self.outputs)
        L = self.smoothness if at.rows is self.rows else self.steepest  # of a few samples: at most that of the worst
        go = pace(plan, L.double().cpu().numpy(), self.l2)
        c, D = correction.view(shape), plan.metric.view(shape)
        rates, momenta = (torch.from_numpy(t).to(c)[:, None, None] for t in (go.rates, go.momenta))
        each = c.new_empty(len(rates), *c.shape)
        for block, A, y in at.rows.blocks:
            chosen = block.clients
            z, r = block.of(at.z), block.of(at.residual)
            rate, momentum = rates[chosen] / D, momenta[chosen]
            d = e = torch.zeros_like(each[chosen])
            for _ in range(go.steps):
                change = block.weight[..., None] * (self.loss.residual(z - product(A, e), y) - r)
                gradient = c + product(A.mT, change) - (self.l2 + plan.pull * D) * e
                last, d = d, e + rate * gradient
                e = d + momentum * (d - last)
            each[chosen] = d
        return Stack(each.flatten(1))

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """f_i(x) and the share of rightly classified samples (NaN for regression)."""
        point = self.samples(x)
        right, layout = self.loss.correct(point.z, self.rows.y), self.rows.layout
        loss = point.losses.double().cpu().numpy()
        if right is None:
            return loss, np.full(len(layout), np.nan)
        return loss, (layout.segment_sum(right.double()) / layout.sizes).cpu().numpy()


def product(A: Tensor, v: Tensor) -> Tensor:
    """A v, client by client; a single column goes as a row, see `_descend`."""
    return (v.mT @ A.mT).mT if v.shape[-1] == 1 else A @ v
