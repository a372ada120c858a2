r"""Clients whose every answer is clipped, noised and accounted for.

    c_i = (1/m_i) (Σ_j ∇ℓ_j min(1, C/‖∇ℓ_j‖) + N(0, (zC)² I)) + l2 x
    L_i = (1/m_i) (Σ_j clip(ℓ_j, 0, B) + N(0, (z_L B)²)) + (l2/2)‖x‖²

where sums are whole numbers of units and N is the discrete Gaussian in the same units (see `mechanism` and `noise`),
and every local step takes a gradient that is made in the same way. With a batch size b < m_i the sums go over a Poisson
sample of rate q_i = b/m_i and are divided by b; loss, gradient and every local step draw their own. The first mean of
L_i is then brought back to [0, B], where it must lie. One question for a gradient is two releases (gradient and loss);
J local steps are J more, or J − 1 where all records take part and the first gradient is the c_i that is known already.
What is made of released vectors (sums, projections, norms, d_i) costs nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Vector, same_point
from scaffpd.models.oracle import Oracle, StackedDisplacements, StackedPoint, SubspaceDerivatives, shift
from scaffpd.privacy.accountant import Account, Release, ReleaseEntry
from scaffpd.privacy.mechanism import Clip, ClippedSums
from scaffpd.privacy.noise import PrivateQuestion, digest, discrete_gaussians, drawn

SECOND_ORDER = (
    "Private clients release clipped gradients and losses, no second derivatives: use ScaffPD, AcceleratedPrimalDual "
    "or another method of gradients and local steps."
)


class PrivatePoint(StackedPoint):
    """What all clients have released at one x; sums, projections and norms are made of that."""

    def __init__(self, x: Tensor, losses: Tensor, gradients: Tensor, whole: bool) -> None:
        super().__init__(x, losses, gradients)
        self.whole = whole

    def norms(self) -> Tensor:
        """‖c_i‖² per client, noise included."""
        return self.gradients.square().sum(1)

    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> SubspaceDerivatives:
        """Refuse: second derivatives are not released."""
        raise InputError(SECOND_ORDER)

    def diagonal(self, weights: Tensor) -> Tensor:
        """Refuse: second derivatives are not released."""
        raise InputError(SECOND_ORDER)

    def diagonals(self) -> Tensor:
        """Refuse: second derivatives are not released."""
        raise InputError(SECOND_ORDER)


NO_SMOOTHNESS = (
    "The clients' smoothness is a fact about their data: give Private a public smoothness= (or radius= with Linear), "
    "or the method a rate of its own."
)


class PrivateClient(NamedTuple):
    """One client.

    Attributes:
        number: its place in the account.
        key: K_i, of its noise.
        samples: m_i.
        noise: z_i of gradients.
        loss_noise: z_i of losses.
    """

    number: int
    key: bytes
    samples: int
    noise: float
    loss_noise: float


class PrivateOracle:
    """N clients that answer with noise.

    Args:
        inner: the same clients without; the experimenter's view of them (`scores`) comes from there.
        sums: their clipped sums.
        clips: of gradients and of losses.
        l2: of the regulariser, which is public.
        known: public constants; `None` where there are none.
        members: the clients.
        account: what they have released.
    """

    def __init__(
        self, inner: Oracle, sums: ClippedSums, clips: tuple[Clip, Clip], l2: float, known: Constants | None,
        members: list[PrivateClient], account: Account,
    ) -> None:  # fmt: skip
        self.inner, self.sums, self.clips, self.l2 = inner, sums, clips, l2
        self.known, self.members, self.account = known, members, account
        self.dimension, self.most_rows = inner.dimension, inner.most_rows

    def start(self) -> Tensor:
        """x⁰ of the model, which depends on no record."""
        return self.inner.start()

    def contents(self) -> list[Tensor]:
        """The data."""
        return self.inner.contents()

    def constants(self) -> Constants:
        """Public numbers only."""
        if self.known is None:
            raise InputError(NO_SMOOTHNESS)
        return self.known

    def only(self, clients: list[int]) -> PrivateOracle:
        """The same for some of the clients, on the same account."""
        known = self.known
        if known is not None:
            known = replace(
                known,
                smoothness=known.smoothness[clients],
                strong_convexity=known.strong_convexity[clients],
                steepest=known.steepest[clients],
                samples=known.samples[clients],
            )
        members = [self.members[i] for i in clients]
        return PrivateOracle(
            self.inner.only(clients), self.sums.only(clients), self.clips, self.l2, known, members, self.account
        )

    def losses(self, x: Tensor, batch_size: int | None, key: tuple[int, ...]) -> Tensor:
        """L_i: one release."""
        questions = self._questions("loss", batch_size, key, x)
        self.account.charge(self._entries(questions, batch_size, losses=True))
        return self._released_losses(questions, x, batch_size)

    def evaluate(self, x: Tensor, batch_size: int | None, key: tuple[int, ...]) -> PrivatePoint:
        """L_i and c_i: two releases."""
        losses, gradients = (self._questions(kind, batch_size, key, x) for kind in ("loss", "gradient"))
        costs = self._entries(losses, batch_size, losses=True) + self._entries(gradients, batch_size)
        self.account.charge(costs)
        values = self._released_losses(losses, x, batch_size)
        return PrivatePoint(x, values, self._released(gradients, x, batch_size), batch_size is None)

    def local_updates(
        self, x: Tensor, at: PrivatePoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> StackedDisplacements:
        """J local steps of every client: J releases, or J − 1 where the first gradient is known."""
        each, rates = x.new_zeros(len(self.members), len(x)), self._rates(x, plan)
        pull = each + shift(at, correction)
        first = None
        if isinstance(at, PrivatePoint) and at.whole and plan.batch_size is None and same_point(at.x, x):
            first = at.gradients
        about = (x, float(plan.prox), first is not None)
        questions = self._questions("steps", plan.batch_size, plan.key, *about, own=torch.cat([pull, rates], 1))
        steps = plan.steps - (first is not None)
        self.account.charge(self._entries(questions, plan.batch_size, times=steps) if steps else [])
        for _ in range(plan.steps):
            g = self._released(questions, x - each, plan.batch_size) if first is None else first
            each, first = each + rates * (g + pull - plan.prox * each), None
        return StackedDisplacements(each)

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> StackedDisplacements:
        """Refuse: second derivatives are not released."""
        raise InputError(SECOND_ORDER)

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """f_i(x) and accuracy without noise: the experimenter's view, no part of what clients release."""
        return self.inner.scores(x)

    def _questions(
        self, kind: str, batch_size: int | None, key: tuple[int, ...], *about: Any, own: Tensor | None = None
    ) -> list[PrivateQuestion]:
        """One for every client; without a batch size nothing is drawn by the key."""
        named = None if batch_size is None else tuple(int(k) for k in key)
        common = digest(kind, batch_size, named, *about)
        contents = [common] * len(self.members) if own is None else [digest(common, row) for row in own]
        return [PrivateQuestion(member.key, content) for member, content in zip(self.members, contents, strict=True)]

    def _entries(
        self, questions: list[PrivateQuestion], batch_size: int | None, losses: bool = False, times: int = 1
    ) -> list[ReleaseEntry]:
        entries = []
        for member, question, rate in zip(self.members, questions, self._shares(batch_size), strict=True):
            release = Release(member.loss_noise if losses else member.noise, rate)
            entries.append(ReleaseEntry(member.number, question.mark, release, times))
        return entries

    def _shares(self, batch_size: int | None) -> list[float]:
        """q_i."""
        return [1.0 if batch_size is None else min(1.0, batch_size / member.samples) for member in self.members]

    def _drawn(
        self, questions: list[PrivateQuestion], batch_size: int | None, like: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Which rows take part, and what their sums are divided by."""
        shares, sizes = self._shares(batch_size), [member.samples for member in self.members]
        whole = min(shares) == 1
        rows = None if whole else torch.from_numpy(drawn(questions, sizes, shares)).to(like.device)
        return rows, torch.tensor(shares, dtype=torch.float64).to(like) * torch.tensor(sizes).to(like)

    def _released(self, questions: list[PrivateQuestion], at: Tensor, batch_size: int | None) -> Tensor:
        """The gradients of all clients at x, or at every client's own u_i."""
        rows, count = self._drawn(questions, batch_size, at)
        noise = [member.noise for member in self.members]
        total = self._noised(questions, self.sums.gradients(at, rows), noise, self.clips[0])
        return (total / count[:, None]).to(at) + self.l2 * at

    def _released_losses(self, questions: list[PrivateQuestion], x: Tensor, batch_size: int | None) -> Tensor:
        rows, count = self._drawn(questions, batch_size, x)
        noise = [member.loss_noise for member in self.members]
        total = self._noised(questions, self.sums.losses(x, rows)[:, None], noise, self.clips[1])
        return (total[:, 0] / count).clamp(0, self.clips[1].most).to(x) + self.l2 / 2 * (x @ x)

    def _noised(self, questions: list[PrivateQuestion], sums: Tensor, z: list[float], clip: Clip) -> Tensor:
        """Add noise to sums (N, ·), whole numbers to whole numbers, and turn units into plain numbers."""
        if clip.bits is None:
            return sums
        noise = np.zeros(sums.shape, dtype=np.int64)
        for row, question, own in zip(noise, questions, z, strict=True):
            if own > 0:
                row[:] = discrete_gaussians(question.noise, clip.sigma(own), len(row))
        return (sums.long() + torch.from_numpy(noise).to(sums.device)).double() * clip.unit

    def _rates(self, x: Tensor, plan: LocalPlan) -> Tensor:
        """η_i, (N, 1)."""
        if plan.rate is not None:
            return x.new_full((len(self.members), 1), plan.rate)
        return torch.from_numpy(plan.scale / self.constants().expected_smoothness(plan.batch_size)).to(x)[:, None]
