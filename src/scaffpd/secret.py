"""Secrets in files: made with their first use, readable for their owner only."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from scaffpd.errors import InputError

BYTES = 32


def kept(path: Path) -> bytes:
    """The 32 random bytes of a file, written as hexadecimal digits; a new one where there is none."""
    try:
        if not path.exists():
            _make(path)
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        secret = b""
    if len(secret) != BYTES:
        raise InputError(f"The secret in {str(path)!r} cannot be read or written.")
    return secret


def _make(path: Path) -> None:
    """A whole file or none, and never over another process's."""
    handle, name = tempfile.mkstemp(dir=path.resolve().parent)  # for its owner only
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(os.urandom(BYTES).hex() + "\n")
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)
