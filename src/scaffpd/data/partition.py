"""Cut one data set into clients whose labels differ."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.data.silos import generator
from scaffpd.errors import InputError, count, positive

Indices = NDArray[np.int64]
DRAWS = 10_000


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
