"""Settings written down again, so that a run can be repeated from its own folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_text(values: Mapping[str, Any], heading: str = "") -> str:
    """TOML of texts, numbers, booleans, lists of these, and tables of them; what is `None` is left out."""
    lines = [f"# {line}" for line in heading.splitlines()]
    lines += _table((), values)
    return "\n".join(lines).strip() + "\n"


def _table(path: tuple[str, ...], values: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    if path and (lines or not values):
        lines = ["", f"[{'.'.join(map(_key, path))}]", *lines]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += _table((*path, key), value)
    return lines


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, float) and abs(value) == float("inf"):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"{type(value).__name__} has no place in a settings file")


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
