"""Who is asked, and what that costs: the books that every runtime keeps alike, for clients here or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from scaffpd.cohort.answers import Asked, Chosen
from scaffpd.errors import InputError
from scaffpd.federation import Clients, Traffic


class Ledger:
    """The books of a federation.

    Args:
        names: the clients.
        like: a tensor of the length and format of x.
    """

    def __init__(self, names: Sequence[str], like: Tensor) -> None:
        self._names, self._like, self._traffic = list(names), like, Traffic()
        self._everyone = list(range(len(names)))
        self._sent: tuple[Tensor | None, set[int] | None] = (None, set())

    @property
    def names(self) -> Sequence[str]:
        """The clients, in the order given."""
        return tuple(self._names)

    @property
    def dimension(self) -> int:
        """d, the length of x."""
        return len(self._like)

    @property
    def traffic(self) -> Traffic:
        """What training has sent so far; for clients in this process, what it would have sent."""
        return self._traffic

    def count(self, *, exchanges: int = 0, up: int = 0, down: int = 0) -> None:
        """Add to the traffic, in numbers of the format of x."""
        size = self._like.element_size()
        self._traffic.add(exchanges=exchanges, up=up * size, down=down * size)

    def _chosen(self, clients: Clients) -> Chosen:
        """The numbers of those who are asked."""
        if clients is None:
            return self._everyone
        chosen = [int(i) for i in clients]
        last = len(self._names) - 1
        if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) > last:
            raise InputError(f"clients must be distinct numbers from 0 to {last}, got {chosen}.")
        return self._everyone if chosen == self._everyone else chosen

    def _send(self, x: Tensor, chosen: Chosen) -> int:
        """How many numbers go down for these clients to have x: none to those that were asked about it just now."""
        last, known = self._sent
        known = known if last is x else set()
        if known is None:  # everyone has it
            return 0
        if chosen is self._everyone:
            self._sent = x, None
            return (len(chosen) - len(known)) * self.dimension
        new = set(chosen) - known
        self._sent = x, known | new
        return len(new) * self.dimension

    def _asked(self, chosen: Chosen) -> Asked:
        return Asked(self, chosen, len(self._names), self._like, chosen is self._everyone)
