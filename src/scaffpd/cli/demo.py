"""`scaffpd demo`: twelve air-quality stations, four of them new, with and without the others."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scaffpd.cli.results import end
from scaffpd.cli.screens import RoundsScreen, say
from scaffpd.cli.typer_ext import Quiet
from scaffpd.files import make_folder, write_file

AIR = "Twelve stations predict a day's fine dust; four are new, with thirty days."


def demo(
    out: Annotated[Path, typer.Option(help="Folder for report and tables.")] = Path("scaffpd-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Chooses new stations and days.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Twelve stations, four of them new: alone, one model for all, or models of their own.

    Examples:
        scaffpd demo
        scaffpd demo --seed 1 --out other-stations
    """
    # refused before the work, not after it
    probe = make_folder(out) / ".writable"
    write_file(probe, "")
    probe.unlink()
    say(Console(quiet=quiet, highlight=False), AIR)
    from scaffpd.run import demo as studies  # seconds, so not before words

    with RoundsScreen(quiet) as screen:
        study = studies.stations(seed, screen.phase)
    command = f"scaffpd demo --seed {seed} --out {shlex.quote(out.as_posix())}"
    studies.write_stations(study, out, command)
    end(out, report=True, quiet=quiet, as_json=False)
