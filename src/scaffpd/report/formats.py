"""Numbers as a reader wants them."""

from __future__ import annotations

NOTHING = "–"


def plain(value: float | None) -> str:
    """Three or four digits, whatever the size."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f").replace("-", "−")
    digits = 1 if size >= 100 else 2 if size >= 1 else 3
    written = f"{value:.{digits}f}" if size >= 0.01 or size == 0 else f"{value:.2g}"
    return written.replace("-", "−", 1) if value < 0 else written


def count(value: float | None) -> str:
    """A whole number, or one decimal where it is a mean."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}".replace(",", "\u202f") if value == int(value) else plain(value)


def measured(value: float | None, measure: str) -> str:
    """A value of a measure: percent for accuracies."""
    if value is None:
        return NOTHING
    return f"{100 * value:.1f}\u00a0%" if measure == "accuracy" else plain(value)


def change(value: float | None, measure: str) -> str:
    """A difference with its sign: points for accuracies."""
    if value is None:
        return NOTHING
    scaled = (100 * value if measure == "accuracy" else value) * (1 + 1e-9)  # ties go away from zero, whoever adds up
    written = f"{abs(scaled):.1f}" if measure == "accuracy" else plain(abs(scaled))
    if float(written.replace("\u202f", "")) == 0:
        return "0" if measure != "accuracy" else "0.0"
    return ("+" if scaled > 0 else "−") + written


def small(value: float | None) -> str:
    """A certificate: two digits and a power of ten."""
    if value is None:
        return NOTHING
    mantissa, power = f"{value:.1e}".split("e")
    return f"{mantissa} · 10{_raised(int(power))}" if value else "0"


def _raised(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def brief(name: str, most: int = 48) -> str:
    """A name that does not take over the sentence it is in."""
    return name if len(name) <= most else f"{name[: most - 1].rstrip()}…"


def several(count: int, word: str) -> str:
    """'1 client', '3 clients', '2 counties'."""
    return f"{count} {word if count == 1 else plural(word)}"


def plural(word: str) -> str:
    """The plural of an English noun, as far as a column's name is one."""
    if word.endswith("y") and word[-2:-1] not in tuple("aeiou"):
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(("s", "x", "ch", "sh")) else f"{word}s"


def capital(sentence: str) -> str:
    """A sentence with its first letter as a capital."""
    return sentence[:1].upper() + sentence[1:]
