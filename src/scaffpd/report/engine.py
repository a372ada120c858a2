"""vl-convert, which draws the figures and brings the JavaScript that does so on the page."""

from __future__ import annotations

from functools import cache
from typing import Any

from scaffpd.errors import InputError

MISSING = 'Reports need vl-convert: pip install "vl-convert-python>=1.7".'


def available() -> str | None:
    """`None`, or the sentence on why no report can be made."""
    try:
        engine()
    except InputError as error:
        return str(error)
    return None


def engine() -> Any:
    """The module, loaded only when something is drawn."""
    try:
        import vl_convert
    except ImportError:
        raise InputError(MISSING) from None
    return vl_convert


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script: seconds the first time, so once a process."""
    return str(engine().javascript_bundle())
