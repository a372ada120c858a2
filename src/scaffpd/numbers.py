"""Numbers as people read them, the same on the page, in the terminal and in sentences.

Percent signs and units follow a no-break space where the page wraps lines; minus signs are
typographic.
"""

from __future__ import annotations

from collections.abc import Sequence

AUTO = "auto"  # written where the data is to set a number
NOTHING = "–"  # written where there is no number
THIN = "\u202f"  # between thousands
NO_BREAK = "\u00a0"
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plain(value: float | None) -> str:
    """Write a number with three or four digits, whatever its size."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}".replace(",", THIN).replace("-", "−")
    digits = 1 if size >= 100 else 2 if size >= 1 else 3
    written = f"{value:.{digits}f}" if size >= 0.01 or size == 0 else f"{value:.2g}"
    return written.replace("-", "−", 1) if value < 0 else written


def between(values: float | Sequence[float]) -> str:
    """Write a number, or the least and the largest of several, once where they look the same."""
    several = values if isinstance(values, Sequence) else [values]
    low = plain(min(several))
    high = plain(max(several))
    return low if low == high else f"{low} to {high}"


def whole(value: float | None) -> str:
    """Write a whole number, or a mean with its decimals."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}".replace(",", THIN) if value == int(value) else plain(value)


def percent(share: float, signed: bool = False) -> str:
    """Write a share in percent, with as many digits as it is worth; `signed` if it is a change."""
    size = abs(share)
    if 0 < size < 1e-4 and not signed:
        return f"less than 0.01{NO_BREAK}%"
    digits = 0 if size >= 0.0995 else 1 if signed or size >= 0.001 else 2
    written = f"{100 * size:.{digits}f}"
    sign = "" if not signed or float(written) == 0 else "+" if share > 0 else "−"
    return f"{sign}{written}{NO_BREAK}%"


def small(value: float | None) -> str:
    """Write a certificate: two digits and a power of ten."""
    if value is None:
        return NOTHING
    mantissa, power = f"{value:.1e}".split("e")
    return f"{mantissa} · 10{str(int(power)).translate(RAISED)}" if value else "0"


def seconds(duration: float) -> str:
    if duration < 90:
        return f"{duration:.0f} s"
    return f"{duration / 60:.0f} min" if duration < 5400 else f"{duration / 3600:.1f} h"


def format_bytes(size: float) -> str:
    """Write a number of bytes, such as 6 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "B" else f"{int(size)} B"
        size /= 1000
    return f"{size:.3g} TB"


def several(count: int, word: str) -> str:
    """Write a count and a noun: "1 client", "3 clients", "2 counties"."""
    return f"{count} {word if count == 1 else plural(word)}"


def plural(word: str) -> str:
    """Return the plural of an English noun, such as a column's name."""
    if word.endswith("y") and word[-2:-1] not in tuple("aeiou"):
        return f"{word[:-1]}ies"
    hisses = word.endswith(("s", "x", "ch", "sh")) and word != "epoch"
    return f"{word}es" if hisses else f"{word}s"


def called(name: str, word: str) -> str:
    """Name a client, one that is a number by its word too: "Huairou", "client 3"."""
    return f"{word} {name}" if name.isdigit() else brief(name)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Write the rows of a table: the first column on the left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])
        for first, *others in rows
    ]


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def brief(name: str, most: int = 48) -> str:
    """Shorten a name that would take over the sentence it is in."""
    return name if len(name) <= most else f"{name[: most - 1].rstrip()}…"
