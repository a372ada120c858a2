"""How everything here is measured: candidates take turns, so that a busy minute hits all of them
alike.

A measurement is a list of rows (dictionaries, one per line of a table). `Timing` keeps the seconds
of every turn, and a ratio is the median over turns of ratios *within* a turn, with the range of the
middle half beside it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Row = dict[str, Any]
Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of every candidate, turn by turn."""

    seconds: Mapping[str, list[float]] = field(repr=False)

    def median(self, name: str) -> float:
        """The middle of a candidate's times."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, to: str) -> tuple[float, float, float]:
        """(median, lower quartile, upper quartile) of name's seconds over those of `to` in the same
        turn.
        """
        ratios = [a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True)]
        return statistics.median(ratios), *quartiles(ratios)


def quartiles(values: list[float]) -> tuple[float, float]:
    """Where the middle half of the values begins and ends."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def interleaved(
    calls: Mapping[str, Call], turns: int = 7, least: float = 0.02, sync: Call = lambda: None
) -> Timing:
    """Every candidate in every turn, in changing order; short calls are repeated until `least`
    seconds are full.

    Args:
        calls: what to time, by name.
        turns: how often; one more turn goes before to warm up.
        least: seconds below which a single call cannot be timed well.
        sync: waits for a device.
    """
    repeats = {name: _repeats(call, least, sync) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for turn in range(turns):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            gc.collect()
            sync()
            begun = time.perf_counter()
            for _ in range(repeats[name]):
                calls[name]()
            sync()
            seconds[name].append((time.perf_counter() - begun) / repeats[name])
    return Timing(seconds)


def _repeats(call: Call, least: float, sync: Call) -> int:
    call()
    sync()
    begun = time.perf_counter()
    call()
    sync()
    return max(1, round(least / max(time.perf_counter() - begun, 1e-7)))


def exponent(sizes: Iterable[float], costs: Iterable[float]) -> float:
    """The p of the power law cost ∝ size^p that fits best on logarithmic axes."""
    return float(np.polyfit(np.log(list(sizes)), np.log(list(costs)), 1)[0])


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table; columns in the order of the first row."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(shown(row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A cell: three digits of a number, thousands apart."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
