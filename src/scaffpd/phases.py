"""How far a long step is: said from inside of it, heard by whoever shows it."""

from __future__ import annotations

from collections.abc import Callable

Hearer = Callable[[str, float], object]
_hearers: list[Hearer] = []


def hear(hearer: Hearer | None) -> None:
    """Let `hearer` know what is done and which share of it, in the place of whoever heard."""
    _hearers[:] = [hearer] if hearer else []


def tell(what: str, share: float) -> None:
    for hearer in _hearers:
        hearer(what, share)
