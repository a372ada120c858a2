"""The verdict: what the model after does for the worst-served, and what it costs, in honest words."""

from __future__ import annotations

from dataclasses import dataclass

from scaffpd.metrics import a_fifth
from scaffpd.report.formats import brief, measured, plain, plural, several
from scaffpd.report.story import FEW, Overall, Story

NARROW = "\u00a0"  # keeps ρ and its value on one line
NEGLIGIBLE = 0.0005  # 0.05 points of accuracy, or this share of an error


@dataclass(frozen=True)
class Change:
    """How a number moved: `gain` is positive where it got better."""

    gain: float
    before: float
    after: float
    negligible: bool

    @classmethod
    def of(cls, story: Story, before: float, after: float) -> Change:
        """From the measure before to the one after."""
        gain = after - before if story.upwards else before - after
        scale = 1.0 if story.upwards else max(abs(before), abs(after))
        return cls(gain, before, after, abs(gain) < NEGLIGIBLE * scale)


def verdict(story: Story) -> tuple[str, ...]:
    """Two sentences for the top of the page."""
    if story.verdict:
        return story.verdict
    before, after = story.role("before"), story.role("after")
    if story.kind == "compare" and before and after:
        return _ranking(story)
    if before and after:
        pair = story.overall[before.name], story.overall[after.name]
        return _headline(story, *pair), _names(story, *pair)
    if before and story.path:
        return _capital(str(story.path["why"])), _alone(story, story.overall[before.name])[0]
    if story.overall:
        return _alone(story, next(iter(story.overall.values())))
    return ("There is no result yet.", story.models[0].message or "The run has not ended.")


def bottom(story: Story) -> str:
    """'worst-served fifth of clients', or 'worst-served client' where that is one."""
    if a_fifth(len(story.clients)) <= 1:
        return f"worst-served {story.word}"
    return f"worst-served fifth of {plural(story.word)}"


def optimised(story: Story) -> Change | None:
    """What training was about: the loss of the worst-served fifth on training rows; `None` where it is not known."""
    before, after = story.role("before"), story.role("after")
    if not before or not after or story.kind not in ("train", "path") or story.privacy is not None:
        return None  # losses of private clients are known with noise alone
    worst = [_worst_loss(story, model.name) for model in (before, after)]
    return None if None in worst else Change(worst[0] - worst[1], worst[0], worst[1], False)  # type: ignore[operator,arg-type]


def _worst_loss(story: Story, model: str) -> float | None:
    last = [r.losses for r in story.rounds if r.model == model and r.losses][-1:]
    if not last:
        return None
    worst = sorted(last[0].values())[-a_fifth(len(last[0])) :]
    return sum(worst) / len(worst)


def _headline(story: Story, before: Overall, after: Overall) -> str:
    worst = Change.of(story, before.worst_20, after.worst_20)
    mean = Change.of(story, before.mean, after.mean)
    subject = f"the {bottom(story)}"
    where = _where(story)
    if worst.negligible and mean.negligible:
        sentence = f"neither {subject} nor the average moves: both change by less than {_threshold(story)}."
    elif story.upwards:
        sentence = f"{subject} {_points(worst)}; {_average_points(mean, worst)}."
    else:
        sentence = f"the {_error(story)} of {subject} {_errors(worst)}; {_average_errors(story, mean)}."
    return _capital(f"{where}{sentence}")


def _where(story: Story) -> str:
    start = (
        f"at {str(story.path['knee']).replace(' ', NARROW)}, which is suggested, "
        if story.kind == "path" and story.path
        else ""
    )
    return f"{start}on the rows trained on, " if story.split == "train" else start


def _points(change: Change) -> str:
    if change.negligible:
        return "stays where it was"
    return f"{'gains' if change.gain > 0 else 'loses'} {_size(change)} points"


def _average_points(mean: Change, worst: Change) -> str:
    if mean.negligible:
        return "the average stays where it was"
    if mean.gain > 0:
        also = " too" if worst.gain > 0 and not worst.negligible else ""
        return f"the average gains {_size(mean)}{also}"
    return f"the average {'gives up' if worst.gain > 0 and not worst.negligible else 'loses'} {_size(mean)}"


def _errors(change: Change) -> str:
    if change.negligible:
        return "stays where it was"
    share = abs(change.gain) / abs(change.before) if change.before else 0.0
    word = "falls" if change.gain > 0 else "rises"
    return f"{word} by {100 * share:.1f} %"


def _average_errors(story: Story, mean: Change) -> str:
    if mean.negligible:
        return "the average one stays where it was"
    return f"the average one {_errors(mean)}"


def _error(story: Story) -> str:
    return "error" if story.measure == "rmse" else "loss"


def _size(change: Change) -> str:
    written = f"{100 * abs(change.gain) * (1 + 1e-9):.1f}"  # as in `formats.change`
    return written if written != "0.0" else f"{100 * abs(change.gain):.2f}"


def _threshold(story: Story) -> str:
    return "0.05 points" if story.upwards else "0.05 %"


def _names(story: Story, before: Overall, after: Overall) -> str:
    was, now = (f"{measured(one.worst, story.measure)}{_of_few(story, one.worst_client)}" for one in (before, after))
    first, last = brief(before.worst_client), brief(after.worst_client)
    if before.worst_client != after.worst_client:
        return f"Served worst was {first} with {was}; now it is {last} with {now}."
    if was == now:
        return f"Served worst is {first}, before and after, with {now}."
    return f"Served worst is {first}, before with {measured(before.worst, story.measure)} and after with {now}."


def _of_few(story: Story, client: str) -> str:
    rows = next((s.test_rows for scores in story.scores.values() for s in scores if s.client == client), None)
    return f" of {several(rows, 'test row')}" if story.upwards and story.split == "test" and rows and rows < FEW else ""


def _alone(story: Story, one: Overall) -> tuple[str, str]:
    value, rows = measured(one.worst, story.measure), "held-out rows" if story.split == "test" else "rows trained on"
    what = f"is right on {value} of its {rows}" if story.upwards else f"has a {story.measure} of {value} on its {rows}"
    return (
        f"The worst-served {story.word}, {brief(one.worst_client)}, {what}; the average is "
        f"{measured(one.mean, story.measure)}.",
        "There is one model here, and nothing to compare it with.",
    )


def _ranking(story: Story) -> tuple[str, str]:
    before, after = story.role("before"), story.role("after")
    assert before is not None
    assert after is not None
    first, best = story.overall[before.name], story.overall[after.name]
    worst, mean = Change.of(story, first.worst_20, best.worst_20), Change.of(story, first.mean, best.mean)
    spread = 0.0 if best.worst_20_sd is None else best.worst_20_sd
    sign = 1 if story.upwards else -1
    ranked = {m.name for m in story.models if not m.failure and m.name in story.overall}
    near = sorted(n for n in ranked - {after.name} if sign * (best.worst_20 - story.overall[n].worst_20) <= spread)
    against = _against(story, worst, mean, before.name)
    second = "No other method is within one standard deviation of it."
    if best.worst_20_sd is None:
        second = "That is one seed: another partition may rank them otherwise."
    elif near:
        also = f", {before.name} among them" if before.name in near and len(near) > 1 else ""
        who = f"{near[0]} is" if len(near) == 1 else f"{len(near)} of the {len(ranked) - 1} others are"
        second = f"{who} within one standard deviation of it{also}."
    return f"{after.name} serves the {bottom(story)} best, with {_with_spread(story, best)}: {against}.", second


def _against(story: Story, worst: Change, mean: Change, name: str) -> str:
    if not story.upwards:
        return f"{name} has {plain(worst.before)}; on average {plain(mean.after)} against {plain(mean.before)}"
    if worst.negligible:
        start = f"as {name} does"
    else:
        start = f"{_size(worst)} points {'more' if worst.gain > 0 else 'less'} than {name}"
    if mean.negligible:
        return f"{start}, at the same average"
    return f"{start}; the average {'gains' if mean.gain > 0 else 'gives up'} {_size(mean)}"


def _with_spread(story: Story, one: Overall) -> str:
    if one.worst_20_sd is None:
        return measured(one.worst_20, story.measure)
    if not story.upwards:
        return f"{plain(one.worst_20)} ± {plain(one.worst_20_sd)}"
    return f"{100 * one.worst_20:.1f} ± {100 * one.worst_20_sd:.1f} %"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
