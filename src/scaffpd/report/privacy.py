"""The promise of a private run, as its folder states it, and what it leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scaffpd.errors import InputError
from scaffpd.report.files import number
from scaffpd.report.formats import plain

SEEDED = "Noise was drawn from a seed, to be repeated: whoever knows the seed can take it off, so nobody is protected."
SYMBOLS = {"clip": "gradient C", "loss_clip": "loss B", "radius": "length of a row R", "smoothness": "smoothness L"}
NOISE = {"noise": "of gradients z", "loss_noise": "of losses z_L"}
NOT_COVERED = (
    "ε counts what was sent in training. The scores here, counts of rows and labels, and the means, deviations, "
    "categories and fills of columns are exact and not covered."
)

SENT = (
    "The losses here are those that silos have sent, and carry noise. Names and numbers of rows, labels, columns and "
    "categories, and sums over columns, are exact and not covered by ε."
)


@dataclass(frozen=True)
class Privacy:
    """(ε, δ) for every training row.

    Attributes:
        epsilon: the largest ε_i, of all models together.
        delta: δ.
        clients: ε_i by client.
        models: how many models share it.
        seeded: whether noise can be repeated.
        settings: (what, how) pairs.
        scored: whether scores were made besides; else they are losses that clients have sent, noise and all.
    """

    epsilon: float
    delta: float
    clients: Mapping[str, float] = field(default_factory=dict, repr=False)
    models: int = 1
    seeded: bool = False
    settings: tuple[tuple[str, str], ...] = ()
    scored: bool = True

    @property
    def pair(self) -> str:
        """Both numbers."""
        return f"(ε, δ) = ({self.epsilon:.2f}, {self.delta:g})"

    @property
    def whom(self) -> str:
        """What the numbers are about."""
        all_of_them = "" if self.models < 2 else "both" if self.models == 2 else f"all {self.models}"
        return f"for every record, {all_of_them} models together" if all_of_them else "for every record"

    @property
    def sentence(self) -> str:
        """The promise; ε_i as well where clients differ."""
        low = min(self.clients.values(), default=self.epsilon)
        least = "" if f"{low:.2f}" == f"{self.epsilon:.2f}" else f"; the least of a client is {low:.2f}"
        return f"{self.pair} {self.whom}{least}."

    def cautions(self, rows: Mapping[str, int | None]) -> tuple[str, ...]:
        """What the promise leaves open, for clients with so many training rows."""
        many = [(name, n) for name, n in rows.items() if n and self.delta * n >= 1]
        doubt = [
            f"δ = {self.delta:g} is no less than one over the {n} rows of {name}: one of them may be given away."
            for name, n in many[:1]
        ]
        return (*([SEEDED] if self.seeded else []), *doubt, NOT_COVERED if self.scored else SENT)


def read_privacy(found: Any) -> Privacy | None:
    """From "privacy" of a summary; `None` where there is none."""
    if found is None:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("clients") or {}, dict):
        raise InputError("The summary has no table of its privacy; the run has to be made again.")
    epsilon, delta = number(found, "epsilon"), number(found, "delta")
    if epsilon is None or delta is None:
        raise InputError("The summary has a privacy without ε and δ; the run has to be made again.")
    clients = {str(name): float(value) for name, value in (found.get("clients") or {}).items()}
    models = len(found.get("models") or [1])
    return Privacy(epsilon, delta, clients, models, bool(found.get("seeded")), _settings(found))


def _settings(found: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Clips and noise in words."""
    clips = [f"{name} = {found[key]:g}" for key, name in SYMBOLS.items() if found.get(key) is not None]
    noise = [f"{name} = {_reach(found[key])}" for key, name in NOISE.items() if found.get(key) is not None]
    pairs = (("Privacy: clips", ", ".join(clips)), ("Privacy: noise multipliers", ", ".join(noise)))
    return tuple((name, text) for name, text in pairs if text)


def _reach(value: Any) -> str:
    several = value if isinstance(value, list) else [value]
    low, high = plain(min(several)), plain(max(several))
    return low if low == high else f"{low} to {high}"
