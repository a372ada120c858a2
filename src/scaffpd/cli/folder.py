"""The folder that a command writes to."""

from __future__ import annotations

from pathlib import Path

from scaffpd.errors import InputError


def prepare(folder: Path) -> None:
    """Find out before the work, not after it, that nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise InputError(f"Cannot write to the folder {str(folder)!r}: {why}.") from None
