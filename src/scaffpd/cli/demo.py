"""`scaffpd demo`: twelve air-quality stations, four of them new, with and without the others."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scaffpd.cli.screens import say
from scaffpd.cli.typer_ext import Quiet
from scaffpd.files import make_folder, write_file

AIR = (
    "Twelve stations in Beijing predict a day's fine dust from its weather. Four are new and have "
    "forty days. They train alone or together, and are tested on the following year ({splits} "
    "draws)."
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for report, picture and tables.")] = Path(
        "scaffpd-demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Chooses new stations and days.")] = 0,
    splits: Annotated[int, typer.Option(min=2, help="How many draws to average over.")] = 8,
    quiet: Quiet = False,
) -> None:
    """Twelve stations, four of them new: alone, one model for all, or models of their own.

    Examples:
        scaffpd demo
        scaffpd demo --splits 2 --seed 1 --out other-stations
    """
    # refused before the work, not after it
    probe = make_folder(out) / ".writable"
    write_file(probe, "")
    probe.unlink()
    console = Console(quiet=quiet, highlight=False)
    say(console, AIR.format(splits=splits))
    from rich import progress

    from scaffpd.cli.results import show
    from scaffpd.run import demo as studies  # seconds, so not before words
    from scaffpd.run.page import available, write, write_picture

    terminal = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
    )
    silent = quiet or not terminal.is_terminal
    with progress.Progress(*columns, console=terminal, transient=True, disable=silent) as bar:
        task = bar.add_task("training", total=splits)
        study = studies.stations(seed, splits, lambda done: bar.update(task, completed=done))
    command = f"scaffpd demo --seed {seed} --splits {splits} --out {shlex.quote(out.as_posix())}"
    written = studies.write_stations(study, out, command)
    sorry = available()
    pages = [write(out), write_picture(out, "joining", out / "demo.png")] if sorry is None else []
    if not quiet:
        show(out)
    where = f"Report: {pages[0]}" if sorry is None else f"No report: {sorry}"
    say(console, f"{where}; {len(written)} tables in {out}")
