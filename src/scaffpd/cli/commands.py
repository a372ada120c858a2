"""What click lacks: help by headings that ends in examples, arguments with help, JSON output.

Only click is loaded here, so that `--help` and completion are quick; the options that settings
make (`cli/settings.py`) are loaded by the commands that have them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem, get_completion_class

from scaffpd.errors import InputError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
PLACEHOLDERS = {click.types.IntParamType: "N", click.types.FloatParamType: "X"}
PATH = click.Path(path_type=Path)
OPTIONS = "Options"
COMMANDS = "Commands"
Decorator = Callable[[Callable[..., None]], Callable[..., None]]
Row = tuple[str, str]  # of a list of definitions
More = Callable[[], Sequence[click.Parameter]]


class ExitCode(IntEnum):
    """How a command line ends."""

    DONE = 0
    FAILED = 1
    WRONG = 2
    PAUSED = 3
    INTERRUPTED = 130


class Argument(click.Argument):
    """An argument with its help; click below 8.5 has none."""

    def __init__(self, names: Sequence[str], *, help: str, **named: Any) -> None:
        super().__init__(names, **named)
        self.help = help
        self.usual = named.get("default")

    def record(self) -> Row:
        name = f"{(self.name or '').upper()}{'...' * (self.nargs == -1)}"
        return name, _with_default(self.help or "", self.usual)


class Option(click.Option):
    """An option under a heading of the help, with a short placeholder."""

    def __init__(self, names: Sequence[str], *, heading: str = OPTIONS, **named: Any) -> None:
        super().__init__(names, **named)
        self.heading = heading
        self.usual = named.get("default")
        short = (name for kind, name in PLACEHOLDERS.items() if isinstance(self.type, kind))
        if not self.is_flag:  # "INTEGER RANGE" would leave little of a line of 80 columns
            self.metavar = self.metavar or next(short, self.type.name.upper())

    def get_help_record(self, ctx: click.Context) -> Row:
        names = [", ".join(sorted(self.opts, key=len)), *self.secondary_opts]
        value = "" if self.is_flag else f" {self.metavar}"
        usual = self.usual if not self.is_flag else None
        if isinstance(self.show_default, str):
            usual = self.show_default
        elif self.secondary_opts and self.usual is not None:
            usual = (self.opts if self.usual else self.secondary_opts)[0].lstrip("-")
        return " / ".join(names) + value, _with_default(self.help or "", usual)


def _with_default(words: str, usual: object) -> str:
    return words if usual is None or usual == "" else f"{words} [default: {usual}]"


class Command(click.Command):
    """A command with help by headings, and the examples of the docstring at its end.

    Args:
        more: makes further options, when they are first needed: settings take a while to load.
    """

    def __init__(self, name: str | None = None, more: More | None = None, **named: Any) -> None:
        super().__init__(name, **{"context_settings": CONTEXT} | named)
        self.help, self.examples = without_examples(self.help or "")
        self.more = more

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if self.more is not None:
            self.params += self.more()
            self.more = None
        return super().get_params(ctx)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help; click from 8.5 on has a section of arguments besides."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments and options, each with its help, below their headings."""
        sections: dict[str, list[Row]] = {"Arguments": [], OPTIONS: []}
        for one in self.get_params(ctx):
            if isinstance(one, Argument):
                sections["Arguments"].append(one.record())
            elif record := one.get_help_record(ctx):
                sections.setdefault(getattr(one, "heading", OPTIONS), []).append(record)
        for title, rows in sections.items():
            write_section(formatter, title, rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog, then the examples, each on one line however narrow the terminal."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            plural = "s" * (len(self.examples) > 1)
            formatter.write(f"\n{click.style(f'Example{plural}', bold=True)}\n")
        for line in self.examples:
            formatter.write(f"   {click.style(line, fg='cyan')}\n")

    def invoke(self, ctx: click.Context) -> object:
        """Carry it out; at Ctrl-C say what is saved and how to go on, as the interrupt has it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            saved = str(stop) or "nothing was saved; the same command starts anew"
            click.echo(f"Interrupted: {saved}.", err=True)
            raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None


class Group(Command, click.Group):
    """Commands under one name, in the order in which they are added; alone, it shows its help."""

    def __init__(self, name: str | None = None, **named: Any) -> None:
        super().__init__(name, invoke_without_command=True, **named)
        self.headings: dict[str, list[click.Command]] = {}

    def include(self, commands: Sequence[click.Command], heading: str = COMMANDS) -> None:
        self.headings.setdefault(heading, []).extend(commands)
        for command in commands:
            self.add_command(command)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        Command.format_options(self, ctx, formatter)
        for title, commands in self.headings.items():
            rows = [(one.name or "", (one.help or "").split("\n\n")[0]) for one in commands]
            write_section(formatter, title, rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            raise NoSuchCommand(args[0], self.list_commands(ctx), ctx)
        return super().resolve_command(ctx, args)


class NoSuchCommand(click.UsageError):
    """A command that does not exist; click below 8.4 suggests none."""

    def __init__(self, name: str, known: Sequence[str], ctx: click.Context) -> None:
        super().__init__(f"No such command {name!r}.", ctx)
        self.possibilities = get_close_matches(name, known)


def show_help(context: click.Context, /) -> None:
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), color=context.color)


def write_section(formatter: click.HelpFormatter, title: str, rows: Sequence[Row]) -> None:
    if rows:
        formatter.write(f"\n{click.style(title, bold=True)}\n")
        with formatter.indentation():
            formatter.write_dl([(click.style(name, fg="cyan"), words) for name, words in rows])


def without_examples(text: str) -> tuple[str, tuple[str, ...]]:
    """Split a docstring into prose, each paragraph on one line, and examples."""
    prose, _, lines = text.partition("Examples:\n")
    paragraphs = (" ".join(part.split()) for part in prose.split("\n\n"))
    return "\n\n".join(paragraphs).strip(), tuple(map(str.strip, lines.strip().splitlines()))


def coloured() -> bool | None:
    """Return whether the environment asks for colours or for none; terminals decide else."""
    return False if os.environ.get("NO_COLOR") else bool(os.environ.get("FORCE_COLOR")) or None


# ------------------------------------------------------------------ parts of commands


def command(more: More | None = None) -> Callable[[Callable[..., None]], Command]:
    return click.command(cls=Command, more=more)


def group(name: str, about: str, *commands: click.Command) -> Group:
    made = Group(name, help=about, callback=click.pass_context(show_help))
    made.include(commands)
    return made


argument = partial(click.argument, cls=Argument)
option = partial(click.option, cls=Option)
switch = partial(option, is_flag=True)
quiet = switch("--quiet", "-q", help="Write the files and print nothing.")
as_json = switch("--json", "as_json", help="Print JSON, and nothing else.")


def listed(given: str | None) -> list[str]:
    return [name.strip() for name in (given or "").split(",") if name.strip()]


def completing(*names: str) -> Callable[..., list[CompletionItem]]:
    return lambda ctx, param, incomplete: [
        CompletionItem(name) for name in names if name.startswith(incomplete)
    ]


# ------------------------------------------------------------------ completion in shells


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


# ------------------------------------------------------------------ JSON


def print_json(value: object) -> None:
    """Print one value; infinite numbers and NaN become null, letters are escaped if need be."""
    from pydantic_core import to_jsonable_python

    plain = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") != "utf8"
    values = to_jsonable_python(value, inf_nan_mode="null")
    click.echo(json.dumps(values, indent=2, ensure_ascii=plain, allow_nan=False))
