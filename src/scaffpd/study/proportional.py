r"""`proportional_hazards`: do the effects of Cox's model change with time?

    r_e = a_e − ā(T_e),    T_j = (Σ_e (g_e − ḡ) D (C r_e)_j)² / (D C_jj Σ_e (g_e − ḡ)²)

r_e are Schoenfeld's residuals of the D events, ā the mean of those at risk by their weights, C the
covariance of x, and g = log t. Where effects do not change, T_j is about χ² with one degree of
freedom (Grambsch & Therneau 1994, "Proportional hazards tests and diagnostics based on weighted
residuals"). Risk sets are within clients, so all of it is made of sums over clients.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.special import chdtrc

from scaffpd.errors import InputError
from scaffpd.models.cox import CoxOracle
from scaffpd.models.envelopes import PersonalOracle
from scaffpd.models.risk_sets import TIME
from scaffpd.numbers import aligned
from scaffpd.study.coefficients import FIXED, MOST_NAMED, NO_LIKELIHOOD, coefficients
from scaffpd.training.cohort import Cohort
from scaffpd.training.metrics import Array

# parts of the events over time, and the fewest events of one
PARTS = 6
PER_PART = 10


@dataclass(frozen=True)
class ProportionalHazards:
    """The test of every column.

    Attributes:
        names: the columns.
        statistic: T.
        p: chances of a T as large where effects do not change.
        times: of parts of the events, one after the other, the geometric mean.
        effects: in every part x_j + the mean of D (C r_e)_j, (parts × columns).
        errors: their standard errors, √(D C_jj/n) of n events.
    """

    names: tuple[str, ...]
    statistic: Array
    p: Array
    times: Array = field(repr=False)
    effects: Array = field(repr=False)
    errors: Array = field(repr=False)

    def __str__(self) -> str:
        rows = [
            [name, f"{t:.3g}", f"{p:.3g}"]
            for name, t, p in zip(self.names, self.statistic, self.p, strict=True)
        ]
        return "\n".join(aligned([["column", "χ²", "p"], *rows]))


def proportional_hazards(cohort: Cohort) -> ProportionalHazards:
    """Test for every column whether its effect changes with the logarithm of time.

    Args:
        cohort: clients with `Linear("cox")`; the ridge does not matter.
    """
    oracle = cohort.channel.train.oracle
    inner = oracle.inner if isinstance(oracle, PersonalOracle) else oracle
    if not isinstance(inner, CoxOracle):
        raise InputError("hazards-without-cox", 'proportional_hazards needs Linear("cox").')
    found = coefficients(cohort, effects=FIXED)
    lost = [name for name, x in zip(found.names, found.estimate, strict=True) if np.isnan(x)]
    if lost:
        raise InputError(
            NO_LIKELIHOOD,
            f"The effects of {', '.join(map(repr, lost[:MOST_NAMED]))}"
            f"{' and others' if lost[MOST_NAMED:] else ''} are not known from the rows, so whether "
            "they change with time is not either: leave such columns out.",
        )
    at = inner.likelihood(torch.from_numpy(found.estimate).to(inner.rows.A))
    risk = at.risk
    # ā of every term; tied events share the mean of their terms
    centre = at.means(inner.rows.A)
    counts = torch.bincount(risk.term, minlength=risk.points).to(centre)
    mean = centre.new_zeros(risk.points, centre.shape[1]).index_add_(0, risk.term, centre)
    mean = mean / counts[:, None]
    r = (inner.rows.A[risk.events] - mean[risk.time]).double().cpu().numpy()
    g = np.log(inner.rows.y[risk.events, TIME].double().cpu().numpy())
    H = torch.tensordot(inner.rows.layout.sizes.double(), inner.mean_curvature(at).double(), 1)
    C = np.linalg.inv(H.cpu().numpy())
    level = g.mean()
    g = g - level
    D = len(g)
    T = (g @ r @ C * D) ** 2 / (D * C.diagonal() * (g @ g))
    parts = np.array_split(np.argsort(g, kind="stable"), max(1, min(PARTS, D // PER_PART)))
    scaled = found.estimate + D * r @ C
    return ProportionalHazards(
        found.names,
        T,
        chdtrc(1, T),
        np.exp([level + g[part].mean() for part in parts]),
        np.array([scaled[part].mean(0) for part in parts]),
        np.array([np.sqrt(D * C.diagonal() / len(part)) for part in parts]),
    )
