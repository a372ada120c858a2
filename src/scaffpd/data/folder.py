"""The folder of data that is not part of the package."""

from __future__ import annotations

import os
from pathlib import Path

from scaffpd.errors import InputError


def data_root(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """Return the folder that `folder`, or else SCAFFPD_DATA, names."""
    root = folder or os.environ.get("SCAFFPD_DATA")
    if not root:
        raise InputError(
            "data-folder-not-named",
            f"{name} is not part of the package: name its folder by folder= or SCAFFPD_DATA.",
        )
    if not Path(root).is_dir():
        raise InputError("data-folder-missing", f"There is no data folder {str(root)!r}.")
    return Path(root)


def data_file(folder: str | os.PathLike[str] | None, name: str) -> Path:
    """Return a file such as "school/school.mat" in the data folder."""
    file = data_root(folder, name) / name
    if not file.is_file():
        raise InputError("data-file-missing", f"There is no file {str(file)!r}.")
    return file
