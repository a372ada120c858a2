"""Ways to cut one dataset into clients: by labels, by sizes, by a column, and matching test rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scaffpd.data.silos import generator
from scaffpd.errors import InputError, count, positive, real

Indices = NDArray[np.int64]


def label_array(owner: str, name: str, values: ArrayLike) -> NDArray[Any]:
    """Return values as a vector with at least one entry, or refuse them; None and masked entries stay None."""
    try:
        labels = np.asarray(values)
        if isinstance(values, np.ma.MaskedArray):
            labels = (
                np.asarray(values.tolist(), dtype=object) if np.ma.is_masked(values) else labels
            )
        elif labels.dtype.kind in "US" and not hasattr(
            values, "dtype"
        ):  # NumPy makes text of ["a", 1] and ["a", nan]
            kinds = {type(value) for value in np.asarray(values, dtype=object).flat}
            texts = all(issubclass(kind, str) for kind in kinds) or all(
                issubclass(kind, bytes) for kind in kinds
            )
            labels = labels if texts else np.asarray(values, dtype=object)
    except (TypeError, ValueError):
        raise InputError(
            "vector-entry-per",
            f"{owner} needs {name} as a vector with one entry per sample, got something ragged.",
        ) from None
    if labels.ndim != 1 or not len(labels):
        raise InputError(
            "vector-entry-per",
            f"{owner} needs {name} as a vector with one entry per sample, got shape {labels.shape}.",
        )
    return labels


def whole_labels(owner: str, name: str, values: ArrayLike, what: str = "label") -> NDArray[Any]:
    """Return values as a vector without missing entries that can be sorted, or refuse them."""
    labels = label_array(owner, name, values)
    for i in np.flatnonzero(_missing(labels))[:1]:
        raise InputError(
            "sample-sample-none",
            f"{owner} needs a {what} for every sample, but sample {i} has none.",
        )
    if labels.dtype.kind == "O":
        try:
            np.sort(labels)
        except (TypeError, ValueError):
            raise InputError(
                "type-sorted-mixture",
                f"{owner} needs {what}s of one type that can be sorted, got a mixture.",
            ) from None
    return labels


def sample_count(owner: str, X: Any) -> int:
    """Count the samples in `X` without a copy of them; refuse anything but an array of samples."""
    try:
        shape = tuple(X.shape) if hasattr(X, "shape") else np.asarray(X).shape
    except (TypeError, ValueError):
        raise InputError(
            "array-entry-per",
            f"{owner} needs X as an array with one entry per sample, got something ragged.",
        ) from None
    if not shape:
        raise InputError(
            "array-entry-per",
            f"{owner} needs X as an array with one entry per sample, got {type(X).__name__}.",
        )
    return int(shape[0])


def _missing(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which entries are None, NaN, or no date."""
    if labels.dtype.kind == "O":
        return np.array([is_missing(value) for value in labels.tolist()], dtype=bool)
    if labels.dtype.kind in "fcmM":
        return np.asarray(labels != labels, dtype=bool)
    return np.zeros(len(labels), dtype=bool)


def is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN, NaT or pandas.NA."""
    try:
        return value is None or bool(value != value)
    except TypeError:  # pandas.NA is neither
        return True
    except ValueError:
        return False


def client_rows(
    owner: str, parts: Sequence[ArrayLike], samples: int | None = None
) -> list[Indices]:
    """Return the row numbers of each client, or refuse the first client with invalid rows."""
    if not len(parts):
        raise InputError(
            "row-numbers-least", f"{owner} needs the row numbers of at least one client, got none."
        )
    checked = []
    for i, part in enumerate(parts):
        rows = np.asarray(part)
        if not rows.size:
            raise InputError(
                "samples-client-client",
                f"{owner} needs samples at every client, but client {i} has none.",
            )
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise InputError(
                "whole-row-numbers",
                f"{owner} needs whole row numbers, but client {i} has {rows.dtype} of shape {rows.shape}.",
            )
        if rows.min() < 0 or (samples is not None and rows.max() >= samples):
            most = f"below {samples}" if samples is not None else "of at least 0"
            wrong = rows.min() if rows.min() < 0 else rows.max()
            raise InputError(
                "row-numbers-client",
                f"{owner} needs row numbers {most}, but client {i} has {wrong}.",
            )
        checked.append(rows.astype(np.int64))
    return checked


def share(owner: str, name: str, value: float) -> float:
    """Return a value as a float in [0, 1], or refuse it."""
    number = real(owner, name, value)
    if not 0 <= number <= 1:
        raise InputError("share", f"{owner} needs 0 <= {name} <= 1, got {value!r}.")
    return number


def natural(groups: ArrayLike, minimum: int = 1) -> tuple[tuple[str, ...], list[Indices]]:
    """Make one client per distinct value of `groups`: a hospital, a writer, an occupation.

    Args:
        groups: for each sample the client it comes from, of any type that can be sorted.
        minimum: values with fewer samples are left out, and their samples belong to no client.

    Returns:
        The values as text, ascending, and the row numbers of each, ascending.
    """
    values = whole_labels("natural", "groups", groups, "group")
    count("natural", "minimum", minimum)
    distinct, owner, sizes = np.unique(values, return_inverse=True, return_counts=True)
    kept = np.flatnonzero(sizes >= minimum)
    if not len(kept):
        raise InputError(
            "natural-found-group",
            f"natural found no group of {minimum} samples: the largest has {sizes.max()}.",
        )
    return tuple(str(distinct[k]) for k in kept), [np.flatnonzero(owner == k) for k in kept]


_DRAWS = 10_000


def dirichlet(
    X: ArrayLike,
    y: ArrayLike,
    clients: int,
    alpha: float,
    seed: int = 0,
    minimum: int = 2,
    *,
    balanced: bool = False,
) -> list[Indices]:
    r"""Skew labels: client i gets the share q_{k,i} of label k, with q_k ~ Dirichlet(α, …, α).

    Small α gives every client few labels, large α gives all of them the same mixture. Shares are drawn again
    until every client has at least `minimum` samples; every sample goes to exactly one client.

    With `balanced`, labels are dealt one after the other, and a client that is full gets no more, as in the published
    code of Li et al. (2022, NIID-Bench). With m_{k,i} the samples of labels 1, …, k - 1 that client i got, of n
    samples and N clients in all, the shares of label k are

        p_{k,i} = q_{k,i} · [m_{k,i} < n/N] / Σ_j q_{k,j} · [m_{k,j} < n/N].

    So no client has more than n/N samples plus those of one label. If all q_{k,j} of clients that are not full
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
        raise InputError(
            "dirichlet-true-false", f"dirichlet needs True or False for balanced, got {balanced!r}."
        )
    if len(labels) != sample_count("dirichlet", X):
        raise InputError(
            "dirichlet-label-per",
            f"dirichlet needs one label per sample, got {len(labels)} for {sample_count('dirichlet', X)}.",
        )
    random = generator("dirichlet", seed)
    if clients * minimum > len(labels):
        raise InputError(
            "dirichlet-give-clients",
            f"dirichlet cannot give {clients} clients {minimum} samples each out of {len(labels)}.",
        )
    members = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    sizes = np.array([len(rows) for rows in members])
    for _ in range(_DRAWS):
        cuts = _cuts(
            random.dirichlet(np.full(clients, alpha), size=len(sizes)),
            sizes,
            alpha,
            random,
            bool(balanced),
        )
        if np.diff(cuts, axis=1, prepend=0, append=sizes[:, None]).sum(0).min() >= minimum:
            break
    else:
        raise InputError(
            "dirichlet-found-partition",
            f"dirichlet found no partition in {_DRAWS} draws that gives each of {clients} clients {minimum} "
            f"samples with alpha={alpha:g}; raise alpha, or lower clients or minimum.",
        )
    pieces = [np.split(rows, cut) for rows, cut in zip(members, cuts, strict=True)]
    return [np.sort(np.concatenate([piece[i] for piece in pieces])) for i in range(clients)]


def shards(y: ArrayLike, clients: int, shards_per_client: int = 2, seed: int = 0) -> list[Indices]:
    """Skew labels as McMahan et al. (2017): sort by label, cut into shards, deal them at random.

    The samples, sorted by label and in their old order within a label, are cut into clients · shards_per_client shards
    whose sizes differ by at most one; each client gets `shards_per_client` of them. Few clients have more labels than
    shards; every sample goes to exactly one client.

    Args:
        y: the labels, of any type that can be sorted.
        clients: number of clients.
        shards_per_client: number of shards of each client.
        seed: the same seed, the same partition.

    Returns:
        The row numbers of each client, ascending.
    """
    labels = whole_labels("shards", "y", y)
    pieces = count("shards", "clients", clients) * count(
        "shards", "shards_per_client", shards_per_client
    )
    if pieces > len(labels):
        raise InputError(
            "shards-cut-samples",
            f"shards cannot cut {len(labels)} samples into {clients} · {shards_per_client} shards.",
        )
    random = generator("shards", seed)
    cut = np.array_split(np.argsort(labels, kind="stable"), pieces)
    dealt = random.permutation(pieces).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([cut[k] for k in own])) for own in dealt]


def _cuts(
    shares: NDArray[np.float64],
    sizes: NDArray[np.int64],
    alpha: float,
    random: np.random.Generator,
    balanced: bool,
) -> NDArray[np.int64]:
    """Return where to cut the samples of each label: at the cumulative shares.

    If `balanced`, go label by label, with shares only for clients that have fewer than n/N samples so far.
    """
    if not balanced:
        return np.rint(np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
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


def quantity_skew(
    n_or_y: int | ArrayLike, clients: int, alpha: float, seed: int = 0, minimum: int = 2
) -> list[Indices]:
    """Skew sizes: m_i = minimum + q_i · (n − N · minimum), q ~ Dirichlet(α, …, α); samples at random.

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
    n = (
        count("quantity_skew", "n", n_or_y)
        if whole
        else len(label_array("quantity_skew", "y", n_or_y))
    )
    count("quantity_skew", "clients", clients)
    count("quantity_skew", "minimum", minimum)
    positive("quantity_skew", "alpha", alpha)
    random = generator("quantity_skew", seed)
    free = n - clients * minimum
    if free < 0:
        raise InputError(
            "quantity-skew-give",
            f"quantity_skew cannot give {clients} clients {minimum} samples each out of {n}.",
        )
    ends = np.rint(np.cumsum(random.dirichlet(np.full(clients, alpha)))[:-1] * free).astype(
        np.int64
    )
    cuts = ends + minimum * np.arange(1, clients)
    return [np.sort(rows) for rows in np.split(random.permutation(n), cuts)]


def thinned(
    parts: Sequence[ArrayLike],
    clients: float = 0.3,
    samples: float = 0.7,
    seed: int = 0,
    minimum: int = 1,
) -> list[Indices]:
    """Take a share of their samples from a random share of clients: imbalance on top of any partition.

    Of N clients, round(clients · N) are drawn, and each of them loses round(samples · m_i) of its m_i samples at
    random, or as many as leave it `minimum`; one that has at most `minimum` loses none. Halves round to the even
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


def like_training(
    parts: Sequence[ArrayLike],
    y_train: ArrayLike,
    y_test: ArrayLike,
    seed: int = 0,
    limit: int | None = None,
) -> list[Indices]:
    r"""Draw test rows of each client in the class proportions of its training rows, as many as possible.

    With p_ik the share of class k among client i's training rows and t_k the number of test rows of that class,
    client i gets n_i = ⌊min_k t_k / p_ik⌋ rows, at most `limit`; the n_i · p_ik are rounded down, and the rows still
    missing go to the classes with the largest remainders. n_i is at least one. Rows are drawn without replacement
    within a client; clients may share them. A class that has training rows but no test rows at all is left out of the
    proportions.

    Args:
        parts: the training row numbers of each client.
        y_train: labels of all training rows.
        y_test: labels of all test rows.
        seed: the same seed, the same rows.
        limit: most rows of a client.

    Returns:
        The test row numbers of each client, ascending.
    """
    train = whole_labels("like_training", "y_train", y_train)
    test = whole_labels("like_training", "y_test", y_test)
    rows = client_rows("like_training", parts, len(train))
    if limit is not None:
        count("like_training", "limit", limit)
    random = generator("like_training", seed)
    classes, code = np.unique(test, return_inverse=True)
    members = [np.flatnonzero(code == k) for k in range(len(classes))]
    available = np.array([len(own) for own in members])
    chosen = []
    for i, own in enumerate(rows):
        numbers = _numbers((train[own][:, None] == classes).sum(0), available, limit, i)
        drawn = [
            random.choice(members[k], size=numbers[k], replace=False)
            for k in np.flatnonzero(numbers)
        ]
        chosen.append(np.sort(np.concatenate(drawn)))
    return chosen


def _numbers(own: Indices, available: Indices, limit: int | None, client: int) -> Indices:
    """Return test rows per class, in whole numbers throughout: p_ik = own_k / m."""
    m = int(own.sum())
    if not m:
        raise InputError(
            "like-training-found",
            f"like_training found no test row of any class that client {client} trains on.",
        )
    held = own > 0
    n = int((available[held] * m // own[held]).min())
    n = n if limit is None else min(n, limit)
    numbers, remainders = np.divmod(n * own, m)
    largest = np.argsort(-remainders, kind="stable")[: n - int(numbers.sum())]
    numbers[largest] += 1
    return numbers
