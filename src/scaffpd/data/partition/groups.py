"""Clients that the data itself names."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from scaffpd.data.partition.inputs import Indices, whole_labels
from scaffpd.errors import InputError, count


def natural(groups: ArrayLike, minimum: int = 1) -> tuple[tuple[str, ...], list[Indices]]:
    """One client per distinct value of `groups`: a hospital, a writer, an occupation.

    Args:
        groups: for each sample the client it comes from, of any type that can be sorted.
        minimum: values with fewer samples are left out, and their samples belong to nobody.

    Returns:
        The values as text, ascending, and the row numbers of each, ascending.
    """
    values = whole_labels("natural", "groups", groups, "group")
    count("natural", "minimum", minimum)
    distinct, owner, sizes = np.unique(values, return_inverse=True, return_counts=True)
    kept = np.flatnonzero(sizes >= minimum)
    if not len(kept):
        raise InputError(f"natural found no group of {minimum} samples: the largest has {sizes.max()}.")
    return tuple(str(distinct[k]) for k in kept), [np.flatnonzero(owner == k) for k in kept]
