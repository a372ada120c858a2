"""The pages' own code: Python blocks run from top to bottom, commands are read by the real command
line.
"""

import re
import shlex
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]+)[^\n]*\n(?P<code>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)
FRAGMENT = "<!-- fragment"  # on the line before a block that cannot run by itself, with the reason


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language, fragments=False):
    """The code of a page's blocks in one language; fragments or the others."""
    text = page.read_text(encoding="utf-8")
    found = []
    for block in FENCE.finditer(text):
        before = text[: block.start()].rstrip().rsplit("\n", 1)[-1]
        if block["language"] == language and before.startswith(FRAGMENT) == fragments:
            lines = block["code"].splitlines()
            found.append("\n".join(line.removeprefix(block["indent"]) for line in lines) + "\n")
    return found


def run_python(page, scope=None):
    """Run a page's Python blocks in one namespace, and return it."""
    scope = {"__name__": page.stem} if scope is None else scope
    for number, code in enumerate(blocks(page, "python"), start=1):
        exec(compile(code, f"{page.name}, block {number}", "exec", dont_inherit=True), scope)
    return scope


def commands(page):
    """Every line of a page's consoles and indented blocks that calls us, as words, without
    comments.
    """
    text = page.read_text(encoding="utf-8")
    consoles = [
        line
        for code in blocks(page, "console") + blocks(page, "text")
        for line in code.splitlines()
    ]
    indented = [
        line.strip() for line in FENCE.sub("", text).splitlines() if line.startswith("    ")
    ]
    lines = [re.sub(r"^(\$ |[A-Z_]+=\S+ )+", "", line) for line in (*consoles, *indented)]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("scaffpd ")]


def understood(words):
    """Refuse a command line that the real command would not take, without carrying it out."""
    from scaffpd import cli

    rest = [word for word in words[1:] if word != "--help"]
    parent = None
    command = cli.app
    while isinstance(command, click.Group):
        context = command.make_context(command.name or "scaffpd", list(rest), parent=parent)
        left = [*getattr(context, "_protected_args", []), *context.args]
        if not left:
            return
        _, command, rest = command.resolve_command(context, left)
        parent = context
    command.make_context(command.name, list(rest), parent=parent)
