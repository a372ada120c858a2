"""Points at which a certificate is hard to keep, and the truth about them to 150 digits.

    python benchmarks/adversary.py --points 10000 --processes 2

draws points of all kinds, compares every certificate with the true duality gap and every bound on
rounding with the true error, and prints how many were broken and how close the tightest came. The
truth is written from the definitions alone, with mpmath: nothing of the package takes part in it
but the numbers that it returned.
"""

import argparse
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from unittest import mock

import numpy as np
import torch
from mpmath import fdot, fsum, log, mp, mpf, sqrt

import scaffpd as sp
from scaffpd.models import quadratic

mp.prec = 500
TOO_LARGE = 2e49  # losses beyond it have no certificate
UNDERFLOW = mpf(10) ** -300  # what all products of a sum that underflow are off together
OBJECTIVES = (
    "Average",
    "Agnostic",
    "ChiSquare",
    "Capped",
    "ChiSquareBall",
    "CVaR",
    "Tilted",
    "QFair",
    "Nash",
)
PATTERNS = ("normal", "equal", "alternating", "huge", "ties", "cancelling", "unlike")
STORES = ("rows", "personal", "columns")
PLACES = ("random", "near", "trained", "zero")
LOSSES = ("squared", "logistic", "softmax", "poisson", "binomial", "cox")
DISPERSION = mpf(0.7)  # of the negative binomial


@dataclass(frozen=True)
class Point:
    """One problem and where to look at it."""

    seed: int
    objective: str
    loss: str = "squared"
    single: bool = False
    clients: int = 3
    rows: int = 4
    features: int = 3
    pattern: str = "normal"
    store: str = "rows"
    place: str = "near"
    features_scale: float = 0.0
    targets_scale: float = 0.0
    l2: float = 1e-3
    vertex: bool = False


class UndecidedError(Exception):
    """The truth has not been found: a client's own problem is too hard for a Newton method with
    150 digits.
    """


@dataclass(frozen=True)
class Verdict:
    """What the certificate says, what is true, and which bounds on rounding were broken."""

    certificate: float
    gap: mpf
    broken: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.broken and (
            not np.isfinite(self.certificate) or self.gap <= mpf(self.certificate)
        )


# --- the objectives, from their definitions, with p/Σp and, on the simplex, λ/Σλ


def exact(values) -> list:
    return [mpf(float(v)) for v in values]


def prior(objective, n):
    p = exact(objective.weights(n))
    return [v / fsum(p) for v in p]


def penalised(L, p, rho, cap=None):
    """Max over the simplex (below the cap) of ⟨L, λ⟩ − (ρ/2) Σ (λ−p)²/p, by the piece on which
    Σλ(ν) = 1.
    """
    cap = mpf(1) if cap is None else mpf(cap)

    def weights(nu):
        return [min(max(q * (1 + (v - nu) / rho), 0), cap) for v, q in zip(L, p, strict=True)]

    bends = sorted(
        [v + rho for v in L] + [v - rho * (cap / q - 1) for v, q in zip(L, p, strict=True)]
    )
    low = max((b for b in bends if fsum(weights(b)) >= 1), default=bends[0] - 1)
    high = None
    high = min((b for b in bends if b > low), default=low)
    nu, (a, b) = low, (fsum(weights(low)), fsum(weights(high)))
    if a > 1 > b:
        nu = low + (a - 1) / (a - b) * (high - low)
    w = weights(nu)
    w = [v / fsum(w) for v in w]
    return fdot(L, w) - rho / 2 * fsum((v - q) ** 2 / q for v, q in zip(w, p, strict=True))


def in_ball(L, p, delta):
    """The best of all paths' ends: the k largest losses have weight p_i(1/P + t(L_i − m)), on the
    sphere.
    """
    order = sorted(range(len(L)), key=lambda i: -L[i])
    best = []
    top = max(L)
    if 1 / fsum(p[i] for i in range(len(L)) if L[i] == top) - 1 <= delta:
        return top
    for k in range(1, len(L) + 1):
        who = order[:k]
        P = fsum(p[i] for i in who)
        mean = fsum(p[i] * L[i] for i in who) / P
        V = fsum(p[i] * (L[i] - mean) ** 2 for i in who)
        if V > 0 and delta >= 1 / P - 1:
            t = sqrt((delta - (1 / P - 1)) / V)
            w = [p[i] * (1 / P + t * (L[i] - mean)) for i in who]
            if min(w) >= 0:
                best.append(mean + t * V)  # = ⟨w, L⟩, without cancellation where the losses tie
    return max(best, default=fdot(p, L))


def support(objective, L):
    """max_{λ∈Λ} ⟨L, λ⟩ − ψ(λ)."""
    p = prior(objective, len(L))
    match objective:
        case sp.Average():
            return fdot(p, L)
        case sp.Agnostic():
            return max(L)
        case sp.ChiSquare():
            return penalised(L, p, mpf(objective.rho), objective.cap)
        case sp.ChiSquareBall():
            return in_ball(L, p, mpf(objective.delta))
        case sp.CVaR():
            left = mpf(1)
            value = mpf(0)
            for i in sorted(range(len(L)), key=lambda i: -L[i]):
                share = min(p[i] / mpf(objective.alpha), left)
                left = left - share
                value = value + share * L[i]
            return value
        case sp.Tilted():
            rho = mpf(objective.rho)
            top = max(L)
            return top + rho * log(
                fsum(q * mp.exp((v - top) / rho) for v, q in zip(L, p, strict=True))
            )
        case sp.QFair():
            e = mpf(objective.q) + 1
            return fsum(q * max(v, 0) ** e for v, q in zip(L, p, strict=True)) / e
        case sp.Nash():
            gains = [b - v for b, v in zip(exact(objective.levels(len(L))), L, strict=True)]
            return mpf("inf") if min(gains) <= 0 else -fdot(p, [log(g) for g in gains])
    raise AssertionError(objective)


def penalty(objective, w):
    """ψ(λ)."""
    p = prior(objective, len(w))
    match objective:
        case sp.ChiSquare():
            return (
                mpf(objective.rho) / 2 * fsum((v - q) ** 2 / q for v, q in zip(w, p, strict=True))
            )
        case sp.Tilted():
            return mpf(objective.rho) * fsum(
                v * log(v / q) for v, q in zip(w, p, strict=True) if v > 0
            )
        case sp.QFair():
            q_ = mpf(objective.q)
            e = 1 + 1 / mpf(objective.q)
            return q_ / (q_ + 1) * fsum(q * (v / q) ** e for v, q in zip(w, p, strict=True))
        case sp.Nash():
            b = exact(objective.levels(len(w)))
            return fdot(w, b) - 1 - fsum(q * log(v / q) for v, q in zip(w, p, strict=True))
    return mpf(0)


def normal_weights(objective, weights):
    w = exact(weights)
    return [v / fsum(w) for v in w] if objective.simplex else w


# --- the losses, from their definitions


def value_and_slope(loss, z, y):
    """ℓ and ∂ℓ/∂z of one sample."""
    if loss == "squared":
        away = [a - b for a, b in zip(z, y, strict=True)]
        return fdot(away, away), [2 * a for a in away]
    if loss == "logistic":
        s = 1 - 2 * y[0]
        e = mp.exp(s * z[0])
        return mp.log1p(e), [s * e / (1 + e)]
    if loss == "binomial":
        mu = mp.exp(z[0])
        size = 1 / DISPERSION
        value = (y[0] * log(y[0] / mu) if y[0] > 0 else 0) - (y[0] + size) * log(
            (y[0] + size) / (mu + size)
        )
        return value, [size * (mu - y[0]) / (mu + size)]
    if loss == "poisson":
        mu = mp.exp(z[0])
        return (y[0] * (log(y[0]) - z[0]) if y[0] > 0 else 0) + mu - y[0], [mu - y[0]]
    top = max(z)
    e = [mp.exp(v - top) for v in z]
    total = fsum(e)
    own = int(y[0])
    return log(total) + top - z[own], [v / total - (k == own) for k, v in enumerate(e)]


def partial(z, y):
    """Σ over events of log Σ_{T_j ≥ T} e^{z_j} − z, less that at z = 0, after Efron; and slopes."""
    total = mpf(0)
    slopes = [mpf(0)] * len(z)
    for t in {when for when, event in y if event}:
        who = [j for j, (when, _) in enumerate(y) if when >= t]
        tied = [j for j in who if y[j][0] == t and y[j][1]]
        for k in range(len(tied)):
            less = {j: 1 - mpf(k) / len(tied) for j in tied}
            e = {j: less.get(j, mpf(1)) * mp.exp(z[j]) for j in who}
            sure = fsum(e.values())
            total += log(sure) - z[tied[k]] - log(fsum(less.get(j, mpf(1)) for j in who))
            for j in who:
                slopes[j] += e[j] / sure
            slopes[tied[k]] -= 1
    return total, slopes


def at(loss, A, y, l2, X):
    """f(x) and its gradient: rows A, targets y, l2 of every feature, a (features × outputs) x."""
    m = len(A)
    columns = list(zip(*X, strict=True))
    slopes = []
    total = mpf(0)
    if loss == "cox":
        total, sums = partial([fdot(a, columns[0]) for a in A], y)
        slopes = [[s] for s in sums]
    for a, t in zip(A, y, strict=True) if loss != "cox" else ():
        value, slope = value_and_slope(loss, [fdot(a, c) for c in columns], t)
        slopes.append(slope)
        total += value
    square = fsum(ridge * v * v for ridge, row in zip(l2, X, strict=True) for v in row)
    gradient = [
        [
            fdot([a[j] for a in A], [s[k] for s in slopes]) / m + l2[j] * X[j][k]
            for k in range(len(columns))
        ]
        for j in range(len(X))
    ]
    return total / m + square / 2, gradient


def flat(X):
    return [v for row in X for v in row]


def bend(loss, z):
    """∂²ℓ/∂z² of one sample, in double precision."""
    if loss == "squared":
        return 2 * np.eye(len(z))
    if loss == "logistic":
        return np.eye(1) / (2 * np.cosh(np.clip(z[0] / 2, -300, 300))) ** 2
    if loss == "poisson":
        return np.eye(1) * np.exp(np.clip(z[0], -300, 300))
    if loss == "binomial":  # what it has in the mean
        mu = np.exp(np.clip(z[0], -300, 300))
        return np.eye(1) * mu / (1 + float(DISPERSION) * mu)
    e = np.exp(z - z.max())
    e = e / e.sum()
    return np.diag(e) - np.outer(e, e)


def hessian(loss, data, shares, u):
    """Σ_i w_i ∇²f_i(u) without l2, in double precision."""
    H = np.zeros((u.size, u.size))
    for w, (A, y) in zip(shares, data, strict=True):
        if loss == "cox":
            H += float(w) / len(A) * spread_at_risk(A, y, u)
        for a in A if loss != "cox" else ():
            row = np.array([float(v) for v in a])
            H += float(w) / len(A) * np.kron(np.outer(row, row), bend(loss, row @ u))
    return H


def spread_at_risk(A, y, u):
    """Σ over events of the covariance of rows at risk, with the weights e^z (Breslow's)."""
    rows = np.array([[float(v) for v in a] for a in A])
    times = np.array([[float(v) for v in t] for t in y])
    z = (rows @ u)[:, 0]
    H = np.zeros((len(u), len(u)))
    for t, event in times:
        if event:
            there = times[:, 0] >= t
            e = np.exp(z[there] - z[there].max())
            e /= e.sum()
            own = rows[there] - e @ rows[there]
            H += (own * e[:, None]).T @ own
    return H


def newton(loss, data, shares, U, d, ridge, gradient):
    """H⁻¹ times a gradient over the first d features."""
    outputs = len(U[0])
    k = d * len(U[0])
    if loss != "squared":
        here = np.array([[float(v) for v in row] for row in U])
        H = hessian(loss, data, shares, here)[:k, :k]
        H += np.diag(np.repeat([float(v) for v in ridge[:d]], outputs))
        return exact(solved(H, [float(v) for v in gradient]))
    H = mp.zeros(d)
    for w, (A, _) in zip(shares, data, strict=True):
        for i in range(d):
            for j in range(d):
                H[i, j] += 2 * w / len(A) * fdot([a[i] for a in A], [a[j] for a in A])
    for i in range(d):
        H[i, i] += ridge[i] or mpf(10) ** -100 * (1 + H[i, i])
    columns = [mp.lu_solve(H, mp.matrix(gradient[c::outputs])) for c in range(outputs)]
    return [columns[c][j] for j in range(d) for c in range(outputs)]


def solved(H, g):
    """H⁻¹g, or nothing where H is not finite or singular."""
    try:
        return np.linalg.solve(H, g)
    except np.linalg.LinAlgError:
        return np.zeros(len(g))


def lowest(loss, data, shares, l2, X, pulls=None, free=None, steps=40):
    """Minimise Σ_i w_i f_i(u) + ½ Σ γ_k (u_k − x_k)² from X, over the first `free` features.

    Return u, value, gradient, and what is left.

    Newton's method with gradients in 150 digits and, unless losses are squared, Hessians in double
    precision.
    """
    outputs = len(X[0])
    d = len(X) if free is None else free

    def slope(U):
        value = mpf(0)
        total = [mpf(0)] * (len(X) * outputs)
        for w, (A, y) in zip(shares, data, strict=True):
            f, g = at(loss, A, y, l2, U)
            value += w * f
            total = [a + w * b for a, b in zip(total, flat(g), strict=True)]
        inside = list(total)
        if pulls is not None:
            away = [a - b for a, b in zip(flat(U), flat(X), strict=True)]
            pulled = [g * a for g, a in zip(np.repeat(pulls, outputs), away, strict=True)]
            value += fdot(pulled, away) / 2
            inside = [a + b for a, b in zip(inside, pulled, strict=True)]
        return value, inside[: d * outputs], total

    U = [list(row) for row in X]
    pulled = [mpf(0)] * len(X) if pulls is None else pulls
    ridge = [v * fsum(shares) + g for v, g in zip(l2, pulled, strict=True)]
    value, gradient, total = slope(U)
    first = max((abs(v) for v in gradient), default=mpf(0))
    for _ in range(steps):
        unit = max(abs(v) for v in gradient)
        if unit <= first * mpf(10) ** -40:
            break
        step = newton(loss, data, shares, U, d, ridge, [v / unit for v in gradient])
        length = mpf(1)
        for _ in range(12):
            new = [
                [U[j][k] - length * unit * step[j * outputs + k] for k in range(outputs)]
                if j < d
                else U[j]
                for j in range(len(X))
            ]
            found = slope(new)
            if found[0] <= value:
                break
            length /= 4
        else:
            break
        U, (value, gradient, total) = new, found
    return U, value, total, fdot(gradient, gradient)


# --- the points


def drawn(random) -> Point:
    """A point of any kind."""
    single = bool(random.integers(2))
    reach = (-6, 6) if single else (-70, 20)
    loss = str(random.choice(LOSSES, p=[0.4, 0.15, 0.1, 0.1, 0.1, 0.15]))
    single = single and loss != "cox"  # which has no other format
    store = str(random.choice(STORES, p=[0.7, 0.15, 0.15]))
    tame = loss != "squared" or random.random() < 0.5
    wide = loss == "squared" and store == "rows" and random.random() < 0.04
    return Point(
        seed=int(random.integers(2**31)),
        objective=str(random.choice([o for o in OBJECTIVES if (loss, o) != ("cox", "QFair")])),
        loss=loss,
        single=single,
        clients=int(random.choice([1, 2, 3, 5])),
        rows=int(random.choice([1, 2, 4, 9])),
        features=int(random.choice([400, 2000, 20_000])) if wide else int(random.choice([1, 2, 3])),
        pattern=str(random.choice(PATTERNS)),
        store=store,
        place=str(random.choice(PLACES, p=[0.3, 0.5, 0.1, 0.1])),
        features_scale=float(random.uniform(-2, 2)),
        targets_scale=float(random.uniform(-2, 2) if tame else random.uniform(*reach)),
        l2=float(10 ** random.uniform(-8, 1)) if store != "rows" or random.random() < 0.7 else 0.0,
        vertex=bool(random.random() < 0.2),
    )


def entries(random, shape, pattern):
    """Numbers that are hard to add up."""
    values = random.standard_normal(shape)
    if pattern == "equal":
        values = np.full(shape, random.uniform(0.1, 1))
    if pattern == "alternating":
        values = random.uniform(0.1, 1) * (-1.0) ** np.add.outer(
            np.arange(shape[0]), np.arange(shape[1])
        )
    if pattern == "huge":
        values[random.integers(shape[0]), random.integers(shape[1])] *= 1e8
    if pattern == "ties":
        values = np.repeat(values[:1], shape[0], 0) * (
            1 + 1e-15 * random.integers(0, 3, (shape[0], 1))
        )
    if pattern == "unlike":
        values *= np.geomspace(1e-4, 1e4, shape[1])
    if pattern == "cancelling" and shape[1] > 1:
        values[:, 1] = -values[:, 0] * (1 + 1e-7 * random.standard_normal(shape[0]))
    return values


def problem(point: Point):
    """Clients' arrays as they are stored, targets as the losses take them, and the model."""
    random = np.random.default_rng(point.seed)
    kind = np.float32 if point.single else np.float64
    outputs = 1 if point.loss != "squared" or random.random() < 0.8 else 2
    clients = []
    for _ in range(point.clients):
        m = int(random.integers(1, point.rows + 1))
        X = (10**point.features_scale * entries(random, (m, point.features), point.pattern)).astype(
            kind
        )
        if point.loss == "squared":
            y = (10**point.targets_scale * entries(random, (m, outputs), point.pattern)).astype(
                kind
            )
            y = y[:, 0] if outputs == 1 else y
        elif point.loss in ("poisson", "binomial"):
            y = random.poisson(10 ** random.uniform(-1, 3), m)
        elif point.loss == "cox":  # with ties
            y = np.column_stack([random.integers(1, 2 * m + 1, m), random.random(m) < 0.7])
        else:
            y = random.integers(0, 2 if point.loss == "logistic" else 3, m)
        clients.append((X, y))
    loss = "poisson" if point.loss == "binomial" else point.loss
    model = sp.Linear(
        loss,
        ridges(point),
        classes=3 if point.loss == "softmax" else None,
        dispersion=float(DISPERSION) if point.loss == "binomial" else 0.0,
    )
    return clients, model, random


def ridges(point: Point):
    """One l2, or, for one point of three, a larger one for every feature."""
    more = 10 ** np.random.default_rng(point.seed).uniform(0, 3, point.features)
    return point.l2 * more if point.seed % 3 == 0 else point.l2


def strengths(point: Point):
    """One strength, or, for every other point, one for every feature; the first alone is finite for
    `columns`.
    """
    more = 10 ** np.random.default_rng(point.seed).uniform(-2, 2, point.features)
    if point.store == "columns":
        more[1:] = np.inf
    return 0.5 * more if point.seed % 2 == 0 or point.store == "columns" else 0.5


def bound(point: Point, clients, model):
    """A cohort whose rows are stored as the point says."""
    dtype = torch.float32 if point.single else torch.float64
    if point.store in ("personal", "columns"):
        model = sp.Personal(model, strengths(point))
    return sp.Cohort(clients, model, dtype=dtype)


def objective_of(point: Point, losses, random):
    """The objective, with parameters in proportion to the losses."""
    size = float(np.abs(losses).max()) or 1.0
    n = len(losses)
    p = None if random.random() < 0.5 else random.uniform(0.1, 1, n)
    strength = 10 ** random.uniform(-3, 3)
    scale = float(np.clip(strength * size, 1e-45, 1e45))
    match point.objective:
        case "ChiSquare":
            return sp.ChiSquare(scale, p)
        case "Capped":
            return sp.ChiSquare(scale, p, cap=min(1.0, 1.3 / n))
        case "ChiSquareBall":
            return sp.ChiSquareBall(strength, p)
        case "CVaR":
            return sp.CVaR(float(random.uniform(0.05, 1)), p)
        case "Tilted":
            return sp.Tilted(scale, p)
        case "QFair":
            return sp.QFair(float(random.choice([0.5, 1.0, 2.0])), p)
        case "Nash":
            return sp.Nash(losses + float(10 ** random.uniform(-17, 1)) * size, p)
    return {"Average": sp.Average, "Agnostic": sp.Agnostic}[point.objective](p)


def judge(point: Point) -> Verdict:
    """Compare a certificate, and the bounds on rounding that it rests on, with the truth.

    Half of the points are compressed as if they had many rows.
    """
    with mock.patch.object(quadratic, "FEW", quadratic.FEW if point.seed % 2 else 0):
        return compared(point)


def compared(point: Point) -> Verdict:
    clients, model, random = problem(point)
    if point.features > 50:
        point = replace(point, place="random")
    cohort = bound(point, clients, model)
    x, weights, objective = place(point, cohort, random, clients)
    answers = cohort.gradients(x)
    if not np.all(np.abs(answers.losses) < TOO_LARGE):
        return Verdict(np.inf, mpf(0), ())
    if objective is None:
        objective = objective_of(point, answers.losses, random)
        if not np.isfinite(objective.support(answers.losses)):
            return Verdict(np.inf, mpf(0), ())
        start = objective.start(answers.losses)
        weights = objective.prox(answers.losses, start, random.uniform(0.1, 10))
        if not objective.simplex and random.random() < 0.5:
            weights = 10 ** random.uniform(-40, 3, len(start))
    if point.vertex and point.objective in ("Agnostic", "ChiSquare", "Tilted"):
        weights = np.eye(len(weights))[int(random.integers(len(weights)))]
    c = answers.sum(weights)
    H = None
    if len(x) <= 50 and bool(np.isfinite(weights).all()):
        H = answers.hessian(weights)
    method = sp.MinimaxNewton(objective)
    proof = method._proof(cohort.constants(), answers.losses, weights, answers, c, H)
    return verdict(point, cohort, clients, x, weights, objective, answers, c, proof.gap)


def place(point: Point, cohort, random, clients):
    """Where to look: x, and λ with its objective where a run has found them."""
    x = cohort.start()
    spread = random.standard_normal(len(x))
    if point.pattern == "equal":
        spread = np.full(len(x), random.uniform(0.1, 1))
    if point.place == "zero":
        return x, None, None
    unit = 10 ** (point.targets_scale - point.features_scale) if point.loss == "squared" else 1.0
    near = torch.from_numpy(unit * spread).to(x)
    if point.place == "random":
        return near, None, None
    if point.place == "near":
        return (
            descended(point, cohort, near, clients) + 10 ** random.uniform(-16, -1) * near,
            None,
            None,
        )
    losses = cohort.gradients(x).losses
    flat = not cohort.constants().smoothness.any()  # such as Cox's of one row: nothing to train
    if flat or not np.all(np.abs(losses) < TOO_LARGE):
        return near, None, None
    objective = objective_of(point, losses, random)
    if not np.isfinite(objective.support(losses)):
        return near, None, None
    found = sp.train(sp.SubspaceSaddle(objective), cohort, rounds=int(random.integers(1, 8)))
    return (
        torch.from_numpy(found.x).to(x),
        found.weights,
        objective if np.all(np.isfinite(found.x)) else None,
    )


def descended(point: Point, cohort, x, clients):
    """Near the minimiser of the mean loss, by a few Newton steps in double precision."""
    data = [(np.asarray(X, dtype=np.float64), y) for X, y in clients]
    p = np.full(len(data), 1 / len(data))
    features = data[0][0].shape[1]
    for _ in range(5):
        u = x.double().numpy().reshape(features, -1)
        l2 = np.broadcast_to(ridges(point), features)
        H = hessian(point.loss, data, p, u) + np.diag(np.repeat(l2, u.shape[1]))
        step = torch.from_numpy(solved(H, cohort.gradients(x).sum(p).double().numpy())).to(x)
        if not bool(torch.isfinite(x - step).all()):  # separated rows without a ridge: no minimiser
            break
        x = x - step
    return x


def verdict(point, cohort, clients, x, weights, objective, answers, c, certificate) -> Verdict:
    """The truth in 150 digits."""
    data = []
    l2 = exact(np.broadcast_to(ridges(point), point.features))
    for X, y in clients:
        targets = np.asarray(y, dtype=np.float64).reshape(len(X), -1)
        data.append(
            (
                [exact(row) for row in np.asarray(X, dtype=np.float64)],
                [exact(row) for row in targets],
            )
        )
    outputs = {"softmax": 3, "squared": len(data[0][1][0])}.get(point.loss, 1)
    values = exact(x.double().numpy())
    X = [values[j : j + outputs] for j in range(0, len(values), outputs)]
    if point.store in ("personal", "columns"):
        pairs = [own(point, rows, l2, X) for rows in data]
    else:
        pairs = [at(point.loss, *rows, l2, X) for rows in data]
    losses = [pair[0] + level for pair, level in zip(pairs, levels(cohort), strict=True)]
    gradients = [flat(pair[1]) for pair in pairs]
    w = normal_weights(objective, weights)
    broken = []
    e, slack = (exact(bound) for bound in answers.rounding())
    for i, (true, said) in enumerate(zip(losses, exact(answers.losses), strict=True)):
        if abs(true - said) > e[i]:
            broken.append(f"loss {i}: {float(abs(true - said)):.3g} > {float(e[i]):.3g}")
    each = answers.each().double().numpy()
    for i, true in enumerate(gradients):
        off = far(point, true, exact(each[i]))
        if off > slack[i] and np.isfinite(each[i]).all():
            broken.append(f"gradient {i}: {float(off):.3g} > {float(slack[i]):.3g}")
    plain = exact(weights)
    mixed = [fdot(plain, column) for column in zip(*gradients, strict=True)]
    off = far(point, mixed, exact(c.double().numpy()))
    least = (mpf(2) ** -126 if point.single else UNDERFLOW) * sqrt(len(values))  # see `length`
    if off > fdot(plain, slack) + least and torch.isfinite(c).all():
        broken.append(f"sum: {float(off):.3g} > {float(fdot(plain, slack)):.3g}")
    return Verdict(
        certificate, gap(point, cohort, data, l2, X, w, objective, losses, mixed), tuple(broken)
    )


def levels(cohort):
    """What clients count their losses from, as stored: their own optima, of counts."""
    oracle = cohort.channel.train.oracle
    level = getattr(getattr(oracle, "inner", oracle), "level", None)
    return [mpf(0)] * len(cohort.names) if level is None else exact(level.tolist())


def far(point, a, b):
    """The distance of two gradients in the metric of the ridge."""
    l2 = np.broadcast_to(ridges(point), point.features)
    share = np.repeat(exact(l2 if l2.min() > 0 else l2 + 1), len(a) // point.features)
    return sqrt(fsum((s - t) ** 2 * min(share) / v for s, t, v in zip(a, b, share, strict=True)))


def own(point, rows, l2, X):
    """F_i(x) and ∇F_i(x) of a client with a model of its own."""
    kappa = np.broadcast_to(strengths(point), len(X))
    gamma = [mpf(0) if np.isinf(k) else mpf(float(k)) / len(rows[0]) for k in kappa]
    free = int(np.isfinite(kappa).sum())
    nothing = [mpf(0)] * len(X)
    U, value, gradient, left = lowest(point.loss, [rows], [mpf(1)], nothing, X, gamma, free)
    if left / min(gamma[:free]) > mpf(10) ** -30 * value:
        raise UndecidedError
    outputs = len(X[0])
    found = []
    for j, (row, mine) in enumerate(zip(X, U, strict=True)):
        slope = [gamma[j] * (a - b) for a, b in zip(row, mine, strict=True)]
        if j >= free:
            slope = gradient[j * outputs : (j + 1) * outputs]
        found.append([a + l2[j] * b for a, b in zip(slope, row, strict=True)])
    return value + fsum(v * b * b for v, row in zip(l2, X, strict=True) for b in row) / 2, found


def gap(point, cohort, data, l2, X, w, objective, losses, mixed):
    """support(L) + ψ(λ) − min_y Σ λ_i f_i(y); of personal models, and of wide ones, a part of it
    from below.
    """
    total = support(objective, losses) + penalty(objective, w)
    if not mp.isfinite(total):
        return mpf("inf")
    if point.store in ("personal", "columns") or len(X) > 50:
        return total - fdot(w, losses)
    if (unit := fsum(w)) == 0:
        return total
    below = lowest(point.loss, data, [v / unit for v in w], l2, X)[1]
    return total - unit * below - fdot(w, levels(cohort))


def judged(point: Point) -> Verdict | None:
    """The verdict, or `None` where the truth is unknown."""
    torch.set_num_threads(1)
    try:
        return judge(point)
    except UndecidedError:
        return None


def main() -> None:
    """Draw points and print what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    start = time.perf_counter()
    points = [drawn(random) for _ in range(options.points)]
    seen = Counter()
    tightest = {}
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for point, found in zip(points, pool.map(judged, points, chunksize=20), strict=True):
            name = "float32" if point.single else "float64"
            seen[name] += 1
            if found is None:
                seen["unknown"] += 1
                continue
            seen[f"{name}, no certificate"] += not np.isfinite(found.certificate)
            if not found.holds:
                seen["violations"] += 1
                print(point, found, flush=True)
            elif np.isfinite(found.certificate) and found.gap > 0:
                tightest[name] = min(
                    tightest.get(name, mpf("inf")), mpf(found.certificate) / found.gap - 1
                )
    print(
        f"{options.points} points, {seen['violations']} violations, {seen['unknown']} of "
        "unknown truth, "
        f"{time.perf_counter() - start:.0f} s"
    )
    for name in ("float64", "float32"):
        print(
            f"{name}: {seen[name]} points, {seen[f'{name}, no certificate']} without a "
            "certificate; the tightest "
            f"certificate is 1 + {float(tightest.get(name, mpf('nan'))):.2g} times the true gap"
        )


if __name__ == "__main__":
    main()
