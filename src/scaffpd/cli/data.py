"""`scaffpd data`: what is embedded, what was found in the data folder, and how to provide what is missing."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scaffpd.cli.typer_ext import print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from scaffpd.cli.inventory import DatasetEntry

WIDEST = 100  # columns: longer lines of prose are hard to read
UNNAMED = "No data folder is named: give one by --data FOLDER or by the environment variable SCAFFPD_DATA."


def data(
    folder: Annotated[
        Path | None, typer.Option("--data", help="Folder to look into.", show_default="SCAFFPD_DATA")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON, and nothing else.")] = False,
) -> None:
    """What data is embedded, what was found in a folder, and how to provide the rest.

    Nothing is downloaded, and no image is decoded.

    Examples:
        scaffpd data
        scaffpd data --data . --json
    """
    from scaffpd.cli.inventory import embedded, provided

    within, outside = embedded(), provided(folder)
    if as_json:
        found = {"embedded": [asdict(entry) for entry in within], "folder": [asdict(entry) for entry in outside]}
        print_json(found)
        return
    _show(within, outside, folder or os.environ.get("SCAFFPD_DATA") or None)


def _show(within: Sequence[DatasetEntry], outside: Sequence[DatasetEntry], root: object) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    width = min(console.width, WIDEST)
    console.print("Embedded", style="bold")
    console.print(_table(within))
    console.print()
    console.print(_bullets(within), width=width)
    found, broken, missing = ([e for e in outside if e.state == state] for state in ("found", "broken", "missing"))
    if found:
        console.print(f"\nFound in {root}", style="bold", markup=False, soft_wrap=True)
        console.print(_table([entry for entry in found if entry.rows is not None]))
        console.print()
        console.print(_bullets(found), width=width)
    for title, entries in (("[red]Broken[/]", broken), ("Missing" if root else "Not embedded", missing)):
        if entries:
            console.print(f"\n{title}", style="bold")
            console.print(_bullets(entries), width=width)
    if root is None:
        console.print(f"\n{UNNAMED}", markup=False, width=width)


def _table(entries: Sequence[DatasetEntry]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("name", no_wrap=True)
    tested = any(entry.test_rows is not None for entry in entries)
    for heading in ("rows", *(["to test"] if tested else []), "columns", "clients", "classes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        numbers = (entry.rows, *([entry.test_rows] if tested else []), entry.columns, entry.clients, entry.classes)
        table.add_row(entry.name, *map(_number, numbers))
    return table


def _number(value: int | str | None) -> str:
    return f"{value:,}" if isinstance(value, int) else value or ""


def _bullets(entries: Sequence[DatasetEntry]) -> Table:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1, 0, 0))
    for entry in entries:
        grid.add_row("-", Text.assemble((entry.name, "bold"), f": {_words(entry)}"))
    return grid


def _words(entry: DatasetEntry) -> str:
    if entry.state == "broken":
        return entry.note
    if entry.state in ("embedded", "found"):
        return f"{entry.about}{f', {entry.note}' if entry.note else ''}; {entry.licence}."
    expected = f" Expected: {entry.note}." if entry.note else ""
    return f"{entry.about}; {entry.licence}.{expected}"
