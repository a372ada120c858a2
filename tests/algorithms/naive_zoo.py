"""The methods a second time: each paper's pseudo-code in plain NumPy, client by client.

Nothing is drawn here: a `Setting` says who takes part and which rows make a minibatch, as the run
of the package has drawn them. Every function yields (x, λ) after each round, λ `None` where a
paper has none.

The papers have λ on the simplex. Elsewhere (q-fair objectives) the package lets x move along
Σ λ_i g_i / Σ λ_i in AFL, DRFA, descent-ascent and extragradient.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import logsumexp

# --- dual steps


def agnostic_prox(s, centre, sigma):
    """ψ = 0 on the simplex: project λ + σ s, by sorting (Held, Wolfe and Crowder 1974)."""
    z = centre + sigma * s
    ordered = np.sort(z)[::-1]
    for k in range(len(z), 0, -1):
        nu = (ordered[:k].sum() - 1) / k
        if ordered[k - 1] > nu:
            return np.maximum(z - nu, 0)
    raise AssertionError("the largest entry always exceeds its own nu")


def chi_square_prox(rho):
    """ψ(λ) = (ρ/2) Σ (λ_i − 1/N)² N on the simplex.

    Stationarity, ρ N (λ_i − 1/N) − s_i + (λ_i − l_i)/σ + ν = 0 where λ_i > 0, gives λ(ν), and
    Σ λ(ν) = 1 by bisection.
    """

    def prox(s, centre, sigma):
        n = len(s)
        pull = rho + s + centre / sigma
        weights = lambda nu: np.maximum(0, (pull - nu) / (rho * n + 1 / sigma))
        low = pull.min() - (rho * n + 1 / sigma)
        high = pull.max()
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if weights(middle).sum() > 1 else (low, middle)
        return weights((low + high) / 2)

    return prox


def q_fair_prox(s, centre, sigma):
    """q = 1: ψ(λ) = Σ λ_i² N/2 on λ ≥ 0, so that N λ_i − s_i + (λ_i − l_i)/σ = 0 or λ_i = 0."""
    return np.maximum(0, (s + centre / sigma) / (len(s) + 1 / sigma))


def mixture(weights):
    """λ/Σλ: λ itself on the simplex."""
    return weights / weights.sum()


# --- what clients do


@dataclass(frozen=True)
class Setting:
    """What a method is run on; `run` has what the package drew: without it, all take part.

    `p` are the clients' weights by name, `prox` is (s, λ, σ) → argmin over Λ of
    ψ(l) − ⟨s, l⟩ + ‖l − λ‖²/(2σ), in the order of `clients`.
    """

    clients: dict
    x0: np.ndarray
    rounds: int
    rate: float
    p: dict
    steps: int = 5
    server_rate: float = 1.0
    dual_rate: float = 0.0
    prox: Any = agnostic_prox
    start: Any = None
    run: Any = None

    @property
    def first(self):
        """λ⁰."""
        return (
            np.full(len(self.clients), 1 / len(self.clients)) if self.start is None else self.start
        )

    def names(self, r):
        return list(self.clients) if self.run is None else list(self.run.participants[r])

    def descend(self, r, name, x, shift=0.0, mu=0.0):
        """u_0 = x, u_1, …, u_J of u ← u − η (g(u) + shift + μ (u − x))."""
        path = [x]
        for j in range(self.steps):
            rows = None if self.run is None else self.run.rows(r, name, j)
            u = path[-1]
            g = self.clients[name].fast_gradient(u, rows)
            path.append(u - self.rate * (g + shift + mu * (u - x)))
        return path

    def losses(self, r, x):
        """Every client's loss, of the minibatch that the run asked about in round r."""
        rows = lambda name: None if self.run is None else self.run.loss_rows(r, name)
        return np.array([loss_of(f, x, rows(name)) for name, f in self.clients.items()])

    def mean(self, values):
        """Σ p v / Σ p over the keys of `values`."""
        total = sum(self.p[name] for name in values)
        return sum(self.p[name] * v for name, v in values.items()) / total


def loss_of(client, x, rows=None):
    """`Client.loss_at` without its loop over samples."""
    A, y = (client.A, client.y) if rows is None else (client.A[rows], client.y[rows])
    Z = A @ x.reshape(-1, client.k)
    if client.loss == "squared":
        each = np.sum((Z - y.reshape(len(y), -1)) ** 2, axis=1)
    elif client.loss == "logistic":
        each = np.logaddexp(0, Z[:, 0]) - y * Z[:, 0]
    else:
        each = logsumexp(Z, axis=1) - Z[np.arange(len(y)), y.astype(int)]
    return np.mean(each) + client.l2 / 2 * x @ x


def losses_at(clients, x):
    return np.array([loss_of(f, x) for f in clients.values()])


def gradients_at(clients, x):
    return [f.fast_gradient(x) for f in clients.values()]


# --- averages


def fed_avg(s, mu=0.0):
    """McMahan et al. 2017, Algorithm 1; with μ, Li, Sahu et al. 2020, Algorithm 2 (FedProx)."""
    x = s.x0
    for r in range(s.rounds):
        ends = {name: s.descend(r, name, x, mu=mu)[-1] for name in s.names(r)}
        x = x + s.server_rate * (s.mean(ends) - x)
        yield x, None


def fed_opt(s, optimizer, b1=0.8, b2=0.7, tau=0.05):
    """Reddi et al. 2021, Algorithm 2, entry by entry; "momentum" is Hsu et al. 2019."""
    x = s.x0
    m = [0.0] * len(x)
    v = [tau**2] * len(x)
    for r in range(s.rounds):
        ends = {name: s.descend(r, name, x)[-1] for name in s.names(r)}
        delta = s.mean(ends) - x
        x = x.copy()
        for j, d in enumerate(delta):
            if optimizer == "momentum":
                m[j] = b1 * m[j] + d
                x[j] += s.server_rate * m[j]
                continue
            m[j] = b1 * m[j] + (1 - b1) * d
            if optimizer == "adagrad":
                v[j] += d * d
            elif optimizer == "adam":
                v[j] = b2 * v[j] + (1 - b2) * d * d
            else:
                v[j] -= (1 - b2) * d * d * np.sign(v[j] - d * d)
            x[j] += s.server_rate * m[j] / (v[j] ** 0.5 + tau)
        yield x, None


def scaffold(s):
    """Karimireddy et al. 2020, Algorithm 1 (1/N there is p_i here).

    y_i ← y_i − η_l (g_i(y_i) − c_i + c);  c_i⁺ = c_i − c + (x − y_i)/(K η_l);
    x ← x + η_g mean_S(y_i − x);  c ← c + (1/N) Σ_S (c_i⁺ − c_i).
    """
    x = s.x0
    c = np.zeros_like(x)
    own = {name: np.zeros_like(x) for name in s.clients}
    for r in range(s.rounds):
        ends = {}
        fresh = {}
        for name in s.names(r):
            ends[name] = s.descend(r, name, x, shift=c - own[name])[-1]
            fresh[name] = own[name] - c + (x - ends[name]) / (s.steps * s.rate)
        x = x + s.server_rate * (s.mean(ends) - x)
        for name in fresh:
            c = c + s.p[name] * (fresh[name] - own[name])
        own = own | fresh
        yield x, None


def prox_skip(s, counts, expected):
    """Mishchenko et al. 2022, Algorithm 2 (1/n there is p_i here): `counts` coins until each round.

    x̂_i = x_i − γ (g_i(x_i) − h_i);  x_i⁺ = mean of the x̂ if the coin says so, else x̂_i;
    h_i⁺ = h_i + (p/γ)(x_i⁺ − x̂_i)
    """
    points = dict.fromkeys(s.clients, s.x0)
    h = {name: np.zeros_like(s.x0) for name in s.clients}
    for r, count in enumerate(counts):
        for j in range(count):
            hat = {}
            for name, f in s.clients.items():
                g = f.fast_gradient(points[name], s.run.rows(r, name, j))
                hat[name] = points[name] - s.rate * (g - h[name])
            points = dict.fromkeys(s.clients, s.mean(hat)) if j == count - 1 else hat
            for name in s.clients:
                h[name] = h[name] + (points[name] - hat[name]) / (expected * s.rate)
        yield points[next(iter(s.clients))], None


# --- fair methods


def afl(s):
    """Mohri, Sivek and Suresh 2019, Stochastic-AFL; with J > 1, local steps for the gradient.

    w_t = w_{t−1} − γ_w ∇_w L(w_{t−1}, λ_{t−1});
    λ_t = Project(λ_{t−1} + γ_λ ∇_λ L(w_{t−1}, λ_{t−1}))
    """
    x = s.x0
    weights = s.first
    for r in range(s.rounds):
        losses = s.losses(r, x)
        ends = [s.descend(r, name, x)[-1] for name in s.clients]
        x = x - s.server_rate * mixture(weights) @ (x - np.array(ends))
        weights = s.prox(losses, weights, s.dual_rate)
        yield x, weights


def drfa(s, snapshots, drawn=None, asked=None):
    """Deng, Kamani and Mahdavi 2020, Algorithm 1.

    w̄ = (1/m) Σ_D w_i^J;  w' = (1/m) Σ_D w_i^{t'};  v_i = (N/m) f_i(w') on U, else 0;
    λ ← Project(λ + J γ v). `drawn` are the D (a name as often as it was drawn), `asked` the U: all
    by default, with λ_i for a share.
    """
    names = list(s.clients)
    n = len(names)
    x = s.x0
    weights = s.first
    for r in range(s.rounds):
        share = dict(zip(names, mixture(weights), strict=True))
        if drawn is not None:
            share = {name: drawn[r].count(name) / len(drawn[r]) for name in drawn[r]}
        paths = {name: s.descend(r, name, x) for name in share}
        middle = sum(part * paths[name][snapshots[r]] for name, part in share.items())
        middle = x + s.server_rate * (middle - x)
        end = sum(part * paths[name][-1] for name, part in share.items())
        x = x + s.server_rate * (end - x)
        chosen = names if asked is None else asked[r]
        there = np.isin(names, chosen)
        v = np.where(there, n / len(chosen) * s.losses(r, middle), 0)
        weights = s.prox(v, weights, s.steps * s.dual_rate)
        yield x, weights


def q_ffl(s, q):
    """Li, Sanjabi, Beirami and Smith 2020, Algorithm 2, L = 1/η; J = 1 is Algorithm 1.

    Δw_k = L (w − w̄_k);  Δ_k = F_k^q Δw_k;  h_k = q F_k^{q−1} ‖Δw_k‖² + L F_k^q;
    w⁺ = w − Σ Δ_k / Σ h_k, and λ_k = F_k^q / Σ F^q (times p_k) says who counts
    """
    L = 1 / s.rate
    x = s.x0
    for r in range(s.rounds):
        top = np.zeros_like(x)
        bottom = 0.0
        shares = {}
        for name in s.names(r):
            f = s.clients[name]
            F = loss_of(f, x)
            change = L * (x - s.descend(r, name, x)[-1])
            shares[name] = s.p[name] * F**q
            top = top + shares[name] * change
            bottom = bottom + s.p[name] * (q * F ** (q - 1) * change @ change + L * F**q)
        x = x - s.server_rate * top / bottom
        yield x, mixture(np.array([shares.get(name, 0.0) for name in s.clients]))


def delta_fl(s, tail):
    """Laguel, Pillutla, Malick and Harchaoui 2021, Algorithm 1: FedAvg among the worst tail.

    Of the sampled clients those stay whose loss is at least the (1 − θ)-quantile by weight: the
    least value that no less than a share 1 − θ of the sampled weight does not exceed.
    """
    x = s.x0
    for r in range(s.rounds):
        sampled = s.run.asked_for_losses[r]
        F = {name: loss_of(s.clients[name], x) for name in sampled}
        total = sum(s.p[name] for name in sampled)
        below = {a: sum(s.p[b] for b in sampled if F[b] <= F[a]) / total for a in sampled}
        quantile = min(F[name] for name in sampled if below[name] >= 1 - tail)
        worst = [name for name in sampled if F[name] >= quantile]
        ends = {name: s.descend(r, name, x)[-1] for name in worst}
        x = x + s.server_rate * (s.mean(ends) - x)
        yield x, None


# --- saddle points


def descent_ascent(s):
    """Both at once: x⁺ = x − τ ∇_x Φ(x, λ), λ⁺ = prox_σ(L(x), λ)."""
    x = s.x0
    weights = s.first
    for _ in range(s.rounds):
        slope = mixture(weights) @ gradients_at(s.clients, x)
        x, weights = x - s.rate * slope, s.prox(losses_at(s.clients, x), weights, s.dual_rate)
        yield x, weights


def extragradient(s):
    """Korpelevich 1976: a step to (x̃, λ̃), then from (x, λ) the step that is right at (x̃, λ̃)."""
    x = s.x0
    weights = s.first
    for _ in range(s.rounds):
        x_half = x - s.rate * (mixture(weights) @ gradients_at(s.clients, x))
        weights_half = s.prox(losses_at(s.clients, x), weights, s.dual_rate)
        x = x - s.rate * (mixture(weights_half) @ gradients_at(s.clients, x_half))
        weights = s.prox(losses_at(s.clients, x_half), weights, s.dual_rate)
        yield x, weights


def scaff_pd(s, tau, theta):
    """Yu, Karimireddy, Ma and Jordan 2023, Algorithms 1 and 2; c and λ enter local work over Σλ."""
    x = s.x0
    weights = s.first
    before = losses_at(s.clients, x)
    for r in range(s.rounds):
        losses = losses_at(s.clients, x)
        own = gradients_at(s.clients, x)
        weights = s.prox((1 + theta) * losses - theta * before, weights, s.dual_rate)
        c = mixture(weights) @ own
        move = np.zeros_like(x)
        for weight, c_i, name in zip(weights, own, s.clients, strict=True):
            end = s.descend(r, name, x, shift=c - c_i)[-1]
            move = move + weight * (x - end) / (s.rate * s.steps)
        x = x - tau * move
        before = losses
        yield x, weights
