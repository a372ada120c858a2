"""Sentences for what is wrong with a command line itself, in the words of all other refusals."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

import click

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
