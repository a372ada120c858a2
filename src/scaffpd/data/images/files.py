"""Files that are read whole, and held against checksums where somebody wrote those down."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scaffpd.errors import InputError

LIST = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


@dataclass(frozen=True)
class Files:
    """Reads files; those that a `SHA256SUMS` names are refused where their content is another.

    Attributes:
        sums: the checksum of each file that has one, by absolute path.
    """

    sums: dict[str, str]

    @staticmethod
    def between(root: Path, place: Path) -> Files:
        """With the checksums of `root`, of `place` and of the folders on the way."""
        way = [place, *(folder for folder in place.parents if folder.is_relative_to(root))]
        return Files({name: value for folder in dict.fromkeys([root, *way]) for name, value in _listed(folder)})

    def read(self, file: Path) -> bytes:
        """The content of `file`, checked."""
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            raise InputError(f"{str(file)!r} is missing.") from None
        except OSError as error:
            raise InputError(f"{str(file)!r} cannot be read: {error.strerror or error}.") from None
        expected = self.sums.get(os.path.abspath(file))
        if expected:
            found = hashlib.sha256(content).hexdigest()
            if found != expected:
                raise InputError(
                    f"{str(file)!r} is damaged or another file: {LIST} expects {expected[:12]}…, found {found[:12]}…."
                )
        return content

    def lines(self, file: Path) -> list[str]:
        """The lines of a text file that are not blank."""
        try:
            text = self.read(file).decode("utf-8")
        except UnicodeDecodeError:
            raise InputError(f"{str(file)!r} cannot be read: it is no text in UTF-8.") from None
        return [line for line in text.splitlines() if line.strip()]


def _listed(folder: Path) -> Iterable[tuple[str, str]]:
    """(absolute path, checksum) of every line of the folder's list, as `sha256sum` writes it."""
    file = folder / LIST
    if not file.is_file():
        return
    for line in Files({}).lines(file):
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise InputError(
                f"{str(file)!r} has the line {line!r}: expected 64 digits of a checksum, two spaces and a name."
            )
        yield os.path.abspath(folder / match[2]), match[1].lower()
