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
from scaffpd.models.ragged import Block
from scaffpd.models.rows import KEPT, Rows

GAIN = 2.5  # how much faster a number is worked on here than over features, where outputs are several (on digits)
LARGEST = 2**22  # numbers of one client's inner products


def pays(m: int, batch: int, features: int, outputs: int, steps: int, collected: bool, kept: bool) -> bool:
    """Whether J steps of clients with m samples are cheaper here.

    Args:
        m: samples of a client, padding included.
        batch: samples that a step reads.
        features: of a sample.
        outputs: k.
        steps: J.
        collected: whether steps over features have to collect their samples first.
        kept: whether the inner products are there already, from round to round.
    """
    if m * m > LARGEST:
        return False
    here = steps * m * m * outputs + (0 if kept else m * m * features)
    there = steps * batch * features * (2 * outputs + (2 if collected else 0))
    return here <= (GAIN if outputs > 1 else 1) * there


class Steps(NamedTuple):
    """What a step multiplies with, for n clients with m samples (and padding).

    Attributes:
        weight: w, (n, 1, m), or of every step, (J, n, 1, m).
        keep: 1 − η(l2 + μ), (n, 1, 1).
        added: what every step adds to A_i d, A_i push; in plain steps to A_i u, (1 − keep) A_i x − A_i push; (n, k, m).
        number: J.
    """

    weight: Tensor
    keep: Tensor
    added: Tensor
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
        A = widened(A, outputs)
        self.loss, self.y, self.K = loss, widened(loss.dense(y, outputs, A.dtype), outputs), torch.bmm(A, A.mT)
        self._corrected, self._plain = Replay(self._corrected_steps), Replay(self._plain_steps)

    def corrected(self, Z: Tensor, start: Tensor, steps: Steps) -> Tensor:
        """R after J steps, (n, k, m), from the predictions Z and the derivatives r₀ at x, (n, k, m) both.

        A d is accumulated as such: near the optimum it is small, and nothing cancels.
        """
        return self._corrected(Z, start, steps.weights(), steps.keep, steps.added)

    def _corrected_steps(self, Z: Tensor, start: Tensor, weights: Tensor, keep: Tensor, added: Tensor) -> Tensor:
        D, R, out = torch.zeros_like(Z), torch.zeros_like(Z), torch.empty_like(Z)
        for w in weights.unbind():
            rho = self.loss.residual(torch.sub(Z, D, out=out).mT, self.y).mT.sub_(start).mul_(w)
            torch.addcmul(added, keep, D, out=D).baddbmm_(rho, self.K)
            torch.addcmul(rho, keep, R, out=R)
        return R

    def plain(self, U: Tensor, R: Tensor, steps: Steps, keep: float | None) -> tuple[Tensor, Tensor]:
        """U = A u = A (x − d) and R after more steps with r₀ = 0.

        `keep` is given where it is one number for all and nothing is added.
        """
        if keep is not None and not U.is_cuda:
            return self._alike_steps(U, R, steps.weights(), keep)
        both = self._plain(torch.stack([U, R]), steps.weights(), steps.keep, steps.added)
        return both[0], both[1]

    def _plain_steps(self, both: Tensor, weights: Tensor, keep: Tensor, added: Tensor) -> Tensor:
        U, R = both.unbind()
        for w in weights.unbind():
            rho = self.loss.residual(U.mT, self.y).mT.mul_(w)
            U = torch.addcmul(added, keep, U).baddbmm_(rho, self.K, alpha=-1)
            R = torch.addcmul(rho, keep, R)
        return torch.stack([U, R])

    def _alike_steps(self, U: Tensor, R: Tensor, weights: Tensor, keep: float) -> tuple[Tensor, Tensor]:
        for w in weights.unbind():
            rho = self.loss.residual(U.mT, self.y).mT.mul_(w)
            U = torch.baddbmm(U, rho, self.K, beta=keep, alpha=-1)
            R = torch.add(rho, R, alpha=keep)
        return U, R


class Spaces:
    """All clients' blocks in the space of their samples; as many as take little memory are kept from round to round."""

    def __init__(self, loss: Loss, rows: Rows, outputs: int) -> None:
        self.loss, self.rows, self.outputs = loss, rows, outputs
        self.made: dict[int | None, SampleSpace] = {}
        self.kept: set[int | None] = set()
        left = 0 if rows.stored else KEPT * (32 if rows.share.is_cuda else 1)
        for block in [] if rows.stored else rows.squares:
            n, m = block.rows.shape
            left -= n * m * (m + outputs)
            if left >= 0:
                self.kept.add(block.number)

    def near(self, batch: int | None, steps: int) -> list[Block]:
        """The blocks for which J steps with so many samples each (`None`: all) are cheaper here."""
        if self.rows.stored:
            return []
        features, collected = self.rows.A.shape[1], batch is not None
        sizes = [(block, block.rows.shape[1], block.number in self.kept) for block in self.rows.squares]
        return [
            block for block, m, kept in sizes if pays(m, batch or m, features, self.outputs, steps, collected, kept)
        ]

    def __getitem__(self, block: Block) -> SampleSpace:
        """A block's clients; threads may ask for different blocks at a time."""
        space = self.made.get(block.number)
        if space is None:
            space = SampleSpace(self.loss, *self.rows.of(block), self.outputs)
            if block.number in self.kept:
                self.made[block.number] = space
        return space


def total(keep: Tensor, steps: int) -> Tensor:
    """P = Σ_j keep^j over J steps, for keep (…, 1, 1)."""
    return (keep ** torch.arange(steps, device=keep.device)).sum(-1, keepdim=True)


def widened(rows: Tensor, k: int) -> Tensor:
    """Zero rows at the end, up to a multiple of what a processor works on at a time (see `lanes`)."""
    missing = -rows.shape[-2] % lanes(rows.dtype, k)
    return pad(rows.mT, (0, missing)).mT if missing else rows


def lanes(dtype: torch.dtype, k: int) -> int:
    """Numbers that a processor works on at a time: of what is left over, a softmax of k outputs makes heavy weather."""
    return 64 // dtype.itemsize if k > 1 else 1


def counted(positions: Tensor, share: Tensor, m: int, k: int) -> Tensor:
    """The weights of n clients' m samples in every step, (J, n, 1, m): a sample drawn c times has c of its shares.

    Args:
        positions: (n, J, b), which of a client's samples are drawn.
        share: (n, b), what a draw counts for; 0 for padding.
        m: samples of a client.
        k: outputs.
    """
    n, steps, b = positions.shape
    out = share.new_zeros(steps, n, m + -m % lanes(share.dtype, k))
    out.transpose(0, 1).scatter_add_(2, positions, share[:, None].expand(n, steps, b))
    return out[:, :, None]
