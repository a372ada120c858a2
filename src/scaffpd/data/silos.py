"""What every tabular data set returns, and shared code: seeds, splits, scales.

Columns are scaled as a federation could scale them: each client sends its n, Σ x and Σ (x − mean)²
per column, the sums are added, and no client sees another's rows.

Cut one data set into clients whose labels differ.
"""

from __future__ import annotations

import csv
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.errors import BELOW_ONE, InputError, count, positive, ranged

Indices = NDArray[np.int64]
DRAWS = 10_000


def packed(folder: str, name: str) -> list[dict[str, str]]:
    file = resources.files("scaffpd.data") / "files" / folder / f"{name}.csv.xz"
    return list(csv.DictReader(lzma.decompress(file.read_bytes()).decode().splitlines()))


def is_missing(value: object) -> bool:
    """Return whether a value is None, NaN, NaT or pandas.NA."""
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas.NA is neither
        return True
    except ValueError:
        return False


def dirichlet(
    y: ArrayLike, clients: int, alpha: float, seed: int = 0, minimum: int = 2
) -> list[Indices]:
    r"""Skew labels: client i gets the share q_{k,i} of label k, with q_k ~ Dirichlet(α, …, α).

    Small α gives every client few labels, large α gives all of them the same mixture. Shares are
    drawn again until every client has at least `minimum` samples; every sample goes to exactly one
    client.

    Args:
        y: the labels of the samples, of any type that can be sorted.
        clients: number N of clients.
        alpha: concentration α > 0.
        seed: the same seed, the same partition.
        minimum: fewest samples of a client.

    Returns:
        The row numbers of each client, ascending.
    """
    # as objects: NumPy would make text of ["a", 1] and of ["a", nan]
    labels = np.asarray(y if hasattr(y, "dtype") else np.array(y, dtype=object))
    if labels.ndim != 1 or any(map(is_missing, labels.tolist())):
        raise InputError("labels-shape", "dirichlet needs a vector with a label for every sample.")
    if count("dirichlet", "clients", clients) * count("dirichlet", "minimum", minimum) > len(
        labels
    ):
        raise InputError(
            "too-few-samples",
            f"dirichlet cannot give {clients} clients {minimum} of {len(labels)} samples each.",
        )
    positive("dirichlet", "alpha", alpha)
    random = generator("dirichlet", seed)
    members = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    sizes = np.array([len(rows) for rows in members])
    for _ in range(DRAWS):
        shares = random.dirichlet(np.full(clients, alpha), size=len(sizes))
        cuts = np.rint(np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
        if np.diff(cuts, axis=1, prepend=0, append=sizes[:, None]).sum(0).min() >= minimum:
            pieces = [np.split(rows, cut) for rows, cut in zip(members, cuts, strict=True)]
            return [np.sort(np.concatenate([piece[i] for piece in pieces])) for i in range(clients)]
    raise InputError(
        "no-partition",
        f"dirichlet found no partition in {DRAWS} draws that gives each of {clients} clients "
        f"{minimum} samples with alpha={alpha:g}; raise alpha, or lower clients or minimum.",
    )


def generator(owner: str, seed: int) -> np.random.Generator:
    """Return a generator of random numbers that the seed, a whole number from zero on, fixes."""
    whole = hasattr(seed, "__index__") and not isinstance(seed, (bool, np.bool_))
    if not whole or np.ndim(seed) or int(seed) < 0:
        raise InputError(
            "seed-out-of-range", f"{owner} needs a whole number seed >= 0, got {seed!r}."
        )
    return np.random.default_rng(int(seed))


Matrix = NDArray[np.float64]
Labels = NDArray[np.int64]
Client = tuple[Matrix, NDArray[Any]]  # y: labels, or numbers


@dataclass(frozen=True)
class Silos:
    """Problem whose rows belong to N clients.

    Attributes:
        names: the clients.
        train: per client (X, y) with X of shape (m_i, d) and y: integer labels counted from zero,
            or numbers for regression.
        test: the same for held-out rows; an empty list without any.
        features: the names of the d columns.
    """

    names: tuple[str, ...]
    train: list[Client] = field(repr=False)
    test: list[Client] = field(repr=False)
    features: tuple[str, ...] = field(repr=False)


def standardised(
    names: tuple[str, ...],
    parts: Sequence[Sequence[Client]],
    features: tuple[str, ...],
    factor: float = 1.0,
    centred: bool = False,
) -> Silos:
    """Scale columns by the training rows of all silos; `centred` subtracts the target's mean.

    `parts` are training and held-out rows, or training rows alone.
    """
    mean, deviation = standardiser([X for X, _ in parts[0]])
    centre = float(np.concatenate([y for _, y in parts[0]]).mean()) if centred else 0
    scaled = [[((X - mean) / deviation * factor, y - centre) for X, y in part] for part in parts]
    return Silos(names, scaled[0], scaled[1] if len(scaled) > 1 else [], features)


def held_out(y: Labels, fraction: float, random: np.random.Generator) -> NDArray[np.bool_]:
    """Choose a client's rows to hold out: round(fraction · count) of every label, at least one."""
    chosen = np.zeros(len(y), dtype=bool)
    if fraction == 0:
        return chosen
    if len(y) < 2:
        raise InputError(
            "client-of-one-row",
            "A client with a single row cannot be split; use test_fraction=0 or fewer clients.",
        )
    labels, counts = np.unique(y, return_counts=True)
    for label, number in zip(labels, counts, strict=True):
        rows = random.permutation(np.flatnonzero(y == label))
        chosen[rows[: round(fraction * int(number))]] = True
    if not chosen.any():
        chosen[random.choice(np.flatnonzero(y == labels[counts.argmax()]))] = True
    if chosen.all():
        chosen[random.choice(np.flatnonzero(y == labels[counts.argmax()]))] = False
    return chosen


def parted(clients: Sequence[Client], held: Sequence[NDArray[np.bool_]]) -> list[list[Client]]:
    """Return all clients' training rows and, if there are any, the rows held out."""
    pairs = list(zip(clients, held, strict=True))
    train = [(X[~out], y[~out]) for (X, y), out in pairs]
    test = [(X[out], y[out]) for (X, y), out in pairs]
    return [train, test] if any(out.any() for out in held) else [train]


def carve(pair: Client, fraction: float, random: np.random.Generator) -> tuple[Client, Client]:
    """Cut rows to fit and to validate, of every label alike; a single row serves as both."""
    X, y = np.asarray(pair[0]), np.asarray(pair[1])
    if len(y) < 2:
        return (X, y), (X, y)
    labels = y if np.issubdtype(y.dtype, np.integer) else np.zeros(len(y), dtype=np.int64)
    out = held_out(labels, fraction, random)
    return (X[~out], y[~out]), (X[out], y[out])


def checked_fraction(owner: str, fraction: float) -> float:
    return ranged(owner, "test_fraction", fraction, BELOW_ONE, "fraction-out-of-range")


def standardiser(
    parts: Sequence[Matrix], weights: Sequence[Matrix] | None = None
) -> tuple[Matrix, Matrix]:
    """Return mean and standard deviation of every column, from the clients' sums only.

    mean = Σ_i Σx / Σ_i n_i,  variance = Σ_i Σ(x − mean)² / Σ_i n_i: two exchanges, so that nothing
    cancels. Rows count by their weights, if they have any. Constant columns get deviation one.
    """
    own = [np.ones(len(X)) for X in parts] if weights is None else weights
    n = sum(float(w.sum()) for w in own)

    def mean_of(values: Iterable[Matrix]) -> Matrix:
        # plain sums of rows alike keep the last digit, which the noise of private clients goes by
        sums = (v.sum(0) if weights is None else w @ v for w, v in zip(own, values, strict=True))
        return sum(sums, np.zeros(parts[0].shape[1])) / n

    mean = mean_of(parts)
    variance = mean_of((X - mean) ** 2 for X in parts)
    return mean, unless_constant(mean, np.sqrt(variance), sum(map(len, parts)))


def unless_constant(mean: Matrix, deviation: Matrix, n: int | Matrix) -> Matrix:
    """Return the deviation, or one where it is within the rounding of a sum of n numbers."""
    return np.where(
        deviation <= np.maximum(1e-12, n * np.finfo(np.float64).eps) * np.abs(mean), 1.0, deviation
    )
