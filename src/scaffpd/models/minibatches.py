r"""Minibatch local steps of linear models: d ← (1 − η(l2 + μ)) d + η (c − c_i + l2 x) + A_Bᵀ (η/b) r(x − d), J times.

Everybody's rows B are drawn first, on the device; then pieces of the clients, small enough for a core's cache, make all
their steps, in the space of their samples (`scaffpd.models.sample_space`) or over features, whichever is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
        far = torch.ones(n, dtype=torch.bool, device=out.device)

        def in_samples(block: Block) -> None:
            out[block.clients] = self.in_samples(block)

        def over_features(who: Tensor) -> None:
            out[who] = self.over_features(who)

        for block in near:
            far[block.clients] = False
        shared(in_samples, near, out.device)
        shared(over_features, pieces(torch.nonzero(far)[:, 0], b * features), out.device)
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
        batches = Batches(self.loss, self.rows, self.drawn.rows[who], len(self.X))
        products, weight = Products(batches.sample, len(self.X)), (self.rates[who, 0] * self.drawn.weight[who])[:, None]
        push, keep = self._push(who), self.keep[who]
        D = torch.zeros_like(push)
        for y in batches:
            r = self.loss.residual(products.at(self.X, D).mT, y).mT.mul_(weight)
            torch.addcmul(push, keep, D, out=D).baddbmm_(r, batches.sample)
        return D

    def _push(self, who: Tensor) -> Tensor:
        return (self.rates[who] * self.constant[who]).contiguous()


class Batches:
    """The minibatches of some clients, step by step.

    Args:
        loss: knows how targets are compared with predictions.
        rows: the samples of all clients.
        numbers: (n, J, b), which of them are drawn.
        k: outputs.
    """

    def __init__(self, loss: Loss, rows: Rows, numbers: Tensor, k: int) -> None:
        n, steps, b = numbers.shape
        self.A, self.numbers = rows.A, numbers.transpose(0, 1).reshape(steps, n * b)
        self.stored = not isinstance(rows.A, Tensor)
        self.y = loss.dense(rows.y[self.numbers].view(steps, n, b, *rows.y.shape[1:]), k, rows.A.dtype)
        self.sample = torch.empty(n, b, rows.A.shape[1], dtype=rows.A.dtype, device=rows.A.device)

    def __iter__(self) -> Iterator[Tensor]:
        """The targets of every step, (n, b, k), with the samples in `sample` until the next."""
        flat = self.sample.view(-1, self.A.shape[1])
        for numbers, y in zip(self.numbers.unbind(), self.y.unbind(), strict=True):
            if self.stored:
                flat.copy_(self.A[numbers])
            else:
                torch.index_select(self.A, 0, numbers, out=flat)
            yield y


def pieces(clients: Tensor, numbers: int) -> list[Tensor]:
    """Clients of so many numbers each in pieces that fit into a cache; a GPU takes them all at once."""
    size = max(1, CACHE // numbers) if clients.device.type == "cpu" else max(1, len(clients))
    return list(torch.split(clients, size)) if len(clients) else []
