"""The `scaffpd` command: one thin file per subcommand, and here how it ends.

Exit codes: 0 done; 1 something failed that is not the user's mistake (a deployed run, a full disk,
a bug); 2 what was asked for cannot work, and one sentence on standard error says why; 3 a deployed
run pauses; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

import click

import scaffpd
from scaffpd.cli.commands import (
    ExitCode,
    Group,
    NoSuchCommand,
    coloured,
    install,
    show,
    show_help,
)
from scaffpd.cli.deploy import deploy
from scaffpd.cli.results import predict, report
from scaffpd.cli.silo import silo
from scaffpd.cli.train import demo, path, train
from scaffpd.errors import InputError

START = "Start here"
ORGANISATIONS = "Across organisations"
EXIT_CODES = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "something failed that is not your mistake "
    "(a deployed run, a full disk, a bug)",
    ExitCode.WRONG: "what was asked for cannot work; one sentence on standard error says why",
    ExitCode.PAUSED: "a deployed run pauses; "
    "once its last line is seen to, the same command goes on",
    ExitCode.INTERRUPTED: "interrupted",
}
EPILOG = "Exit codes: " + "; ".join(f"{code} {words}" for code, words in EXIT_CODES.items()) + "."
BUG = "This is a bug in scaffpd: please report it with these lines and those of pip freeze."
_CLOSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


@click.command("scaffpd", cls=Group, epilog=EPILOG)
@click.version_option(
    scaffpd.__version__,
    prog_name="scaffpd",
    message="%(prog)s %(version)s",
    help="Show the version and exit.",
)
@install
@show
@click.pass_context
def app(context: click.Context) -> None:
    """Train one model that serves every site: certified, tuning-free and fair.

    Examples:
        scaffpd demo
        scaffpd train --help
    """
    show_help(context)


app.include((demo, train, path, predict, report), START)
app.include((silo, deploy), ORGANISATIONS)


def run(arguments: Sequence[str], commands: click.Group = app, name: str = "scaffpd") -> int:
    """Carry out a command line and return its exit code; a user's mistake gets one sentence."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal without λ shows "?" instead of a traceback
            stream.reconfigure(errors="replace")
    try:
        code = commands.main(list(arguments), name, standalone_mode=False, color=coloured())
    except InputError as error:
        return complain(str(error), ExitCode.WRONG)
    except click.ClickException as error:
        return complain(sentence(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return complain("Interrupted.", ExitCode.INTERRUPTED)
    except OSError as error:
        refused = of_the_machine(error)
        if refused is None:
            raise
        return complain(refused, ExitCode.FAILED)
    return code if isinstance(code, int) else ExitCode.DONE


def main() -> None:
    try:
        code = run(sys.argv[1:])
    except Exception:  # not the user's mistake, so shown whole
        with suppress(OSError, AttributeError):
            traceback.print_exc()
        code = complain(BUG, ExitCode.FAILED)
    sys.exit(flushed(code))


def complain(sentence: str, code: int) -> int:
    """Print a sentence in red on standard error, and return the exit code."""
    one = " ".join(sentence.split())
    with suppress(OSError):  # standard error may be gone; the exit code still says
        click.secho(one if one.endswith((".", "?", "!")) else f"{one}.", fg="red", err=True)
    return code


def of_the_machine(error: OSError) -> str | None:
    """Return a sentence on a full disk or a closed file; `None` for errors that mean a bug."""
    from scaffpd.files import FULL

    if error.errno not in (*FULL, *_CLOSED):
        return None
    where = f" {str(error.filename)!r}" if error.filename else ""
    return f"Cannot {'write' if error.errno in FULL else 'use'}{where}: {error.strerror}."


def flushed(code: int) -> int:
    """Flush the output and return the exit code. A closed pipe (`| head -1`) is not an error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # discards all further output, that of the exiting interpreter included
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not code and not isinstance(error, BrokenPipeError):
            return complain(f"Cannot write the output: {error.strerror}.", ExitCode.FAILED)
    return code


def sentence(error: click.ClickException) -> str:
    """Return click's message with the nearest name only, or with whose help to read."""
    words = error.format_message().replace("valid integer range", "valid integer")
    if isinstance(error, click.NoSuchOption):
        words = f"No such option {error.option_name!r}."
    if isinstance(error, click.NoSuchOption | NoSuchCommand) and error.possibilities:
        return f"{words} Did you mean {error.possibilities[0]!r}?"
    place = error.ctx if isinstance(error, click.UsageError) else None
    return words if place is None else f"{words.rstrip('.')} (see {place.command_path} --help)."
