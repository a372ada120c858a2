r"""`coefficients`: estimates that a statistician can report, ordinary or of a mixed model.

    u_i ~ N(x, T),    x without a ridge,    T = diag(τ) by restricted maximum evidence

x are the fixed effects, u_i a client's own coefficients and √τ_j their standard deviation between
clients; with T = 0 it is one ordinary model for all. With H_i = Σ_rows ℓ'' a aᵀ/s, V_i = (H_i +
T⁻¹)⁻¹ and B_i = V_iH_i,

    Cov x = C = (Σ_i (H_i⁻¹ + T)⁻¹)⁻¹,    Cov u_i = V_i + (I − B_i) C (I − B_i)ᵀ.

For squared loss x and C are generalised least squares, as a mixed model's. For labels and counts
clients integrate over up to three coefficients (`models/quadrature.py`), and answer with posterior
means to first order where more differ; those of Cox's model are modes, which shrink x and τ.
Degrees of freedom and robust errors are in `freedom.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from scaffpd.algorithms.climb import LARGEST, Mask
from scaffpd.algorithms.evidence import (
    CUTS,
    INTERCEPT,
    Evidence,
    ModePoint,
    Prior,
    Strengths,
    climbed,
)
from scaffpd.errors import InputError, unknown
from scaffpd.federation import Federation
from scaffpd.models import Linear, Personal
from scaffpd.models.execution import limit_threads
from scaffpd.models.numerics import student
from scaffpd.models.personal import base_of
from scaffpd.models.quadrature import NODES
from scaffpd.numbers import aligned
from scaffpd.study.freedom import Inference
from scaffpd.training.cohort import LocalChannel
from scaffpd.training.metrics import Array
from scaffpd.training.settling import groups_of

NO_LIKELIHOOD = "coefficients-without-maximum"
SINGULAR = np.linalg.LinAlgError, torch.linalg.LinAlgError  # type: ignore[attr-defined]
NO_MAXIMUM = "The likelihood has no maximum: all outcomes are alike, or columns separate them."
FIELDS = ("estimate", "error", "low", "high", "between")
FIXED, STRATIFIED, INTERCEPTS, SLOPES = EFFECTS = ("fixed", "stratified", "intercepts", "slopes")
COLUMNS = "columns"  # those that a `Personal` names
BASELINES = "baselines"  # of Cox's model
MODEL, ROBUST = ERRORS = ("model", "robust")
SAID = {
    FIXED: "One model for all clients (fixed effects)",
    STRATIFIED: "An intercept for every client, and fixed effects",
    BASELINES: "A baseline for every client, and fixed effects",
    INTERCEPTS: "Random intercepts",
    SLOPES: "Random intercepts and slopes",
    COLUMNS: "Random effects of the columns that may differ",
    MODEL: "errors from the curvature of the likelihood",
    ROBUST: "robust errors, clustered by client",
}
TOLERANCE = 1e-4  # nats: estimates are reported, not only used
CLOSE = 1e-12  # nats of a client’s last step
WORTH = 1.0  # nats that a variance has to gain
CLEAR = 0.01  # nats below which evidence is the same
MOST_NAMED = 5  # columns in a sentence
UNKNOWN = 1e-4  # of the variance that x may have: with more of it, rows say nothing
FULL = 0.999  # of the largest deviation that is looked at
NO_COUNTS = 1e9  # rows for every count
FEW = 10  # rows a client, for each coefficient that differs, below which Laplace is poor


@dataclass(frozen=True)
class CoefficientTable:
    """Fixed effects of columns, with 95 % intervals, and how far clients differ.

    Attributes:
        names: the columns, the intercept last.
        estimate: x.
        error: standard errors.
        freedom: degrees of freedom of the intervals.
        between: √τ, the standard deviation of a coefficient between clients; 0 if it is shared.
        share: of squared loss, the share of the variance around x that lies between clients:
            Σ_j τ_j E a_j²/(Σ_j τ_j E a_j² + σ²); else `None`.
        clients: the clients; none of silos, whose own coefficients stay there.
        own: the clients' coefficients u_i, (clients × columns).
        own_error: their standard errors; deviations are integrated over, where few clients tell
            them.
        own_freedom: degrees of freedom of their intervals.
        said: which model it is, whose errors, and what to be careful about.
        kind: of effects.
    """

    names: tuple[str, ...]
    estimate: Array
    error: Array
    freedom: Array
    between: Array
    share: float | None
    clients: tuple[str, ...] = field(repr=False)
    own: Array = field(repr=False)
    own_error: Array = field(repr=False)
    own_freedom: float = field(default=np.inf, repr=False)
    said: str = ""
    kind: str = ""

    def table(self, client: str | None = None) -> list[dict[str, str | float]]:
        """Return a row for every column: estimate, standard error, interval, and between clients;
        of one client, its own coefficients.
        """
        estimate = self.estimate
        error = self.error
        freedom = self.freedom
        if client is not None:
            if client not in self.clients:
                raise unknown("coefficients", client, self.clients)
            i = self.clients.index(client)
            estimate = self.own[i]
            error = self.own_error[i]
            freedom = np.full(len(estimate), self.own_freedom)
        reach = np.array([student(f) for f in freedom]) * error
        columns = (estimate, error, estimate - reach, estimate + reach, self.between)
        return [
            {"column": name, **dict(zip(FIELDS, map(float, row), strict=True))}
            for name, *row in zip(self.names, *columns, strict=True)
        ]

    def __str__(self) -> str:
        rows = [["column", "estimate", "error", "95 % interval", "between clients"]]
        for row in self.table():
            name, *numbers = (f"{row[key]:.3g}" if key in FIELDS else str(row[key]) for key in row)
            estimate, error, low, high, between = numbers
            between = between if row["between"] else "shared"
            rows.append([name, estimate, error, f"{low} to {high}", between])
        lines = aligned(rows)
        if self.share is not None:
            lines.append(f"{self.share:.0%} of the variance around it lies between clients.")
        if self.said:
            lines.append(self.said)
        return "\n".join(lines)


def coefficients(
    cohort: Federation,
    contrast: Array | None = None,
    shift: float = 0.0,
    *,
    effects: str | None = None,
    errors: str = MODEL,
    restricted: bool = True,
) -> CoefficientTable:
    """Estimate fixed effects, and every client's own coefficients, with standard errors.

    Args:
        cohort: clients with `Linear(...)`, or with `Personal(...)` of one, whose `columns` may
            differ unless `effects` says otherwise. l2 and strength do not matter. Of a softmax,
            coefficients are differences from those of the first label.
        contrast: a matrix that multiplies the coefficients before they are reported: other units,
            or differences between categories, of which all together are not known.
        shift: is added to the intercept.
        effects: "fixed": one model for all, Cox's with a baseline for every client; "stratified":
            with an intercept of its own for every client, and these without a distribution;
            "intercepts": random intercepts; "slopes": random intercepts and slopes. `None`: what
            the evidence prefers of the first and the last two, by a nat for every variance.
        errors: "model": from the curvature of the likelihood; "robust": from the clients' slopes
            (sandwich), which need not be distributed as the model says; not of one client.
        restricted: whether variances are those of restricted maximum likelihood; else of maximum
            likelihood, as lme4's `glmer` has them.
    """
    model = cohort.channel.model
    inner = base_of(model)
    if not isinstance(inner, Linear):
        raise InputError(
            "coefficients-not-linear",
            f"coefficients needs Linear(...) or Personal(Linear(...)), got {model!r}.",
        )
    if effects is not None and effects not in EFFECTS:
        raise unknown("kind of effects", effects, EFFECTS)
    if errors not in ERRORS:
        raise unknown("kind of errors", errors, ERRORS)
    known = inner.groups
    width = len(known or ())  # of silos, which agree on their columns
    if isinstance(cohort.channel, LocalChannel):
        width = cohort.channel.train.shape[0]
        known = cohort.channel.train.columns
    columns = list(known or map(str, range(width)))
    names = [*columns, *inner.beyond]
    labels = len(cohort.start()) // len(names)
    groups = groups_of(inner, width, columns)
    asked = effects or COLUMNS
    if effects is None and not (isinstance(model, Personal) and model.columns is not None):
        asked = ""
    with limit_threads(cohort.channel.work):
        kinds = (asked,) if asked else (FIXED, INTERCEPTS, SLOPES)
        L: Array = np.eye(len(names), dtype=np.float64) if contrast is None else contrast
        if labels > 1:
            less = np.column_stack([-np.ones(labels - 1), np.eye(labels - 1)])
            L = np.kron(L, less).astype(np.float64)
            names = [f"{name}: {k}" for name in names for k in range(1, labels)]
        try:
            fits = [_fitted(cohort, kind, groups, columns, restricted) for kind in kinds]
            best = fits[0]
            for fit in fits[1:]:
                best = fit if fit.worth > best.worth + CLEAR else best
            return best.table(L, names, labels, shift, errors, not asked)
        except SINGULAR as error:
            raise InputError(NO_LIKELIHOOD, NO_MAXIMUM) from error


class _Fit(NamedTuple):
    """One kind of effects."""

    kind: str
    inner: Linear
    problem: Evidence
    differs: Mask
    found: Strengths
    point: ModePoint

    @property
    def worth(self) -> float:
        """Log evidence, less a nat for every variance."""
        alive = {g for g, tau in zip(self.found.groups, self.found.tau, strict=True) if tau > 0}
        return -np.inf if self.lost else self.found.evidence - WORTH * len(alive)

    def table(
        self, L: Array, names: Sequence[str], labels: int, shift: float, errors: str, chosen: bool
    ) -> CoefficientTable:
        problem = self.problem
        errors = errors if len(problem.weights) > 1 else MODEL  # robust ones compare clients
        x = self.found.x.double().cpu().numpy()
        rest = max(problem.n - len(x), 1.0) if problem.squared else np.inf
        tau = self.found.tau.copy()
        stratified = self.kind == STRATIFIED
        differs = np.zeros_like(self.differs) if stratified else self.differs
        C: Array = self.point.C.double().cpu().numpy()
        if stratified:  # their mean over these clients, not over all that there might be
            own = np.eye(labels)
            # without the ridge 1/ω of x; what changes no loss of a softmax has nothing else
            left = self.point.prior.omega[-1] * own - C[-labels:, -labels:]
            C = C + C[:, -labels:] @ np.linalg.pinv(left, 1e-6, hermitian=True) @ C[-labels:]
            C[-labels:, -labels:] -= tau[-1] / len(problem.weights) * own
        inference = Inference(problem, self.point, C, differs, rest, L, errors == ROBUST)
        if stratified:
            x[-labels:], between = inference.free(labels)
            tau[-1] = between.mean()
        unknown = self.unknown(L, C)
        error, freedom = inference.robust(L) if errors == ROBUST else inference.errors(L)
        own, variance = inference.own(L, not unknown.any())
        moved = np.where(unknown, np.nan, 0.0)
        if self.inner.intercept:
            moved[-1] += shift
        return CoefficientTable(
            tuple(names),
            L @ x + moved,
            np.where(unknown, np.nan, error),
            freedom,
            np.sqrt(np.square(L) @ np.repeat(tau, labels)),
            _share(problem, self.found.tau, self.found.sigma2) if problem.squared else None,
            tuple(problem.federation.names[: len(own)]),
            own + moved,
            np.sqrt(np.maximum(variance, 0.0)) + 0 * moved,
            rest,
            self.said(chosen, errors, [n for n, bad in zip(names, unknown, strict=True) if bad]),
            self.kind,
        )

    @property
    def lost(self) -> bool:
        """Whether the rows do not tell how far clients differ."""
        most = np.minimum(LARGEST * self.problem.unit, np.where(self.differs, np.inf, 0.0))
        full = self.problem.means & (most > 0) & (self.found.tau >= FULL * most)
        return self.point.lost or bool(full.any())

    def unknown(self, L: Array, C: Array) -> Mask:
        """Return what the rows say nothing about: what they separate, or know only together."""
        most = np.square(L) @ np.repeat(self.point.prior.omega, len(C) // len(self.differs))
        found: Mask = (((L @ C) * L).sum(1) > UNKNOWN * most) | self.lost
        return found

    def said(self, chosen: bool, errors: str, unknown: Sequence[str]) -> str:
        """Say which model it is, who chose it, and what to be careful about."""
        fixed = self.kind in (FIXED, STRATIFIED)
        what = SAID[self.kind if self.inner.summed or not fixed else BASELINES]
        given = ", chosen by evidence", ", conditional on that choice by the same rows"
        before, after = given if chosen else ("", "")
        said = f"{what}{before}; {SAID[errors]}{after}."
        if self.lost:
            said += (
                " No estimates: columns separate outcomes, or the rows do not tell how far clients "
                "differ."
            )
        elif unknown:
            which = ", ".join(unknown[:MOST_NAMED]) + ", …" * (len(unknown) > MOST_NAMED)
            said += f" Not known: {which}. They separate outcomes, or say the same as others."
        differing = int((self.found.tau > 0).sum())
        rows = self.problem.n / len(self.problem.weights)
        if self.problem.means and differing > max(NODES):
            said += (
                f" {differing} coefficients differ, too many to integrate over: they are Laplace's "
                "to first order"
            )
            few = rows < FEW * differing
            said += f", and too small with {rows:.0f} rows a client." if few else "."
        return said


def _fitted(
    cohort: Federation, kind: str, groups: Sequence[str], columns: Sequence[str], restricted: bool
) -> _Fit:
    model = cohort.channel.model
    inner = base_of(model)
    assert isinstance(inner, Linear)
    last = np.array(groups) == INTERCEPT
    able = np.array(groups) != CUTS
    differs = {FIXED: last & False, STRATIFIED: last, INTERCEPTS: last}.get(kind, able)
    if kind == COLUMNS:
        assert isinstance(model, Personal)
        differs = model.marked(columns, len(groups))
    if not differs.any():
        kind = FIXED
    kappa = np.where(differs, np.nan, np.inf)
    means = kind != STRATIFIED
    problem = Evidence(cohort, groups, inner.loss, CLOSE, means, restricted)
    if problem.copies > 1:
        raise InputError(
            "coefficients-of-several-outputs",
            "coefficients needs a model of one target: numbers in one column, counts or labels.",
        )
    # counts that are all 0, whose variances have no unit
    if inner.intercept and not problem.squared and problem.unit[-1] > NO_COUNTS:
        raise InputError(NO_LIKELIHOOD, NO_MAXIMUM)
    if kind == STRATIFIED:
        kappa[last] = 0.0
    fit = climbed(problem, None, kappa, groups, TOLERANCE, -np.inf)
    return _Fit(kind, inner, problem, differs, *fit)


def _share(problem: Evidence, tau: Array, sigma2: float) -> float:
    """Return Σ_j τ_j E a_j²/(Σ_j τ_j E a_j² + σ²); the Hessian of squared loss is 2 Σ a aᵀ."""
    flat = Prior(np.zeros(len(tau)), np.full(len(tau), np.inf), 1.0)
    Q = problem.ask(flat, problem.zero(), None)[1][2]
    between = float(tau @ Q.diagonal().cpu().numpy()) / (2 * problem.n)
    return between / (between + sigma2)


def level_contrast(
    groups: Sequence[str], shares: Array, scale: Array, reference: Sequence[int] = ()
) -> Array:
    """Return the matrix that takes the mean over its levels off every categorical column.

    A column with all its categories as zeros and ones says the same as one constant more: only
    differences between levels are known, here from the mean over rows, or from one level.

    Args:
        groups: of every coefficient, the name of its categorical column, or "".
        shares: of rows, of every level.
        scale: what the coefficients have to be divided by, the levels' standard deviations.
        reference: levels that the others of their columns are compared with.
    """
    names = np.array(groups)
    L = np.diag(1 / scale)
    for name in dict.fromkeys(groups):
        own = np.flatnonzero(names == name)
        if name and len(own) > 1:
            chosen = np.isin(own, reference)
            weights = chosen if chosen.any() else shares[own]
            L[np.ix_(own, own)] -= weights / weights.sum() / scale[own]
    return L
