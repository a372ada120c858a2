"""Where data lies that is not part of the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scaffpd.errors import InputError


@contextmanager
def reading(place: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system refuses in here, such as a folder without permission, into a sentence that names it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{str(error.filename or place)!r} cannot be read: {error.strerror or error}.") from None


def data_root(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """The folder that `folder` or else SCAFFPD_DATA names, or a sentence on how to name it."""
    root = folder or os.environ.get("SCAFFPD_DATA")
    if not root:
        raise InputError(f"{name} is not part of the package: name its folder by --data, folder= or SCAFFPD_DATA.")
    with reading(root):
        there = Path(root).is_dir()
    if not there:
        raise InputError(
            f"There is no data folder {str(root)!r}: name one that exists by --data, folder= or SCAFFPD_DATA."
        )
    return Path(root)


def data_folder(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """The folder of one dataset, or a sentence on how to name it."""
    root = data_root(folder, name)
    place = root / name
    with reading(place):
        there = place.is_dir()
    if not there:
        raise InputError(f"There is no folder {name!r} in {str(root)!r}.")
    return place
