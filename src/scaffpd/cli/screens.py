"""What commands show: tables, sections, and live pictures of training and of a deployment."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from scaffpd.deploy.coordinate import Outcome

WIDEST = 100  # columns: longer lines of prose are hard to read
BAR, WEIGHT_BAR, SILO_BAR = 30, 16, 20  # characters of the whole way, of the largest weight, of a weight of one
CLIENTS, MOST = 12, 30  # that are shown while a command runs, and in a table
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


class LiveScreen:
    """A picture that is drawn anew while a command runs; `live` is `None` where nobody looks.

    With `errors` it is drawn on standard error, so that standard output has the result alone.
    """

    def __init__(self, quiet: bool, errors: bool = False) -> None:
        self.console = Console(stderr=errors, quiet=quiet, highlight=False)
        seen = self.console.is_terminal and not quiet
        self.live = Live(console=self.console, refresh_per_second=4, transient=True) if seen else None

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


class TrainingScreen(LiveScreen):
    """A bar towards the certified gap, the clients served worst and on average, and their weights λ."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet, errors=True)
        self.model, self.rounds = "", 1
        self.names: tuple[str, ...] = ()
        self.tol: float | None = None
        self.began = self.said = 0.0
        self.first = math.inf

    def begin(self, model: str, names: Sequence[str], rounds: int, tol: float | None) -> None:
        """Start with a model that is about to be trained."""
        self.model, self.names, self.rounds, self.tol = model, tuple(names), rounds, tol
        self.began, self.said, self.first = time.monotonic(), -math.inf, math.inf
        if self.live is not None:
            self.live.update(f"{model}: looking at the data")

    def show(self, info: Any) -> None:
        """Show a round that is done."""
        state = info.state
        self.first = float(info.history["certificate"][0])
        if self.live is not None:
            self.live.update(self._picture(info.rounds, state))
        elif self._done(info.rounds, state) >= 1 or time.monotonic() - self.said >= PAUSE:
            self.said = time.monotonic()
            self.say(self._words(info.rounds, state))

    def _done(self, rounds: int, state: Any) -> float:
        """How much of the way is behind: of the certificate's on a logarithmic scale, or of the rounds."""
        share, gap = rounds / self.rounds, float(state.certificate)
        if self.tol is not None and 0 < gap < math.inf and self.tol < self.first < math.inf:
            share = max(share, math.log(self.first / gap) / math.log(self.first / self.tol))
        return min(max(share, 0.0), 1.0)

    def _gap(self, state: Any) -> str:
        gap = float(state.certificate)
        if math.isinf(gap):
            return "no certificate"
        goal = "" if self.tol is None else f" of {self.tol:.0e} wanted"
        return f"certified gap {gap:.1e}{goal}"

    def _words(self, rounds: int, state: Any) -> str:
        return f"{self.model}  round {rounds:3d}  {self._gap(state)}  {self._losses(state)}"

    def _losses(self, state: Any) -> str:
        worst = int(state.losses.argmax())
        if math.isnan(state.losses[worst]):
            return ""  # they were not looked up
        return f"loss: mean {state.losses.mean():.4f}, worst {state.losses[worst]:.4f} ({self.names[worst]})"

    def _picture(self, rounds: int, state: Any) -> Group:
        done, spent = self._done(rounds, state), time.monotonic() - self.began
        left = "" if rounds < 2 or not 0 < done < 1 else f", about {_seconds(spent * (1 - done) / done)} left"
        full = round(BAR * done)
        bar = Text.assemble((f"{self.model} ", "bold"), ("━" * full, "green"), ("━" * (BAR - full), "dim"))
        bar.append(f" round {rounds}, {_seconds(spent)}{left}")
        return Group(bar, Text(f"{self._gap(state)};  {self._losses(state)}"), self._weights(state))

    def _weights(self, state: Any) -> Table:
        """λ as small bars: of all clients in their order where they are few, else of the largest."""
        table, shares = Table.grid(padding=(0, 2, 0, 0)), state.weights / (float(state.weights.sum()) or 1.0)
        largest = float(shares.max()) or 1.0
        order = (-shares).argsort(kind="stable")
        for i in sorted(order) if len(order) <= CLIENTS else order[:CLIENTS]:
            table.add_row(Text(self.names[i][:30]), f"{shares[i]:6.1%}", _bar(float(shares[i]) / largest))
        if len(order) > CLIENTS:
            rest = float(shares[order[CLIENTS:]].sum())
            table.add_row(Text(f"{len(order) - CLIENTS} others", style="dim"), f"{rest:6.1%}", "")
        return table


def _bar(share: float) -> str:
    """Draw a share in eighths of a character."""
    eighths = round(8 * WEIGHT_BAR * min(max(share, 0.0), 1.0))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _seconds(s: float) -> str:
    return f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 5400 else f"{s / 3600:.1f} h"


class DeploymentScreen(LiveScreen):
    """Rounds and events of a run, as they come, on their way to the certified gap `tol`."""

    def __init__(self, silos: Sequence[str], tol: float | None, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.silos, self.tol, self.quiet = silos, tol, quiet
        self.last: Mapping[str, Any] = {}

    def watch(self, line: Mapping[str, Any]) -> None:
        """Show a line of the run's progress."""
        if "event" in line:
            self.console.print(f"round {line['event']['round']}: {line['event']['sentence']}", markup=False)
            return
        self.last = line
        if self.live is not None:
            self.live.update(self._picture(line))
        else:
            self.say(self._words(line))

    def _gap(self, line: Mapping[str, Any]) -> str:
        if line["certificate"] is None:
            return f"nothing is certified: {', '.join(line['absent'])} away" if line["absent"] else "no certificate"
        return f"certified gap {line['certificate']:.1e}"

    def _words(self, line: Mapping[str, Any]) -> str:
        worst = max(zip(line["losses"], line["members"], strict=True))
        loss = "" if math.isnan(worst[0]) else f"  worst {worst[1]} {worst[0]:.4f}"  # hidden losses are not known here
        return f"round {line['round']:4d}  {self._gap(line)}{loss}  {line['seconds']:.1f} s"

    def _picture(self, line: Mapping[str, Any]) -> Group:
        table = Table(box=None, pad_edge=False)
        for heading in ("silo", "loss", "weight", ""):
            table.add_column(heading, justify="right" if heading in ("loss", "weight") else "left")
        numbers = dict(zip(line["members"], zip(line["losses"], line["weights"], strict=True), strict=True))
        for name in self.silos:
            if name not in numbers:
                table.add_row(name, "", "", "dropped", style="dim")
                continue
            loss, weight = numbers[name]
            if math.isnan(loss):
                table.add_row(name, "hidden", "", "  away" if name in line["absent"] else "")
                continue
            away = "  away" if name in line["absent"] else ""
            bar = "█" * round(SILO_BAR * max(0.0, min(weight, 1.0)))
            table.add_row(name, f"{loss:.4f}", f"{weight:.3f}", f"{bar}{away}", style="yellow" if away else "")
        goal = "" if self.tol is None else f" of {self.tol:g} wanted"
        return Group(Text(f"round {line['round']}, {self._gap(line)}{goal}, {line['seconds']:.1f} s"), table)

    def end(self, outcome: Outcome, folder: Path) -> None:
        """Show the result."""
        if self.last:
            self.console.print(self._picture(self.last))
        self.console.print(outcome.sentence, markup=False)
        if outcome.status != "failed":
            self.console.print(f"Results: {folder}", markup=False, soft_wrap=True)
            self.console.print(f"To look at: scaffpd report {folder}", markup=False, soft_wrap=True)
