r"""Minibatch local steps of linear models: d ← (1 − η(l2 + μ)) d + η (c − c_i + l2 x) + A_Bᵀ (η/b) r(x − d), J times.

Everybody's rows B are drawn first, on the device; then pieces of the clients, small enough for a core's cache, make all
their steps, in the space of their samples (`scaffpd.models.sample_space`) or over features, whichever is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scaffpd.models.graphs import Replay
from scaffpd.models.local_steps import Products
from scaffpd.models.losses import Loss
from scaffpd.models.ragged import CACHE, Block
from scaffpd.models.rows import Rows, product
from scaffpd.models.sample_space import SampleSpace, Steps, counted, pays, total, widened
from scaffpd.models.threads import shared


@dataclass(frozen=True)
class Minibatches:
    """The steps of all clients.

    Attributes:
        rows: the samples.
        spaces: finds a block's clients in the space of their samples.
        steps: makes steps over features.
        loss: ℓ.
        X: x as (k, features).
        drawn: the rows of every step, (N, J, b), and what each counts for, (N, b).
        rates: η_i, (N, 1, 1).
        keep: 1 − η(l2 + μ), (N, 1, 1).
        constant: c − c_i + l2 x, (N, k, features).
        alike: the number that `keep` is, where it is one for all, c = c_i and μ = 0 (FedAvg's steps).
    """

    rows: Rows
    spaces: Callable[[Block], SampleSpace]
    steps: FeatureSteps
    loss: Loss
    X: Tensor
    drawn: Block
    rates: Tensor
    keep: Tensor
    constant: Tensor
    alike: float | None = None

    def run(self) -> Tensor:
        """The displacements of all clients, (N, k, features)."""
        (n, steps, b), (k, features) = self.drawn.rows.shape, self.X.shape
        out = self.X.new_empty(n, k, features)
        blocks = self.rows.blocks if isinstance(self.rows.A, Tensor) else []
        near = [block for block in blocks if pays(block.rows.shape[1], b, features, k, steps, collected=True)]
        rest = n - sum(len(block.clients) for block in near)

        def in_samples(block: Block) -> None:
            out[block.clients] = self.in_samples(block)

        def over_features(who: Tensor) -> None:
            out[who] = self.over_features(who)

        shared(in_samples, near, out.device)
        if rest:
            shared(over_features, pieces(others(n, near, out.device), b * features), out.device)
        return out

    def in_samples(self, block: Block) -> Tensor:
        """All steps of a block of clients, by inner products of their samples."""
        who, push, (A, _) = block.clients, self._push(block.clients), self.rows.of(block)
        positions, keep = self.drawn.rows[who] - self.rows.layout.starts[who, None, None], self.keep[who]
        weight = counted(positions, self.rates[who, 0] * self.drawn.weight[who], A.shape[1])
        z, along = (widened(product(A, t.mT)).mT.contiguous() for t in (self.X, push))
        steps = Steps(weight, keep, along, positions.shape[1])
        R = self.spaces(block).plain(z, steps, self.alike)[..., : A.shape[1]]
        return torch.baddbmm(total(keep, steps.number) * push, R, A)

    def over_features(self, who: Tensor) -> Tensor:
        """All steps of some clients, minibatch by minibatch."""
        (n, steps, b), y, k = (len(who), *self.drawn.rows.shape[1:]), self.rows.y, len(self.X)
        numbers = self.drawn.rows[who].transpose(0, 1).reshape(steps, n * b)
        targets = self.loss.dense(y[numbers].view(steps, n, b, *y.shape[1:]), k, self.X.dtype)
        weight = (self.rates[who, 0] * self.drawn.weight[who])[:, None]
        return self.steps(numbers, targets, weight, self.X, self._push(who), self.keep[who])

    def _push(self, who: Tensor) -> Tensor:
        return (self.rates[who] * self.constant[who]).contiguous()


class FeatureSteps:
    """J steps over features, on a GPU as one graph.

    Args:
        loss: ℓ.
        A: (M, features), the samples of all clients, as a tensor or in a store.
    """

    def __init__(self, loss: Loss, A: Tensor) -> None:
        self.loss, self.A, self.stored = loss, A, not isinstance(A, Tensor)
        self.replay = Replay(self.run)

    def __call__(self, *tensors: Tensor) -> Tensor:
        """`run`, recorded where that pays."""
        return self.run(*tensors) if self.stored else self.replay(*tensors)

    def run(self, numbers: Tensor, y: Tensor, weight: Tensor, X: Tensor, push: Tensor, keep: Tensor) -> Tensor:
        """The displacements, (n, k, features).

        Args:
            numbers: (J, n·b), the rows of every step.
            y: (J, n, b, k), their targets.
            weight: η/b, 0 for padding, (n, 1, b).
            X: x, (k, features).
            push: η (c − c_i + l2 x), (n, k, features).
            keep: 1 − η(l2 + μ), (n, 1, 1).
        """
        sample, D = X.new_empty(len(push), weight.shape[2], X.shape[1]), torch.zeros_like(push)
        products, flat = Products(sample, len(X)), sample.view(-1, X.shape[1])
        for rows, targets in zip(numbers.unbind(), y.unbind(), strict=True):
            if self.stored:
                flat.copy_(self.A[rows])
            else:
                torch.index_select(self.A, 0, rows, out=flat)
            r = self.loss.residual(products.at(X, D).mT, targets).mT.mul_(weight)
            torch.addcmul(push, keep, D, out=D).baddbmm_(r, sample)
        return D


def others(clients: int, near: list[Block], device: torch.device) -> Tensor:
    """The numbers of those who are in no block."""
    if not near:
        return torch.arange(clients, device=device)
    far = torch.ones(clients, dtype=torch.bool, device=device)
    for block in near:
        far[block.clients] = False
    return torch.nonzero(far)[:, 0]


def pieces(clients: Tensor, numbers: int) -> list[Tensor]:
    """Clients of so many numbers each in pieces that fit into a cache; a GPU takes them all at once."""
    size = max(1, CACHE // numbers) if clients.device.type == "cpu" else max(1, len(clients))
    return list(torch.split(clients, size)) if len(clients) else []
