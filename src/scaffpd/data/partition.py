"""Ways to cut one data set into clients: by labels or by a column."""

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


def checked_labels(owner: str, values: ArrayLike) -> NDArray[np.generic]:
    """Return values as a vector of one type without missing entries, or refuse them."""
    # as objects: NumPy would make text of ["a", 1] and of ["a", nan]
    given = np.asarray(values if hasattr(values, "dtype") else np.array(values, dtype=object))
    if given.ndim != 1 or not len(given):
        raise InputError(
            "labels-not-a-vector",
            f"{owner} needs a vector with one entry per sample, got shape {given.shape}.",
        )
    if given.dtype.kind not in "OfcmM":
        return given
    missing = [i for i, value in enumerate(given.tolist()) if is_missing(value)]
    if missing:
        raise InputError(
            "label-missing",
            f"{owner} needs an entry for every sample, but sample {missing[0]} has none.",
        )
    try:
        np.sort(given)
    except TypeError:
        raise InputError(
            "labels-of-several-types", f"{owner} needs entries of one type, got a mixture."
        ) from None
    return given


def natural(groups: ArrayLike, minimum: int = 1) -> tuple[tuple[str, ...], list[Indices]]:
    """Make one client per distinct value of `groups`: a hospital, a writer, an occupation.

    Args:
        groups: for each sample the client it comes from, of any type that can be sorted.
        minimum: values with fewer samples are left out, and their samples belong to no client.

    Returns:
        The values as text, ascending, and the row numbers of each, ascending.
    """
    values = checked_labels("natural", groups)
    count("natural", "minimum", minimum)
    distinct, owner, sizes = np.unique(values, return_inverse=True, return_counts=True)
    large = np.flatnonzero(sizes >= minimum)
    if not len(large):
        raise InputError(
            "no-large-group",
            f"natural found no group of {minimum} samples: the largest has {sizes.max()}.",
        )
    return tuple(str(distinct[k]) for k in large), [np.flatnonzero(owner == k) for k in large]


def dirichlet(
    X: ArrayLike, y: ArrayLike, clients: int, alpha: float, seed: int = 0, minimum: int = 2
) -> list[Indices]:
    r"""Skew labels: client i gets the share q_{k,i} of label k, with q_k ~ Dirichlet(α, …, α).

    Small α gives every client few labels, large α gives all of them the same mixture. Shares are
    drawn again until every client has at least `minimum` samples; every sample goes to exactly one
    client.

    Args:
        X: the samples, only counted here.
        y: their labels, of any type that can be sorted.
        clients: number N of clients.
        alpha: concentration α > 0.
        seed: the same seed, the same partition.
        minimum: fewest samples of a client.

    Returns:
        The row numbers of each client, ascending.
    """
    labels = checked_labels("dirichlet", y)
    _enough("dirichlet", len(labels), clients, minimum)
    positive("dirichlet", "alpha", alpha)
    samples = X.shape[0] if isinstance(X, np.ndarray) else np.shape(X)[0]
    if len(labels) != samples:
        raise InputError(
            "labels-of-other-samples",
            f"dirichlet needs one label per sample, got {len(labels)} for {samples}.",
        )
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


def shards(y: ArrayLike, clients: int, shards_per_client: int = 2, seed: int = 0) -> list[Indices]:
    """Skew labels as McMahan et al. (2017): sort by label, cut into shards, deal them at random.

    The samples, sorted by label and in their old order within a label, are cut into clients ·
    shards_per_client shards whose sizes differ by at most one; each client gets `shards_per_client`
    of them, so that few clients have more labels than shards.

    Args:
        y: the labels, of any type that can be sorted.
        clients: number of clients.
        shards_per_client: number of shards of each client.
        seed: the same seed, the same partition.

    Returns:
        The row numbers of each client, ascending.
    """
    labels = checked_labels("shards", y)
    _enough("shards", len(labels), clients, count("shards", "shards_per_client", shards_per_client))
    pieces = clients * shards_per_client
    cut = np.array_split(np.argsort(labels, kind="stable"), pieces)
    dealt = generator("shards", seed).permutation(pieces).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([cut[k] for k in own])) for own in dealt]


def _enough(owner: str, samples: int, clients: int, minimum: int) -> None:
    """Refuse more clients than there are samples for."""
    if count(owner, "clients", clients) * count(owner, "minimum", minimum) > samples:
        raise InputError(
            "too-few-samples",
            f"{owner} cannot give {clients} clients {minimum} samples each out of {samples}.",
        )
