r"""`SecureAggregation`: a cohort whose server learns sums of vectors, as in a deployed run.

Λ and the losses are as ever; vectors are added up as whole numbers (`ring`), so that a method runs
as it would across organisations: on sums over all clients, with the same rounding, and with at most
min(2, N − t − 1) weightings of the same vectors. Masks are left out: here all clients are in one
process. `scaffpd deploy` has them, and docs/threat-model.md says what they hide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, count
from scaffpd.federation import Federation, Vector
from scaffpd.federation.answers import ClientSelection
from scaffpd.federation.own_weights import LEAST
from scaffpd.federation.questions import Vectors
from scaffpd.secure import SHARE
from scaffpd.secure.ring import Places, add

FEWEST = 3  # with two clients, each knows the other's vector from the sum
USUAL = 10  # colluding clients by default, at most


def colluding_of(clients: int, given: int | None = None) -> int:
    """Return t, by default min(N/3, 10) and at least 1; refuse what cannot be hidden."""
    t = min(max(1, clients // 3), USUAL) if given is None else count("Sums", "colluding", given)
    if clients < FEWEST:
        raise InputError(
            "too-few-to-hide",
            f"Sums over {clients} clients hide nothing: at least {FEWEST} have to take part.",
        )
    if t > clients - 2:
        raise InputError(
            "colluding-out-of-range",
            f"Sums over {clients} clients need 1 <= colluding <= {clients - 2}, got {t}.",
        )
    return t


def cap_of(clients: int, colluding: int) -> float:
    """Return κ, the largest weight with which no client has more than `SHARE` of what is left.

    Weights may sum to `LEAST` before they sum to one.
    """
    return max(LEAST * SHARE / (1 + SHARE * colluding), 1 / clients)


def most_weightings(clients: int, colluding: int) -> int:
    return min(2, clients - colluding - 1)


def check_weightings(count: int, clients: int, colluding: int | None) -> None:
    t = colluding_of(clients, colluding)
    most = most_weightings(clients, t)
    if count > most:
        raise InputError(
            "too-many-weightings",
            f"These rows would be summed at one point with {count} weightings over all runs, and "
            f"{most} are safe with {clients} silos ({t} may collude): go on with an objective that "
            "an earlier agreement had, or agree on [privacy].",
        )


@dataclass(eq=False)
class RingSums:
    """A `Summer` over the clients of this process, by whole numbers."""

    allows_reweighting: bool
    allows_projections: bool = False
    hides_vectors: bool = field(default=True, init=False)
    _last: Places | None = field(default=None, init=False)

    def sum(self, part: str, vectors: Vectors, asked: ClientSelection, weights: Vector) -> Tensor:
        own = np.array(weights[asked.index])
        if vectors.addends is not None:
            shared = vectors.addends(torch.from_numpy(own))
            rows = shared.parts.long().cpu().numpy()
            total = _total(rows, Places.usual(rows.shape[1], len(rows), 0))
            return shared.total(torch.from_numpy(total).to(shared.public.device))
        each = vectors.each().double().cpu().numpy().reshape(len(own), -1)
        places = Places.usual(each.shape[1], len(asked.names))
        self._last = places
        total = _total(own[:, None] * each, places)
        return torch.from_numpy(total.reshape(vectors.shape or asked.like.shape)).to(asked.like)

    def error(self, length: int, weights: Vector) -> float:
        return 0.0 if self._last is None else self._last.relative(length, weights)


def _total(rows: NDArray[np.float64], places: Places) -> Vector:
    return places.decode(reduce(add, map(places.encode, rows)))


class SecureAggregation(Federation):
    """The clients of a cohort, of whose vectors a server sees sums alone.

    Args:
        federation: a `Cohort`.
        colluding: t, how many clients may reveal all that they know to the server without harm to
            others; by default a third of the clients (10 at most).
        projections: whether clients may reveal their gradients along directions that the server
            chooses: the subspace saddle method needs that, and no deployed run has it.
    """

    def __init__(
        self,
        federation: Federation,
        colluding: int | None = None,
        projections: bool = False,
    ) -> None:
        channel = getattr(federation, "channel", None)
        if channel is None or not channel.here or federation.sums.hides_vectors:
            raise InputError(
                "federation-cannot-mask",
                f"SecureAggregation takes a Cohort, got {type(federation).__name__}.",
            )
        n = len(federation.names)
        several = most_weightings(n, colluding_of(n, colluding)) > 1
        super().__init__(channel, RingSums(several, projections))
        self.inner = federation

    def __repr__(self) -> str:
        return f"Secure sums over {self.inner!r}"
