r"""Linear models of N clients at once, by hand-batched matrix products and without autograd:

f_i(x) = (1/m_i) Σ_j ℓ(⟨a_j, x⟩, y_j) + ½ Σ_k l2_k x_k²
c_i = ∇f_i(x) = A_iᵀ r_i / m_i + l2 ∘ x,    r = ∂ℓ/∂z
"""

from __future__ import annotations

from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation import Constants, LocalPlan, Vector, same_point
from scaffpd.federation.questions import Displacements, EvaluatedPoint
from scaffpd.models.corrections import CorrectionProblem
from scaffpd.models.draws import Draws, streams
from scaffpd.models.execution import GraphReplay, parallel_map
from scaffpd.models.local_problem import LocalProblem
from scaffpd.models.local_steps import (
    FeatureSteps,
    Path,
    SampleSteps,
    SpanDisplacements,
    cheapest_path,
)
from scaffpd.models.losses import Loss
from scaffpd.models.numerics import largest_eigenvalues
from scaffpd.models.oracle import shift
from scaffpd.models.point import LinearPoint, Ridge
from scaffpd.models.rows import RowsOracle
from scaffpd.models.samples import PaddedBlock, StackedSamples

LEVEL = 1e-6  # ridge that a client's own optimum has at least


class RecalledPoint(LinearPoint):
    """All clients at an x that a GPU has evaluated by a recorded graph, as `known` was at its x."""

    def __init__(self, known: LinearPoint, x: Tensor, packed: Tensor, added: GraphReplay) -> None:
        self.replay = added
        for name in ("rows", "loss", "ridge", "outputs", "fine", "level"):
            setattr(self, name, getattr(known, name))
        self.x = x
        shape = known.predictions.shape
        n = shape.numel()
        self.predictions = packed[:n].view(shape)
        self.slopes = packed[n : 2 * n].view(shape)
        self.z = self.predictions.to(x.dtype)
        self.losses, *self.errors = packed[2 * n :].view(3, -1)

    def rounding(self) -> tuple[Tensor, Tensor]:
        return self.errors[0], self.errors[1]

    def sum(self, weights: Tensor) -> Tensor:
        return self.replay(weights.double(), self.slopes, self.x)


class LinearOracle(RowsOracle):
    """N clients with a linear model: batched matrix products, never a loop over clients."""

    held = False  # whether these are held-out rows, whose losses are counted from zero

    def __init__(
        self, rows: StackedSamples, loss: Loss, ridge: Ridge, outputs: int, names: list[str]
    ) -> None:
        super().__init__(rows, ridge, outputs, names)
        self.loss = loss
        self._expected: dict[int, Tensor] = {}
        self._over_features = FeatureSteps(loss, rows)
        self._in_samples = SampleSteps(loss, rows, outputs)

    @cached_property
    def _streams(self) -> Tensor:
        return streams(self.names, self.rows.share.device)

    def constants(self) -> Constants:
        """Return L_i = curvature · λ_max(A_iᵀA_i)/m_i + max l2 and μ_i = min l2.

        Of losses that are not smooth L_i are estimates.
        """
        return self._constants(torch.zeros_like(self.smoothness, dtype=torch.float64))

    def _constants(self, bottom: Tensor) -> Constants:
        """Return the constants, for mean losses that are `bottom`-strongly convex."""
        numbers = (self.smoothness, bottom + self.ridge.least, self._steepest + self.ridge.most)
        L, mu, steepest = (t.double().cpu().numpy() for t in numbers)
        sizes = self.rows.layout.sizes.cpu().numpy()
        return Constants(
            L, mu, True, steepest, sizes, self.loss.quadratic, ridge=self.ridge.vector()
        )

    def only(self, clients: list[int]) -> LinearOracle:
        names = [self.names[i] for i in clients]
        chosen = type(self)(self.rows.only(clients), self.loss, self.ridge, self.outputs, names)
        chosen.held = self.held
        if self.level is not None:
            vars(chosen)["level"] = self.level[clients]
        return chosen

    def using(self, ridge: Ridge) -> Self:
        other = super().using(ridge)
        other._expected = {}
        for name in ("level", "_recorded"):
            vars(other).pop(name, None)
        return other

    @cached_property
    def level(self) -> Tensor | None:
        """What f_i counts from, with a minus sign: of counts every client's own optimum.

        Deviances grow with exposures and are never zero, so that clients cannot be compared by
        them. It is min_u f_i(u), or about that where a ridge of `LEVEL` is needed to find it.
        """
        if self.loss.smooth or self.held:
            return None
        k = self.rows.A.shape[1]
        l2 = self.ridge.times(self.rows.A.new_ones(k).double())
        root = l2.clamp_min(LEVEL).rsqrt()
        found = l2.new_empty(len(self.rows.layout))

        def work(block: PaddedBlock) -> None:
            A, y = self.rows.of(block)
            z = l2.new_zeros(*y.shape[:2], 1)
            share = torch.where(block.weight > 0, block.of(self.rows.exact[1]), 0)
            near = CorrectionProblem(self.loss, A * root, y.double(), z, share)
            w, _, value, _ = near.solve(z.new_zeros(len(y), k, 1))
            more = (w[..., 0].square() * (l2 < LEVEL)).sum(1)
            found[block.clients] = more - value

        parallel_map(work, self.rows.blocks, found.device)
        return found

    @property
    def smoothness(self) -> Tensor:
        return self._top + self.ridge.most

    @cached_property
    def _top(self) -> Tensor:
        """L_i without the regulariser."""
        tops = self.rows.share.new_empty(len(self.rows.layout))
        each = self.loss.steepness(self.rows.y).sqrt().to(tops)

        def work(block: PaddedBlock) -> None:
            A = self.rows.alone(block)[0]
            tops[block.clients] = largest_eigenvalues(A * block.of(each)[..., None])

        parallel_map(work, self.rows.blocks, tops.device)
        return tops / self.rows.layout.sizes

    @cached_property
    def _steepest(self) -> Tensor:
        """max_j L_ij per client without the regulariser, of its steepest single sample."""
        each = self.loss.steepness(self.rows.y).to(self.rows.norms)
        return self.rows.layout.segment_max(each * self.rows.norms.square())

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> LinearPoint:
        """Evaluate losses and gradients at x over all samples, or over seeded minibatches."""
        if batch_size is None:
            return self._at(x)
        uniform = Draws(key, self._streams).uniform(batch_size)
        rows = self.rows.take(self.rows.layout.minibatch(uniform))
        bound = (rows, self.loss, self.ridge, x, self.outputs)
        return LinearPoint(*bound, constant=self.level)

    def _point(self, x: Tensor) -> LinearPoint:
        return self.samples(x, fine=True)

    def _at(self, x: Tensor) -> LinearPoint:
        """Evaluate all samples; on a GPU by a graph, if bounds on rounding ask nothing of x."""
        if not (x.is_cuda and self.ridge.even and self._rows().alike):
            return self._point(x)
        packed = self._recorded[0](x)
        return RecalledPoint(self._known, x, packed, self._recorded[1])

    @cached_property
    def _recorded(self) -> tuple[GraphReplay, GraphReplay]:
        return GraphReplay(self._packed), GraphReplay(self._added)

    def _added(self, weights: Tensor, slopes: Tensor, x: Tensor) -> Tensor:
        return self._known.added(weights, slopes, x)

    def _packed(self, x: Tensor) -> Tensor:
        self._known = self._point(x)
        return self._known.packed()

    def losses(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> Tensor:
        point = self.samples(x) if batch_size is None else self.evaluate(x, batch_size, key)
        return point.losses

    def samples(self, x: Tensor, fine: bool = False) -> LinearPoint:
        """Evaluate every sample of every client at x; `fine` for certificates."""
        fine = fine or x.dtype == torch.float64
        rows = self.rows
        bound = (rows, self.loss, self.ridge, x, self.outputs)
        return LinearPoint(*bound, rows if fine else None, self.level)

    def local_updates(
        self,
        x: Tensor,
        at: EvaluatedPoint | Tensor | None,
        correction: Tensor | None,
        plan: LocalPlan,
    ) -> Displacements:
        """Take J local steps of every client.

        d_i itself is accumulated, so that nothing cancels near the optimum.
        """
        if plan.batch_size is None:
            here, c = self._first(x, at, correction)
            z = here.z
            r = here.residual
            rest: Tensor | None = c
        else:
            z = self.rows.times(x.view(-1, self.outputs))
            r = None
            moved = shift(at, correction)
            rest = self._own(moved) if isinstance(moved, Tensor) else None
            c = self._own(moved + self.ridge.times(x))
        rates = self.rates(plan)
        if plan.batch_size is None and plan.steps == 1 and self.loss.smooth:
            return SpanDisplacements(self.rows, c, rates.flatten(), None)
        seeds = Draws(plan.key, self._streams).seeds
        l2 = self.ridge.shaped(self._own(x)).mT
        problem = LocalProblem(self.rows, self.loss, z, r, c, rest, rates, l2, plan, seeds)
        path = cheapest_path(self.rows, self.loss, self.outputs, plan, self.ridge.even)
        steps = self._in_samples if path is Path.SAMPLES else self._over_features
        return steps.run(problem)

    def _own(self, vectors: Tensor) -> Tensor:
        """Reshape x-like vectors, one for all or (N, d), to (features, k) or (N, features, k)."""
        return vectors.view(*vectors.shape[:-1], -1, self.outputs)

    def _first(
        self, x: Tensor, at: EvaluatedPoint | Tensor | None, correction: Tensor | None
    ) -> tuple[LinearPoint, Tensor]:
        """Evaluate the clients at x; return also g_i(x) − c_i + c, one for all or one for each."""
        if isinstance(at, LinearPoint) and at.rows is self._rows() and same_point(at.x, x):
            return at, self._own(torch.zeros_like(x) if correction is None else correction)
        here = self.evaluate(x)
        return here, self._own(here.each() + shift(at, correction))

    def _rows(self) -> StackedSamples:
        return self.rows

    def rates(self, plan: LocalPlan) -> Tensor:
        """Return η_i per client, shaped to multiply (N, d, k); 0 if the loss is flat."""
        if plan.rate is not None:
            return self.rows.share.new_full((len(self.rows.layout), 1, 1), plan.rate)
        L = self.smoothness
        b = plan.batch_size
        if b is not None:  # the expected smoothness of the mean of b random samples
            if b not in self._expected:
                found = self.constants().expected_smoothness(b)
                self._expected[b] = torch.from_numpy(found).to(L)
            L = self._expected[b]
        return torch.where(L > 0, plan.scale / L, 0)[:, None, None]

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        point = self.samples(x)
        layout = self.rows.layout
        right = self.loss.correct(point.z, self.rows.y)
        accuracy = np.full(len(layout), np.nan)
        if right is not None:
            accuracy = (layout.segment_sum(right.double()) / layout.sizes).cpu().numpy()
        return point.losses.double().cpu().numpy(), accuracy
