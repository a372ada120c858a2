"""The `scaffpd` command: one thin file per subcommand, and one place for how it ends.

Exit codes: 0 done; 1 something failed that is not the user's mistake (a deployed run, the self-check of `doctor`, a
full disk, a bug); 2 what was asked for cannot work, and one sentence on standard error says why; 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import click
import typer

import scaffpd
from scaffpd.cli import usage_errors
from scaffpd.cli.compare import compare
from scaffpd.cli.data import data
from scaffpd.cli.demo import demo
from scaffpd.cli.deploy import deploy
from scaffpd.cli.doctor import doctor
from scaffpd.cli.features import features
from scaffpd.cli.results import predict, report
from scaffpd.cli.silo import silo
from scaffpd.cli.train import path, train
from scaffpd.cli.typer_ext import SETTINGS, Group, add, help_if_alone
from scaffpd.errors import InputError

START, COMPARE, ORGANISATIONS = "Start here", "Compare", "Across organisations"

app = typer.Typer(
    name="scaffpd",
    cls=Group,
    invoke_without_command=True,
    epilog=usage_errors.EPILOG,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)
for _command in (demo, train, path, predict, report, data, doctor, compare, features):
    add(app, _command, panel=COMPARE if _command in (compare, features) else START)
app.add_typer(silo, name="silo", rich_help_panel=ORGANISATIONS)
app.add_typer(deploy, name="deploy", rich_help_panel=ORGANISATIONS)


ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command("reproduce", hidden=True, context_settings=ANYTHING)
def _reproduce() -> None:
    """Say where the paper's experiments are."""
    raise InputError(
        "scaffpd reproduce is now python -m experiments.reproduce, with the same options, in a checkout of the "
        "repository: the paper's experiments are no longer part of the package."
    )


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scaffpd {scaffpd.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train one model that serves every site: certified, tuning-free and fair.

    Examples:
        scaffpd demo
        scaffpd compare --help
    """
    help_if_alone(context)


def run(arguments: Sequence[str], commands: typer.Typer = app, name: str = "scaffpd") -> int:
    """Carry out a command line and return its exit code; what the user got wrong is said in one sentence."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without λ shows "?", and nobody a traceback
    try:
        code = commands(list(arguments), prog_name=name, standalone_mode=False)
    except InputError as error:
        return usage_errors.complain(str(error), usage_errors.WRONG)
    except click.ClickException as error:
        return usage_errors.complain(usage_errors.sentence(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return usage_errors.INTERRUPTED
    except OSError as error:
        sentence = usage_errors.of_the_machine(error)
        if sentence is None:
            raise
        return usage_errors.complain(sentence, usage_errors.FAILED)
    return code if isinstance(code, int) else usage_errors.DONE


def main() -> None:
    """The entry point of the `scaffpd` script."""
    try:
        code = run(sys.argv[1:])
    except Exception:  # not the user's mistake, so shown whole
        code = usage_errors.report_bug()
    sys.exit(usage_errors.flushed(code))
