"""Vectors by the name of their contents: what a site has been sent already is not sent again.

Both sides keep the last `KEPT` vectors that a question used. The coordinator only guesses what a site still has; a site
that was restarted answers which vectors it lacks, and gets them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from scaffpd.deploy.protocol.wire import Array, digest
from scaffpd.errors import InputError

KEPT = 6  # x, c and D of this round and of the last one


class Missing(Exception):
    """A question names vectors that this site does not have."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = tuple(names)


class Shelf:
    """The vectors that were used last, by digest; used on both sides, by the coordinator without the vectors."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Array | None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def use(self, name: str, array: Array | None = None) -> Array | None:
        """Take the vector of that name (or put it there) and remember that it was used."""
        held = self._held.pop(name, None)
        self._held[name] = array if held is None else held
        while len(self._held) > KEPT:
            self._held.popitem(last=False)
        return self._held[name]

    def clear(self) -> None:
        """Forget all of it."""
        self._held.clear()

    def put(self, arrays: dict[str, Array]) -> None:
        """Take what came with a question, each under the name that its contents have."""
        for name, array in arrays.items():
            if digest(array) != name:
                raise InputError("A vector's contents are not those that its name says.")
            self.use(name, array)

    def find(self, names: Iterable[str]) -> list[Array]:
        """The vectors of these names, or `Missing`."""
        wanted = list(names)
        lacking = [name for name in wanted if name not in self._held]
        if lacking:
            raise Missing(lacking)
        return [array for name in wanted if (array := self.use(name)) is not None]

    def held(self) -> dict[str, Array]:
        """Everything, the oldest first."""
        return {name: array for name, array in self._held.items() if array is not None}
