"""docs/accuracy.md from stored losses, the same page for the same losses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from ours import OURS
from peers import PEERS
from tables import TABLES

from scaffpd.training.metrics import a_fifth

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"
MARKS = "<!-- accuracy -->", "<!-- /accuracy -->"
RECOMMENDED = "ours: personal"
Stored = Mapping[str, Mapping[str, dict]]  # table → method → what was measured


def summary(losses: list[list[float]]) -> tuple[float, float]:
    """Return the mean over clients and over the worst-served fifth of them; draws are averaged."""
    ordered = [np.sort(part)[::-1] for part in losses]
    worst = [float(part[: a_fifth(len(part))].mean()) for part in ordered]
    return float(np.mean([part.mean() for part in ordered])), float(np.mean(worst))


def ratios(found: Stored) -> list[tuple[str, tuple[float, float]]]:
    """Return our recommendation over the best peer, in the mean and in the worst fifth."""
    rows = []
    for name, methods in found.items():
        if RECOMMENDED not in methods:
            continue
        best = np.min([summary(methods[peer]["losses"]) for peer in PEERS if peer in methods], 0)
        own = np.array(summary(methods[RECOMMENDED]["losses"]))
        rows.append((name, tuple((own / best).tolist())))
    return rows


def geometric(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def text(found: Stored) -> str:
    """Return the tables: all ratios, every peer against us, and every table's losses."""
    listed = ratios(found)
    lines = [
        "| table | clients | rows to train on | loss of ours ÷ best peer's, mean | worst fifth |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, (mean, worst) in listed:
        about = found[name][RECOMMENDED]
        lines.append(
            f"| {name} | {about['clients']:,} | {about['rows']:,} | {mean:.3f} | {worst:.3f} |"
        )
    both = [geometric([pair[k] for _, pair in listed]) for k in (0, 1)]
    lines += [f"| **geometric mean** | | | **{both[0]:.3f}** | **{both[1]:.3f}** |", ""]
    lines += [
        "The best peer differs from table to table, and is known only from the rows that it is judged by. One by one:",
        "",
        "| ours ÷ | tables | mean | worst fifth | ours is better (mean) |",
        "|---|--:|--:|--:|--:|",
    ]
    for peer in [*PEERS, *(o for o in OURS if o != RECOMMENDED)]:
        pairs = [
            np.divide(summary(m[RECOMMENDED]["losses"]), summary(m[peer]["losses"]))
            for m in found.values()
            if peer in m and RECOMMENDED in m
        ]
        if pairs:
            mean, worst = (geometric([pair[k] for pair in pairs]) for k in (0, 1))
            wins = sum(pair[0] < 1 for pair in pairs)
            lines.append(f"| {peer} | {len(pairs)} | {mean:.3f} | {worst:.3f} | {wins} |")
    lines += ["", "## Every table", ""]
    lines += ["Mean over clients / mean over the worst-served fifth; seconds of CPU a split.", ""]
    for name, methods in found.items():
        kind = "log loss" if TABLES[name].labels else "RMSE"
        lines += [f"**{name}**: {TABLES[name].what}; {kind}.", ""]
        lines += ["| | mean | worst fifth | s |", "|---|--:|--:|--:|"]
        values = {m: summary(one["losses"]) for m, one in methods.items()}
        lowest = np.min(list(values.values()), 0)
        for method, pair in values.items():
            shown = [
                f"**{v:.4g}**" if v == least else f"{v:.4g}"
                for v, least in zip(pair, lowest, strict=True)
            ]
            lines.append(f"| {method} | {' | '.join(shown)} | {methods[method]['seconds']:.1f} |")
        lines.append("")
    return "\n".join(lines)


def write(found: Stored, page: Path = PAGE) -> None:
    """Put the tables between the marks of the page."""
    begin, end = MARKS
    new = f"{begin}\n{text(found)}\n{end}"
    old = page.read_text(encoding="utf-8")
    page.write_text(re.sub(f"{begin}.*{end}", lambda _: new, old, flags=re.S), encoding="utf-8")
