"""Vectors by name: what a site has been sent already is not sent again.

Vectors are values, nobody changes one in place; so the coordinator gives every tensor that it sends a name, once. Both
sides keep the last `KEPT` vectors that a question used. The coordinator only guesses what a site still has; a site that
was restarted answers which vectors it lacks, and gets them.
"""

from __future__ import annotations

import secrets
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor

from scaffpd.deploy.protocol.wire import Array

KEPT = 6  # x, c and D of this round and of the last one


class Missing(Exception):
    """A question names vectors that this site does not have."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = tuple(names)


class Names:
    """Names for tensors, by identity; those of another coordinator, or of an earlier one, are never the same."""

    def __init__(self) -> None:
        self._prefix, self._count = secrets.token_hex(8), 0
        self._known: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def __call__(self, tensor: Tensor) -> str:
        """The tensor's name."""
        key = id(tensor)
        known = self._known.get(key)
        if known is not None and known[0]() is tensor:
            return known[1]
        self._count += 1
        name = f"{self._prefix}-{self._count}"
        self._known[key] = weakref.ref(tensor, lambda _: self._known.pop(key, None)), name
        return name


class Shelf:
    """The vectors that were used last; the coordinator has one for every site, without the vectors."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Array | None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._held

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

    def put(self, arrays: Mapping[str, Array]) -> None:
        """Take what came with a question."""
        for name, array in arrays.items():
            self._held.pop(name, None)
            self.use(name, np.array(array))

    def find(self, names: Iterable[str]) -> dict[str, Array]:
        """The vectors of these names, or `Missing`."""
        wanted = list(names)
        lacking = [name for name in wanted if name not in self._held]
        if lacking:
            raise Missing(lacking)
        return {name: array for name in wanted if (array := self.use(name)) is not None}

    def last(self, most: int) -> dict[str, Array]:
        """The vectors that were used last, the oldest first."""
        return {name: array for name, array in list(self._held.items())[-most:] if array is not None}
