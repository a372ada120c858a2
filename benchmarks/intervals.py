r"""How often do 95 % intervals cover the truth? Simulated clients whose true models are known.

Gains: u_i ~ N(x, τI), 20 to 60 rows to train on and 40 to 120 held out at every client, and three
models: alone (ridge), one for all (pooled), personal (shrunk to the pooled one by 1/τ). A gain is
the share by which one model's expected loss is below another's. It is known here: σ² + ‖u − u_i‖²
for squared loss, from exact probabilities for labels. The worst fifth is the one that half of the
held-out rows name, judged on the other half; `truly` is the gain of those who are served worst,
which the interval does not claim, and `in its own rows` would be without halves.

    python benchmarks/intervals.py [--small] [--draws 400]
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from scaffpd.training.metrics import HeldOutMoments, RelativeGain, Weights, every, worst_fifth

Array = NDArray[np.float64]
COLUMNS = 5  # the last one is the intercept
ALONE, POOLED, PERSONAL = range(3)
PAIRS = ((ALONE, POOLED), (ALONE, PERSONAL), (POOLED, PERSONAL))
FRESH = 2000  # rows that expected losses of labels are computed on


@dataclass(frozen=True)
class Clients:
    """N clients with true coefficients u_i ~ N(x, τI), noise σ² = 1 or labels with log-odds ⟨a, u⟩."""

    rng: np.random.Generator
    truth: Array
    labels: bool

    @classmethod
    def drawn(cls, rng: np.random.Generator, count: int, tau: float, labels: bool) -> Clients:
        """Draw the clients' coefficients."""
        x = rng.normal(size=COLUMNS)
        return cls(rng, x + math.sqrt(tau) * rng.normal(size=(count, COLUMNS)), labels)

    def features(self, rows: int) -> Array:
        """Draw features, and the column of the intercept."""
        X = self.rng.normal(size=(rows, COLUMNS))
        X[:, -1] = 1
        return X

    def draw(self, fewest: int) -> list[tuple[Array, Array]]:
        """Draw `fewest` to thrice as many rows for every client."""
        found = []
        for u in self.truth:
            X = self.features(int(self.rng.integers(fewest, 3 * fewest + 1)))
            z = X @ u
            noise = self.rng.logistic(size=len(z)) if self.labels else self.rng.normal(size=len(z))
            found.append((X, (z + noise > 0).astype(float) if self.labels else z + noise))
        return found

    def losses(self, u: Array, X: Array, y: Array) -> Array:
        """Return the loss of every row."""
        z = X @ u
        return np.logaddexp(0, z) - y * z if self.labels else (z - y) ** 2

    def risks(self, models: list[Array]) -> Array:
        """Return expected losses, (models × clients)."""
        if not self.labels:
            return np.stack([1 + ((own - self.truth) ** 2).sum(1) for own in models])
        X = self.features(FRESH)
        p = expit(X @ self.truth.T)
        outputs = [X @ own.T for own in models]
        return np.stack([(np.logaddexp(0, z) - p * z).mean(0) for z in outputs])

    def fit(self, rows: list[tuple[Array, Array]], ridge: float, centre: Array) -> Array:
        """Solve min_u Σ ℓ(u) + (ridge/2)‖u − centre‖² of all rows by Newton's method."""
        X = np.concatenate([X for X, _ in rows])
        y = np.concatenate([y for _, y in rows])
        u = centre.copy()
        for _ in range(12 if self.labels else 1):
            p = expit(X @ u) if self.labels else X @ u
            curvature = p * (1 - p) if self.labels else np.ones(len(y))
            H = (X.T * curvature) @ X + ridge * np.eye(COLUMNS)
            u = u - np.linalg.solve(H, X.T @ (p - y) + ridge * (u - centre))
        return u


def trained(clients: Clients, tau: float) -> list[Array]:
    """Train the three models, (clients × columns) each."""
    rows = clients.draw(20)
    zero = np.zeros(COLUMNS)
    x = clients.fit(rows, 0.1, zero)
    alone = [clients.fit([own], 1.0, zero) for own in rows]
    personal = [clients.fit([own], 1 / max(tau, 0.01), x) for own in rows]
    return [np.stack(alone), np.stack([x] * len(rows)), np.stack(personal)]


def only_first(losses: Array) -> Array:
    """Return weights of the first client alone."""
    return np.eye(len(losses))[0]


def judged_alike(evidence: HeldOutMoments) -> HeldOutMoments:
    """Let all rows name the clients that they judge."""
    twice = np.stack([evidence.means] * 2)
    return HeldOutMoments(
        evidence.means, twice, evidence.shares, evidence.covariances, evidence.blocks
    )


def gains(draws: int, count: int, tau: float, labels: bool, seed: int) -> dict[str, list[bool]]:
    """Return whether intervals of relative gains covered, draw by draw and pair by pair."""
    rng = np.random.default_rng(seed)
    covered = defaultdict(list)
    for _ in range(draws):
        clients = Clients.drawn(rng, count, tau, labels)
        models = trained(clients, tau)
        risks = clients.risks(models)
        held = clients.draw(40)
        evidence = HeldOutMoments.of(
            [
                np.stack([clients.losses(own[i], X, y) for own in models])
                for i, (X, y) in enumerate(held)
            ]
        )
        alike = judged_alike(evidence)
        cases: list[tuple[str, HeldOutMoments, Weights]] = [
            ("mean over clients", evidence, every),
            ("one client", evidence, only_first),
            ("worst fifth", evidence, worst_fifth),
            ("worst fifth, in its own rows", alike, worst_fifth),
        ]
        for (name, found, of), (a, b) in itertools.product(cases, PAIRS):
            gain = RelativeGain.of(found.difference(a, b, of))
            before, after = ((found.weights(k, of) * risks[k]).sum() for k in (a, b))
            covered[name].append(gain.low <= 1 - after / before <= gain.high)
            if name == "worst fifth":
                before, after = (of(risks[k]) @ risks[k] for k in (a, b))
                covered["truly worst fifth"].append(gain.low <= 1 - after / before <= gain.high)
    return covered


def table(counts: tuple[int, ...], draws: int) -> None:
    """Print coverage in percent with its Monte-Carlo error, over all pairs."""
    header: list[str] = []
    for labels, count, tau in itertools.product((False, True), counts, (0.0, 0.3, 1.0)):
        found = gains(draws, count, tau, labels, 1)
        if not header:
            header = ["loss", "clients", "τ", *found]
            print("| " + " | ".join(header) + " |")
            print("|---" * 3 + "|---:" * len(found) + "|")
        cells = ["logistic" if labels else "squared", str(count), f"{tau:g}"]
        for hits in found.values():
            # what is judged on the same rows goes together: the error is that of means over draws
            each = np.reshape(hits, (draws, -1)).mean(1)
            cells.append(f"{100 * each.mean():.1f} ± {100 * each.std() / math.sqrt(draws):.1f}")
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--small", action="store_true", help="a few draws, to see that it runs")
    chosen = parser.parse_args()
    draws = 20 if chosen.small else chosen.draws
    table((6, 30), draws)


if __name__ == "__main__":
    main()
