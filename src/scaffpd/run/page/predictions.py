"""Quality of predictions in words and tables: scores beyond accuracy, calibration, groups."""

from __future__ import annotations

from typing import NamedTuple

from scaffpd.numbers import NOTHING, brief, plain, several, whole
from scaffpd.run.page.clients import Cell
from scaffpd.run.record import EVERYONE, RunRecord, ScoreRow

COLUMNS = {  # scores, in the order and the words in which they are shown
    "accuracy": "accuracy",
    "auc": "AUC",
    "recall": "recall",
    "precision": "precision",
    "selection_rate": "picked",
    "false_positive_rate": "false alarms",
    "false_negative_rate": "missed",
    "brier": "Brier score",
    "mean_probability": "expected",
    "base_rate": "true",
    "calibration_error": "calibration error",
    "rmse": "error (RMSE)",
    "mae": "mean |error|",
    "r2": "R²",
}
DECIMALS = ("auc", "brier", "r2", "calibration_error")
UNITS = ("rmse", "mae")
IN_SHORT = ("auc", "recall", "precision", "brier", "r2", "mae")
ORDER = ("average", "fair", "personal")
LEAST = 0.01  # a gap between expected and true that is worth a caution


def written(name: str, value: float | None) -> str:
    """Write a score as it is shown."""
    if value is None:
        return NOTHING
    if name in UNITS:
        return plain(value)
    return f"{value:.3f}".replace("-", "−") if name in DECIMALS else f"{100 * value:.1f}\u00a0%"


class ScoreTable(NamedTuple):
    """Heads and rows of a table of scores; a row starts with names."""

    heads: list[str]
    rows: list[tuple[tuple[str, ...], list[Cell]]]


Named = dict[tuple[str, ...], ScoreRow]


def score_table(rows: Named) -> ScoreTable:
    """Make a table, without columns that no row has."""
    values = [row.values for row in rows.values()]
    shown = [name for name in COLUMNS if any(own.get(name) is not None for own in values)]
    cells = [
        (
            names,
            [
                Cell(row.rows, whole(row.rows)),
                *(Cell(row.values.get(n), written(n, row.values.get(n))) for n in shown),
            ],
        )
        for names, row in rows.items()
    ]
    return ScoreTable(["rows", *(COLUMNS[name] for name in shown)], cells)


def main_model(run: RunRecord) -> str:
    """Return the model that a reader is advised to use, where it is scored; else the run's."""
    wanted = (run.joining.shown if run.joining else "", run.main.name)
    models = run.scored_models
    return next((name for name in wanted if name in models), models[-1])


def shown_scores(run: RunRecord) -> list[str]:
    """Return average, fair and personal; of a path, its first point and the main one."""
    wanted = {
        *ORDER,
        main_model(run),
        *(m.name for m in run.models if m.role or run.kind == "runs"),
    }
    return [name for name in run.scored_models if name in wanted] or [run.scored_models[0]]


def tables(run: RunRecord) -> dict[str, tuple[tuple[str, ...], ScoreTable]]:
    """Make the tables by heading: all rows, every column of groups, and every client by model."""
    if not run.scores:
        return {}
    models = shown_scores(run)
    total: Named = {(name,): run.score_rows(name)[EVERYONE] for name in models}
    keys: tuple[str, ...] = ("model",)
    found = {"All held-out rows": (keys, score_table(total))}
    for by in dict.fromkeys(row.by for row in run.scores):
        own = {name: run.score_rows(name, by) for name in models}
        rows: Named = {
            (group, name): own[name][group]
            for group in own[models[0]]
            for name in models
            if group != EVERYONE and group in own[name]
        }
        first = run.word if by == "client" else by
        found[f"By {first}"] = ((first, "model"), score_table(rows))
    return found


def in_short(run: RunRecord) -> str:
    """Write the scores over all held-out rows in one line, from average to the main model."""
    if not run.scores:
        return ""
    names = list(
        dict.fromkeys([*(n for n in run.scored_models if n == "average"), main_model(run)])
    )
    totals = [run.score_rows(name)[EVERYONE] for name in names]
    parts = []
    for score in IN_SHORT:
        values = [row.values.get(score) for row in totals]
        if None not in values:
            parts.append(f"{COLUMNS[score]} {' → '.join(written(score, v) for v in values)}")
    start = f"Over all {whole(totals[0].rows)} held-out rows, {' → '.join(map(brief, names))}: "
    return f"{start}{', '.join(parts)}." if parts else ""


def sentences(run: RunRecord) -> list[str]:
    """Say whether probabilities hold, and for whom they do not."""
    name = main_model(run) if run.scores else ""
    if not name or _gap(run.score_rows(name)[EVERYONE]) is None:
        return []
    known = [one for one in dict.fromkeys(("average", name)) if one in run.scored_models]
    return [" ".join(_expected(run, one) for one in known), _off(run, name)]


def drift(run: RunRecord) -> str:
    """Warn where the main model clearly expects too much or too little, and more than average."""
    if not run.scores or len(run.labels) != 2:
        return ""
    name = main_model(run)
    gap = _gap(run.score_rows(name)[EVERYONE])
    if gap is None or not _clear(gap) or abs(gap[0]) < LEAST:
        return ""
    if name != "average" and "average" in run.scored_models:
        base = _gap(run.score_rows("average")[EVERYONE])
        if base is not None and abs(base[0]) >= abs(gap[0]):
            return ""
    return _expected(run, name)


def _gap(row: ScoreRow) -> tuple[float, float, float] | None:
    """Return by how much more is expected than true, with the ends of its interval."""
    gap, low, high = (row.values.get(f"calibration_gap{end}") for end in ("", "_low", "_high"))
    return None if gap is None or low is None or high is None else (gap, low, high)


def _clear(gap: tuple[float, float, float]) -> bool:
    return gap[1] > 0 or gap[2] < 0


def _expected(run: RunRecord, name: str) -> str:
    """Say what a model expects, what is true, and whether the difference is clear of noise."""
    row = run.score_rows(name)[EVERYONE]
    p = written("", row.values.get("mean_probability"))
    share = written("", row.values.get("base_rate"))
    what = f"“{brief(run.labels[1])}”" if len(run.labels) == 2 else "to be right"
    start = f"“{brief(name)}” expects {p} {what} where {share} is true"
    gap = _gap(row)
    if gap is None or not _clear(gap):
        return f"{start}: no different, within noise."
    ends = sorted((abs(gap[1]), abs(gap[2])))
    interval = f"95 % interval {100 * ends[0]:.1f} to {100 * ends[1]:.1f}"
    word = "many" if gap[0] > 0 else "few"
    return f"{start}: {100 * abs(gap[0]):.1f} points too {word} ({interval})."


def _off(run: RunRecord, name: str) -> str:
    """Say for which clients a model is clearly off."""
    rows = run.score_rows(name)
    gaps = {client: _gap(row) for client, row in rows.items() if client != EVERYONE}
    off = {client: gap[0] for client, gap in gaps.items() if gap and _clear(gap)}
    if not off:
        return f"“{brief(name)}” is clearly off at none of {several(len(gaps), run.word)}."
    most = max(off, key=lambda client: abs(off[client]))
    points = f"{100 * off[most]:+.1f} points".replace("-", "−")
    count = f"{len(off)} of {several(len(gaps), run.word)}"
    return f"“{brief(name)}” is clearly off at {count}, most at {brief(most)} ({points})."
