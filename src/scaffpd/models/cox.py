r"""Cox's model of N clients: f_i(x) = ℓ_i(A_i x) − ℓ_i(0) + ½ Σ_k l2_k x_k², ℓ_i of `RiskSets`.

Partial likelihoods of clients cannot be compared: ℓ_i(0) goes by the numbers of events and of rows
at risk. So every loss is counted from that of a model that knows nothing, and fair objectives act
on what x gains a client. Columns are centred client by client, which changes no ℓ_i.

    c_i = A_iᵀ(q − w[event])/n_i + l2 ∘ x,    H_i = A_iᵀ ∂²ℓ_i/∂z² A_i + diag(l2)
    L_i ≤ Σ_e v_e ρ_e²/n_i + max l2,          ρ_e the longest centred row with T_j ≥ T_e

It is no sum over rows, so there are no minibatches: a sample of rows has other risk sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from scaffpd.descent import newton
from scaffpd.errors import InputError
from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Restriction, Vector
from scaffpd.federation.modes import ModesAt
from scaffpd.models.arrays import Array
from scaffpd.models.baseline import concordance
from scaffpd.models.curvature import ManyRows
from scaffpd.models.modes import ClientModes
from scaffpd.models.newton import Anchor, beyond
from scaffpd.models.numerics import LEAST, SAFE, UNIT, gamma, norm_above
from scaffpd.models.oracle import Held, StackedDisplacements, shift, step_sizes, stepped
from scaffpd.models.point import CLIENTS, Ridge
from scaffpd.models.risk_sets import ENTRY, EVENT, TIME, PartialLikelihood, RiskSets
from scaffpd.models.rows import RowsOracle
from scaffpd.models.samples import Levers, PaddedBlock, StackedSamples
from scaffpd.models.weighted_loss import row_weights

COX = "cox"
HAZARD = "hazard"  # discrete time (`periods.py`)
TIMES = (COX, HAZARD)  # losses of times to an event


def survival_targets(
    labels: Sequence[Array], names: Sequence[str], entry: bool, weighted: bool
) -> list[Vector]:
    """Return time, event, entry (0 without one) and weight of mean one of every row."""
    wanted = ["time", "event", *["entry"] * entry, *["weight"] * weighted]
    found = []
    for name, y in zip(names, labels, strict=True):
        if y.ndim != 2 or y.shape[1] != len(wanted):
            raise InputError(
                "survival-columns",
                f"Client {name!r} needs these columns of y: {', '.join(wanted)}.",
            )
        table = np.asarray(y, dtype=np.float64)
        time, event = table[:, 0], table[:, 1]
        begin = table[:, 2] if entry else np.zeros(len(table))
        for wrong, code, what in (
            (time <= 0, "time-not-positive", "a time that is not positive"),
            (~np.isin(event, (0, 1)), "event-not-binary", "an event that is neither 0 nor 1"),
            (begin < 0, "entry-negative", "a negative entry"),
            (begin >= time, "entry-after-time", "an entry that is not before its time"),
        ):
            if wrong.any():
                raise InputError(code, f"Client {name!r} has {what} in row {int(wrong.argmax())}.")
        weight = row_weights(name, table[:, -1]) if weighted else np.ones(len(table))
        found.append(np.column_stack([time, event, begin, weight]))
    return found


def refuse_samples() -> NoReturn:
    raise InputError(
        "cox-minibatches",
        "Cox's likelihood is no sum over rows, so it has no minibatches: leave batch_size out.",
    )


def refuse_powers() -> NoReturn:
    raise InputError(
        "cox-below-zero",
        "Losses of Cox's model fall below zero, which have no powers: use another objective than "
        "q-FFL's, such as ChiSquare(rho=0.1).",
    )


def refuse_noise() -> NoReturn:
    raise InputError(
        "private-cox",
        "Cox's likelihood has no gradient of a single record to clip: every record is in the risk "
        "sets of others. Cut time into periods (--periods 365,730, in Python "
        'Linear("hazard", periods=[365, 730])): their likelihood is a sum over persons.',
    )


class CoxOracle(RowsOracle):
    """N clients with Cox's model, all of them at once; in double precision."""

    def __init__(self, rows: StackedSamples, ties: str, ridge: Ridge, names: list[str]) -> None:
        super().__init__(rows, ridge, 1, names)
        self.ties = ties
        self.risk = RiskSets(rows.y, rows.layout, ties)
        self.null = PartialLikelihood(self.risk, rows.A.new_zeros(len(rows.A)))

    def only(self, clients: list[int]) -> CoxOracle:
        names = [self.names[i] for i in clients]
        return type(self)(self.rows.only(clients), self.ties, self.ridge, names)

    def steepness(self, lengths: Tensor) -> Tensor:
        """Bound λ_max(∇²ℓ_i) in a metric where rows have these lengths."""
        return self.risk.widest(lengths) / self.rows.layout.sizes

    def constants(self) -> Constants:
        L = (self.steepness(self.rows.row_norms) + self.ridge.most).cpu().numpy()
        mu = np.full(len(L), self.ridge.least)
        sizes = self.rows.layout.sizes.cpu().numpy()
        return Constants(L, mu, True, L, sizes, ridge=self.ridge.vector())

    def likelihood(self, U: Tensor) -> PartialLikelihood:
        """Evaluate at one u for all clients, or at each client's own, (N, d)."""
        z = self.rows.A @ U if U.ndim == 1 else self.rows.along(U[..., None])[:, 0]
        return PartialLikelihood(self.risk, z)

    def mean_loss(self, at: PartialLikelihood) -> Tensor:
        return (at.value - self.null.value) / self.rows.layout.sizes

    def mean_slope(self, at: PartialLikelihood) -> Tensor:
        return self.rows.each((self.rows.share * at.residual)[:, None])[..., 0]

    def mean_curvature(self, at: PartialLikelihood, V: Tensor | None = None) -> Tensor:
        """Return ∇²ℓ_i, or Vᵀ∇²ℓ_iV, (N, k, k)."""
        T = self.rows.A if V is None else self.rows.A @ V
        bent = self.rows.share[:, None] * at.bend(T)
        pairs = zip(
            *(torch.split(part, self.rows.layout.lengths) for part in (T, bent)), strict=True
        )
        H = torch.stack([own.mT @ turned for own, turned in pairs])
        return (H + H.mT) / 2

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> CoxPoint:
        return CoxPoint(self, x) if batch_size is None else refuse_samples()

    def local_updates(
        self, x: Tensor, at: Held, correction: Tensor | None, plan: LocalPlan
    ) -> StackedDisplacements:
        if plan.batch_size is not None:
            refuse_samples()
        rates = step_sizes(plan, len(self.names), lambda: self.constants().smoothness, x)

        def slopes(U: Tensor) -> Tensor:
            return self.mean_slope(self.likelihood(U)) + self.ridge.times(U)

        return stepped(x, shift(at, correction), rates, plan, slopes)

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        loss, right = self.own_scores(x)
        return loss + float(self.ridge.half(x)), right

    def own_scores(self, U: Tensor) -> tuple[Vector, Vector]:
        """Return ℓ_i(u_i) − ℓ_i(0) and concordance; NaN for clients without a pair."""
        at = self.likelihood(U)
        columns = self.rows.y[:, TIME], self.rows.y[:, EVENT], at.z, self.rows.y[:, ENTRY]
        parts = [torch.split(column.cpu(), self.rows.layout.lengths) for column in columns]
        own = [concordance(*(t.numpy() for t in client)) for client in zip(*parts, strict=True)]
        return self.mean_loss(at).cpu().numpy(), np.array(own)


class CoxPoint(StackedDisplacements):
    """L_i, c_i and H_i of all clients at one x."""

    def __init__(self, oracle: CoxOracle, x: Tensor, ridge: Ridge | None = None) -> None:
        self.oracle = oracle
        self.ridge = oracle.ridge if ridge is None else ridge
        self.penalty = self.ridge.half(x)
        self.x = x
        self.at, losses, slopes = self._evaluated()
        self.losses = losses + self.penalty
        super().__init__(slopes + self.ridge.times(x))

    def _evaluated(self) -> tuple[PartialLikelihood, Tensor, Tensor]:
        at = self.oracle.likelihood(self.x)
        return at, self.oracle.mean_loss(at), self.oracle.mean_slope(at)

    @cached_property
    def hessians(self) -> Tensor:
        """∇²f_i without the ridge, (N, d, d)."""
        return self.oracle.mean_curvature(self.at)

    def curvatures(self, V: Tensor) -> Tensor:
        return self.oracle.mean_curvature(self.at, V) + self.ridge.gram(V)

    def norms(self) -> Tensor:
        return self.vectors.square().sum(1)

    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> Restriction[Tensor]:
        curvature = torch.tensordot(weights, self.curvatures(V), 1)
        return Restriction(self.vectors @ V, curvature, self.vectors.square() @ (1 / metric))

    def widths(self, root: Tensor, weights: Tensor | None) -> Tensor:
        """Return twice the longest ‖root⁻¹a_j‖ of every client, whose rows are centred: more than
        any ‖root⁻¹(a_j − a_k)‖ of a risk set.
        """
        rows = self.oracle.rows
        far = torch.linalg.solve_triangular(root, rows.A.mT, upper=False).norm(dim=0)
        seen = rows.layout.segment_max(2 * SAFE * far)
        return seen if weights is None else torch.where(weights.to(seen) > 0, seen, 0.0)

    def hessian(self, weights: Tensor) -> Tensor:
        H: Tensor = torch.tensordot(weights, self.hessians.to(weights), 1)
        H.diagonal().add_(weights.sum() * self.ridge.times(torch.ones_like(H[0])))
        return H

    def diagonals(self) -> Tensor:
        own = self.hessians.diagonal(dim1=1, dim2=2)
        return own + self.ridge.times(torch.ones_like(self.x))

    def diagonal(self, weights: Tensor) -> Tensor:
        return weights @ self.diagonals()

    def proximal(self, correction: Tensor, plan: ProximalPlan) -> StackedDisplacements:
        pull = plan.pull * plan.metric + self.ridge.times(torch.ones_like(self.x))
        L = torch.linalg.cholesky_ex(self.hessians + torch.diag(pull))[0]
        found = torch.cholesky_solve(correction.expand(len(L), -1)[..., None], L)
        return StackedDisplacements(found[..., 0])

    def rounding(self) -> tuple[Tensor, Tensor]:
        return self.ridged(*self.arithmetic(self.ridge.length(self.x)))

    def arithmetic(self, size: Tensor, levers: Levers | None = None) -> tuple[Tensor, Tensor]:
        r"""Bound the errors of ℓ_i − ℓ_i(0) and of A_iᵀr/n_i, if rows multiply vectors of `size`.

        With Δ ≥ |δz_j| of a client, B ≥ all its logarithms, and η the error of a logarithm of a
        sum: every sum is a chain of at most 2 log₂ K + 8 joins, each of which errs by u(B + 8), and
        of at most 4n additions of positive terms.

            δℓ = (v/n)(2Δ + 2η) + γ_E Σ_e v_e|log s_e − z̄|/n,    v = Σ_e v_e
            δr = q(e^{2Δ + 4η} − 1) + 4u(q + w),    δc = Σ_j ‖a_j‖(δr_j + γ_n|r_j|)/n
        """
        rows = self.oracle.rows
        layout = rows.layout
        plain = self.ridge.levers(rows)
        levers = plain if levers is None else levers
        lengths = plain.each * layout.sizes[layout.owner]
        delta = gamma(len(self.x) + 8) * layout.segment_max(lengths) * size
        error, eta = self._logarithms(self.at, delta)
        error = error + self._logarithms(self.oracle.null, 0 * delta)[0]
        rate = torch.expm1(SAFE * (2 * delta + 4 * eta))
        rate = torch.where(rate < 0.5, 2 * rate, torch.inf)[layout.owner]
        q = torch.where(self.at.q > 0, self.at.q, LEAST)
        slope = q * rate + 4 * UNIT * (q + self.oracle.risk.weight)
        slope = slope + (gamma(len(rows.A) + 4) + gamma(CLIENTS)) * self.at.residual.abs()
        tiny = len(rows.A) * LEAST * len(self.x) ** 0.5
        return SAFE * error, SAFE * layout.segment_sum(slope * levers.each) + tiny

    def _logarithms(self, at: PartialLikelihood, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the error of ℓ_i, and η."""
        risk = self.oracle.risk
        layout = risk.layout
        size = torch.where(at.log > -torch.inf, at.log.abs(), 0)
        largest = 3 * layout.segment_max(size) + 3 * (layout.sizes.double() + 1).log() + 8
        joins = risk.intervals.depth + 8
        eta = UNIT * (joins * largest + 4 * layout.sizes + 16)
        centre = gamma(risk.tied + 8) * largest
        each = risk.v * at.gaps.abs()
        terms = torch.bincount(risk.owner, minlength=len(layout))
        summed = risk.added(each) * UNIT * (terms + 8)
        error = risk.added(risk.v) * (2 * delta + 2 * eta + centre) + summed
        return SAFE * error / layout.sizes, eta

    def ridged(self, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        clients = len(self.oracle.names)
        penalty, pull = self.ridge.rounding(self.x, clients, self.ridge.length(self.x))
        return loss + penalty + 4 * UNIT * self.losses.abs(), gradient + pull


class OwnModels:
    """u_i = x + S_i v_i with v_i = argmin b_i ℓ_i(x + S_i v) + ½‖v‖², by Newton's method.

    Attributes:
        v: (N, d).
        at: the likelihood at u_i.
        slope: b_i ∇ℓ_i(u_i).
        near: curvature of b_i ℓ_i around u_i.
        value: the minima.
        off: norms of the remaining gradients.
    """

    def __init__(self, oracle: CoxOracle, x: Tensor, S: Tensor, b: Tensor, v: Tensor) -> None:
        self.oracle = oracle
        self.x = x
        self.S = S
        self.b = b
        self.v, self.value, self.at = newton(v, self._value, self._step)
        self._step(self.v, self.at)

    def _value(self, v: Tensor) -> tuple[Tensor, PartialLikelihood]:
        at = self.oracle.likelihood(self.x + self.S * v)
        return self.b * self.oracle.mean_loss(at) + v.square().sum(1) / 2, at

    def _step(self, v: Tensor, at: PartialLikelihood) -> tuple[Tensor, Tensor]:
        self.slope = self.b[:, None] * self.oracle.mean_slope(at)
        gradient = self.S * self.slope + v
        self.off = gradient.norm(dim=1)
        self.near = ManyRows(self.b[:, None, None] * self.oracle.mean_curvature(at), self.S)
        step = self.near.solve(gradient[..., None])[..., 0]
        return step, (gradient * step).sum(1)


class OwnCoxPoint(CoxPoint):
    """Personal models at one x, or at each client's own, (N, d): F_i, as in `newton.py`."""

    def __init__(
        self, oracle: CoxOracle, anchor: Anchor, ridge: Ridge, x: Tensor, w: Tensor | None = None
    ) -> None:
        self.anchor = anchor
        scale = anchor.gamma.rsqrt()
        start = torch.zeros_like(scale) if w is None else w
        self.found = OwnModels(oracle, x, scale, torch.ones_like(scale[:, 0]), start)
        self.w = self.found.v
        super().__init__(oracle, x, ridge)

    def _evaluated(self) -> tuple[PartialLikelihood, Tensor, Tensor]:
        return self.found.at, self.found.value, self.found.slope

    @cached_property
    def hessians(self) -> Tensor:
        """∇²F_i without the ridge: H − HSM⁻¹SH."""
        near = self.found.near
        pulled = self.found.S[..., None] * near.H
        Q = near.H - pulled.mT @ near.change
        return (Q + Q.mT) / 2

    def widths(self, root: Tensor, weights: Tensor | None) -> Tensor:
        """Return twice the longest row, as without own models, of (x, u_1 … u_N) at once."""
        found = torch.full_like(self.losses, torch.inf)
        near = self.found.near
        if weights is None:
            return found
        for block in self.oracle.rows.blocks:
            who = block.clients
            A = self.oracle.rows.of(block)[0] * (block.weight > 0)[..., None]
            own = (A * self.found.S[who, None]).mT
            back = torch.cholesky_solve(own, near.L[who])
            t = A.mT - near.change[who].mT @ own
            far = beyond(root, t, (own * back).sum(1), weights.to(root)[who, None])
            found[who] = 2 * SAFE * far.amax(1)
        return found

    def curvatures(self, V: Tensor) -> Tensor:
        return V.mT @ self.hessians @ V + self.ridge.gram(V)

    def models(self) -> Tensor:
        return self.x + self.found.S * self.w

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the errors of arithmetic at u_i, and of Newton's method (`newton.py`)."""
        S = self.found.S
        rows = self.oracle.rows
        size = self.ridge.length(self.x) + self.ridge.length(S * self.w)
        loss, gradient = self.arithmetic(size)
        tied = norm_above(rows.A * S[rows.layout.owner], 1)
        plain = self.ridge.levers(rows)
        own = Levers.of(rows, tied, plain.each / rows.exact[1])
        length = norm_above(self.w, 1)
        off = SAFE * self.found.off + self.arithmetic(size, own)[1]
        off = off + gamma(len(self.x) + 16) * length
        loss = loss + gamma(len(self.x) + 16) * length.square() + SAFE * off.square() / 2
        lengths = plain.each * rows.layout.sizes[rows.layout.owner]
        seen = self.oracle.steepness(lengths).sqrt() / 2
        return self.ridged(loss, gradient + SAFE * seen * off)


class CoxModes(ClientModes):
    """All clients' own modes, for strengths by evidence: sums over rows are n_i ℓ_i."""

    def __init__(self, inner: CoxOracle, at: ModesAt, start: ClientModes | None) -> None:
        layout = inner.rows.layout
        everyone = torch.arange(len(layout), device=layout.sizes.device)
        share = everyone[:, None].double() + 1
        self.blocks = [PaddedBlock(everyone, everyone[:, None], share, None, 0)]
        self._begin(inner.rows, at, start)
        sizes = layout.sizes.double()
        b = sizes / self.scale
        found = OwnModels(inner, self.X[:, 0], self.S.expand(len(b), -1), b, self.v[..., 0])
        self.near = found.near
        self.v = found.v[..., None]
        self.ahead = self.v
        self.gradient = found.slope
        self.value[:, 0] = found.value
        self.value[:, 1] = 2 * found.near.L.diagonal(dim1=1, dim2=2).log().sum(1)
        self.value[:, 2] = sizes

    def _near(self, block: PaddedBlock) -> ManyRows:
        return self.near
