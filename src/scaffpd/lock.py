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
    try:
        import fcntl
    except ImportError:
        fcntl = None  # type: ignore[assignment]
    if folder is None or fcntl is None:
        yield
        return
    try:
        file = (folder / NAME).open("w")
    except OSError as error:
        raise InputError(f"Cannot write to the folder {str(folder)!r}: {error.strerror}.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(busy) from None
        yield


@contextmanager
def waiting(path: Path) -> Iterator[None]:
    """Hold a lock file, and wait for whoever has it; systems without file locks go without."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        file = path.open("w")
    except OSError as error:
        raise InputError(f"Cannot write {str(path)!r}: {error.strerror}.") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
