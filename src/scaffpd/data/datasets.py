r"""Tabular data sets: a synthetic one, those of scikit-learn, and stations in Beijing.

`synthetic` is the paper's problem (section "Results on Synthetic Datasets"; N=5, d=10, m=100), of
clients whose optimal x differ by δ_i, a concept shift:

    a_i^j ~ N(0, I),   x̂ ~ N(0, c² I),   δ_i ~ N(0, σ² I),   y_i^j = ⟨a_i^j, x̂ + δ_i⟩

Its μ is not part of the data: it is the model's `l2`. `breast_cancer` and `digits` are
scikit-learn's, cut into clients by label skew. `beijing_air` is part of the package
(`files/beijing_air/README.md` names its source and licence: CC BY 4.0, DOI 10.24432/C5RK5G).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from scaffpd.data.silos import (
    Labels,
    Matrix,
    Silos,
    checked_fraction,
    dirichlet,
    generator,
    held_out,
    packed,
    parted,
    standardised,
)
from scaffpd.errors import NOT_NEGATIVE, InputError, count, not_installed, ranged

Regression = tuple[NDArray[np.float64], NDArray[np.float64]]


def breast_cancer(
    clients: int = 10,
    alpha: float = 0.1,
    seed: int = 0,
    test_fraction: float = 0.0,
    minimum: int = 2,
) -> Silos:
    """Load Wisconsin breast cancer: 569 biopsies, 30 measurements, label 1 = benign; standardised.

    `clients`, `alpha`, `seed` and `minimum` (the fewest rows of a client, test rows included) go to
    `dirichlet`.
    """
    X, y, names = _bundled("load_breast_cancer")
    return _skewed(X, y, names, clients, alpha, seed, test_fraction, minimum)


def digits(
    clients: int = 10,
    alpha: float = 0.1,
    seed: int = 0,
    test_fraction: float = 0.0,
    minimum: int = 2,
) -> Silos:
    """Load handwritten digits: 1,797 pictures of 8×8 pixels, ten labels; standardised, times 2/√64.

    The factor makes ‖a‖ ≈ 2 for every picture a, so that the smoothness of a softmax loss is of
    order one. `clients`, `alpha`, `seed` and `minimum` (the fewest rows of a client, test rows
    included) go to `dirichlet`.
    """
    names = tuple(f"pixel {row},{column}" for row in range(8) for column in range(8))
    X, y, _ = _bundled("load_digits")
    return _skewed(X, y, names, clients, alpha, seed, test_fraction, minimum, 2 / np.sqrt(64))


def _bundled(loader: str) -> tuple[Matrix, Labels, tuple[str, ...]]:
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        raise not_installed("scikit-learn", "sklearn") from None
    found = getattr(datasets, loader)()
    return found.data, found.target.astype(np.int64), tuple(map(str, found.feature_names))


def _skewed(
    X: Matrix,
    y: Labels,
    features: tuple[str, ...],
    clients: int,
    alpha: float,
    seed: int,
    test_fraction: float,
    minimum: int,
    factor: float = 1.0,
) -> Silos:
    """Cut by label skew, hold out rows of every client, and standardise by the training rows."""
    fraction = checked_fraction("A data set", test_fraction)
    whole = [(X[rows], y[rows]) for rows in dirichlet(y, clients, alpha, seed, minimum)]
    random = np.random.default_rng([seed, 1])
    parts = parted(whole, [held_out(own, fraction, random) for _, own in whole])
    return standardised(tuple(f"client {i}" for i in range(clients)), parts, features, factor)


def synthetic(
    N: int = 5,
    d: int = 10,
    m: int = 100,
    c: float = 1.0,
    sigma: float = 0.1,
    seed: int = 0,
    scaling: float = 0.0,
    sizes: Sequence[int] | None = None,
) -> list[Regression]:
    """Draw (X, y) for each of N clients.

    Args:
        N: number of clients.
        d: number of features.
        m: samples per client; less than d makes every client rank-deficient.
        c: standard deviation of the common truth x̂.
        sigma: standard deviation of each client's own shift δ_i.
        seed: the same seed, the same data.
        scaling: after y is computed, column k is multiplied by 10^u_k with u_k uniform on
            (−scaling, scaling); the Hessians' condition number grows to about 10^(4·scaling).
        sizes: m_i per client, in place of `m`.
    """
    count("synthetic", "N", N)
    count("synthetic", "d", d)
    rows = [m] * N if sizes is None else list(sizes)
    if len(rows) != N:
        raise InputError("sizes-length", f"synthetic needs {N} sizes, got {len(rows)}.")
    for size in rows:
        count("synthetic", "m", size)
    for name, value in (("c", c), ("sigma", sigma), ("scaling", scaling)):
        ranged("synthetic", name, value, NOT_NEGATIVE, "spread-out-of-range")
    random = generator("synthetic", seed)
    truth = c * random.standard_normal(d)
    scale = 10 ** random.uniform(-scaling, scaling, d) if scaling else np.ones(d)
    clients = []
    for size in rows:
        X = random.standard_normal((size, d))
        clients.append((X * scale, X @ (truth + sigma * random.standard_normal(d))))
    return clients


WEATHER = (
    *("temperature", "coldest", "warmest", "pressure", "dew_point"),
    *("rain", "wind", "strongest_wind", "northerly"),
)
MADE = ("season_sine", "season_cosine", "weekend", "log_rain", "calm", "dryness")
# three years before that day to train on, the year from it on to test on
STATIONS = 12
TEST_YEAR = "2016-03-01"


def beijing_air(new: int = 0, days: int = 40, seed: int = 0) -> Silos:
    r"""Load 12 air-quality stations in Beijing: predict a day's fine dust (PM2.5) from its weather.

    The target is log(1 + PM2.5 in µg/m³) less its mean over the training rows. Train on 2013-03-01
    to 2016-02-29 (about 1,090 days a station), test on the following year. 15 columns, standardised
    by the training rows: nine of the day's weather, sine and cosine of the season, weekend,
    log(1 + rain), calm (wind below 1 m/s) and dryness (dew point less temperature). Days without
    PM2.5 are left out.

    Daily means of S. Chen (2017), Beijing Multi-Site Air Quality, UCI Machine Learning Repository,
    DOI 10.24432/C5RK5G, CC BY 4.0.

    Args:
        new: number of new stations with few days to train on; `seed` draws which ones.
        days: number of days of a new station, drawn from the three years.
        seed: the same seed, the same stations and days.
    """
    random = generator("beijing_air", seed)
    few = count("beijing_air", "days", days)
    if new not in range(STATIONS + 1):
        raise InputError(
            "no-such-stations", f"beijing_air has {STATIONS} stations, got new={new!r}."
        )
    stations, dates, X, y = _daily()
    names = tuple(np.unique(stations).tolist())
    early = dates < np.datetime64(TEST_YEAR)
    chosen = random.choice(len(names), int(new), replace=False)
    train, test = (
        [np.flatnonzero((stations == name) & part) for name in names] for part in (early, ~early)
    )
    for k in sorted(chosen):
        train[k] = np.sort(random.permutation(train[k])[:few])
    parts = [[(X[r], y[r]) for r in part] for part in (train, test)]
    return standardised(names, parts, (*WEATHER, *MADE), centred=True)


@cache
def _daily() -> tuple[NDArray[np.str_], NDArray[np.datetime64], Matrix, Matrix]:
    """Return station, date, columns and target of every day with PM2.5."""
    rows = [row for row in packed("beijing_air", "daily") if row["pm25"]]
    dates = np.array([row["date"] for row in rows], dtype="datetime64[D]")
    weather = {name: np.array([float(row[name]) for row in rows]) for name in WEATHER}
    day = (dates - dates.astype("datetime64[Y]")).astype(np.float64) + 1
    made = (
        np.sin(2 * np.pi * day / 365.25),
        np.cos(2 * np.pi * day / 365.25),
        (dates.astype(np.int64) + 3) % 7 >= 5,  # day 0 is Thursday, 1970-01-01
        np.log1p(weather["rain"]),
        weather["wind"] < 1,
        weather["dew_point"] - weather["temperature"],
    )
    pm25 = np.array([float(row["pm25"]) for row in rows])
    X = np.column_stack([*weather.values(), *made]).astype(np.float64)
    return np.array([row["station"] for row in rows]), dates, X, np.log1p(pm25)
