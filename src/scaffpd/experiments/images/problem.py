"""From images and their features to clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.comparison import Problem
from scaffpd.data import Silos, Table, dirichlet, like_training, thinned
from scaffpd.experiments.images.settings import FEWEST, Plan
from scaffpd.models import Linear

Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """A table of features (training images first, then test images) that a seed cuts into clients.

    Attributes:
        table: the features.
        train: labels of the training images.
        test: labels of the test images.
        clients: N.
        alpha: of Dirichlet(α).
        balanced: see `Plan`.
    """

    table: Table
    train: Labels
    test: Labels
    clients: int
    alpha: float
    balanced: bool = False

    def parts(self, seed: int) -> list[Labels]:
        """The training images of each client: by Dirichlet(α), then thinned."""
        whole = dirichlet(self.train, self.train, self.clients, self.alpha, seed, FEWEST, balanced=self.balanced)
        return thinned(whole, clients=0.3, samples=0.7, seed=seed, minimum=FEWEST // 2)

    def __call__(self, seed: int) -> Silos:
        """The clients' rows; test images in the proportions of their training images."""
        parts = self.parts(seed)
        tests = like_training(parts, self.train, self.test, seed)
        train: list[Any] = [(self.table.rows(p), self.train[p]) for p in parts]
        test: list[Any] = [(self.table.rows(len(self.train) + p), self.test[p]) for p in tests]
        return Silos(tuple(f"client {i}" for i in range(self.clients)), train, test, ())


def problem(cut: Cut, plan: Plan, title: str, classes: int, device: str) -> Problem:
    """Squared loss on one-hot labels."""
    import torch

    model = Linear("squared", l2=plan.l2, classes=classes)
    name = f"{title}, {plan.clients} clients, Dirichlet({cut.alpha:g})"
    return Problem(cut, model, name, device, torch.float32)
