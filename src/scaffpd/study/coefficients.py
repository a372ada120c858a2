r"""`coefficients`: estimates that a statistician can report, of a mixed model across clients.

    u_i ~ N(x, T),    x without a ridge,    T = diag(τ) by restricted maximum evidence

x are the fixed effects, u_i a client's own coefficients and √τ_j their standard deviation between
clients. With H_i = Σ_rows ℓ'' a aᵀ/s, V_i = (H_i + T⁻¹)⁻¹ and B_i = V_iH_i,

    Cov x = C = (Σ_i (H_i⁻¹ + T)⁻¹)⁻¹,    Cov u_i = V_i + (I − B_i) C (I − B_i)ᵀ.

For squared loss x and C are generalised least squares, as a mixed model's. For labels and counts
the clients answer with posterior means to first order: modes, which Cox's model has, shrink x and
τ. A coefficient that may differ has Student's quantiles with N − 1 degrees of freedom, one that is
shared those of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from scaffpd.algorithms.evidence import Evidence, Prior, climbed
from scaffpd.errors import InputError, unknown
from scaffpd.federation.modes import OwnCoefficients
from scaffpd.models import Linear, Personal
from scaffpd.models.execution import limit_threads
from scaffpd.models.numerics import student
from scaffpd.models.personal import base_of
from scaffpd.numbers import aligned
from scaffpd.training.cohort import Cohort
from scaffpd.training.metrics import Array
from scaffpd.training.settling import groups_of

FIELDS = ("estimate", "error", "low", "high", "between")
TOLERANCE = 1e-3  # nats: estimates are reported, not only used


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
        clients: the clients.
        own: the clients' coefficients u_i, (clients × columns).
        own_error: their standard errors.
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

    def table(self, client: str | None = None) -> list[dict[str, str | float]]:
        """Return a row for every column: estimate, standard error, interval, and between clients;
        of one client, its own coefficients.
        """
        estimate = self.estimate
        error = self.error
        if client is not None:
            if client not in self.clients:
                raise unknown("coefficients", client, self.clients)
            i = self.clients.index(client)
            estimate = self.own[i]
            error = self.own_error[i]
        reach = np.array([student(f) for f in self.freedom]) * error
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
        return "\n".join(lines)


def coefficients(
    cohort: Cohort, contrast: Array | None = None, shift: float = 0.0
) -> CoefficientTable:
    """Estimate fixed effects, and every client's own coefficients, with standard errors.

    Args:
        cohort: clients with `Linear(...)`, or with `Personal(...)` of one, whose `columns` may
            differ. The loss has one output: squared, logistic, Poisson. l2 and strength do not
            matter.
        contrast: a square matrix that multiplies the coefficients before they are reported: other
            units, or differences between categories, of which all together are not known.
        shift: is added to the intercept.
    """
    model = cohort.model
    inner = base_of(model)
    if not isinstance(inner, Linear):
        raise InputError(
            "coefficients-not-linear",
            f"coefficients needs Linear(...) or Personal(Linear(...)), got {model!r}.",
        )
    width = cohort.channel.train.shape[0]
    columns = list(cohort.channel.train.columns or map(str, range(width)))
    names = [*columns, *inner.beyond]
    if len(cohort.start()) != len(names):
        raise InputError(
            "coefficients-of-several-outputs",
            "coefficients needs a model with one output: numbers, counts or two labels.",
        )
    groups = groups_of(inner, width, columns)
    differs = np.ones(len(names), dtype=bool)
    if isinstance(model, Personal) and model.columns is not None:
        differs = model.marked(columns, len(names))
    kappa = np.where(differs, np.nan, np.inf)
    with limit_threads(cohort.channel.work):
        problem = Evidence(cohort, groups, inner.loss, means=True)
        found, point = climbed(problem, None, kappa, groups, TOLERANCE, -np.inf)
    L = np.eye(len(names)) if contrast is None else contrast
    rows = torch.from_numpy(L).to(point.C)
    question = OwnCoefficients(point.question, point.C, point.step.flatten(), rows)
    own, variance = cohort.ask(question).each("own").double().cpu().numpy().swapaxes(0, 1)
    C = point.C.double().cpu().numpy()
    moved = np.zeros(len(names))
    moved[-1] = shift
    N = len(cohort.names)
    free = max(problem.n - len(names), 1.0)
    return CoefficientTable(
        tuple(names),
        L @ found.x.double().cpu().numpy() + moved,
        np.sqrt(np.maximum(((L @ C) * L).sum(1), 0.0)),
        np.where(differs & (N > 1), max(N - 1, 1), free).astype(float),
        np.sqrt(np.square(L) @ found.tau),
        _share(problem, found.tau, found.sigma2) if problem.squared else None,
        tuple(cohort.names),
        own + moved,
        np.sqrt(np.maximum(variance, 0.0)),
    )


def _share(problem: Evidence, tau: Array, sigma2: float) -> float:
    """Return Σ_j τ_j E a_j²/(Σ_j τ_j E a_j² + σ²); the Hessian of squared loss is 2 Σ a aᵀ."""
    flat = Prior(np.zeros(len(tau)), np.full(len(tau), np.inf), 1.0)
    Q = problem.ask(flat, problem.zero(), None)[1][2]
    between = float(tau @ Q.diagonal().cpu().numpy()) / (2 * problem.n)
    return between / (between + sigma2)


def level_contrast(groups: Sequence[str], shares: Array, scale: Array) -> Array:
    """Return the matrix that takes the mean over its levels off every categorical column.

    A column with all its categories as zeros and ones says the same as one constant more: only
    differences between levels are known, here from the mean over rows.

    Args:
        groups: of every coefficient, the name of its categorical column, or "".
        shares: of rows, of every level.
        scale: what the coefficients have to be divided by, the levels' standard deviations.
    """
    names = np.array(groups)
    L = np.diag(1 / scale)
    for name in dict.fromkeys(groups):
        own = np.flatnonzero(names == name)
        if name and len(own) > 1:
            weights = shares[own] / shares[own].sum()
            L[np.ix_(own, own)] -= weights / scale[own]
    return L
