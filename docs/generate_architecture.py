"""Write the list of files into docs/architecture.md: folder, file, lines, and the first sentence of its docstring.

python docs/generate_architecture.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "scaffpd"
PAGE = ROOT / "docs" / "architecture.md"
MARKS = re.compile(
    r"(?<=<!-- files: written by docs/generate_architecture.py -->\n).*(?=<!-- end of files -->)",
    re.DOTALL,
)


def rows() -> list[tuple[str, int, str]]:
    """Return (path, lines, sentence) of every file, folder by folder."""
    found = []
    for file in sorted(
        PACKAGE.rglob("*.py"),
        key=lambda f: (f.parent != PACKAGE, f.relative_to(PACKAGE).as_posix()),
    ):
        text = file.read_text(encoding="utf-8")
        words = " ".join((ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split())
        found.append((file.relative_to(PACKAGE).as_posix(), text.count("\n"), sentence(words)))
    return found


def sentence(words: str) -> str:
    """Return the first sentence, or the part of a long one before its colon or semicolon."""
    first = re.split(r"(?<=[^A-Z])\.(?:\s|$)", words, maxsplit=1)[0]
    cut = re.match(r"(.{40,}?)[:;] ", first) if len(first) > 130 else None
    return (cut[1] if cut else first).rstrip(".:,;") + "."


def table() -> str:
    """Return the Markdown table, with a total for every folder."""
    files = rows()
    lines = [
        "",
        f"{sum(n for _, n, _ in files):,} lines in {len(files)} files.",
        "",
        "| file | lines | what it is |",
        "|---|---|---|",
    ]
    rooms: dict[str, list[tuple[str, int, str]]] = {}
    for row in files:
        rooms.setdefault(row[0].rpartition("/")[0], []).append(row)
    for room, inside in rooms.items():
        lines.append(f"| **{room or 'scaffpd'}/** | **{sum(n for _, n, _ in inside):,}** | |")
        lines += [f"| `{path}` | {n} | {what} |" for path, n, what in inside if n > 1]
    return "\n".join([*lines, "", ""])


if __name__ == "__main__":
    PAGE.write_text(
        MARKS.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8"
    )
