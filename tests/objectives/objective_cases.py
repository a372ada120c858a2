"""Problems and an optimality check for the tests of the objectives, written from the definitions
alone.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from scaffpd.objectives import (
    Agnostic,
    Average,
    ChiSquare,
    ChiSquareBall,
    CVaR,
    Nash,
    QFair,
    Tilted,
)

ON_SIMPLEX = (
    "Average",
    "Agnostic",
    "ChiSquare",
    "ChiSquareCapped",
    "ChiSquareBall",
    "CVaR",
    "Tilted",
)
ALL = (*ON_SIMPLEX, "QFair", "Nash")


def build(kind, parameter, losses, prior):
    """An objective of a kind with one positive parameter, made to fit the losses where it must."""
    match kind:
        case "Average":
            return Average(prior)
        case "Agnostic":
            return Agnostic(prior)
        case "ChiSquare":
            return ChiSquare(parameter, prior)
        case "ChiSquareCapped":  # some priors are above the cap, some below
            return ChiSquare(parameter, prior, cap=0.3 + 0.7 / len(losses))
        case "ChiSquareBall":
            return ChiSquareBall(parameter, prior)
        case "CVaR":
            return CVaR(parameter / (1.0 + parameter), prior)
        case "Tilted":
            return Tilted(parameter, prior)
        case "QFair":
            return QFair(float(np.clip(parameter, 0.1, 10.0)), prior)
        case "Nash":
            return Nash(losses + parameter + 1e-6 * np.abs(losses), prior)
    raise AssertionError(kind)


@dataclass(frozen=True)
class Step:
    """A random proximal step."""

    losses: np.ndarray
    old: np.ndarray
    prior: np.ndarray | None
    sigma: float
    parameter: float

    def objective(self, kind):
        return build(kind, self.parameter, self.losses, self.prior)


def powers(low, high):
    return st.floats(low, high).map(lambda e: 10.0**e)


def vectors(n, values):
    return st.lists(values, min_size=n, max_size=n).map(np.array)


@st.composite
def steps(draw, clients=8, exponent=3.0):
    """Any number of clients, with ties, zeros and l on the boundary; sizes within 10^±exponent."""
    n = draw(st.integers(1, clients))
    ties_and_others = st.one_of(
        st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.0, 3.0).map(lambda v: round(v, 9))
    )
    losses = draw(vectors(n, ties_and_others)) * draw(powers(-exponent, exponent))
    old = draw(vectors(n, st.one_of(st.just(0.0), st.floats(0.01, 1.0))))
    old = old / old.sum() if old.sum() > 0 else np.full(n, 1.0 / n)
    prior = draw(st.none() | vectors(n, st.floats(0.01, 1.0)))
    return Step(
        losses, old, prior, draw(powers(-exponent, exponent)), draw(powers(-exponent, exponent))
    )


def gradient(objective, lam):
    """∇ψ(λ) and the diagonal of ∇²ψ(λ), from the table in the package's docstring."""
    p = objective.weights(len(lam))
    safe = np.maximum(lam, 1e-280)
    match objective:
        case ChiSquare():
            return objective.rho * (lam / p - 1.0), objective.rho / p
        case Tilted():
            return objective.rho * (np.log(safe / p) + 1.0), objective.rho / safe
        case QFair():
            return (lam / p) ** (1.0 / objective.q), (safe / p) ** (1.0 / objective.q - 1.0) / (
                objective.q * p
            )
        case Nash():
            return objective.levels(len(lam)) - p / lam, p / lam**2
    return np.zeros(len(lam)), np.zeros(len(lam))


def optimality_error(objective, s, old, sigma, lam):
    """By how much λ misses the first-order conditions of the proximal step, as an error in λ.

    On the simplex no exchange of weight between two clients may lower the objective: with g its
    gradient and a its curvature, both times σ, g_i ≤ g_j for every i that can give and every j that
    can take. The smallest e with g_i − e·a_i ≤ g_j + e·a_j is returned. Off the simplex every g_i
    must vanish alone.
    """
    slope, bend = gradient(objective, lam)
    p = objective.weights(len(lam))
    a = np.minimum(1.0 + sigma * bend, 1e280)
    if not objective.simplex:
        g = lam - old + sigma * (slope - s)
        scale = a * lam + 1e-3 * (np.abs(old) + sigma * np.abs(s)) + 1e-280
        return float(np.max(np.where(lam > 1e-280, np.abs(g), np.maximum(-g, 0.0)) / scale))
    if isinstance(objective, Average):
        return float(np.max(np.abs(lam - p)))
    caps = objective.caps(len(lam)) if isinstance(objective, CVaR) else np.full(len(lam), np.inf)
    if isinstance(objective, ChiSquare) and objective.cap is not None:
        caps = np.full(len(lam), objective.cap)
    gives = lam > 1e-14
    takes = lam < caps * (1.0 - 1e-12)
    # Losses are measured from the client at the margin, so that g keeps its digits where it
    # matters.
    margin = s[np.argmax(np.where(gives, sigma * (slope - s) + lam - old, -np.inf))]
    g = sigma * (slope - (s - margin)) + lam - old
    if isinstance(objective, ChiSquareBall):
        kappa = ball_multiplier(objective, lam, g, gives)
        g = g + kappa * lam / p
        a = a + kappa / p
    for e in np.logspace(-17, 2, 77):
        if not takes.any() or np.max((g - e * a)[gives]) <= np.min((g + e * a)[takes]):
            return float(e)
    return np.inf


def ball_multiplier(ball, lam, g, gives):
    """The multiplier of the ball: zero inside, else least squares of g_i + κλ_i/p_i = constant."""
    p = ball.weights(len(lam))
    share = lam[gives] / p[gives]
    spread = share - share.mean()
    if (
        np.sum((lam - p) ** 2 / p) < ball.delta * (1.0 - 1e-9)
        or np.max(np.abs(spread)) < 1e-9 * share.max()
    ):
        return 0.0
    return max(float(-np.sum(spread * (g[gives] - g[gives].mean())) / np.sum(spread**2)), 0.0)
