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

Work is split into pieces: a few clients whose samples fit into a core's cache. They take all J
steps before the next piece starts, so that the samples are read from memory once and not J times.
Minibatches are drawn on the device, for as many steps at a time as need little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from scaffpd.federation import LocalPlan
from scaffpd.models.draws import Draws
from scaffpd.models.layout import PaddedBlock
from scaffpd.models.losses import Loss, Squared
from scaffpd.models.samples import StackedSamples, transposed

# Speed per multiplication in the space of samples, relative to steps over the features of collected
# minibatches, for several outputs (measured on digits).
GAIN = 2.5
# Numbers of one client's inner products.
LARGEST = 2**22
# Numbers of all inner products up to which they are stored between rounds.
STORED = {"cpu": 2**23, "cuda": 2**28}
# Numbers that are drawn and collected at a time.
SLAB = {"cpu": 2**22, "cuda": 2**27}


class Path(Enum):
    """A way to take local steps, and why one would."""

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
    if max(sizes) ** 2 > LARGEST or not even:
        return Path.FEATURES
    collected = plan.batch_size is not None
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
    """d_i = p_i c_i + A_iᵀ R_i of all clients.

    Args:
        rows: A.
        c: one for all, (features, k), or one for each client, (N, features, k).
        p: (N,).
        R: (M, k); `None` for zero.
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
            out = out + transposed(self.rows.A, self.rows.layout.scaled(self.R, weights))
        return out.flatten()

    def each(self) -> Tensor:
        """Return the d_i themselves, (N, d)."""
        out = self.p[:, None, None] * self.c
        if self.R is not None:
            out = out + self.rows.each(self.R)
        return out.flatten(1)


@dataclass(frozen=True)
class LocalProblem:
    """Start of the local steps of all clients.

    Attributes:
        rows: the samples.
        loss: ℓ.
        z: the predictions at x, (M, k).
        r: r₀ = ∂ℓ/∂z there; `None` for minibatches.
        c: pushed by every step, one for all, (features, k), or each client's own.
        rest: c without `l2` x, in the same shapes; `None` for zero. Full gradients: c.
        rates: η_i, (N, 1, 1).
        l2: the regulariser, (1, 1) or (k, features).
        plan: J and the minibatches.
        seeds: seeds of the clients' minibatches, (N,).
    """

    rows: StackedSamples
    loss: Loss
    z: Tensor
    r: Tensor | None
    c: Tensor
    rest: Tensor | None
    rates: Tensor
    l2: Tensor
    plan: LocalPlan
    seeds: Tensor

    @property
    def keep(self) -> Tensor:
        """1 − η(l2 + μ), (N, 1, 1) or (N, k, features)."""
        return 1 - self.rates * (self.l2 + self.plan.prox)

    def slabs(self, who: Tensor, numbers: int) -> Iterator[tuple[int, int, PaddedBlock | None]]:
        """Yield the first and the last step of each part of the J steps, and its minibatches.

        Args:
            who: the clients.
            numbers: that one client needs for a step.
        """
        J = self.plan.steps
        b = self.plan.batch_size
        draws = Draws.of(self.seeds[who])
        most = max(1, SLAB.get(who.device.type, SLAB["cuda"]) // (len(who) * numbers))
        # The first step with full gradients changes nothing, because r(x − d) = r₀.
        for first in range(1 if b is None else 0, J, most):
            last = min(first + most, J)
            if b is None:
                yield first, last, None
                continue
            uniform = draws.uniform((last - first) * b).view(len(who), last - first, b)
            yield first, last, self.rows.layout.minibatch(uniform, who)


def local_gain(h: Tensor, rate: Tensor | float, steps: int) -> Tensor:
    """Return ϕ(h) = (1 − (1 − η h)^J)/h, accurate for small ηh, and ηJ at h = 0."""
    e = rate * h
    small = e < 0.5
    smooth = -torch.expm1(steps * torch.log1p(-torch.where(small, e, 0)))
    shrink = torch.where(small, smooth, 1 - (1 - e) ** steps)
    return torch.where(h > 0, shrink / torch.where(h > 0, h, 1), rate * steps)


def total(keep: Tensor, steps: int) -> Tensor:
    """Return Σ_j keep^j over J steps, for keep <= 1."""
    return local_gain(1 - keep, 1.0, steps)
