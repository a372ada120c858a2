"""Quality of predictions: scores beyond accuracy, calibration, groups, and the features that a model uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaffpd.numbers import NOTHING, plain, several
from scaffpd.run import EVERYONE, Row, number, read_table
from scaffpd.run.page import vega
from scaffpd.run.page.data import FEW, PredictionReport, ReportData, brief
from scaffpd.run.page.vega import Figure, across, drawn, layer, named, quantity, short, tips

RECALIBRATED = " recalibrated"
ORDER = ("average", "fair", "personal")
COLUMNS = {  # of scores.csv, in the order and the words in which they are shown
    "rows": "rows",
    "accuracy": "accuracy",
    "auc": "AUC",
    "recall": "recall",
    "precision": "precision",
    "selection_rate": "picked",
    "false_positive_rate": "false alarms",
    "false_negative_rate": "missed",
    "log_loss": "log loss",
    "brier": "Brier score",
    "mean_probability": "expected",
    "base_rate": "true",
    "calibration_error": "calibration error",
    "rmse": "error (RMSE)",
    "mae": "mean |error|",
    "r2": "R²",
    "mean_prediction": "mean predicted",
    "mean_truth": "mean true",
}
OF_GROUPS = (
    "rows",
    "accuracy",
    "selection_rate",
    "false_positive_rate",
    "false_negative_rate",
    "mean_probability",
    "base_rate",
    "rmse",
    "mae",
    "r2",
    "mean_prediction",
    "mean_truth",
)
OF_CLIENTS = tuple(
    name for name in COLUMNS if name not in ("selection_rate", "false_negative_rate", "log_loss")
)
DECIMALS = ("auc", "log_loss", "brier", "r2", "calibration_error")
IN_SHORT = ("auc", "recall", "precision", "brier", "r2", "mae")
MOST_COLUMNS = 12
MOST_CLIENTS = 60
LEAST = 0.01  # a gap between expected and true that is worth a caution


def read_predictions(folder: Path, labels: Sequence[str]) -> PredictionReport | None:
    """Read the three tables; `None` of folders without them."""
    rows = read_table(folder / "scores.csv", "model", "by", "group", "rows")
    if not rows:
        return None
    scores = {(row["model"], row["by"], row["group"]): row for row in rows}
    bins = read_table(
        folder / "reliability.csv", "model", "client", "mean_probability", "base_rate"
    )
    label = str(labels[1]) if len(labels) == 2 else ""
    return PredictionReport(scores, bins, read_table(folder / "coefficients.csv", "column"), label)


def written(name: str, value: Any) -> str:
    """Write a score as it is shown."""
    if value is None:
        return NOTHING
    if name == "rows":
        return f"{value:,}".replace(",", "\u202f")
    if name in ("rmse", "mae", "mean_prediction", "mean_truth"):
        return plain(value)
    return f"{value:.3f}".replace("-", "−") if name in DECIMALS else f"{100 * value:.1f}\u00a0%"


def table(rows: Mapping[Any, Row], names: Sequence[str]) -> dict[str, Any]:
    """Return heads and cells of rows, without columns that none of them has."""
    shown = [
        name
        for name in COLUMNS
        if name in names and any(row.get(name) is not None for row in rows.values())
    ]
    cells = {
        key: [(row.get(name), written(name, row.get(name))) for name in shown]
        for key, row in rows.items()
    }
    return {"heads": [COLUMNS[name] for name in shown], "rows": cells}


def main_model(run: ReportData) -> str:
    """Return the model that a reader is advised to use, where it is scored; else the one that the run is about."""
    assert run.predictions is not None
    wanted = (run.joining.shown if run.joining else None, run.role("after"), run.role("before"))
    return next(
        (name for name in wanted if name in run.predictions.models), run.predictions.models[-1]
    )


def shown_models(run: ReportData) -> list[str]:
    """Return average, fair, personal, and the main model recalibrated; of a path, its first point and the main one."""
    assert run.predictions is not None
    main = main_model(run)
    wanted = (*ORDER, *run.shown, main, f"{main}{RECALIBRATED}")
    return [name for name in run.predictions.models if name in wanted] or [
        run.predictions.models[0]
    ]


def in_short(run: ReportData) -> str:
    """Write the scores over all held-out rows in one line, from average to the main model; empty without scores."""
    found = run.predictions
    if found is None:
        return ""
    names = list(dict.fromkeys([*(n for n in ("average",) if n in found.models), main_model(run)]))
    totals = [found.total(name) for name in names]
    parts = [
        f"{COLUMNS[score]} {' → '.join(written(score, row[score]) for row in totals)}"
        for score in IN_SHORT
        if all(row.get(score) is not None for row in totals)
    ]
    rows = f"Over all {written('rows', totals[0]['rows'])} held-out rows, {' → '.join(map(brief, names))}: "
    return f"{rows}{', '.join(parts)}." if parts else ""


def _gap(row: Row) -> tuple[float, float, float] | None:
    ends = [number(row, f"calibration_gap{end}") for end in ("", "_low", "_high")]
    return None if None in ends else (ends[0] or 0.0, ends[1] or 0.0, ends[2] or 0.0)


def _clear(row: Row) -> bool:
    found = _gap(row)
    return found is not None and (found[1] > 0 or found[2] < 0)


def drift(run: ReportData) -> str:
    """Warn where the main model clearly expects too much or too little, and more so than the average one does."""
    found = run.predictions
    if found is None or not found.label:
        return ""
    name = main_model(run)
    gap = _gap(found.total(name))
    row = found.total(name)
    if (
        gap is None
        or not _clear(row)
        or abs(gap[0]) < LEAST
        or f"{name}{RECALIBRATED}" in found.models
    ):
        return ""
    base = _gap(found.total("average")) if "average" in found.models and name != "average" else None
    if base is not None and abs(base[0]) >= abs(gap[0]):
        return ""
    return f"{_expected(run, name)} --recalibrate corrects that, {run.word} by {run.word}."


def _expected(run: ReportData, name: str) -> str:
    """Say what a model expects, what is true, and whether the difference is clear of noise."""
    found = run.predictions
    assert found is not None
    row = found.total(name)
    p, share = (written("", row[key]) for key in ("mean_probability", "base_rate"))
    what = f"“{brief(found.label)}”" if found.label else "to be right"
    start = (
        f"“{brief(name)}” expects {p} {what} where {share} {'is true' if found.label else 'are'}"
    )
    if not _clear(row):
        return f"{start}: no different, within noise."
    gap, low, high = _gap(row) or (0.0, 0.0, 0.0)
    ends = sorted((abs(low), abs(high)))
    points = f"{100 * abs(gap):.1f} points"
    word = "many" if gap > 0 else "few"
    return (
        f"{start}: {points} too {word} (95 % interval {100 * ends[0]:.1f} to {100 * ends[1]:.1f})."
    )


def sentences(run: ReportData) -> tuple[str, ...]:
    """Say whether probabilities hold, for whom they do not, what recalibration does, and whom the model picks."""
    found = run.predictions
    if found is None:
        return ()
    said = []
    name = main_model(run)
    if "calibration_gap" in found.total(name):
        told = [one for one in ("average", name) if one in found.models]
        said.append(" ".join(_expected(run, one) for one in dict.fromkeys(told)))
        said.append(_off(run, name))
        if (again := f"{name}{RECALIBRATED}") in found.models:
            said.append(
                f"{_expected(run, again)} {_off(run, again)} That changes probabilities, and the labels that follow, "
                f"{run.word} by {run.word}, by rows left out of training. What is proven is about the model before it."
            )
    return tuple(filter(None, [*said, *(_group(run, name, by) for by in found.groups)]))


def _off(run: ReportData, name: str) -> str:
    """Say for which clients a model is clearly off."""
    assert run.predictions is not None
    rows = run.predictions.of(name)
    off = {client: (_gap(row) or (0.0,))[0] for client, row in rows.items() if _clear(row)}
    if not off:
        return f"“{brief(name)}” is clearly off at none of {several(len(rows), run.word)}."
    most = max(off, key=lambda client: abs(off[client]))
    points = f"{100 * off[most]:+.1f} points".replace("-", "−")
    count = f"{len(off)} of {several(len(rows), run.word)}"
    return f"“{brief(name)}” is clearly off at {count}, most at {brief(most)} ({points})."


def _group(run: ReportData, name: str, by: str) -> str:
    """Name the groups that a model picks, misses or gets wrong least and most."""
    assert run.predictions is not None
    rows = {group: row for group, row in run.predictions.of(name, by).items() if row["rows"] >= FEW}
    words = {
        "selection_rate": "picks",
        "false_positive_rate": "raises false alarms at",
        "false_negative_rate": "misses",
        "accuracy": "is right on",
        "rmse": "is off by",
    }
    wanted = [key for key in words if all(row.get(key) is not None for row in rows.values())]
    wanted = [key for key in wanted if key != "accuracy" or "selection_rate" not in wanted]
    if len(rows) < 2 or not wanted:
        return ""
    parts = []
    for key in wanted:
        order = sorted(rows, key=lambda group, key=key: rows[group][key])  # type: ignore[misc]
        ends = " to ".join(
            f"{written(key, rows[group][key])} ({brief(group)})" for group in (order[0], order[-1])
        )
        parts.append(f"{words[key]} {ends}")
    return f"By {by}, “{brief(name)}” {', '.join(parts)}."


def tables(run: ReportData) -> dict[str, Any]:
    """Make the tables of the page: all rows by model, every client by model, and every column of groups."""
    found = run.predictions
    if found is None:
        return {}
    models = shown_models(run)
    cut = {
        by: {
            (group, model): found.scores[model, by, group]
            for group in found.of(models[0], by)
            for model in models
        }
        for by in ("client", *found.groups)
    }
    clients = cut.pop("client")
    groups = {by: table(rows, OF_GROUPS) for by, rows in cut.items()}
    total = {model: found.total(model) for model in models}
    return {
        "all": table(total, OF_CLIENTS),
        "clients": table(clients, OF_CLIENTS),
        "groups": groups,
    }


def reliability(run: ReportData) -> Figure | None:
    """Show which share came true of rows with similar probabilities, for all rows or those of one client."""
    found = run.predictions
    if found is None or not found.bins:
        return None
    binned = {row["model"] for row in found.bins}
    names = [name for name in shown_models(run) if name in binned]
    clients = list(dict.fromkeys(row["client"] for row in found.bins))[: MOST_CLIENTS + 1]
    rows = [
        {
            "client": row["client"],
            "model": row["model"],
            "rows": row["rows"],
            "p": short(row["mean_probability"]),
            "share": short(row["base_rate"]),
            "low": short(row["base_rate_low"]),
            "high": short(row["base_rate_high"]),
        }
        for row in found.bins
        if row["model"] in names and row["client"] in set(clients)
    ]
    whole = {"domain": [0, 1]}
    label = f"of “{brief(found.label)}”" if found.label else "of the predicted label"
    x = across("p", f"predicted probability {label}", whole, format=".0%", grid=True)
    y = quantity("share", "came true", whole, format=".0%")
    tip = tips(
        model="model",
        p=("predicted", ".1%"),
        share=("came true", ".1%"),
        low=("from", ".1%"),
        high=("to", ".1%"),
        rows=("rows", ",d"),
    )
    looks = vega.looks("model", names)
    chosen = "datum.client === focus"
    line = {"x": {"datum": 0}, "y": {"datum": 0}, "x2": {"datum": 1}, "y2": {"datum": 1}}
    bar = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "stroke": looks["fill"]}
    layers = [
        layer("rule", line, style="quiet"),
        layer("rule", bar, chosen, opacity=0.45),
        vega.dots({"x": x, "y": y, **looks, "tooltip": tip}, where=chosen),
    ]
    caption = (
        "Held-out rows, sorted by their predicted probability and cut into bins. On the line as many came true as was "
        "predicted; above it more, below it fewer. Bars are 95 % intervals."
    )
    alt = f"Predicted probability against what came true, for {', '.join(names)}."
    return drawn(
        run,
        "reliability",
        "Do probabilities hold?",
        caption,
        alt,
        {"bins": rows},
        "predictions",
        focus=tuple(clients),
        params=[{"name": "focus", "value": EVERYONE}],
        layer=layers,
    )


def coefficients(run: ReportData) -> Figure | None:
    """Show what one deviation of a column adds to the output, under every model: the columns that add most."""
    found = run.predictions
    if found is None or not found.coefficients:
        return None
    names = [
        name for name in dict.fromkeys([*ORDER[:2], *run.names]) if name in found.coefficients[0]
    ][:6]
    if not names:
        return None
    ranked = sorted(found.coefficients, key=lambda row: -max(abs(row[name]) for name in names))[
        :MOST_COLUMNS
    ]
    called = [
        f"{row['column']} → {row['label']}" if row.get("label") else str(row["column"])
        for row in ranked
    ]
    points = [
        {"client": client, "model": name, "value": short(row[name])}
        for client, row in zip(called, ranked, strict=True)
        for name in names
    ]
    ranges = [
        {"client": client, "low": short(row["personal_low"]), "high": short(row["personal_high"])}
        for client, row in zip(called, ranked, strict=True)
        if "personal_low" in row
    ]
    unit = "log-odds" if run.upwards else "the target"
    y = named(called, labelLimit={"expr": "clamp(width / 2, 120, 260)"})
    x = across("value", f"what one deviation adds to {unit}", vega.LOOSE, grid=True)
    tip = tips(client="column", model="model", value=("adds", "+.3~r"))
    ends = {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    layers = [
        layer("rule", {"x": {"datum": 0}}, style="quiet"),
        layer("rule", ends, table="ranges", style="rest", strokeWidth=7),
        vega.dots(
            {"y": y, "x": x, **vega.looks("model", names), "tooltip": tip},
            table="weights_of_columns",
        ),
    ]
    caption = (
        f"The {len(ranked)} columns that move predictions most: what one standard deviation more of it adds to {unit}"
        f"{f' of “{brief(found.label)}”' if found.label else ''}; to the left it speaks against. "
        + ("Grey: from the least to the largest of the personal models. " if ranges else "")
        + "This is what models use, not what causes anything."
    )
    alt = f"Standardised coefficients of {len(ranked)} columns under {', '.join(names)}."
    data = {"weights_of_columns": points, "ranges": ranges}
    height = vega.STEP * max(len(called), 2)
    heading = "What do models look at?"
    return drawn(
        run, "coefficients", heading, caption, alt, data, "predictions", height=height, layer=layers
    )


def shifted(run: ReportData) -> str:
    """Name the columns that matter most, and where the fair model differs most from the average one."""
    found = run.predictions
    pair = [
        name for name in ORDER[:2] if found and found.coefficients and name in found.coefficients[0]
    ]
    if found is None or len(pair) < 2:
        return ""
    rows = [row for row in found.coefficients if not row.get("label")]
    if not rows:
        return ""
    top = sorted(rows, key=lambda row: -abs(row[pair[1]]))[:3]
    most = max(rows, key=lambda row: abs(row[pair[1]] - row[pair[0]]))
    first, last = (f"{most[name]:+.2f}".replace("-", "−") for name in pair)
    names = ", ".join(brief(str(row["column"])) for row in top)
    moved = f"from average to fair, {brief(str(most['column']))} changes most ({first} → {last})"
    return f"Predictions move most with {names}; {moved}."
