"""The two axes of a `Federation`: a `Channel` to its clients, and a `Summer` of their vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.federation.plans import Constants, Vector
from scaffpd.federation.questions import ClientSelection, Question, Reply, Vectors


class PrivacySpent(Protocol):
    """Privacy cost of the clients' answers so far: client i's are (ε_i, δ)-differentially private."""

    @property
    def names(self) -> tuple[str, ...]:
        """The clients."""

    @property
    def epsilon(self) -> Vector:
        """ε_i."""

    @property
    def delta(self) -> float:
        """δ, the same for all."""

    @property
    def worst(self) -> float:
        """The largest ε_i."""


class PrivacyAccount(Protocol):
    """Account of private clients' releases, which a checkpoint stores."""

    @property
    def total(self) -> int:
        """Number of releases so far."""

    def spent(self) -> PrivacySpent:
        """Return the cost of the releases so far."""

    def pack(self) -> dict[str, NDArray[np.generic]]:
        """Return the releases as arrays."""

    def merge(self, arrays: dict[str, NDArray[np.generic]]) -> None:
        """Add the releases of `pack` that are not counted yet."""


class Channel(Protocol):
    """Access to the clients, wherever they are.

    Attributes:
        names: the clients, in a fixed order.
        keeps: whether vectors that clients store from round to round are accessible.
        here: whether clients are in this process, and not at other organisations.
    """

    names: tuple[str, ...]
    keeps: bool
    here: bool

    @property
    def work(self) -> float:
        """Number of numbers that a pass over the training features reads; infinite if unknown."""

    @property
    def absent(self) -> int:
        """Number of clients that do not answer at present."""

    @property
    def account(self) -> PrivacyAccount | None:
        """Account of private clients' releases; `None` if they are not private, or keep their own
        privacy ledger.
        """

    @property
    def fingerprint(self) -> str:
        """Identify model, clients and data, so that a checkpoint is never resumed on another
        problem.
        """

    def constants(self) -> Constants:
        """Return smoothness and convexity of the clients' losses."""

    def start(self) -> Tensor:
        """Return the default x⁰ (zero for linear models, the module's own parameters otherwise)."""

    def own(self, x: Tensor) -> Tensor | None:
        """Return every client's own model u_i(x), (N, d), if the model is `Personal` and the
        clients are here.
        """

    def ask(self, question: Question, chosen: Sequence[int]) -> Reply:
        """Return the answers of the chosen clients, in that order."""


class Summer(Protocol):
    """Sums of the clients' vectors.

    Attributes:
        hides_vectors: whether no single vector leaves its client.
        allows_projections: whether clients reveal their gradients along directions that the
            server chooses.
        allows_reweighting: whether clients allow sums of the same vectors with two weightings.
    """

    hides_vectors: bool
    allows_projections: bool
    allows_reweighting: bool

    def shown(self, question: Question, reply: Reply) -> Reply:
        """Return what clients reveal of their numbers."""

    def sum(self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector) -> Tensor:
        """Return Σ_i w_i v_i over the clients that were asked; `part` names the summed vectors."""

    def error(self, length: int, weights: Vector) -> float:
        """Bound the error of the last sum due to its format, in norm and per unit of weight."""


class PlainSums:
    """Plain sums: clients send their vectors unmasked."""

    hides_vectors = False
    allows_projections = True
    allows_reweighting = True

    def shown(self, question: Question, reply: Reply) -> Reply:
        """Return the whole reply."""
        return reply

    def sum(self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector) -> Tensor:
        """Return the sum by one matrix product, without forming single vectors if clients are here."""
        precision = torch.float64 if vectors.double_weights else asked.like.dtype
        sent = torch.from_numpy(np.array(weights[asked.index])).to(precision)
        if asked.like.is_cuda:  # from pinned memory, without waiting for the device
            sent = sent.pin_memory()
        return vectors.sum(sent.to(asked.like.device, non_blocking=True))

    def error(self, length: int, weights: Vector) -> float:
        """Return 0: only rounding."""
        return 0.0
