r"""Full-gradient local steps of linear models: d ← (1 − η(l2 + μ)) d + η c + A_iᵀ (η/m_i)(r(x − d) − r(x)), J times.

c is a client's first corrected gradient g_i(x) − c_i + c. Where it is the same for all (Scaff-PD: g_i(x) = c_i) and
steps go in the space of samples, d_i = p_i c + A_iᵀ R_i, and Σ λ_i d_i is one matrix product on the stack of all
clients: nobody's d_i is ever formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scaffpd.models.local_steps import Surroundings, full_steps
from scaffpd.models.losses import Loss
from scaffpd.models.oracle import Displacements, Stack
from scaffpd.models.ragged import Block, outside
from scaffpd.models.rows import Rows, transposed
from scaffpd.models.sample_space import Spaces, Steps, total, widened
from scaffpd.models.threads import shared


class Span:
    """d_i = p_i c + A_iᵀ R_i of all clients, for c (features, k), p (N,) and R (M, k)."""

    def __init__(self, rows: Rows, c: Tensor, p: Tensor, R: Tensor | None) -> None:
        self.rows, self.c, self.p, self.R = rows, c, p, R

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i d_i."""
        common = (weights @ self.p) * self.c
        if self.R is not None:
            common = common + transposed(self.rows.A, weights[self.rows.layout.owner][:, None] * self.R)
        return common.flatten()

    def each(self) -> Tensor:
        """The d_i themselves, (N, d)."""
        common = self.p[:, None, None] * self.c
        if self.R is not None:
            common = common + self.rows.each(self.R / self.rows.share[:, None]).mT
        return common.flatten(1)


class Mixed:
    """A span, and vectors of the clients who are not in it."""

    def __init__(self, span: Span, who: Tensor, vectors: Tensor) -> None:
        self.span, self.who, self.vectors = span, who, vectors

    def sum(self, weights: Tensor) -> Tensor:
        """Σ_i w_i d_i."""
        return self.span.sum(weights) + weights[self.who] @ self.vectors

    def each(self) -> Tensor:
        """The d_i themselves, (N, d)."""
        return self.span.each().index_copy_(0, self.who, self.vectors)


@dataclass(frozen=True)
class FullBatches:
    """The steps of all clients.

    Attributes:
        rows: the samples.
        spaces: the clients in the space of their samples.
        loss: ℓ.
        z: the predictions at x, (M, k).
        r: the derivatives ∂ℓ/∂z there.
        c: the first corrected gradient, one for all, (features, k), or each client's own, (N, features, k).
        rates: η_i, (N, 1, 1).
        keep: 1 − η(l2 + μ), (N, 1, 1).
        steps: J.
    """

    rows: Rows
    spaces: Spaces
    loss: Loss
    z: Tensor
    r: Tensor
    c: Tensor
    rates: Tensor
    keep: Tensor
    steps: int

    def run(self) -> Displacements:
        """The displacements of all clients."""
        common = self.c.ndim == 2
        if common and self.steps == 1:
            return Span(self.rows, self.c, self.rates.flatten(), None)
        near = self.spaces.near(None, self.steps) if common else []
        if not near:
            return Stack(self.over_features(self.rows.blocks).mT.flatten(1))
        span = self.in_samples(near)
        who = outside(near, len(self.rates), self.rates.device)
        if not len(who):
            return span
        far = [block for block in self.rows.blocks if bool(torch.isin(block.clients, who).any())]
        span.p[who] = 0
        return Mixed(span, who, self.over_features(far)[who].mT.flatten(1))

    def in_samples(self, near: list[Block]) -> Span:
        """By inner products of samples: one matrix product for A c, and none with features in the steps."""
        along, R, k = self.rows.A @ self.c, torch.zeros_like(self.z), self.z.shape[1]

        def work(block: Block) -> None:
            rate = self.rates[block.clients]
            push, z, r = (widened(block.of(t), k).mT.contiguous() for t in (along, self.z, self.r))
            weight = widened((rate * block.weight[:, None]).mT, k).mT
            steps = Steps(weight, self.keep[block.clients], rate * push, self.steps)
            block.add(R, self.spaces[block].corrected(z, r, steps).mT)

        shared(work, near, R.device)
        return Span(self.rows, self.c, (self.rates * total(self.keep, self.steps)).flatten(), R)

    def over_features(self, blocks: list[Block]) -> Tensor:
        """Step by step, with every client's own d, (N, k, features); of clients in no block there is nothing."""
        n, (features, k) = len(self.rates), self.c.shape[-2:]
        c, out = self.c.expand(n, features, k).mT, self.z.new_empty(n, k, features)

        def work(block: Block) -> None:
            who, rate = block.clients, self.rates[block.clients]
            A, y = self.rows.of(block)
            near = Surroundings(self.loss, A, y, block.of(self.z), block.of(self.r), rate[:, 0] * block.weight)
            out[who] = full_steps(near, (rate * c[who]).contiguous(), self.keep[who], self.steps)

        shared(work, blocks, out.device)
        return out
