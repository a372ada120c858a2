"""A folder of results as one self-contained HTML page, or as pictures of its figures.

`write(folder)` reads the files that `train`, `path`, `demo`, `compare` and `deploy` leave behind, and nothing else.
"""

from __future__ import annotations

from pathlib import Path

from scaffpd.errors import InputError
from scaffpd.report.engine import available

NAME = "report.html"


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a folder, all of it or nothing; where it is (FOLDER/report.html unless told)."""
    from scaffpd.report.engine import library
    from scaffpd.report.page import page
    from scaffpd.report.reading import read

    story = read(Path(folder))
    target = Path(folder) / NAME if out is None else Path(out)
    if target.is_dir():
        raise InputError(f"{str(target)!r} is a folder; --out needs a file, such as {str(target / NAME)!r}.")
    _put(target, page(story, library()).encode("utf-8"))
    return target


def write_figures(folder: Path, form: str, out: Path | None = None) -> tuple[Path, ...]:
    """Write every figure as PNG or SVG; where they are (FOLDER/figures unless told)."""
    from scaffpd.report.reading import read
    from scaffpd.report.static import directory, pictures

    place = directory(Path(folder), None if out is None else Path(out))
    drawn = pictures(read(Path(folder)), form)
    if not drawn:
        raise InputError(f"The run in {str(folder)!r} has nothing to draw yet.")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if place.is_file() else error.strerror
        raise InputError(f"Cannot make the folder {str(place)!r}: {why}.") from None
    for name, content in drawn.items():
        _put(place / name, content)
    return tuple(place / name for name in drawn)


def _put(target: Path, content: bytes) -> None:
    from scaffpd.checkpoint import atomic_write

    try:
        with atomic_write(target) as file:
            file.write(content)
    except OSError as error:
        raise InputError(f"Cannot write {str(target)!r}: {error.strerror}.") from None


__all__ = ["available", "write", "write_figures"]
