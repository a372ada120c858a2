"""Read a settings file; a mistake in its syntax gets one sentence."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from scaffpd.errors import InputError
from scaffpd.fields import Json

LARGEST = 2**20  # bytes: far above any file written by hand


def read_toml(path: Path, others: Mapping[str, str]) -> Json:
    """Read a settings file; refuse one with a key of `others`, which marks another kind of file."""
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(
                "settings-too-large", f"The file {str(path)!r} is too large to be a settings file."
            )
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(
            "settings-unreadable", f"Cannot read {str(path)!r}: {error.strerror}."
        ) from None
    except UnicodeDecodeError:
        raise InputError(
            "settings-not-utf8", f"The file {str(path)!r} is not UTF-8 text."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            "settings-not-toml", f"The file {path.name!r} is not TOML: {str(error).rstrip('.')}."
        ) from None
    except RecursionError:
        raise InputError(
            "settings-nested", f"The file {path.name!r} is nested too deeply to be a settings file."
        ) from None
    for key, what in others.items():
        if key in values:
            raise InputError("other-settings-file", f"The file {path.name!r} looks like {what}.")
    return values
