"""Attacks on noise: tell from released numbers alone at which clients one record was there.

The attacker is the server of an honest run. It knows every other record, the model and all settings, and asks of two
worlds, with the record and with nothing in its place, which one explains the numbers that a client has released.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from scipy.stats import beta

import scaffpd as sp
from scaffpd.privacy.accountant import Release, epsilon

ROWS = 12
FEATURES = 3
L2 = 0.01
NEARBY = np.arange(-40.0, 41.0)  # numbers of the uniform grid around the one that fits best
MODEL = sp.Linear("squared", l2=L2)


class Seen(NamedTuple):
    """What the server has seen: R points, and what N clients have released there, (R, N) and (R, N, d)."""

    points: list[torch.Tensor]
    losses: list[np.ndarray]
    gradients: list[np.ndarray]


@dataclass(frozen=True)
class Watched(sp.ScaffPD):
    """An honest method whose server takes notes."""

    local_steps: int = 1
    seen: Seen = field(default_factory=lambda: Seen([], [], []), compare=False)

    def _ask(self, federation: Any, x: torch.Tensor, seed: int, r: int) -> Any:
        at = super()._ask(federation, x, seed, r)
        for notes, found in zip(self.seen, (x.clone(), at.losses, at.each().numpy()), strict=True):
            notes.append(found)
        return at


def worlds(seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """A client's rows with the record, and with nothing in its place: a row of zeros adds nothing to any sum."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(ROWS, FEATURES))
    y = 0.1 * random.normal(size=ROWS)
    X[0] = 3.0
    y[0] = 9.0
    absent = X.copy(), y.copy()
    absent[0][0] = 0.0
    absent[1][0] = 0.0
    return [(X, y), absent]


def method(seen: Seen | None = None) -> Watched:
    """Scaff-PD with one local step, as private runs have it, with public rates."""
    steps = sp.Fixed(tau=0.05, sigma=0.1, theta=0.0, local_rate=0.05)
    return Watched(sp.ChiSquare(rho=1.0), steps=steps, seen=seen or Seen([], [], []))


def private(epsilon: float, rounds: int, secret: int = 0, weaker: float = 1.0) -> sp.Private:
    """Clients with the noise that ε needs, or with so many times less than that, which an audit has to notice."""
    rest = {"clip": 1.0, "loss_clip": 1.0, "smoothness": 1.0, "secret": secret}
    solved = sp.Private.solved(MODEL, epsilon, method(), rounds, **rest)
    return sp.Private(
        MODEL, noise=solved.noise / weaker, loss_noise=solved.loss_noise / weaker, **rest
    )


def watched(model: sp.Private, clients: int, rounds: int) -> Seen:
    """Train honestly, and return what the server has seen; the first half of the clients has the record."""
    there, absent = worlds()
    data = {f"client {i}": there if 2 * i < clients else absent for i in range(clients)}
    seen = Seen([], [], [])
    sp.train(method(seen), sp.Cohort(data, model), rounds=rounds, progress=False)
    return seen


@lru_cache
def without_noise(world: int, clip: float, loss_clip: float) -> Any:
    """The sums of a world, as the attacker computes them for itself."""
    bare = sp.Private(MODEL, noise=0.0, clip=clip, loss_clip=loss_clip, smoothness=1.0)
    return sp.Cohort({"client": worlds()[world]}, bare)._oracle.sums


def exact(model: sp.Private, world: int, seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """A client's clipped sums at the points that were seen: losses (R, 1), and gradients (R, 1, d)."""
    sums = without_noise(world, model.clip, model.loss_clip)
    found = [(sums.losses(x, None).numpy(), sums.gradients(x, None).numpy()) for x in seen.points]
    return np.stack([losses for losses, _ in found]), np.stack(
        [gradients for _, gradients in found]
    )


def public(seen: Seen) -> tuple[np.ndarray, np.ndarray]:
    """The regulariser's part of losses, (R, 1), and of gradients, (R, 1, d)."""
    losses = [[float(L2 / 2 * (x @ x))] for x in seen.points]
    return np.array(losses), np.stack([L2 * x.numpy()[None] for x in seen.points])


def free(model: sp.Private, seen: Seen) -> np.ndarray:
    """Which losses are not cut off at 0 or B, (R, N)."""
    mean = np.stack(seen.losses) - public(seen)[0]
    return (mean > 1e-9) & (mean < model.loss_clip - 1e-9)


def explained(released: np.ndarray, total: np.ndarray, scale: float, add: np.ndarray) -> np.ndarray:
    """Whether ((total + scale Φ⁻¹((k + ½)/2⁵³))/m + add) is the released number, bit for bit, for some k."""
    near = ndtr(((released - add) * ROWS - total) / scale)
    found = np.zeros(released.shape, dtype=bool)
    for step in NEARBY:
        g = ndtri(np.clip((np.rint(near * 2.0**53 - 0.5) + step + 0.5) * 2.0**-53, 0, 1))
        found |= (total + scale * g) / ROWS + add == released
    return found


def by_residues(model: sp.Private, seen: Seen, losses_alone: bool = False) -> np.ndarray:
    """How much better the world with the record explains the last digits of every client: above 0 it was there."""
    at, (ridge, pull), scores = free(model, seen), public(seen), []
    for world in (0, 1):
        losses, gradients = exact(model, world, seen)
        score = (
            explained(np.stack(seen.losses), losses, model.loss_noise * model.loss_clip, ridge) & at
        ).sum(0)
        if not losses_alone:
            score = score + explained(
                np.stack(seen.gradients), gradients, model.noise * model.clip, pull
            ).sum((0, 2))
        scores.append(score.astype(np.float64))
    return scores[0] - scores[1]


def by_losses(model: sp.Private, seen: Seen) -> np.ndarray:
    """The same, from the losses alone."""
    return by_residues(model, seen, losses_alone=True)


def by_likelihood(model: sp.Private, seen: Seen) -> np.ndarray:
    """The logarithm of how much likelier a client's numbers are with the record: the best test against the noise."""
    at, (ridge, pull), score = free(model, seen), public(seen), 0.0
    for world, sign in ((0, -1), (1, 1)):
        losses, gradients = exact(model, world, seen)
        noise = ((np.stack(seen.gradients) - pull) * ROWS - gradients) / (model.noise * model.clip)
        loss_noise = ((np.stack(seen.losses) - ridge) * ROWS - losses) / (
            model.loss_noise * model.loss_clip
        )
        score = (
            score
            + sign
            * (np.square(noise).sum((0, 2)) + np.where(at, np.square(loss_noise), 0).sum(0))
            / 2
        )
    return np.asarray(score)


class Guesses(NamedTuple):
    """What an attack has learnt: its scores of clients with the record, and of clients without."""

    there: np.ndarray
    absent: np.ndarray

    @property
    def right(self) -> int:
        """How many guesses by the sign of the score are right; a score of 0 is no guess."""
        return int((self.there > 0).sum() + (self.absent < 0).sum())

    def epsilon(self, delta: float) -> float:
        """A lower bound on ε, whatever the mechanism is.

        (ε, δ) allows P(guess "there" | there) ≤ e^ε P(guess "there" | absent) + δ, and the same with the two exchanged.
        """
        right, wrong = self._shares(lambda right, wrong: (right - delta) / wrong)
        return float(max(0.0, np.log(max(right - delta, 1e-300) / wrong)))

    def sharper(self, delta: float) -> float:
        """A lower bound on ε at δ for a mechanism that claims to hide as much as Gaussian noise at *every* δ.

        Such a mechanism allows Φ⁻¹(P(guess | there)) − Φ⁻¹(P(guess | absent)) ≤ μ = Δ/σ, of which ε at δ follows.
        """
        right, wrong = self._shares(lambda right, wrong: ndtri(right) - ndtri(wrong))
        mu = float(ndtri(right) - ndtri(wrong))
        return epsilon({Release(1 / mu): 1}, delta) if mu > 0 else 0.0

    def _shares(self, gain: Any) -> tuple[float, float]:
        """How often a guess is right at least, and wrong at most, with a confidence of 0.999 (Clopper and Pearson).

        Half of the clients choose the threshold that gains most; the others are counted.
        """
        tuning, counted = [[s[::2] for s in self], [s[1::2] for s in self]]
        ways = [
            (t, way)
            for t in np.quantile(np.concatenate(tuning), np.linspace(0.02, 0.98, 49))
            for way in (1, -1)
        ]

        def bounds(scores: list[np.ndarray], threshold: float, way: int) -> tuple[float, float]:
            (a, n), (b, k) = (
                (int((way * s > way * threshold).sum()), len(s)) for s in scores[::way]
            )
            least = beta.ppf(0.0005, a, n - a + 1) if a else 0.0
            return float(least), float(beta.ppf(0.9995, b + 1, k - b)) if b < k else 1.0

        return bounds(counted, *max(ways, key=lambda way: gain(*bounds(tuning, *way))))


def in_floating_point(model: sp.Private, seen: Seen, clients: int, seed: int = 0) -> Seen:
    """The same run with Gaussian noise by Φ⁻¹ of 53 bits, added in floating point, as the package once did it."""
    random, (ridge, pull) = np.random.default_rng(seed), public(seen)
    (loss_0, c_0), (loss_1, c_1) = (exact(model, world, seen) for world in (0, 1))
    there = 2 * np.arange(clients) < clients

    def noised(shape: tuple[int, ...], scale: float) -> np.ndarray:
        return scale * ndtri((random.integers(0, 2**53, shape) + 0.5) * 2.0**-53)

    shape = len(seen.points), clients
    losses = np.where(there, loss_0, loss_1) + noised(shape, model.loss_noise * model.loss_clip)
    totals = np.where(there[:, None], c_0, c_1) + noised(
        (*shape, FEATURES), model.noise * model.clip
    )
    means = np.clip(losses / ROWS, 0, model.loss_clip)
    return Seen(seen.points, list(means + ridge), list(totals / ROWS + pull))


def judged(attack: Any, model: sp.Private, seen: Seen) -> Guesses:
    """Let an attack judge every client."""
    score = attack(model, seen)
    return Guesses(*np.split(score, [(len(score) + 1) // 2]))


def from_sums(noise: float, releases: int, colluding: int, helpers: int) -> Guesses:
    """What a server learns from sums with shared noise, where so many clients show it what they have added.

    The victim shares noise with three others. Every sum, at a point of its own, is one release and one guess.
    """
    rest = {
        "clip": 1.0,
        "loss_clip": 1.0,
        "smoothness": 1.0,
        "loss_noise": 1e6,
        "colluding": colluding,
    }
    scores = []
    for world, data in enumerate(worlds()):
        clients = {"victim": data, **{f"other {i}": worlds(seed=i)[1] for i in (1, 2, 3)}}
        made = sp.Cohort(clients, sp.Private(MODEL, noise=noise, secret=world, **rest))._oracle
        weights = torch.full((4,), 0.25, dtype=torch.float64)
        found = []
        for k in range(releases):
            x = torch.full((FEATURES,), 1e-3 * k, dtype=torch.float64)
            shared = made.shared(x, weights)
            known = made.sums.gradients(x, None)
            seen = shared.parts[: 4 - helpers].sum(0).double() - known[1 : 4 - helpers].sum(0)
            there, absent = (exact(UNITS, w, Seen([x], [], []))[1][0, 0] for w in (0, 1))
            middle = (there + absent) / 2
            way = there - absent
            found.append(float((seen.numpy() * made.clips[0].unit - middle) @ way))
        scores.append(np.array(found))
    return Guesses(*scores)


UNITS = sp.Private(MODEL, noise=1.0, clip=1.0, loss_clip=1.0, smoothness=1.0)
