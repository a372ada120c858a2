"""The clients' account: which questions have been answered, what that has cost, and what would cost too much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.privacy.accountant import Release, Spent, epsilon, of_clients
from scaffpd.privacy.noise import MARK

AHEAD = (1.0, 1 / 4, 1 / 16)  # by which shares more releases are looked at, so that few have to be
Arrays = dict[str, NDArray[Any]]


class Entry(NamedTuple):
    """A question that a client answers.

    Attributes:
        client: its number.
        mark: of the question.
        release: what kind of release it is.
        times: how many of them; a longer plan of local steps contains the shorter one.
    """

    client: int
    mark: bytes
    release: Release
    times: int = 1


class Account:
    """What N clients have released.

    Args:
        names: the clients.
        delta: δ.
        budget: the largest ε that a client may spend; `None` counts and never refuses.
    """

    def __init__(self, names: Sequence[str], delta: float, budget: float | None) -> None:
        self.names, self.delta, self.budget = tuple(names), delta, budget
        self.entries: dict[bytes, Entry] = {}
        self.releases: list[dict[Release, int]] = [{} for _ in names]
        self._fits: list[dict[Release, int]] = [{} for _ in names]
        self._exceeds: list[dict[Release, int]] = [{} for _ in names]

    @property
    def total(self) -> int:
        """How many releases have been made."""
        return sum(sum(own.values()) for own in self.releases)

    def charge(self, entries: Sequence[Entry]) -> None:
        """Count what is new among the entries; all of it or, beyond the budget, nothing and a sentence."""
        new = [entry for entry in entries if entry.times > self._known(entry.mark)]
        after: dict[int, dict[Release, int]] = {}
        for entry in new:
            own = after.setdefault(entry.client, dict(self.releases[entry.client]))
            own[entry.release] = own.get(entry.release, 0) + entry.times - self._known(entry.mark)
        for client, own in after.items():
            if self.budget is not None and not self._affordable(client, own):
                raise InputError(
                    f"Client {self.names[client]!r} has a privacy budget of ε = {self.budget:g}, and this answer would "
                    f"bring it to {epsilon(own, self.delta):.4g}: it does not answer."
                )
        for client, own in after.items():
            self.releases[client] = own
        self.entries |= {entry.mark: entry for entry in new}

    def _known(self, mark: bytes) -> int:
        return self.entries[mark].times if mark in self.entries else 0

    def _affordable(self, client: int, own: dict[Release, int]) -> bool:
        """Whether ε is within the budget; looked at for more releases than these, which then need no look."""
        fits, exceeds = self._fits[client], self._exceeds[client]
        if fits and all(n <= fits.get(release, 0) for release, n in own.items()):
            return True
        for share in (*AHEAD, 0.0):
            more = {release: math.ceil((1 + share) * n) for release, n in own.items()}
            if exceeds and all(more.get(release, 0) >= n for release, n in exceeds.items()):
                continue
            if epsilon(more, self.delta) <= float(self.budget or 0):
                self._fits[client] = more
                return True
            self._exceeds[client] = exceeds = more
        return False

    def spent(self) -> Spent:
        """What every client has spent."""
        return of_clients(self.names, self.releases, self.delta)

    def pack(self) -> Arrays:
        """Every entry as arrays, for a checkpoint."""
        entries = list(self.entries.values())
        marks = np.frombuffer(b"".join(entry.mark for entry in entries), dtype=np.uint8)
        return {
            "privacy.marks": marks.reshape(-1, MARK),
            "privacy.clients": np.array([entry.client for entry in entries], dtype=np.int64),
            "privacy.releases": np.array([entry.release for entry in entries], dtype=np.float64).reshape(-1, 2),
            "privacy.times": np.array([entry.times for entry in entries], dtype=np.int64),
        }

    def merge(self, arrays: Arrays) -> None:
        """Add what an earlier part of the run has released; questions that both have answered count once."""
        columns = [arrays[f"privacy.{name}"] for name in ("clients", "marks", "releases", "times")]
        for client, mark, (noise, rate), times in zip(*columns, strict=True):
            entry = Entry(int(client), mark.tobytes(), Release(float(noise), float(rate)), int(times))
            if (more := entry.times - self._known(entry.mark)) > 0:
                own = self.releases[entry.client]
                own[entry.release] = own.get(entry.release, 0) + more
                self.entries[entry.mark] = entry
