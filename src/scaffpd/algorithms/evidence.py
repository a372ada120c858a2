r"""Strengths from the data: how far clients differ, coefficient by coefficient, without folds.

    u_i | x ~ N(x, T),   x ~ N(0, W),   T = diag(τ_g),   W = diag(ω_g)      g: group of coefficients

and the rows are distributed as the loss says (a sum over all rows; squared loss has a variance σ²).
The evidence is Laplace's approximation to the marginal likelihood at the joint mode (x, U), which
is exact for squared loss. With H_i = Σ_rows ℓ'' a aᵀ/s, V_i = (H_i + T⁻¹)⁻¹, B_i = V_iH_i,
P = W⁻¹ + Σ_i (H_i⁻¹ + T)⁻¹ and C = P⁻¹:

    log E = −Φ(x, U) − ½ Σ_i log det(I + T^½H_iT^½) − ½ log det(W^½PW^½)  [− ½ n log 2πσ²]
    τ_g ← Σ_i ‖u_i − x‖²_g / Σ_i Σ_{j∈g} [1 − (V_i + B_i C B_iᵀ)_jj/τ_g]
    ω_g ← ‖x‖²_g / Σ_{j∈g} (1 − C_jj/ω_g)
    σ²  ← RSS/(n − all of these degrees of freedom)

(D. MacKay, "Bayesian interpolation", 1992; restricted maximum likelihood of mixed models, Patterson
& Thompson 1971, of which this is the fixed point for squared loss.) All of it comes from sums over
clients. A group whose clients do not differ ends at τ_g = 0: its coefficients are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation import Federation, Vector
from scaffpd.federation.modes import ModesAt, ModeSpread

INTERCEPT = "intercept"
FEW = 7  # clients below which groups share one τ
TOLERANCE = 0.02
LIMIT = 60  # rounds of the fixed point
# Start of τ and ω, the prior of flat groups, and the largest τ and ω, in units of what makes a
# column explain about all there is.
START = 0.1, 1.0
FLAT = 1e6
LARGEST = 25.0
# Degrees of freedom below which a group that shrinks has nothing to say any more.
NOTHING = 1e-3
# Decrease of a Newton step in nats, from which x may move together with τ and ω.
CLOSE = 0.1
LEAST = 1e-8  # of the targets' variance: the smallest σ²
SLACK = 0.1  # nats that a faster step may lose before it is shortened
FASTER = 5.0
JUMP = 30.0


@dataclass(frozen=True)
class Prior:
    """τ_g, ω_g and s (1, or 2σ²)."""

    tau: Vector
    omega: Vector
    scale: float


@dataclass(frozen=True)
class Strengths:
    """Strengths that the data set themselves.

    Attributes:
        groups: names of the groups of coefficients.
        tau: τ_g, the variance between clients of a group's coefficients; 0 if they are shared.
        omega: ω_g, the variance of the shared coefficients around 0.
        sigma2: σ² of squared loss, else 1.
        l2: ridge per feature, as `Linear` takes it.
        strength: κ per feature, as `Personal` takes it; infinite for shared ones.
        evidence: log evidence in nats.
        x: the shared coefficients at the mode.
        freedom: degrees of freedom of every group's differences between clients.
        rounds: rounds of the fixed point.
    """

    groups: tuple[str, ...]
    tau: Vector
    omega: Vector
    sigma2: float
    l2: Vector = field(repr=False)
    strength: Vector = field(repr=False)
    evidence: float
    x: Tensor = field(repr=False)
    freedom: Vector = field(repr=False)
    rounds: int


@dataclass(frozen=True)
class _Point:
    """The answers at x under a prior: a Newton step, and the evidence as if it were taken."""

    prior: Prior
    question: ModesAt
    x: Tensor  # (rows of C, copies)
    C: Tensor
    step: Tensor
    value: float
    decrease: float
    evidence: float


@dataclass(frozen=True)
class _Moments:
    """Sums of squares over their variance, and degrees of freedom, of every group.

    Their difference is twice the derivative of log E in the log of the variance (where the loss is
    not squared: at fixed curvature).
    """

    spread: Vector
    spread_freedom: Vector
    size: Vector
    size_freedom: Vector
    residual: float  # RSS/σ²


class Evidence:
    """Evidence of one federation, for any prior."""

    def __init__(
        self, federation: Federation, groups: Sequence[str], loss: str, close: float = 1e-8
    ) -> None:
        self.federation = federation
        self.close = close
        self.squared = loss == "squared"
        self.names = tuple(dict.fromkeys(groups))
        place = {name: g for g, name in enumerate(self.names)}
        like = federation.start()
        self.device = like.device
        self.member = torch.tensor([place[name] for name in groups], device=like.device)
        features = len(groups)
        outputs = len(like) // features
        if features * outputs != len(like):
            raise InputError(
                "groups-length",
                f"There are {features} groups for {len(like)} coefficients: name one per feature, "
                "the intercept included.",
            )
        self.coupled = 1 if self.squared else outputs
        self.row_member = self.member.repeat_interleave(self.coupled)
        self.copies = len(like) // len(self.row_member)
        self.weights = np.ones(len(federation.names))
        self._measure(INTERCEPT in place and groups[-1] == INTERCEPT, loss == "poisson")

    def _measure(self, intercept: bool, counts: bool) -> None:
        """Set n, and the unit of every group: the variance that lets it explain about all.

        Columns are centred if there is an intercept.
        """
        G = len(self.names)
        flat = Prior(np.zeros(G), np.full(G, np.inf), 1.0)
        x = self.zero()
        last = slice(len(x) - self.coupled, None)
        for _ in range(8 if intercept and counts else 1):
            (total, _, n), gradient, Q = self.ask(flat, x, None)[1]
            diagonal = Q.diagonal().clone()
            if intercept and self.coupled == 1:
                step = gradient[last] / Q[last, last]
                total = total - float((gradient[last] * step).sum()) / 2
                x[last] -= step
        if intercept:
            over = Q[last, last].diagonal().repeat(len(x) // self.coupled)
            cross = torch.stack(
                [Q[c :: self.coupled, len(x) - self.coupled + c] for c in range(self.coupled)], 1
            ).flatten()
            centred = diagonal - cross.square() / over
            varies = centred > 1e-10 * diagonal
            diagonal = torch.where(varies, centred, diagonal)
        self.n = n
        self.noise = max(total / (n * self.copies), 1e-300) if self.squared else 1.0
        h = self._per_group(diagonal) / self._per_group(torch.ones_like(diagonal))
        h = h / (2 * self.noise if self.squared else 1.0)
        self.unit = n / np.where(h > 0, h, n)

    def _per_group(self, values: Tensor) -> Vector:
        out = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        return out.index_add_(0, self.row_member, values.double()).cpu().numpy()

    def _rows(self, per_group: Vector) -> Tensor:
        return torch.from_numpy(np.asarray(per_group)).to(self.device)[self.row_member]

    def ask(
        self, prior: Prior, x: Tensor, start: ModesAt | None
    ) -> tuple[ModesAt, tuple[list[float], Tensor, Tensor]]:
        """Return the sums of values, gradients and Hessians, with the question."""
        tau = torch.from_numpy(prior.tau).to(self.device)[self.member]
        question = ModesAt(x.flatten(), tau, prior.scale, self.coupled, self.close, start)
        seen = self.federation.ask(question)
        value, gradient, Q = (seen.added(part, self.weights).double() for part in question.vectors)
        return question, (value.tolist(), gradient.view_as(x), (Q + Q.mT) / 2)

    def zero(self) -> Tensor:
        """Return x = 0, (rows of C, copies)."""
        shape = len(self.row_member), self.copies
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def at(self, prior: Prior, x: Tensor, start: ModesAt | None = None) -> _Point:
        """Evaluate at x."""
        question, ((total, determinants, n), gradient, Q) = self.ask(prior, x, start)
        omega = self._rows(prior.omega)[:, None]
        root = omega.sqrt()
        scaled = root * Q * root.mT
        scaled.diagonal().add_(1)
        L = torch.linalg.cholesky(scaled)
        C = root * torch.cholesky_inverse(L) * root.mT
        slope = gradient + x / omega
        step = -(C @ slope)
        decrease = -float((slope * step).sum()) / 2
        value = total + float((x.square() / omega).sum()) / 2
        inside = determinants + 2 * self.copies * float(L.diagonal().log().sum())
        evidence = decrease - value - inside / 2
        if self.squared:
            evidence -= n * self.copies / 2 * float(np.log(np.pi * prior.scale))
        return _Point(prior, question, x, C, step, value, decrease, evidence)

    def mode(self, prior: Prior, x: Tensor, start: ModesAt | None, close: float = CLOSE) -> _Point:
        """Take Newton steps of x until one decreases Φ by no more than `close`."""
        point = self.at(prior, x, start)
        for _ in range(50):
            if not point.decrease > close:
                break
            length = 1.0
            for _ in range(20):
                ahead = self.at(prior, point.x + length * point.step, point.question)
                if ahead.value <= point.value - 1e-4 * length * point.decrease:
                    break
                length /= 2
            point = ahead
        return point

    def moments(self, point: _Point) -> _Moments:
        """Return what the fixed point needs, after the Newton step."""
        question = ModeSpread(point.question, point.C, point.step.flatten())
        spread = self.federation.ask(question).added("spread", self.weights).double()
        omega = self._rows(point.prior.omega)
        size = (point.x + point.step).square().sum(1) / omega
        size_freedom = self.copies * (1 - point.C.diagonal() / omega)
        left = point.value - point.decrease - float(spread[0].sum() + size.sum()) / 2
        a, b, c, d = map(self._per_group, (spread[0], spread[1], size, size_freedom))
        return _Moments(a, b, c, d, 2 * left)


class _Climb:
    """The fixed point: groups with the same number in a family change by the same factor.

    A group with number −1 stays as it is.
    """

    def __init__(
        self, problem: Evidence, point: _Point, tau: NDArray[np.int64], omega: NDArray[np.int64]
    ) -> None:
        self.problem = problem
        self.point = point
        self.families = tau.copy(), omega.copy()
        self.rounds = 0

    def run(self, tol: float) -> _Point:
        """Update τ, ω and σ² until the evidence gains less than `tol` nats a round.

        Every log variance moves by its residual log(a/b), times a factor that the last two
        residuals suggest: the plain fixed point is slow where clients have few rows.
        """
        before: tuple[Vector, Vector] | None = None
        fastest = FASTER
        best = -np.inf
        while self.rounds < LIMIT:
            found = self.problem.moments(self.point)
            a, b = self._sums(found)
            known = (a > 0) & (b > 0)
            residual = np.log(np.where(known, a, 1) / np.where(known, b, 1))
            residual[self._capped() & (residual > 0)] = 0.0
            if float(np.abs((a - b) * residual).sum()) / 2 + self.point.decrease < tol:
                break
            factor = np.ones_like(residual)
            if before is not None:
                moved = np.abs(before[0]) > 1e-9
                slope = (residual - before[1]) / np.where(moved, before[0], 1)
                factor = np.where(moved, np.clip(-1 / np.minimum(slope, -0.01), 0.5, fastest), 1)
            change = np.clip(factor * residual, -np.log(JUMP), np.log(JUMP))
            prior = self._changed(change, b, a < b)
            x = self.point.x + self.point.step
            self.point = self.problem.mode(prior, x, self.point.question)
            if self.point.evidence < best - SLACK:
                fastest = max(fastest / 2, 1.0)
            best = max(best, self.point.evidence)
            before = change, residual
            self.rounds += 1
        return self.point

    def _sums(self, found: _Moments) -> tuple[Vector, Vector]:
        """Return sums of squares and degrees of freedom: families of τ, families of ω, σ²."""
        pairs = (
            (found.spread, found.spread_freedom),
            (found.size, found.size_freedom),
        )
        sums = [
            np.concatenate(
                [
                    np.bincount(family + 1, pair[side], minlength=len(family) + 1)[1:]
                    for family, pair in zip(self.families, pairs, strict=True)
                ]
            )
            for side in (0, 1)
        ]
        used = found.spread_freedom.sum() + found.size_freedom.sum()
        free = self.problem.n * self.problem.copies - used
        last = (found.residual, max(free, 1e-9)) if self.problem.squared else (1.0, 1.0)
        return np.append(sums[0], last[0]), np.append(sums[1], last[1])

    def _capped(self) -> NDArray[np.bool_]:
        """Return which families are as large as they may be."""
        limit = 0.999 * LARGEST * self.problem.unit
        prior = self.point.prior
        pairs = zip(self.families, (prior.tau, prior.omega), strict=True)
        counts = [
            np.bincount(family + 1, values < limit, minlength=len(family) + 1)[1:]
            for family, values in pairs
        ]
        return np.append(np.concatenate(counts) == 0, False)

    def _changed(self, change: Vector, freedom: Vector, shrinks: NDArray[np.bool_]) -> Prior:
        """Return the prior with every family's change; share groups that have shrunk to nothing."""
        G = len(self.problem.unit)
        gone = shrinks & (freedom < NOTHING)
        values = []
        prior = self.point.prior
        for side, old in enumerate((prior.tau, prior.omega)):
            family = self.families[side]
            inside = family >= 0
            place = np.where(inside, family + side * G, 0)
            new = np.where(inside, old * np.exp(change[place]), old)
            new = np.where(inside, np.minimum(new, LARGEST * self.problem.unit), old)
            over = inside & gone[place]
            if side == 0:
                new[over] = 0.0
            family[over] = -1
            values.append(new)
        scale = prior.scale * float(np.exp(change[-1]))
        if self.problem.squared:
            scale = max(scale, 2 * LEAST * self.problem.noise)
        return Prior(values[0], values[1], scale)


def strengths(
    federation: Federation,
    groups: Sequence[str],
    loss: str,
    *,
    personal: bool = True,
    flat: Sequence[str] = (INTERCEPT,),
    few: int = FEW,
    tol: float = TOLERANCE,
) -> Strengths:
    """Find τ_g, ω_g and σ² by restricted maximum evidence.

    Args:
        federation: clients with a linear model; its own l2 and strength do not matter.
        groups: the group of every feature, the intercept's last.
        loss: the model's loss.
        personal: whether clients may differ; else there is one model for all.
        flat: groups that are not shrunk.
        few: number of clients below which all groups but the intercept share one τ.
        tol: gain of evidence, in nats a round, at which to stop.
    """
    problem = Evidence(federation, groups, loss)
    G = len(problem.names)
    personal = personal and len(federation.names) > 1
    own = np.arange(G)
    tau = own if personal else np.full(G, -1)
    free = np.array([name not in flat for name in problem.names])
    prior = Prior(
        problem.unit * (START[0] if personal else 0.0),
        problem.unit * np.where(free, START[1], FLAT),
        2 * problem.noise if problem.squared else 1.0,
    )
    climb = _Climb(problem, problem.mode(prior, problem.zero(), None), tau, np.where(free, own, -1))
    return _described(problem, climb.run(tol), climb.rounds)


def _described(problem: Evidence, point: _Point, rounds: int) -> Strengths:
    prior = point.prior
    found = problem.moments(point)
    member = problem.member.cpu().numpy()
    with np.errstate(divide="ignore"):
        strength = prior.scale / prior.tau
    return Strengths(
        problem.names,
        prior.tau,
        prior.omega,
        prior.scale / 2 if problem.squared else 1.0,
        (prior.scale / (problem.n * prior.omega))[member],
        strength[member],
        point.evidence,
        (point.x + point.step).flatten(),
        found.spread_freedom,
        rounds,
    )
