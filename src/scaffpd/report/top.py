"""The top of the page: the verdict, the numbers beneath it, what to be careful about, and the models' switches."""

from __future__ import annotations

from html import escape

from scaffpd.report.data import ReportData
from scaffpd.report.formats import change, measured, small
from scaffpd.report.tables import swatches
from scaffpd.report.verdict import bottom, cautions, optimised, verdict


def top(story: ReportData) -> dict[str, str]:
    """The parts of the template."""
    first, *rest = verdict(story)
    whole = escape(first).replace("worst-served", '<span class="nb">worst-served</span>')
    said = f'<p class="first">{whole}</p>' + "".join(f'<p class="second">{escape(s)}</p>' for s in rest)
    warned = "".join(f'<li class="caution">{escape(sentence)}</li>' for sentence in cautions(story))
    return {
        "verdict": said,
        "tiles": _tiles(story),
        "cautions": f'<ul class="cautions">{warned}</ul>' if warned else "",
    }


def _tiles(story: ReportData) -> str:
    before, after = story.role("before"), story.role("after")
    if before and after:
        old, new = story.overall[before.name], story.overall[after.name]
        names = f"{before.name} → {after.name}"
        tiles = [
            _moved(story, f"The {bottom(story)}", old.worst_20, new.worst_20, names),
            _moved(story, "The average", old.mean, new.mean, names),
        ]
        tiles += _trained(story)
        proof = after
    elif story.overall:
        one, proof = next(iter(story.overall.values())), story.models[0]
        tiles = [
            _tile(f"The {bottom(story)}", measured(one.worst_20, story.measure), one.worst_client),
            _tile("The average", measured(one.mean, story.measure), f"over {len(story.clients)}"),
        ]
    else:
        return ""
    if story.privacy is not None:
        tiles.append(_tile("Differential privacy", story.privacy.pair.replace(", ", ",\u00a0"), story.privacy.whom))
    if proof.certificate is not None:
        tiles.append(_tile("Proven gap to the optimum", small(proof.certificate), f"{proof.name}, {proof.status}"))
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _trained(story: ReportData) -> list[str]:
    found = optimised(story)
    if found is None:
        return []
    was, now = (f"{value:.3f}" for value in (found.before, found.after))
    more = "<small>on training rows, of the worst-served: what was optimised</small>"
    value = f'<span class="old">{was} →</span> {now}{more}'
    return [f"<div><dt>Loss</dt><dd>{value}</dd></div>"]


def _moved(story: ReportData, name: str, old: float, new: float, models: str) -> str:
    gain = (new - old) * (1 if story.upwards else -1)
    written = change(new - old, story.measure) + (" points" if story.upwards else "")
    kind = "" if not written.startswith(("+", "−")) else "gain" if gain > 0 else "loss"
    was, now = measured(old, story.measure), measured(new, story.measure)
    return (
        f'<div><dt>{escape(name)}</dt><dd><span class="old">{was} →</span> {now}'
        f'<small><span class="{kind}">{written}</span> · {escape(models)}</small></dd></div>'
    )


def _tile(name: str, value: str, more: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"


def chips(story: ReportData) -> str:
    """A switch for every model; nothing where there is one."""
    if len(story.models) < 2:
        return ""
    marks = swatches(story)
    buttons = "".join(
        f'<button type="button" class="chip" data-index="{i}" aria-pressed="{str(name in story.shown).lower()}" '
        f'title="{escape(name)}">{marks[name]}<span>{escape(name)}</span></button>'
        for i, name in enumerate(story.names)
    )
    more = '<button type="button" class="plain" id="every">Show all</button>' if len(story.models) > 2 else ""
    return f'<div class="chips" role="group" aria-label="Models to show"><div class="all">{buttons}</div>{more}</div>'
