"""`scaffpd report`: a folder of results as one page for the browser, or as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scaffpd.errors import unknown

FORMATS = ("html", "png", "svg")


def report(
    run: Annotated[Path, typer.Argument(help="Folder that train, path, demo, compare or deploy wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="File of the page, or folder of the pictures.", show_default="in RUN")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="html: one page; png, svg: a picture per figure.")] = "html",
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """One page that opens offline: the verdict, who gains and who pays, what it cost, how to do it again.

    Examples:
        scaffpd report runs/patients
        scaffpd report runs/patients --format svg --out figures
    """
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    from scaffpd import report as reports  # seconds, so not for --help

    written = [reports.write(run, out)] if form == "html" else list(reports.write_figures(run, form, out))
    for path in written:
        typer.echo(str(path))
    if show and typer.launch(written[0].resolve().as_uri()) != 0:
        typer.echo("No browser could be opened: open the file yourself.", err=True)
