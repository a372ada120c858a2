"""The exception for users' mistakes: one sentence that says what is wrong and what would work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any


class InputError(ValueError):
    """Invalid input from the caller: one sentence for the user, and a code for programs.

    Sentences may be reworded; a code stays, so callers and tests compare codes.
    """

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        # BaseException rebuilds itself from `args`, which hold the sentence alone
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(
    kind: type[InputError], args: tuple[object, ...], fields: dict[str, object]
) -> InputError:
    """Return an unpickled error, of a subclass with any signature."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def unknown(what: str, given: object, known: Iterable[str]) -> InputError:
    """Return an `InputError` for a misspelt name, with the nearest valid one, ignoring case."""
    options = list(known)
    lowered = {name.lower(): name for name in reversed(options)}
    near = get_close_matches(str(given).lower(), list(lowered), n=1)
    hint = (
        f"did you mean {lowered[near[0]]!r}?"
        if near
        else f"choose one of {', '.join(map(repr, options))}."
    )
    return InputError("unknown-name", f"Unknown {what} {given!r}: {hint}")


def not_installed(package: str, extra: str) -> InputError:
    """Return an `InputError` for a missing package of one of our extras."""
    return InputError(
        "package-missing", f"{package} is not installed: pip install 'scaffpd[{extra}]'."
    )


def needed(module: str, package: str, extra: str) -> Any:
    """Import a module of one of our extras, or refuse if its package is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise not_installed(package, extra) from None


def positive(owner: str, name: str, value: Any) -> float:
    """Return `value` as a float, or refuse it unless it is a finite number above zero."""
    number = real(owner, name, value)
    if not 0 < number < float("inf"):
        raise InputError(
            "number-not-positive", f"{owner} needs {name} > 0 and finite, got {value!r}."
        )
    return number


def real(owner: str, name: str, value: Any) -> float:
    """Return `value` as a float, or refuse it if it is not a number."""
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            "not-a-number", f"{owner} needs a number for {name}, got {value!r}."
        ) from None
    if number != number:
        raise InputError("not-a-number", f"{owner} needs a number for {name}, got NaN.")
    return number


# Where a number may lie, and how that is said of its name.
Range = tuple[Callable[[float], bool], str]
NOT_NEGATIVE: Range = (lambda v: 0 <= v < float("inf"), "{} >= 0 and finite")
SHARE: Range = (lambda v: 0 <= v <= 1, "0 <= {} <= 1")
BELOW_ONE: Range = (lambda v: 0 <= v < 1, "0 <= {} < 1")
PART: Range = (lambda v: 0 < v <= 1, "0 < {} <= 1")
INSIDE: Range = (lambda v: 0 < v < 1, "0 < {} < 1")


def ranged(
    owner: str, name: str, value: object, where: Range, code: str = "setting-out-of-range"
) -> float:
    """Return `value` as a float, or refuse it unless it lies there."""
    number = real(owner, name, value)
    if not where[0](number):
        raise InputError(code, f"{owner} needs {where[1].format(name)}, got {value!r}.")
    return number


def count(owner: str, name: str, value: Any) -> int:
    """Return `value` as an int, or refuse it unless it is a whole number of at least one."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise InputError("not-a-count", f"{owner} needs a whole number {name} >= 1, got {value!r}.")
    return int(value)


def first_line(error: Exception) -> str:
    """Return the first line of what a library says about an error, without its full stop."""
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


def shortened(value: object) -> str:
    """Return a value as Python prints it, cut off if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
