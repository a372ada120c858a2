"""What the screens of long commands share: a live picture in a terminal, sentences above it, and plain tables."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


class LiveScreen:
    """A picture that is drawn anew while a command runs; `live` is `None` where nobody looks.

    Args:
        quiet: print nothing.
        errors: draw on standard error, so that standard output has the result alone.
    """

    def __init__(self, quiet: bool, errors: bool = False) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(stderr=errors, quiet=quiet, highlight=False)
        seen = self.console.is_terminal and not quiet
        self.live: Any = Live(console=self.console, refresh_per_second=4, transient=True) if seen else None

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def draw(self, picture: RenderableType, words: str | None) -> None:
        """The picture, or its words where there is nobody to look at it."""
        if self.live is not None:
            self.live.update(picture)
        elif words is not None:
            self.say(words)

    def say(self, sentence: str) -> None:
        """A sentence above the picture."""
        self.console.print(sentence, markup=False, soft_wrap=True)


def plain_table(first: str, *others: str, gap: int = 2) -> Table:
    """A table without walls: names on the left, numbers flush right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
