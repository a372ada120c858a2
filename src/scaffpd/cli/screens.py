"""Output of commands: tables, sections, and the rounds of a running job."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

WIDEST = 100  # columns: longer lines of prose are hard to read
# characters of the whole way, and of the largest weight
BAR = 30
WEIGHT_BAR = 16
# that are shown while a command runs, and in a table
CLIENTS = 12
MOST = 30
PAUSE = 1.0  # seconds between two plain lines


def say(console: Console, *lines: str) -> None:
    """Print prose, each line wrapped for the screen."""
    for line in filter(None, lines):
        console.print(line, markup=False, width=min(console.width, WIDEST))


def section(console: Console, title: str | None, *lines: str) -> None:
    """Print a heading and prose below it."""
    console.print()
    if title is not None:
        console.print(title, style="bold")
    say(console, *lines)


def bullets(console: Console, lines: Sequence[Text | str]) -> None:
    """Print a list; characters that a screen cannot show become "?"."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        grid.add_row("-", printable(line) if isinstance(line, str) else line)
    console.print(grid, width=min(console.width, WIDEST))


def printable(text: str) -> Text:
    """Return text from a file without what could steer a terminal."""
    return Text("".join(c if c.isprintable() else "?" for c in text))


def facts(console: Console, lines: Mapping[str, str | Text]) -> None:
    """Print names, and what there is to say about each."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    for name, text in lines.items():
        grid.add_row(name, Text(text) if isinstance(text, str) else text)
    console.print(grid, width=min(console.width, WIDEST))


def plain_table(first: str, *others: str, gap: int = 2) -> Table:
    """Return a table without walls: names on the left, numbers flush right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def fill(table: Table, rows: Sequence[Sequence[Text | str]], width: int, file: str = "") -> None:
    """Add rows whose first cells are names; a name that does not fit beside the numbers is cut, never broken.

    Of many rows, the first and the last, where the others are in a `file`.
    """
    from rich.cells import cell_len, set_cell_size

    if file and len(rows) > MOST:
        table.caption = f"the first and last {MOST // 2} of {len(rows)}; all are in {file}"
        rows = [*rows[: MOST // 2], *rows[-MOST // 2 :]]
    columns = zip(*([str(cell) for cell in row[1:]] for row in rows), strict=True)
    heads = [str(column.header).split("\n") for column in table.columns[1:]]
    used = [max(map(cell_len, (*head, *cells))) for head, cells in zip(heads, columns, strict=True)]
    gap = 1 + (table.padding[1] if isinstance(table.padding, tuple) else 0)
    room = max(width - sum(used) - gap * len(used), 12)
    for name, *cells in rows:
        whole = str(name)
        short = whole if cell_len(whole) <= room else f"{set_cell_size(whole, room - 1).rstrip()}…"
        table.add_row(Text(short, no_wrap=True), *cells)


class RoundsScreen:
    """The rounds of a run while they are made: a bar towards the certified gap, and every client's loss and weight λ.

    The picture is drawn anew after every round; where nobody looks, plain lines take its place. Training is drawn on
    standard error (`errors`), so that standard output has the result alone.
    """

    def __init__(self, quiet: bool = False, errors: bool = True, pause: float = PAUSE) -> None:
        self.console = Console(stderr=errors, quiet=quiet, highlight=False)
        seen = self.console.is_terminal and not quiet
        self.live = (
            Live(console=self.console, refresh_per_second=4, transient=True) if seen else None
        )
        self.pause = pause  # seconds between two plain lines

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, sentence: str) -> None:
        """Print a sentence above the picture."""
        self.console.print(sentence, markup=False, soft_wrap=True)

    def begin(self, model: str, names: Sequence[str], rounds: int, tol: float | None) -> None:
        """Start with a model that is about to be trained."""
        self.model, self.names, self.rounds, self.tol = model, tuple(names), rounds, tol
        self.began = time.monotonic()
        self.said = -math.inf
        self.first, self.line = math.inf, dict[str, Any]()
        if self.live is not None and model:
            self.live.update(f"{model}: looking at the data")

    def show(self, info: Any) -> None:
        """Show a round of training."""
        state = info.state
        numbers = {
            "losses": state.losses,
            "weights": state.weights / (float(state.weights.sum()) or 1.0),
        }
        gap = float(state.certificate)
        about = {"round": info.rounds, "certificate": gap if math.isfinite(gap) else None}
        spent = {"seconds": time.monotonic() - self.began}
        self.watch({**about, **numbers, **spent, "members": self.names, "absent": ()})

    def watch(self, line: Mapping[str, Any]) -> None:
        """Show a line of a run's progress: a round, or something that happened to a silo."""
        if "event" in line:
            self.say(f"round {line['event']['round']}: {line['event']['sentence']}")
            return
        self.line = dict(line)
        if self.first == math.inf and line["certificate"]:
            self.first = line["certificate"]
        if self.live is not None:
            self.live.update(self.picture())
        elif self._done() >= 1 or time.monotonic() - self.said >= self.pause:
            self.said = time.monotonic()
            self.say(
                f"{self._title()}  {self._gap()}  {self._losses()}  {_seconds(line['seconds'])}"
            )

    def picture(self) -> Group:
        """Draw the last round."""
        done = self._done()
        spent = self.line["seconds"]
        left = (
            f", about {_seconds(spent * (1 - done) / done)} left"
            if self.line["round"] > 1 and 0 < done < 1
            else ""
        )
        full = round(BAR * done)
        bar = Text.assemble(("━" * full, "green"), ("━" * (BAR - full), "dim"))
        bar.append(f" {self._title()}, {_seconds(spent)}{left}")
        return Group(
            bar, Text("; ".join(filter(None, (self._gap(), self._losses())))), self._clients()
        )

    def _title(self) -> str:
        return f"{self.model} round {self.line['round']}".strip()

    def _done(self) -> float:
        """Return the share of the way that is done: in the logarithm of the certificate, or in rounds."""
        share = float(self.line["round"]) / self.rounds
        gap = self.line["certificate"]
        if self.tol is not None and gap and self.tol < self.first < math.inf:
            share = max(share, math.log(self.first / gap) / math.log(self.first / self.tol))
        return min(max(share, 0.0), 1.0)

    def _gap(self) -> str:
        gap = self.line["certificate"]
        absent = self.line["absent"]
        if gap is None:
            return f"nothing is certified: {', '.join(absent)} away" if absent else "no certificate"
        return f"certified gap {gap:.1e}{'' if self.tol is None else f' of {self.tol:.0e} wanted'}"

    def _losses(self) -> str:
        losses = dict(zip(self.line["members"], self.line["losses"], strict=True))
        if any(map(math.isnan, losses.values())):
            return ""  # they are hidden, or were not looked up
        worst = max(losses, key=losses.__getitem__)
        return f"loss: mean {sum(losses.values()) / len(losses):.4f}, worst {losses[worst]:.4f} ({worst})"

    def _clients(self) -> Table:
        """Make a table with a row per client, of many those that count most."""
        table = Table(
            "",
            "loss",
            "weight λ",
            "",
            "",
            box=None,
            pad_edge=False,
            padding=(0, 2, 0, 0),
            header_style="dim",
        )
        values = zip(self.line["losses"], self.line["weights"], strict=True)
        found = dict(zip(self.line["members"], values, strict=True))
        largest = (
            max((weight for _, weight in found.values() if weight == weight), default=0.0) or 1.0
        )
        order = sorted(self.names, key=lambda name: -found.get(name, (0, 0))[1])
        for name in self.names if len(order) <= CLIENTS else order[:CLIENTS]:
            loss, weight = found.get(name, (math.nan, math.nan))
            away = "dropped" if name not in found else "away" if name in self.line["absent"] else ""
            known = f"{loss:.4f}" if loss == loss else "" if away == "dropped" else "hidden"
            counts = (f"{weight:6.1%}", _bar(weight / largest)) if weight == weight else ("", "")
            style = {"dropped": "dim", "away": "yellow"}.get(away, "")
            table.add_row(Text(name[:30]), known, *counts, away, style=style)
        if len(order) > CLIENTS:
            rest = sum(found.get(name, (0.0, 0.0))[1] for name in order[CLIENTS:])
            table.add_row(
                Text(f"{len(order) - CLIENTS} others", style="dim"), "", f"{rest:6.1%}", ""
            )
        return table


def _bar(share: float) -> str:
    """Draw a share in eighths of a character."""
    eighths = round(8 * WEIGHT_BAR * min(max(share, 0.0), 1.0))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _seconds(s: float) -> str:
    return f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 5400 else f"{s / 3600:.1f} h"
