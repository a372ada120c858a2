"""Files that are not part of the package: their folders and checksums."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaffpd.errors import InputError
from scaffpd.machine import cores


@contextmanager
def reading(place: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a system error in here, such as a folder without permission, into a sentence that names it."""
    try:
        yield
    except OSError as error:
        raise InputError(
            "read-reading",
            f"{str(error.filename or place)!r} cannot be read: {error.strerror or error}.",
        ) from None


def data_root(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """Return the folder that `folder`, or else SCAFFPD_DATA, names; refuse one that does not exist."""
    root = folder or os.environ.get("SCAFFPD_DATA")
    if not root:
        raise InputError(
            "part-package-name",
            f"{name} is not part of the package: name its folder by --data, folder= or SCAFFPD_DATA.",
        )
    with reading(root):
        there = Path(root).is_dir()
    if not there:
        raise InputError(
            "data-folder-name",
            f"There is no data folder {str(root)!r}: name one that exists by --data, folder= or SCAFFPD_DATA.",
        )
    return Path(root)


def data_folder(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """Return the folder of one dataset, or refuse it with one sentence."""
    root = data_root(folder, name)
    place = root / name
    with reading(place):
        there = place.is_dir()
    if not there:
        raise InputError("folder-data-folder", f"There is no folder {name!r} in {str(root)!r}.")
    return place


THREADS = 16  # with more, memory is the limit


def checksum(piece: NDArray[Any]) -> str:
    """Return the SHA-256 (hexadecimal) of the bytes of some rows."""
    return hashlib.sha256(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data).hexdigest()


def checksums(values: NDArray[Any], starts: Iterable[int], size: int) -> Generator[str, None, None]:
    """Yield the checksums of values[k : k + size] for k in `starts`, in order."""
    threads = ThreadPoolExecutor(min(THREADS, cores()))
    try:
        yield from threads.map(lambda k: checksum(values[k : k + size]), starts)
    finally:
        threads.shutdown(cancel_futures=True)


LIST = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


@dataclass(frozen=True)
class Files:
    """Reader of files that refuses a file whose `SHA256SUMS` entry differs."""

    sums: dict[str, str]  # the checksum of each file that has one, by absolute path

    @staticmethod
    def between(root: Path, place: Path) -> Files:
        """Read the checksums of `root`, of `place` and of the folders on the way."""
        way = [place, *(folder for folder in place.parents if folder.is_relative_to(root))]
        return Files(
            {
                name: value
                for folder in dict.fromkeys([root, *way])
                for name, value in _listed(folder)
            }
        )

    def read(self, file: Path) -> bytes:
        """Return the content of a file, checked."""
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            raise InputError("missing-read", f"{str(file)!r} is missing.") from None
        except OSError as error:
            raise InputError(
                "read-read", f"{str(file)!r} cannot be read: {error.strerror or error}."
            ) from None
        expected = self.sums.get(os.path.abspath(file))
        if expected:
            found = hashlib.sha256(content).hexdigest()
            if found != expected:
                raise InputError(
                    "damaged-another-file",
                    f"{str(file)!r} is damaged or another file: {LIST} expects {expected[:12]}…, found {found[:12]}….",
                )
        return content

    def lines(self, file: Path) -> list[str]:
        """Return the lines of a text file that are not blank."""
        try:
            text = self.read(file).decode("utf-8")
        except UnicodeDecodeError:
            raise InputError(
                "read-text-utf", f"{str(file)!r} cannot be read: it is no text in UTF-8."
            ) from None
        return [line for line in text.splitlines() if line.strip()]


def _listed(folder: Path) -> Iterable[tuple[str, str]]:
    """Yield (absolute path, checksum) for every line of a folder's list, as `sha256sum` writes it."""
    file = folder / LIST
    if not file.is_file():
        return
    for line in Files({}).lines(file):
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise InputError(
                "line-expected-digits",
                f"{str(file)!r} has the line {line!r}: expected 64 digits, two spaces and a name.",
            )
        yield os.path.abspath(folder / match[2]), match[1].lower()
