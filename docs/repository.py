"""Brings the repository's own pages (results, benchmarks, changes) into the site, where they lie,
without a copy.

Links are written as they work in the repository. Here they are turned into links between the site's
pages; a link to a file that is not part of the site, such as a source file, becomes plain text. A
link to nothing fails the build.
"""

from __future__ import annotations

import ast
import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("results", "benchmarks")
KINDS = {".md", ".png", ".svg", ".csv", ".txt", ".json"}
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
FILES = "<!-- files -->"  # where docs/architecture.md lists the files
HOME = {"README.md": "docs/index.md"}  # the site has a front page of its own
LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)"
)
BASE = r"(?<![^\Wᵀ])(?<![\\`*])((?:arg)?(?:max|min)|Var|Δ?[A-Za-zΑ-Ωα-ω∇]\*?(?!\w*\*))"
INDEX = r"(?:_(\{[^{}]+\}|[A-Za-zΑ-Ωα-ωℓ0-9]{1,2}(?![^\W²³]|{)))?"
POWER = r"(?:\^(\{[^{}]+\}|[A-Za-z0-9](?![^\W²³]|{)))?"
LETTERS = re.compile(BASE + INDEX + POWER)
TABLES = re.compile(r"^\|[-:| ]+\|$", flags=re.MULTILINE)
FENCE = re.compile(r"(```.*?```|`[^`\n]+`)", flags=re.DOTALL)


def outside() -> list[str]:
    """The files outside docs/ that are part of the site, by their paths in the repository."""
    found = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in KINDS
    ]
    return [*PAGES, *(path.relative_to(ROOT).as_posix() for path in found)]


def on_files(files: Files, config: Any) -> Files:
    """Add them under the paths that they have in the repository."""
    for path in outside():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with links that work in the site; code is left alone, also where it stands in a
    link's text.
    """
    uri = page.file.src_uri
    inside = (Path(config.docs_dir) / uri).exists()
    home = f"docs/{uri}" if inside else uri
    known = {
        (f"docs/{file.src_uri}" if file.generated_by is None else file.src_uri): file
        for file in files
    }
    code: list[str] = []

    def keep(found: re.Match[str]) -> str:
        code.append(found.group())
        return f"\0{len(code) - 1}\0"

    def turn(found: re.Match[str]) -> str:
        picture, text, target, anchor = found.groups()
        there = posixpath.normpath(posixpath.join(posixpath.dirname(home), target))
        there = HOME.get(there, there)
        if there in known:
            here = posixpath.dirname(uri) or "."
            return (
                f"{picture}[{text}]({posixpath.relpath(known[there].src_uri, here)}{anchor or ''})"
            )
        if picture or not (ROOT / there).exists():
            raise PluginError(f"{home} links to {target!r}, which is not there.")
        return text

    if FILES in markdown:
        markdown = (
            markdown.split(FILES)[0] + listing() + markdown.split(FILES)[1].split("\n", 3)[-1]
        )
    commit = made(home) if TABLES.search(markdown) else ""
    if commit:
        markdown += f"\n\n*The tables of this page are those of commit {commit}.*\n"
    hidden = raised(LINK.sub(turn, FENCE.sub(keep, markdown)))
    return re.sub(r"\0(\d+)\0", lambda found: code[int(found.group(1))], hidden)


def made(page: str) -> str:
    """Return the commit in which a page's tables last changed, and its day; "" without Git."""
    asked = ["git", "log", "-1", "-G", r"^\|", "--format=`%h` (%as)", "--", page]
    try:
        found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


def raised(markdown: str) -> str:
    """Indices and exponents of the prose as such: f_i and x^{r+1}; blocks of code and headings stay
    as they are.
    """

    def tags(found: re.Match[str]) -> str:
        letter, below, above = found.groups()
        low = f"<sub>{below.strip('{}')}</sub>" if below else ""
        letter = letter.replace("*", "&#42;")
        return letter + low + (f"<sup>{above.strip('{}')}</sup>" if above else "")

    lines = markdown.split("\n")
    return "\n".join(
        line if line.startswith(("    ", "#")) else LETTERS.sub(tags, line) for line in lines
    )


def listing() -> str:
    """Return a table of all files of the package, with the first sentence of their docstrings."""
    package = ROOT / "src" / "scaffpd"
    lines = ["| file | what it is |", "|---|---|"]
    for file in sorted(package.rglob("*.py"), key=lambda f: (f.parent != package, f)):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        words = " ".join(text.split("\n\n")[0].split())
        first = re.split(r"(?<=[^A-Z])\.(?:\s|$)", words, maxsplit=1)[0]
        if first:
            lines.append(f"| `{file.relative_to(package).as_posix()}` | {first.rstrip('.:;')}. |")
    return "\n".join(lines) + "\n"
