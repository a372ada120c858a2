"""Names that options take, without PyTorch, so that shells complete them quickly."""

from __future__ import annotations

import scaffpd

PROBLEMS = ("digits", "hospitals", "breast-cancer", "synthetic")
ALGORITHMS = (
    "Fair",
    *(name for name, home in scaffpd._HOME.items() if home == "scaffpd.algorithms"),
)
OBJECTIVES = tuple(
    name
    for name, home in scaffpd._HOME.items()
    if home == "scaffpd.objectives" and name != "Excess"
)
