"""`scaffpd demo`: twelve air-quality stations, four of them new, with and without the others."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from scaffpd.cli.commands import PATH, command, option, quiet
from scaffpd.cli.results import end
from scaffpd.cli.screens import RoundsScreen, say, terminal

AIR = "Twelve stations predict a day's fine dust; four are new, with thirty days."


@command()
@option("--out", type=PATH, default=Path("scaffpd-demo"), help="Folder for report and tables.")
@option("--seed", type=click.IntRange(min=0), default=0, help="Chooses new stations and days.")
@quiet
def demo(out: Path, seed: int, quiet: bool) -> None:
    """Twelve stations, four of them new: alone, one model for all, or models of their own.

    Examples:
        scaffpd demo
        scaffpd demo --seed 1 --out other-stations
    """
    from scaffpd.files import make_folder, write_file

    # refused before the work, not after it
    probe = make_folder(out) / ".writable"
    write_file(probe, "")
    probe.unlink()
    say(terminal(quiet=quiet), AIR)
    from scaffpd.program import demo as studies  # seconds, so not before words

    with RoundsScreen(quiet) as screen:
        study = studies.stations(seed, screen.phase)
    command = f"scaffpd demo --seed {seed} --out {shlex.quote(out.as_posix())}"
    studies.write_stations(study, out, command)
    end(out, report=True, quiet=quiet, as_json=False)
