"""The `scaffpd` command: one thin file per subcommand, and one place for how it ends.

Exit codes: 0 done; 2 what was asked for cannot work, and one sentence on standard error says why; 130
interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import click
import typer

import scaffpd
from scaffpd.cli.compare import compare
from scaffpd.cli.demo import demo
from scaffpd.cli.deploy import deploy
from scaffpd.cli.features import features
from scaffpd.cli.images import reproduce
from scaffpd.cli.report import report
from scaffpd.cli.silo import silo
from scaffpd.errors import InputError

app = typer.Typer(
    name="scaffpd",
    help="Train one model that serves every site: certified, tuning-free and fair.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.suggest_commands = False  # click suggests already, and typer would say the same once more
app.command()(demo)
app.command()(compare)
app.command()(features)
app.command()(report)
app.add_typer(reproduce, name="reproduce")
app.add_typer(silo, name="silo")
app.add_typer(deploy, name="deploy")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scaffpd {scaffpd.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit code; what the user got wrong is said in one sentence."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without λ shows "?", and nobody a traceback
    try:
        code = app(list(arguments), prog_name="scaffpd", standalone_mode=False)
    except InputError as error:
        return _complain(str(error), 2)
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return 130
    return code if isinstance(code, int) else 0


def _complain(sentence: str, code: int) -> int:
    typer.secho(sentence if sentence.endswith((".", "?", "!")) else f"{sentence}.", fg="red", err=True)
    return code


def main() -> None:
    """The entry point of the `scaffpd` script."""
    sys.exit(run(sys.argv[1:]))
