r"""Minibatch local steps of linear models: d ← (1 − η(l2 + μ)) d + η (c − c_i + l2 x) + A_Bᵀ (η/b) r(x − d), J times.

Pieces of the clients, small enough for a core's cache, make all their steps before the next ones do, in the space of
their samples (`scaffpd.models.sample_space`) or over features, whichever is cheaper. Rows are drawn on the device, for
as many steps at a time as take little memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scaffpd.models.draws import Draws
from scaffpd.models.graphs import Replay
from scaffpd.models.local_steps import Products
from scaffpd.models.losses import Loss
from scaffpd.models.ragged import CACHE, Block, outside
from scaffpd.models.rows import Rows, product
from scaffpd.models.sample_space import Spaces, Steps, counted, total, widened
from scaffpd.models.threads import shared

SLAB = {"cpu": 2**22, "cuda": 2**27}  # numbers that are drawn and looked up at a time


@dataclass(frozen=True)
class Minibatches:
    """The steps of all clients.

    Attributes:
        rows: the samples.
        spaces: the clients in the space of their samples.
        over: makes steps over features.
        loss: ℓ.
        X: x as (k, features).
        seeds: of every client's draws, (N,).
        size: b.
        steps: J.
        rates: η_i, (N, 1, 1).
        keep: 1 − η(l2 + μ), (N, 1, 1).
        constant: c − c_i + l2 x, (N, k, features).
        alike: the number that `keep` is, where it is one for all, c = c_i and μ = 0 (FedAvg's steps).
    """

    rows: Rows
    spaces: Spaces
    over: FeatureSteps
    loss: Loss
    X: Tensor
    seeds: Tensor
    size: int
    steps: int
    rates: Tensor
    keep: Tensor
    constant: Tensor
    alike: float | None = None

    def run(self) -> Tensor:
        """The displacements of all clients, (N, k, features)."""
        n, (k, features) = len(self.seeds), self.X.shape
        out, near = self.X.new_empty(n, k, features), self.spaces.near(self.size, self.steps)

        def in_samples(block: Block) -> None:
            out[block.clients] = self.in_samples(block)

        def over_features(who: Tensor) -> None:
            out[who] = self.over_features(who)

        shared(in_samples, near, out.device)
        shared(over_features, pieces(outside(near, n, out.device), self.size * features), out.device)
        return out

    def slabs(self, who: Tensor, numbers: int) -> list[int]:
        """How many steps of some clients to draw at a time, if a step of one takes so many numbers."""
        most = max(1, SLAB.get(who.device.type, SLAB["cuda"]) // (len(who) * numbers))
        return [min(most, self.steps - first) for first in range(0, self.steps, most)]

    def in_samples(self, block: Block) -> Tensor:
        """All steps of a block of clients, by inner products of their samples."""
        who, push, (A, _), space = block.clients, self._push(block.clients), self.rows.of(block), self.spaces[block]
        draws, keep, m = Draws.of(self.seeds[who]), self.keep[who], A.shape[1]
        U, along = (widened(product(A, t.mT), len(self.X)).mT.contiguous() for t in (self.X, push))
        added, R = (1 - keep) * U - along, torch.zeros_like(U)
        for steps in self.slabs(who, m + 4 * self.size):
            drawn = self.rows.layout.minibatch(draws.uniform(steps * self.size).view(len(who), steps, -1), who)
            positions = drawn.rows - self.rows.layout.starts[who, None, None]
            weight = counted(positions, self.rates[who, 0] * drawn.weight, m, len(self.X))
            U, R = space.plain(U, R, Steps(weight, keep, added, steps), self.alike)
        return torch.baddbmm(total(keep, self.steps) * push, R[..., :m], A)

    def over_features(self, who: Tensor) -> Tensor:
        """All steps of some clients, minibatch by minibatch."""
        push, y, k, n, b = self._push(who), self.rows.y, len(self.X), len(who), self.size
        D, draws = torch.zeros_like(push), Draws.of(self.seeds[who])
        for steps in self.slabs(who, b * (k + 4)):
            drawn = self.rows.layout.minibatch(draws.uniform(steps * b).view(n, steps, b), who)
            numbers = drawn.rows.transpose(0, 1).reshape(steps, n * b)
            targets = self.loss.dense(y[numbers].view(steps, n, b, *y.shape[1:]), k, self.X.dtype)
            weight = (self.rates[who, 0] * drawn.weight)[:, None]
            D = self.over(D, numbers, targets, weight, self.X, push, self.keep[who])
        return D

    def _push(self, who: Tensor) -> Tensor:
        return (self.rates[who] * self.constant[who]).contiguous()


class FeatureSteps:
    """J steps over features, on a GPU as one graph.

    Args:
        loss: ℓ.
        rows: the samples of all clients.
    """

    def __init__(self, loss: Loss, rows: Rows) -> None:
        self.loss, self.A, self.stored = loss, rows.A, rows.stored
        self.replay = Replay(self.run)

    def __call__(self, *tensors: Tensor) -> Tensor:
        """`run`, recorded where that pays."""
        return self.run(*tensors) if self.stored else self.replay(*tensors)

    def run(
        self, D: Tensor, numbers: Tensor, y: Tensor, weight: Tensor, X: Tensor, push: Tensor, keep: Tensor
    ) -> Tensor:
        """The displacements after more steps, (n, k, features).

        Args:
            D: those before.
            numbers: (J, n·b), the rows of every step.
            y: (J, n, b, k), their targets.
            weight: η/b, 0 for padding, (n, 1, b).
            X: x, (k, features).
            push: η (c − c_i + l2 x), (n, k, features).
            keep: 1 − η(l2 + μ), (n, 1, 1).
        """
        D, sample = D.clone(), X.new_empty(len(push), weight.shape[2], X.shape[1])
        products, flat = Products(sample, len(X)), sample.view(-1, X.shape[1])
        for rows, targets in zip(numbers.unbind(), y.unbind(), strict=True):
            if self.stored:
                flat.copy_(self.A[rows])
            else:
                torch.index_select(self.A, 0, rows, out=flat)
            r = self.loss.residual(products.at(X, D).mT, targets).mT.mul_(weight)
            torch.addcmul(push, keep, D, out=D).baddbmm_(r, sample)
        return D


def pieces(clients: Tensor, numbers: int) -> list[Tensor]:
    """Clients of so many numbers each in pieces that fit into a cache; a GPU takes them all at once."""
    size = max(1, CACHE // max(1, numbers)) if clients.device.type == "cpu" else max(1, len(clients))
    return list(torch.split(clients, size)) if len(clients) else []
