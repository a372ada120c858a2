"""Shared code of all commands: help with examples, completion, JSON output, the output folder."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo

import scaffpd
from scaffpd.errors import InputError, unknown
from scaffpd.files import make_folder, write_file

if TYPE_CHECKING:
    from click import Command as _AnyCommand
else:
    _AnyCommand = object  # Typer may bring a click of its own, whose commands are other ones

# exit codes
DONE = 0
FAILED = 1
WRONG = 2
INTERRUPTED = 130
NUMBERS = (click.types.IntParamType, click.types.FloatParamType)
SETTINGS = {"help_option_names": ["-h", "--help"]}
_EXAMPLES = re.compile(r"\n\s*Examples:\n(?P<lines>(?:[ \t]+\S.*(?:\n|$))+)\s*$")


class WithExamples(_AnyCommand):
    """Help that ends in the examples of the docstring."""

    examples: tuple[str, ...] = ()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.help, self.examples = without_examples(self.help or "")

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write Typer's help, then the examples, each on a line of its own however narrow the terminal is."""
        from rich.console import Console

        super().format_help(ctx, formatter)
        console = Console(highlight=False)
        console.print(" Example" + "s" * (len(self.examples) > 1), style="bold")
        for line in self.examples:
            console.print(f"   {line}", style="cyan", markup=False, soft_wrap=True)


class Command(WithExamples, TyperCommand):
    """A command whose arguments have their help, and whose options have short placeholders."""

    def __init__(self, name: str | None, **given: Any) -> None:
        super().__init__(name, **given)
        hints = get_type_hints(self.callback, include_extras=True).items()
        helps = {
            name: part.help
            for name, hint in hints
            for part in get_args(hint)
            if isinstance(part, ArgumentInfo)
        }
        for parameter in self.params:
            if isinstance(
                parameter, TyperArgument
            ):  # typer below 0.21 loses it to click from 8.4 on
                parameter.help = parameter.help or helps.get(parameter.name or "")
            elif (
                isinstance(parameter, click.Option)
                and not parameter.is_flag
                and parameter.metavar is None
            ):
                # "INTEGER RANGE" would leave little of a line of 80 columns
                whole, real = (isinstance(parameter.type, kind) for kind in NUMBERS)
                parameter.metavar = "N" if whole else "X" if real else None


class Group(WithExamples, TyperGroup):
    """Commands under one name."""


def nearest(word: str, names: list[str]) -> str:
    """End a sentence with a guess at what was meant; with nothing where no name is near."""
    near = get_close_matches(word, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def group(about: str, *commands: Callable[..., None]) -> typer.Typer:
    """Make a group of commands; alone, it shows its help."""
    made = typer.Typer(
        cls=Group,
        help=about,
        invoke_without_command=True,
        add_completion=False,
        context_settings=SETTINGS,
        suggest_commands=False,
    )
    made.callback(help=about)(show_help)
    for command in commands:
        add(made, command)
    return made


def show_help(context: typer.Context) -> None:
    """Show the help of a group whose commands were not named."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def add(
    to: typer.Typer,
    function: Callable[..., None],
    name: str | None = None,
    panel: str | None = None,
) -> None:
    """Make a function a command; `panel` is the heading under which the help of the group lists it."""
    to.command(name, cls=Command, rich_help_panel=panel, context_settings=SETTINGS)(function)


def without_examples(text: str) -> tuple[str, tuple[str, ...]]:
    """Split a docstring into prose, each paragraph on one line for any width of screen, and examples."""
    found = _EXAMPLES.search(text)
    prose = text if found is None else text[: found.start()]
    lines = (
        () if found is None else tuple(line.strip() for line in found["lines"].strip().splitlines())
    )
    return "\n\n".join(" ".join(part.split()) for part in prose.split("\n\n")).strip(), lines


PROBLEMS = ("digits", "hospitals", "breast-cancer", "synthetic")
ALGORITHMS = (
    "Fair",
    *(name for name, home in scaffpd._HOME.items() if home == "scaffpd.algorithms"),
)  # without PyTorch
OBJECTIVES = tuple(
    name
    for name, home in scaffpd._HOME.items()
    if home == "scaffpd.objectives" and name != "Excess"
)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Write the files and print nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]


def checked(what: str, given: str, names: Iterable[str]) -> None:
    """Refuse a name that is none of them, before anything takes time."""
    if given not in names:
        raise unknown(what, given, names)


def listed(given: str | None) -> list[str]:
    """Return names that are joined by commas."""
    return [name.strip() for name in (given or "").split(",") if name.strip()]


def option(
    about: str,
    names: Iterable[str] = (),
    default: str | bool = True,
    *flags: str,
    several: bool = False,
    min: int | None = None,
) -> Any:
    """Make an option; a shell completes its `names`, `several` of them joined by commas, none offered twice."""
    complete = completing(*names, several=several) if names else None
    return typer.Option(*flags, help=about, show_default=default, autocompletion=complete, min=min)


def argument(about: str, names: Iterable[str]) -> Any:
    """Make an argument whose values a shell completes."""
    return typer.Argument(help=about, autocompletion=completing(*names))


def takes(*shared: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that classes declare, `None` without a default; its own take the place of `...`.

    Typer reads signatures, so the command gets one that has all of them; it receives those of the classes as `**given`.
    """

    def add_to(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        places, named = (
            [p for p in own if (p.kind is p.KEYWORD_ONLY) is late] for late in (False, True)
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        for one in shared:
            hints = {} if one is ... else get_type_hints(one, include_extras=True)
            places += [
                inspect.Parameter(n, kind, default=getattr(one, n, None), annotation=h)
                for n, h in hints.items()
            ]
            places += named if one is ... else []
        command.__signature__ = inspect.Signature(places)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in places}
        return command

    return add_to


def completing(*names: str, several: bool = False) -> Callable[[str], list[str]]:
    """Return what `autocompletion=` wants: the names that begin as the word does."""

    def complete(incomplete: str) -> list[str]:
        *before, last = incomplete.split(",") if several else [incomplete]
        return [
            ",".join([*before, name])
            for name in names
            if name not in before and name.startswith(last)
        ]

    return complete


def prepare(folder: Path) -> None:
    """Make a folder; refuse one that cannot be written before the work, not after it."""
    probe = make_folder(folder) / ".writable"
    write_file(probe, "")
    probe.unlink()


def check_new(file: Path) -> None:
    """Refuse to write over a file."""
    if file.exists():
        raise InputError(
            "file-already-choose",
            f"The file {str(file)!r} is there already; choose another one with --out.",
        )


def write_template(name: str, out: Path, then: str, /, **values: object) -> None:
    """Write a commented settings file from its template in `scaffpd.run.settings`, and say what to do with it."""
    check_new(out)
    write_file(
        out,
        files("scaffpd.run.settings").joinpath(name).read_text(encoding="utf-8").format(**values),
    )
    typer.echo(f"Written to {out}. {then} {out}")


def tell(value: Any, show: Callable[[Any], None], as_json: bool) -> None:
    """Print a value as JSON, or show it to people."""
    print_json(value) if as_json else show(value)


def print_json(value: Any) -> None:
    """Print one value; infinite numbers and NaN become null, letters that the output cannot write are escaped."""
    plain = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") != "utf8"
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=plain, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
