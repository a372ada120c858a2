"""The style of all figures."""

from __future__ import annotations

from typing import Any

INK = "#222222"
QUIET = "#6b6b6b"
RULE = "#d9d9d9"
# Okabe and Ito's colours, which people with any colour vision can tell apart
BLUE, ORANGE, GREEN, PINK, RED, SKY, BLACK = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7"),
    *("#d55e00", "#56b4e9", "#222222"),
)
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": QUIET,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "xtick.color": QUIET,
    "xtick.labelsize": 9,
    "ytick.color": QUIET,
    "ytick.labelsize": 9,
}
