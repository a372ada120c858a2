"""One process at a time writes to a folder; the lock goes with the process that held it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scaffpd.errors import InputError

NAME = "lock"


@contextmanager
def alone(folder: Path | None, busy: str) -> Iterator[None]:
    """Hold the folder's lock, or refuse with the sentence `busy`; systems without file locks go without."""
    if folder is None:
        yield
        return
    with _held(folder / NAME, f"Cannot write to the folder {str(folder)!r}", busy):
        yield


@contextmanager
def waiting(path: Path) -> Iterator[None]:
    """Hold a lock file, and wait for whoever has it; systems without file locks go without."""
    with _held(path, f"Cannot write {str(path)!r}"):
        yield


@contextmanager
def _held(path: Path, refused: str, busy: str | None = None) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        file = path.open("w")
    except OSError as error:
        raise InputError(f"{refused}: {error.strerror}.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except OSError:
            raise InputError(busy or refused) from None
        yield
