"""Attacks on noise: tell from released numbers alone at which clients one record was present.

The attacker is the server of an honest run. It knows every other record, the model and all
settings, and asks of two worlds, with the record and with nothing in its place, which one explains
the numbers that a client has released.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from scipy.stats import beta

import scaffpd as sp
from scaffpd.privacy.accountant import epsilon

ROWS = 12
FEATURES = 3
L2 = 0.01
NEARBY = np.arange(-40.0, 41.0)  # numbers of the uniform grid around the one that fits best
MODEL = sp.Linear("squared", l2=L2)
CLIPS = {"clip": 1.0, "loss_clip": 1.0, "smoothness": 1.0}
STEPS = sp.Fixed(tau=0.05, sigma=0.1, theta=0.0, local_rate=0.05)
METHOD = sp.ScaffPD(sp.ChiSquare(rho=1.0), local_steps=1, steps=STEPS)
DOUBT = 1e-6  # probability with which a bound on a rate of guesses is wrong


class Seen(NamedTuple):
    """What the server has seen: R points, and what N clients have released there, (R, N) and (R, N,
    d)."""

    points: list[torch.Tensor]
    losses: list[np.ndarray]
    gradients: list[np.ndarray]


class Watched:
    """A model whose oracle passes on every answer to whoever watches."""

    def __init__(self, model):
        self.model = model
        self.seen = Seen([], [], [])

    def oracle(self, *given):
        self.inner = self.model.oracle(*given)
        return self

    def __getattr__(self, name):
        return getattr(self.__dict__.get("inner", self.model), name)

    def evaluate(self, x, batch_size, key):
        at = self.inner.evaluate(x, batch_size, key)
        answer = x.clone(), at.losses.numpy(), at.each().numpy()
        for notes, found in zip(self.seen, answer, strict=True):
            notes.append(found)
        return at


def worlds(seed=0):
    """A client's rows with the record, and with nothing in its place: a row of zeros adds nothing
    to any sum."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(ROWS, FEATURES))
    y = 0.1 * random.normal(size=ROWS)
    X[0] = 3.0
    y[0] = 9.0
    absent = X.copy(), y.copy()
    absent[0][0] = 0.0
    absent[1][0] = 0.0
    return [(X, y), absent]


def private(epsilon, rounds, weaker=1.0):
    """Clients with the noise that ε needs, or with so many times less than that, which an audit has
    to notice."""
    solved = sp.Private.solved(MODEL, epsilon, METHOD, rounds, **CLIPS)
    noise = {"noise": solved.noise / weaker, "loss_noise": solved.loss_noise / weaker}
    return sp.Private(MODEL, secret=0, **noise, **CLIPS)


def watched(model, clients, rounds):
    """Train honestly, and return what the server has seen; the first half of the clients has the
    record."""
    present, absent = worlds()
    data = {f"client {i}": present if 2 * i < clients else absent for i in range(clients)}
    watching = Watched(model)
    sp.train(METHOD, sp.Cohort(data, watching), rounds=rounds, progress=False)
    return watching.seen


SUMS = [sp.Cohort({"a": w}, sp.Private(MODEL, secret=0, **CLIPS))._oracle for w in worlds()]


def exact(world, points):
    """A client's clipped sums, as the attacker computes them: losses (R, 1), and gradients (R, 1,
    d)."""
    made = SUMS[world]
    losses = np.stack([made.sums.losses(x).numpy() for x in points]) * made.clips[1].unit
    gradients = np.stack([made.sums.gradients(x).numpy() for x in points]) * made.clips[0].unit
    return losses, gradients


def public(seen):
    """The regulariser's part of losses, (R, 1), and of gradients, (R, 1, d)."""
    losses = [[float(L2 / 2 * (x @ x))] for x in seen.points]
    return np.array(losses), np.stack([L2 * x.numpy()[None] for x in seen.points])


def free(seen):
    """Which losses are not cut off at 0 or B, (R, N)."""
    mean = np.stack(seen.losses) - public(seen)[0]
    return (mean > 1e-9) & (mean < CLIPS["loss_clip"] - 1e-9)


def explained(released, total, scale, add):
    """Whether ((total + scale Φ⁻¹((k + ½)/2⁵³))/m + add) is the released number, bit for bit, for
    some k."""
    near = ndtr(((released - add) * ROWS - total) / scale)
    found = np.zeros(released.shape, dtype=bool)
    for step in NEARBY:
        g = ndtri(np.clip((np.rint(near * 2.0**53 - 0.5) + step + 0.5) * 2.0**-53, 0, 1))
        found |= (total + scale * g) / ROWS + add == released
    return found


def by_residues(model, seen, losses_alone=False):
    """How much better the world with the record explains the last digits of every client."""
    ridge, pull = public(seen)
    scores = []
    for world in (0, 1):
        losses, gradients = exact(world, seen.points)
        fits = explained(np.stack(seen.losses), losses, model.loss_noise, ridge) & free(seen)
        score = fits.sum(0)
        if not losses_alone:
            fits = explained(np.stack(seen.gradients), gradients, model.noise, pull)
            score = score + fits.sum((0, 2))
        scores.append(score.astype(np.float64))
    return scores[0] - scores[1]


def by_losses(model, seen):
    """The same, from the losses alone."""
    return by_residues(model, seen, losses_alone=True)


def by_likelihood(model, seen):
    """The logarithm of how much likelier a client's numbers are with the record: the best test
    against the noise."""
    ridge, pull = public(seen)
    score = 0.0
    for world, sign in ((0, -1), (1, 1)):
        losses, gradients = exact(world, seen.points)
        noise = ((np.stack(seen.gradients) - pull) * ROWS - gradients) / model.noise
        other = ((np.stack(seen.losses) - ridge) * ROWS - losses) / model.loss_noise
        squares = np.square(noise).sum((0, 2)) + np.where(free(seen), np.square(other), 0).sum(0)
        score = score + sign * squares / 2
    return score


class Guesses(NamedTuple):
    """Scores of clients with the record, and of clients without; above 0 the guess is "present".

    The threshold is fixed beforehand, so that all clients are counted, and bounds on the two rates
    of guesses are those of Clopper and Pearson: for any law of the scores each is wrong with
    probability `DOUBT` at most.
    """

    present: np.ndarray
    absent: np.ndarray

    @property
    def right(self):
        """How many guesses are right; a score of 0 is no guess."""
        return int((self.present > 0).sum() + (self.absent < 0).sum())

    def _rates(self):
        """How often "present" is guessed of clients with the record at least, and of the others at
        most."""
        (a, n), (b, k) = ((int((scores > 0).sum()), len(scores)) for scores in self)
        least = beta.ppf(DOUBT, a, n - a + 1) if a else 0.0
        most = beta.ppf(1 - DOUBT, b + 1, k - b) if b < k else 1.0
        return float(least), float(most)

    def epsilon(self, delta):
        """A lower bound on ε, whatever the mechanism is: P(guess | present) ≤ e^ε P(guess | absent)
        + δ."""
        right, wrong = self._rates()
        return float(max(0.0, np.log(max(right - delta, 1e-300) / wrong)))

    def shift(self):
        """A lower bound on μ for a mechanism that claims to hide as much as Gaussian noise N(0, 1)
        hides a shift μ.

        Such a mechanism allows Φ⁻¹(P(guess | present)) − Φ⁻¹(P(guess | absent)) ≤ μ.
        """
        right, wrong = self._rates()
        return max(0.0, float(ndtri(right) - ndtri(wrong)))

    def sharper(self, delta):
        """A lower bound on ε at δ for such a mechanism."""
        return epsilon(self.shift() ** 2, delta)


def in_floating_point(model, seen, clients, seed=0):
    """The same run with Gaussian noise by Φ⁻¹ of 53 bits, added in floating point, as the package
    once did it."""
    random = np.random.default_rng(seed)
    ridge, pull = public(seen)
    (loss_0, c_0), (loss_1, c_1) = (exact(world, seen.points) for world in (0, 1))
    present = 2 * np.arange(clients) < clients

    def noised(shape, scale):
        return scale * ndtri((random.integers(0, 2**53, shape) + 0.5) * 2.0**-53)

    shape = len(seen.points), clients
    losses = np.where(present, loss_0, loss_1) + noised(shape, model.loss_noise)
    totals = np.where(present[:, None], c_0, c_1) + noised((*shape, FEATURES), model.noise)
    means = np.clip(losses / ROWS, 0, CLIPS["loss_clip"])
    return Seen(seen.points, list(means + ridge), list(totals / ROWS + pull))


def judged(attack, model, seen):
    """Let an attack judge every client."""
    return Guesses(*np.split(attack(model, seen), 2))


def released_at(k):
    """The point of release k."""
    return torch.full((FEATURES,), 1e-3 * k, dtype=torch.float64)


@cache
def gradients_at(k):
    """The victim's gradient there with the record, and without."""
    return [exact(world, [released_at(k)])[1][0, 0] for world in (0, 1)]


def from_sums(noise, releases, colluding, helpers):
    """What a server learns from sums with shared noise, where so many clients show it what they
    have added.

    The victim shares noise with three others. Every sum, at a point of its own, is one release and
    one guess.
    """
    scores = []
    for world, data in enumerate(worlds()):
        clients = {"victim": data, **{f"other {i}": worlds(seed=i)[1] for i in (1, 2, 3)}}
        more = {"loss_noise": 1e6, "colluding": colluding, "secret": world}
        made = sp.Cohort(clients, sp.Private(MODEL, noise=noise, **more, **CLIPS))._oracle
        weights = torch.full((4,), 0.25, dtype=torch.float64)
        found = []
        for k in range(releases):
            x = released_at(k)
            shared = made.shared(x, weights)
            known = made.sums.gradients(x)
            seen = shared.parts[: 4 - helpers].sum(0).double() - known[1 : 4 - helpers].sum(0)
            present, absent = gradients_at(k)
            middle = seen.numpy() * made.clips[0].unit - (present + absent) / 2
            found.append(float(middle @ (present - absent)))
        scores.append(np.array(found))
    return Guesses(*scores)
