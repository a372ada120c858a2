"""Clients and scores under every model: the tables of the page and of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scaffpd.numbers import NOTHING, brief, capital, percent, plain, plural, whole
from scaffpd.report.record import ClientScore, ModelRecord, RunRecord
from scaffpd.study.verdict import CALLED, TIMES, ClientRow, Gain, Verdict
from scaffpd.tasks.base import EVERYONE, ScoreColumn, ScoreRow
from scaffpd.training.metrics import NO, NOISE, YES

FAR = 1e6  # ratios above it are not known: columns that say the same, or no events
FEW = 30  # test rows: with fewer, one row moves an accuracy by more than three points
TONES = {YES: "gain", NO: "loss", NOISE: "quiet"}
MOST_MODELS = 4  # that are shown side by side


class Cell(NamedTuple):
    """A number to sort by, how it is shown, and its tone: gain, loss or none."""

    value: float | None
    text: str
    tone: str = ""


class ClientLine(NamedTuple):
    """One client: its scores under every shown model, and the change from before to after."""

    score: ClientScore  # under the model that the run is about
    values: list[Cell]
    change: Cell
    few: bool  # whether its scores are uncertain


def shown_models(run: RunRecord) -> list[ModelRecord]:
    """Return the models that are shown side by side, before and after first.

    All of up to four, else those that are compared.
    """
    scored = [model for model in run.models if model.overall]
    order = {"before": 0, "after": 1, "": 2}
    ranked = sorted(scored, key=lambda model: order[model.role])
    if len(ranked) <= MOST_MODELS:
        return ranked
    return [model for model in ranked if model.role] or ranked[:MOST_MODELS]


def client_lines(run: RunRecord, gaining: bool = False) -> list[ClientLine]:
    """Return a line for every client; the one that gains most first, or is served worst."""
    known = [model.by_client for model in shown_models(run)]
    before, after = ({}, {}) if run.pair is None else (model.by_client for model in run.pair)
    main = run.main.by_client
    lines = []
    for client in run.clients:
        score = main.get(client) or ClientScore(client=client)
        values = [_cell(run, own.get(client)) for own in known]
        was, now = (_cell(run, own.get(client)).value for own in (before, after))
        moved = None if was is None or now is None else now - was
        text = run.measure.change(moved)
        tone = ""
        if moved is not None and text.startswith(("+", "−")):  # none where it is written as zero
            tone = "gain" if run.measure.sign * moved > 0 else "loss"
        lines.append(ClientLine(score, values, Cell(moved, text, tone), uncertain(run, score)))
    if gaining:
        sign = -run.measure.sign if run.pair else run.measure.sign
        by = [line.change if run.pair else line.values[0] for line in lines]
        order = sorted(range(len(lines)), key=lambda k: sign * (by[k].value or 0.0))
        lines = [lines[k] for k in order]
    return lines


def uncertain(run: RunRecord, score: ClientScore) -> bool:
    """Return whether a client has too few held-out rows for its number to mean much."""
    return run.split == "test" and score.test_rows is not None and score.test_rows < FEW


def _cell(run: RunRecord, score: ClientScore | None) -> Cell:
    value = run.value(score) if score else None
    return Cell(value, run.measure.written(value))


class ScoreTable(NamedTuple):
    """A table of scores: its heading and heads, and rows that start with names."""

    heading: str
    names: tuple[str, ...]
    heads: list[str]
    rows: Sequence[tuple[tuple[str, ...], list[Cell]]]


def served(run: RunRecord, row: ClientRow) -> float:
    return run.task.served(row.test_loss, row.test_score)


def gained(run: RunRecord, client: str) -> float:
    return run.task.gained(run.joining.gain(client)) if run.joining else 0.0


def marked(run: RunRecord, found: Verdict, client: str) -> tuple[str, str]:
    """Return the tone of a client's gain, and the gain in percent, with * where it is clear."""
    tone = TONES[found.pays(client)]
    moved = signed(gained(run, client))
    return tone, moved if tone == "quiet" else f"{moved}*"


def joining_table(run: RunRecord, found: Verdict) -> ScoreTable:
    """Make a row for every client: how every model serves it, and what joining changes."""
    measure, _ = run.task.serving
    few = {score.client for score in run.main.clients if uncertain(run, score)}
    rows = []
    for client in found.order:
        own = found.by_client[client]
        tone, moved = marked(run, found, client)
        values = [served(run, own[model]) for model in found.models]
        texts = [f"{value:.1f}" if "%" in measure else plain(value) for value in values]
        cells = [Cell(value, text) for value, text in zip(values, texts, strict=True)]
        cells.append(Cell(gained(run, client), moved, tone))
        cells.append(_interval(run, own[found.shown].gains.get(found.base)))
        rows.append(((f"{client} †" if client in few else client,), cells))
    lower = f"how much lower the {run.task.lower} is with {CALLED[found.shown]} (* clear of noise)"
    heading = f"{capital(measure)}, on held-out rows; gain: {lower}"
    return ScoreTable(
        heading, (run.word,), [*found.models, f"gain over {found.base}", "95 % interval"], rows
    )


def _interval(run: RunRecord, gain: Gain | None) -> Cell:
    """Write the 95 % interval of a gain, in the unit that it is shown in."""
    if gain is None or gain.low is None or gain.high is None:
        return Cell(None, NOTHING)
    low, high = (run.task.gained(end) for end in (gain.low, gain.high))
    return Cell(low, f"{signed(low)} to {signed(high)}")


def signed(share: float) -> str:
    """Write a gain in percent with its sign; a loss that is many times as high as such."""
    return percent(share, signed=True) if share >= -TIMES else f"×{plain(1 - share)}"


def effect_table(run: RunRecord) -> ScoreTable | None:
    """Make a row for every coefficient, those that are the clearest first."""
    rows = []
    ratios = run.task.ratios
    ends = ("ratio", "ratio_low", "ratio_high") if ratios else ("estimate", "low", "high")
    unclear = lambda one: -abs(one.values["estimate"] or 0.0) / (one.values["error"] or 1.0)
    for one in sorted(run.effects, key=unclear):
        estimate, low, high = (one.values[name] for name in ends)
        between = one.values["between"] or 0.0
        far = high is None or (ratios and high > FAR)
        cells = [
            Cell(estimate, NOTHING if far else plain(estimate)),
            Cell(low, "not known" if far else f"{plain(low)} to {plain(high)}"),
            Cell(between, plain(between) if between else "shared"),
        ]
        rows.append(((one.column,), cells))
    what, of = (f"{ratios} ratio", " of its logarithm") if ratios else ("coefficient", "")
    heads = [what, "95 % interval", f"deviation{of} between {plural(run.word)}"]
    heading = "What every column adds"
    if ratios:
        heading = f"What one unit more of a column multiplies the {ratios} by"
    return ScoreTable(heading, ("column",), heads, rows) if rows else None


def cut_table(run: RunRecord) -> ScoreTable | None:
    """Make a row for every threshold: what the recommended model picks, and what is wrong."""
    known = {row.model for row in run.cuts}
    wanted = run.joining.recommendation if run.joining else run.main.name
    name = wanted if wanted in known else run.main.name
    rows = []
    for cut in (row for row in run.cuts if row.model == name):
        costs = (1 - cut.threshold) / cut.threshold if cut.threshold else None
        counts = (cut.found, cut.missed, cut.false_alarms, cut.left_alone)
        shares = (cut.false_alarms / cut.rows, cut.missed / cut.rows)
        cells = [
            Cell(costs, NOTHING if costs is None else plain(costs)),
            *(Cell(n, whole(n)) for n in counts),
            *(Cell(100 * share, f"{100 * share:.1f}") for share in shares),
        ]
        rows.append(((f"{100 * cut.threshold:.3g} %",), cells))
    if not rows:
        return None
    of = f"“{brief(run.labels[1], 16)}”"
    heads = ["a miss costs", "found", "missed", "false alarms", "rightly left alone"]
    each = ["false alarms per 100", "misses per 100"]
    return ScoreTable(
        f"Who is picked as {of} by the “{name}” model", ("picked from",), [*heads, *each], rows
    )


def head(run: RunRecord, column: ScoreColumn) -> str:
    """Name a score, and of two labels the one that it looks for."""
    one = column.label and len(run.labels) == 2
    return f"{column.title} of “{brief(run.labels[1], 16)}”" if one else column.title


def _score(run: RunRecord, name: str, row: ScoreRow) -> Cell:
    value = row.values.get(name)
    return Cell(value, run.task.columns[name].written(value))


def shown_scores(run: RunRecord) -> list[str]:
    """Return the models whose scores are shown: average, fair and personal, and those compared."""
    wanted = {"average", "fair", "personal", run.main.name, *(m.name for m in run.models if m.role)}
    wanted |= {run.joining.recommendation} if run.joining else set()
    return [name for name in run.scored_models if name in wanted]


def score_tables(run: RunRecord) -> list[ScoreTable]:
    """Make a table of all held-out rows, one by client, and one for every column of groups."""
    rows = [row for name in shown_scores(run) for row in run.scores if row.model == name]
    until = next((f" by {h:g}" for row in rows if (h := row.values.get("horizon"))), "")
    ends = dict.fromkeys(("mean_probability", "base_rate"), until)
    found = []
    for by in ("", *dict.fromkeys(row.by for row in rows)):
        # all rows together are those of all clients; a client's models stand below one another
        own = [r for r in rows if r.by == (by or "client") and (r.group == EVERYONE) == (not by)]
        known = {name for row in own for name, value in row.values.items() if value is not None}
        shown = [name for name in run.task.columns if name in known]
        heads = [head(run, run.task.columns[name]) + ends.get(name, "") for name in shown]
        groups = [*dict.fromkeys(row.group for row in own)]
        own.sort(key=lambda row: groups.index(row.group))
        lines = [
            (
                (row.group, row.model) if by else (row.model,),
                [Cell(row.rows, whole(row.rows)), *(_score(run, name, row) for name in shown)],
            )
            for row in own
        ]
        first = run.word if by == "client" else by
        keys = (first, "model") if by else ("model",)
        heading = f"By {first}" if by else "All held-out rows"
        found.append(ScoreTable(heading, keys, ["rows", *heads], lines))
    return found if rows else []
