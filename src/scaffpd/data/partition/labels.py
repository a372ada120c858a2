r"""Cut one dataset into clients whose labels are distributed differently."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.data.partition.inputs import Indices, label_array
from scaffpd.errors import InputError, count, positive

_DRAWS = 10_000


def dirichlet(X: ArrayLike, y: ArrayLike, clients: int, alpha: float, seed: int = 0, minimum: int = 2) -> list[Indices]:
    """Label-skew partition: client i gets the share q_{k,i} of label k, with q_k ~ Dirichlet(α, …, α).

    Small α gives every client few labels, large α gives all of them the same mixture. Shares are drawn again
    until every client has at least `minimum` samples; every sample goes to exactly one client.

    Args:
        X: the samples, only counted here.
        y: their labels, of any type that can be sorted.
        clients: number of clients.
        alpha: concentration α > 0.
        seed: the same seed, the same partition.
        minimum: fewest samples of a client.

    Returns:
        The row numbers of each client, ascending.
    """
    labels = np.asarray(y)
    count("dirichlet", "clients", clients)
    count("dirichlet", "minimum", minimum)
    positive("dirichlet", "alpha", alpha)
    if labels.ndim != 1 or len(labels) != len(np.asarray(X)):
        raise InputError(f"dirichlet needs one label per sample, got shapes {np.shape(X)} and {labels.shape}.")
    if clients * minimum > len(labels):
        raise InputError(f"dirichlet cannot give {clients} clients {minimum} samples each out of {len(labels)}.")
    random = np.random.default_rng(seed)
    members = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    cuts = _cuts(np.array([len(rows) for rows in members]), clients, alpha, minimum, random)
    pieces = [np.split(rows, cut) for rows, cut in zip(members, cuts, strict=True)]
    return [np.sort(np.concatenate([piece[i] for piece in pieces])) for i in range(clients)]


def shards(y: ArrayLike, clients: int, shards_per_client: int = 2, seed: int = 0) -> list[Indices]:
    """Label-skew partition of McMahan et al. (2017): sort by label, cut into shards, deal them at random.

    The samples, sorted by label and in their old order within a label, are cut into clients · shards_per_client shards
    whose sizes differ by at most one; each client gets `shards_per_client` of them. So few clients see more labels than
    they have shards; every sample goes to exactly one client.

    Args:
        y: the labels, of any type that can be sorted.
        clients: number of clients.
        shards_per_client: number of shards of each client.
        seed: the same seed, the same partition.

    Returns:
        The row numbers of each client, ascending.
    """
    labels = label_array("shards", "y", y)
    pieces = count("shards", "clients", clients) * count("shards", "shards_per_client", shards_per_client)
    if pieces > len(labels):
        raise InputError(f"shards cannot cut {len(labels)} samples into {clients} · {shards_per_client} shards.")
    cut = np.array_split(np.argsort(labels, kind="stable"), pieces)
    dealt = np.random.default_rng(seed).permutation(pieces).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([cut[k] for k in own])) for own in dealt]


def _cuts(
    sizes: NDArray[np.int64], clients: int, alpha: float, minimum: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Per label, where to cut its samples; redrawn until every client has `minimum` of them."""
    for _ in range(_DRAWS):
        shares = random.dirichlet(np.full(clients, alpha), size=len(sizes))
        cuts = np.rint(np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
        owned = np.diff(cuts, axis=1, prepend=0, append=sizes[:, None]).sum(0)
        if owned.min() >= minimum:
            return cuts
    raise InputError(
        f"dirichlet found no partition in {_DRAWS} draws that gives each of {clients} clients {minimum} "
        f"samples with alpha={alpha:g}; raise alpha, or lower clients or minimum."
    )
