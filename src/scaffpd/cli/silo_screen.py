"""What `scaffpd silo check` shows of its findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scaffpd.cli.live import plain_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDEST = 100  # columns: longer lines of prose are hard to read
MOST = 40  # columns of data that are listed


def show(found: dict[str, Any]) -> None:
    """All of it."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"Silo {found['silo']}", style="bold", markup=False)
    console.print(_facts(found), width=min(console.width, WIDEST))
    if found["labels"]:
        console.print("\nLabels", style="bold")
        console.print(_label_table(found["labels"]))
    if found["columns"]:
        console.print("\nColumns", style="bold")
        console.print(_column_table(found["columns"]))
        if len(found["columns"]) > MOST:
            console.print(f"and {len(found['columns']) - MOST} more (--json lists all)")
    if found["warnings"]:
        _bullets(console, "Look at this", found["warnings"], "yellow")
    _bullets(console, "What leaves this site", found["leaves"])
    _bullets(console, "What never leaves", found["stays"])


def _facts(found: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from scaffpd.memory import words

    rows, features, size = found["rows"], found["features"], found["bytes"]
    lines = {
        "task": found["task"] if found["task"] != "prepared" else "the entry's own Cohort",
        "rows": f"{rows['train']} to train on, {rows['test']} held out",
        "features": f"{many(features['columns'], 'column')}, {features['encoded']} once encoded",
        "memory": f"{words(size['read'])} as read, {words(size['encoded'])} encoded",
    }
    if found["task"] == "prepared":
        lines["features"] = f"a model of {many(features['encoded'], 'parameter')}"
        del lines["memory"]
    if found["missing"] is not None:
        lines["missing"] = f"{found['missing']} values"
    if found["target"] is not None:
        lines["target"] = ", ".join(f"{name} {value:.6g}" for name, value in found["target"].items())
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in lines.items():
        table.add_row(name, Text(text))
    return table


def many(number: int, what: str) -> str:
    """1 row, 2 rows."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _label_table(labels: list[dict[str, Any]]) -> Table:
    table = plain_table("label", "training", "held out", gap=1)
    for entry in labels[:MOST]:
        table.add_row(_plain(str(entry["label"])), str(entry["train"]), str(entry["test"]))
    return table


def _column_table(columns: list[dict[str, Any]]) -> Table:
    table = plain_table("column", "kind", "missing", "categories", "withheld", gap=1)
    table.columns[1].justify = "left"
    for entry in columns[:MOST]:
        counts = ("missing", "categories", "withheld")
        blank = (entry["missing"] == 0, entry["kind"] != "category", entry["withheld"] == 0)
        cells = ["" if empty else str(entry[key]) for key, empty in zip(counts, blank, strict=True)]
        table.add_row(_plain(entry["name"]), entry["kind"].replace("unknown", "no values"), *cells)
    return table


def _bullets(console: Console, title: str, lines: list[str], style: str = "") -> None:
    from rich.table import Table

    console.print(f"\n{title}", style=f"bold {style}".strip())
    grid = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        grid.add_row("-", _plain(line))
    console.print(grid, width=min(console.width, WIDEST))


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "?" for c in text))
