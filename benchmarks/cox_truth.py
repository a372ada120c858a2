"""Cox's model to 150 digits, from the definition alone, and points that are hard for a certificate.

    python benchmarks/cox_truth.py 2000

draws points and prints how many bounds were broken, and how loose they are.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from mpmath import fdot, fsum, log, mp, mpf, sqrt

import adversary as hostile
import scaffpd as sp
from scaffpd.algorithms.minimax import certify, length, shrinkage

exact = hostile.exact
OBJECTIVES = ("Average", "Agnostic", "ChiSquare", "ChiSquareBall", "CVaR", "Tilted")
KINDS = ("usual", "ties", "one event", "no event", "separated", "weights", "entries")


@dataclass(frozen=True)
class Client:
    """Rows and targets (time, event, entry, weight) as exact numbers."""

    A: list
    y: list

    def terms(self, ties):
        """Yield (v, {row: share in the risk set}) and the centre of D, by looking at all rows."""
        weight = [w for *_, w in self.y]
        for t in sorted({t for t, e, _, w in self.y if e > 0 and w > 0}):
            dead = [j for j, (T, e, _, w) in enumerate(self.y) if t == T and e > 0 and w > 0]
            risk = [j for j, (T, _, begin, w) in enumerate(self.y) if begin < t <= T and w > 0]
            m = len(dead)
            for k in range(m if ties == "efron" else 1):
                shares = {j: weight[j] * (1 - mpf(k) / m if j in dead else 1) for j in risk}
                total = fsum(weight[j] for j in dead)
                yield (
                    total / (m if ties == "efron" else 1),
                    shares,
                    {j: weight[j] / total for j in dead},
                )

    def at(self, ties, B, u, curved=False):
        """(ℓ(u) − ℓ(0), gradient, Hessian) with rows B in the place of A."""
        n = fsum(w for *_, w in self.y)
        d = len(u)
        z = [fdot(b, u) for b in B]
        value, slope, H = mpf(0), [mpf(0)] * d, mp.zeros(d)
        for v, shares, dead in self.terms(ties):
            top = max(z[j] for j in shares)
            p = {j: s * mp.exp(z[j] - top) for j, s in shares.items()}
            total = fsum(p.values())
            centre = fsum(c * z[j] for j, c in dead.items())
            value += v * (log(total) + top - centre - log(fsum(shares.values())))
            mean = [fsum(q * B[j][k] for j, q in p.items()) / total for k in range(d)]
            own = [fsum(c * B[j][k] for j, c in dead.items()) for k in range(d)]
            slope = [a + v * (b - c) for a, b, c in zip(slope, mean, own, strict=True)]
            for j, q in p.items() if curved else ():
                away = [b - c for b, c in zip(B[j], mean, strict=True)]
                for r in range(d):
                    for c in range(d):
                        H[r, c] += v * q / total * away[r] * away[c]
        return value / n, [g / n for g in slope], H / n


def lowest(clients, ties, shares, blocks, ridge, start):
    """Minimise Σ_i w_i ℓ_i(B_i θ) + ½ Σ_k r_k θ_k² by Newton's method; return θ and the value."""

    def at(theta, curved=True):
        value = fdot(ridge, [t * t for t in theta]) / 2
        slope = [r * t for r, t in zip(ridge, theta, strict=True)]
        H = mp.diag(ridge)
        for client, w, B in zip(clients, shares, blocks, strict=True):
            f, g, own = client.at(ties, B, theta, curved)
            value += w * f
            slope = [a + w * b for a, b in zip(slope, g, strict=True)]
            H += w * own
        return value, slope, H

    theta = list(start)
    value, slope, H = at(theta)
    first = max(map(abs, slope)) or mpf(1)
    for _ in range(200):
        if max(map(abs, slope)) <= first * mpf(10) ** -60:
            return theta, value
        step = mp.lu_solve(H, mp.matrix(slope))
        size = mpf(1)
        while size > mpf(10) ** -12:
            new = [t - size * step[k] for k, t in enumerate(theta)]
            found = at(new, False)[0]
            if found <= value:
                break
            size /= 2
        theta = new
        value, slope, H = at(theta)
    raise hostile.UndecidedError


@dataclass(frozen=True)
class Problem:
    """Clients as a cohort takes them, and the same as exact numbers."""

    pairs: list
    model: sp.Linear
    clients: list
    l2: list
    kappa: float | None

    def cohort(self):
        """The clients with the model."""
        personal = self.kappa is not None
        return sp.Cohort(
            self.pairs, sp.Personal(self.model, self.kappa) if personal else self.model
        )

    def blocks(self, personal=True):
        """Rows of every client in θ = (x, v_1, …, v_N)."""
        d, N = len(self.l2), len(self.clients)
        if self.kappa is None or not personal:
            return [client.A for client in self.clients]
        zero = [mpf(0)] * d
        return [
            [row + [w for k in range(N) for w in (row if k == i else zero)] for row in client.A]
            for i, client in enumerate(self.clients)
        ]

    def least(self, shares, x):
        """min_x Σ_i w_i f_i(x)."""
        ridge = list(self.l2)
        start = list(x)
        if self.kappa is not None:
            for client, w in zip(self.clients, shares, strict=True):
                ridge += [max(w, mpf(10) ** -40) * self.kappa / len(client.A)] * len(self.l2)
                start += [mpf(0)] * len(self.l2)
        return lowest(self.clients, self.model.ties, shares, self.blocks(), ridge, start)[1]

    def value_and_slope(self, i, x):
        """f_i(x) and its gradient."""
        client = self.clients[i]
        d = len(x)
        v = [mpf(0)] * d
        value = fdot(self.l2, [t * t for t in x]) / 2
        if self.kappa is not None:
            gamma = mpf(self.kappa) / len(client.A)
            shifted = Shifted(client, x)
            v, inner = lowest([shifted], self.model.ties, [mpf(1)], [client.A], [gamma] * d, v)
            value += inner
        f, g, _ = client.at(self.model.ties, client.A, [a + b for a, b in zip(x, v, strict=True)])
        value += 0 if self.kappa is not None else f
        return value, [a + r * t for a, r, t in zip(g, self.l2, x, strict=True)]


@dataclass(frozen=True)
class Shifted:
    """ℓ(x + v) as a function of v."""

    client: Client
    x: list

    def at(self, ties, B, v, curved=False):
        """Evaluate at x + v."""
        return self.client.at(ties, B, [a + b for a, b in zip(self.x, v, strict=True)], curved)


def drawn(random) -> Problem:
    """A problem of any kind."""
    kind = str(random.choice(KINDS))
    d = int(random.choice([1, 2, 3]))
    N = int(random.choice([1, 2, 3]))
    scale = 10 ** float(random.uniform(-6, 6))
    pairs = []
    for i in range(N):
        n = int(random.integers(2, 8))
        X = random.standard_normal((n, d)) + random.choice([0.0, 100.0])
        time = random.exponential(1, n) * 10 ** random.uniform(-6, 6)
        event = (random.random(n) < 0.7).astype(float)
        if kind == "ties":
            time = np.ceil(3 * random.random(n))
        if kind == "one event":
            event = np.eye(n)[int(random.integers(n))]
        if kind == "no event" and i == 0:
            event = np.zeros(n)
        if kind == "separated":
            X[:, 0] = -np.argsort(np.argsort(time))
            event = np.ones(n)
        entry = np.where(random.random(n) < 0.5, 0.0, 0.9 * random.random(n) * time)
        y = [time, event, *[entry] * (kind == "entries")]
        y += [random.choice([0.5, 1.0, 3.0], n)] * (kind == "weights")
        pairs.append((scale * X, np.column_stack(y)))
    l2 = 10 ** float(random.uniform(-6, 1)) * (scale**2 if random.random() < 0.5 else 1.0)
    spread = 10 ** random.uniform(0, 3, d)
    ridge = (l2 * spread).tolist() if random.random() < 0.3 else l2
    ties = str(random.choice(["efron", "breslow"]))
    model = sp.Linear("cox", ridge, ties=ties, weighted=kind == "weights", entry=kind == "entries")
    kappa = float(10 ** random.uniform(-2, 2) * scale**2) if random.random() < 0.25 else None
    clients = []
    for X, y in pairs:
        entry = y[:, 2] if kind == "entries" else np.zeros(len(y))
        weight = y[:, -1] if kind == "weights" else np.ones(len(y))
        mean = fsum(exact(weight)) / len(y)
        rows = [
            [mpf(float(v)) for v in (t, e, b)] + [mpf(float(w)) / mean]
            for (t, e), b, w in zip(y[:, :2], entry, weight, strict=True)
        ]
        clients.append(Client([exact(row) for row in X], rows))
    return Problem(pairs, model, clients, exact(np.broadcast_to(ridge, d)), kappa)


def judged(random) -> tuple[tuple[str, ...], float]:
    """Return what was broken at a point of a random problem, and certificate over true gap."""
    problem = drawn(random)
    cohort = problem.cohort()
    at = cohort.gradients(cohort.start())
    point = hostile.Point(0, str(random.choice(OBJECTIVES)))
    objective = hostile.objective_of(point, at.losses if at.losses.any() else at.losses + 1, random)
    rounds = int(random.integers(0, 9))
    found = sp.train(sp.fair(objective), cohort, rounds, 1e-12) if rounds else None
    unit = 1 / np.sqrt(float(cohort.constants().smoothness.max()))
    near = unit * random.standard_normal(len(cohort.start()))
    x = 10 ** random.uniform(-16, 1) * near
    if found is not None:
        x = found.x + (0 if random.random() < 0.7 else 10 ** random.uniform(-16, -1)) * near
    at = cohort.gradients(torch.from_numpy(x))
    weights = objective.start(at.losses)
    if found is not None:
        weights = found.weights
    elif random.random() < 0.7:
        weights = objective.prox(at.losses, weights, random.uniform(0.1, 10))
    known = cohort.constants()
    c = at.sum(weights)
    short = shrinkage(known, weights)
    errors = at.rounding()[0], short.errors * at.rounding()[1]
    size = length(c, short.factors)
    certificate = certify(objective, at.losses, weights, size, known.strong_convexity, errors).gap
    true = [problem.value_and_slope(i, exact(x)) for i in range(len(problem.clients))]
    broken = []
    each = at.each().numpy()
    least = min(problem.l2)
    for i, (value, slope) in enumerate(true):
        if abs(value - mpf(float(at.losses[i]))) > mpf(float(at.rounding()[0][i])):
            broken.append(f"loss {i}: {float(abs(value - mpf(float(at.losses[i])))):.3g}")
        away = [
            (a - b) ** 2 * least / r
            for a, b, r in zip(slope, exact(each[i]), problem.l2, strict=True)
        ]
        if sqrt(fsum(away)) > mpf(float(at.rounding()[1][i])):
            broken.append(
                f"gradient {i}: {float(sqrt(fsum(away))):.3g} > {at.rounding()[1][i]:.3g}"
            )
    w = hostile.normal_weights(objective, weights)
    top = hostile.support(objective, [value for value, _ in true]) + hostile.penalty(objective, w)
    gap = top - problem.least(w, exact(x))
    if np.isfinite(certificate) and gap > mpf(certificate):
        broken.append(f"certificate {certificate:.3g} < {float(gap):.3g}")
    return tuple(broken), certificate / max(float(gap), 1e-300)


def main(points: int) -> None:
    """Print what came of many points."""
    torch.set_num_threads(1)
    wrong = undecided = unproven = 0
    ratios = []
    for seed in range(points):
        try:
            broken, ratio = judged(np.random.default_rng(seed))
        except hostile.UndecidedError:
            undecided += 1
            continue
        wrong += bool(broken)
        unproven += not np.isfinite(ratio)
        ratios.append(ratio)
        if broken:
            print(seed, broken)
    print(
        f"{points} points: {wrong} broken, {undecided} undecided, {unproven} without a "
        f"certificate; certificate over gap {np.median(ratios):.3g} (median)"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
