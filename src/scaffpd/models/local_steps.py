r"""J local steps of all clients of a linear model, by the cheapest of three ways (`cheapest_path`).

With d = x − u, a step of client i is

    d ← (1 − η(l2 + μ)) d + η c + A_iᵀ w ∘ (r(x − d) − r₀),

with full gradients (w = η/m_i, r₀ = r(x), c the first corrected gradient g_i(x) − c_i + c) or on a
minibatch (w = η/b times how often a sample was drawn, r₀ = 0, c = c − c_i + l2 x).

Closed form: for squared loss and full gradients d_i is a function of the Hessian (`quadratic.py`).

Inner products of samples: d never leaves the span of c and of the client's samples, and the loss
sees it through the predictions A_i d only. With d = p c + A_iᵀR a step needs no features, but the
inner products K_i = A_i A_iᵀ:

    ρ = w ∘ (r(A_i x − p A_i c − K_i R) − r₀),    R ← keep·R + ρ,    p ← keep·p + η.

On a minibatch l2 x, a part of c, needs no product: A_i x − p A_i (l2 x) = (1 − l2 p)A_i x.
That is m² multiplications per output in place of 2·b·features, minibatches are not collected, and
Σ λ_i d_i is one matrix product on the stack of all clients; no d_i is ever formed.

Features: d itself, held output by output, D (n, k, features), because BLAS is fastest (by up to six
times, for matrices this small) at products of row-major matrices from the left.

Counts have steps of a length of their own (`careful_steps.py`).

Work is split into pieces: a few clients whose samples fit into a core's cache. They take all J
steps before the next piece starts, so that the samples are read from memory once and not J times.
Minibatches are drawn on the device, for as many steps at a time as need little memory.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from platform import machine

import torch
from torch import Tensor
from torch.nn.functional import pad

from scaffpd.federation import LocalPlan
from scaffpd.models.careful_steps import careful_loop, careful_step
from scaffpd.models.execution import GraphReplay, parallel_map
from scaffpd.models.local_problem import LocalProblem
from scaffpd.models.losses import Logistic, Loss, Softmax, Squared
from scaffpd.models.numerics import Products, kernels, product
from scaffpd.models.oracle import StackedDisplacements
from scaffpd.models.samples import CACHE, PaddedBlock, StackedSamples

# Speed per multiplication in the space of samples, relative to steps over the features of collected
# minibatches, for several outputs (measured on digits).
GAIN = 2.5
# Numbers of one client's inner products.
LARGEST = 2**22
# Numbers of all inner products up to which they are stored between rounds (128 MB on a CPU).
STORED = {"cpu": 2**24, "cuda": 2**28}
# Bytes of a processor's register.
REGISTER = 64 if machine() in ("x86_64", "AMD64") else 16


class Path(Enum):
    """A way to take local steps, and why."""

    CLOSED = "squared loss, full gradients: J steps are one function of the Hessian"
    SAMPLES = "few samples: their inner products cost less than products with features"
    FEATURES = "many samples, or few features: products with features cost least"


def cheapest_path(
    rows: StackedSamples, loss: Loss, outputs: int, plan: LocalPlan, even: bool = True
) -> Path:
    """Return how all clients take their steps, by the multiplications that this needs.

    In the space of samples a step takes Σ m_i² per output, and K_i, if it is not stored, m_i² times
    the features once; over features it takes 2 b, and collecting a minibatch costs as much again.
    If l2 is not `even`, (1 − η l2) d leaves the span of c and the samples.
    """
    if type(loss) is Squared and plan.batch_size is None:
        return Path.CLOSED
    sizes = rows.layout.lengths
    collected = plan.batch_size is not None
    if max(sizes) ** 2 > LARGEST or not even or (collected and not loss.smooth):
        return Path.FEATURES
    features = rows.A.shape[1]
    square = sum(m * m for m in sizes)
    read = len(sizes) * plan.batch_size if plan.batch_size is not None else sum(sizes)
    inside = plan.steps * square * outputs
    if not stores_inner_products(rows):
        inside += square * features
    across = plan.steps * read * features * (2 * outputs + (2 if collected else 0))
    gain = GAIN if outputs > 1 and collected else 1
    return Path.SAMPLES if inside <= gain * across else Path.FEATURES


def stores_inner_products(rows: StackedSamples) -> bool:
    """Return whether the inner products of all clients' samples are few enough to be stored."""
    most = STORED.get(rows.A.device.type, STORED["cuda"])
    return sum(m * m for m in rows.layout.lengths) <= most


class SpanDisplacements:
    """d_i = p_i c_i + A_iᵀ R_i of all clients, for p (N,), R (M, k), or `None` for zero, and c.

    c is one for all, (features, k), or one for each, (N, features, k).
    """

    def __init__(self, rows: StackedSamples, c: Tensor, p: Tensor, R: Tensor | None) -> None:
        self.rows = rows
        self.c = c
        self.p = p
        self.R = R

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i d_i, by one matrix product for any N."""
        weighted = weights * self.p
        out = weighted.sum() * self.c
        if self.c.ndim == 3:
            out = torch.tensordot(weighted, self.c, 1)
        if self.R is not None:
            out = out + self.rows.transposed(self.rows.layout.scaled(self.R, weights))
        return out.flatten()

    def each(self) -> Tensor:
        out = self.p[:, None, None] * self.c
        if self.R is not None:
            out = out + self.rows.each(self.R)
        return out.flatten(1)


def local_gain(h: Tensor, rate: Tensor | float, steps: int | Tensor) -> Tensor:
    """Return ϕ(h) = (1 − (1 − η h)^J)/h, accurate for small ηh, and ηJ at h = 0."""
    e = rate * h
    small = e < 0.5
    smooth = -torch.expm1(steps * torch.log1p(-torch.where(small, e, 0)))
    shrink = torch.where(small, smooth, 1 - (1 - e) ** steps)
    return torch.where(h > 0, shrink / torch.where(h > 0, h, 1), rate * steps)


def total(keep: Tensor, steps: int | Tensor) -> Tensor:
    """Return Σ_j keep^j over J steps, for keep <= 1."""
    return local_gain(1 - keep, 1.0, steps)


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
            y = self.loss.dense(y, self.outputs, A.dtype).mT
            K = self._padded(-torch.bmm(A, A.mT), block, axes=2)
            steps = partial(_sample_loop if self.loss.smooth else careful_loop, self.loss)
            fused = kernels() if K.is_cuda and type(self.loss) in (Logistic, Softmax) else None
            if fused is not None and self.outputs <= fused.MOST:
                steps = partial(fused.sample_loop, type(self.loss) is Softmax)
            loop = GraphReplay(partial(steps, K, self._padded(y, block)))
            if stores_inner_products(self.rows):
                self.loops[number] = loop
        return loop

    def run(self, problem: LocalProblem) -> SpanDisplacements:
        """Take the steps; one matrix product gives A c, and none with features is in the steps."""
        rows = self.rows
        rest = problem.rest
        common = rest is not None and rest.ndim == 2
        along = rows.times(rest) if rest is not None and common else None
        faded = 0.0 if problem.plan.batch_size is None else float(problem.l2)
        out = torch.zeros_like(problem.z)
        rates = problem.rates
        keep = problem.keep
        p = rates.flatten() * total(keep.flatten(), problem.plan.steps)
        hold = (problem.l2 + problem.plan.prox).expand(problem.plan.steps, 1, 1)

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
            if not self.loss.smooth:
                share = self._across(block, block.weight[..., None])
                seen = self._loop(number, block)(Z, P, r, share, rates[who], hold)
                p[who] = seen[:, 0, -1]
                block.put(out, seen[..., :-1].mT)
                return
            for first, last, drawn in problem.slabs(who, 4 if b is None else m + 4 * b):
                if drawn is None:
                    weight = self._across(block, rates[who] * block.weight[..., None])[None]
                else:
                    places = drawn.rows - rows.layout.starts[who, None, None]
                    weight = counted(places, rates[who, 0] * drawn.weight, m)
                done = torch.arange(first, last, device=rates.device).view(-1, 1, 1, 1)
                ahead = rates[who] * total(keep[who], done)
                fade = 1 - faded * ahead if faded else ahead.new_ones(len(ahead))
                R = self._loop(number, block)(R, Z, P, r, weight, ahead, fade, keep[who])
            block.put(out, R.mT)

        parallel_map(work, list(enumerate(rows.squares)), out.device)
        return SpanDisplacements(rows, problem.c, p, out)

    def _across(self, block: PaddedBlock, values: Tensor | None) -> Tensor:
        """Return numbers of the samples output by output and with padding, (n, k, m)."""
        if values is None:
            return block.weight.new_zeros(())
        if values.ndim == 2:
            values = block.of(values)
        return self._padded(values.mT, block)

    def _padded(self, values: Tensor, block: PaddedBlock, axes: int = 1) -> Tensor:
        """Store numbers of samples, filled up to whole registers: a softmax is slow on the rest."""
        m = block.rows.shape[1]
        lanes = REGISTER // values.element_size()
        if self.outputs > 1 and not values.is_cuda and 2 * m >= lanes:
            values = pad(values, (0, -m % lanes) * axes)
        return values.contiguous()


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
    products = Products(K, R.shape[1])
    R = products.out.copy_(R)
    weights = weight.unbind() if len(weight) > 1 else [weight[0]] * len(p)
    for own, f, w in zip(p.unbind(), fade.unbind(), weights, strict=True):
        out = products.times(R).addcmul_(f, Z)
        if P.ndim:
            out.addcmul_(own, P, value=-1)
        rho = loss.across(out, y)
        if r.ndim:
            rho = rho.sub_(r)
        rho = rho.mul_(w)
        torch.addcmul(rho, keep, R, out=R)
    return R


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


class FeatureSteps:
    """Local steps over features, with every client's own d; a recorded graph for minibatches."""

    def __init__(self, loss: Loss, rows: StackedSamples) -> None:
        self.loss = loss
        self.rows = rows
        self._loop = GraphReplay(partial(_minibatch_loop, loss, rows.A))

    def run(self, problem: LocalProblem) -> StackedDisplacements:
        n, k = len(problem.rates), problem.z.shape[1]
        features = self.rows.A.shape[1]
        out = problem.z.new_empty(n, k, features)
        c = problem.c.expand(n, features, k).mT

        def work(piece: PaddedBlock | Tensor) -> None:
            who = piece if isinstance(piece, Tensor) else piece.clients
            # One output is a transposed column, whose strides cost a product six times its time;
            # `contiguous` leaves them.
            push = (problem.rates[who] * c[who]).clone(memory_format=torch.contiguous_format)
            if isinstance(piece, Tensor):
                out[who] = self._minibatches(problem, who, push, problem.keep[who])
            else:
                out[who] = self._full(problem, piece, push, problem.keep[who])

        b = problem.plan.batch_size
        if b is None:
            parallel_map(work, self.rows.blocks, out.device)
        else:
            # Pieces of clients whose minibatches fit into a cache; a GPU takes all at once.
            size = max(1, CACHE // (b * features)) if out.device.type == "cpu" else n
            pieces = torch.split(torch.arange(n, device=out.device), size)
            parallel_map(work, pieces, out.device)
        return StackedDisplacements(out.mT.flatten(1))

    def _full(
        self, problem: LocalProblem, block: PaddedBlock, push: Tensor, keep: Tensor
    ) -> Tensor:
        A, y = self.rows.of(block)
        assert problem.r is not None
        z, r = (block.of(values).mT.contiguous() for values in (problem.z, problem.r))
        y = self.loss.dense(y, z.shape[1], A.dtype).mT
        if not self.loss.smooth:
            D = torch.zeros_like(push)
            for _ in range(problem.plan.steps):
                D = careful_step(
                    problem, block.clients, A, y.mT, z.mT, r.mT, block.weight[..., None], D
                )
            return D
        weight = (problem.rates[block.clients, 0] * block.weight)[:, None]
        products = Products(A, z.shape[1])
        D = push.clone()  # the first step: nothing has changed at d = 0
        for _ in range(1, problem.plan.steps):
            ahead = torch.sub(z, products.along(D), out=products.out)
            change = self.loss.across(ahead, y).sub_(r).mul_(weight)
            products.back(change, torch.addcmul(push, keep, D, out=D))
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
            y = self.loss.dense(rows.y[numbers].view(*shape, -1), k, push.dtype).mT
            z = problem.z[numbers].view(*shape, k).mT.contiguous()
            if not self.loss.smooth:
                for own, t, at in zip(numbers, y, z, strict=True):
                    A = rows.A[own].view(len(who), b, -1).to(push.dtype)
                    share = drawn.weight[..., None]
                    D = careful_step(problem, who, A, t.mT, at.mT, None, share, D)
                continue
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
        y: their targets, (steps, n, ·, b).
        z: their predictions at x, (steps, n, k, b).
        weight: η/b, 0 for padding, (n, 1, b).
        push: η c, (n, k, features).
        keep: 1 − η(l2 + μ), (n, 1, 1) or (n, k, features).
    """
    D = D.clone()
    sample = push.new_empty(len(push), weight.shape[2], push.shape[2])
    products = Products(sample, push.shape[1])
    flat = sample.view(-1, push.shape[2])
    half = A.dtype != push.dtype
    for t in range(len(numbers)):
        flat.copy_(A[numbers[t]]) if half else torch.index_select(A, 0, numbers[t], out=flat)
        ahead = torch.sub(z[t], products.along(D), out=products.out)
        r = loss.across(ahead, y[t]).mul_(weight)
        products.back(r, torch.addcmul(push, keep, D, out=D))
    return D
