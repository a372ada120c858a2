"""Every sentence that refuses something, by its code, in one file to read aloud: sentences.txt.

Other tests compare codes, so rewording a sentence changes this file alone:
`python tests/test_sentences.py` writes it anew.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import scaffpd

PACKAGE = Path(scaffpd.__file__).parent
GOLDEN = Path(__file__).with_name("sentences.txt")
CODE = r"[a-z0-9]+(-[a-z0-9]+)*"


def template(node):
    """Return a sentence as the source has it, with {expressions} where values will stand."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    return "{" + ast.unparse(node) + "}"


def refusals():
    """Yield (code, sentence) of every refusal of the package: calls of an error with two texts."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or len(node.args) != 2:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            code = node.args[0]
            if (
                (name[:1].isupper() or name == "__init__")
                and isinstance(code, ast.Constant)
                and re.fullmatch(CODE, str(code.value))
                and isinstance(node.args[1], ast.Constant | ast.JoinedStr)
                and " " in template(node.args[1])
            ):
                yield code.value, template(node.args[1])


def listing():
    return "".join(sorted(f"{code}: {sentence}\n" for code, sentence in set(refusals())))


def test_sentences_are_the_ones_on_file():
    assert listing().splitlines() == GOLDEN.read_text(encoding="utf-8").splitlines()


def test_every_refusal_has_a_code_that_can_be_read():
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InputError":
                code = node.args[0]
                if isinstance(code, ast.Constant):
                    assert re.fullmatch(CODE, code.value), (file, code.value)


if __name__ == "__main__":
    GOLDEN.write_text(listing(), encoding="utf-8")
