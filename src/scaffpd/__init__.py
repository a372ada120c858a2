"""Federated learning that serves every site: certified, tuning-free, distributionally robust.

Every public name is an attribute of this module, imported when it is first used: PyTorch takes
seconds, and `scaffpd --help` needs none of it. The names are listed once, in `__init__.pyi`,
which type checkers and editors read as well.
"""

from __future__ import annotations

import ast
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

__version__ = "0.2.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOME = {
    alias.name: str(line.module)
    for line in _STUB.body
    if isinstance(line, ast.ImportFrom)
    for alias in line.names
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        near = get_close_matches(name, __all__, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'scaffpd' has no attribute {name!r}{hint}")
    home = _HOME[name]
    if home == __name__:  # a module of ours
        globals()[name] = import_module(f"{home}.{name}")
    else:
        globals()[name] = getattr(import_module(home), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
