"""The verdict: what the fair model changes for the worst-served, what that costs, and what to be careful about."""

from __future__ import annotations

from dataclasses import dataclass

from scaffpd.metrics import a_fifth
from scaffpd.report.data import FEW, ModelSummary, Overall, ReportData, Score
from scaffpd.report.formats import brief, measured, plain, plural, several, small

NARROW = "\u00a0"  # keeps ρ and its value on one line
NEGLIGIBLE = 0.0005  # 0.05 points of accuracy, or this share of an error


@dataclass(frozen=True)
class Difference:
    """How a number moved: `gain` is positive where it got better."""

    gain: float
    before: float
    after: float
    negligible: bool

    @classmethod
    def of(cls, story: ReportData, before: float, after: float) -> Difference:
        """From the measure before to the one after."""
        gain = after - before if story.upwards else before - after
        scale = 1.0 if story.upwards else max(abs(before), abs(after))
        return cls(gain, before, after, abs(gain) < NEGLIGIBLE * scale)


def verdict(story: ReportData) -> tuple[str, ...]:
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


def bottom(story: ReportData) -> str:
    """'worst-served fifth of clients', or 'worst-served client' where that is one."""
    if a_fifth(len(story.clients)) <= 1:
        return f"worst-served {story.word}"
    return f"worst-served fifth of {plural(story.word)}"


def optimised(story: ReportData) -> Difference | None:
    """What training was about: the loss of the worst-served fifth on training rows; `None` where it is not known."""
    before, after = story.role("before"), story.role("after")
    if not before or not after or story.kind not in ("train", "path") or story.privacy is not None:
        return None  # losses of private clients are known with noise alone
    worst = [_worst_loss(story, model.name) for model in (before, after)]
    return None if None in worst else Difference(worst[0] - worst[1], worst[0], worst[1], False)  # type: ignore[operator,arg-type]


def _worst_loss(story: ReportData, model: str) -> float | None:
    last = [r.losses for r in story.rounds if r.model == model and r.losses][-1:]
    if not last:
        return None
    worst = sorted(last[0].values())[-a_fifth(len(last[0])) :]
    return sum(worst) / len(worst)


def _headline(story: ReportData, before: Overall, after: Overall) -> str:
    worst = Difference.of(story, before.worst_20, after.worst_20)
    mean = Difference.of(story, before.mean, after.mean)
    subject = f"the {bottom(story)}"
    where = _where(story)
    if worst.negligible and mean.negligible:
        sentence = f"neither {subject} nor the average moves: both change by less than {_threshold(story)}."
    elif story.upwards:
        sentence = f"{subject} {_points(worst)}; {_average_points(mean, worst)}."
    else:
        sentence = f"the {_error(story)} of {subject} {_errors(worst)}; {_average_errors(story, mean)}."
    return _capital(f"{where}{sentence}")


def _where(story: ReportData) -> str:
    start = (
        f"at {str(story.path['knee']).replace(' ', NARROW)}, which is suggested, "
        if story.kind == "path" and story.path
        else ""
    )
    return f"{start}on the rows trained on, " if story.split == "train" else start


def _points(change: Difference) -> str:
    if change.negligible:
        return "stays where it was"
    return f"{'gains' if change.gain > 0 else 'loses'} {_size(change)} points"


def _average_points(mean: Difference, worst: Difference) -> str:
    if mean.negligible:
        return "the average stays where it was"
    if mean.gain > 0:
        also = " too" if worst.gain > 0 and not worst.negligible else ""
        return f"the average gains {_size(mean)}{also}"
    return f"the average {'gives up' if worst.gain > 0 and not worst.negligible else 'loses'} {_size(mean)}"


def _errors(change: Difference) -> str:
    if change.negligible:
        return "stays where it was"
    share = abs(change.gain) / abs(change.before) if change.before else 0.0
    word = "falls" if change.gain > 0 else "rises"
    return f"{word} by {100 * share:.1f} %"


def _average_errors(story: ReportData, mean: Difference) -> str:
    if mean.negligible:
        return "the average one stays where it was"
    return f"the average one {_errors(mean)}"


def _error(story: ReportData) -> str:
    return "error" if story.measure == "rmse" else "loss"


def _size(change: Difference) -> str:
    written = f"{100 * abs(change.gain) * (1 + 1e-9):.1f}"  # as in `formats.change`
    return written if written != "0.0" else f"{100 * abs(change.gain):.2f}"


def _threshold(story: ReportData) -> str:
    return "0.05 points" if story.upwards else "0.05 %"


def _names(story: ReportData, before: Overall, after: Overall) -> str:
    was, now = (f"{measured(one.worst, story.measure)}{_of_few(story, one.worst_client)}" for one in (before, after))
    first, last = brief(before.worst_client), brief(after.worst_client)
    if before.worst_client != after.worst_client:
        return f"Served worst was {first} with {was}; now it is {last} with {now}."
    if was == now:
        return f"Served worst is {first}, before and after, with {now}."
    return f"Served worst is {first}, before with {measured(before.worst, story.measure)} and after with {now}."


def _of_few(story: ReportData, client: str) -> str:
    rows = next((s.test_rows for scores in story.scores.values() for s in scores if s.client == client), None)
    return f" of {several(rows, 'test row')}" if story.upwards and story.split == "test" and rows and rows < FEW else ""


def _alone(story: ReportData, one: Overall) -> tuple[str, str]:
    value, rows = measured(one.worst, story.measure), "held-out rows" if story.split == "test" else "rows trained on"
    what = f"is right on {value} of its {rows}" if story.upwards else f"has a {story.measure} of {value} on its {rows}"
    return (
        f"The worst-served {story.word}, {brief(one.worst_client)}, {what}; the average is "
        f"{measured(one.mean, story.measure)}.",
        "There is one model here, and nothing to compare it with.",
    )


def _ranking(story: ReportData) -> tuple[str, str]:
    before, after = story.role("before"), story.role("after")
    assert before is not None
    assert after is not None
    first, best = story.overall[before.name], story.overall[after.name]
    worst, mean = Difference.of(story, first.worst_20, best.worst_20), Difference.of(story, first.mean, best.mean)
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


def _against(story: ReportData, worst: Difference, mean: Difference, name: str) -> str:
    if not story.upwards:
        return f"{name} has {plain(worst.before)}; on average {plain(mean.after)} against {plain(mean.before)}"
    if worst.negligible:
        start = f"as {name} does"
    else:
        start = f"{_size(worst)} points {'more' if worst.gain > 0 else 'less'} than {name}"
    if mean.negligible:
        return f"{start}, at the same average"
    return f"{start}; the average {'gains' if mean.gain > 0 else 'gives up'} {_size(mean)}"


def _with_spread(story: ReportData, one: Overall) -> str:
    if one.worst_20_sd is None:
        return measured(one.worst_20, story.measure)
    if not story.upwards:
        return f"{plain(one.worst_20)} ± {plain(one.worst_20_sd)}"
    return f"{100 * one.worst_20:.1f} ± {100 * one.worst_20_sd:.1f} %"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


CLEAR = 4.0  # rows: z = rows / √(rows that changed sides) ≤ √rows, so fewer are never clear at two deviations


def cautions(story: ReportData) -> tuple[str, ...]:
    """Sentences, the most important first; none where there is nothing to warn of."""
    found = [
        _training(story),
        *_few_rows(story),
        *_noise(story),
        _chance(story),
        *(_proof(story, m) for m in _main(story)),
        *_privacy(story),
    ]
    return tuple(sentence for sentence in found if sentence)


def _privacy(story: ReportData) -> tuple[str, ...]:
    if story.privacy is None:
        return ()
    rows = {s.client: s.train_rows for scores in story.scores.values() for s in scores}
    return story.privacy.cautions(rows)


def _main(story: ReportData) -> list[ModelSummary]:
    if story.kind == "compare":
        return []
    return [m for m in story.models if m.role] or list(story.models[:1])


def _training(story: ReportData) -> str:
    if story.split != "train" or not story.overall:
        return ""
    return "Nothing was held out: all numbers are about the rows trained on, and new rows may fare worse."


def uncertain(story: ReportData, score: Score) -> bool:
    """Whether a client has too few held-out rows for its number to mean much."""
    return story.split == "test" and score.test_rows is not None and score.test_rows < FEW


def _few_rows(story: ReportData) -> list[str]:
    after = story.role("after") or next((m for m in story.models if m.name in story.scores), None)
    scores = story.scores.get(after.name, ()) if after else ()
    if not any(uncertain(story, s) for s in scores):
        return []
    few = [s for s in scores if uncertain(story, s)]
    known = sorted(
        (s for s in scores if s.value is not None), key=lambda s: (s.value or 0) * (1 if story.upwards else -1)
    )
    worst = [s for s in known[: a_fifth(len(known))] if uncertain(story, s)]
    who = (
        f"All {len(few)} {plural(story.word)}"
        if len(few) == len(scores) > 1
        else f"{several(len(few), story.word)} of {len(scores)}"
    )
    sentence = f"{who} {'has' if len(few) == 1 else 'have'} fewer than {FEW} test rows (marked †)"
    if worst and story.upwards and (rows := worst[0].test_rows):
        return [
            f"{sentence}: at {brief(worst[0].client)}, which is served among the worst, "
            f"one row is {100 / rows:.3g} points."
        ]
    return [f"{sentence}: {'its number is' if len(few) == 1 else 'their numbers are'} uncertain."]


def _noise(story: ReportData) -> list[str]:
    after = story.role("after")
    judged = [s for s in story.scores.get(after.name, ()) if s.clear is not None] if after else []
    if not judged:
        return []
    clear = sum(bool(s.clear) for s in judged)
    who = "no" if clear == 0 else str(clear)
    changes = f"change in {story.measure} is" if clear < 2 else f"changes in {story.measure} are"
    return [f"Of {len(judged)} {plural(story.word)}, {who} {changes} clear of noise{' (marked *)' if clear else ''}."]


def _majority(story: ReportData) -> str:
    """Where one label for everybody would do as well."""
    model = story.role("after") or story.models[0]
    most: dict[str, list[int]] = {}
    for share in story.partition:
        most.setdefault(share.client, []).append(int(share.test_rows if story.split == "test" else share.train_rows))
    known = {s.client: s.value for s in story.scores.get(model.name, ()) if s.value is not None}
    if not story.upwards or story.kind not in ("train", "path"):
        return ""
    idle = [c for c, rows in most.items() if c in known and any(rows) and known[c] <= max(rows) / sum(rows) + 1e-9]
    if not idle:
        return ""
    who = (
        f"{brief(idle[0])}, one label"
        if len(idle) == 1
        else f"{len(idle)} of {len(most)} {plural(story.word)} one label"
    )
    return f"At {who}, one label for every row would be right at least as often: accuracy says little there."


def _chance(story: ReportData) -> str:
    """McNemar's test cannot tell a net change of fewer than four rows from chance, whatever rows changed sides."""
    before, after = story.role("before"), story.role("after")
    if not before or not after or story.kind == "compare" or not story.upwards or story.split != "test":
        return ""
    scores = story.scores[after.name]
    if any(s.clear is not None or s.test_rows is None or s.value is None for s in scores):
        return ""
    worst = sorted(scores, key=lambda s: s.value or 0.0)[: a_fifth(len(scores))]
    rows = sum(s.test_rows or 0 for s in worst)
    moved = abs(story.overall[after.name].worst_20 - story.overall[before.name].worst_20) * rows
    if not 0.5 <= moved < CLEAR:
        return ""
    about = "one" if moved < 1.5 else "two" if moved < 2.5 else "three" if moved < 3.5 else "four"
    return (
        f"For the {bottom(story)}, that is about {about} of {rows} test rows: chance could do as much. "
        f"More held-out rows would tell."
    )


def _proof(story: ReportData, model: ModelSummary) -> str:
    name = f"The model “{model.name}”" if len(story.models) > 1 else "The model"
    if model.status in ("converged", ""):
        return "" if model.certificate is not None or not model.status else f"{name} has no certificate."
    if model.status in ("running", "paused", "failed"):
        return ""  # the run's own sentence is among the remarks
    if story.privacy is not None and model.status == "round limit":
        return f"How far {name[0].lower()}{name[1:]} is from the optimum is not known: noise hides it."
    if model.certificate is None:
        return f"{name} is not converged ({model.status}), and how far it is from the optimum is not known."
    return f"{name} is not converged ({model.status}), but proven within {small(model.certificate)} of the optimum."
