r"""Which l2: ridge regression on all training images but a fifth, scored on that fifth; no client, no test image.

min_X (1/m)‖A X − Y‖² + (l2/2)‖X‖²   by conjugate gradients on (2/m) AᵀA X + l2 X = (2/m) AᵀY, all columns at once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scaffpd.experiments.images.study import Ground
from scaffpd.models.tables import StoredMatrix, load_rows

L2S = tuple(10**k for k in np.arange(-6, -1.9, 0.5).tolist())
STEPS = 100
HELD_OUT = 0.2


class Choice(NamedTuple):
    """An l2 and the share of held-out training images that are classified rightly."""

    l2: float
    accuracy: float


def choices(here: Ground, device: str, seed: int = 0) -> list[Choice]:
    """All l2 on one split of the training images."""
    order = np.random.default_rng([seed, 4]).permutation(len(here.train))
    cut = round(HELD_OUT * len(order))
    place, kind = torch.device(device), torch.float32
    A, V = (load_rows([here.table.rows(rows)], ["all clients"], place, kind) for rows in (order[cut:], order[:cut]))
    y, truth = (torch.from_numpy(here.train[rows]).to(place) for rows in (order[cut:], order[:cut]))
    Y = torch.nn.functional.one_hot(y, here.classes).to(kind)
    return [Choice(l2, float(((V @ ridge(A, Y, l2)).argmax(1) == truth).float().mean())) for l2 in L2S]


def ridge(A: StoredMatrix, Y: Tensor, l2: float, steps: int = STEPS) -> Tensor:
    """The minimiser, after so many steps of conjugate gradients from zero."""
    r = (A.T @ Y) * (2 / len(A))
    X, p, size = torch.zeros_like(r), r.clone(), r.square().sum(0)
    start = size.clone()
    for _ in range(steps):
        if bool((size <= 1e-12 * start).all()):
            break
        q = (A.T @ (A @ p)) * (2 / len(A)) + l2 * p
        rate = size / (p * q).sum(0).clamp_min(torch.finfo(q.dtype).tiny)
        X += rate * p
        r -= rate * q
        last, size = size, r.square().sum(0)
        p = r + size / last.clamp_min(torch.finfo(q.dtype).tiny) * p
    return X


def best(found: Sequence[Choice]) -> Choice:
    """The most accurate; the larger l2 of equals."""
    return max(found, key=lambda choice: (choice.accuracy, choice.l2))
