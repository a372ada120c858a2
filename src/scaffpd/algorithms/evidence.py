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
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from scaffpd.algorithms.climb import LIMIT, Climb, Families, Mask
from scaffpd.descent import newton
from scaffpd.errors import InputError
from scaffpd.federation import Federation, Vector
from scaffpd.federation.modes import ModesAt, ModeSpread
from scaffpd.numbers import aligned

INTERCEPT = "intercept"
CUTS = "cut points"  # the group of their distances, which nothing shrinks
TOLERANCE = 0.02
# start of τ and ω, and the prior of flat groups: in units that explain about all
START = 0.1, 1.0
FLAT = 1e6
FREE = 1e4  # τ, in the same units, of coefficients that every client has for itself (κ = 0)
CLOSE = 0.1  # decrease of a Newton step, in nats, from which x moves together with τ and ω
WORTH = 1.0  # nats that one more variance has to gain; where all are equal it gains ½ on average
ROUGH = 0.1, 0.05  # nats a round at which two fits are compared: at least, and per variance
# Newton steps towards a mode of integrals, and the decrease of one at which it is lost: rows that
# decide nothing let a deviation grow until quadrature errs by more than there is to find
FEW = 10
LOST = 1.0
AGAIN = 0.01  # of a group's share: where a variance starts that had shrunk to nothing


@dataclass(frozen=True)
class Prior:
    """τ_j and ω_j per feature, and s: 1, or 2σ² for squared loss."""

    tau: Vector
    omega: Vector
    scale: float


@dataclass(frozen=True)
class Strengths:
    """Strengths that the data set themselves."""

    groups: tuple[str, ...]  # the group of every feature, the intercept's last
    tau: Vector  # τ_j, the variance of a coefficient between clients; 0 if they share it
    omega: Vector  # ω_j, the variance of the shared coefficients around 0
    sigma2: float  # σ² of squared loss, else 1
    l2: Vector = field(repr=False)  # ridge per feature, as `Linear` takes it
    # κ per feature, as `Personal` takes it; infinite for shared coefficients
    strength: Vector = field(repr=False)
    evidence: float  # log evidence in nats
    x: Tensor = field(repr=False)  # the shared coefficients at the mode
    # degrees of freedom of every feature's differences between clients
    freedom: Vector = field(repr=False)
    rounds: int  # rounds of the fixed point

    def table(self) -> list[tuple[str, int, float, float, float]]:
        """Return for every group its number of features, the root mean square of x, √τ, and the
        degrees of freedom of its differences between clients; the most different first.
        """
        names = np.array(self.groups)
        size = self.x.double().cpu().numpy().reshape(len(names), -1)
        rows = []
        for name in dict.fromkeys(self.groups):
            own = names == name
            rms, spread = (float(np.sqrt(np.mean(v[own]))) for v in (size**2, self.tau))
            rows.append((name, int(own.sum()), rms, spread, float(self.freedom[own].sum())))
        return sorted(rows, key=lambda row: -row[4])

    def __str__(self) -> str:
        """Write which groups of columns differ between clients, and by how much."""
        heads = ["columns", "number", "typical size", "typical difference between clients"]
        rows = [
            [name, str(number), f"{size:.3g}", f"{spread:.3g}" if spread else "shared"]
            for name, number, size, spread, _ in self.table()
        ]
        return "\n".join(aligned([heads, *rows]))


@dataclass(frozen=True)
class ModePoint:
    """The answers at x under a prior: a Newton step, and the evidence as if it were taken."""

    prior: Prior
    question: ModesAt
    x: Tensor  # (rows of C, copies)
    C: Tensor
    step: Tensor
    value: float
    decrease: float
    evidence: float

    @property
    def lost(self) -> bool:
        """Whether integrals have no mode that can be found."""
        return self.question.means and self.decrease > LOST


class Evidence:
    """Evidence of one federation, for any prior.

    Attributes:
        n: number of rows.
        noise: variance of the targets (squared loss).
        unit: per feature, the variance that lets a column like those of its group explain all.
        share: the same for the whole group.
        own: per feature, the number of its group.
        joined: the same where all groups but the intercept are one.

    Args:
        federation: clients with a linear model.
        groups: the group of every feature, the intercept's last.
        loss: the loss by name.
        close: the decrease of a client's Newton step, in nats, at which it may stop.
        means: whether clients integrate over what differs (`models/quadrature.py`).
        restricted: whether x is integrated over, too; else its largest likelihood counts.
    """

    def __init__(
        self,
        federation: Federation,
        groups: Sequence[str],
        loss: str,
        close: float = 1e-6,
        means: bool = False,
        restricted: bool = True,
    ) -> None:
        self.federation = federation
        self.restricted = restricted
        self.groups = tuple(groups)
        self.close = close
        self.squared = loss == "squared"
        like = federation.start()
        self.device = like.device
        outputs = len(like) // len(groups)
        if len(groups) * outputs != len(like):
            raise InputError(
                "groups-length",
                f"There are {len(groups)} groups for {len(like)} coefficients: name one per "
                "feature, and one for the intercept.",
            )
        # A Hessian couples the outputs of a softmax; those of squared loss are copies.
        self.coupled = 1 if self.squared else outputs
        self.copies = outputs // self.coupled
        self.weights = np.ones(len(federation.names))
        self.means = means and loss not in ("squared", "cox") and outputs == 1
        self._measure(groups[-1] == INTERCEPT, loss == "poisson")

    # Units make strengths comparable: whatever a column is measured in, a variance of one unit lets
    # its group explain about all of the targets, and the climb starts at shares of that.
    def _measure(self, intercept: bool, counts: bool) -> None:
        """Find n, and the unit of every feature: a variance that lets its group explain about all.

        Columns are centred if there is an intercept. Counts are measured at their mean.
        """
        features = len(self.groups)
        flat = Prior(np.zeros(features), np.full(features, np.inf), 1.0)
        x = self.zero()
        cuts = np.repeat(np.array(self.groups) == CUTS, self.coupled)
        x[torch.from_numpy(cuts).to(x.device)] = 1.0  # at 0 their losses are steep
        begin = x.clone()
        k = self.coupled
        # from x = 0 one Newton step of the intercept finds the mean; of counts, where one finds its
        # logarithm, a few do where variances are not means
        for _ in range(8 if intercept and counts else 1):
            (total, _, n), gradient, Q = self.ask(flat, x, None)[1]
            if intercept and k == 1:
                step = gradient[-1] / Q[-1, -1]
                step = -torch.log1p(-step.clamp(max=0.999)) if counts else step
                total -= float(gradient[-1] @ step) / 2
                x[-1] -= step
        each = Q.view(features, k, features, k).diagonal(dim1=1, dim2=3)  # by output
        h = each.diagonal(dim1=0, dim2=1)
        if intercept:
            # what a column adds beside the intercept: its curvature about the mean, unless it is
            # constant, where nothing would be left
            centred = h - (each[:, -1].square() / each[-1, -1]).mT
            h = torch.where(centred > 1e-10 * h, centred, h)
        self.n = n
        self.origin = x if counts else begin  # where modes are looked for
        # a constant target has no unit of its own
        self.noise = total / (n * self.copies) if self.squared and total > 0 else 1.0
        curvature = h.mean(0).cpu().numpy() / (2 * self.noise if self.squared else 1.0)
        _, self.own = np.unique(self.groups, return_inverse=True)
        sizes = np.bincount(self.own)
        mean = (np.bincount(self.own, curvature) / sizes)[self.own]
        self.unit = n / np.where(mean > 0, mean, n)
        self.share = self.unit / sizes[self.own]
        self.joined = (np.array(self.groups) == INTERCEPT).astype(np.int64)

    def zero(self) -> Tensor:
        """Return x = 0, (rows of C, copies)."""
        shape = len(self.groups) * self.coupled, self.copies
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _rows(self, per_feature: Vector) -> Tensor:
        return torch.from_numpy(per_feature).to(self.device).repeat_interleave(self.coupled)

    def ask(
        self, prior: Prior, x: Tensor, start: ModesAt | None
    ) -> tuple[ModesAt, tuple[list[float], Tensor, Tensor]]:
        """Return the sums of values, gradients and Hessians, with the question."""
        tau = torch.from_numpy(prior.tau).to(self.device)
        question = ModesAt(
            x.flatten(), tau, prior.scale, self.coupled, self.close, start, self.means
        )
        seen = self.federation.ask(question)
        value, gradient, Q = (seen.added(part, self.weights).double() for part in question.vectors)
        return question, (value.tolist(), gradient.view_as(x), (Q + Q.mT) / 2)

    def at(self, prior: Prior, x: Tensor, start: ModesAt | None = None) -> ModePoint:
        question, ((total, determinants, n), gradient, Q) = self.ask(prior, x, start)
        omega = self._rows(prior.omega)[:, None]
        root = omega.sqrt()
        # I + W^½QW^½ has no infinite entry where ω is 0, and is far from singular
        scaled = root * Q * root.mT
        scaled.diagonal().add_(1)
        L = torch.linalg.cholesky(scaled)
        C = root * torch.cholesky_inverse(L) * root.mT
        slope = gradient + x / omega
        step = -(C @ slope)
        decrease = -float((slope * step).sum()) / 2
        value = total + float((x.square() / omega).sum()) / 2
        # a mean over u_i, not its mode: the determinants belong to Φ and move with x
        if self.means:
            value += determinants / 2
            determinants = 0.0
        inside = determinants
        if self.restricted:
            inside += 2 * self.copies * float(L.diagonal().log().sum())
        evidence = decrease - value - inside / 2
        if self.squared:
            evidence -= n * self.copies / 2 * float(np.log(np.pi * prior.scale))
        return ModePoint(prior, question, x, C, step, value, decrease, evidence)

    def mode(
        self, prior: Prior, x: Tensor, start: ModesAt | None, close: float = CLOSE
    ) -> ModePoint:
        """Take Newton steps of x until one decreases Φ by no more than `close`."""

        def evaluate(X: Tensor) -> tuple[Tensor, ModePoint]:
            point = self.at(prior, X[0], start)
            return X.new_tensor([point.value]), point

        def step(X: Tensor, point: ModePoint) -> tuple[Tensor, Tensor]:
            nonlocal start
            start = point.question
            return -point.step[None], X.new_tensor([2 * point.decrease])

        few = FEW if self.means and prior.tau.any() else 0
        return newton(x[None], evaluate, step, 2 * close, few)[2]

    def moments(self, point: ModePoint) -> tuple[Vector, Vector, Vector]:
        """Return `size`, `freedom` and `residual` of a `Climb`, after the Newton step."""
        C = point.C if self.restricted else torch.zeros_like(point.C)
        question = ModeSpread(point.question, C, point.step.flatten())
        spread = self.federation.ask(question).added("spread", self.weights).double()
        omega = self._rows(point.prior.omega)
        size = (point.x + point.step).square().sum(1) / omega
        size_freedom = self.copies * (1 - point.C.diagonal() / omega)
        # Φ at the mode is (RSS/σ² + all sums of squares)/2
        left = point.value - point.decrease - float(spread[0].sum() + size.sum()) / 2
        parts = (spread[0], size, spread[1], size_freedom)
        a, b, c, d = (part.view(-1, self.coupled).sum(1).cpu().numpy() for part in parts)
        return np.append(a, b)[None], np.append(c, d)[None], np.array([2 * left])


class _Shared(Climb):
    """The fixed point of a federation: its τ, and then its ω, in one row."""

    problem: Evidence
    point: ModePoint

    def __init__(self, problem: Evidence, prior: Prior, tied: Mask) -> None:
        super().__init__(problem, np.append(prior.tau, prior.omega)[None], np.array([prior.scale]))
        self.tied = tied
        self.vanish = np.arange(len(tied)) < len(tied) // 2
        self.targets = problem.n * problem.copies
        self.x = problem.origin
        self.question: ModesAt | None = None

    def split(self, side: int, single: Families) -> _Shared:
        """Return a copy with single families of τ (0) or ω (1), from where this one is."""
        other = copy(self)
        own = self.vanish == (side == 0)
        if side == 0:  # what has shrunk to nothing may differ after all
            least = np.where(own & (single >= 0), AGAIN * np.tile(self.problem.share, 2), 0.0)
            other.variances = np.maximum(self.variances, least)
        return other.started(np.where(own, single, self.families))

    def answer(self) -> None:
        tau, omega = np.split(self.variances[0], 2)
        prior = Prior(tau, omega, float(self.scale[0]))
        self.point = point = self.problem.mode(prior, self.x, self.question)
        self.x = point.x + point.step
        self.question = point.question
        self.evidence = np.array([point.evidence])
        self.decrease = point.decrease
        self.size, self.freedom, self.residual = self.problem.moments(point)
        if point.lost:
            self.rounds = LIMIT


def strengths(
    federation: Federation,
    groups: Sequence[str],
    loss: str,
    *,
    l2: Vector | None = None,
    strength: Vector | None = None,
    flat: Sequence[str] = (INTERCEPT,),
    worth: float = WORTH,
    tol: float = TOLERANCE,
) -> Strengths:
    """Find τ_g, ω_g and σ² by restricted maximum evidence; see `climbed`."""
    return climbed(Evidence(federation, groups, loss), l2, strength, flat, tol, worth)[0]


def climbed(
    problem: Evidence,
    l2: Vector | None,
    strength: Vector | None,
    flat: Sequence[str],
    tol: float = TOLERANCE,
    worth: float = WORTH,
) -> tuple[Strengths, ModePoint]:
    """Return the strengths, and the answers there.

    All groups but the intercept first have one τ and one ω, in units of what a group can explain. A
    ω per group, and then a τ per group, take their place where they gain more than a nat per
    variance: with few clients or few rows a variance per column follows the noise
    (`benchmarks/strengths.py`).

    Args:
        problem: clients with a linear model; its own l2 and strength do not matter.
        l2: numbers per feature that are given and stay; `None` or NaN: by evidence.
        strength: the same for κ; infinite for one model for all, 0 for a free one at every client.
        flat: groups whose shared coefficients are not shrunk.
        tol: gain of evidence, in nats a round, at which to stop.
        worth: nats that an additional variance has to gain.
    """
    groups = problem.groups
    scale = 2 * problem.noise if problem.squared else 1.0
    given = [np.full(len(groups), np.nan) if v is None else np.array(v) for v in (strength, l2)]
    # one client differs from nobody
    if len(problem.federation.names) == 1:
        given[0][:] = np.inf
    free = [np.isnan(v) for v in given]
    tied = [~free[0] & (given[0] > 0), ~free[1]]
    # a flat group, such as the intercept, is not shrunk towards 0
    wide = np.isin(groups, flat)
    with np.errstate(divide="ignore"):
        tau = np.where(free[0], START[0] * problem.share, scale / given[0])
        tau = np.where(given[0] == 0, FREE * problem.unit, tau)
        omega = np.where(free[1], START[1] * problem.share, scale / (problem.n * given[1]))
    omega = np.minimum(np.where(free[1] & wide, np.inf, omega), FLAT * problem.unit)
    free[1] &= ~wide
    families, single = (
        np.append(np.where(free[0], own, -1), np.where(free[1], own + len(groups), -1))[None]
        for own in (problem.joined, problem.own)
    )
    more = [
        len(np.unique(single[:, side])) - len(np.unique(families[:, side]))
        for side in (slice(len(groups)), slice(len(groups), None))
    ]
    rough = max(ROUGH[0], ROUGH[1] * max(more), tol)
    # One variance for all groups; then one per group on either side, ω first, where that gains more
    # than it costs. Fits are compared before they have converged: differences show early.
    best = _Shared(problem, Prior(tau, omega, scale), np.concatenate(tied)).started(families)
    if max(more) > 0:
        best.run(rough)
    for side in (1, 0):
        if more[side] > 0 and not best.point.lost:
            other = best.split(side, single)
            other.run(rough)
            if other.evidence[0] - best.evidence[0] > worth * more[side]:
                best = other
    best.run(tol)
    prior = best.point.prior
    found = Strengths(
        groups,
        prior.tau,
        prior.omega,
        prior.scale / 2 if problem.squared else 1.0,
        prior.scale / (problem.n * prior.omega),
        np.divide(prior.scale, prior.tau, np.full_like(prior.tau, np.inf), where=prior.tau > 0),
        best.point.evidence,
        best.x.flatten(),
        best.freedom[0, : len(groups)],
        best.rounds,
    )
    return found, best.point
