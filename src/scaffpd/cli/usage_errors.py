"""How a command line ends: exit codes, and one sentence where something went wrong."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import click
import typer

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
EXIT_CODES = {
    DONE: "done",
    FAILED: "something failed that is not your mistake (a deployed run, doctor's self-check, a full disk, a bug)",
    WRONG: "what was asked for cannot work; one sentence on standard error says why",
    INTERRUPTED: "interrupted",
}
EPILOG = "Exit codes: " + "; ".join(f"{code} {words}" for code, words in EXIT_CODES.items()) + "."
BUG = "This is a bug in scaffpd, not your mistake: please report it with these lines and the output of scaffpd doctor."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENFILE, errno.EMFILE)
_CLOSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


def complain(sentence: str, code: int) -> int:
    """Say it in red on standard error; returns the exit code."""
    one = " ".join(sentence.split())
    with suppress(OSError):  # standard error may be gone; the exit code still tells
        typer.secho(one if one.endswith((".", "?", "!")) else f"{one}.", fg="red", err=True)
    return code


def of_the_machine(error: OSError) -> str | None:
    """A sentence where a disk is full or gone, or a file closed to us; None for errors that tell of a bug."""
    if error.errno not in (*_FULL, *_CLOSED):
        return None
    where = f" {str(error.filename)!r}" if error.filename else ""
    return f"Cannot {'write' if error.errno in _FULL else 'use'}{where}: {error.strerror}."


def report_bug() -> int:
    """The traceback of what nobody expected, and where to take it."""
    with suppress(OSError, AttributeError):
        traceback.print_exc()
    return complain(BUG, FAILED)


def flushed(code: int) -> int:
    """`code`, once everything is out; whoever read our output may have gone (`| head -1`), which is no trouble."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _forget_output()
    except OSError as error:
        _forget_output()
        return complain(f"Cannot write the output: {error.strerror}.", FAILED)
    return code


def _forget_output() -> None:
    """Nothing more is written, also not by the interpreter on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_GIVEN = re.compile(r"'?(?P<value>.*?)'? is not (?:a valid|in the range)", re.DOTALL)


def sentence(error: click.ClickException) -> str:
    """What click refuses, said as we say it; its own words where we have none."""
    if isinstance(error, click.NoSuchOption):
        return _no_such_option(error)
    if isinstance(error, click.MissingParameter):
        return _missing(error)
    if isinstance(error, click.BadParameter):
        return _wrong_value(error)
    return error.format_message()


def _no_such_option(error: click.NoSuchOption) -> str:
    """A sentence on an option that is not there, with the nearest one that is."""
    command = error.ctx.command if error.ctx is not None else None
    known = [name for parameter in (command.params if command else []) for name in parameter.opts]
    dashed = [name for name in known if name.startswith("--")]
    path = error.ctx.command_path if error.ctx is not None else "scaffpd"
    return f"No such option {error.option_name}{nearest(error.option_name, dashed) or f': see {path} --help.'}"


def nearest(word: str, names: list[str]) -> str:
    """The end of a sentence that guesses what was meant; nothing where nothing is near."""
    near = get_close_matches(word, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _missing(error: click.MissingParameter) -> str:
    """The command, what it lacks, and what that is."""
    path = error.ctx.command_path if error.ctx is not None else "scaffpd"
    if error.param is None:
        return error.format_message()
    about = getattr(error.param, "help", None)
    if about and not about[1:2].isupper():  # not CONFIG
        about = about[0].lower() + about[1:]
    name = error.param.opts[-1] if isinstance(error.param, click.Option) else error.param.human_readable_name
    return f"{path} needs {name}{f': {about}' if about else '.'}"


def _wrong_value(error: click.BadParameter) -> str:
    """The option, what it needs, and what it got."""
    given, needs = _GIVEN.match(error.message), _needs(getattr(error.param, "type", None))
    if error.param is None or given is None or needs is None:
        return error.format_message()
    name = error.param.opts[0] if isinstance(error.param, click.Option) else error.param.human_readable_name
    return f"{name} needs {needs}, got {given['value']}."


def _needs(kind: Any) -> str | None:
    if not isinstance(kind, click.types.IntParamType | click.types.FloatParamType):
        return None
    words = "a whole number" if isinstance(kind, click.types.IntParamType) else "a number"
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    above = f" >= {least}" if least is not None else ""
    return f"{words}{above}{' and' if above and most is not None else ''}{f' <= {most}' if most is not None else ''}"
