"""Secrets in files: made with their first use, readable for their owner only."""

from __future__ import annotations

import os
from pathlib import Path

from scaffpd.errors import InputError

BYTES = 32


def kept(path: Path) -> bytes:
    """The 32 random bytes of a file, written as hexadecimal digits; a new one where there is none."""
    try:
        if not path.exists():
            place = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(place, "w", encoding="ascii") as file:
                file.write(os.urandom(BYTES).hex() + "\n")
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        secret = b""
    if len(secret) != BYTES:
        raise InputError(f"The secret in {str(path)!r} cannot be read or written.")
    return secret
