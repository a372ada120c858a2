"""Few combinations of a test's parameters in place of all: see `cover(k)` and `sample(n)` in
conftest.py.
"""

from collections import Counter
from itertools import combinations


def covering(rows, strength):
    """Choose few rows that hold all the combinations of `strength` values that any row holds."""
    held = [set(combinations(row, strength)) for row in rows]
    missing = set().union(*held)
    used = Counter()
    kept = set()
    while missing:
        best = max(
            range(len(rows)),
            key=lambda k: (len(held[k] & missing), -sum(used[value] for value in rows[k])),
        )
        missing -= held[best]
        used.update(rows[best])
        kept.add(best)
    return kept


def spaced(number, few):
    """Choose `few` of so many rows, evenly spaced, the first and the last among them."""
    if few >= number:
        return set(range(number))
    return {round(k * (number - 1) / max(few - 1, 1)) for k in range(few)}
