"""What a deployment shows while it runs: a live table in a terminal, a line per round elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaffpd.cli.live import LiveScreen

if TYPE_CHECKING:
    from rich.console import Group

    from scaffpd.deploy.coordinator.coordinate import Outcome

BAR = 20  # characters of a weight of one


class Screen(LiveScreen):
    """Rounds and events of a run, as they come.

    Args:
        silos: the federation's.
        tol: the certified gap that is asked for.
        quiet: print nothing.
    """

    def __init__(self, silos: Sequence[str], tol: float | None, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.silos, self.tol, self.quiet = silos, tol, quiet
        self.last: Mapping[str, Any] = {}

    def watch(self, line: Mapping[str, Any]) -> None:
        """A line of the run's progress."""
        if "event" in line:
            self.console.print(f"round {line['event']['round']}: {line['event']['sentence']}", markup=False)
            return
        self.last = line
        self.draw(self._picture(line), self._words(line))

    def _gap(self, line: Mapping[str, Any]) -> str:
        if line["certificate"] is None:
            return f"nothing is certified: {', '.join(line['absent'])} away" if line["absent"] else "no certificate"
        return f"certified gap {line['certificate']:.1e}"

    def _words(self, line: Mapping[str, Any]) -> str:
        worst = max(zip(line["losses"], line["members"], strict=True))
        return f"round {line['round']:4d}  {self._gap(line)}  worst {worst[1]} {worst[0]:.4f}  {line['seconds']:.1f} s"

    def _picture(self, line: Mapping[str, Any]) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for heading in ("silo", "loss", "weight", ""):
            table.add_column(heading, justify="right" if heading in ("loss", "weight") else "left")
        numbers = {
            name: (loss, w) for name, loss, w in zip(line["members"], line["losses"], line["weights"], strict=True)
        }
        for name in self.silos:
            if name not in numbers:
                table.add_row(name, "", "", "dropped", style="dim")
                continue
            loss, weight = numbers[name]
            away = "  away" if name in line["absent"] else ""
            bar = "█" * round(BAR * max(0.0, min(weight, 1.0)))
            table.add_row(name, f"{loss:.4f}", f"{weight:.3f}", f"{bar}{away}", style="yellow" if away else "")
        goal = "" if self.tol is None else f" of {self.tol:g} wanted"
        return Group(Text(f"round {line['round']}, {self._gap(line)}{goal}, {line['seconds']:.1f} s"), table)

    def end(self, outcome: Outcome, folder: Path) -> None:
        """The result."""
        if self.last:
            self.console.print(self._picture(self.last))
        self.console.print(outcome.sentence, markup=False)
        if outcome.status != "failed":
            self.console.print(f"Results: {folder}", markup=False, soft_wrap=True)
            self.console.print(f"To look at: scaffpd report {folder}", markup=False, soft_wrap=True)
