r"""Linear models of N clients at once, by hand-batched matrix products and without autograd:

f_i(x) = (1/m_i) Σ_j ℓ(⟨a_j, x⟩, y_j) + (l2/2)‖x‖²,    c_i = ∇f_i(x) = A_iᵀ r_i / m_i + l2 x,   r = ∂ℓ/∂z
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Restriction, Vector, same_point
from scaffpd.federation.clients import Displacements
from scaffpd.models.batches import FeatureSteps, FullBatches, Minibatches
from scaffpd.models.layout import SHORT, PaddedBlock, StackedSamples, product, transposed
from scaffpd.models.local_steps import NearbyGradients, SampleSpaces, pace, proximal_steps
from scaffpd.models.losses import Loss
from scaffpd.models.numerics import (
    LEAST,
    SAFE,
    SINGLE,
    UNIT,
    Draws,
    gamma,
    largest_eigenvalues,
    norm_above,
    parallel_map,
    root_above,
    streams,
)
from scaffpd.models.oracle import StackedDisplacements, shift
from scaffpd.models.tables import MappedMatrix

CLIENTS = 2**13  # vectors that a server adds up in double precision, one by one


class LinearPoint:
    """All clients at one x: L_i and c_i = A_iᵀ r_i / m_i + l2 x, held as residuals r and never as N vectors.

    With `fine` rows, which have the same losses, L_i and c_i are computed in double precision for any format of x.
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
        if fine is None:
            self.z = self.predictions = rows.A @ x.view(-1, outputs)
            self.losses = rows.layout.segment_sum(
                loss.value(self.z, rows.y) * rows.share
            ) + l2 / 2 * (x @ x)
            return
        y, share = fine.exact
        self.predictions = fine.products.times(x.view(-1, outputs).to(fine.A.dtype))
        self.z = self.predictions.to(x.dtype)
        self.losses = (
            fine.layout.total(loss.value(self.predictions, y) * share) + l2 / 2 * self.square
        )
        if constant is not None:
            self.losses = self.losses + constant

    @cached_property
    def square(self) -> Tensor:
        """‖x‖²."""
        return squares(self.x)

    @cached_property
    def slopes(self) -> Tensor:
        """Derivatives r = ∂ℓ/∂z, sample by sample, in the format of the predictions."""
        return self.loss.residual(
            self.predictions, (self.rows.y if self.fine is None else self.fine.exact[0])
        )

    @cached_property
    def residual(self) -> Tensor:
        """Derivatives in the format of x."""
        return self.slopes.to(self.x.dtype)

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i c_i = Aᵀ(w ∘ r) + l2 (Σ w) x by one matrix product, for any N."""
        if self.fine is None:
            scale = (weights[self.rows.layout.owner] * self.rows.share)[:, None]
            return (
                transposed(self.rows.A, scale * self.residual).flatten()
                + self.l2 * weights.sum() * self.x
            )
        if self.fine.products.halves:
            scaled = self.fine.layout.scaled(
                self.residual, (weights.double() * self.fine.shares).to(self.x.dtype)
            )
            return torch.addcmul(
                (self.fine.A.T @ scaled).flatten(), (self.l2 * weights.sum()).to(self.x), self.x
            )
        weights = weights.double()
        x = self.x.double()
        scaled = self.fine.layout.scaled(self.slopes, weights * self.fine.shares)
        out = self.fine.products.transposed(scaled).flatten() + self.l2 * weights.sum() * x
        return out.to(self.x.dtype)

    def project(self, direction: Tensor) -> Tensor:
        """Return ⟨c_i, v⟩ per client."""
        return self._slopes(direction[:, None], self._along(direction[:, None]))[:, 0]

    def _along(self, V: Tensor) -> Tensor:
        """Return T = A V, the change of the predictions along the columns of V: (rows, outputs, k)."""
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
        """Compute Σ_i w_i VᵀH_iV = Σ_j (w/m) T_jᵀ ℓ''_j T_j + l2 (Σ w) VᵀV and the slopes from one product T = A V."""
        T = self._along(V)
        scale = (weights[self.rows.layout.owner] * self.rows.share)[:, None, None]
        inner = T.flatten(0, 1).mT @ (scale * self.bend(T)).flatten(0, 1)
        return Restriction(
            self._slopes(V, T), inner + self._ridged(weights, V), self.norms(1 / metric)
        )

    def bend(self, T: Tensor) -> Tensor:
        """Return ∂²ℓ/∂z² T for T (M, k, c)."""
        return self.loss.bend(self.z, self.rows.y, T)

    def _ridged(self, weights: Tensor, V: Tensor) -> Tensor:
        """Return the regulariser's part of Σ_i w_i VᵀH_iV."""
        return self.l2 * weights.sum() * (V.mT @ V)

    def curvatures(self, V: Tensor) -> Tensor:
        """Return every client's VᵀH_iV = Σ_j T_jᵀ ℓ''_j T_j / m_i + l2 VᵀV, (N, k, k), T = A V block by block."""
        k = V.shape[1]
        features = self.rows.A.shape[1]
        out = (self.l2 * (V.mT @ V)).repeat(len(self.rows.layout), 1, 1)
        for block in self.rows.blocks:
            z = block.of(self.z)
            weight = block.weight[..., None, None]
            large = self.rows.large(block)
            y = block.of(self.rows.y)
            pieces = [(slice(None), self.rows.of(block)[0])] if large is None else large.stream()
            for at, A in pieces:
                T = (A @ V.reshape(features, self.outputs * k)).view(*z[:, at].shape, k)
                bent = weight[:, at] * self.loss.bend(z[:, at], y[:, at], T)
                out[block.clients] += T.flatten(1, 2).mT @ bent.flatten(1, 2)
        return out

    def diagonal(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i diag H_i."""
        scale = (weights[self.rows.layout.owner] * self.rows.share)[:, None]
        bends = scale * self.loss.bends(self.z, self.rows.y)
        return (self.rows.A.square().mT @ bends).flatten() + self.l2 * weights.sum()

    def diagonals(self) -> Tensor:
        """Return every client's diag H_i, (N, d)."""
        bends = self.loss.bends(self.z, self.rows.y)
        if self.rows.stored:
            return self.rows.squared().each(bends).mT.flatten(1) + self.l2
        out = bends.new_empty(len(self.rows.layout), self.rows.A.shape[1], self.outputs)
        for block in self.rows.blocks:
            A, _ = self.rows.of(block)
            out[block.clients] = (
                product(A.square().mT, block.weight[..., None] * block.of(bends)) + self.l2
            )
        return out.flatten(1)

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the rounding errors of L_i and, in norm, of c_i, for the data, x and l2 as they are stored."""
        loss, gradient = self.arithmetic(self.size)
        return loss + bounded_square(
            self.size, len(self.x)
        ) * self.l2 / 2, gradient + self.scalings(self.l2 * self.size)

    @cached_property
    def size(self) -> Tensor | float:
        """‖x‖ from above, without waiting for a GPU."""
        size = root_above(self.square, len(self.x))
        return size if size.is_cuda else float(size)

    def arithmetic(self, size: Tensor | float) -> tuple[Tensor, Tensor]:
        """Bound the errors of sums, if the rows multiply vectors of length `size`.

        The error of a sum of n products is at most s(n) times the sum of their sizes, s(n) = γ_n in double precision
        (worst case: any order, any signs; see `DoubleProducts`). With a relative error v and an absolute error o of ℓ,
        w and j of r (`Loss.accuracy`), m rows of a client, M of all, and means over a client's rows:
        δz = s(d)‖a‖‖x‖,  δL = mean (‖r‖(1 + w) + j)δz + (curvature/2) mean δz² + (v + γ_{2√m})L + o,
        δc = mean ‖a‖(curvature δz + (w + s(M))‖r‖ + j).
        """
        fine = self.fine
        if fine is None:
            unknown = torch.full_like(self.losses, float("inf"))
            return unknown, unknown
        (levers, a, aa), products, m = fine.levers, fine.products, fine.layout.additions
        value, offset, slope, jump = (UNIT * error for error in self.loss.accuracy(self.outputs))
        curvature = steepness(self.loss, fine)
        features = fine.A.shape[1]
        rows = len(levers)
        k = products.slack(features) * size
        tiny = products.least * features * self.outputs
        ra = fine.layout.segment_sum(norm_above(self.slopes, 1).mul_(levers))
        loss = ((1 + slope) * k) * ra + (curvature * (k * k)) * aa
        loss = loss + (UNIT * SAFE * m + (value + tiny + 8 * UNIT * SAFE)) * self.losses.abs()
        loss = loss + (offset + curvature * tiny**2 + 2 * tiny + rows * LEAST)
        sums = max(products.slack(rows), products.each_slack(fine.layout.largest)) + gamma(CLIENTS)
        gradient = (
            (curvature * k) * aa
            + (slope + sums + self._format()) * ra
            + (curvature * tiny + 2 * jump) * a
        )
        if jump:
            loss = loss + (jump * k) * a
        return SAFE * loss, SAFE * gradient + rows * self._least() * (
            features * self.outputs
        ) ** 0.5

    def scalings(self, size: Tensor | float) -> Tensor | float:
        """Bound the error of l2 x in a sum over clients, for ‖l2 x‖."""
        return SAFE * (gamma(len(self.rows.layout) + CLIENTS + 8) + self._format()) * size

    def _format(self) -> float:
        """Rounding of vectors and weights in the format of x: λ_i, r_i, c_i, l2 x and their sum."""
        if self.x.dtype == torch.float64:
            return 0.0
        return (8 if self.fine is not None and self.fine.products.halves else 4) * SINGLE

    def _least(self) -> float:
        return LEAST if self._format() == 0 else 2.0**-126

    def each(self) -> Tensor:
        """Return the c_i themselves, (N, d), for stochastic local steps; they stay with the clients."""
        if self.fine is None or self.fine.products.single:
            return self._vectors(self.residual)
        each = self.fine.each(self.slopes).mT.flatten(1)
        return each.add_(self.x.double(), alpha=self.l2).to(self.x.dtype)

    def _vectors(self, residual: Tensor) -> Tensor:
        return self.rows.each(residual).mT.flatten(1).add(self.x, alpha=self.l2)


def steepness(loss: Loss, rows: StackedSamples) -> Tensor | float:
    """Bound ∂²ℓ/∂z² of every client's samples."""
    if not loss.uneven:
        return loss.curvature
    return rows.layout.segment_max(loss.steepness(rows.y).to(rows.share))


def squares(x: Tensor) -> Tensor:
    """Compute ‖x‖² in double precision, in blocks of about √d terms."""
    terms = x.double().square()
    if (d := len(terms)) <= SHORT:
        return terms.sum()
    width = math.isqrt(d)
    cut = d - d % width
    return terms[:cut].view(-1, width).sum(1).sum() + terms[cut:].sum()


def bounded_square(size: Tensor | float, d: int) -> Tensor | float:
    """Bound the error of ‖x‖² and of its product with l2/2, for ‖x‖ ≤ size."""
    n = d if d <= SHORT else 2 * math.isqrt(d) + 4
    return SAFE * gamma(n + 8) * size * size + d * LEAST


class LinearOracle:
    """N clients with a linear model: batched matrix products over clients, never a loop over them."""

    most_rows: float | None = float("inf")

    def __init__(
        self, rows: StackedSamples, loss: Loss, l2: float, outputs: int, names: list[str]
    ) -> None:
        self.rows = rows
        self.loss = loss
        self.l2 = l2
        self.outputs = outputs
        self.names = names
        self.dimension = rows.A.shape[1] * outputs

    @cached_property
    def _streams(self) -> Tensor:
        return streams(self.names, self.rows.share.device)

    @cached_property
    def _steep(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def _over(self) -> FeatureSteps:
        return FeatureSteps(self.loss, self.rows)

    @cached_property
    def _spaces(self) -> SampleSpaces:
        return SampleSpaces(self.loss, self.rows, self.outputs)

    def start(self) -> Tensor:
        """Return x⁰ = 0."""
        return self.rows.A.new_zeros(self.dimension)

    def contents(self) -> list[Tensor]:
        """Return samples, targets and the clients they belong to."""
        A: Tensor | MappedMatrix = self.rows.A
        return [
            *(A.contents() if isinstance(A, MappedMatrix) else [A]),
            self.rows.y,
            self.rows.layout.sizes,
        ]

    def constants(self) -> Constants:
        """Return L_i = curvature · λ_max(A_iᵀA_i)/m_i + l2 and μ_i = l2."""
        return self._known(torch.full_like(self.smoothness, self.l2, dtype=torch.float64))

    def _known(self, strong_convexity: Tensor) -> Constants:
        L, mu, steepest = (
            t.double().cpu().numpy() for t in (self.smoothness, strong_convexity, self.steepest)
        )
        return Constants(
            L, mu, True, steepest, self.rows.layout.sizes.cpu().numpy(), self.loss.quadratic
        )

    def only(self, clients: list[int]) -> LinearOracle:
        """Select some of the clients."""
        return type(self)(
            self.rows.only(clients),
            self.loss,
            self.l2,
            self.outputs,
            [self.names[i] for i in clients],
        )

    @cached_property
    def smoothness(self) -> Tensor:
        """L_i per client."""
        tops = self.rows.share.new_empty(len(self.rows.layout))
        each = self.loss.steepness(self.rows.y)
        most = self.rows.layout.segment_max(each.to(tops))
        each = each.sqrt().to(tops)

        def work(block: PaddedBlock) -> None:
            who = block.clients
            if (large := self.rows.large(block)) is not None:
                tops[who] = most[who] * large.largest_eigenvalue()
                return
            A = self.rows.alone(block)[0]
            if self.loss.uneven:
                tops[who] = largest_eigenvalues(A * block.of(each)[..., None])
            else:
                tops[who] = most[who] * largest_eigenvalues(A)

        parallel_map(work, self.rows.blocks, tops.device)
        return tops / self.rows.layout.sizes + self.l2

    @cached_property
    def steepest(self) -> Tensor:
        """max_j L_ij per client: the smoothness of its steepest single sample."""
        each = self.loss.steepness(self.rows.y).to(self.rows.norms)
        return self.rows.layout.segment_max(each * self.rows.norms.square()) + self.l2

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> LinearPoint:
        """Evaluate losses and gradients at x over all samples, or over a seeded minibatch of each client."""
        if batch_size is None:
            return self.samples(x, fine=True)
        uniform = Draws(key, self._streams).uniform(batch_size)
        rows = self.rows.take(self.rows.layout.minibatch(uniform))
        return LinearPoint(rows, self.loss, self.l2, x, self.outputs)

    def losses(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> Tensor:
        """Return f_i(x) without forming gradients."""
        point = self.samples(x) if batch_size is None else self.evaluate(x, batch_size, key)
        return point.losses

    def samples(self, x: Tensor, fine: bool = False) -> LinearPoint:
        """Evaluate every sample of every client at x; `fine` for certificates."""
        fine = fine or x.dtype == torch.float64
        return LinearPoint(
            self.rows, self.loss, self.l2, x, self.outputs, self.rows if fine else None
        )

    def local_updates(
        self, x: Tensor, at: LinearPoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> Displacements:
        """Take J local steps of every client; accumulate d_i itself, so that nothing cancels near the optimum."""
        if plan.batch_size is not None:
            return StackedDisplacements(self._stochastic(x, at, correction, plan))
        here, c, rates = *self._first(x, at, correction), self.rates(plan)
        keep = 1 - rates * (self.l2 + plan.prox)
        return FullBatches(
            self.rows, self._spaces, self.loss, here.z, here.residual, c, rates, keep, plan
        ).run()

    def _first(
        self, x: Tensor, at: LinearPoint | Tensor | None, correction: Tensor | None
    ) -> tuple[LinearPoint, Tensor]:
        """Evaluate the clients at x; return also g_i(x) − c_i + c, one for all, or (N, features, k)."""
        if isinstance(at, LinearPoint) and at.rows is self.rows and same_point(at.x, x):
            c = torch.zeros_like(x) if correction is None else correction
            return at, c.view(-1, self.outputs)
        here = self.samples(x)
        return here, (here.each() + shift(at, correction)).view(len(self.names), -1, self.outputs)

    def rates(self, plan: LocalPlan) -> Tensor:
        """Return η_i per client, shaped to multiply (N, d, k); 0 if the loss is flat."""
        if plan.rate is not None:
            return self.rows.share.new_full((len(self.rows.layout), 1, 1), plan.rate)
        L = self._expected(plan.batch_size)
        return torch.where(L > 0, plan.scale / L, 0)[:, None, None]

    def _expected(self, batch_size: int | None) -> Tensor:
        """Return the expected smoothness of the mean of b random samples; cached on the device."""
        if batch_size is None:
            return self.smoothness
        if batch_size not in self._steep:
            found = self.constants().expected_smoothness(batch_size)
            self._steep[batch_size] = torch.from_numpy(found).to(self.smoothness)
        return self._steep[batch_size]

    def _stochastic(
        self, x: Tensor, at: LinearPoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> Tensor:
        assert plan.batch_size is not None
        shape = (len(self.names), -1, self.outputs)
        rates = self.rates(plan)
        X = x.view(shape[1:]).mT.contiguous()
        first = (shift(at, correction) + self.l2 * x).expand(shape[0], -1)
        alike = None
        if at is None and correction is None and plan.rate is not None and not plan.prox:
            alike = 1 - plan.rate * self.l2
        steps = Minibatches(
            self.rows,
            self._spaces,
            self._over,
            self.loss,
            X,
            Draws(plan.key, self._streams).seeds,
            plan.batch_size,
            plan,
            rates,
            1 - rates * (self.l2 + plan.prox),
            first.view(shape).mT,
            alike,
        )
        return steps.run().mT.flatten(1)

    def proximal_steps(
        self, at: LinearPoint, correction: Tensor, plan: ProximalPlan
    ) -> Displacements:
        """Take J accelerated corrected steps in the metric D with the pull βD(u − x); J grows with √κ.

        With d = x − u: d⁺ = e + D⁻¹(c + ∇f_i(x − e) − ∇f_i(x) − βD e)/(L_i + β),  e = d + m (d − d_prev).
        """
        L = (
            self.smoothness if at.rows is self.rows else self.steepest
        )  # minibatch: at most the steepest sample's
        go = pace(plan, L.double().cpu().numpy(), self.l2)
        shape = (-1, self.outputs)
        c, D = (t.view(shape).mT.contiguous() for t in (correction, plan.metric))
        rates, momenta = (torch.from_numpy(t).to(c)[:, None, None] for t in (go.rates, go.momenta))
        each = c.new_empty(len(rates), *c.shape)
        stay = self.l2 + plan.pull * D
        z = at.z
        r = at.residual

        def work(block: PaddedBlock) -> None:
            near = NearbyGradients(
                self.loss, *at.rows.of(block), block.of(z), block.of(r), block.weight
            )
            rate = rates[block.clients] / D
            momentum = momenta[block.clients]
            each[block.clients] = proximal_steps(near, c, stay, rate, momentum, go.steps)

        parallel_map(work, at.rows.blocks, c.device)
        return StackedDisplacements(each.mT.flatten(1))

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return f_i(x) and the accuracy (NaN for regression), piece by piece."""
        loss = np.empty(len(self.names))
        accuracy = np.empty(len(self.names))
        labelled = True
        for clients, rows in self.rows.pieces:
            point = (
                self.samples(x)
                if rows is self.rows
                else LinearPoint(rows, self.loss, self.l2, x, self.outputs)
            )
            right = self.loss.correct(point.z, rows.y)
            layout = rows.layout
            loss[clients] = point.losses.double().cpu().numpy()
            labelled = labelled and right is not None
            if right is not None:
                accuracy[clients] = (
                    (layout.segment_sum(right.double()) / layout.sizes).cpu().numpy()
                )
        return loss, accuracy if labelled else np.full(len(accuracy), np.nan)
