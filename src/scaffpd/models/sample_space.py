r"""Local steps in the space of a client's samples, where those are fewer than what a step reads otherwise.

A displacement that starts at zero never leaves the span of the push and of the client's samples, d = p·push + A_iᵀ R,
and the loss sees it only through the predictions A_i d. So a step

    d ← keep·d + push + A_iᵀ w(r(x − d) − r₀)

needs no features, only the inner products K_i = A_i A_iᵀ of the samples:

    A_i d ← keep·A_i d + A_i push + K_i ρ,    R ← keep·R + ρ,    p = Σ_j keep^j,    ρ = w(r(A_i x − A_i d) − r₀).

That is m² multiplications per output in place of 2·b·features, without the collecting of minibatches: a sample that is
drawn c times in a step has the weight c·η/b there, and the others have none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from scaffpd.models.graphs import Replay
from scaffpd.models.losses import Loss

GAIN = 2.5  # how much faster a number is worked on here than by steps over features that have several outputs


def pays(m: int, batch: int, features: int, outputs: int, steps: int, collected: bool) -> bool:
    """Whether J steps of clients with m samples are cheaper here, the inner products included.

    Args:
        m: samples of a client, padding included.
        batch: samples that a step reads.
        features: of a sample.
        outputs: k.
        steps: J.
        collected: whether steps over features have to collect their samples first.
    """
    wide = m + -m % 8
    here = steps * wide * wide * outputs + wide * wide * features
    there = steps * batch * features * (2 * outputs + (2 if collected else 0))
    return here <= (GAIN if outputs > 1 else 1) * there


class Steps(NamedTuple):
    """What a step multiplies with, for n clients with m samples (and padding).

    Attributes:
        weight: w, (n, 1, m), or of every step, (J, n, 1, m).
        keep: 1 − η(l2 + μ), (n, 1, 1).
        along: A_i push, (n, k, m).
        number: J.
    """

    weight: Tensor
    keep: Tensor
    along: Tensor
    number: int

    def weights(self) -> Tensor:
        """The weights of every step, (J, n, 1, m)."""
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
        A = widened(A)
        self.loss, self.y, self.K = loss, widened(loss.dense(y, outputs, A.dtype)), torch.bmm(A, A.mT)
        self.numbers = self.K.numel() + self.y.numel()
        self._corrected, self._plain = Replay(self._corrected_steps), Replay(self._plain_steps)

    def corrected(self, Z: Tensor, start: Tensor, steps: Steps) -> Tensor:
        """R after J steps, (n, k, m), from the predictions Z and the derivatives r₀ at x, (n, k, m) both.

        A d is accumulated as such: near the optimum it is small, and nothing cancels.
        """
        return self._corrected(Z, start, steps.weights(), steps.keep, steps.along)

    def _corrected_steps(self, Z: Tensor, start: Tensor, weights: Tensor, keep: Tensor, along: Tensor) -> Tensor:
        D, R, out = torch.zeros_like(Z), torch.zeros_like(Z), torch.empty_like(Z)
        for w in weights.unbind():
            rho = self.loss.residual(torch.sub(Z, D, out=out).mT, self.y).mT.sub_(start).mul_(w)
            torch.addcmul(along, keep, D, out=D).baddbmm_(rho, self.K)
            torch.addcmul(rho, keep, R, out=R)
        return R

    def plain(self, Z: Tensor, steps: Steps, keep: float | None) -> Tensor:
        """The same with r₀ = 0, by the predictions A u = A (x − d) themselves, which K ρ and A push change.

        `keep` is given where it is one number for all and push = (1 − keep) x; then A push changes nothing.
        """
        if keep is not None and not Z.is_cuda:
            return self._alike_steps(Z, steps.weights(), keep)
        return self._plain(Z, steps.weights(), steps.keep, steps.along)

    def _plain_steps(self, Z: Tensor, weights: Tensor, keep: Tensor, along: Tensor) -> Tensor:
        U, R, rest = Z, torch.zeros_like(Z), (1 - keep) * Z - along
        for w in weights.unbind():
            rho = self.loss.residual(U.mT, self.y).mT.mul_(w)
            U = torch.addcmul(rest, keep, U).baddbmm_(rho, self.K, alpha=-1)
            torch.addcmul(rho, keep, R, out=R)
        return R

    def _alike_steps(self, Z: Tensor, weights: Tensor, keep: float) -> Tensor:
        U, R = Z, torch.zeros_like(Z)
        for w in weights.unbind():
            rho = self.loss.residual(U.mT, self.y).mT.mul_(w)
            U = torch.baddbmm(U, rho, self.K, beta=keep, alpha=-1)
            torch.add(rho, R, alpha=keep, out=R)
        return R


def total(keep: Tensor, steps: int) -> Tensor:
    """P = Σ_j keep^j over J steps, for keep (…, 1, 1)."""
    return (keep ** torch.arange(steps, device=keep.device)).sum(-1, keepdim=True)


def widened(rows: Tensor) -> Tensor:
    """Zero rows at the end, up to a multiple of what a processor works on at a time."""
    missing = -rows.shape[-2] % lanes(rows.dtype)
    return pad(rows.mT, (0, missing)).mT if missing else rows


def lanes(dtype: torch.dtype) -> int:
    """Numbers that a processor works on at a time; of what is left over it makes heavy weather."""
    return 64 // dtype.itemsize


def counted(positions: Tensor, share: Tensor, m: int) -> Tensor:
    """The weights of n clients' m samples in every step, (J, n, 1, m): a sample drawn c times has c of its shares.

    Args:
        positions: (n, J, b), which of a client's samples are drawn.
        share: (n, b), what a draw counts for; 0 for padding.
        m: samples of a client.
    """
    n, steps, b = positions.shape
    out = share.new_zeros(steps, n, m + -m % lanes(share.dtype))
    out.transpose(0, 1).scatter_add_(2, positions, share[:, None].expand(n, steps, b))
    return out[:, :, None]
