"""Completion of names in shells: its scripts, shown or installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import get_completion_class

from scaffpd.cli.commands import Decorator, option
from scaffpd.errors import InputError


class _Files(NamedTuple):
    """Where a shell looks, from the home folder."""

    script: str
    start: str = ""  # the file that has to read the script
    before: str = ""


SHELLS = {
    "bash": _Files(".bash_completions/scaffpd.sh", ".bashrc"),
    "zsh": _Files(".zfunc/scaffpd.zsh", ".zshrc", "autoload -Uz compinit && compinit\n"),
    "fish": _Files(".config/fish/completions/scaffpd.fish"),
}


def _done(
    context: click.Context, _: click.Parameter, shell: str | None, act: Callable[[str, str], str]
) -> None:
    """Act on a shell's script, by default the user's own, and exit with what there is to say."""
    if shell is None or context.resilient_parsing:
        return
    shell = shell or Path(os.environ.get("SHELL", "bash")).name
    made = get_completion_class(shell)
    if shell not in SHELLS or made is None:
        raise InputError(
            "shell-unknown", f"There is no completion for {shell!r}: name {', '.join(SHELLS)}."
        )
    source = made(context.command, {}, "scaffpd", "_SCAFFPD_COMPLETE").source()
    click.echo(act(shell, SHELLS[shell].before + source))
    context.exit()


def _installed(shell: str, text: str) -> str:
    place = SHELLS[shell]
    script = Path.home() / place.script
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text, encoding="utf-8")
    if place.start:
        start = Path.home() / place.start
        line = f". ~/{place.script}\n"
        before = start.read_text(encoding="utf-8") if start.exists() else ""
        if line not in before:
            gap = "\n" if before and not before.endswith("\n") else ""
            start.write_text(f"{before}{gap}{line}", encoding="utf-8")
    return f"{shell} completes scaffpd from its next start on: {script}"


def _option(verb: str, act: Callable[[str, str], str]) -> Decorator:
    return option(
        f"--{verb.lower()}-completion",
        is_flag=False,
        flag_value="",
        is_eager=True,
        expose_value=False,
        callback=partial(_done, act=act),
        metavar="[SHELL]",
        help=f"{verb if verb != 'Show' else 'Print'} the completion for bash, zsh or fish.",
        show_default="the current shell",
    )


show = _option("Show", lambda shell, text: text)
install = _option("Install", _installed)
