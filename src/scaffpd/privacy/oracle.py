r"""Clients whose every answer is clipped, noised and accounted for.

    c_i = (1/m_i) (Σ_j ∇ℓ_j min(1, C/‖∇ℓ_j‖) + N(0, (zC)² I)) + l2 x
    L_i = (1/m_i) (Σ_j clip(ℓ_j, 0, B) + N(0, (z_L B)²)) + (l2/2)‖x‖²

where sums are whole numbers of units and N is the discrete Gaussian in the same units (see `mechanism` and `noise`),
and every local step takes a gradient that is made in the same way. With a batch size b < m_i the sums go over a Poisson
sample of rate q_i = b/m_i and are divided by b; loss, gradient and every local step draw their own. The first mean of
L_i is then brought back to [0, B], where it must lie. One question for a gradient is two releases (gradient and loss);
J local steps are J more, or J − 1 where all records take part and the first gradient is the c_i that is known already.
What is made of released vectors (sums, projections, norms, d_i) costs nothing.

Where secure sums hide single vectors, the noise of gradients can be shared among n clients, of which t may add none:

    Σ_i w_i c_i = (sC/2ᶠ) Σ_i (⌊(w_i/(m_i s)) S_i⌋ + N_ℤ(0, σ²)) + l2 x Σ_i w_i,
    s = max_j |w_j|/m_j,   σ = z Δ/√(n − t),   Δ = max_j Δ_j

with S_i the sum of client i in units of C/2ᶠ (Kairouz, Liu, Steinke, "The distributed discrete Gaussian mechanism for
federated learning with secure aggregation", 2021). A record of client i moves it by Δ_i ≤ 2ᶠ|w_i|/(m_i s) + 2√d units,
rounding included, and n − t clients hide that with √(n − t) σ: a release with z_i = √(n − t) σ/Δ_i ≥ z, for every
weighting anew. Their sum is no discrete Gaussian, but its probabilities are one's times e^±τ (shown there),

    τ ≤ 10 Σ_{k<n−t} exp(−2π²σ² k/(k + 1)) ≤ 10 n exp(−π²σ²),

which is no number that a computer could tell from zero: σ is above 2²⁰.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation import Constants, LocalPlan, Vector, same_point
from scaffpd.federation.questions import SharedSum
from scaffpd.models.oracle import (
    Oracle,
    StackedDisplacements,
    StackedPoint,
    refuse_curvature,
    shift,
)
from scaffpd.privacy.accountant import Account, Release, ReleaseEntry
from scaffpd.privacy.mechanism import SPARE, Clip, ClippedSums
from scaffpd.privacy.noise import PrivateQuestion, digest, discrete_gaussians, drawn


def refusal(sentence: str) -> Any:
    """Return a method that refuses with the sentence."""

    def refuse(*_: Any) -> NoReturn:
        raise InputError("refuse", sentence)

    return refuse


class PrivatePoint(StackedPoint):
    """Releases of all clients at one x; sums, projections and norms are computed from these."""

    def __init__(self, x: Tensor, losses: Tensor, gradients: Tensor, whole: bool) -> None:
        super().__init__(x, losses, gradients)
        self.whole = whole


NO_SMOOTHNESS = (
    "The clients' smoothness is a fact about their data: give Private a public smoothness= (or radius= with Linear), "
    "or the method a rate of its own."
)


LEAST_SIGMA = 2**20  # of a client's share, in units
SHARED = (
    "Noise that clients share is in sums of their gradients over all records alone: use a method that needs nothing "
    "else, such as ScaffPD(local_steps=1), or leave colluding out."
)


class SumTerms(NamedTuple):
    """The sum that clients add to, some of them elsewhere."""

    clients: int  # n, of all of it
    scale: float  # s, at least everybody's |w_j|/m_j
    about: bytes  # who they are and which weights they have: another sum has other noise


class SharedPoint(PrivatePoint):
    """Losses that clients have released at x, and gradients that leave them in sums with shared noise only."""

    each = norms = project = refusal(SHARED)

    def __init__(self, x: Tensor, losses: Tensor, oracle: PrivateOracle) -> None:
        super().__init__(x, losses, x.new_empty(0), whole=True)
        self.oracle = oracle

    def shares(self, weights: Tensor, terms: SumTerms | None = None) -> SharedSum:
        """Return what every client adds to Σ_i w_i c_i: a release of everybody."""
        return self.oracle.shared(self.x, weights, terms)

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i c_i, added up as secure sums do it."""
        return self.shares(weights).total()


class SharedStep(StackedDisplacements):
    """One local step, d_i = η_i (c_i + c), of which sums are released."""

    each = refusal(SHARED)

    def __init__(self, point: SharedPoint, rates: Tensor, pull: Tensor) -> None:
        super().__init__(point.x.new_empty(0))
        self.point = point
        self.rates = rates
        self.pull = pull

    def shares(self, weights: Tensor) -> SharedSum:
        """Return what every client adds to Σ_i w_i d_i: a release of everybody."""
        own = weights * self.rates[:, 0]
        made = self.point.shares(own)
        return made._replace(public=made.public + float(own.sum()) * self.pull)

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i d_i, added up as secure sums do it."""
        return self.shares(weights).total()


class PrivateClient(NamedTuple):
    """One client."""

    number: int  # its place in the account
    key: bytes  # K_i, of its noise
    samples: int  # m_i
    noise: float  # z_i of gradients
    loss_noise: float  # z_i of losses


@dataclass(eq=False, repr=False)
class PrivateOracle:
    """N clients that answer with noise."""

    inner: Oracle  # the same clients without; the experimenter's view of them (`scores`) comes from there
    sums: ClippedSums  # their clipped sums
    clips: tuple[Clip, Clip]  # of gradients and of losses
    l2: float  # of the regulariser, which is public
    known: Constants | None  # public constants; `None` where there are none
    members: list[PrivateClient]
    account: Account  # what they have released
    colluding: (
        int | None
    )  # t, how many may add no noise where it is shared; `None` where everybody hides its own
    largest: int  # a public bound on m_i

    proximal_steps = refuse_curvature

    def __post_init__(self) -> None:
        self.dimension = self.inner.dimension
        self.most_rows = self.inner.most_rows

    def start(self) -> Tensor:
        """Return x⁰ of the model, which depends on no record."""
        return self.inner.start()

    def contents(self) -> list[Tensor]:
        """Return the data."""
        return self.inner.contents()

    def constants(self) -> Constants:
        """Return public numbers only."""
        if self.known is None:
            raise InputError("constants", NO_SMOOTHNESS)
        return self.known

    def only(self, clients: list[int]) -> PrivateOracle:
        """Return an oracle of some of the clients, on the same account."""
        members = [self.members[i] for i in clients]
        known = None if self.known is None else self.known.only(clients)
        return replace(
            self,
            inner=self.inner.only(clients),
            sums=self.sums.only(clients),
            known=known,
            members=members,
        )

    def losses(self, x: Tensor, batch_size: int | None, key: tuple[int, ...]) -> Tensor:
        """Release L_i: one release."""
        questions = self._questions("loss", batch_size, key, x)
        self.account.charge(self._entries(questions, batch_size, losses=True))
        return self._released_losses(questions, x, batch_size)

    def evaluate(self, x: Tensor, batch_size: int | None, key: tuple[int, ...]) -> PrivatePoint:
        """Release L_i and c_i: two releases; or L_i alone, where gradients wait for their sum."""
        if self.colluding is not None:
            self._unsampled(batch_size)
            return SharedPoint(x, self.losses(x, None, key), self)
        losses, gradients = (
            self._questions(kind, batch_size, key, x) for kind in ("loss", "gradient")
        )
        costs = self._entries(losses, batch_size, losses=True) + self._entries(
            gradients, batch_size
        )
        self.account.charge(costs)
        values = self._released_losses(losses, x, batch_size)
        return PrivatePoint(x, values, self._released(gradients, x, batch_size), batch_size is None)

    def local_updates(
        self,
        x: Tensor,
        at: PrivatePoint | Tensor | None,
        correction: Tensor | None,
        plan: LocalPlan,
    ) -> StackedDisplacements:
        """Make J local steps of every client: J releases, or J − 1 where the first gradient is known."""
        if self.colluding is not None:
            return self._shared_step(x, at, correction, plan)
        each = x.new_zeros(len(self.members), len(x))
        rates = self._rates(x, plan)
        pull = each + shift(at, correction)
        first = None
        if (
            isinstance(at, PrivatePoint)
            and at.whole
            and plan.batch_size is None
            and same_point(at.x, x)
        ):
            first = at.gradients
        about = (x, float(plan.prox), first is not None)
        questions = self._questions(
            "steps", plan.batch_size, plan.key, *about, own=torch.cat([pull, rates], 1)
        )
        times = [plan.of(i) - (first is not None) for i in range(len(self.members))]
        costs = zip(self._entries(questions, plan.batch_size), times, strict=True)
        self.account.charge([entry._replace(times=own) for entry, own in costs if own])
        for t in range(plan.steps):
            g = self._released(questions, x - each, plan.batch_size) if first is None else first
            each = each + plan.makes(t, x) * rates * (g + pull - plan.prox * each)
            first = None
        return StackedDisplacements(each)

    def _shared_step(
        self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan
    ) -> StackedDisplacements:
        """Make the only step d_i: η_i c where it is corrected by the c_i of this point, else η_i (c_i + c)."""
        self._unsampled(plan.batch_size)
        rates = self._rates(x, plan)
        c = torch.zeros_like(x) if correction is None else correction
        if plan.steps > 1 or (
            at is not None and not (isinstance(at, SharedPoint) and same_point(at.x, x))
        ):
            raise InputError("shared-step", SHARED)
        if at is not None:
            return StackedDisplacements(rates * c)
        return SharedStep(SharedPoint(x, x.new_empty(0), self), rates, c)

    def _unsampled(self, batch_size: int | None) -> None:
        if batch_size is not None:
            raise InputError("unsampled", SHARED)

    def shared(self, x: Tensor, weights: Tensor, terms: SumTerms | None = None) -> SharedSum:
        """Return Σ_i w_i c_i, to which every client adds its share of the noise: a release of each of them.

        `terms` describe the sum where these are not all of its clients.
        """
        w = weights.detach().double().cpu().numpy()
        share = w / [member.samples for member in self.members]
        if terms is None:
            terms = SumTerms(
                len(share), float(np.abs(share).max()) or 1.0, digest(torch.from_numpy(w))
            )
        n = terms.clients
        s = terms.scale
        clip = self.clips[0]
        honest = terms.clients - (self.colluding or 0)
        rounded = math.ldexp(2 * len(x) ** 0.5, -(clip.bits or 0))
        moved = np.abs(share) / s + rounded  # Δ_i/2ᶠ
        if float(np.abs(share).max()) > s * (1 + 1e-12):
            raise InputError(
                "scale-sum-smaller",
                "The scale of a sum is smaller than this client's part of it: noise would not cover that.",
            )
        z = max(member.noise for member in self.members) * (1 + rounded)
        sigma = clip.sigma(z / max(1, honest) ** 0.5)
        if honest < 1 or clip.bits is None or sigma < LEAST_SIGMA:
            raise InputError(
                "clients-may-add",
                f"{n} clients, of which {self.colluding} may add no noise, cannot share so little of it.",
            )
        questions = self._questions("sum", None, (), x, terms.about)
        hidden = honest**0.5 * math.ldexp(sigma / SPARE, -clip.bits) / moved
        self.account.charge(
            [
                ReleaseEntry(member.number, question.mark, Release(float(own)))
                for member, question, own, part in zip(
                    self.members, questions, hidden, share, strict=True
                )
                if part
            ]
        )
        noise = np.stack(
            [discrete_gaussians(question.noise, sigma, len(x)) for question in questions]
        )
        scaled = self.sums.gradients(x, None) * torch.from_numpy(share / s).to(x.device)[:, None]
        parts = scaled.trunc().long() + torch.from_numpy(noise).to(x.device)
        most = 2.0 ** math.ceil(math.log2(self.largest * 2.0**clip.bits + 16 * sigma))
        return SharedSum(parts, most, clip.unit * s, self.l2 * float(w.sum()) * x)

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return f_i(x) and accuracy without noise: the experimenter's view, no part of what clients release."""
        return self.inner.scores(x)

    def _questions(
        self,
        kind: str,
        batch_size: int | None,
        key: tuple[int, ...],
        *about: Any,
        own: Tensor | None = None,
    ) -> list[PrivateQuestion]:
        """Make a question for every client; without a batch size nothing is drawn by the key."""
        named = None if batch_size is None else tuple(int(k) for k in key)
        common = digest(kind, batch_size, named, *about)
        contents = (
            [common] * len(self.members) if own is None else [digest(common, row) for row in own]
        )
        return [
            PrivateQuestion(member.key, content)
            for member, content in zip(self.members, contents, strict=True)
        ]

    def _entries(
        self, questions: list[PrivateQuestion], batch_size: int | None, losses: bool = False
    ) -> list[ReleaseEntry]:
        entries = []
        for member, question, rate in zip(
            self.members, questions, self._shares(batch_size), strict=True
        ):
            release = Release(member.loss_noise if losses else member.noise, rate)
            entries.append(ReleaseEntry(member.number, question.mark, release))
        return entries

    def _shares(self, batch_size: int | None) -> list[float]:
        """Return q_i."""
        return [
            1.0 if batch_size is None else min(1.0, batch_size / member.samples)
            for member in self.members
        ]

    def _drawn(
        self, questions: list[PrivateQuestion], batch_size: int | None, like: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return which rows take part, and what their sums are divided by."""
        shares = self._shares(batch_size)
        sizes = [member.samples for member in self.members]
        whole = min(shares) == 1
        rows = None if whole else torch.from_numpy(drawn(questions, sizes, shares)).to(like.device)
        return rows, torch.tensor(shares, dtype=torch.float64).to(like) * torch.tensor(sizes).to(
            like
        )

    def _released(
        self, questions: list[PrivateQuestion], at: Tensor, batch_size: int | None
    ) -> Tensor:
        """Release the gradients of all clients at x, or at every client's own u_i."""
        rows, count = self._drawn(questions, batch_size, at)
        noise = [member.noise for member in self.members]
        total = self._noised(questions, self.sums.gradients(at, rows), noise, self.clips[0])
        return (total / count[:, None]).to(at) + self.l2 * at

    def _released_losses(
        self, questions: list[PrivateQuestion], x: Tensor, batch_size: int | None
    ) -> Tensor:
        rows, count = self._drawn(questions, batch_size, x)
        noise = [member.loss_noise for member in self.members]
        total = self._noised(questions, self.sums.losses(x, rows)[:, None], noise, self.clips[1])
        return (total[:, 0] / count).clamp(0, self.clips[1].most).to(x) + self.l2 / 2 * (x @ x)

    def _noised(
        self, questions: list[PrivateQuestion], sums: Tensor, z: list[float], clip: Clip
    ) -> Tensor:
        """Add noise to sums (N, ·), whole numbers to whole numbers, and turn units into plain numbers."""
        if clip.bits is None:
            return sums
        noise = np.zeros(sums.shape, dtype=np.int64)
        for row, question, own in zip(noise, questions, z, strict=True):
            if own > 0:
                row[:] = discrete_gaussians(question.noise, clip.sigma(own), len(row))
        return (sums.long() + torch.from_numpy(noise).to(sums.device)).double() * clip.unit

    def _rates(self, x: Tensor, plan: LocalPlan) -> Tensor:
        """Return η_i, (N, 1)."""
        if plan.rate is not None:
            return x.new_full((len(self.members), 1), plan.rate)
        return torch.from_numpy(
            plan.scale / self.constants().expected_smoothness(plan.batch_size)
        ).to(x)[:, None]
