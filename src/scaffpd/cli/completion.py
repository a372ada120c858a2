"""Completion of names in shells: its scripts, shown or installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import click
from click.shell_completion import get_completion_class

from scaffpd.cli.commands import Option
from scaffpd.errors import InputError

PROGRAM = "scaffpd"
VARIABLE = "_SCAFFPD_COMPLETE"


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


def _script(context: click.Context, shell: str) -> str:
    made = get_completion_class(shell)
    if shell not in SHELLS or made is None:
        raise InputError(
            "shell-unknown", f"There is no completion for {shell!r}: name {', '.join(SHELLS)}."
        )
    return SHELLS[shell].before + made(context.command, {}, PROGRAM, VARIABLE).source()


def _show(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is not None and not context.resilient_parsing:
        click.echo(_script(context, shell or _current()))
        context.exit()


def _install(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is None or context.resilient_parsing:
        return
    shell = shell or _current()
    text = _script(context, shell)
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
    click.echo(f"{shell} completes scaffpd from its next start on: {script}")
    context.exit()


def _current() -> str:
    """Return the name of the user's shell."""
    return Path(os.environ.get("SHELL", "bash")).name


show = click.option(
    "--show-completion",
    cls=Option,
    is_flag=False,
    flag_value="",
    is_eager=True,
    expose_value=False,
    callback=_show,
    metavar="[SHELL]",
    help="Print the completion for bash, zsh or fish.",
    show_default="the current shell",
)
install = click.option(
    "--install-completion",
    cls=Option,
    is_flag=False,
    flag_value="",
    is_eager=True,
    expose_value=False,
    callback=_install,
    metavar="[SHELL]",
    help="Install the completion for bash, zsh or fish.",
    show_default="the current shell",
)
