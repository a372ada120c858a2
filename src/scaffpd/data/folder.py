"""Where data lies that is not part of the package."""

from __future__ import annotations

import os
from pathlib import Path

from scaffpd.errors import InputError


def data_root(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """The folder that `folder` or else SCAFFPD_DATA names, or a sentence on how to name it."""
    root = folder or os.environ.get("SCAFFPD_DATA")
    if not root:
        raise InputError(f"{name} is not part of the package: name its folder by folder= or SCAFFPD_DATA.")
    if not Path(root).is_dir():
        raise InputError(f"There is no data folder {str(root)!r}: name one that exists by folder= or SCAFFPD_DATA.")
    return Path(root)


def data_folder(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """The folder of one dataset, or a sentence on how to name it."""
    root = data_root(folder, name)
    place = root / name
    if not place.is_dir():
        raise InputError(f"There is no folder {name!r} in {str(root)!r}.")
    return place
