"""Local steps over features, with every client's own d (see `local_steps`)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from scaffpd.models.graphs import GraphReplay
from scaffpd.models.layout import CACHE, PaddedBlock
from scaffpd.models.local_steps import LocalProblem
from scaffpd.models.losses import Loss
from scaffpd.models.oracle import StackedDisplacements
from scaffpd.models.samples import Products, StackedSamples
from scaffpd.models.threads import parallel_map


class FeatureSteps:
    """Local steps over features, with every client's own d; a recorded graph for minibatches."""

    def __init__(self, loss: Loss, rows: StackedSamples) -> None:
        self.loss = loss
        self.rows = rows
        self._loop = GraphReplay(partial(_minibatch_loop, loss, rows.A))

    def run(self, problem: LocalProblem) -> StackedDisplacements:
        """Take the steps of all clients."""
        n, k = len(problem.rates), problem.z.shape[1]
        features = self.rows.A.shape[1]
        out = problem.z.new_empty(n, k, features)
        c = problem.c.expand(n, features, k).mT
        keep = problem.keep

        def full(block: PaddedBlock) -> None:
            who = block.clients
            push = (problem.rates[who] * c[who]).contiguous()
            out[who] = self._full(problem, block, push, keep[who])

        def minibatches(who: Tensor) -> None:
            push = (problem.rates[who] * c[who]).contiguous()
            out[who] = self._minibatches(problem, who, push, keep[who])

        b = problem.plan.batch_size
        if b is None:
            parallel_map(full, self.rows.blocks, out.device)
        else:
            # Pieces of clients whose minibatches fit into a cache; a GPU takes all at once.
            size = max(1, CACHE // (b * features)) if out.device.type == "cpu" else n
            pieces = torch.split(torch.arange(n, device=out.device), size)
            parallel_map(minibatches, pieces, out.device)
        return StackedDisplacements(out.mT.flatten(1))

    def _full(
        self, problem: LocalProblem, block: PaddedBlock, push: Tensor, keep: Tensor
    ) -> Tensor:
        A, y = self.rows.of(block)
        assert problem.r is not None
        weight = problem.rates[block.clients, 0] * block.weight
        near = NearbyGradients(self.loss, A, y, block.of(problem.z), block.of(problem.r), weight)
        D = push.clone()  # the first step: nothing has changed at d = 0
        for _ in range(1, problem.plan.steps):
            change = near.change(D)
            near.products.back(change, torch.addcmul(push, keep, D, out=D))
        return D

    def _minibatches(
        self, problem: LocalProblem, who: Tensor, push: Tensor, keep: Tensor
    ) -> Tensor:
        rows = self.rows
        k = problem.z.shape[1]
        b = problem.plan.batch_size or 0
        D = torch.zeros_like(push)
        for first, last, drawn in problem.slabs(who, b * (2 * k + 4)):
            assert drawn is not None
            numbers = drawn.rows.transpose(0, 1).reshape(last - first, len(who) * b)
            shape = (last - first, len(who), b)
            y = self.loss.dense(rows.y[numbers].view(*shape, -1), k, push.dtype)
            z = problem.z[numbers].view(*shape, k).mT.contiguous()
            weight = (problem.rates[who, 0] * drawn.weight)[:, None]
            D = self._loop(D, numbers, y, z, weight, push, keep)
        return D


def _minibatch_loop(
    loss: Loss,
    A: Tensor,
    D: Tensor,
    numbers: Tensor,
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    push: Tensor,
    keep: Tensor,
) -> Tensor:
    """Return the displacements after more steps, (n, k, features).

    Args:
        loss: ℓ.
        A: the samples of all clients.
        D: displacements before.
        numbers: rows of every step, (steps, n·b).
        y: their targets, (steps, n, b, ·).
        z: their predictions at x, (steps, n, k, b).
        weight: η/b, 0 for padding, (n, 1, b).
        push: η c, (n, k, features).
        keep: 1 − η(l2 + μ), (n, 1, 1) or (n, k, features).
    """
    D = D.clone()
    sample = push.new_empty(len(push), weight.shape[2], push.shape[2])
    products = Products(sample, push.shape[1])
    flat = sample.view(-1, push.shape[2])
    for t in range(len(numbers)):
        torch.index_select(A, 0, numbers[t], out=flat)
        ahead = torch.sub(z[t], products.along(D), out=products.out)
        r = loss.residual(ahead.mT, y[t]).mT.mul_(weight)
        products.back(r, torch.addcmul(push, keep, D, out=D))
    return D


class NearbyGradients:
    """Gradients of some clients near x: their change A_iᵀ W_i (r(x − d) − r(x)).

    Args:
        loss: ℓ.
        A: (n, m, features), the samples.
        y: (n, m, ·), the targets.
        z: (n, m, k), the predictions at x.
        r: (n, m, k), the derivatives ∂ℓ/∂z there.
        weight: (n, m), W_i.
    """

    def __init__(
        self, loss: Loss, A: Tensor, y: Tensor, z: Tensor, r: Tensor, weight: Tensor
    ) -> None:
        self.loss = loss
        self.y = loss.dense(y, z.shape[2], A.dtype)
        self.z = z.mT.contiguous()
        self.r = r.mT.contiguous()
        self.weight = weight[:, None]
        self.products = Products(A, z.shape[2])

    def change(self, D: Tensor) -> Tensor:
        """Return W (r(x − D) − r(x)), (n, k, m), for D (n, k, features)."""
        z = torch.sub(self.z, self.products.along(D), out=self.products.out)
        return self.loss.residual(z.mT, self.y).mT.sub_(self.r).mul_(self.weight)
