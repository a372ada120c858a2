"""A comparison as a table that fits the screen."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scaffpd.comparison import words

if TYPE_CHECKING:
    from scaffpd.comparison.tables import Comparison, Line

GAP = 2
LABEL = 30  # a longer one may be broken into lines


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        heading: two lines.
        cell: the text of a method.
        value: the number behind it, for the best to be bold; `None` where there is no best.
        sign: 1 where larger is better, −1 where smaller is.
        keep: columns with the smallest are left out first where the screen is narrow.
    """

    heading: tuple[str, str]
    cell: Callable[[Line], str]
    value: Callable[[Line], float] | None
    sign: int
    keep: int


def columns(comparison: Comparison) -> list[Column]:
    """All columns, in the order in which they are shown."""
    main = "accuracy" if comparison.classification else "loss"
    chosen = [Column(("", "method"), lambda line: line.method, None, 0, 99)]
    chosen += [
        _measure(main, ("accuracy %" if main == "accuracy" else main, "worst 20 %"), "worst_20", 98),
        _measure(main, ("", "mean"), "mean", 97),
        _measure(main, ("", "best 20 %"), "best_20", 90),
        _measure(main, ("", "sd"), "deviation", 60),
        _measure(main, ("", "Gini"), "gini", 30),
    ]
    if comparison.classification:
        chosen += [
            _measure("loss", ("loss", "worst 20 %"), "worst_20", 50),
            _measure("loss", ("", "mean"), "mean", 40),
        ]
    return [
        *chosen,
        Column(("", "J"), lambda line: _or(line.local_steps, "–"), None, 0, 95),
        Column(("", "batch"), lambda line: _or(line.batch_size, "all"), None, 0, 94),
        _cost(("ex-", "changes"), lambda line: line.mean["exchanges"], 93),
        _cost(("", "MB"), lambda line: line.mean["megabytes_up"] + line.mean["megabytes_down"], 92, digits=2),
        _cost(("", "seconds"), lambda line: line.mean["seconds"], 20, digits=1),
    ]


def _measure(kind: str, heading: tuple[str, str], measure: str, keep: int) -> Column:
    name = f"test_{kind}_{measure}"
    percent = kind == "accuracy" and measure != "gini"
    larger = kind == "accuracy" and measure not in ("gini", "deviation")
    return Column(
        heading,
        lambda line: words.with_deviation(line.mean[name], line.deviation[name], percent),
        lambda line: line.mean[name],
        1 if larger else -1,
        keep,
    )


def _cost(heading: tuple[str, str], value: Callable[[Line], float], keep: int, digits: int = 0) -> Column:
    def cell(line: Line) -> str:
        number = value(line)
        if digits and 0 < number < 10**-digits / 2:
            return f"{number:.0e}"
        return f"{number:.{digits if number < 10 else min(digits, 1)}f}"

    return Column(heading, cell, value, -1, keep)


def fitting(comparison: Comparison, width: int) -> tuple[list[Column], list[Line]]:
    """The columns that fit, and the lines that are ranked."""
    lines = [line for line in comparison.table if not line.failures]
    chosen = columns(comparison)
    while len(chosen) > 3 and _total(chosen, lines) > width:
        chosen.remove(min(chosen, key=lambda column: column.keep))
    return chosen, lines


def _total(chosen: list[Column], lines: list[Line]) -> int:
    widths = [_width(column, lines) for column in chosen]
    return min(widths[0], LABEL) + sum(width + GAP for width in widths[1:])


def _width(column: Column, lines: list[Line]) -> int:
    return max(len(text) for text in (*column.heading, *(column.cell(line) for line in lines)))


def best_text(column: Column, lines: list[Line]) -> str | None:
    """The text of the best cell: whatever looks the same is as good."""
    if column.value is None or not lines:
        return None
    value = column.value
    return column.cell(max(lines, key=lambda line: column.sign * value(line)))


def rich(comparison: Comparison, width: int) -> Iterator[Any]:
    """A Rich table and its caption."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    chosen, lines = fitting(comparison, width)
    padding = (0, GAP - 1, 0, 0)  # the box adds a blank between columns
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    for i, column in enumerate(chosen):
        table.add_column("\n".join(column.heading), justify="right" if i else "left", no_wrap=i > 0)
    best = [best_text(column, lines) for column in chosen]
    for line in lines:
        cells = [(column.cell(line), text) for column, text in zip(chosen, best, strict=True)]
        table.add_row(*(Text(cell, style="bold" if cell == text else "") for cell, text in cells))
    if lines:
        yield table
        yield ""
    yield from (Text(sentence) for sentence in words.caption(comparison, {c.heading[1] for c in chosen}))


def text(comparison: Comparison) -> str:
    """The same in plain characters, as wide as the terminal (or 100 columns)."""
    screen = shutil.get_terminal_size((100, 24)).columns
    chosen, lines = fitting(comparison, screen)
    widths = [_width(column, lines) for column in chosen]

    def row(cells: list[str]) -> str:
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return (" " * GAP).join(padded).rstrip()

    table = [row([column.heading[i] for column in chosen]) for i in (0, 1)]
    table += [row([column.cell(line) for column in chosen]) for line in lines]
    below = [textwrap.fill(sentence, screen) for sentence in words.caption(comparison, {c.heading[1] for c in chosen})]
    return "\n".join([*table, "", *below] if lines else below)


def _or(value: Any, default: str) -> str:
    return default if value is None else str(value)
