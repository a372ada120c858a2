"""What the commands on images show of their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scaffpd.cli.reproduce import WIDEST, section

if TYPE_CHECKING:
    from rich.table import Table

    from scaffpd.experiments.images.study import Study


def show(study: Study) -> None:
    """One table for every α, and a verdict."""
    from rich.console import Console

    from scaffpd.experiments.images import files, tables

    console, plan = Console(highlight=False), study.plan
    console.print(
        f"{study.ground.title}, {plan.clients} clients: test accuracy in %, mean ± standard deviation over "
        f"{plan.seeds} partitions, {plan.rounds} rounds\n", width=min(console.width, WIDEST),
    )  # fmt: skip
    for k, alpha in enumerate(study.plan.alphas):
        console.print(f"α = {alpha:g}\n", style="bold")
        console.print(_block([[row[0], *row[1 + 4 * k : 5 + 4 * k]] for row in tables.rows(study)]))
        console.print()
    section(console, "Verdict", *tables.verdict(study))
    console.print(f"\n{files.BACKBONE}.", width=min(console.width, WIDEST))


def _block(rows: list[list[str]]) -> Table:
    """The columns of one α, the best of ours in bold."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for k, column in enumerate(("method", "average", "worst 20 %", "average (paper)", "worst 20 % (paper)")):
        table.add_column(column, justify="right" if k else "left", no_wrap=True)
    for cells in rows:
        table.add_row(*(f"[bold]{cell.strip('*')}[/]" if cell.startswith("**") else cell for cell in cells))
    return table
