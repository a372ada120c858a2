r"""Privacy cost of releases: (ε, δ) of composed Gaussian mechanisms, and clients' accounts of them.

A release is a sum over a client's records, each clipped to C, plus N(0, (zC)²): z is its noise
multiplier. Neighbouring data sets differ in one record, which is present or replaced by nothing;
the number of records is public. Releases compose in closed form,

    1/σ² = Σ_k 1/z_k²,    δ = Φ(1/(2σ) − εσ) − e^ε Φ(−1/(2σ) − εσ)

(Balle and Wang, "Improving the Gaussian mechanism for differential privacy", 2018), which
dp-accounting solves for ε and for σ. So Σ 1/z² is all that an account has to add up.

What is drawn is the discrete Gaussian of `noise`, on a grid on which σ is a large whole number. Its
Rényi divergences are at most the continuous one's (Canonne, Kamath, Steinke, 2020), so that it has
ρ = 1/(2z²) concentrated privacy; the closed form above is sharper and holds for it up to the
following. A rounded continuous Gaussian costs no more than the continuous one, and its
probabilities are those of the discrete one times e^±η, η ≤ (1 + y²/σ²)/(24σ²) ≤ 67/σ² for
|y| ≤ 40σ. Over n releases of d numbers ε therefore grows by at most 2nd·67/σ². The noise that is
drawn is larger than z by 2⁻²⁰ of it, which lowers ε by at least 2⁻²⁰ε: that is more, as long as
nd ≤ 7·10⁻⁹ ε σ², or 8·10⁹ at ε = 1 and σ = 2³⁰; units are chosen so that σ is z 2⁴⁰ for clients of
up to 4,000 records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError, needed
from scaffpd.federation import Spent, Vector
from scaffpd.privacy.noise import MARK

SAFE = 1 + 1e-9  # the noise is solved for with so much to spare, because dp-accounting rounds


@lru_cache(maxsize=4096)
def epsilon(total: float, delta: float) -> float:
    """Return ε of releases with Σ 1/z² = total."""
    if total == 0:
        return 0.0
    dp = needed("dp_accounting", "dp-accounting", "privacy")
    return float(dp.get_epsilon_gaussian(total**-0.5, delta))


@lru_cache(maxsize=256)
def least_noise(budget: float, delta: float) -> float:
    """Return the smallest z of a single release that costs ε ≤ budget."""
    dp = needed("dp_accounting", "dp-accounting", "privacy")
    return float(dp.get_sigma_gaussian(budget, delta))


class ReleaseEntry(NamedTuple):
    """A question that a client answers."""

    client: int  # its number
    mark: bytes  # identifies the question
    noise: float  # z of every release
    times: int = 1  # number of releases; a longer plan of local steps contains the shorter one


@dataclass(eq=False, repr=False)
class Account:
    """Account of the releases of N clients."""

    names: Sequence[str]  # the clients
    delta: float  # δ
    budget: float | None  # the largest ε that a client may spend; `None` counts and never refuses
    # another account of the same releases, with a budget of its own: what either cannot afford,
    # neither counts
    wider: Account | None = None
    # everything that was answered, by its mark
    entries: dict[bytes, ReleaseEntry] = field(default_factory=dict, init=False)
    # the same in the order in which it was counted
    counted: list[ReleaseEntry] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.sums: Vector = np.zeros(len(self.names))  # Σ 1/z² of every client

    @property
    def total(self) -> int:
        return sum(entry.times for entry in self.entries.values())

    def charge(self, entries: Sequence[ReleaseEntry]) -> None:
        """Count what is new among the entries; refuse all if a client would exceed its budget."""
        accounts = [self] if self.wider is None else [self, self.wider]
        for account in accounts:
            account._afford(entries)
        for account in accounts:
            account.count(entries)

    def _after(self, entries: Sequence[ReleaseEntry]) -> Vector:
        """Return Σ 1/z² of every client with the new ones among the entries."""
        after = self.sums.copy()
        for entry in entries:
            more = entry.times - self._known(entry.mark)
            after[entry.client] += max(0, more) / entry.noise**2
        return after

    def _afford(self, entries: Sequence[ReleaseEntry]) -> None:
        if self.budget is None:
            return
        after = self._after(entries)
        # half of SAFE: the noise of a solved run has all of it, and sums are rounded
        most = (least_noise(float(self.budget), self.delta) * (1 + SAFE) / 2) ** -2
        beyond = (after > most) & (after > self.sums)
        if beyond.any():
            i = int(beyond.argmax())
            raise InputError(
                "privacy-budget",
                f"Client {self.names[i]!r} has a privacy budget of ε = {self.budget:g}, and this "
                f"answer would bring it to {epsilon(float(after[i]), self.delta):.4g}: it does not "
                "answer.",
            )

    def count(self, entries: Sequence[ReleaseEntry]) -> None:
        """Count what is new among the entries, whatever the budget: it was released before."""
        self.sums = self._after(entries)
        new = [entry for entry in entries if entry.times > self._known(entry.mark)]
        self.entries |= {entry.mark: entry for entry in new}
        self.counted += new

    def _known(self, mark: bytes) -> int:
        return self.entries[mark].times if mark in self.entries else 0

    def spent(self) -> Spent:
        each = np.array([epsilon(float(own), self.delta) for own in self.sums])
        return Spent(tuple(self.names), each, self.delta)

    def pack(self) -> dict[str, NDArray[np.generic]]:
        entries = list(self.entries.values())
        marks = np.frombuffer(b"".join(entry.mark for entry in entries), dtype=np.uint8)
        return {
            "privacy.marks": marks.reshape(-1, MARK),
            "privacy.clients": np.array([entry.client for entry in entries], dtype=np.int64),
            "privacy.noise": np.array([entry.noise for entry in entries], dtype=np.float64),
            "privacy.times": np.array([entry.times for entry in entries], dtype=np.int64),
        }

    def merge(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Add what an earlier part of the run has released; what both have answered counts once."""
        names = ("clients", "marks", "noise", "times")
        rows = zip(*(arrays[f"privacy.{name}"] for name in names), strict=True)
        self.count([ReleaseEntry(int(i), m.tobytes(), float(z), int(n)) for i, m, z, n in rows])
