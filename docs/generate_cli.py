"""Writes docs/cli.md, the reference of the command line, from the commands themselves.

python docs/generate_cli.py            writes the page
python docs/generate_cli.py --check    says whether it is what would be written, and changes nothing
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import scaffpd.cli
from scaffpd.cli import EXIT_CODES

Row = tuple[str, str, str]
Shown = dict[tuple[str, tuple[tuple[str, ...], ...]], tuple[str, list[Row]]]
LONG = 6  # options from which on a table is not repeated
PAGE = Path(__file__).with_name("cli.md")
OPENING = """# The command line

Every command explains itself with `--help`; this page is made from the same words by `make docs`. A misspelt command
or option gets the nearest right one, and a mistake one sentence on standard error, never a traceback.
"""


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """The command and all below it, in the order of its help."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for part in command.list_commands(context):
            below = command.get_command(context, part)
            if below is not None and not below.hidden:
                yield from commands(below, f"{name} {part}")


def exit_codes() -> str:
    """As a list."""
    return "\n".join(f"- `{code}`: {code_words(words)}" for code, words in EXIT_CODES.items())


def section(name: str, command: click.Command, shown: Shown) -> str:
    """One command in Markdown."""
    context = click.Context(command, info_name=name)
    parts = [f"{'##' if len(name.split()) < 3 else '###'} `{name}`", *paragraphs(command)]
    if isinstance(command, click.Group):
        listed = [
            (part, command.get_command(context, part)) for part in command.list_commands(context)
        ]
        seen = [(part, below) for part, below in listed if below and not below.hidden]
        rows = [
            f"| [`{part}`](#{anchor(f'{name} {part}')}) | {brief(below)} |" for part, below in seen
        ]
        parts += ["\n".join(["| command | what it does |", "|---|---|", *rows])]
    else:
        parts += [f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```"]
    parts += [
        tabled("argument", rows_of(context, arguments(command))),
        option_table(name, context, command, shown),
    ]
    if examples := getattr(command, "examples", ()):
        parts += ["For example:\n\n```console\n" + "\n".join(examples) + "\n```"]
    return "\n\n".join(part for part in parts if part)


def option_table(name: str, context: click.Context, command: click.Command, shown: Shown) -> str:
    """All options; of a command with the same ones as another before it, only those that differ."""
    rows = rows_of(context, options(command))
    alike = (name.rsplit(" ", 1)[0], tuple(row[:2] for row in rows))
    if alike not in shown or len(rows) < LONG:
        shown[alike] = (name, rows)
        return tabled("option", rows)
    model, known = shown[alike]
    other = [row for row in rows if row not in known]
    link = f"The options are those of [`{model}`](#{anchor(model)})"
    return f"{link}.\n" if not other else f"{link}, but for:\n\n{tabled('option', other)}"


def paragraphs(command: click.Command) -> list[str]:
    """Its help."""
    return [
        code_words(" ".join(part.split()))
        for part in (command.help or "").split("\n\n")
        if part.strip()
    ]


def code_words(text: str) -> str:
    """Options and file names as code; what a table would take for the end of a cell is kept from
    it.
    """
    text = re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", text)
    return text.replace("|", "\\|").replace("<", "&lt;")


def brief(command: click.Command) -> str:
    """The first paragraph of its help."""
    return next(iter(paragraphs(command)), "")


def anchor(name: str) -> str:
    """Where the page has that command."""
    return name.replace(" ", "-")


def arguments(command: click.Command) -> list[click.Parameter]:
    """What stands without a name on the command line."""
    return [item for item in command.params if isinstance(item, click.Argument)]


def options(command: click.Command) -> list[click.Parameter]:
    """What has a name, but for --help."""
    found = command.get_params(click.Context(command))
    return [item for item in found if isinstance(item, click.Option) and "--help" not in item.opts]


def rows_of(context: click.Context, items: list[click.Parameter]) -> list[Row]:
    """Spelling, meaning and default of each."""
    return [(spelling(item, context), meaning(item), default(item)) for item in items]


def tabled(kind: str, rows: list[Row]) -> str:
    """A table of arguments or options."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {kind} | meaning | default |", "|---|---|---|", *lines]) if rows else ""


def meaning(item: click.Parameter) -> str:
    """Its help, and the bounds of a number."""
    words = code_words(" ".join((getattr(item, "help", None) or "").split()))
    low = getattr(item.type, "min", None)
    high = getattr(item.type, "max", None)
    bounds = (
        ""
        if low is None
        else f"{low} to {high}"
        if high is not None
        else f"≥ {low}"
        if low > 1
        else ""
    )
    return f"{words} ({bounds})" if bounds else words


def spelling(item: click.Parameter, context: click.Context) -> str:
    """How it is written: `--out PATH`, `-q`."""
    if isinstance(item, click.Argument):
        return f"`{item.make_metavar(context)}`"
    metavar = item.make_metavar(context).split(" RANGE")[0]
    taken = "" if getattr(item, "is_flag", False) else f" {metavar}"
    names = [*sorted(item.opts, key=len, reverse=True), *item.secondary_opts]
    return ", ".join(
        f"`{name}{taken if name == names[0] else ''}`".replace("|", "\\|") for name in names
    )


def default(item: click.Parameter) -> str:
    """What is taken where it is left out."""
    shown = getattr(item, "show_default", None)
    value = getattr(item, "usual", None)
    if item.secondary_opts and value is not None:
        return f"`{item.opts[0] if value else item.secondary_opts[0]}`"
    if isinstance(shown, str):
        return shown
    if item.required:
        return "needed"
    if (
        value is None
        or value is False
        or value == ()
        or callable(value)
        or getattr(item, "is_flag", False)
    ):
        return ""
    return f"`{value.as_posix() if isinstance(value, Path) else value}`"


def page() -> str:
    """The whole page."""
    shown: Shown = {}
    sections = [
        section(name, command, shown) for name, command in commands(scaffpd.cli.app, "scaffpd")
    ]
    codes = f"## Exit codes\n\n{exit_codes()}"
    return "\n\n".join([OPENING.strip(), sections[0], codes, *sections[1:]]) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    text = page()
    if arguments == ["--check"]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
