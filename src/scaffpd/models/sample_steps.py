"""Local steps by the inner products of a client's samples (see `local_steps`)."""

from __future__ import annotations

import platform
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from scaffpd.models.graphs import GraphReplay
from scaffpd.models.layout import PaddedBlock
from scaffpd.models.local_steps import (
    LocalProblem,
    SpanDisplacements,
    stores_inner_products,
    total,
)
from scaffpd.models.losses import Loss
from scaffpd.models.samples import FEW, Products, StackedSamples, product
from scaffpd.models.threads import parallel_map

# Bytes of a processor's registers.
REGISTER = 64 if platform.machine() in ("x86_64", "AMD64") else 16


class SampleSteps:
    """Local steps by the inner products of samples; K_i is stored if it is small."""

    def __init__(self, loss: Loss, rows: StackedSamples, outputs: int) -> None:
        self.loss = loss
        self.rows = rows
        self.outputs = outputs
        self.loops: dict[int, GraphReplay] = {}

    def _loop(self, number: int, block: PaddedBlock) -> GraphReplay:
        """Return the loop over steps of a block of clients."""
        loop = self.loops.get(number)
        if loop is None:
            A, y = self.rows.of(block)
            A = widened(A, self.outputs)
            y = widened(self.loss.dense(y, self.outputs, A.dtype), self.outputs).mT
            K = in_layout(-torch.bmm(A, A.mT), block)
            loop = GraphReplay(partial(_sample_loop, self.loss, K, in_layout(y, block)))
            if stores_inner_products(self.rows):
                self.loops[number] = loop
        return loop

    def run(self, problem: LocalProblem) -> SpanDisplacements:
        """Take the steps; one matrix product gives A c, and none with features is in the steps."""
        rows = self.rows
        rest = problem.rest
        common = rest is not None and rest.ndim == 2
        along = rows.A @ rest if rest is not None and common else None
        faded = 0.0 if problem.plan.batch_size is None else float(problem.l2)
        out = torch.zeros_like(problem.z)
        rates = problem.rates
        keep = problem.keep

        def work(item: tuple[int, PaddedBlock]) -> None:
            number, block = item
            who = block.clients
            push = along
            if rest is not None and not common:
                push = product(rows.of(block)[0], rest[who])
            Z, P, r = (self._across(block, t) for t in (problem.z, push, problem.r))
            R = torch.zeros_like(Z)
            m = Z.shape[2]
            b = problem.plan.batch_size
            for first, last, drawn in problem.slabs(who, 4 if b is None else m + 4 * b):
                if drawn is None:
                    weight = self._across(block, rates[who] * block.weight[..., None])[None]
                else:
                    places = drawn.rows - rows.layout.starts[who, None, None]
                    weight = counted(places, rates[who, 0] * drawn.weight, m)
                p = rates[who] * totals(keep[who], first, last)
                fade = 1 - faded * p
                R = self._loop(number, block)(R, Z, P, r, weight, p, fade, keep[who])
            block.put(out, R.mT)

        parallel_map(work, list(enumerate(rows.squares)), out.device)
        p = rates.flatten() * total(keep.flatten(), problem.plan.steps)
        return SpanDisplacements(rows, problem.c, p, out)

    def _across(self, block: PaddedBlock, values: Tensor | None) -> Tensor:
        """Return numbers of the samples output by output and with padding, (n, k, m)."""
        if values is None:
            return block.weight.new_zeros(())
        if values.ndim == 2:
            values = block.of(values)
        return in_layout(widened(values, self.outputs).mT, block)


def in_layout(values: Tensor, block: PaddedBlock) -> Tensor:
    """Store (n, ...) contiguously, client by client; those of a few samples along the clients.

    There one operation on all clients takes the place of one product for each.
    """
    if values.is_cuda or block.rows.shape[1] > FEW:
        return values.contiguous()
    return values.movedim(0, -1).contiguous().movedim(-1, 0)


def _sample_loop(
    loss: Loss,
    K: Tensor,
    y: Tensor,
    R: Tensor,
    Z: Tensor,
    P: Tensor,
    r: Tensor,
    weight: Tensor,
    p: Tensor,
    fade: Tensor,
    keep: Tensor,
) -> Tensor:
    """Return R after more steps, (n, k, m).

    Args:
        loss: ℓ.
        K: the inner products with a minus sign, (n, m, m).
        y: the targets, (n, ·, m).
        R: R before.
        Z: A x, (n, k, m).
        P: A times the rest of c, (n, k, m), or a zero.
        r: r₀, (n, k, m), or a zero.
        weight: w of every step, (steps, n, 1, m), or of all, (1, n, 1, m).
        p: p before every step, (steps, n, 1, 1).
        fade: 1 − l2 p, or ones.
        keep: 1 − η(l2 + μ), (n, 1, 1).
    """
    R = R.clone()
    products = Products(K, R.shape[1])
    weights = weight.unbind() if len(weight) > 1 else [weight[0]] * len(p)
    for own, f, w in zip(p.unbind(), fade.unbind(), weights, strict=True):
        out = products.times(R).addcmul_(f, Z)
        if P.ndim:
            out.addcmul_(own, P, value=-1)
        if products.few:  # seen as they are stored, outputs × (samples and clients)
            flat = (values.movedim(0, -1).flatten(1) for values in (out, y))
            rho = loss.across(*flat).view(*Z.shape[1:], -1).movedim(-1, 0)
        else:
            rho = loss.across(out, y)
        if r.ndim:
            rho = rho.sub_(r)
        rho = rho.mul_(w)
        torch.addcmul(rho, keep, R, out=R)
    return R


def totals(keep: Tensor, first: int, last: int) -> Tensor:
    """Return `total` before each of the steps from `first` to `last`, (steps, *keep.shape)."""
    ones = torch.ones_like(keep)
    powers = torch.stack([ones, *[keep] * (last - first - 1)]).cumprod(0)
    return powers * total(keep, first) + (powers.cumsum(0) - powers)


def widened(rows: Tensor, k: int) -> Tensor:
    """Append zero rows to (n, m, ...) to fill registers: softmax is slow on a remainder."""
    lanes = REGISTER // rows.dtype.itemsize
    m = rows.shape[-2]
    missing = -m % lanes if k > 1 and 2 * m >= lanes else 0
    return pad(rows.mT, (0, missing)).mT if missing else rows


def counted(positions: Tensor, share: Tensor, m: int) -> Tensor:
    """Return the weights of n clients' samples in every step, (J, n, 1, m).

    A sample that is drawn c times has c shares.

    Args:
        positions: (n, J, b), the drawn samples of each client.
        share: (n, b), weight of a draw; 0 for padding.
        m: samples of a client, with padding.
    """
    n, steps, b = positions.shape
    out = share.new_zeros(steps, n, m)
    out.transpose(0, 1).scatter_add_(2, positions, share[:, None].expand(n, steps, b))
    return out[:, :, None]
