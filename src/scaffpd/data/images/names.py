"""Short names for ImageNet's classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def short(wnids: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """The first of a class's words; with its WordNet number where two classes share it.

    "goldfish, Carassius auratus" is goldfish; a class without words goes by its number.
    """
    first = [text.split(",")[0].strip() or wnid for wnid, text in zip(wnids, words, strict=True)]
    often = Counter(first)
    return tuple(name if often[name] == 1 else f"{name} ({wnid})" for wnid, name in zip(wnids, first, strict=True))
