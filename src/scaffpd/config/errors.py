"""Read a settings file strictly; what is wrong with it becomes one sentence with the nearest right word."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scaffpd.errors import InputError, shortened, unknown

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")  # of a silo: it goes into paths, commands and certificates
LARGEST = 2**20  # bytes: nobody writes more than that by hand


class Section:
    """A table of a settings file whose keys are taken one by one.

    Args:
        file: the file, for messages.
        values: what was read.
        known: all keys that there are.
        name: the table's name; empty for the top of the file.
    """

    def __init__(self, file: Path, values: dict[str, Any], known: Iterable[str], name: str = "") -> None:
        self.file, self.values, self.name = file, values, name
        options = list(known)
        for key in values:
            if key not in options:
                what = f"key in [{name}] of {file.name!r}," if name else f"key in {file.name!r},"
                raise unknown(what, key, options)

    @classmethod
    def read(cls, path: Path, known: Iterable[str], others: Mapping[str, str] | None = None) -> Section:
        """The top of a file; `others` says by which key which other file is known, and what is needed instead."""
        try:
            if path.stat().st_size > LARGEST:
                raise InputError(f"The file {str(path)!r} is too large to be a settings file.")
            values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise InputError(f"Cannot read {str(path)!r}: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise InputError(f"The file {str(path)!r} is not UTF-8 text.") from None
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"The file {path.name!r} is not TOML: {str(error).rstrip('.')}.") from None
        except RecursionError:
            raise InputError(f"The file {path.name!r} is nested too deeply to be a settings file.") from None
        for key, what in (others or {}).items():
            if key in values:
                raise InputError(f"The file {path.name!r} looks like {what}.")
        return cls(path, values, known)

    def section(self, name: str, known: Iterable[str]) -> Section:
        """A table within this one; one that is left out is empty."""
        values = self.values.get(name, {})
        if not isinstance(values, dict):
            raise InputError(f"{self.file.name!r} needs a table [{name}], got {name} = {values!r}.")
        return Section(self.file, values, known, name)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def refusal(self, key: str, needs: str) -> InputError:
        """An error about one key: what it needs, and what it has."""
        given = f"got {shortened(self.values[key])}" if key in self.values else "but it is missing"
        return InputError(f"{self.file.name!r} needs {needs} for {self.label(key)}, {given}.")

    def label(self, key: str) -> str:
        """A key with its table, such as data.file."""
        return f"{self.name}.{key}" if self.name else key

    def text(self, key: str, default: str | None = None, needs: str = "a text in quotes") -> str:
        """A text that is not empty."""
        value = self.values.get(key, default)
        if not isinstance(value, str) or not value.strip():
            raise self.refusal(key, needs)
        return value.strip()

    def maybe(self, key: str, needs: str = "a text in quotes") -> str | None:
        """A text, or `None` where it is left out."""
        return self.text(key, needs=needs) if key in self.values else None

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of texts that differ, or `None` where it is left out."""
        value = self.values.get(key)
        if key not in self.values:
            return None
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise self.refusal(key, 'a list such as ["a", "b"]')
        for item in value:
            if value.count(item) > 1:
                raise InputError(f"{self.file.name!r} names {item!r} twice in {self.label(key)}.")
        return tuple(value)

    def whole(self, key: str, default: int | None, least: int = 0, most: int = 2**62) -> int:
        """A whole number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limits = f">= {least}" if most == 2**62 else f"from {least} to {most}"
            raise self.refusal(key, f"a whole number {limits}")
        return value

    def number(self, key: str, default: float | None, needs: str, least: float, below: float) -> float:
        """A number with least <= number < below."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < below:
            raise self.refusal(key, needs)
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value
