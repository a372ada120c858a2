r"""Clients that differ in how much data they have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.data.partition.inputs import Indices, client_rows, label_array, share
from scaffpd.data.seeds import generator
from scaffpd.errors import InputError, count, positive


def quantity_skew(
    n_or_y: int | ArrayLike, clients: int, alpha: float, seed: int = 0, minimum: int = 2
) -> list[Indices]:
    """Sizes m_i = minimum + q_i · (n − N · minimum) with q ~ Dirichlet(α, …, α); samples, thus labels, at random.

    Small α gives a few clients nearly everything, large α gives all of them the same. Sizes are rounded such that they
    add up to n; every sample goes to exactly one client.

    Args:
        n_or_y: the number n of samples, or their labels, which are only counted.
        clients: number N of clients.
        alpha: concentration α > 0.
        seed: the same seed, the same partition.
        minimum: fewest samples of a client.

    Returns:
        The row numbers of each client, ascending.
    """
    whole = np.ndim(n_or_y) == 0
    n = count("quantity_skew", "n", n_or_y) if whole else len(label_array("quantity_skew", "y", n_or_y))
    count("quantity_skew", "clients", clients)
    count("quantity_skew", "minimum", minimum)
    positive("quantity_skew", "alpha", alpha)
    random = generator("quantity_skew", seed)
    free = n - clients * minimum
    if free < 0:
        raise InputError(f"quantity_skew cannot give {clients} clients {minimum} samples each out of {n}.")
    ends = np.rint(np.cumsum(random.dirichlet(np.full(clients, alpha)))[:-1] * free).astype(np.int64)
    cuts = ends + minimum * np.arange(1, clients)
    return [np.sort(rows) for rows in np.split(random.permutation(n), cuts)]


def thinned(
    parts: Sequence[ArrayLike], clients: float = 0.3, samples: float = 0.7, seed: int = 0, minimum: int = 1
) -> list[Indices]:
    """A random share of the clients loses a share of its samples: imbalance on top of any partition.

    Of N clients, round(clients · N) are drawn, and each of them loses round(samples · m_i) of its m_i samples at
    random, or as many as leave it `minimum`; one that has no more than `minimum` loses none. Halves round to the even
    number.

    Args:
        parts: the row numbers of each client.
        clients: share of the clients, from 0 to 1.
        samples: share of their samples, from 0 to 1.
        seed: the same seed, the same clients and samples.
        minimum: fewest samples that thinning leaves a client.

    Returns:
        The row numbers that each client keeps, ascending.
    """
    kept = [np.sort(rows) for rows in client_rows("thinned", parts)]
    count("thinned", "minimum", minimum)
    chosen = round(share("thinned", "clients", clients) * len(kept))
    lost = share("thinned", "samples", samples)
    random = generator("thinned", seed)
    for i in np.sort(random.choice(len(kept), size=chosen, replace=False)):
        m = len(kept[i])
        stay = max(m - round(lost * m), min(minimum, m))
        kept[i] = np.sort(random.choice(kept[i], size=stay, replace=False))
    return kept
