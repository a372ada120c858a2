"""The methods of this package under the names that their papers gave them, and ours."""

from __future__ import annotations

from collections.abc import Iterable

from scaffpd.algorithms import ALGORITHMS, Algorithm
from scaffpd.errors import unknown
from scaffpd.objectives.base import Objective


def zoo(objective: Objective, local_steps: int = 10, batch_size: int | None = None) -> dict[str, Algorithm]:
    """The methods by their names; quasi-Newton minimax stands for those whose servers see every client's gradient.

    Those that minimise an objective of their own keep it, as published: the average for FedAvg, FedProx, SCAFFOLD and
    ProxSkip, the worst client for AFL and DRFA, q = 1 for q-FFL, the worst half for Δ-FL. AFL makes one local step,
    as published, and under its second name as many as the others (the Scaff-PD paper's choice). GDA, extragradient, APD
    and quasi-Newton minimax make none, and subspace saddle as many as it needs: all five use all samples.

    Args:
        objective: of the methods that take any.
        local_steps: local steps per round of those that have them (of ProxSkip, the expected number).
        batch_size: samples per local gradient; `None` is all.
    """
    listed: dict[str, Algorithm] = {}
    for kind in ALGORITHMS.values():
        listed |= kind.usual(objective, local_steps, batch_size) if kind.published else {}
    return listed


def chosen(methods: dict[str, Algorithm], names: Iterable[str]) -> dict[str, Algorithm]:
    """Those with the given names, in the order of `methods`; case, hyphens and blanks do not matter."""
    known = {_plain(type(method).__name__): label for label, method in methods.items()}
    known |= {_plain(label): label for label in methods}
    wanted = set()
    for name in names:
        if _plain(name) not in known:
            raise unknown("method", name, methods)
        wanted.add(known[_plain(name)])
    return {label: method for label, method in methods.items() if label in wanted}


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().replace("δ", "delta") if c.isalnum())
