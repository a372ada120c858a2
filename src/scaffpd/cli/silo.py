"""`scaffpd silo`: what the operator of a site needs before joining a federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaffpd.cli.screens import plain_table
from scaffpd.cli.typer_ext import add, group, print_json
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


WIDEST = 100  # columns: longer lines of prose are hard to read
MOST = 40  # columns of data that are listed


def show_check(found: dict[str, Any]) -> None:
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

    from scaffpd.system import format_bytes

    rows, features, size = found["rows"], found["features"], found["bytes"]
    lines = {
        "task": found["task"] if found["task"] != "prepared" else "the entry's own Cohort",
        "rows": f"{rows['train']} to train on, {rows['test']} held out",
        "features": f"{many(features['columns'], 'column')}, {features['encoded']} once encoded",
        "memory": f"{format_bytes(size['read'])} as read, {format_bytes(size['encoded'])} encoded",
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
        table.add_row(_printable(str(entry["label"])), str(entry["train"]), str(entry["test"]))
    return table


def _column_table(columns: list[dict[str, Any]]) -> Table:
    table = plain_table("column", "kind", "missing", "categories", "withheld", gap=1)
    table.columns[1].justify = "left"
    for entry in columns[:MOST]:
        counts = ("missing", "categories", "withheld")
        blank = (entry["missing"] == 0, entry["kind"] != "category", entry["withheld"] == 0)
        cells = ["" if empty else str(entry[key]) for key, empty in zip(counts, blank, strict=True)]
        table.add_row(_printable(entry["name"]), entry["kind"].replace("unknown", "no values"), *cells)
    return table


def _bullets(console: Console, title: str, lines: list[str], style: str = "") -> None:
    from rich.table import Table

    console.print(f"\n{title}", style=f"bold {style}".strip())
    grid = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        grid.add_row("-", _printable(line))
    console.print(grid, width=min(console.width, WIDEST))


def _printable(text: str) -> Any:
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "?" for c in text))


TEMPLATE = """\
# One silo: this file stays at the site. Check it with: scaffpd silo check {file}
name = "my-hospital"              # letters, digits, - and _

[data]
file = "data.csv"                 # CSV, Parquet or NPZ, relative to this file
target = "disease"                # the column to be predicted (NPZ: an array, "y" if left out)
# entry = "hospital:load"         # instead of file and target: a function that returns (X, y)
# columns = ["age", "sex"]        # the columns to use; all others than the target if left out
# categories = ["cp"]             # columns of numbers that are names of categories
# task = "classification"         # or "regression"; goes by the target if left out

[split]
test = 0.2                        # share of rows held out, label by label; 0 for none
seed = 0                          # chooses them

[limits]
# algorithms = ["ScaffPD", "SubspaceSaddle", "Fair"]   # all that ask for sums only if left out; "all" for all
dimension = 1_000_000             # most parameters of a model
local_steps = 10_000              # most local steps per question
message_mb = 512                  # largest message taken
rarest = 5                        # a category with fewer training rows is not named to others
rows = 20                         # with fewer training rows the silo takes no part

[secure]                          # sums of vectors without anybody's own: see "Secure sums" in the documentation
required = false                  # true: take part with masked vectors only
# identity = "identity.key"       # this silo's own key, made with its first use; `scaffpd silo key` shows its print
# share = 0.9                     # the largest share of a sum that this silo's vector may have
# quantum = 0.0                   # losses leave as multiples of this
# [secure.pins]                   # others' keys, by the prints that their operators have told you
# south = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

[privacy]                         # noise on all that rows have a part in: see "Differential privacy"
required = false                  # true: take part with noise only
# epsilon = 8                     # what these rows may ever cost, all runs together
# delta = 1e-5
# columns = "exact"               # sums over columns may leave without noise; "never" if left out

# [models]                        # networks that the coordinator may ask for by these names, from your own code
# small = "networks:small"
"""

silo = group(
    """Prepare a site: write its file, and see what would leave it.

    Examples:
        scaffpd silo init
    """
)


def init(
    out: Annotated[Path, typer.Option(help="The file to write; one that is there is left alone.")] = Path("silo.toml"),
) -> None:
    """Write a silo.toml to fill in.

    Examples:
        scaffpd silo init --out silo.toml
    """
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(file=out.name))
    except FileExistsError:
        raise InputError(f"The file {str(out)!r} is there already; choose another one with --out.") from None
    except OSError as error:
        raise InputError(f"Cannot write {str(out)!r}: {error.strerror}.") from None
    typer.echo(f"Written to {out}. Fill it in, then run: scaffpd silo check {out}")


def check(
    file: Annotated[Path, typer.Argument(help="The silo.toml of this site.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
) -> None:
    """Read the data, show what was found, what would leave this site and what never does; nothing is sent.

    Examples:
        scaffpd silo check silo.toml
        scaffpd silo check silo.toml --json
    """
    from scaffpd.config.silo import SiloFile
    from scaffpd.deploy.silo.dataset import Dataset
    from scaffpd.deploy.silo.disclosure import site_overview

    settings = SiloFile.read(file)
    data = Dataset.read(settings)
    found = site_overview(settings, data)
    if as_json:
        print_json(found)
    else:
        show_check(found)
    data.check(settings.limits)


def key(
    file: Annotated[Path, typer.Argument(help="The silo.toml of this site.", show_default=False)],
) -> None:
    """Make this silo's key for secure sums, if it has none, and show the print by which others can pin it.

    Examples:
        scaffpd silo key silo.toml
    """
    from scaffpd.config.silo import SiloFile
    from scaffpd.masking import Identity

    settings = SiloFile.read(file)
    typer.echo(Identity.kept(settings.name, settings.secure.identity).card.fingerprint)


def predict(
    file: Annotated[Path, typer.Argument(help="The silo.toml of this site.", show_default=False)],
    model: Annotated[Path, typer.Argument(help="A run's model.safetensors.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The CSV file to write.")] = Path("predictions.csv"),
) -> None:
    """Apply a trained model to this site's own rows; nothing is sent.

    Examples:
        scaffpd silo predict silo.toml run/model.safetensors --out predictions.csv
    """
    import csv

    from scaffpd.config.silo import SiloFile
    from scaffpd.deploy.silo import dataset as own
    from scaffpd.deploy.silo.dataset import Dataset

    x, setup = own.read_model(model)
    found = own.predict(Dataset.read(SiloFile.read(file)), x, setup)
    try:
        with out.open("w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow(["target", "predicted", "probability", "held out"])
            probability = ["" if p != p else f"{p:.6f}" for p in found.probability]
            writer.writerows(zip(found.targets, found.predicted, probability, found.held.tolist(), strict=True))
    except OSError as error:
        raise InputError(f"Cannot write {str(out)!r}: {error.strerror}.") from None
    typer.echo(f"{many(len(found.targets), 'row')} written to {out}.")


for _command in (init, check, key, predict):
    add(silo, _command)
