"""What Typer lacks: options made of settings, help with examples, JSON output."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import click
import typer
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import ArgumentInfo

from scaffpd.fields import SettingsTable, parts

if TYPE_CHECKING:
    from click import Command as _AnyCommand
else:
    _AnyCommand = object  # Typer may bring a click of its own, whose commands are other ones

# exit codes
DONE = 0
FAILED = 1
WRONG = 2
PAUSED = 3
INTERRUPTED = 130
NUMBERS = (click.types.IntParamType, click.types.FloatParamType)
CONTEXT = {"help_option_names": ["-h", "--help"]}
_EXAMPLES = re.compile(r"\n\s*Examples:\n(?P<lines>(?:[ \t]+\S.*(?:\n|$))+)\s*$")
Tables = Mapping[str, type[SettingsTable]]  # by their names in a settings file
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Write the files and print nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]


class WithExamples(_AnyCommand):
    """Help that ends in the examples of the docstring."""

    examples: tuple[str, ...] = ()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.help, self.examples = without_examples(self.help or "")

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write Typer's help, then the examples, each on one line however narrow the terminal."""
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
            if isinstance(parameter, TyperArgument):
                # typer below 0.21 loses it to click from 8.4 on
                parameter.help = parameter.help or helps.get(parameter.name or "")
            elif isinstance(parameter, click.Option) and not parameter.is_flag:
                # "INTEGER RANGE" would leave little of a line of 80 columns
                whole, real = (isinstance(parameter.type, kind) for kind in NUMBERS)
                parameter.metavar = parameter.metavar or ("N" if whole else "X" if real else None)

    def invoke(self, ctx: click.Context) -> object:
        """Carry it out; at Ctrl-C say what is saved and how to go on, as the interrupt has it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            saved = str(stop) or "nothing was saved; the same command starts anew"
            typer.echo(f"Interrupted: {saved}.", err=True)
            raise typer.Exit(INTERRUPTED) from None


class Group(WithExamples, TyperGroup):
    """Commands under one name."""


def group(about: str, *commands: Callable[..., None]) -> typer.Typer:
    """Make a group of commands; alone, it shows its help."""
    made = typer.Typer(
        cls=Group,
        help=about,
        invoke_without_command=True,
        add_completion=False,
        context_settings=CONTEXT,
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
    """Make a function a command, listed under the heading `panel` of its group's help."""
    to.command(name, cls=Command, rich_help_panel=panel, context_settings=CONTEXT)(function)


def without_examples(text: str) -> tuple[str, tuple[str, ...]]:
    """Split a docstring into prose, each paragraph on one line, and examples."""
    found = _EXAMPLES.search(text)
    prose = text if found is None else text[: found.start()]
    lines = [] if found is None else found["lines"].strip().splitlines()
    paragraphs = (" ".join(part.split()) for part in prose.split("\n\n"))
    return "\n\n".join(paragraphs).strip(), tuple(line.strip() for line in lines)


# ------------------------------------------------------------------ options made of settings


def takes(
    tables: Tables, but: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every setting of the tables that has a help text.

    Typer reads signatures, so the command gets one with all of them; it receives the values as
    `**given`, `None` where an option is not given. Settings in `but` are left out.
    """

    def add_to(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        found = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
        for title, table in tables.items():
            for name, setting in _settings(table):
                if name not in but:
                    option = _option(title, name, setting)
                    kind = inspect.Parameter.KEYWORD_ONLY
                    found.append(inspect.Parameter(name, kind, default=None, annotation=option))
        command.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in found}
        return command

    return add_to


def _settings(table: type[SettingsTable]) -> list[tuple[str, FieldInfo]]:
    return [(name, one) for name, one in table.model_fields.items() if one.description]


def _option(title: str, name: str, setting: FieldInfo) -> object:
    kind = _type(setting)
    flags = [f"--{name.replace('_', '-')}"]
    if kind is bool and setting.default is None:
        flags = [f"{flags[0]}/--no-{flags[0][2:]}"]
    plain = isinstance(setting.default, int | float | str) and setting.default is not False
    made = typer.Option(
        *flags,
        help=setting.description,
        show_default=str(setting.default) if plain else False,
        rich_help_panel=f"Options: {title}",
    )
    return Annotated[kind | None, made]


def _type(setting: FieldInfo) -> type:
    """Return the type of an option; names with commas, and a number or a file, are texts."""
    inside = list(parts(setting.annotation))
    if str in inside or Path in inside or _is_list(setting):
        return str
    return next(kind for kind in (bool, float, int) if kind in inside)


def _is_list(setting: FieldInfo) -> bool:
    return any(get_origin(part) is tuple for part in parts(setting.annotation))


def given_settings(
    tables: Tables, given: Mapping[str, object]
) -> tuple[dict[str, dict[str, object]], dict[str, str]]:
    """Return the values of options by table, and by key, such as "data.test", its option."""
    values: dict[str, dict[str, object]] = {}
    options: dict[str, str] = {}
    for title, table in tables.items():
        for name, setting in _settings(table):
            value = given.get(name)
            if value is None:
                continue
            if isinstance(value, str) and _is_list(setting):
                value = listed(value)
            elif isinstance(value, str) and float in parts(setting.annotation):
                try:
                    value = float(value)
                except ValueError:
                    if Path in parts(setting.annotation):
                        value = str(Path(str(value)).absolute())
            values.setdefault(title, {})[name] = value
            options[f"{title}.{name}"] = f"--{name.replace('_', '-')}"
    return values, options


def listed(given: str | None) -> list[str]:
    """Return names that are joined by commas."""
    return [name.strip() for name in (given or "").split(",") if name.strip()]


def completing(*names: str) -> Callable[[str], list[str]]:
    """Return what `autocompletion=` wants."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


# ------------------------------------------------------------------ JSON


def print_json(value: object) -> None:
    """Print one value; infinite numbers and NaN become null, letters are escaped if need be."""
    plain = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") != "utf8"
    values = to_jsonable_python(value, inf_nan_mode="null")
    typer.echo(json.dumps(values, indent=2, ensure_ascii=plain, allow_nan=False))
