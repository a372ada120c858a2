"""The verdict: what the fair model changes for the worst-served, what that costs, and what to be careful about.

`answers` has the same as five questions of a reader who knows no optimisation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scaffpd.numbers import measured, percent, plain, plural, several, small
from scaffpd.objectives import OBJECTIVES
from scaffpd.run.page import data
from scaffpd.run.page.data import FEW, ReportData, Score, brief, capital
from scaffpd.run.page.predictions import drift
from scaffpd.training.metrics import a_fifth

NARROW = "\u00a0"  # keeps ρ and its value on one line
NEGLIGIBLE = 0.0005  # 0.05 points of accuracy, or this share of an error
CLEAR = 4.0  # rows: z = rows / √(rows that changed sides) ≤ √rows, so fewer are never clear at two deviations
UNMOVED = "stays where it was"
QUESTIONS = {
    "who": "Who gains?",
    "much": "How much, and is it clear of noise?",
    "do": "What to do?",
    "cost": "Whom does it cost?",
    "sure": "How sure is the optimum?",
}
DO = {
    "personal": "Join, and let every {word} make the shared model its own: “personal”.",
    "fair": "Join with one fair model for all {words}: nothing else is clearly better.",
    "average": "Join with one average model for all {words}: nothing more elaborate is clearly better.",
    "alone": "Let every {word} train alone: joining is not clearly better.",
}
CALLED = {"personal": "personal models", "fair": "one fair model", "average": "one average model"}
NAMED = 3  # clients that a sentence names
MEANINGS = {kind.parameter: kind.meaning for kind in OBJECTIVES.values() if kind.meaning}


@dataclass(frozen=True)
class Difference:
    """Change of a number: `gain` is positive if it got better."""

    gain: float
    before: float
    after: float
    negligible: bool

    @classmethod
    def of(cls, run: ReportData, before: float, after: float) -> Difference:
        """Compare the measure before with the one after."""
        gain = run.sign * (after - before)
        scale = 1.0 if run.upwards else max(abs(before), abs(after))
        return cls(gain, before, after, abs(gain) < NEGLIGIBLE * scale)

    @property
    def better(self) -> bool:
        """Return whether there is a gain worth naming."""
        return self.gain > 0 and not self.negligible

    @property
    def points(self) -> str:
        """The size in percentage points."""
        written = f"{100 * abs(self.gain) * (1 + 1e-9):.1f}"  # as in `change`
        return written if written != "0.0" else f"{100 * abs(self.gain):.2f}"

    @property
    def relative(self) -> str:
        """The change of an error in percent."""
        if self.negligible:
            return UNMOVED
        share = abs(self.gain) / abs(self.before) if self.before else 0.0
        return f"{'falls' if self.gain > 0 else 'rises'} by {100 * share:.1f} %"


def verdict(run: ReportData) -> tuple[str, ...]:
    """State the result in two sentences; of several runs, which to take."""
    if run.verdict:
        return run.verdict
    if run.pair and run.kind == "runs":
        return ((_paired(run) | dict(run.answers))["do"],)
    if run.pair:
        before, after = (run.overall[name] for name in run.pair)
        if run.kind == "compare":
            return _ranking(run, before, after)
        return _headline(run, before, after), _worst_served(run, before, after)
    if run.path and (before_only := run.role("before")):
        return f"Suggested: {run.path['why']}", _single(run, run.overall[before_only])[0]
    if run.overall:
        return _single(run, next(iter(run.overall.values())))
    return ("There is no result yet.", run.models[0].message or "The run has not ended.")


def optimised(run: ReportData) -> Difference | None:
    """Return what was optimised, the loss of the worst-served fifth on training rows; `None` where it is not known."""
    if not run.pair or run.kind not in ("train", "path", "runs") or run.privacy is not None:
        return None  # losses of private clients are known with noise alone
    worst = []
    for name in run.pair:
        last = [r.losses for r in run.rounds if r.model == name and r.losses][-1:]
        if not last:
            return None
        fifth = sorted(last[0].values())[-a_fifth(len(last[0])) :]
        worst.append(sum(fifth) / len(fifth))
    return Difference(worst[0] - worst[1], worst[0], worst[1], False)


def _headline(run: ReportData, before: data.Overall, after: data.Overall) -> str:
    worst = Difference.of(run, before.worst_20, after.worst_20)
    mean = Difference.of(run, before.mean, after.mean)
    subject = f"the {run.bottom}"
    where = ""
    if run.kind == "path" and run.path:
        where = f"at {str(run.path['knee']).replace(' ', NARROW)}, which is suggested, "
    if run.split == "train":
        where += "on the rows trained on, "
    if run.tested and not any(run.tested.values()):
        where = f"no change is clear of noise: {where}"
    if worst.negligible and mean.negligible:
        least = "0.05 points" if run.upwards else "0.05 %"
        sentence = f"neither {subject} nor the average moves: both change by less than {least}."
    elif run.upwards:
        moved = (
            UNMOVED
            if worst.negligible
            else f"{'gains' if worst.gain > 0 else 'loses'} {worst.points} points"
        )
        sentence = f"{subject} {moved}; {_average(mean, worst)}."
    else:
        error = "error" if run.measure == "rmse" else "loss"
        sentence = f"the {error} of {subject} {worst.relative}; the average one {mean.relative}."
    return capital(f"{where}{sentence}")


def _average(mean: Difference, worst: Difference) -> str:
    if mean.negligible:
        return f"the average {UNMOVED}"
    if mean.gain > 0:
        return f"the average gains {mean.points}{' too' if worst.better else ''}"
    return f"the average {'gives up' if worst.better else 'loses'} {mean.points}"


def _worst_served(run: ReportData, before: data.Overall, after: data.Overall) -> str:
    was, now = (
        f"{measured(one.worst, run.measure)}{_of_few(run, one.worst_client)}"
        for one in (before, after)
    )
    first = brief(before.worst_client)
    last = brief(after.worst_client)
    if before.worst_client != after.worst_client:
        return f"Served worst was {first} with {was}; now it is {last} with {now}."
    if was == now:
        return f"Served worst is {first}, before and after, with {now}."
    return f"Served worst is {first}, before with {measured(before.worst, run.measure)} and after with {now}."


def _of_few(run: ReportData, client: str) -> str:
    rows = next(
        (s.test_rows for scores in run.scores.values() for s in scores if s.client == client), None
    )
    return (
        f" of {several(rows, 'test row')}"
        if run.upwards and run.split == "test" and rows and rows < FEW
        else ""
    )


def _single(run: ReportData, one: data.Overall) -> tuple[str, str]:
    value = measured(one.worst, run.measure)
    rows = "held-out rows" if run.split == "test" else "rows trained on"
    what = (
        f"is right on {value} of its {rows}"
        if run.upwards
        else f"has a {run.measure} of {value} on its {rows}"
    )
    return (
        f"The worst-served {run.word}, {brief(one.worst_client)}, {what}; the average is "
        f"{measured(one.mean, run.measure)}.",
        "There is one model here, and nothing to compare it with.",
    )


def _ranking(run: ReportData, first: data.Overall, best: data.Overall) -> tuple[str, str]:
    assert run.pair is not None
    before, after = run.pair
    ranked = {m.name for m in run.models if not m.failure and m.name in run.overall}
    second = "No other method is within one standard deviation of it."
    if best.worst_20_sd is None:
        second = "That is one seed: another partition may rank them otherwise."
        value = measured(best.worst_20, run.measure)
    else:
        gaps = {name: abs(best.worst_20 - run.overall[name].worst_20) for name in ranked - {after}}
        near = sorted(name for name, gap in gaps.items() if gap <= best.worst_20_sd)
        value = f"{plain(best.worst_20)} ± {plain(best.worst_20_sd)}"
        if run.upwards:
            value = f"{100 * best.worst_20:.1f} ± {100 * best.worst_20_sd:.1f} %"
        if near:
            also = f", {before} among them" if before in near and len(near) > 1 else ""
            who = (
                f"{near[0]} is"
                if len(near) == 1
                else f"{len(near)} of the {len(ranked) - 1} others are"
            )
            second = f"{who} within one standard deviation of it{also}."
    led = run.sign * (first.worst_20 - best.worst_20) > 0
    opening = f"{before if led else after} serves the {run.bottom} best{f'; {after} comes next' if led else ''}"
    return f"{opening}, with {value}: {_against(run, first, best, before)}.", second


def _against(run: ReportData, first: data.Overall, best: data.Overall, name: str) -> str:
    worst = Difference.of(run, first.worst_20, best.worst_20)
    mean = Difference.of(run, first.mean, best.mean)
    if not run.upwards:
        return f"{name} has {plain(worst.before)}; on average {plain(mean.after)} against {plain(mean.before)}"
    start = f"{worst.points} points {'more' if worst.gain > 0 else 'less'} than {name}"
    if worst.negligible:
        start = f"as {name} does"
    if mean.negligible:
        return f"{start}, at the same average"
    return f"{start}; the average {'gains' if mean.gain > 0 else 'gives up'} {mean.points}"


def cautions(run: ReportData) -> tuple[str, ...]:
    """List what a reader must know before believing the verdict, the most important first."""
    found: list[str] = []
    if run.split == "train" and run.overall:
        found.append(
            "Nothing was held out: all numbers are about the rows trained on, and new rows may fare worse."
        )
    found += run.written.get("cautions") or ()
    found += [_few_rows(run), _one_label(run), _noise(run), _chance(run), drift(run)]
    if run.kind != "compare":
        main = [m for m in run.models if m.role] or run.models[:1]
        found += [_proof(run, model) for model in main]
    if run.privacy is not None:
        found += run.privacy.cautions(
            {s.client: s.train_rows for scores in run.scores.values() for s in scores}
        )
    return tuple(filter(None, found))


def uncertain(run: ReportData, score: Score) -> bool:
    """Return whether a client has too few held-out rows for its number to mean much."""
    return run.split == "test" and score.test_rows is not None and score.test_rows < FEW


def _main_scores(run: ReportData) -> tuple[Score, ...]:
    """Return the scores of the model after; of the first that has some where there is none."""
    model = run.role("after") or next((name for name in run.names if name in run.scores), None)
    return run.scores[model] if model else ()


def _worst_fifth(run: ReportData, scores: Iterable[Score]) -> list[Score]:
    known = sorted(
        (s for s in scores if s.value is not None), key=lambda s: run.sign * (s.value or 0.0)
    )
    return known[: a_fifth(len(known))]


def _few_rows(run: ReportData) -> str:
    scores = _main_scores(run)
    few = [s for s in scores if uncertain(run, s)]
    if not few:
        return ""
    worst = [s for s in _worst_fifth(run, scores) if uncertain(run, s)]
    whole = f"All {len(few)} {plural(run.word)}" if len(few) == len(scores) > 1 else ""
    who = whole or f"{several(len(few), run.word)} of {len(scores)}"
    sentence = f"{who} {'has' if len(few) == 1 else 'have'} fewer than {FEW} test rows (marked †)"
    if worst and run.upwards and (rows := worst[0].test_rows):
        return (
            f"{sentence}: at {brief(worst[0].client)}, which is served among the worst, "
            f"one row is {100 / rows:.3g} points."
        )
    return f"{sentence}: {'its number is' if len(few) == 1 else 'their numbers are'} uncertain."


def _one_label(run: ReportData) -> str:
    """Warn where giving every row of a client the same label would be right as often."""
    if not run.upwards or run.kind not in ("train", "path"):
        return ""
    rows: dict[str, list[int]] = {}
    for row in run.partition:
        rows.setdefault(row["client"], []).append(row[f"{run.split}_rows"])
    most = {client: max(found) / sum(found) for client, found in rows.items() if any(found)}
    known = {s.client: s.value for s in _main_scores(run) if s.value is not None}
    alike = [
        client for client, value in known.items() if client in most and value <= most[client] + 1e-9
    ]
    if not alike:
        return ""
    who = brief(alike[0]) if len(alike) == 1 else f"{len(alike)} of {len(known)} {plural(run.word)}"
    return f"At {who}, one label for every row would be right at least as often: accuracy says little there."


def _noise(run: ReportData) -> str:
    tested = run.tested.values()
    if not tested:
        return ""
    clear = sum(tested)
    if not clear and not run.verdict:  # the headline says so
        return ""
    changes = f"change in {run.measure} is" if clear < 2 else f"changes in {run.measure} are"
    who = f"{clear or 'no'} {changes} clear of noise{' (marked *)' if clear else ''}"
    fair = (
        f"From “{brief(run.pair[0])}” to “{brief(run.pair[1])}”: of"
        if run.joining and run.pair
        else "Of"
    )
    return f"{fair} {len(tested)} {plural(run.word)}, {who}."


def _chance(run: ReportData) -> str:
    """Warn of a net change of fewer than four rows: McNemar's test cannot tell it from chance."""
    if not run.pair or run.kind == "compare" or not run.upwards or run.split != "test":
        return ""
    before, after = run.pair
    scores = run.scores[after]
    if any(s.clear is not None or s.test_rows is None or s.value is None for s in scores):
        return ""
    rows = sum(s.test_rows or 0 for s in _worst_fifth(run, scores))
    moved = abs(run.overall[after].worst_20 - run.overall[before].worst_20) * rows
    if not 0.5 <= moved < CLEAR:
        return ""
    about = "one" if moved < 1.5 else "two" if moved < 2.5 else "three" if moved < 3.5 else "four"
    return (
        f"For the {run.bottom}, that is about {about} of {rows} test rows: chance could do as much. "
        f"More held-out rows would tell."
    )


def _proof(run: ReportData, model: data.ModelSummary) -> str:
    name = f"The model “{model.name}”" if len(run.models) > 1 else "The model"
    if model.useless and model.status not in ("running", "paused", "failed"):
        return f"{name} has a useless certificate: {useless(model)}."
    if model.status in ("converged", ""):
        return (
            ""
            if model.certificate is not None or not model.status
            else f"{name} has no certificate."
        )
    if model.status in ("running", "paused", "failed"):
        return ""  # the run's own sentence is among the remarks
    if run.privacy is not None and model.status == "round limit":
        return (
            f"How far {name[0].lower()}{name[1:]} is from the optimum is not known: noise hides it."
        )
    if model.certificate is None:
        return f"{name} is not converged ({model.status}), and how far it is from the optimum is not known."
    return f"{name} is not converged ({model.status}), but proven within {small(model.certificate)} of the optimum."


def useless(model: data.ModelSummary) -> str:
    """Say that a proven gap proves nothing; empty where it does."""
    if not model.useless:
        return ""
    return f"the proven gap, {plain(model.certificate)}, is larger than the objective itself, {plain(model.value)}"


def answers(run: ReportData) -> tuple[tuple[str, str], ...]:
    """Answer the five questions, as far as the run can: who gains, how much, what to do, whom it costs, how sure."""
    if run.kind == "compare":
        return ()
    found = _joined(run, run.joining) if run.joining else _paired(run) if run.pair else {}
    if run.path and not run.pair:
        found = {"do": f"Keep “{brief(str(run.path['knee']))}”, which is suggested."}
    found = {**found, "sure": _sure(run), **run.answers}
    return tuple((question, found[name]) for name, question in QUESTIONS.items() if found.get(name))


def _joined(run: ReportData, found: data.JoiningReport) -> dict[str, str]:
    """Answer by what joining brings."""
    paying = found.paying
    shown = CALLED.get(found.shown, found.shown)
    words = plural(run.word)
    gain = paying["yes"]
    lose = paying["no"]
    rest = len(paying["within noise"])
    noise = (
        f"; for {'the other' if gain or lose else 'all'} {several(rest, run.word)} it is within noise"
        if rest
        else ""
    )
    who = f"Nobody clearly: with {shown}, every difference from alone is within noise."
    if gain or lose:
        start = f"{_some(gain)}, clearly, against training alone" if gain else "Nobody clearly"
        who = f"{start}{noise}."
    overall = found.overall.get(found.shown)
    much = ""
    if overall is not None:
        clear = "within noise" if overall.pays == "within noise" else "clear of noise"
        much = f"With {shown} the mean loss on held-out rows is {overall.than('alone')} ({overall.range}): {clear}."
    last = found.order[-1]
    worst = -found.gain(last)[0]
    cost = f"Nobody: no {run.word} has a higher loss than alone."
    if lose:
        cost = f"{_some(lose[::-1])}: with {shown} clearly worse off than alone, by up to {percent(worst)}."
    elif worst >= NEGLIGIBLE:
        cost = (
            f"Nobody clearly. The most is {percent(worst)} at {brief(last)}, which is within noise."
        )
    return {
        "who": who,
        "much": much,
        "do": DO[found.recommendation].format(word=run.word, words=words),
        "cost": cost,
    }


def _paired(run: ReportData) -> dict[str, str]:
    """Answer by the change from the model before to the one after."""
    assert run.pair is not None
    before, after = run.pair
    gain = run.gains(before, after)
    judged = run.tested
    order = sorted(gain, key=lambda c: -gain[c])
    better = [c for c in order if gain[c] > 0]
    worse = [c for c in reversed(order) if gain[c] < 0]
    clearly = [[c for c in some if judged.get(c)] for some in (better, worse)]
    names = f"“{brief(after)}” against “{brief(before)}”"
    count = f"{len(better)} of {several(len(order), run.word)} do better and {len(worse)} worse, {names}"
    who = (
        f"{count}; whether that is noise was not tested."
        if not judged
        else (
            f"{_some(clearly[0])}, clearly: {names}." if clearly[0] else f"Nobody clearly, {names}."
        )
    )
    largest = (
        f"The largest loss is {_size(run, gain[worse[0]])} at {brief(worse[0])}" if worse else ""
    )
    cost = (
        f"Nobody: no {run.word} does worse."
        if not worse
        else (
            f"{_some(clearly[1])}, clearly, by up to {_size(run, gain[clearly[1][0]])}."
            if clearly[1]
            else f"Nobody clearly. {largest}, within noise."
            if judged
            else f"{largest}."
        )
    )
    do = f"Weigh it: “{brief(after)}” helps some and costs others."
    if judged and not clearly[0]:
        do = f"Keep “{brief(before)}”: no gain of “{brief(after)}” is clear of noise."
    elif not clearly[1] and (judged or not worse):
        do = (
            f"Use “{brief(after)}”: it costs nobody clearly."
            if judged
            else f"Use “{brief(after)}”."
        )
    if run.path:
        unclear = "; no gain is clear of noise" if judged and not clearly[0] else ""
        do = f"Use “{brief(after)}”, which is suggested{unclear}."
    clear = sum(judged.values())
    sure = (
        "not tested"
        if not judged
        else f"{clear or 'none'} of {several(len(judged), 'change')} clear of noise"
    )
    fifth, mean = run.moved(before, after)
    much = f"The {run.bottom} {fifth}, the mean over {plural(run.word)} {mean}; {sure}."
    return {"who": who, "much": much, "do": do, "cost": cost}


def _sure(run: ReportData) -> str:
    """Say what is proven of the run's models."""
    models = [m for m in run.models if m.role] or [*run.models[-1:]]
    if any(model.status in ("running", "paused", "failed") for model in models):
        return ""
    if run.privacy is not None:
        return "Nothing is proven: noise hides how close the model is to the optimum."
    if any(model.certificate is None for model in models):
        return "Nothing is proven: the method has no certificate here."
    worst = max(models, key=lambda m: (m.certificate or 0.0) / (m.value or 1.0))
    if worst.useless:
        return f"Not at all: {useless(worst)}, so the certificate is useless."
    share = (
        ""
        if not worst.value
        else f", {percent((worst.certificate or 0.0) / worst.value)} of what is minimised"
    )
    which = (
        " and ".join(f"“{brief(m.name)}”" for m in models) if len(run.models) > 1 else "the model"
    )
    return (
        f"Proven for {which}: on the rows trained on, no model of this kind does better by more than "
        f"{small(worst.certificate)}{share}. How it does on new rows is measured, not proven."
    )


def meanings(run: ReportData) -> str:
    """Say what the parameters of the run's objectives mean."""
    told = [
        m.objective for m in run.models if m.strength is not None or not run.path
    ]  # a path's ends have none
    found = [said for name, said in MEANINGS.items() if any(f"{name}=" in one for one in told)]
    return "".join(f"{sentence}. " for sentence in found)


def _some(names: list[str]) -> str:
    """Name the first few."""
    shown = [brief(name) for name in names[: NAMED if len(names) > NAMED + 1 else NAMED + 1]]
    shown += [f"{len(names) - len(shown)} more"] if len(names) > len(shown) else []
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _size(run: ReportData, gain: float) -> str:
    return f"{100 * abs(gain):.1f} points" if run.upwards else plain(abs(gain))
