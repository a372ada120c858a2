"""docs/accuracy.md and TABLES.md from stored losses, the same pages for the same losses."""

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
TABLE_PAGE = Path(__file__).with_name("TABLES.md")
MARKS = "<!-- accuracy -->", "<!-- /accuracy -->"
RECOMMENDED = "ours: personal"
Stored = Mapping[str, Mapping[str, dict]]  # table → method → what was measured


def summary(losses: list[list[float]]) -> tuple[float, float]:
    """Return the mean over clients and over the worst-served fifth of them; draws are averaged."""
    ordered = [np.sort(part)[::-1] for part in losses]
    worst = [float(part[: a_fifth(len(part))].mean()) for part in ordered]
    return float(np.mean([part.mean() for part in ordered])), float(np.mean(worst))


def ratios(found: Stored) -> dict[str, tuple[float, float]]:
    """Return our recommendation over the best peer, in the mean and in the worst fifth."""
    rows = {}
    for name, methods in found.items():
        best = np.min([summary(methods[peer]["losses"]) for peer in PEERS if peer in methods], 0)
        mean, worst = np.array(summary(methods[RECOMMENDED]["losses"])) / best
        rows[name] = float(mean), float(worst)
    return rows


def geometric(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def best_of(methods: Mapping[str, dict], k: int) -> str:
    """Return the best peer's loss and name; k: 0 in the mean, 1 in the worst fifth."""
    peers = {peer: summary(methods[peer]["losses"])[k] for peer in PEERS if peer in methods}
    name = min(peers, key=lambda peer: peers[peer])
    return f"{peers[name]:.4g} ({name.removesuffix(', client as column')})"


def compared(found: Stored) -> list[str]:
    """Return the table of ours against the best peer."""
    listed = ratios(found)
    lines = [
        "| table | clients | rows | ours: mean / worst fifth | best peer, mean | worst fifth | ratio, mean | worst fifth |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, (mean, worst) in listed.items():
        about = found[name][RECOMMENDED]
        own = " / ".join(f"{value:.4g}" for value in summary(about["losses"]))
        peers = " | ".join(best_of(found[name], k) for k in (0, 1))
        lines.append(
            f"| {name} | {about['clients']:,} | {about['rows']:,} | {own} | {peers} "
            f"| {mean:.3f} | {worst:.3f} |"
        )
    least = min(listed, key=lambda name: listed[name][0])
    for what, left_out in ((f"geometric mean of {len(listed)}", ""), (f"without {least}", least)):
        rest = [pair for name, pair in listed.items() if name != left_out]
        both = " | ".join(f"**{geometric([pair[k] for pair in rest]):.3f}**" for k in (0, 1))
        lines.append(f"| **{what}** | | | | | | {both} |")
    return lines


def text(found: Stored) -> str:
    """Return the tables: all ratios, and every peer against us."""
    lines = [*compared(found), ""]
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
    return "\n".join(lines)


def every(found: Stored) -> str:
    """Return every table's losses."""
    lines = ["# Every table, every method", ""]
    lines += ["    OMP_NUM_THREADS=1 SCAFFPD_DATA=... python benchmarks/accuracy/run.py", ""]
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
    """Put the tables between the marks of the page, and every table's losses into their own."""
    TABLE_PAGE.write_text(every(found), encoding="utf-8")
    begin, end = MARKS
    new = f"{begin}\n{text(found)}\n{end}"
    old = page.read_text(encoding="utf-8")
    page.write_text(re.sub(f"{begin}.*{end}", lambda _: new, old, flags=re.S), encoding="utf-8")
