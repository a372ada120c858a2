r"""J local steps of all clients of a linear model, with full gradients or on minibatches.

    full gradients   d ← (1 − η(l2 + μ)) d + η c + A_iᵀ (η/m_i)(r(x − d) − r(x))
    minibatches      d ← (1 − η(l2 + μ)) d + η (c − c_i + l2 x) + A_Bᵀ (η/b) r(x − d)

With full gradients, c is a client's first corrected gradient g_i(x) − c_i + c. Where it is the same for all (Scaff-PD:
g_i(x) = c_i) and steps go in the space of samples, d_i = p_i c + A_iᵀ R_i, and Σ λ_i d_i is one matrix product on the
stack of all clients; no d_i is ever formed.

Work is split into pieces: a few clients whose samples fit into a core's cache. They take all J steps before the next
piece starts, so that the samples are read from memory once and not J times. Pieces are independent of each other, and
each core takes the next one. Minibatches are drawn on the device, for as many steps at a time as need little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from scaffpd.federation import LocalPlan
from scaffpd.federation.clients import Displacements
from scaffpd.models import local_steps
from scaffpd.models.layout import CACHE, PaddedBlock, StackedSamples, outside, product, transposed
from scaffpd.models.local_steps import NearbyGradients, Products, SampleSpaces, StepWeights
from scaffpd.models.losses import Loss
from scaffpd.models.numerics import Draws, GraphReplay, parallel_map
from scaffpd.models.oracle import StackedDisplacements


class SpanDisplacements:
    """d_i = p_i c + A_iᵀ R_i of all clients, for c (features, k), p (N,) and R (M, k)."""

    def __init__(self, rows: StackedSamples, c: Tensor, p: Tensor, R: Tensor | None) -> None:
        self.rows = rows
        self.c = c
        self.p = p
        self.R = R

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i d_i."""
        common = (weights @ self.p) * self.c
        if self.R is not None:
            common = common + transposed(
                self.rows.A, self.rows.layout.spread(weights)[:, None] * self.R
            )
        return common.flatten()

    def each(self) -> Tensor:
        """Return the d_i themselves, (N, d)."""
        common = self.p[:, None, None] * self.c
        if self.R is not None:
            common = common + self.rows.each(self.R / self.rows.share[:, None]).mT
        return common.flatten(1)


class MixedDisplacements:
    """Displacements of a span, and vectors of the clients outside it."""

    def __init__(self, span: SpanDisplacements, who: Tensor, vectors: Tensor) -> None:
        self.span = span
        self.who = who
        self.vectors = vectors

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i d_i."""
        return self.span.sum(weights) + weights[self.who] @ self.vectors

    def each(self) -> Tensor:
        """Return the d_i themselves, (N, d)."""
        return self.span.each().index_copy_(0, self.who, self.vectors)


@dataclass(frozen=True)
class FullBatches:
    """J local steps of all clients.

    Attributes:
        rows: the samples.
        spaces: the clients in the space of their samples.
        loss: ℓ.
        z: the predictions at x, (M, k).
        r: the derivatives ∂ℓ/∂z there.
        c: the first corrected gradient, one for all, (features, k), or each client's own, (N, features, k).
        rates: η_i, (N, 1, 1).
        keep: 1 − η(l2 + μ), (N, 1, 1).
        plan: J, or every J_i.
    """

    rows: StackedSamples
    spaces: SampleSpaces
    loss: Loss
    z: Tensor
    r: Tensor
    c: Tensor
    rates: Tensor
    keep: Tensor
    plan: LocalPlan

    def run(self) -> Displacements:
        """Return the displacements of all clients."""
        common = self.c.ndim == 2
        if common and self.plan.steps == 1:
            return SpanDisplacements(self.rows, self.c, self.rates.flatten(), None)
        near = self.spaces.near(None, self.plan.steps) if common else []
        if not near:
            return StackedDisplacements(self.over_features(self.rows.blocks).mT.flatten(1))
        span = self.in_samples(near)
        who = outside(near, len(self.rates), self.rates.device)
        if not len(who):
            return span
        far = [block for block in self.rows.blocks if bool(torch.isin(block.clients, who).any())]
        span.p[who] = 0
        return MixedDisplacements(span, who, self.over_features(far)[who].mT.flatten(1))

    def in_samples(self, near: list[PaddedBlock]) -> SpanDisplacements:
        """Take the steps in the space of samples: one matrix product for A c, and none with features in the steps."""
        along = self.rows.A @ self.c
        R = torch.zeros_like(self.z)
        k = self.z.shape[1]

        def work(block: PaddedBlock) -> None:
            rate = self.rates[block.clients]
            push, z, r = (
                local_steps.widened(block.of(t), k).mT.contiguous() for t in (along, self.z, self.r)
            )
            weight = local_steps.widened((rate * block.weight[:, None]).mT, k).mT
            steps = StepWeights(weight, self.keep[block.clients], rate * push, self.plan.steps)
            parts = local_steps.stages(self.plan.steps, self.plan.each, block.clients)
            block.add(R, self.spaces[block].corrected(z, r, steps, parts).mT)

        parallel_map(work, near, R.device)
        p = self.rates.flatten() * local_steps.total(self.keep.flatten(), self.plan.counts(R))
        return SpanDisplacements(self.rows, self.c, p, R)

    def over_features(self, blocks: list[PaddedBlock]) -> Tensor:
        """Take the steps with every client's own d, (N, k, features); clients in no block are left out."""
        n, (features, k) = len(self.rates), self.c.shape[-2:]
        c = self.c.expand(n, features, k).mT
        out = self.z.new_empty(n, k, features)

        def work(block: PaddedBlock) -> None:
            who = block.clients
            rate = self.rates[block.clients]
            A, y = self.rows.of(block)
            near = NearbyGradients(
                self.loss, A, y, block.of(self.z), block.of(self.r), rate[:, 0] * block.weight
            )
            parts = local_steps.stages(self.plan.steps, self.plan.each, who)
            out[who] = local_steps.full_steps(
                near, (rate * c[who]).contiguous(), self.keep[who], parts
            )

        parallel_map(work, blocks, out.device)
        return out


SLAB = {"cpu": 2**22, "cuda": 2**27}  # numbers that are drawn and gathered at a time


@dataclass(frozen=True)
class Minibatches:
    """J local steps of all clients.

    Attributes:
        rows: the samples.
        spaces: the clients in the space of their samples.
        over: makes steps over features.
        loss: ℓ.
        X: x as (k, features).
        seeds: seeds of the clients' draws, (N,).
        size: b.
        plan: J, or every J_i.
        rates: η_i, (N, 1, 1).
        keep: 1 − η(l2 + μ), (N, 1, 1).
        constant: c − c_i + l2 x, (N, k, features).
        alike: the common value of `keep`, if it is one for all, c = c_i and μ = 0 (FedAvg's steps).
    """

    rows: StackedSamples
    spaces: SampleSpaces
    over: FeatureSteps
    loss: Loss
    X: Tensor
    seeds: Tensor
    size: int
    plan: LocalPlan
    rates: Tensor
    keep: Tensor
    constant: Tensor
    alike: float | None = None

    def run(self) -> Tensor:
        """Return the displacements of all clients, (N, k, features)."""
        n, (k, features) = len(self.seeds), self.X.shape
        out = self.X.new_empty(n, k, features)
        near = self.spaces.near(self.size, self.plan.steps)
        far = outside(near, n, out.device)
        counts = self.plan.counts(out)
        if isinstance(counts, Tensor):  # clients with the same J go together
            far = far[counts[far].argsort(stable=True)]

        def in_samples(block: PaddedBlock) -> None:
            out[block.clients] = self.in_samples(block)

        def over_features(who: Tensor) -> None:
            out[who] = self.over_features(who)

        parallel_map(in_samples, near, out.device)
        parallel_map(over_features, cache_pieces(far, self.size * features), out.device)
        return out

    def slabs(self, who: Tensor, numbers: int) -> Iterator[tuple[int, Tensor | None, bool]]:
        """Yield the number of steps to draw at a time, if a step of one client needs `numbers` numbers.

        Also yield the clients that end with this stage (`None`: all), and whether the stage ends.
        """
        most = max(1, SLAB.get(who.device.type, SLAB["cuda"]) // (len(who) * numbers))
        for number, ending in local_steps.stages(self.plan.steps, self.plan.each, who):
            for first in range(0, number, most):
                yield min(most, number - first), ending, first + most >= number

    def in_samples(self, block: PaddedBlock) -> Tensor:
        """Take all steps of a block of clients, by inner products of their samples."""
        who, push, (A, _), space = (
            block.clients,
            self._push(block.clients),
            self.rows.of(block),
            self.spaces[block],
        )
        draws = Draws.of(self.seeds[who])
        keep = self.keep[who]
        m = A.shape[1]
        U = local_steps.widened(product(A, self.X.mT), len(self.X)).mT.contiguous()
        added = U[:0]
        R = torch.zeros_like(U)
        if self.alike is None or U.is_cuda:
            along = Products(A, len(self.X)).along(push)
            added = (1 - keep) * U - local_steps.widened(along.mT, len(self.X)).mT
        last = torch.empty_like(R)
        counts = self.plan.counts(R)
        for steps, ending, ends in self.slabs(who, m + 4 * self.size):
            drawn = self.rows.layout.minibatch(
                draws.uniform(steps * self.size).view(len(who), steps, -1), who
            )
            positions = drawn.rows - self.rows.layout.starts[who, None, None]
            weight = local_steps.counted(
                positions, self.rates[who, 0] * drawn.weight, m, len(self.X)
            )
            U, R = space.plain(U, R, StepWeights(weight, keep, added, steps), self.alike)
            if ends and ending is not None:
                last[ending] = R[ending]
        if isinstance(counts, Tensor):
            R = last
            counts = counts[who, None, None]
        return torch.baddbmm(local_steps.total(keep, counts) * push, R[..., :m], A)

    def over_features(self, who: Tensor) -> Tensor:
        """Take all steps of some clients, minibatch by minibatch."""
        push = self._push(who)
        y = self.rows.y
        k = len(self.X)
        n = len(who)
        b = self.size
        D = torch.zeros_like(push)
        last = torch.empty_like(push)
        draws = Draws.of(self.seeds[who])
        for steps, ending, ends in self.slabs(who, b * (k + 4)):
            drawn = self.rows.layout.minibatch(draws.uniform(steps * b).view(n, steps, b), who)
            numbers = drawn.rows.transpose(0, 1).reshape(steps, n * b)
            targets = self.loss.dense(y[numbers].view(steps, n, b, *y.shape[1:]), k, self.X.dtype)
            weight = (self.rates[who, 0] * drawn.weight)[:, None]
            D = self.over(D, numbers, targets, weight, self.X, push, self.keep[who])
            if ends and ending is not None:
                last[ending] = D[ending]
        return D if self.plan.each is None else last

    def _push(self, who: Tensor) -> Tensor:
        return (self.rates[who] * self.constant[who]).contiguous()


class FeatureSteps:
    """J steps over features, as one graph on a GPU.

    Args:
        loss: ℓ.
        rows: the samples of all clients.
    """

    def __init__(self, loss: Loss, rows: StackedSamples) -> None:
        self.loss = loss
        self.A = rows.A
        self.stored = rows.stored
        self.replay = GraphReplay(self.run)

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Run the steps, as a recorded graph where that is faster."""
        return self.run(*tensors) if self.stored else self.replay(*tensors)

    def run(
        self,
        D: Tensor,
        numbers: Tensor,
        y: Tensor,
        weight: Tensor,
        X: Tensor,
        push: Tensor,
        keep: Tensor,
    ) -> Tensor:
        """Return the displacements after more steps, (n, k, features).

        Args:
            D: displacements before.
            numbers: rows of every step, (J, n·b).
            y: their targets, (J, n, b, k).
            weight: η/b, 0 for padding, (n, 1, b).
            X: x, (k, features).
            push: η (c − c_i + l2 x), (n, k, features).
            keep: 1 − η(l2 + μ), (n, 1, 1).
        """
        D = D.clone()
        sample = X.new_empty(len(push), weight.shape[2], X.shape[1])
        along = Products(sample, len(X))
        flat = sample.view(-1, X.shape[1])
        for rows, targets in zip(numbers.unbind(), y.unbind(), strict=True):
            if self.stored:
                flat.copy_(self.A[rows])
            else:
                torch.index_select(self.A, 0, rows, out=flat)
            r = self.loss.residual(along.at(X, D).mT, targets).mT.mul_(weight)
            along.back(r, torch.addcmul(push, keep, D, out=D))
        return D


def cache_pieces(clients: Tensor, numbers: int) -> list[Tensor]:
    """Split clients of `numbers` numbers each into pieces that fit into a cache; a GPU takes them all at once."""
    size = (
        max(1, CACHE // max(1, numbers)) if clients.device.type == "cpu" else max(1, len(clients))
    )
    return list(torch.split(clients, size)) if len(clients) else []
