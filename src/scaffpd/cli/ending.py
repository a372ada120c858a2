"""How a command line ends: exit codes, and one sentence where something went wrong."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import suppress

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
