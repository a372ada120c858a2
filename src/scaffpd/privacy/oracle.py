r"""Clients whose every answer is clipped, noised and accounted for.

`Private` has the equations. Sums are whole numbers of units and noise is the discrete Gaussian in
the same units (`mechanism`, `noise`); every local step takes a gradient that is made in the same
way. The mean of clipped losses is brought back to [0, B], where it must lie. One question for a
gradient is two releases (gradient and loss); J local steps are J more, or J − 1 where the first
gradient is the c_i that is known already. What is made of released vectors (sums, projections,
norms, d_i) costs nothing.

Where secure sums hide single vectors, the noise of gradients can be shared among n clients, of
which t may add none:

    Σ_i w_i c_i = (sC/2ᶠ) Σ_i (⌊(w_i/(m_i s)) S_i⌋ + N_ℤ(0, σ²)) + l2 ∘ x Σ_i w_i,
    s = max_j |w_j|/m_j,   σ = z Δ/√(n − t),   Δ = max_j Δ_j

with S_i the sum of client i in units of C/2ᶠ (Kairouz, Liu, Steinke, "The distributed discrete
Gaussian mechanism for federated learning with secure aggregation", 2021). A record of client i
moves it by Δ_i ≤ 2ᶠ|w_i|/(m_i s) + 2√d units, rounding included, and n − t clients hide that with
√(n − t) σ: a release with z_i = √(n − t) σ/Δ_i ≥ z, for every weighting anew. Their sum is no
discrete Gaussian, but its probabilities are one's times e^±τ (shown there),

    τ ≤ 10 Σ_{k<n−t} exp(−2π²σ² k/(k + 1)) ≤ 10 n exp(−π²σ²),

which is no number that a computer could tell from zero: σ is above 2²⁰.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation import Constants, LocalPlan, Vector, same_point
from scaffpd.federation.plans import ReleaseCounts
from scaffpd.federation.questions import SharedSum
from scaffpd.models.oracle import (
    Held,
    Oracle,
    StackedDisplacements,
    StackedPoint,
    shift,
    step_sizes,
    stepped,
)
from scaffpd.models.point import Ridge
from scaffpd.privacy.accountant import Account, ReleaseEntry
from scaffpd.privacy.mechanism import SPARE, Clip, ClippedSums
from scaffpd.privacy.noise import PrivateQuestion, digest, discrete_gaussians

LEAST_SIGMA = 2**20  # of a client's share, in units


def refuse_single(*_: object) -> NoReturn:
    raise InputError(
        "shared-noise-visible",
        "Shared noise only covers sums of gradients: use a method that needs "
        "nothing else, such as ScaffPD(local_steps=1), or leave colluding out.",
    )


class SumTerms(NamedTuple):
    """The sum that clients add to, some of them elsewhere."""

    clients: int  # n, of all of it
    scale: float  # s, at least everybody's |w_j|/m_j
    about: bytes  # who they are and which weights they have: another sum has other noise


class SharedPoint(StackedPoint):
    """Losses released at x, and gradients that leave in sums with shared noise only."""

    each = norms = refuse_single

    def __init__(self, x: Tensor, losses: Tensor, oracle: PrivateOracle) -> None:
        super().__init__(x, losses, x.new_empty(0))
        self.oracle = oracle

    def shares(self, weights: Tensor, terms: SumTerms | None = None) -> SharedSum:
        """Return what every client adds to Σ_i w_i c_i: a release of everybody."""
        return self.oracle.shared(self.x, weights, terms)

    def sum(self, weights: Tensor) -> Tensor:
        return self.shares(weights).total()


class SharedStep(StackedDisplacements):
    """One local step, d_i = η_i (c_i + c), of which sums are released."""

    each = refuse_single

    def __init__(self, point: SharedPoint, rates: Tensor, pull: Tensor) -> None:
        super().__init__(point.x.new_empty(0))
        self.point = point
        self.rates = rates
        self.pull = pull

    def shares(self, weights: Tensor) -> SharedSum:
        own = weights * self.rates[:, 0]
        made = self.point.shares(own)
        return made._replace(public=made.public + float(own.sum()) * self.pull)

    def sum(self, weights: Tensor) -> Tensor:
        return self.shares(weights).total()


class PrivateClient(NamedTuple):
    """One client: its place in the account, K_i of its noise, and m_i."""

    number: int
    key: bytes
    samples: int


@dataclass(eq=False, repr=False)
class PrivateOracle(Oracle):
    """N clients that answer with noise."""

    inner: Oracle  # the same clients without noise, as the experimenter sees them (`scores`)
    sums: ClippedSums  # their clipped sums
    clips: tuple[Clip, Clip]  # of gradients and of losses
    noise: tuple[float, float]  # z and z_L
    ridge: Ridge  # the regulariser, which is public
    known: Constants | None  # public constants; `None` where there are none
    members: list[PrivateClient]
    account: Account
    colluding: int | None  # t of shared noise; `None` where everybody hides its own

    def __post_init__(self) -> None:
        self.dimension = self.inner.dimension
        self.most_rows = self.inner.most_rows

    def start(self) -> Tensor:
        return self.inner.start()

    def contents(self) -> list[Tensor]:
        return self.inner.contents()

    def constants(self) -> Constants:
        """Return public numbers only."""
        if self.known is None:
            raise InputError(
                "no-public-smoothness",
                "The clients' smoothness depends on their data: give Private a public smoothness= "
                "(or radius= with Linear), or the method a rate of its own.",
            )
        return self.known

    def only(self, clients: list[int]) -> PrivateOracle:
        return replace(
            self,
            inner=self.inner.only(clients),
            sums=self.sums.only(clients),
            known=None if self.known is None else self.known.only(clients),
            members=[self.members[i] for i in clients],
        )

    def losses(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> Tensor:
        ReleaseCounts.over(batch_size)
        questions = self._questions("loss", x)
        self.account.charge(self._entries(questions, self.noise[1]))
        total = self._noised(questions, self.sums.losses(x)[:, None], 1)[:, 0]
        return total.clamp(0, self.clips[1].most).to(x) + self.ridge.half(x).to(x)

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> StackedPoint:
        """Release L_i and c_i: two releases; or L_i alone, where gradients wait for their sum."""
        ReleaseCounts.over(batch_size)
        if self.colluding is not None:
            return SharedPoint(x, self.losses(x), self)
        losses = self._entries(self._questions("loss", x), self.noise[1])
        questions = self._questions("gradient", x)
        # both or none: a refusal must not leave half of an answer paid for
        self.account.charge(losses + self._entries(questions, self.noise[0]))
        return StackedPoint(x, self.losses(x), self._gradients(questions, x))

    def local_updates(
        self, x: Tensor, at: Held, correction: Tensor | None, plan: LocalPlan
    ) -> StackedDisplacements:
        """Make J local steps: J releases, or J − 1 where the first gradient is known.

        With shared noise there is one: η_i c if it is corrected by this point's c_i, else
        η_i (c_i + c).
        """
        ReleaseCounts.over(plan.batch_size)
        rates = step_sizes(plan, len(self.members), lambda: self.constants().smoothness, x)
        known = isinstance(at, StackedPoint) and same_point(at.x, x)
        if self.colluding is not None:
            c = torch.zeros_like(x) if correction is None else correction
            if plan.steps > 1 or (at is not None and not known):
                refuse_single()
            if known:
                return StackedDisplacements(rates * c)
            return SharedStep(SharedPoint(x, x.new_empty(0), self), rates, c)
        pull = x.new_zeros(len(self.members), len(x)) + shift(at, correction)
        first = at.gradients if isinstance(at, StackedPoint) and known else None
        own = torch.cat([pull, rates], 1)  # what each client is asked about
        common = digest("steps", x, float(plan.prox), known)
        pairs = zip(self.members, own, strict=True)
        questions = [PrivateQuestion(member.key, digest(common, row)) for member, row in pairs]
        times = plan.steps - known
        if times:
            self.account.charge(self._entries(questions, self.noise[0], times))
        given = [] if first is None else [first]
        slopes = lambda at: given.pop() if given else self._gradients(questions, at)
        return stepped(x, pull, rates, plan, slopes)

    def shared(self, x: Tensor, weights: Tensor, terms: SumTerms | None = None) -> SharedSum:
        """Return Σ_i w_i c_i, to which every client adds its share of the noise: a release of each.

        `terms` describe the sum where these are not all of its clients.
        """
        w = weights.detach().double().cpu().numpy()
        share = w / [member.samples for member in self.members]
        largest = float(np.abs(share).max())
        terms = terms or SumTerms(len(share), largest or 1.0, digest(torch.from_numpy(w)))
        s = terms.scale
        clip = self.clips[0]
        honest = terms.clients - (self.colluding or 0)
        rounded = math.ldexp(2 * len(x) ** 0.5, -clip.bits)
        moved = np.abs(share) / s + rounded  # Δ_i/2ᶠ
        if largest > s * (1 + 1e-12):
            raise InputError(
                "scale-too-small",
                "The scale of a sum is smaller than this client's part of it: noise would not "
                "cover that.",
            )
        sigma = clip.sigma(self.noise[0] * (1 + rounded) / max(1, honest) ** 0.5)
        if honest < 1 or sigma < LEAST_SIGMA:
            raise InputError(
                "too-few-to-share-noise",
                f"{terms.clients} clients, of which {self.colluding} may add no noise, cannot "
                "share so little of it.",
            )
        questions = self._questions("sum", x, terms.about)
        hidden = honest**0.5 * math.ldexp(sigma / SPARE, -clip.bits) / moved
        taking = zip(self.members, questions, hidden, share, strict=True)
        entries = (ReleaseEntry(one.number, q.mark, float(z)) for one, q, z, part in taking if part)
        self.account.charge([*entries])
        noise = np.stack([discrete_gaussians(q.noise, sigma, len(x)) for q in questions])
        scaled = self.sums.gradients(x) * torch.from_numpy(share / s).to(x.device)[:, None]
        parts = scaled.trunc().long() + torch.from_numpy(noise).to(x.device)
        return SharedSum(parts, clip.unit * s, float(w.sum()) * self.ridge.times(x))

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return f_i(x) and accuracy without noise: the experimenter's view, not released."""
        return self.inner.scores(x)

    def _questions(self, kind: str, *about: object) -> list[PrivateQuestion]:
        content = digest(kind, *about)
        return [PrivateQuestion(member.key, content) for member in self.members]

    def _entries(
        self, questions: Sequence[PrivateQuestion], noise: float, times: int = 1
    ) -> list[ReleaseEntry]:
        pairs = zip(self.members, questions, strict=True)
        return [ReleaseEntry(member.number, q.mark, noise, times) for member, q in pairs]

    def _gradients(self, questions: Sequence[PrivateQuestion], at: Tensor) -> Tensor:
        """Release the gradients of all clients at x, or at every client's own u_i."""
        noised = self._noised(questions, self.sums.gradients(at), 0).to(at)
        return noised + self.ridge.times(at)

    def _noised(self, questions: Sequence[PrivateQuestion], sums: Tensor, which: int) -> Tensor:
        """Add noise to sums (N, ·), in whole numbers, and return means in plain numbers."""
        clip = self.clips[which]
        sigma = clip.sigma(self.noise[which])
        drawn = [discrete_gaussians(q.noise, sigma, sums.shape[1]) for q in questions]
        total = sums.long() + torch.from_numpy(np.stack(drawn)).to(sums.device)
        samples = torch.tensor([member.samples for member in self.members], device=sums.device)
        return total.double() * clip.unit / samples[:, None]
