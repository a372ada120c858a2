r"""Counts of rows between edges, with noise: what thresholds of curves come from where ε is spent.

A record lies in one cell of each of C columns, so that it moves all counts together by √C at most,
whatever the edges. Every client adds noise to its own counts before they leave it,

    n_c + N_ℤ(0, (z√C)²)   for every cell c of all columns,

a release with the noise multiplier z (`accountant`), in whole units of 2⁻²⁴ rows. K of them are
made, for edges of one digit and of two, and they get a share of the budget: K/z² = share · Σ 1/z².
How many clients have rows in a cell is not released. What is computed from sums of these counts
costs nothing. In a sum over N clients the noise of a cell has the deviation s = z√(CN): cells of
one digit below 4s are taken for empty, and a cell between thresholds has 4s rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.curves import LEAST_ROWS, Limits, Matrix, Total, counted
from scaffpd.privacy.accountant import SAFE, ReleaseEntry, least_noise
from scaffpd.privacy.mechanism import SPARE
from scaffpd.privacy.noise import PrivateQuestion, client_key, digest, discrete_gaussians

SHARE = 0.1  # of the budget
SUMS = 2  # K
MOST = 7  # thresholds of a column: every step makes rows longer, and gradients noisier
BITS = 24  # of a row
CLEAR = 4.0  # deviations of noise that a count must exceed


def spent_on_counts(epsilon: float, delta: float) -> float:
    """Return Σ 1/z² of the thresholds of curves."""
    return float(SHARE * (least_noise(float(epsilon), float(delta)) * SAFE) ** -2)


@dataclass(frozen=True)
class CountNoise:
    """How noisy counts are: z, and the number of columns and of clients."""

    z: float
    columns: int
    clients: int

    @classmethod
    def of(cls, epsilon: float, delta: float, columns: int, clients: int) -> CountNoise:
        """Spend the share of a budget that thresholds have."""
        return cls((SUMS / spent_on_counts(epsilon, delta)) ** 0.5, columns, clients)

    @property
    def sigma(self) -> int:
        """Deviation of the noise of a client's cell, in units."""
        return math.ceil(math.ldexp(self.z * math.sqrt(self.columns) * SPARE, BITS))

    @property
    def clear(self) -> float:
        """Rows that a cell must have in a sum over all clients to be seen."""
        return CLEAR * self.z * math.sqrt(self.columns * self.clients)

    @property
    def limits(self) -> Limits:
        """What thresholds are chosen by."""
        return Limits(max(LEAST_ROWS, self.clear), 0, MOST, SUMS, self.clear)

    def read(self, total: NDArray[np.float64] | NDArray[np.int64]) -> Matrix:
        """Return rows in every cell from a sum over clients, in units; no clients are known."""
        rows = np.ldexp(total.astype(np.float64), -BITS)
        return np.stack([rows, np.zeros(len(rows))])


@dataclass(eq=False)
class PrivateCounts:
    """One client's counts; the same question has the same noise, and is one release."""

    columns: Sequence[Matrix] = field(repr=False)  # its numbers, sorted, without gaps
    noise: CountNoise  # how much
    secret: bytes = field(repr=False)  # what noise is drawn from
    name: str  # of the client
    number: int = 0  # its place in the account
    releases: list[ReleaseEntry] = field(default_factory=list, init=False)  # what it has answered

    def __post_init__(self) -> None:
        rows = [np.ascontiguousarray(own).tobytes() for own in self.columns]
        self._key = client_key(self.secret, self.name, "counts", repr(self.noise), digest(*rows))

    def __call__(self, edges: Sequence[Matrix]) -> NDArray[np.int64]:
        """Return rows in every cell with noise, in units: one release."""
        content = digest("counts", *(np.ascontiguousarray(own).tobytes() for own in edges))
        question = PrivateQuestion(self._key, content)
        rows = counted(self.columns, edges)[0].astype(np.int64)
        entry = ReleaseEntry(self.number, question.mark, self.noise.z)
        self.releases += [] if entry in self.releases else [entry]
        drawn = discrete_gaussians(question.noise, self.noise.sigma, len(rows))
        found: NDArray[np.int64] = rows * 2**BITS + drawn
        return found


@dataclass(eq=False)
class PrivateCounting:
    """Counts of clients in one process, each with its own noise, within a share of (ε, δ)."""

    epsilon: float
    delta: float
    secret: bytes = field(repr=False)
    clients: list[PrivateCounts] = field(default_factory=list, init=False, repr=False)

    def __call__(
        self, names: Sequence[str], columns: Sequence[Sequence[Matrix]]
    ) -> tuple[Total, Limits]:
        """Return how to add up what clients count, and what thresholds are chosen by."""
        noise = CountNoise.of(self.epsilon, self.delta, len(columns[0]), len(names))
        rows = enumerate(zip(names, columns, strict=True))
        self.clients = [PrivateCounts(own, noise, self.secret, name, i) for i, (name, own) in rows]

        def total(edges: Sequence[Matrix]) -> Matrix:
            return noise.read(np.sum([client(edges) for client in self.clients], axis=0))

        return total, noise.limits

    @property
    def releases(self) -> list[ReleaseEntry]:
        return [entry for client in self.clients for entry in client.releases]
