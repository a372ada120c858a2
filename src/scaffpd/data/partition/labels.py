r"""Cut one dataset into clients whose labels are distributed differently."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.data.partition.inputs import Indices, sample_count, whole_labels
from scaffpd.data.seeds import generator
from scaffpd.errors import InputError, count, positive

_DRAWS = 10_000


def dirichlet(
    X: ArrayLike, y: ArrayLike, clients: int, alpha: float, seed: int = 0, minimum: int = 2, *, balanced: bool = False
) -> list[Indices]:
    r"""Label-skew partition: client i gets the share q_{k,i} of label k, with q_k ~ Dirichlet(α, …, α).

    Small α gives every client few labels, large α gives all of them the same mixture. Shares are drawn again
    until every client has at least `minimum` samples; every sample goes to exactly one client.

    With `balanced`, labels are dealt one after the other, and a client that is full gets no more, as the published code
    of Li et al. (2022, NIID-Bench) has it. With m_{k,i} the samples of labels 1, …, k - 1 that client i got, of n
    samples and N clients in all, the shares of label k are

        p_{k,i} = q_{k,i} · [m_{k,i} < n/N] / Σ_j q_{k,j} · [m_{k,j} < n/N].

    So no client ever has more than n/N samples and those of one label. Where all q_{k,j} of clients that are not full
    have been rounded to zero, p_k ~ Dirichlet(α, …, α) among these clients, which is its distribution in any case.

    Args:
        X: the samples, only counted here.
        y: their labels, of any type that can be sorted.
        clients: number N of clients.
        alpha: concentration α > 0.
        seed: the same seed, the same partition.
        minimum: fewest samples of a client.
        balanced: whether clients that have n/N samples get no more.

    Returns:
        The row numbers of each client, ascending.
    """
    labels = whole_labels("dirichlet", "y", y)
    count("dirichlet", "clients", clients)
    count("dirichlet", "minimum", minimum)
    positive("dirichlet", "alpha", alpha)
    if not isinstance(balanced, (bool, np.bool_)):
        raise InputError(f"dirichlet needs True or False for balanced, got {balanced!r}.")
    if len(labels) != sample_count("dirichlet", X):
        raise InputError(f"dirichlet needs one label per sample, got {len(labels)} for {sample_count('dirichlet', X)}.")
    random = generator("dirichlet", seed)
    if clients * minimum > len(labels):
        raise InputError(f"dirichlet cannot give {clients} clients {minimum} samples each out of {len(labels)}.")
    members = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    sizes = np.array([len(rows) for rows in members])
    cuts = _cuts(sizes, clients, alpha, minimum, random, _with_room if balanced else _as_drawn)
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
    labels = whole_labels("shards", "y", y)
    pieces = count("shards", "clients", clients) * count("shards", "shards_per_client", shards_per_client)
    if pieces > len(labels):
        raise InputError(f"shards cannot cut {len(labels)} samples into {clients} · {shards_per_client} shards.")
    random = generator("shards", seed)
    cut = np.array_split(np.argsort(labels, kind="stable"), pieces)
    dealt = random.permutation(pieces).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([cut[k] for k in own])) for own in dealt]


Deal = Callable[[NDArray[np.float64], NDArray[np.int64], float, np.random.Generator], NDArray[np.int64]]


def _cuts(
    sizes: NDArray[np.int64], clients: int, alpha: float, minimum: int, random: np.random.Generator, deal: Deal
) -> NDArray[np.int64]:
    """Per label, where to cut its samples; redrawn until every client has `minimum` of them."""
    for _ in range(_DRAWS):
        cuts = deal(random.dirichlet(np.full(clients, alpha), size=len(sizes)), sizes, alpha, random)
        owned = np.diff(cuts, axis=1, prepend=0, append=sizes[:, None]).sum(0)
        if owned.min() >= minimum:
            return cuts
    raise InputError(
        f"dirichlet found no partition in {_DRAWS} draws that gives each of {clients} clients {minimum} "
        f"samples with alpha={alpha:g}; raise alpha, or lower clients or minimum."
    )


def _as_drawn(
    shares: NDArray[np.float64], sizes: NDArray[np.int64], alpha: float, random: np.random.Generator
) -> NDArray[np.int64]:
    """Cuts at the cumulative shares."""
    return np.rint(np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)


def _with_room(
    shares: NDArray[np.float64], sizes: NDArray[np.int64], alpha: float, random: np.random.Generator
) -> NDArray[np.int64]:
    """The same, label after label, with shares only for clients that have fewer than n/N samples so far."""
    labels, clients = shares.shape
    cuts, owned = np.empty((labels, clients - 1), dtype=np.int64), np.zeros(clients, dtype=np.int64)
    for k, (drawn, size) in enumerate(zip(shares, sizes, strict=True)):
        room = owned * clients < sizes.sum()
        share = np.where(room, drawn, 0.0)
        if share.sum() < np.finfo(np.float64).tiny:
            share[room] = random.dirichlet(np.full(int(room.sum()), alpha))
        cuts[k] = np.minimum(np.rint(np.cumsum(share / share.sum())[:-1] * size), size)
        owned += np.diff(cuts[k], prepend=0, append=size)
    return cuts
