r"""The paper's theorems in one figure, and where extrapolation pays.

    python -m experiments.theory [--out FILE.png]

Slopes: Scaff-PD with `Theory()` steps on 10 synthetic clients. SC-SC (χ²): ‖x − x*‖² falls by θ a
round or faster; SC-C (agnostic): as R^−2 or faster; with minibatches of variance ζ² and
`Theory(noise=ζ, accuracy=ε)` the error of SC-SC is O(ε).

Extrapolation: near a saddle point of quadratic losses, with the same clients active, a round is
linear. A mode with curvature h of x, coupling l and curvature m of λ follows

    λ⁺ = (λ + σ l ((1 + θ) x − θ x⁻))/(1 + σ m),    x⁺ = x − τ (h x + l λ⁺).

With θ = 0 and m = 0 the determinant of a round is 1 − τh, so its spectral radius is at least
√(1 − τμ): since τ < 2/L_xx, no σ needs fewer than about L_xx/μ rounds per factor e. With θ > 0
extrapolation itself damps the rotation, and the rounds do not grow with L_xx/μ. The first table has
the rounds per factor e under the best τ and σ, over the slowest of the modes (h, l) in
{μ, L_xx} × {1, 1/10}; the second has the rounds of Scaff-PD itself (J = 1, best τ and σ of a grid)
on d + 1 clients with f_i(x) = xᵀHx + ⟨a_i, x⟩ + c, a_i the vertices of a regular simplex: all are
active, and all directions coupled.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import scaffpd as sp
from scaffpd.data import synthetic

Array = NDArray[np.float64]
THETAS = (0.0, 0.25, 0.5, 1.0)
BATCH = 10
STRONG = 10.0  # l2 with minibatches: μ = 10
L2 = 0.1


def distances(
    objective: sp.objectives.Objective,
    steps: sp.Theory,
    rounds: int,
    local_steps: int,
    l2: float = L2,
    batch: int | None = None,
) -> tuple[Array, float]:
    """Return ‖x^r − x*‖² of every round, and θ at the end."""
    cohort = sp.Cohort(synthetic(sigma=1.0), sp.Linear("squared", l2=l2))
    best = sp.train(sp.fair(objective), cohort, tol=1e-12, progress=False).x
    method = sp.ScaffPD(objective, local_steps=local_steps, batch_size=batch, steps=steps)
    found: list[float] = []
    thetas: list[float] = []

    def watch(info: sp.RoundInfo) -> None:
        found.append(float(((info.state.x.numpy() - best) ** 2).sum()))
        thetas.append(info.state.rule.theta)

    sp.train(method, cohort, rounds, progress=False, callbacks=[watch])
    return np.array(found), thetas[-1]


def minibatch_noise() -> float:
    """Return ζ: the largest deviation of a client's minibatch gradient at the optimum."""
    clients = synthetic(sigma=1.0)
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=STRONG))
    x = sp.train(sp.fair(sp.ChiSquare(0.1)), cohort, tol=1e-12, progress=False).x
    rows = [2 * (X @ x - y)[:, None] * X for X, y in clients]
    return float(np.sqrt(max(g.var(0, ddof=1).sum() / BATCH for g in rows)))


def radius(tau: Array, sigma: Array, theta: float, h: float, coupling: float, m: float) -> Array:
    """Return the spectral radius of a round, for every pair of τ and σ."""
    shrunk = 1 / (1 + sigma * m)
    now = shrunk * sigma * coupling * (1 + theta)
    before = -shrunk * sigma * coupling * theta
    round_ = np.zeros((*tau.shape, 3, 3))  # of (x, x⁻, λ)
    round_[..., 0, 0] = 1 - tau * h - tau * coupling * now
    round_[..., 0, 1] = -tau * coupling * before
    round_[..., 0, 2] = -tau * coupling * shrunk
    round_[..., 1, 0] = 1
    round_[..., 2, 0] = now
    round_[..., 2, 1] = before
    round_[..., 2, 2] = shrunk
    return np.abs(np.linalg.eigvals(round_)).max(-1)


def best_rounds(theta: float, smooth: float, m: float) -> float:
    """Return the rounds per factor e with the best τ and σ, by a grid that closes in; μ = 1."""
    ends = np.log([[1e-3 / smooth, 1e2 / smooth], [1e-6 * smooth, 1e4 * smooth]])
    modes = list(itertools.product({1.0, smooth}, (1.0, 0.1)))
    for _ in range(4):
        tau, sigma = np.exp(np.meshgrid(*(np.linspace(*pair, 41) for pair in ends)))
        slowest = np.max([radius(tau, sigma, theta, h, c, m) for h, c in modes], axis=0)
        place = np.unravel_index(slowest.argmin(), slowest.shape)
        middle = np.log([[tau[place]], [sigma[place]]])
        ends = middle + np.array([-0.5, 0.5]) * np.diff(ends) / 6
    least = float(slowest.min())
    return -1 / np.log(least) if least < 1 else np.inf


def coupled(condition: float, d: int = 4) -> list[tuple[Array, Array]]:
    """Return clients with the same curvatures from 1/condition to 1, whose slopes at 0 cancel."""
    corners = np.eye(d + 1) - 1 / (d + 1)
    slopes = corners @ np.linalg.qr(corners[:, :d])[0]
    h = np.geomspace(1 / condition, 1, d)
    X = np.vstack([np.diag(np.sqrt((d + 1) * h)), np.zeros(d)])
    targets = -slopes / (2 * np.sqrt(h / (d + 1)))
    size = (targets**2).sum(1)
    level = np.sqrt(size.max() - size)  # a row without features makes the losses at 0 equal
    return [(X, np.append(y, c)) for y, c in zip(targets, level, strict=True)]


def rounds_of(theta: float, condition: float, most: int = 600) -> int | None:
    """Return the rounds of Scaff-PD to ‖x‖² ≤ 1e-12 with the best τ and σ; `None` above `most`."""
    cohort = sp.Cohort(coupled(condition), sp.Linear("squared", 0.0, False))
    best: int | None = None
    for tau, sigma in itertools.product(np.geomspace(0.1, 1, 5), np.geomspace(0.1, 1e2, 7)):
        steps = sp.Fixed(tau=tau, sigma=sigma, theta=theta)
        method = sp.ScaffPD(sp.Agnostic(), local_steps=1, steps=steps)
        state = method.init(cohort, 0, torch.full((4,), 0.5, dtype=torch.float64))
        for r in range(1, 1 + (best or most)):
            state = method.round(cohort, state)
            if not torch.isfinite(state.x).all():
                break
            if float((state.x**2).sum()) <= 1e-12:
                best = r
                break
    return best


def extrapolation() -> None:
    """Print both tables."""
    heads = " | ".join(f"θ = {theta:g}" for theta in THETAS)
    print(f"\nrounds per factor e\n\n| L_xx/μ | m | {heads} |\n{'|---:' * 6}|")
    for m, condition in itertools.product((0.01, 0.0), (1.0, 10.0, 100.0, 1000.0)):
        found = [best_rounds(theta, condition, m) for theta in THETAS]
        print(f"| {condition:g} | {m:g} |", " | ".join(f"{n:.1f}" for n in found), "|")
    print(f"\nrounds of Scaff-PD\n\n| L_xx/μ | {heads} |\n{'|---:' * 5}|")
    for condition in (3, 10):
        found = [rounds_of(theta, condition) for theta in THETAS]
        print(f"| {condition} |", " | ".join(str(n or "over 600") for n in found), "|")


def slopes(out: Path | None) -> None:
    """Print slopes beside those of the theorems, and draw the runs."""
    linear, theta = distances(sp.ChiSquare(0.1), sp.Theory(), 800, 10)
    power, _ = distances(sp.Agnostic(), sp.Theory(), 4000, 100)
    # oscillations are no progress: what counts is the largest distance from here on
    linear, power = (np.maximum.accumulate(d[::-1])[::-1] for d in (linear, power))
    late = slice(200, None)
    r = np.arange(1, len(power) + 1)
    slope = np.polyfit(np.log(r[late]), np.log(power[late]), 1)[0]
    rate = np.polyfit(np.arange(len(linear)), np.log(linear), 1)[0]
    print(f"SC-SC: log of the distance by {rate:.2e} a round; proven log θ = {np.log(theta):.2e}")
    print(f"SC-C: the distance as R^{slope:.2f} after 200 rounds; proven R^-2")
    noisy = {}
    for accuracy in (1.0, 0.1, 0.01):
        steps = sp.Theory(noise=minibatch_noise(), accuracy=accuracy)
        found, _ = distances(sp.ChiSquare(0.1), steps, 3000, 2, STRONG, BATCH)
        noisy[accuracy] = STRONG * found
        error = noisy[accuracy][-1000:].mean()
        print(f"SC-SC with minibatches: μ ‖x − x*‖² = {error:.1e}, asked for {accuracy:g}")
    if out is None:
        return
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), constrained_layout=True)
    axes[0].semilogy(linear, label="measured")
    axes[0].semilogy(linear[0] * theta ** np.arange(len(linear)), "--", label="proven, θ^R")
    axes[1].loglog(r, power, label="measured")
    axes[1].loglog(r[late], power[200] * (r[late] / 200.0) ** -2, "--", label="proven, R⁻²")
    for accuracy, found in noisy.items():
        line = axes[2].loglog(found, label=f"ε = {accuracy:g}")[0]
        axes[2].axhline(accuracy, color=line.get_color(), linestyle="--", linewidth=0.8)
    titles = ("SC-SC, χ²: ‖x − x*‖²", "SC-C, agnostic: ‖x − x*‖²", "Minibatches: μ ‖x − x*‖²")
    for one, title in zip(axes, titles, strict=True):
        one.set(title=title, xlabel="round R")
        one.legend(frameon=False)
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    slopes(parser.parse_args().out)
    extrapolation()
