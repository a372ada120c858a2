"""The page's tables: clients, runs, events. Plain HTML, complete without any script."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from scaffpd.report.data import ModelSummary, ReportData, Score
from scaffpd.report.formats import NOTHING, change, count, measured, plain, plural, small
from scaffpd.report.theme import look, places
from scaffpd.report.verdict import uncertain

FILTER_FROM = 12  # clients: a shorter table needs no filter
PATHS = {
    "circle": "M2 7a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z", "diamond": "M7 1L13 7L7 13L1 7Z", "square": "M2.5 2.5h9v9h-9Z",
    "triangle-up": "M7 1.5L13 12H1Z", "triangle-down": "M7 12.5L13 2H1Z", "triangle-right": "M12.5 7L2 13V1Z",
    "cross": "M5 1h4v4h4v4h-4v4h-4v-4h-4v-4h4Z",
}  # fmt: skip


def swatch(place: int) -> str:
    """A model's colour and shape."""
    colour, shape, _ = look(place)
    path = f'<path fill="var(--series-{colour})" d="{PATHS[shape]}"/>'
    return f'<svg class="swatch" viewBox="0 0 14 14" aria-hidden="true">{path}</svg>'


def swatches(story: ReportData) -> dict[str, str]:
    """Every model's."""
    found = places([model.role for model in story.models])
    return {model.name: swatch(place) for model, place in zip(story.models, found, strict=True)}


def clients(story: ReportData) -> str:
    """One row per client: its rows, every model's value, the gain and the weight."""
    if not story.scores:
        return ""
    before, after = story.role("before"), story.role("after")
    named = {name: {s.client: s for s in scores} for name, scores in story.scores.items()}
    weigher = after.name if after else next(iter(named))
    marks = swatches(story)
    heads = [_head(story.word, "text"), _head("rows trained on"), _head("test rows")]
    heads += [_head(name, data=i, mark=marks[name]) for i, name in enumerate(story.names) if name in named]
    heads += ([_head("gain" if story.upwards else "change")] if before and after else []) + [_head("weight λ")]
    heads += [_head("ε")] if story.privacy else []
    rows = []
    for client in story.clients:
        found = [named[n].get(client) for n in story.names if n in named]
        first = named[weigher].get(client) or Score(client, None)
        name = escape(client) + (
            ' <abbr title="fewer than 30 test rows: uncertain">†</abbr>' if uncertain(story, first) else ""
        )
        cells = [f'<th scope="row" data-v="{escape(client)}">{name}</th>']
        cells += [_cell(first.train_rows, count(first.train_rows)), _cell(first.test_rows, count(first.test_rows))]
        indices = [i for i, n in enumerate(story.names) if n in named]
        cells += [_value(story, s, i) for s, i in zip(found, indices, strict=True)]
        if before and after:
            cells.append(_gain(story, named[before.name].get(client), named[after.name].get(client)))
        cells.append(_cell(first.weight, plain(first.weight)))
        if story.privacy:
            spent = story.privacy.clients.get(client)
            cells.append(_cell(spent, plain(spent)))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _sortable("client-table", f"All {plural(story.word)}", heads, rows)


def _head(name: str, kind: str = "number", data: int | None = None, mark: str = "") -> str:
    model = "" if data is None else f' data-model="{data}"'
    return (
        f'<th scope="col" aria-sort="none" data-kind="{kind}"{model}>'
        f'<button type="button">{mark}{escape(name)}<span class="arrow" aria-hidden="true"></span></button></th>'
    )


def _cell(value: float | None, shown: str, extra: str = "") -> str:
    return f'<td data-v="{"" if value is None else value!r}"{extra}>{shown}</td>'


def _value(story: ReportData, score: Score | None, model: int) -> str:
    value = score.value if score else None
    shown = measured(value, story.measure)
    if score and score.deviation is not None:
        sd = 100 * score.deviation if story.upwards else score.deviation
        shown = shown.removesuffix("\u00a0%") + f"\u202f±\u202f{sd:.1f}" if story.upwards else f"{shown} ± {plain(sd)}"
    return _cell(value, shown, f' data-model="{model}"')


def _gain(story: ReportData, old: Score | None, new: Score | None) -> str:
    if old is None or new is None or old.value is None or new.value is None:
        return _cell(None, NOTHING)
    moved = new.value - old.value
    gain, shown = moved * (1 if story.upwards else -1), change(moved, story.measure)
    kind = "" if not shown.startswith(("+", "−")) else ' class="gain"' if gain > 0 else ' class="loss"'
    sure = "" if new.clear is None else "*" if new.clear else ""
    return _cell(moved, shown + sure, kind)


def _sortable(name: str, label: str, heads: list[str], rows: list[str]) -> str:
    search = (
        f'<p class="filter"><label>Filter <input type="search" autocomplete="off" data-table="{name}"></label> '
        f'<span role="status" class="soft"></span></p>'
        if len(rows) > FILTER_FROM
        else ""
    )
    return (
        f'{search}<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table id="{name}" class="sortable"><caption class="hidden">{escape(label)}</caption>'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def runs(story: ReportData) -> str:
    """How every run ended, and what it cost."""
    marks = swatches(story)
    columns: dict[str, Callable[[ModelSummary], str]] = {
        "status": lambda m: escape(m.status), "proven gap": lambda m: small(m.certificate),
        "rounds": lambda m: count(m.rounds), "exchanges": lambda m: count(m.exchanges),
        "MB": lambda m: plain(m.megabytes), "seconds": lambda m: plain(m.seconds),
        "mean": lambda m: _total(story, m, "mean"),
        "worst\u00a020\u00a0%": lambda m: _total(story, m, "worst_20"), "worst": lambda m: _total(story, m, "worst"),
    }  # fmt: skip
    kept = {
        name: cell for name, cell in columns.items() if any(cell(m) not in ("", NOTHING) for m in story.models)
    }  # what no run has is left out
    messages = {m.message for m in story.models}
    shared = messages.pop() if len(messages) == 1 < len(story.models) else ""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("model", *kept))
    body = "".join(
        f'<tr><th scope="row">{marks[m.name]}{escape(m.name)}{_how(m, shared)}</th>'
        + "".join(f"<td>{cell(m)}</td>" for cell in kept.values())
        + "</tr>"
        for m in story.models
    )
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="All runs"><table class="runs">'
        f'<caption class="hidden">All runs</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
        + (f'<p class="soft">All runs: {escape(shared)}</p>' if shared else "")
    )


def _how(model: ModelSummary, shared: str) -> str:
    objective = "" if model.objective in model.algorithm else model.objective
    how = ", ".join(filter(None, (objective, model.algorithm)))
    words = model.failure or ("" if shared else model.message)
    return "".join(f"<small>{escape(line)}</small>" for line in (how, words) if line)


def _total(story: ReportData, model: ModelSummary, which: str) -> str:
    one = story.overall.get(model.name)
    return NOTHING if one is None else measured(getattr(one, which), story.measure)


def events(story: ReportData) -> str:
    """What happened to silos."""
    if not story.events:
        return ""
    rows = "".join(
        f'<tr><td class="words">{e.round}</td><th scope="row">{escape(e.silo)}</th>'
        f'<td class="words">{escape(e.what)}</td><td class="words">{escape(e.sentence)}</td></tr>'
        for e in story.events
    )
    heads = "".join(f'<th scope="col" class="words">{name}</th>' for name in ("round", "silo", "what", "in words"))
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Events"><table class="runs">'
        f'<caption class="hidden">Events</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
