"""What training shows while it runs: a live picture in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scaffpd.cli.live import LiveScreen

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

BAR, SMALL, CLIENTS = 30, 16, 12  # characters of the bar, of a weight of one, and clients that are shown
PAUSE = 1.0  # seconds between two plain lines


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
        """A model is about to be trained."""
        self.model, self.names, self.rounds, self.tol = model, tuple(names), rounds, tol
        self.began, self.said, self.first = time.monotonic(), -math.inf, math.inf
        if self.live is not None:
            self.live.update(f"{model}: looking at the data")

    def show(self, moment: Any) -> None:
        """A round is done."""
        state = moment.state
        self.first = float(moment.history["certificate"][0])
        if self.live is not None:
            self.live.update(self._picture(moment.rounds, state))
        elif self._done(moment.rounds, state) >= 1 or time.monotonic() - self.said >= PAUSE:
            self.said = time.monotonic()
            self.say(self._words(moment.rounds, state))

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
        worst = int(state.losses.argmax())
        return (
            f"{self.model}  round {rounds:3d}  {self._gap(state)}  loss: mean {state.losses.mean():.4f}, "
            f"worst {state.losses[worst]:.4f} ({self.names[worst]})"
        )

    def _picture(self, rounds: int, state: Any) -> Group:
        from rich.console import Group
        from rich.text import Text

        done, spent = self._done(rounds, state), time.monotonic() - self.began
        left = "" if rounds < 2 or not 0 < done < 1 else f", about {_seconds(spent * (1 - done) / done)} left"
        full = round(BAR * done)
        bar = Text.assemble((f"{self.model} ", "bold"), ("━" * full, "green"), ("━" * (BAR - full), "dim"))
        bar.append(f" round {rounds}, {_seconds(spent)}{left}")
        worst = int(state.losses.argmax())
        losses = f"loss: mean {state.losses.mean():.4f}, worst {state.losses[worst]:.4f} ({self.names[worst]})"
        return Group(bar, Text(f"{self._gap(state)};  {losses}"), self._weights(state))

    def _weights(self, state: Any) -> Table:
        """λ as small bars: of all clients in their order where they are few, else of the largest."""
        from rich.table import Table
        from rich.text import Text

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
    """In eighths of a character."""
    eighths = round(8 * SMALL * min(max(share, 0.0), 1.0))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _seconds(s: float) -> str:
    return f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 5400 else f"{s / 3600:.1f} h"
