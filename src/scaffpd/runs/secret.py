"""What a private run draws its noise from: kept in its folder, so that it can go on, for its owner alone."""

from __future__ import annotations

import os
from pathlib import Path

from scaffpd.errors import InputError

NAME, SIZE = "noise.secret", 32
OTHERS = 0o077  # permissions that nobody but the owner should have


def noise_secret(folder: Path) -> bytes:
    """The run's secret; one from the operating system where the run is new."""
    file = folder / NAME
    if file.exists():
        return _read(file)
    if any((folder / "checkpoint").glob("*.npz")):
        raise InputError(
            f"The run in {str(folder)!r} has lost {NAME}, without which it cannot go on: start anew with --fresh."
        )
    secret = os.urandom(SIZE)
    try:
        with open(file, "xb", opener=_closed_to_others) as new:
            new.write(secret)
            os.fsync(new.fileno())
    except OSError as error:
        raise InputError(f"Cannot write {str(file)!r}: {error.strerror}.") from None
    return secret


def _read(file: Path) -> bytes:
    try:
        if os.name == "posix" and file.stat().st_mode & OTHERS:
            raise InputError(f"Others than its owner can read {str(file)!r}: chmod 600, or start anew with --fresh.")
        secret = file.read_bytes()
    except OSError as error:
        raise InputError(f"Cannot read {str(file)!r}: {error.strerror}.") from None
    if len(secret) != SIZE:
        raise InputError(f"{str(file)!r} is not whole: start anew with --fresh.")
    return secret


def _closed_to_others(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
