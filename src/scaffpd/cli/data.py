"""`scaffpd data`, which data there is and how to provide the rest, and `scaffpd init`, a settings file for a table."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scaffpd.cli.screens import bullets, plain_table, say
from scaffpd.cli.typer_ext import AsJson, check_new, print_json, write_template
from scaffpd.errors import InputError, unknown
from scaffpd.numbers import several

if TYPE_CHECKING:
    from scaffpd.data.images import Published
    from scaffpd.data.tabular.columns import DataColumn

UNNAMED = "No data folder is named: give one by --data FOLDER or by the environment variable SCAFFPD_DATA."
WEIGHTS = {  # file in weights/, and what it is
    "efficientnet_lite0_imagenet.npz": "EfficientNet-Lite0",
    "resnet18_imagenet_to_layer3_bnfolded.npz": "ResNet-18 up to layer 3",
}
UCI = "CC BY 4.0, doi 10.24432/C5XW20"
KRIZHEVSKY = "cite Krizhevsky (2009)"
IMAGENET = "non-commercial research; cite Le and Yang (2015)"
ADULT = (
    "'adult' with adult.data.csv.gz and adult.test.csv.gz, UCI's files with a header row, gzipped"
)


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset or file of weights."""

    name: str  # by which `scaffpd.data` and the commands know it
    state: str  # "embedded", "found", "missing" or "broken"
    about: str  # a phrase on what it is
    licence: str  # terms and whom to cite, in a phrase
    # samples to train on, and of those held out or published for testing where that is fixed; None: unknown
    rows: int | None = None
    test_rows: int | None = None
    columns: int | None = None  # features, once encoded; of images, pixels and colours
    clients: int | str | None = None  # how many, or how they come about
    classes: int | None = None  # labels; None for regression
    where: str | None = None  # the folder or file
    note: str = ""  # what is wrong with it, how to provide it, or what else there is to say


INSIDE = "embedded"
CC = "CC BY 4.0, doi 10.24432/"
SKEW = "by label skew"
EMBEDDED = (
    DatasetEntry(
        "heart_disease",
        INSIDE,
        "heart disease at four hospitals (UCI)",
        f"{CC}C52P4X",
        920,
        None,
        28,
        4,
        2,
    ),
    DatasetEntry(
        "beijing_air",
        INSIDE,
        "fine dust at twelve stations (UCI)",
        f"{CC}C5RK5G",
        17467,
        None,
        15,
        12,
    ),
    DatasetEntry(
        "digits",
        INSIDE,
        "handwritten digits (scikit-learn)",
        f"{CC}C50P49",
        1797,
        None,
        64,
        SKEW,
        10,
    ),
    DatasetEntry(
        "breast_cancer",
        INSIDE,
        "Wisconsin biopsies (scikit-learn)",
        f"{CC}C5DW2B",
        569,
        None,
        30,
        SKEW,
        2,
    ),
    DatasetEntry(
        "diabetes",
        INSIDE,
        "progression of diabetes (scikit-learn)",
        "cite Efron et al. (2004)",
        442,
        None,
        9,
        "5 by age, 2 by sex",
        2,
    ),
    DatasetEntry(
        "synthetic",
        INSIDE,
        "the paper's regression problem, drawn",
        "ours",
        500,
        None,
        10,
        "5, or any",
    ),
)


def provided(folder: str | os.PathLike[str] | None) -> list[DatasetEntry]:
    """List what a data folder can have, and what is found of it; refuse a folder that does not exist."""
    from scaffpd.data.folder import data_root
    from scaffpd.data.image_loaders import CIFAR10, CIFAR100, TINY

    named = folder or os.environ.get("SCAFFPD_DATA")
    root = data_root(named, "Other data") if named else None
    adult = DatasetEntry("adult", "missing", "income of 48,842 people (UCI)", UCI, note=ADULT)
    entries = [_looked(root, _adult, adult)]
    for name, which, terms in (
        ("cifar10", CIFAR10, KRIZHEVSKY),
        ("cifar100", CIFAR100, KRIZHEVSKY),
        ("tiny_imagenet", TINY, IMAGENET),
    ):
        about = f"{which.name}, {which.classes} classes of images"
        blank = DatasetEntry(name, "missing", about, terms, note=which.accepted)
        entries.append(_looked(root, partial(_images, which), blank))
    for file, what in WEIGHTS.items():
        terms = "Apache-2.0" if what.startswith("Efficient") else "BSD-3-Clause (torchvision)"
        blank = DatasetEntry(f"weights/{file}", "missing", f"{what}, ImageNet weights", terms)
        entries.append(_looked(root, _weights, blank))
    return entries


def _looked(
    root: Path | None, look: Callable[[Path, DatasetEntry], DatasetEntry], blank: DatasetEntry
) -> DatasetEntry:
    """Return what is there, or what is wrong with it."""
    if root is None:
        return blank
    try:
        return look(root, blank)
    except InputError as error:
        if str(error).startswith("There is no "):
            return blank
        return replace(blank, state="broken", note=str(error))


def _adult(root: Path, blank: DatasetEntry) -> DatasetEntry:
    from scaffpd.data.datasets import CATEGORIES, NUMBERS, clients
    from scaffpd.data.datasets import read as read_adult
    from scaffpd.data.folder import data_folder

    place = data_folder(root, "adult")
    train, test = (read_adult(place / f"adult.{part}.csv.gz") for part in ("data", "test"))
    names = clients([row["occupation"] for row in train])
    columns = len(NUMBERS) + sum(
        len({row[name] for row in train}) for name in CATEGORIES if name != "occupation"
    )
    return replace(
        blank,
        state="found",
        rows=len(train),
        test_rows=len(test),
        columns=columns,
        clients=f"{len(names)} by occupation",
        classes=2,
        where=str(place),
        note="",
    )


def _images(which: Published, root: Path, blank: DatasetEntry) -> DatasetEntry:
    from scaffpd.data.image_loaders import inspect as inspect_images

    train, test, place = inspect_images(which, root)
    share = "" if train == which.train * which.classes else "a subset"
    return replace(
        blank,
        state="found",
        rows=train,
        test_rows=test,
        columns=3 * which.side**2,
        clients=SKEW,
        classes=which.classes,
        where=str(place),
        note=share,
    )


def _weights(root: Path, blank: DatasetEntry) -> DatasetEntry:
    import numpy as np

    from scaffpd.data.folder import reading

    file = root / blank.name
    with reading(file):
        if not file.is_file():
            return blank
        try:
            with np.load(file, allow_pickle=False) as arrays:
                size = sum(arrays[name].size for name in arrays.files)
        except (
            zipfile.BadZipFile,
            zlib.error,
            ValueError,
            EOFError,
            TypeError,
        ):  # a single array is no archive
            raise InputError(
                "complete-file-weights",
                f"{str(file)!r} is not a complete file of weights; copy it once more.",
            ) from None
    return replace(blank, state="found", where=str(file), note=f"{size / 1e6:.3g} million numbers")


def data(
    folder: Annotated[
        Path | None,
        typer.Option("--data", help="Folder to look into.", show_default="SCAFFPD_DATA"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List embedded data, data found in a folder, and how to provide the rest.

    Nothing is downloaded, and no image is decoded.

    Examples:
        scaffpd data
        scaffpd data --data . --json
    """
    outside = provided(folder)
    if as_json:
        print_json(
            {
                "embedded": [asdict(entry) for entry in EMBEDDED],
                "folder": [asdict(entry) for entry in outside],
            }
        )
        return
    _show(outside, folder or os.environ.get("SCAFFPD_DATA") or None)


def _show(outside: Sequence[DatasetEntry], root: object) -> None:
    console = Console(highlight=False)
    console.print("Embedded", style="bold")
    console.print(_table(EMBEDDED))
    console.print()
    bullets(console, _lines(EMBEDDED))
    found, broken, missing = (
        [e for e in outside if e.state == state] for state in ("found", "broken", "missing")
    )
    if found:
        console.print(f"\nFound in {root}", style="bold", markup=False, soft_wrap=True)
        console.print(_table([entry for entry in found if entry.rows is not None]))
        console.print()
        bullets(console, _lines(found))
    for title, entries in (
        ("[red]Broken[/]", broken),
        ("Missing" if root else "Not embedded", missing),
    ):
        if entries:
            console.print(f"\n{title}", style="bold")
            bullets(console, _lines(entries))
    if root is None:
        say(console, f"\n{UNNAMED}")


def _table(entries: Sequence[DatasetEntry]) -> Table:
    tested = any(entry.test_rows is not None for entry in entries)
    table = plain_table(
        "name", "rows", *(["to test"] if tested else []), "columns", "clients", "classes", gap=1
    )
    table.columns[0].no_wrap = True
    for entry in entries:
        numbers = (
            entry.rows,
            *([entry.test_rows] if tested else []),
            entry.columns,
            entry.clients,
            entry.classes,
        )
        table.add_row(
            entry.name,
            *(f"{number:,}" if isinstance(number, int) else number or "" for number in numbers),
        )
    return table


def _lines(entries: Sequence[DatasetEntry]) -> list[Text]:
    return [Text.assemble((entry.name, "bold"), f": {_words(entry)}") for entry in entries]


def _words(entry: DatasetEntry) -> str:
    if entry.state == "broken":
        return entry.note
    if entry.state == "missing":
        return f"{entry.about}; {entry.licence}.{f' Expected: {entry.note}.' if entry.note else ''}"
    return f"{entry.about}{f', {entry.note}' if entry.note else ''}; {entry.licence}."


GUESS = " (a guess: check it)"
# a column of names with at most so many, at least so many rows each, may name clients
FEW = 200
LEAST = 10


def init(
    table: Annotated[
        Path, typer.Argument(help="A table in any format, or a folder of them.", show_default=False)
    ],
    client: Annotated[
        str | None, typer.Option(help="Column with every row's client.", show_default="a guess")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Column to be predicted.", show_default="a guess")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The file to write; one that is there is left alone.")
    ] = Path("config.toml"),
) -> None:
    """Write a commented settings file for a table, with what its columns hold.

    Examples:
        scaffpd init patients.csv --client hospital --target ill
    """
    from scaffpd.data.tabular.clients import useless
    from scaffpd.data.tabular.formats import open_table
    from scaffpd.data.tabular.read import read_columns

    check_new(out)
    opened = open_table(table)
    columns = read_columns(opened, [name for name in opened.names if name])[0]
    guesses = _guessed(columns, client, target)
    used = [_quoted(one.name) for one in columns if one.name not in guesses and not useless(one)]
    write_template(
        "config.toml",
        out,
        "Look at it, then run: scaffpd train",
        file=out,
        table=table.name,
        rows=several(len(columns[0].values), "row"),
        columns="\n".join(f"#   {_holds(one)}" for one in columns),
        name=_quoted(os.path.relpath(table, out.parent)),
        client=_quoted(guesses[0]),
        target=_quoted(guesses[1]),
        guess_client="" if client else GUESS,
        guess_target="" if target else GUESS,
        some=", ".join(used),
    )


def _guessed(
    columns: Sequence[DataColumn], client: str | None, target: str | None
) -> tuple[str, str]:
    """Return the columns that were named, else the first that could name clients, and the last other one."""
    names = [column.name for column in columns]
    for given in (client, target):
        if given is not None and given not in names:
            raise unknown("column", given, names)
    owners = [
        c.name
        for c in columns
        if c.name != target
        and 2 <= len(c.categories) <= FEW
        and len(c.values) >= LEAST * len(c.categories)
    ]
    owner = client or next(iter(owners), names[0])
    return owner, target or next((name for name in reversed(names) if name != owner), names[-1])


def _holds(column: DataColumn) -> str:
    """Describe a column in a line."""
    from scaffpd.data.tabular.columns import CATEGORY, NUMBER

    gaps = int(column.missing.sum())
    missing = f", {gaps} missing" if gaps else ""
    if column.kind == CATEGORY:
        some = ", ".join(column.categories[:4]) + (", …" if len(column.categories) > 4 else "")
        return f"{column.name}: {len(column.categories)} texts ({some}){missing}".replace("\n", " ")
    if column.kind == NUMBER:
        there = column.values[~column.missing]
        missing += f"; it {column.note}" if column.note else ""
        return f"{column.name}: numbers from {there.min():g} to {there.max():g}{missing}".replace(
            "\n", " "
        )
    return f"{column.name}: {'dates' if column.kind == 'date' else 'no values'}{missing}".replace(
        "\n", " "
    )


def _quoted(text: str) -> str:
    """Write a text as TOML does."""
    import tomli_w

    return tomli_w.dumps({"x": text}).removeprefix("x = ").rstrip("\n")
