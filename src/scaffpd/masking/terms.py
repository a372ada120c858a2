r"""What everybody who takes part in one exchange agrees on.

Clients stand on a ring, in an order that the exchange's own name shuffles, and every client has the k nearest as its
neighbours (a Harary graph; all others where k ≥ N − 1). With t colluding clients and at most D that leave,

    k ≥ t + D + 1,    τ = k − D

are enough, whoever they are: such a graph stays connected when any t + D of its clients are taken out, so that the
masks of the others hide everything but their sum; τ > t shares are more than the colluding have of any secret; and
k − D neighbours are still there to give them. D ≤ t makes τ > k/2, so that no two halves of the neighbours can give
away both secrets of a client, of which only one may be known. That is against a server that names different survivors
to different clients, or against t clients that show it what they hold; against both at once it would take
k ≥ t + 2D + 1, so that 2τ > k + t.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from scaffpd.errors import InputError

FEWEST = 3  # with two clients, each knows the other's vector from the sum
MOST = 10  # of those who collude, or leave, unless more is asked for: 22 neighbours


class Accused(InputError):
    """What another client has shown is not its own, or cannot be used; `name` is whose it is."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(sentence)
        self.name = name


class Forgotten(InputError):
    """A client has lost what it knew of an exchange, or of the others: it was started anew."""


@dataclass(frozen=True)
class Terms:
    """One exchange.

    Attributes:
        exchange: its name, used once.
        names: who takes part.
        colluding: t, how many clients may show the server all that they know.
        leaving: D, how many may stop answering at any time.
    """

    exchange: str
    names: tuple[str, ...]
    colluding: int
    leaving: int

    def __post_init__(self) -> None:
        n, t, d = len(self.names), self.colluding, self.leaving
        if len(set(self.names)) < n or n < FEWEST:
            raise InputError(f"Secure sums need at least {FEWEST} clients with different names, got {n}.")
        if t < 1 or not 0 <= d <= t:
            raise InputError(f"Secure sums need colluding >= 1 and 0 <= leaving <= colluding, got {t} and {d}.")
        if t + d + 2 > n:
            raise InputError(
                f"Secure sums over {n} clients do not bear {t} that collude and {d} that leave: their sum may be at "
                f"most {n - 2}."
            )

    @classmethod
    def usual(cls, exchange: str, names: Sequence[str], colluding: int | None, leaving: int | None) -> Terms:
        """A third of the clients may collude, or leave (10 at most), where nothing else is said."""
        n = len(names)
        for what, number in (("colluding", colluding), ("leaving", leaving)):
            if number is not None and type(number) is not int:
                raise InputError(f"Secure sums need a whole number {what}, got {number!r}.")
        t = min(max(1, n // 3), MOST) if colluding is None else colluding
        d = min(t, max(0, n - 2 - t), n // 3) if leaving is None else leaving
        return cls(exchange, tuple(names), t, d)

    @cached_property
    def _ring(self) -> list[str]:
        def place(name: str) -> bytes:
            return hashlib.sha256(f"{self.exchange}\0{name}".encode()).digest()

        return sorted(self.names, key=place)

    @cached_property
    def degree(self) -> int:
        """k, how many neighbours everybody has."""
        k = self.colluding + self.leaving + 1
        return min(k + k % 2, len(self.names) - 1)

    @property
    def threshold(self) -> int:
        """τ, how many shares open a secret."""
        return self.degree - self.leaving

    def neighbours(self, name: str) -> tuple[str, ...]:
        """With whom this client shares masks."""
        ring = self._ring
        here, n, half = ring.index(name), len(ring), self.degree // 2
        if self.degree == n - 1:
            return tuple(other for other in ring if other != name)
        return tuple(ring[(here + step) % n] for step in range(-half, half + 1) if step)

    @cached_property
    def digest(self) -> bytes:
        """A name for all of it: every key of the exchange depends on it."""
        return hashlib.sha256(json.dumps(self.values(), sort_keys=True).encode()).digest()

    def values(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "exchange": self.exchange, "names": list(self.names), "colluding": self.colluding, "leaving": self.leaving,
        }  # fmt: skip

    @classmethod
    def of(cls, values: Any) -> Terms:
        """What `values` made, checked."""
        try:
            exchange, names = values["exchange"], tuple(values["names"])
            numbers = values["colluding"], values["leaving"]
        except (KeyError, TypeError):
            raise InputError("The terms of a secure sum are not complete.") from None
        words = isinstance(exchange, str) and all(isinstance(name, str) for name in names)
        if not words or not all(isinstance(k, int) and not isinstance(k, bool) for k in numbers):
            raise InputError("The terms of a secure sum are not complete.")
        return cls(exchange, names, *numbers)
