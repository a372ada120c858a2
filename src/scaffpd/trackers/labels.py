"""Client names as trackers allow them: letters, digits, and a few signs; different names stay different."""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = 120


def labels(names: Sequence[str]) -> list[str]:
    """A label for every client; where two would be alike (also in folders that ignore case), the later is numbered."""
    taken: set[str] = set()
    found = []
    for name in names:
        plain = re.sub(r"[^\w.\- ]", "_", name)[:LONGEST].strip(" .") or "_"
        label, number = plain, 2
        while label.casefold() in taken:
            label, number = f"{plain}-{number}", number + 1
        taken.add(label.casefold())
        found.append(label)
    return found
