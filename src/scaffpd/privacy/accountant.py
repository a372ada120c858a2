r"""Privacy cost of releases: (ε, δ) of Gaussian mechanisms, composed, and every client's account of them.

A release is a sum over a client's records, each clipped to C, plus N(0, (zC)²): z is its noise multiplier, q the
probability with which a record takes part. Neighbouring data sets differ in one record, which is there or replaced by
nothing; the number of records is public. Releases over all records compose in closed form,

    1/σ² = Σ_k n_k/z_k²,    δ = Φ(1/(2σ) − εσ) − e^ε Φ(−1/(2σ) − εσ)

(Balle and Wang, "Improving the Gaussian mechanism for differential privacy", 2018). With Poisson samples among them the
privacy loss distributions of dp-accounting are composed, rounded so that ε is never too small.

What is drawn is the discrete Gaussian of `noise`, on a grid on which σ is a large whole number. Its Rényi divergences
are at most the continuous one's (Canonne, Kamath, Steinke, 2020), so that it has ρ = 1/(2z²) concentrated privacy;
the closed form above is sharper and holds for it up to the following. A rounded continuous Gaussian costs no more than
the continuous one, and its probabilities are those of the discrete one times e^±η, η ≤ (1 + y²/σ²)/(24σ²) ≤ 67/σ² for
|y| ≤ 40σ. Over n releases of d numbers ε therefore grows by at most 2nd·67/σ². The noise that is drawn is larger than z
by 2⁻²⁰ of it, which lowers ε by at least 2⁻²⁰ε: that is more, as long as nd ≤ 7·10⁻⁹ ε σ², or 8·10⁹ at ε = 1 and
σ = 2³⁰; units are chosen so that σ is z 2⁴⁰ for clients of up to 4,000 records.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError, not_installed
from scaffpd.federation import Vector
from scaffpd.privacy.noise import MARK

SAFE = 1 + 1e-9  # rounding in the closed form of the noise
# of privacy losses
GRID = 0.03
FINEST = 1e-4
COARSEST = 1e-3
TOLERANCE = 1e-4  # to which the noise is found where there is no closed form, as a share of it


class Release(NamedTuple):
    """One kind of release.

    Attributes:
        noise: z, the standard deviation of the noise over the sensitivity.
        rate: q, with which a record takes part.
    """

    noise: float
    rate: float = 1.0


Releases = Mapping[Release, int]  # how many of each


@dataclass(frozen=True)
class Spent:
    """Privacy cost of every client's answers so far: they are (ε_i, δ)-differentially private for each of its records.

    Attributes:
        names: the clients.
        epsilon: ε_i.
        delta: δ, the same for all.
    """

    names: tuple[str, ...]
    epsilon: Vector
    delta: float

    @property
    def worst(self) -> float:
        """The largest ε_i."""
        return float(self.epsilon.max())

    def __str__(self) -> str:
        worst = f"{self.worst:.2f}" if math.isfinite(self.worst) else "∞"
        return f"(ε, δ) = ({worst}, {self.delta:g})"


def epsilon(releases: Releases, delta: float) -> float:
    """Return ε of all these releases together."""
    made = tuple(sorted((release, n) for release, n in releases.items() if n > 0))
    return _epsilon(made, delta)


@lru_cache(maxsize=4096)
def _epsilon(made: tuple[tuple[Release, int], ...], delta: float) -> float:
    if not made:
        return 0.0
    if any(release.noise == 0 for release, _ in made):
        return math.inf
    dp = accounting()
    if all(release.rate == 1 for release, _ in made):
        return float(
            dp.get_epsilon_gaussian(sum(n / release.noise**2 for release, n in made) ** -0.5, delta)
        )
    return float(fresh(dict(made)).compose(event(dict(made))).get_epsilon(delta))


@lru_cache(maxsize=256)
def _room(budget: float, delta: float) -> float:
    """Return the largest Σ n/z² of releases over all records that costs ε ≤ `budget`, half of SAFE below it."""
    return float((accounting().get_sigma_gaussian(budget, delta) * (1 + SAFE) / 2) ** -2)


def event(releases: Releases) -> Any:
    """Describe releases to dp-accounting."""
    dp = accounting()

    def one(release: Release) -> Any:
        plain = dp.GaussianDpEvent(release.noise)
        return plain if release.rate == 1 else dp.PoissonSampledDpEvent(release.rate, plain)

    return dp.ComposedDpEvent(
        [dp.SelfComposedDpEvent(one(release), n) for release, n in releases.items() if n > 0]
    )


def fresh(releases: Releases) -> Any:
    """Make an accountant of privacy loss distributions for a record that is there or nothing.

    Its grid is a share of the smallest release's own privacy loss, about q/z: a finer one costs time and changes ε by
    less than a thousandth. ε is rounded up in any case.
    """
    dp = accounting()
    grid = min(
        max(GRID * min(release.rate / release.noise for release in releases), FINEST), COARSEST
    )
    return dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, grid)


def solved(make: Callable[[float], Releases], target: float, delta: float) -> float:
    """Find the smallest z for which the releases `make(z)`, all noise in them proportional to z, cost ε ≤ `target`."""
    dp = accounting()
    unit = sum(n / release.noise**2 for release, n in make(1.0).items())
    if unit == 0:
        raise InputError(
            "nothing-released-noise", "Nothing is released: there is no noise to solve for."
        )
    z = float(dp.get_sigma_gaussian(target, delta) * unit**0.5 * SAFE)
    if all(release.rate == 1 for release in make(1.0)):
        return z
    low: float = z  # sampling only helps: z is enough, and half of it is tried until it is not
    while epsilon(make(low), delta) <= target:
        low /= 2
    if low == z:
        return z
    bracket = dp.ExplicitBracketInterval(low, 2 * low)
    found = float(
        dp.calibrate_dp_mechanism(
            lambda: fresh(make(2 * low)),
            lambda z: event(make(z)),
            target,
            delta,
            bracket,
            tol=TOLERANCE * low,
        )
    )
    while epsilon(make(found), delta) > target:  # on a grid of its own
        found *= 1 + TOLERANCE
    return found


def accounting() -> Any:
    """Import dp-accounting."""
    try:
        import dp_accounting
    except ModuleNotFoundError as error:
        raise not_installed(
            "dp-accounting" if error.name == "dp_accounting" else str(error.name), "privacy"
        ) from None
    return dp_accounting


AHEAD = (1.0, 1 / 4, 1 / 16)  # by which shares more releases are looked at, so that few have to be
Arrays = dict[str, NDArray[Any]]


class ReleaseEntry(NamedTuple):
    """A question that a client answers."""

    client: int  # its number
    mark: bytes  # of the question
    release: Release  # what kind of release it is
    times: int = 1  # how many of them; a longer plan of local steps contains the shorter one


@dataclass(eq=False, repr=False)
class Account:
    """Account of the releases of N clients."""

    names: Sequence[str]  # the clients
    delta: float  # δ
    budget: float | None  # the largest ε that a client may spend; `None` counts and never refuses
    # an account of more than this one, which counts the same releases and has a budget of its own. What either cannot
    # afford, neither counts.
    wider: Account | None = None
    entries: dict[bytes, ReleaseEntry] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.releases: list[Counter[Release]] = [Counter() for _ in self.names]
        self._fits: list[dict[Release, int]] = [{} for _ in self.names]
        self._exceeds: list[dict[Release, int]] = [{} for _ in self.names]

    @property
    def total(self) -> int:
        """Number of releases so far."""
        return sum(own.total() for own in self.releases)

    def charge(self, entries: Sequence[ReleaseEntry]) -> None:
        """Count what is new among the entries; refuse all of them if a client would exceed its budget."""
        accounts = [self] if self.wider is None else [self, self.wider]
        for account, after in [(account, account._afforded(entries)) for account in accounts]:
            account._count(entries, after)

    def _afforded(self, entries: Sequence[ReleaseEntry]) -> dict[int, Counter[Release]]:
        """Return all releases of the clients that would have new ones, or refuse."""
        after = self._after(entries)
        for client, own in after.items():
            if self.budget is not None and not self._affordable(client, own):
                raise InputError(
                    "client-privacy-budget",
                    f"Client {self.names[client]!r} has a privacy budget of ε = {self.budget:g}, and this answer would "
                    f"bring it to {epsilon(own, self.delta):.4g}: it does not answer.",
                )
        return after

    def _after(self, entries: Sequence[ReleaseEntry]) -> dict[int, Counter[Release]]:
        """Return all releases of the clients that would have new ones."""
        after: dict[int, Counter[Release]] = {}
        for entry in entries:
            if (more := entry.times - self._known(entry.mark)) > 0:
                after.setdefault(entry.client, self.releases[entry.client].copy())[
                    entry.release
                ] += more
        return after

    def _count(self, entries: Sequence[ReleaseEntry], after: dict[int, Counter[Release]]) -> None:
        for client, own in after.items():
            self.releases[client] = own
        self.entries |= {
            entry.mark: entry for entry in entries if entry.times > self._known(entry.mark)
        }

    def _known(self, mark: bytes) -> int:
        return self.entries[mark].times if mark in self.entries else 0

    def _affordable(self, client: int, own: dict[Release, int]) -> bool:
        """Check ε against the budget, for more releases than these first: those then need no further check.

        Without samples among them Σ n/z² says all, and has a limit that is known.
        """
        if all(release.rate == 1 for release in own):
            spent = sum(n / max(release.noise, 1e-150) ** 2 for release, n in own.items())
            return spent <= _room(float(self.budget or 0), self.delta)
        fits = self._fits[client]
        exceeds = self._exceeds[client]
        if fits and all(n <= fits.get(release, 0) for release, n in own.items()):
            return True
        for share in (*AHEAD, 0.0):
            more = {release: math.ceil((1 + share) * n) for release, n in own.items()}
            if exceeds and all(more.get(release, 0) >= n for release, n in exceeds.items()):
                continue
            if epsilon(more, self.delta) <= float(self.budget or 0):
                self._fits[client] = more
                return True
            self._exceeds[client] = exceeds = more
        return False

    def spent(self) -> Spent:
        """Return what every client has spent."""
        return Spent(
            tuple(self.names),
            np.array([epsilon(own, self.delta) for own in self.releases]),
            self.delta,
        )

    def pack(self) -> Arrays:
        """Return every entry as arrays, for a checkpoint."""
        entries = list(self.entries.values())
        marks = np.frombuffer(b"".join(entry.mark for entry in entries), dtype=np.uint8)
        return {
            "privacy.marks": marks.reshape(-1, MARK),
            "privacy.clients": np.array([entry.client for entry in entries], dtype=np.int64),
            "privacy.releases": np.array(
                [entry.release for entry in entries], dtype=np.float64
            ).reshape(-1, 2),
            "privacy.times": np.array([entry.times for entry in entries], dtype=np.int64),
        }

    def merge(self, arrays: Arrays) -> None:
        """Add what an earlier part of the run has released; questions that both have answered count once."""
        columns = [arrays[f"privacy.{name}"] for name in ("clients", "marks", "releases", "times")]
        entries = [
            ReleaseEntry(
                int(client), mark.tobytes(), Release(float(noise), float(rate)), int(times)
            )
            for client, mark, (noise, rate), times in zip(*columns, strict=True)
        ]
        self._count(entries, self._after(entries))


COUNTED = ("gradients", "losses", "sampled_gradients", "sampled_losses")


@dataclass(frozen=True)
class ReleaseCounts:
    """The most releases of a client.

    Attributes:
        gradients: over all of its records.
        losses: over all of them.
        sampled_gradients: over Poisson samples, local steps among them.
        sampled_losses: over Poisson samples.
        batch_size: b, of the samples; `None` where there are none.
    """

    gradients: int = 0
    losses: int = 0
    sampled_gradients: int = 0
    sampled_losses: int = 0
    batch_size: int | None = None

    @classmethod
    def over(cls, batch_size: int | None, gradients: int = 0, losses: int = 0) -> ReleaseCounts:
        """Count so many over samples of b records, or over all records where b is `None`."""
        if batch_size is None:
            return cls(gradients, losses)
        return cls(sampled_gradients=gradients, sampled_losses=losses, batch_size=batch_size)

    @classmethod
    def points(cls, n: int, batch_size: int | None = None) -> ReleaseCounts:
        """Count losses and gradients at n points."""
        return cls.over(batch_size, n, n)

    def __add__(self, other: ReleaseCounts) -> ReleaseCounts:
        """Add up two plans that share one budget."""
        if None not in (self.batch_size, other.batch_size) and self.batch_size != other.batch_size:
            raise InputError(
                "batches-rows-share",
                f"Batches of {self.batch_size} and of {other.batch_size} rows do not share one budget.",
            )
        sums = {name: getattr(self, name) + getattr(other, name) for name in COUNTED}
        return ReleaseCounts(**sums, batch_size=self.batch_size or other.batch_size)

    def releases(self, noise: float, loss_noise: float, samples: int | None) -> dict[Release, int]:
        """Return the releases of a client of m_i records with these noise multipliers."""
        rate = (
            1.0
            if self.batch_size is None or samples is None
            else min(1.0, self.batch_size / samples)
        )
        counts: Counter[Release] = Counter()
        counts[Release(noise)] += self.gradients
        counts[Release(noise, rate)] += self.sampled_gradients
        counts[Release(loss_noise)] += self.losses
        counts[Release(loss_noise, rate)] += self.sampled_losses
        return {release: n for release, n in counts.items() if n}
