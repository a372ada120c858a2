"""What a command on images can be asked for: the options that all of them have, and a plan made of them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaffpd.cli import typer_ext
from scaffpd.cli.typer_ext import completing
from scaffpd.errors import InputError

if TYPE_CHECKING:
    from scaffpd.experiments.images.settings import Plan
    from scaffpd.experiments.images.study import Place

Data = Annotated[Path | None, typer.Option(help="Folder of images and weights.", show_default="SCAFFPD_DATA")]
Out = Annotated[Path, typer.Option(help="Folder for results; there, the same command goes on.")]
Cache = Annotated[Path, typer.Option(help="Folder for features.")]
Device = Annotated[
    str,
    typer.Option(help="cpu, cuda, or auto: a GPU if there is one.", autocompletion=completing(*typer_ext.DEVICES)),
]
Small = Annotated[bool, typer.Option("--small", help="Minutes on two processor cores; few images and coordinates.")]
Seeds = Annotated[int | None, typer.Option(min=1, help="Partitions.", show_default="3; small 2")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds of every run.", show_default="100; small 30")]
Steps = Annotated[int | None, typer.Option(min=1, help="Local steps a round.", show_default="10")]
Tune = Annotated[int | None, typer.Option(min=1, help="Configurations a method.", show_default="9; small 3")]
Coordinates = Annotated[int | None, typer.Option(min=1, help="eNTK coordinates.", show_default="50000; small 4000")]
Size = Annotated[int | None, typer.Option(min=16, help="Pixels.", show_default="224; small 64")]
PerClass = Annotated[int | None, typer.Option(min=2, help="Training images a class.", show_default="all; small few")]
L2 = Annotated[float | None, typer.Option(help="l2 > 0 of the regulariser.", show_default="3e-5; small 1e-3")]
Balanced = Annotated[bool, typer.Option("--balanced", help="Deal classes as in the code of Li et al. (2022).")]
Climb = Annotated[bool, typer.Option("--climb", help="Follow the best rates beyond the grid, with twice the budget.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Write the files and print nothing.")]


@dataclass(frozen=True)
class Request:
    """What a command line asked for.

    Attributes:
        place: where data, features and processor are.
        small: the size for two processor cores.
        changes: to the plan.
        quiet: nothing is printed.
    """

    place: Place
    small: bool
    changes: dict[str, Any]
    quiet: bool

    def plan(self, name: str) -> Plan:
        """The plan of that name with these changes."""
        from scaffpd.experiments.images import settings

        return replace(settings.plan(name, self.small), **self.changes)

    def command(self, name: str, out: Path) -> str:
        """The command line, without the folders that are this machine's."""
        options = [
            f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}") for key, value in self.changes.items()
        ]
        size = ["--small"] if self.small else []
        return " ".join(["scaffpd reproduce", name, *size, *options, f"--out {shlex.quote(out.as_posix())}"])


def request(data: Path | None, cache: Path, device: str, small: bool, quiet: bool, **changes: float | None) -> Request:
    """What was asked for, the device found; options that were left out change nothing."""
    from scaffpd.experiments.images.study import Place
    from scaffpd.features import extract

    chosen = extract.place(device)
    if chosen.type not in ("cpu", "cuda"):  # others are known to PyTorch, and no number was ever computed there
        raise InputError(f"Unknown device {device!r}: choose 'auto', 'cpu' or 'cuda'.")
    place = Place(data, cache, str(chosen), False if quiet else None)
    return Request(place, small, {name: value for name, value in changes.items() if value is not None}, quiet)
