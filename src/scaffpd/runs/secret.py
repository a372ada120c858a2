"""What a private run draws its noise from: kept in its folder, so that it can go on, for its owner alone."""

from __future__ import annotations

import os
from pathlib import Path

from scaffpd.errors import InputError
from scaffpd.secret import kept

NAME = "noise.secret"
OTHERS = 0o077  # permissions that nobody but the owner should have


def noise_secret(folder: Path) -> bytes:
    """The run's secret; one from the operating system where the run is new."""
    file = folder / NAME
    if not file.exists() and any((folder / "checkpoint").glob("*.npz")):
        raise InputError(
            f"The run in {str(folder)!r} has lost {NAME}, without which it cannot go on: start anew with --fresh."
        )
    if file.exists() and os.name == "posix" and file.stat().st_mode & OTHERS:
        raise InputError(f"Others than its owner can read {str(file)!r}: chmod 600, or start anew with --fresh.")
    return kept(file)
