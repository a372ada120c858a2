"""How the paper and Li et al. (2022) divide images among clients, and which test images a client is
scored on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scaffpd.data import dirichlet
from scaffpd.errors import InputError

Indices = NDArray[np.int64]
DRAWS = 10_000


def divided(
    y: Indices, clients: int, alpha: float, seed: int, minimum: int, balanced: bool
) -> list[Indices]:
    r"""Skew labels as `scaffpd.data.dirichlet` does; `balanced` as in the published code of Li et
    al.

    There labels are dealt one after the other, and a client that is full gets no more. With m_{k,i}
    the samples of labels 1, …, k - 1 that client i got, of n samples and N clients in all, the
    shares of label k are

        p_{k,i} = q_{k,i} · [m_{k,i} < n/N] / Σ_j q_{k,j} · [m_{k,j} < n/N].

    So no client has more than n/N samples plus those of one label. If all q_{k,j} of clients that
    are not full have been rounded to zero, p_k ~ Dirichlet(α, …, α) among these clients, which is
    its distribution in any case.
    """
    if not balanced:
        return dirichlet(y, clients, alpha, seed, minimum)
    random = np.random.default_rng(seed)
    members = [random.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    sizes = np.array([len(rows) for rows in members])
    for _ in range(DRAWS):
        shares = random.dirichlet(np.full(clients, alpha), size=len(sizes))
        cuts = _cuts(shares, sizes, alpha, random)
        if np.diff(cuts, axis=1, prepend=0, append=sizes[:, None]).sum(0).min() >= minimum:
            pieces = [np.split(rows, cut) for rows, cut in zip(members, cuts, strict=True)]
            return [np.sort(np.concatenate([piece[i] for piece in pieces])) for i in range(clients)]
    raise InputError(
        "no-partition", f"No partition gives {clients} clients {minimum} samples each."
    )


def _cuts(
    shares: NDArray[np.float64],
    sizes: NDArray[np.int64],
    alpha: float,
    random: np.random.Generator,
) -> NDArray[np.int64]:
    """Return where to cut the samples of each label, with shares only for clients that are not
    full.
    """
    labels, clients = shares.shape
    cuts = np.empty((labels, clients - 1), dtype=np.int64)
    owned = np.zeros(clients, dtype=np.int64)
    for k, (drawn, size) in enumerate(zip(shares, sizes, strict=True)):
        room = owned * clients < sizes.sum()
        share = np.where(room, drawn, 0.0)
        if share.sum() < np.finfo(np.float64).tiny:
            share[room] = random.dirichlet(np.full(int(room.sum()), alpha))
        cuts[k] = np.minimum(np.rint(np.cumsum(share / share.sum())[:-1] * size), size)
        owned += np.diff(cuts[k], prepend=0, append=size)
    return cuts


def thinned(
    parts: Sequence[Indices],
    clients: float = 0.3,
    samples: float = 0.7,
    seed: int = 0,
    minimum: int = 1,
) -> list[Indices]:
    """Take a share of their samples from a random share of clients: imbalance on top of any
    partition.

    Of N clients, round(clients · N) are drawn, and each of them loses round(samples · m_i) of its
    m_i samples at random, or as many as leave it `minimum`; one that has at most `minimum` loses
    none. Halves round to the even number.

    Args:
        parts: the row numbers of each client.
        clients: share of the clients, from 0 to 1.
        samples: share of their samples, from 0 to 1.
        seed: the same seed, the same clients and samples.
        minimum: fewest samples that thinning leaves a client.

    Returns:
        The row numbers that each client keeps, ascending.
    """
    kept = [np.sort(rows) for rows in parts]
    chosen = round(clients * len(kept))
    random = np.random.default_rng(seed)
    for i in np.sort(random.choice(len(kept), size=chosen, replace=False)):
        m = len(kept[i])
        stay = max(m - round(samples * m), min(minimum, m))
        kept[i] = np.sort(random.choice(kept[i], size=stay, replace=False))
    return kept


def like_training(
    parts: Sequence[Indices],
    y_train: Indices,
    y_test: Indices,
    seed: int = 0,
    limit: int | None = None,
) -> list[Indices]:
    r"""Draw test rows of each client in the class proportions of its training rows, as many as
    possible.

    With p_ik the share of class k among client i's training rows and t_k the number of test rows of
    that class, client i gets n_i = ⌊min_k t_k / p_ik⌋ rows, at most `limit`; the n_i · p_ik are
    rounded down, and the rows still missing go to the classes with the largest remainders. n_i is
    at least one. Rows are drawn without replacement within a client; clients may share them. A
    class that has training rows but no test rows at all is left out of the proportions.

    Args:
        parts: the training row numbers of each client.
        y_train: labels of all training rows.
        y_test: labels of all test rows.
        seed: the same seed, the same rows.
        limit: most rows of a client.

    Returns:
        The test row numbers of each client, ascending.
    """
    random = np.random.default_rng(seed)
    classes, code = np.unique(y_test, return_inverse=True)
    members = [np.flatnonzero(code == k) for k in range(len(classes))]
    available = np.array([len(own) for own in members])
    chosen = []
    for own in parts:
        numbers = _numbers((y_train[own][:, None] == classes).sum(0), available, limit)
        drawn = [
            random.choice(members[k], size=numbers[k], replace=False)
            for k in np.flatnonzero(numbers)
        ]
        chosen.append(np.sort(np.concatenate(drawn)))
    return chosen


def _numbers(own: Indices, available: Indices, limit: int | None) -> Indices:
    """Return test rows per class, in whole numbers throughout: p_ik = own_k / m."""
    m = int(own.sum())
    held = own > 0
    n = int((available[held] * m // own[held]).min())
    n = n if limit is None else min(n, limit)
    numbers, remainders = np.divmod(n * own, m)
    largest = np.argsort(-remainders, kind="stable")[: n - int(numbers.sum())]
    numbers[largest] += 1
    return numbers
