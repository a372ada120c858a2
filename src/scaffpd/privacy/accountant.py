r"""What releases cost: (ε, δ) of Gaussian mechanisms, composed, with and without Poisson sampling.

A release is a sum over a client's records, each clipped to C, plus N(0, (zC)²): z is its noise multiplier, q the
probability with which a record takes part. Neighbouring data sets differ in one record, which is there or replaced by
nothing; the number of records is public. Releases over all records compose in closed form,

    1/σ² = Σ_k n_k/z_k²,    δ = Φ(1/(2σ) − εσ) − e^ε Φ(−1/(2σ) − εσ)

(Balle and Wang, "Improving the Gaussian mechanism for differential privacy", 2018). With Poisson samples among them the
privacy loss distributions of dp-accounting are composed, rounded so that ε is never too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from scaffpd.errors import InputError, not_installed
from scaffpd.federation import Vector

SAFE = 1 + 1e-9  # rounding in the closed form of the noise
GRID, FINEST, COARSEST = 0.03, 1e-4, 1e-3  # of privacy losses
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
    """What every client's answers have cost so far: they are (ε_i, δ)-differentially private for each of its records.

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
    """ε of all these releases together."""
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
        return float(dp.get_epsilon_gaussian(sum(n / release.noise**2 for release, n in made) ** -0.5, delta))
    return float(fresh(dict(made)).compose(event(dict(made))).get_epsilon(delta))


def event(releases: Releases) -> Any:
    """The same as dp-accounting describes it."""
    dp = accounting()

    def one(release: Release) -> Any:
        plain = dp.GaussianDpEvent(release.noise)
        return plain if release.rate == 1 else dp.PoissonSampledDpEvent(release.rate, plain)

    return dp.ComposedDpEvent([dp.SelfComposedDpEvent(one(release), n) for release, n in releases.items() if n > 0])


def fresh(releases: Releases) -> Any:
    """An accountant of privacy loss distributions for a record that is there or nothing.

    Its grid is a share of the smallest release's own privacy loss, about q/z: a finer one costs time and changes ε by
    less than a thousandth. ε is rounded up in any case.
    """
    dp = accounting()
    grid = min(max(GRID * min(release.rate / release.noise for release in releases), FINEST), COARSEST)
    return dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, grid)


def solved(make: Callable[[float], Releases], target: float, delta: float) -> float:
    """The smallest z for which the releases `make(z)` cost at most ε = `target`.

    Args:
        make: z → the releases; all noise in them is proportional to z.
        target: ε.
        delta: δ.
    """
    dp = accounting()
    unit = sum(n / release.noise**2 for release, n in make(1.0).items())
    if unit == 0:
        raise InputError("Nothing is released: there is no noise to solve for.")
    z = float(dp.get_sigma_gaussian(target, delta) * unit**0.5 * SAFE)
    if all(release.rate == 1 for release in make(1.0)):
        return z
    low: float = z  # sampling only helps: z is enough, and half of it is tried until it is not
    while epsilon(make(low), delta) <= target:
        low /= 2
    if low == z:
        return z
    bracket = dp.ExplicitBracketInterval(low, 2 * low)
    found = float(dp.calibrate_dp_mechanism(
        lambda: fresh(make(2 * low)), lambda z: event(make(z)), target, delta, bracket, tol=TOLERANCE * low
    ))  # fmt: skip
    while epsilon(make(found), delta) > target:  # on a grid of its own
        found *= 1 + TOLERANCE
    return found


def accounting() -> Any:
    """dp-accounting, or a sentence where it is not installed."""
    try:
        import dp_accounting
    except ModuleNotFoundError as error:
        raise not_installed("dp-accounting" if error.name == "dp_accounting" else str(error.name), "privacy") from None
    return dp_accounting


def of_clients(names: tuple[str, ...], releases: list[dict[Release, int]], delta: float) -> Spent:
    """What every client has spent."""
    return Spent(names, np.array([epsilon(own, delta) for own in releases]), delta)
