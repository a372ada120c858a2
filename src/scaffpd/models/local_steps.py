r"""Local steps of linear models for a few clients at a time, over features or in the space of a client's samples.

Over features, a displacement d_i = x − u_i is held output by output, D (n, k, features), because BLAS is
fastest (by up to six times, for matrices this small) at products of row-major matrices from the left:

    predictions  (A_i u_i)ᵀ = (xᵀ − D) A_iᵀ,       gradients  (A_iᵀ (w ∘ r))ᵀ = (w ∘ r)ᵀ A_i.

A displacement that starts at zero never leaves the span of the push and of the client's samples, d = p·push + A_iᵀ R,
and the loss sees it only through the predictions A_i d. So a step

    d ← keep·d + push + A_iᵀ w(r(x − d) − r₀)

needs no features, only the inner products K_i = A_i A_iᵀ of the samples:

    A_i d ← keep·A_i d + A_i push + K_i ρ,    R ← keep·R + ρ,    p = Σ_j keep^j,    ρ = w(r(A_i x − A_i d) − r₀).

That is m² multiplications per output in place of 2·b·features, and minibatches are not collected: a sample drawn c
times in a step has the weight c·η/b there, and the others have none.

Proximal steps approach the minimum of a client's own model of a step −e from x,

    ϕ_i(e) = f_i(x − e) − ⟨c − c_i, e⟩ + (β/2)‖e‖²_D,    −∇ϕ_i(e) = ∇f_i(x − e) − c_i + c − βD e.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from scaffpd.federation import LocalPlan, ProximalPlan, Vector
from scaffpd.models.layout import KEPT, PaddedBlock, StackedSamples
from scaffpd.models.losses import Loss
from scaffpd.models.numerics import ALONE, ALONE_VECTOR, GraphReplay


class NearbyGradients:
    """Gradients of some clients near x: their change A_iᵀ W_i (r(x − d) − r(x)), with buffers that are reused.

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
        self.loss, self.A, self.y = loss, A, loss.dense(y, z.shape[2], A.dtype)
        self.z, self.r = z.mT.contiguous(), r.mT.contiguous()
        self.weight, self.products = weight[:, None], Products(A, z.shape[2])

    def change(self, D: Tensor) -> Tensor:
        """Return W (r(x − D) − r(x)), (n, k, m), for D (n, k, features)."""
        z = torch.sub(self.z, self.products.along(D), out=self.products.out)
        return self.loss.residual(z.mT, self.y).mT.sub_(self.r).mul_(self.weight)


FEW = 4  # samples of a client for which its inner products are multiplied number by number


class Products:
    """Products R A_i and D A_iᵀ for k rows of every client, in buffers that the next such product overwrites.

    On a CPU, NumPy's loop over BLAS takes down to an eighth of the time of torch.bmm for small matrices.
    """

    def __init__(self, A: Tensor, k: int) -> None:
        n, m, features = A.shape
        self.A, self.out, self.own = A, A.new_empty(n, k, m), A.new_empty(n, k, features)
        self.small = not A.is_cuda and k * m * features <= (ALONE if k > 1 else ALONE_VECTOR)
        if self.small:
            self.arrays = A.numpy(), self.out.numpy(), self.own.numpy()

    def times(self, R: Tensor) -> Tensor:
        """Return R A_i, (n, k, features), for R (n, k, m)."""
        if not self.small:
            return torch.bmm(R, self.A, out=self.own)
        np.matmul(
            self.arrays[1] if R is self.out else R.numpy(), self.arrays[0], out=self.arrays[2]
        )
        return self.own

    def along(self, D: Tensor) -> Tensor:
        """Return D A_iᵀ, (n, k, m), for D (n, k, features); transpose several rows, for torch.bmm is slow at Aᵀ."""
        if self.small:
            own = self.arrays[2] if D is self.own else D.numpy()
            np.matmul(own, self.arrays[0].transpose(0, 2, 1), out=self.arrays[1])
            return self.out
        if D.shape[1] == 1:
            return torch.bmm(D, self.A.mT, out=self.out)
        return self.out.copy_(torch.bmm(self.A, D.mT.contiguous()).mT)

    def at(self, X: Tensor, D: Tensor) -> Tensor:
        """Return (X − D) A_iᵀ for X (k, features)."""
        return self.along(torch.sub(X, D, out=self.own))

    def back(self, R: Tensor, D: Tensor, sign: int = 1) -> Tensor:
        """Compute D ± R A_i in place, for R (n, k, m)."""
        return (
            D.add_(self.times(R), alpha=sign) if self.small else D.baddbmm_(R, self.A, alpha=sign)
        )


Stages = list[tuple[int, Tensor | None]]


def stages(steps: int, each: tuple[int, ...] | None, who: Tensor) -> Stages:
    """Cut J steps where a client ends: return the steps of each stage and the clients that end with it (`None`: all).

    Clients that have ended go on beside the others, and the result is ignored: on few rows a step of all clients of a
    block costs as much as one of some of them.
    """
    if each is None:
        return [(steps, None)]
    own = np.array([each[i] for i in who.tolist()])
    ends = np.unique(own)
    cut = zip(np.diff(ends, prepend=0).tolist(), ends.tolist(), strict=True)
    return [
        (number, torch.from_numpy(np.flatnonzero(own == end)).to(who.device)) for number, end in cut
    ]


def full_steps(near: NearbyGradients, push: Tensor, keep: Tensor, parts: Stages) -> Tensor:
    """Take J steps d ← (1 − η(l2 + μ)) d + η c + A_iᵀ (η/m_i)(r(x − d) − r(x)) from d = 0, (n, k, features).

    Args:
        near: the clients, with weights η/m_i.
        push: η c, (n, k, features): c is the first corrected gradient g_i(x) − c_i + c.
        keep: 1 − η(l2 + μ), (n, 1, 1).
        parts: J, as returned by `stages`.
    """
    D = push.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(D)
    made = 1
    for number, ending in parts:
        for _ in range(number - made):
            change = near.change(D)
            near.products.back(change, torch.addcmul(push, keep, D, out=D))
        if ending is None:
            return D
        out[ending] = D[ending]
        made = 0
    return out


def proximal_steps(
    near: NearbyGradients, c: Tensor, stay: Tensor, rate: Tensor, momentum: Tensor, steps: int
) -> Tensor:
    """Take J steps d⁺ = e + D⁻¹(c + ∇f_i(x − e) − ∇f_i(x) − βD e)/(L_i + β),  e = d + momentum (d − d_prev).

    Args:
        near: the clients, with weights 1/m_i.
        c: the correction, (k, features).
        stay: l2 + βD, (k, features).
        rate: D⁻¹/(L_i + β), (n, k, features).
        momentum: (n, 1, 1).
        steps: J.
    """
    d = e = torch.zeros_like(rate)
    for _ in range(steps):
        gradient = near.products.back(near.change(e), torch.addcmul(c, stay, e, value=-1))
        last = d
        d = torch.addcmul(e, rate, gradient)
        e = d + momentum * (d - last)
    return d


GAIN = 2.5  # speed per number here relative to steps over minibatches' features, for several outputs (digits)
LARGEST = 2**22  # numbers of one client's inner products


def pays(
    m: int, batch: int, features: int, outputs: int, steps: int, collected: bool, kept: bool
) -> bool:
    """Return whether J steps of clients with m samples are cheaper in the space of samples.

    Args:
        m: samples of a client, padding included.
        batch: samples that a step reads.
        features: features of a sample.
        outputs: k.
        steps: J.
        collected: whether steps over features have to collect their samples first.
        kept: whether the inner products are already stored.
    """
    if m * m > LARGEST:
        return False
    here = steps * m * m * outputs + (0 if kept else m * m * features)
    there = steps * batch * features * (2 * outputs + (2 if collected else 0))
    return here <= (GAIN if outputs > 1 and collected else 1) * there


class StepWeights(NamedTuple):
    """Factors of a step, for n clients with m samples (and padding).

    Attributes:
        weight: w, (n, 1, m), or of every step, (J, n, 1, m).
        keep: 1 − η(l2 + μ), (n, 1, 1).
        added: added by every step to A_i d, A_i push; in plain steps to A_i u, (1 − keep) A_i x − A_i push; (n, k, m).
        number: J.
    """

    weight: Tensor
    keep: Tensor
    added: Tensor
    number: int

    def weights(self) -> Tensor:
        """Return the weights of every step, (J, n, 1, m)."""
        return self.weight.expand(self.number, *self.weight.shape[-3:])


class SampleSpace:
    """Clients in the space of their samples.

    Args:
        loss: ℓ.
        A: (n, m, features), the samples.
        y: (n, m, ·), the targets.
        outputs: k.
    """

    def __init__(self, loss: Loss, A: Tensor, y: Tensor, outputs: int) -> None:
        A = widened(A, outputs)
        self.loss, self.y, self.K = (
            loss,
            widened(loss.dense(y, outputs, A.dtype), outputs).mT,
            torch.bmm(A, A.mT),
        )
        self._corrected, self._plain = (
            GraphReplay(self._corrected_steps),
            GraphReplay(self._plain_steps),
        )

    def corrected(self, Z: Tensor, start: Tensor, steps: StepWeights, parts: Stages) -> Tensor:
        """Return R after J steps, (n, k, m), from the predictions Z and the derivatives r₀ at x, (n, k, m) both.

        A d itself is accumulated: near the optimum it is small, and nothing cancels.
        """
        both = Z.new_zeros(2, *Z.shape)
        out = torch.empty_like(Z)
        few = self.K.shape[1] <= FEW and steps.weight.ndim == 3 and not Z.is_cuda
        for number, ending in parts:
            now = steps._replace(number=number)
            if few:
                both = self._few_samples(both, Z, start, now)
            else:
                both = self._corrected(both, Z, start, now.weights(), steps.keep, steps.added)
            if ending is None:
                return both[1]
            out[ending] = both[1][ending]
        return out

    def _few_samples(self, both: Tensor, Z: Tensor, start: Tensor, steps: StepWeights) -> Tensor:
        """Take the same steps with clients along the last axis, (k, m, n), if one product each would be too small."""
        Z, start, y, keep, added, w, K = (
            t.movedim(0, -1).contiguous()
            for t in (Z, start, self.y, steps.keep, steps.added, steps.weight, self.K)
        )
        both = both.movedim(1, -1).clone(memory_format=torch.contiguous_format)
        (D, R), out = both.unbind(), torch.empty_like(Z)
        flat = out.flatten(1)
        targets = y.flatten(1)
        for _ in range(steps.number):
            torch.sub(Z, D, out=out)
            rho = self.loss.across(flat, targets).view_as(Z).sub_(start).mul_(w)
            torch.addcmul(added, keep, D, out=D)
            for one, inner in zip(rho[:, :, None].unbind(1), K, strict=True):
                D.addcmul_(one, inner)
            torch.addcmul(rho, keep, R, out=R)
        return both.movedim(-1, 1)

    def _corrected_steps(
        self, both: Tensor, Z: Tensor, start: Tensor, weights: Tensor, keep: Tensor, added: Tensor
    ) -> Tensor:
        """Return A d and R after more steps."""
        D, R = both.clone().unbind()
        out = torch.empty_like(Z)
        K = Products(self.K, Z.shape[1])
        for w in weights.unbind():
            rho = self.loss.across(torch.sub(Z, D, out=out), self.y).sub_(start).mul_(w)
            K.back(rho, torch.addcmul(added, keep, D, out=D))
            torch.addcmul(rho, keep, R, out=R)
        return torch.stack([D, R])

    def plain(
        self, U: Tensor, R: Tensor, steps: StepWeights, keep: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return U = A u = A (x − d) and R after more steps with r₀ = 0.

        `keep` is given if it is one number for all and nothing is added.
        """
        if keep is not None and not U.is_cuda:
            return self._alike_steps(U, R, steps.weights(), keep)
        both = self._plain(torch.stack([U, R]), steps.weights(), steps.keep, steps.added)
        return both[0], both[1]

    def _plain_steps(self, both: Tensor, weights: Tensor, keep: Tensor, added: Tensor) -> Tensor:
        U, R = both.clone().unbind()
        K = Products(self.K, U.shape[1])
        for w in weights.unbind():
            rho = self.loss.across(U, self.y).mul_(w)
            K.back(rho, torch.addcmul(added, keep, U, out=U), sign=-1)
            torch.addcmul(rho, keep, R, out=R)
        return torch.stack([U, R])

    def _alike_steps(
        self, U: Tensor, R: Tensor, weights: Tensor, keep: float
    ) -> tuple[Tensor, Tensor]:
        """Take steps with one `keep`: after j of them U = keep^j (U₀ + R₀K) − R K."""
        K = Products(-self.K, U.shape[1])
        faded = 1.0
        R = K.out.copy_(R)
        first = U - K.times(R)
        U = U.clone()
        for w in weights.unbind():
            torch.add(self.loss.across(U, self.y).mul_(w), R, alpha=keep, out=R)
            faded *= keep
            torch.add(K.times(R), first, alpha=faded, out=U)
        return U, R


class SampleSpaces:
    """Blocks of all clients in the space of their samples; small ones are kept from round to round."""

    def __init__(self, loss: Loss, rows: StackedSamples, outputs: int) -> None:
        self.loss = loss
        self.rows = rows
        self.outputs = outputs
        self.made: dict[int | None, SampleSpace] = {}
        self.kept: set[int | None] = set()
        left = 0 if rows.stored else KEPT * (32 if rows.share.is_cuda else 1)
        for block in [] if rows.stored else rows.squares:
            n, m = block.rows.shape
            left -= n * m * (m + outputs)
            if left >= 0:
                self.kept.add(block.number)

    def near(self, batch: int | None, steps: int) -> list[PaddedBlock]:
        """Return the blocks for which J steps of `batch` samples each (`None`: all) are cheaper here."""
        if self.rows.stored:
            return []
        features = self.rows.A.shape[1]
        collected = batch is not None
        sizes = [
            (block, block.rows.shape[1], block.number in self.kept) for block in self.rows.squares
        ]
        return [
            block
            for block, m, kept in sizes
            if pays(m, batch or m, features, self.outputs, steps, collected, kept)
        ]

    def __getitem__(self, block: PaddedBlock) -> SampleSpace:
        """Return a block's clients; threads may ask for different blocks at a time."""
        space = self.made.get(block.number)
        if space is None:
            space = SampleSpace(self.loss, *self.rows.of(block), self.outputs)
            if block.number in self.kept:
                self.made[block.number] = space
        return space


REGISTER = 64 if platform.machine() in ("x86_64", "AMD64") else 16  # bytes


def local_gain(h: Tensor, rate: Tensor | float, steps: Tensor | int) -> Tensor:
    """Return ϕ(h) = (1 − (1 − η h)^J)/h, accurate for small ηh, and ηJ at h = 0."""
    e = rate * h
    small = e < 0.5
    smooth = -torch.expm1(steps * torch.log1p(-torch.where(small, e, 0)))
    shrink = torch.where(small, smooth, 1 - (1 - e) ** steps)
    return torch.where(h > 0, shrink / torch.where(h > 0, h, 1), rate * steps)


def stepping(rates: Tensor, plan: LocalPlan) -> Callable[[Tensor, Tensor], Tensor]:
    """Return ϕ of a plan as a function of eigenvalues and the numbers of their clients; rates (N,)."""
    counts = plan.counts(rates)
    return lambda h, i: local_gain(h, rates[i], counts if isinstance(counts, int) else counts[i])


def total(keep: Tensor, steps: Tensor | int) -> Tensor:
    """Return P = Σ_j keep^j over J steps, for keep <= 1."""
    return local_gain(1 - keep, 1.0, steps)


def widened(rows: Tensor, k: int) -> Tensor:
    """Append zero rows, see `padding`."""
    missing = padding(rows.shape[-2], rows.dtype, k)
    return pad(rows.mT, (0, missing)).mT if missing else rows


def padding(m: int, dtype: torch.dtype, k: int) -> int:
    """Return how many rows to add to m to fill a processor's registers: a softmax is slow on a remainder.

    A few rows get no padding.
    """
    lanes = REGISTER // dtype.itemsize
    return -m % lanes if k > 1 and 2 * m >= lanes else 0


def counted(positions: Tensor, share: Tensor, m: int, k: int) -> Tensor:
    """Return the weights of n clients' samples in every step, (J, n, 1, m): one drawn c times has c shares.

    Args:
        positions: (n, J, b), the drawn samples of each client.
        share: (n, b), weight of a draw; 0 for padding.
        m: samples of a client.
        k: outputs.
    """
    n, steps, b = positions.shape
    out = share.new_zeros(steps, n, m + padding(m, share.dtype, k))
    out.transpose(0, 1).scatter_add_(2, positions, share[:, None].expand(n, steps, b))
    return out[:, :, None]


ROUNDING = 100  # units in the last place by which two sums over samples may differ


class ProximalRates(NamedTuple):
    """Step sizes and momenta towards a client's model, (L_i + β)-smooth and μ-strongly convex in the metric D.

    Attributes:
        rates: 1/(L_i + β) per client; 0 if a model is flat.
        momenta: (1 − q_i)/(1 + q_i) per client, q_i² = μ/(L_i + β).
        steps: J = ⌈2/q_i⌉ of the slowest client, here or elsewhere, at most the plan's limit.
    """

    rates: Vector
    momenta: Vector
    steps: int


def pace(plan: ProximalPlan, smoothness: Vector, l2: float) -> ProximalRates:
    """Plan the steps with L_i/min D for L_i and μ = l2/max D + β, a lower bound on the curvature."""
    L = np.append(smoothness, plan.steepest) / float(plan.metric.min()) + plan.pull
    mu = l2 / float(plan.metric.max()) + plan.pull
    q = np.sqrt(np.minimum(np.divide(mu, L, out=np.ones_like(L), where=L > 0), 1))
    rates = np.divide(1, L, out=np.zeros_like(L), where=L > 0)
    steps = int(min(plan.limit, np.ceil(2 / max(q.min(), 1e-9))))
    return ProximalRates(rates[:-1], ((1 - q) / (1 + q))[:-1], steps)


class LocalModel:
    """Model ϕ of one client whose f_i is known by its values and gradients only.

    Args:
        evaluate: u → f_i(u) and ∇f_i(u).
        x: where the steps start.
        loss: f_i(x) = ϕ(0).
        push: c − c_i.
        plan: β and D.
    """

    def __init__(
        self,
        evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
        x: Tensor,
        loss: float,
        push: Tensor,
        plan: ProximalPlan,
    ) -> None:
        self.evaluate = evaluate
        self.x = x
        self.push = push
        self.pull = plan.pull
        self.metric = plan.metric
        self.level = loss + ROUNDING * torch.finfo(x.dtype).eps * (1 + abs(loss))

    def descent(self, e: Tensor) -> tuple[float, Tensor]:
        """Return ϕ(e) and −∇ϕ(e)."""
        loss, gradient = self.evaluate(self.x - e)
        pulled = self.pull * self.metric * e
        return float(loss - self.push @ e + pulled @ e / 2), gradient + self.push - pulled

    def approach(self, rate: float, momentum: float, steps: int) -> Tensor:
        """Take accelerated steps from e = 0 to a point that is not above ϕ(0), but for rounding.

        L_i may be an estimate from elsewhere and ϕ need not be convex, so a point with ϕ(e) > ϕ(0), or without a value,
        sends the steps back to the lowest point so far, without momentum and at half the rate. If ϕ is convex and
        L_i right, this does not happen. Losses are bounded below, so that with β > 0 the set {ϕ ≤ ϕ(0)} is bounded, and
        so is the answer.
        """
        d = e = best = torch.zeros_like(self.x)
        lowest = self.level
        for _ in range(steps):
            value, downhill = self.descent(e)
            if not value <= self.level:
                d = e = best
                rate /= 2
                continue
            if value < lowest:
                lowest = value
                best = e
            last = d
            d = e + rate / self.metric * downhill
            e = d + momentum * (d - last)
        return d if self.descent(d)[0] <= self.level else best
