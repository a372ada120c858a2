"""`scaffpd reproduce`: the paper's experiments, run again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaffpd.cli.typer_ext import add, group, prepare

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from scaffpd.experiments.synthetic.study import Study

WIDEST = 100  # columns: longer lines of prose are hard to read

reproduce = group(
    """Run the paper's experiments again.

    Examples:
        scaffpd reproduce synthetic --quick --out synthetic
    """
)


def synthetic(
    out: Annotated[Path, typer.Option(help="Folder for pictures and numbers.")] = Path("results/synthetic"),
    seed: Annotated[int, typer.Option(min=0, help="Draws the data.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds; the numbers mean nothing.")] = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time.", show_default="one per core")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Write the files and print nothing.")] = False,
) -> None:
    """Distance to the optimum against rounds: Scaff-PD, DRFA and others, tuned, on the paper's synthetic problem.

    Examples:
        scaffpd reproduce synthetic --quick --out synthetic
    """
    prepare(out)
    from scaffpd.experiments.synthetic import figures, files, settings  # seconds, so not for --help
    from scaffpd.experiments.synthetic import study as runs
    from scaffpd.system import cores

    plan = settings.quick(seed) if quick else settings.Plan(seed)
    command = f"scaffpd reproduce synthetic --seed {seed}{' --quick' if quick else ''}"
    done = runs.study(plan, processes or (1 if quick else cores()), False if quiet else None)
    written = [*figures.draw(done, out, command), *files.save(done, out, f"{command} --out {out.as_posix()}")]
    if not quiet:
        _show(done, written)


add(reproduce, synthetic)


def _show(study: Study, written: list[Path]) -> None:
    from rich.console import Console

    from scaffpd.experiments.synthetic import tables

    console = Console(highlight=False)
    console.print("Rounds until ‖x − x*‖² ≤ 1e-6\n", style="bold")
    console.print(_table(study))
    section(console, "Verdict", *tables.verdict(study))
    section(console, "Best at the edge of its grid", *tables.edges(study))
    section(console, "Written", *map(str, written))


def section(console: Console, title: str, *lines: str) -> None:
    """A heading and what stands under it; nothing where there is nothing."""
    if lines:
        console.print(f"\n{title}", style="bold")
        for line in lines:
            console.print(line, markup=False, width=min(console.width, WIDEST))


def _table(study: Study) -> Table:
    from rich import box
    from rich.table import Table

    from scaffpd.experiments.synthetic import tables

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nmethod", no_wrap=True)
    for setting in study.plan.settings:
        table.add_column("\n".join(tables.heading(setting)), justify="right", no_wrap=True)
    for name, cells in tables.rows(study):
        if name not in tables.ROWS:
            table.add_section()
        table.add_row(name, *cells, style="bold" if name.startswith("Scaff-PD") else None)
    return table
