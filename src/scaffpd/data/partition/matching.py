r"""Test rows for clients that were cut out of a training set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.data.partition.inputs import Indices, client_rows, whole_labels
from scaffpd.data.seeds import generator
from scaffpd.errors import InputError, count


def like_training(
    parts: Sequence[ArrayLike], y_train: ArrayLike, y_test: ArrayLike, seed: int = 0, limit: int | None = None
) -> list[Indices]:
    r"""Test rows of each client: as many as there are in the class proportions of its training rows.

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
    train, test = whole_labels("like_training", "y_train", y_train), whole_labels("like_training", "y_test", y_test)
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
        drawn = [random.choice(members[k], size=numbers[k], replace=False) for k in np.flatnonzero(numbers)]
        chosen.append(np.sort(np.concatenate(drawn)))
    return chosen


def _numbers(own: Indices, available: Indices, limit: int | None, client: int) -> Indices:
    """Test rows per class, in whole numbers throughout: p_ik = own_k / m."""
    m = int(own.sum())
    if not m:
        raise InputError(f"like_training found no test row of any class that client {client} trains on.")
    held = own > 0
    n = int((available[held] * m // own[held]).min())
    n = n if limit is None else min(n, limit)
    numbers, remainders = np.divmod(n * own, m)
    largest = np.argsort(-remainders, kind="stable")[: n - int(numbers.sum())]
    numbers[largest] += 1
    return numbers
