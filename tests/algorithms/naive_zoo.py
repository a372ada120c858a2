"""The methods a second time: each paper's pseudo-code in plain NumPy, one client and one local step after the other.

Nothing is drawn here. Who takes part, which rows make a minibatch, which local iterate is the snapshot and how many
local steps there are come as arguments:

    clients        {name: naive.Client}
    weights        {name: p_i}, summing to one
    participants   one list of names per round; `None` for all clients in every round
    batches        (round, name, local step) → the rows of a gradient; `None` for all rows
    loss_batches   (round, name) → the rows of a loss; `None` for all rows (AFL and DRFA; other papers have all rows)
    prox           (s, λ, σ) → argmin over Λ of ψ(l) − ⟨s, l⟩ + ‖l − λ‖²/(2σ), arrays in the order of `clients`

Rounds count from 0. What comes back is the list of x after every round, or of (x, λ) where there is a λ.

The papers have λ on the simplex. Elsewhere (q-fair objectives) the package lets x move along Σ λ_i g_i / Σ λ_i in AFL,
DRFA, descent-ascent and extragradient, and along Σ λ_i g_i in the accelerated method; `mixture` says so below.
"""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

# ------------------------------------------------------------------ dual steps


def project_on_simplex(z):
    """The nearest point of the simplex, by sorting (Held, Wolfe and Crowder 1974)."""
    ordered = np.sort(z)[::-1]
    for k in range(len(z), 0, -1):
        nu = (ordered[:k].sum() - 1) / k
        if ordered[k - 1] > nu:
            return np.maximum(z - nu, 0)
    raise AssertionError("the largest entry always exceeds its own nu")


def agnostic_prox(s, centre, sigma):
    """ψ = 0 on the simplex: project λ + σ s."""
    return project_on_simplex(centre + sigma * s)


def chi_square_prox(rho):
    """ψ(λ) = (ρ/2) Σ (λ_i − 1/N)² N on the simplex.

    Stationarity, ρ N (λ_i − 1/N) − s_i + (λ_i − l_i)/σ + ν = 0 where λ_i > 0, gives λ(ν); Σ λ(ν) = 1 by bisection.
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
    """q = 1: ψ(λ) = Σ λ_i² N/2 on λ ≥ 0, so that N λ_i − s_i + (λ_i − l_i)/σ = 0 where λ_i > 0."""
    return np.maximum(0, (s + centre / sigma) / (len(s) + 1 / sigma))


def mixture(weights):
    """λ/Σλ: λ itself on the simplex."""
    return weights / weights.sum()


def one_point_prox(weights):
    """Λ has nothing but `weights`."""
    return lambda s, centre, sigma: np.array(weights)


# ------------------------------------------------------------------ what clients do


def rows_of(batches, *where):
    return None if batches is None else batches(*where)


def loss_of(client, x, rows=None):
    """`Client.loss_at` without its loop over samples (a test holds the two against each other)."""
    A, y = (client.A, client.y) if rows is None else (client.A[rows], client.y[rows])
    Z = A @ x.reshape(-1, client.k)
    if client.loss == "squared":
        each = np.sum((Z - y.reshape(len(y), -1)) ** 2, axis=1)
    elif client.loss == "logistic":
        each = np.logaddexp(0, Z[:, 0]) - y * Z[:, 0]
    else:
        each = logsumexp(Z, axis=1) - Z[np.arange(len(y)), y.astype(int)]
    return np.mean(each) + client.l2 / 2 * x @ x


def losses_at(clients, x, r=0, loss_batches=None):
    return np.array([loss_of(f, x, rows_of(loss_batches, r, name)) for name, f in clients.items()])


def gradients_at(clients, x):
    return [f.fast_gradient(x) for f in clients.values()]


def descent(client, x, steps, rate, rows, shift=0.0, mu=0.0):
    """u_0 = x, u_1, …, u_J of u ← u − η (g(u) + shift + μ (u − x)); `rows` of local step j make g."""
    path = [x]
    for j in range(steps):
        u = path[-1]
        path.append(u - rate * (client.fast_gradient(u, rows(j)) + shift + mu * (u - x)))
    return path


def everyone(clients, participants, r):
    return list(clients) if participants is None else list(participants[r])


def mean_of(values, weights):
    """Σ w v / Σ w over the keys of `values`."""
    return sum(weights[name] * v for name, v in values.items()) / sum(
        weights[name] for name in values
    )


# ------------------------------------------------------------------ averages


def fed_avg(
    clients, x, rounds, steps, rate, weights, participants=None, batches=None, server_rate=1.0
):
    """McMahan, Moore, Ramage, Hampson and Agüera y Arcas 2017, Algorithm 1 (with the server rate of Reddi et al. 2021).

    w_{t+1} = Σ_{k∈S} (n_k / Σ_S n) w^k_{t+1}
    """
    iterates = []
    for r in range(rounds):
        ends = {}
        for name in everyone(clients, participants, r):
            rows = lambda j, name=name, r=r: rows_of(batches, r, name, j)
            ends[name] = descent(clients[name], x, steps, rate, rows)[-1]
        x = x + server_rate * (mean_of(ends, weights) - x)
        iterates.append(x)
    return iterates


def fed_prox(
    clients, x, rounds, steps, rate, weights, mu, participants=None, batches=None, server_rate=1.0
):
    """Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith 2020, Algorithm 2: gradient steps on f_k(u) + (μ/2)‖u − w_t‖²."""
    iterates = []
    for r in range(rounds):
        ends = {}
        for name in everyone(clients, participants, r):
            rows = lambda j, name=name, r=r: rows_of(batches, r, name, j)
            ends[name] = descent(clients[name], x, steps, rate, rows, mu=mu)[-1]
        x = x + server_rate * (mean_of(ends, weights) - x)
        iterates.append(x)
    return iterates


def scaffold(
    clients,
    x,
    rounds,
    steps,
    rate,
    weights,
    option,
    participants=None,
    batches=None,
    variate_batches=None,
    server_rate=1.0,
):
    """Karimireddy, Kale, Mohri, Reddi, Stich and Suresh 2020, Algorithm 1 (1/N there is p_i here).

    y_i ← y_i − η_l (g_i(y_i) − c_i + c);  c_i⁺ = (i) g_i(x), (ii) c_i − c + (x − y_i)/(K η_l);
    x ← x + η_g mean_S(y_i − x);  c ← c + (1/N) Σ_S (c_i⁺ − c_i).

    Option I looks at the rows variate_batches(round, name).
    """
    c = np.zeros_like(x)
    own = {name: np.zeros_like(x) for name in clients}
    iterates = []
    for r in range(rounds):
        ends = {}
        fresh = {}
        for name in everyone(clients, participants, r):
            rows = lambda j, name=name, r=r: rows_of(batches, r, name, j)
            y = descent(clients[name], x, steps, rate, rows, shift=c - own[name])[-1]
            if option == "I":
                fresh[name] = clients[name].fast_gradient(x, rows_of(variate_batches, r, name))
            else:
                fresh[name] = own[name] - c + (x - y) / (steps * rate)
            ends[name] = y
        x = x + server_rate * (mean_of(ends, weights) - x)
        for name in fresh:
            c = c + weights[name] * (fresh[name] - own[name])
        own = own | fresh
        iterates.append(x)
    return iterates


def scaffnew(clients, x, steps, probability, rate, weights, batches=None):
    """Mishchenko, Malinovsky, Stich and Richtárik 2022, Algorithm 2 (1/n there is p_i here).

    `steps` are the local steps of every round: the number of coins up to and with the one that says "communicate".

    x̂_i = x_i − γ (g_i(x_i) − h_i);  x_i⁺ = mean of the x̂ if the coin says so, else x̂_i;  h_i⁺ = h_i + (p/γ)(x_i⁺ − x̂_i)
    """
    points = dict.fromkeys(clients, x)
    h = {name: np.zeros_like(x) for name in clients}
    iterates = []
    for r, count in enumerate(steps):
        for j in range(count):
            hat = {}
            for name, f in clients.items():
                gradient = f.fast_gradient(points[name], rows_of(batches, r, name, j))
                hat[name] = points[name] - rate * (gradient - h[name])
            communicate = j == count - 1
            points = dict.fromkeys(clients, mean_of(hat, weights)) if communicate else hat
            for name in clients:
                h[name] = h[name] + probability / rate * (points[name] - hat[name])
        iterates.append(points[next(iter(clients))])
    return iterates


# ------------------------------------------------------------------ the worst mixture


def afl(
    clients,
    x,
    rounds,
    rate,
    dual_rate,
    steps=1,
    prox=agnostic_prox,
    batches=None,
    loss_batches=None,
    server_rate=1.0,
    start=None,
):
    """Mohri, Sivek and Suresh 2019, Stochastic-AFL; with `steps` > 1, local steps in place of the gradient.

    w_t = w_{t−1} − γ_w ∇_w L(w_{t−1}, λ_{t−1});  λ_t = Project(λ_{t−1} + γ_λ ∇_λ L(w_{t−1}, λ_{t−1}))
    """
    weights = np.full(len(clients), 1 / len(clients)) if start is None else start
    iterates = []
    for r in range(rounds):
        losses = losses_at(clients, x, r, loss_batches)
        move = np.zeros_like(x)
        for weight, (name, f) in zip(mixture(weights), clients.items(), strict=True):
            rows = lambda j, name=name, r=r: rows_of(batches, r, name, j)
            move = move + weight * (x - descent(f, x, steps, rate, rows)[-1])
        x = x - server_rate * move
        weights = prox(losses, weights, dual_rate)
        iterates.append((x, weights))
    return iterates


def drfa(
    clients,
    x,
    rounds,
    steps,
    rate,
    dual_rate,
    snapshots,
    participants=None,
    asked=None,
    batches=None,
    loss_batches=None,
    prox=agnostic_prox,
    server_rate=1.0,
    start=None,
):
    """Deng, Kamani and Mahdavi 2020, Algorithm 1.

    `participants` are the lists D (a name as often as it was drawn), `asked` the sets U, `snapshots` the t' of every
    round, from 1 to J. Without D, every client counts with its λ_i; without U, every client is asked.

    w̄ = (1/m) Σ_D w_i^J;  w' = (1/m) Σ_D w_i^{t'};  v_i = (N/m) f_i(w') on U, else 0;  λ ← Project(λ + J γ v)

    A server rate other than 1 (the paper has none) is taken by both means.
    """
    names = list(clients)
    n = len(clients)
    weights = np.full(n, 1 / n) if start is None else start
    iterates = []
    for r in range(rounds):
        if participants is None:
            share = dict(zip(names, mixture(weights), strict=True))
        else:
            drawn = list(participants[r])
            share = {name: drawn.count(name) / len(drawn) for name in drawn}
        end = np.zeros_like(x)
        snapshot = np.zeros_like(x)
        for name, part in share.items():
            rows = lambda j, name=name, r=r: rows_of(batches, r, name, j)
            path = descent(clients[name], x, steps, rate, rows)
            end = end + part * path[steps]
            snapshot = snapshot + part * path[snapshots[r]]
        end = x + server_rate * (end - x)
        snapshot = x + server_rate * (snapshot - x)
        chosen = everyone(clients, asked, r)
        v = np.zeros(n)
        for name in chosen:
            loss = loss_of(clients[name], snapshot, rows_of(loss_batches, r, name))
            v[names.index(name)] = n / len(chosen) * loss
        x = end
        weights = prox(v, weights, steps * dual_rate)
        iterates.append((x, weights))
    return iterates


# ------------------------------------------------------------------ other fair methods


def q_fed_sgd(clients, x, rounds, q, L, weights, participants=None):
    """Li, Sanjabi, Beirami and Smith 2020, Algorithm 1 (the devices' p_k as weights, not as their sampling).

    Δ_k = F_k^q ∇F_k;  h_k = q F_k^{q−1} ‖∇F_k‖² + L F_k^q;  w⁺ = w − Σ Δ_k / Σ h_k
    """
    iterates = []
    for r in range(rounds):
        top = np.zeros_like(x)
        bottom = 0.0
        for name in everyone(clients, participants, r):
            F = loss_of(clients[name], x)
            gradient = clients[name].fast_gradient(x)
            top = top + weights[name] * F**q * gradient
            bottom = bottom + weights[name] * (q * F ** (q - 1) * gradient @ gradient + L * F**q)
        x = x - top / bottom
        iterates.append(x)
    return iterates


def q_fed_avg(clients, x, rounds, q, steps, rate, weights, participants=None, batches=None):
    """Li, Sanjabi, Beirami and Smith 2020, Algorithm 2 (the devices' p_k as weights), L = 1/η.

    Δw_k = L (w − w̄_k);  Δ_k = F_k^q Δw_k;  h_k = q F_k^{q−1} ‖Δw_k‖² + L F_k^q;  w⁺ = w − Σ Δ_k / Σ h_k
    """
    L = 1 / rate
    iterates = []
    for r in range(rounds):
        top = np.zeros_like(x)
        bottom = 0.0
        for name in everyone(clients, participants, r):
            rows = lambda j, name=name, r=r: rows_of(batches, r, name, j)
            F = loss_of(clients[name], x)
            change = L * (x - descent(clients[name], x, steps, rate, rows)[-1])
            top = top + weights[name] * F**q * change
            bottom = bottom + weights[name] * (q * F ** (q - 1) * change @ change + L * F**q)
        x = x - top / bottom
        iterates.append(x)
    return iterates


def delta_fl(
    clients, x, rounds, steps, rate, weights, tail, participants=None, batches=None, server_rate=1.0
):
    """Laguel, Pillutla, Malick and Harchaoui 2021, Algorithm 1: FedAvg among the clients of the worst tail.

    Of the sampled clients those stay whose loss is at least the (1 − θ)-quantile by weight: the least value that no
    less than a share 1 − θ of the sampled weight does not exceed.
    """
    iterates = []
    for r in range(rounds):
        sampled = everyone(clients, participants, r)
        F = {name: loss_of(clients[name], x) for name in sampled}
        total = sum(weights[name] for name in sampled)
        below = {
            name: sum(weights[k] for k in sampled if F[k] <= F[name]) / total for name in sampled
        }
        quantile = min(F[name] for name in sampled if below[name] >= 1 - tail)
        ends = {}
        for name in sampled:
            if F[name] >= quantile:
                rows = lambda j, name=name, r=r: rows_of(batches, r, name, j)
                ends[name] = descent(clients[name], x, steps, rate, rows)[-1]
        x = x + server_rate * (mean_of(ends, weights) - x)
        iterates.append(x)
    return iterates


# ------------------------------------------------------------------ saddle points without local steps


def gradient_descent_ascent(clients, x, rounds, tau, sigma, prox, start=None):
    """Both at once: x⁺ = x − τ ∇_x Φ(x, λ), λ⁺ = prox_σ(L(x), λ)."""
    weights = np.full(len(clients), 1 / len(clients)) if start is None else start
    iterates = []
    for _ in range(rounds):
        slope = mixture(weights) @ gradients_at(clients, x)
        x, weights = x - tau * slope, prox(losses_at(clients, x), weights, sigma)
        iterates.append((x, weights))
    return iterates


def extragradient(clients, x, rounds, tau, sigma, prox, start=None):
    """Korpelevich 1976: a step to (x̃, λ̃), then from (x, λ) the step that is right at (x̃, λ̃)."""
    weights = np.full(len(clients), 1 / len(clients)) if start is None else start
    iterates = []
    for _ in range(rounds):
        x_half = x - tau * (mixture(weights) @ gradients_at(clients, x))
        weights_half = prox(losses_at(clients, x), weights, sigma)
        x = x - tau * (mixture(weights_half) @ gradients_at(clients, x_half))
        weights = prox(losses_at(clients, x_half), weights, sigma)
        iterates.append((x, weights))
    return iterates


def accelerated_primal_dual(clients, x, rounds, tau, sigma, theta, prox, start=None):
    """Hamedani and Aybat 2021, Algorithm 2.1 with constant steps; x_{−1} = x_0.

    λ_{k+1} = prox_σ((1 + θ) L(x_k) − θ L(x_{k−1}), λ_k);  x_{k+1} = x_k − τ ∇_x Φ(x_k, λ_{k+1})
    """
    weights = np.full(len(clients), 1 / len(clients)) if start is None else start
    before = losses_at(clients, x)
    iterates = []
    for _ in range(rounds):
        losses = losses_at(clients, x)
        weights = prox((1 + theta) * losses - theta * before, weights, sigma)
        x = x - tau * (weights @ gradients_at(clients, x))
        before = losses
        iterates.append((x, weights))
    return iterates


# ------------------------------------------------------------------ the method of this package, for its reductions


def scaff_pd(clients, x, rounds, steps, rate, tau, sigma, theta, prox, start=None):
    """Yu, Karimireddy, Ma and Jordan 2023, Algorithms 1 and 2, on the simplex."""
    weights = np.full(len(clients), 1 / len(clients)) if start is None else start
    before = losses_at(clients, x)
    iterates = []
    for _ in range(rounds):
        losses = losses_at(clients, x)
        own = gradients_at(clients, x)
        weights = prox((1 + theta) * losses - theta * before, weights, sigma)
        c = weights @ own
        move = np.zeros_like(x)
        for weight, c_i, f in zip(weights, own, clients.values(), strict=True):
            move = move + weight * (
                x - descent(f, x, steps, rate, lambda j: None, shift=c - c_i)[-1]
            ) / (rate * steps)
        x = x - tau * move
        before = losses
        iterates.append((x, weights))
    return iterates
