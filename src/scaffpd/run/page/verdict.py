"""The verdict: what changes for whom, what to do, and what to be careful about."""

from __future__ import annotations

from collections.abc import Sequence

from scaffpd.numbers import brief, capital, measured, percent, plain, plural, several, small
from scaffpd.objectives import OBJECTIVES
from scaffpd.run.page.clients import FEW, uncertain
from scaffpd.run.page.predictions import drift
from scaffpd.run.record import (
    JoiningRecord,
    ModelRecord,
    Overall,
    PrivacyRecord,
    RunRecord,
)
from scaffpd.training.metrics import NO, NOISE, YES

NEGLIGIBLE = 0.0005  # 0.05 points of accuracy, or this share of an error
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
    "average": (
        "Join with one average model for all {words}: nothing more elaborate is clearly better."
    ),
    "alone": "Let every {word} train alone: joining is not clearly better.",
}
CALLED = {"personal": "personal models", "fair": "one fair model", "average": "one average model"}
NAMED = 3  # clients that a sentence names
MEANINGS = {kind.parameter: kind.meaning for kind in OBJECTIVES.values() if kind.meaning}
UNFINISHED = ("running", "paused", "failed")
SEEDED = (
    "Noise was drawn from a seed, to be repeated: whoever knows the seed can take it off, "
    "so nobody is protected."
)
NOT_COVERED = (
    "ε counts what was sent in training. The scores here, counts of rows and labels, categories, "
    "and the means, deviations and fills of columns (where no ranges are declared) are exact and "
    "not covered."
)
SENT = (
    "The losses here are those that silos have sent, and carry noise. Names and numbers of rows, "
    "labels, columns and categories, and sums over columns where no ranges are declared, are exact "
    "and not covered by ε."
)


def verdict(run: RunRecord) -> list[str]:
    """State the result in a sentence or two."""
    if run.verdict:
        return run.verdict
    if run.joining is not None:
        return [text for text in (run.joining.sentence, run.joining.details) if text]
    return one_for_all(run)


def one_for_all(run: RunRecord) -> list[str]:
    """Compare the model after with the one before, or describe the only one."""
    if run.kind == "runs" and "do" in run.answers:
        return [run.answers["do"]]
    if run.pair and run.pair[0].overall and run.pair[1].overall:
        before, after = run.pair[0].overall, run.pair[1].overall
        return [_headline(run, before, after), _worst_served(run, before, after)]
    one = run.main.overall
    if one is None:
        return ["There is no result yet.", run.models[0].message or "The run has not ended."]
    sentence = (
        f"The worst-served {run.word}, {brief(one.worst_client)}, has "
        f"{measured(one.worst, run.measure)}; "
        f"the mean over all is {measured(one.mean, run.measure)}."
    )
    if run.path:
        return [f"Suggested: {run.path.why}", sentence]
    return [sentence, "There is one model here, and nothing to compare it with."]


def _headline(run: RunRecord, before: Overall, after: Overall) -> str:
    where = ""
    if run.path:
        where = f"at {run.path.knee.replace(' ', chr(0xA0))}, which is suggested, "
    elif run.kind == "compare" and run.pair:
        where = f"{run.pair[1].name} against {run.pair[0].name}: "
    if run.split == "train":
        where += "on the rows trained on, "
    if run.tested and not any(run.tested.values()):
        where = f"no change is clear of noise: {where}"
    name = {"accuracy": "", "rmse": "the error of ", "loss": "the loss of "}[run.measure]
    worst = _moved(run, before.worst_20, after.worst_20)
    mean = _moved(run, before.mean, after.mean)
    return capital(f"{where}{name}the {run.bottom} {worst}; the average {mean}.")


def _moved(run: RunRecord, before: float, after: float) -> str:
    """Say how a number changes: in points of accuracy, or in percent of an error."""
    gain = run.sign * (after - before)
    scale = 1.0 if run.upwards else max(abs(before), abs(after))
    if abs(gain) < NEGLIGIBLE * scale:
        return "stays where it was"
    if run.upwards:
        # ties are rounded away from zero: sums in another order must not change the text
        points = f"{100 * abs(gain) * (1 + 1e-9):.1f} points"
        return f"{'gains' if gain > 0 else 'loses'} {points}"
    return f"{'falls' if gain > 0 else 'rises'} by {100 * abs(gain) / abs(before or 1.0):.1f} %"


def _worst_served(run: RunRecord, before: Overall, after: Overall) -> str:
    first = f"{brief(before.worst_client)} with {measured(before.worst, run.measure)}"
    last = f"{brief(after.worst_client)} with {measured(after.worst, run.measure)}"
    if first == last:
        return f"Served worst is {last}, before and after."
    return f"Served worst was {first}; now it is {last}."


def answers(run: RunRecord) -> dict[str, str]:
    """Answer five questions of a reader who knows no optimisation, as far as the run can."""
    if run.kind == "compare":
        return {}
    found: dict[str, str] = {}
    if run.joining:
        found = _joined(run, run.joining)
    elif run.pair:
        found = _paired(run, *run.pair)
    elif run.path:
        found = {"do": f"Keep “{brief(run.path.knee)}”, which is suggested."}
    found = {**found, "sure": _sure(run), **run.answers}
    return {question: found[name] for name, question in QUESTIONS.items() if found.get(name)}


def _joined(run: RunRecord, found: JoiningRecord) -> dict[str, str]:
    """Answer by what joining brings."""
    paying = found.paying
    gain, lose, rest = paying[YES], paying[NO], len(paying[NOISE])
    shown = CALLED.get(found.shown, found.shown)
    who = f"Nobody clearly: with {shown}, every difference from alone is within noise."
    if gain or lose:
        start = f"{_some(gain)}, clearly, against training alone" if gain else "Nobody clearly"
        others = f"; for the other {several(rest, run.word)} it is within noise" if rest else ""
        who = f"{start}{others}."
    much = ""
    if found.total is not None:
        clear = "within noise" if found.total.pays == NOISE else "clear of noise"
        words = f"{found.total.than('alone')} ({found.total.range})"
        much = f"With {shown} the mean loss on held-out rows is {words}: {clear}."
    last = found.order[-1]
    worst = -found.gain(last).value
    cost = f"Nobody: no {run.word} has a higher loss than alone."
    if lose:
        by = percent(worst)
        cost = f"{_some(lose[::-1])}: with {shown} clearly worse off than alone, by up to {by}."
    elif worst >= NEGLIGIBLE:
        most = f"The most is {percent(worst)} at {brief(last)}, which is within noise"
        cost = f"Nobody clearly. {most}."
    do = DO[found.recommendation].format(word=run.word, words=plural(run.word))
    return {"who": who, "much": much, "do": do, "cost": cost}


def _paired(run: RunRecord, before: ModelRecord, after: ModelRecord) -> dict[str, str]:
    """Answer by the change from the model before to the one after."""
    assert before.overall is not None
    assert after.overall is not None
    gain = run.gains(before, after)
    tested = run.tested
    order = sorted(gain, key=lambda client: -gain[client])
    better = [client for client in order if gain[client] > 0]
    worse = [client for client in reversed(order) if gain[client] < 0]
    clear_gain = [client for client in better if tested.get(client)]
    clear_loss = [client for client in worse if tested.get(client)]
    old, new = f"“{brief(before.name)}”", f"“{brief(after.name)}”"
    sure = f"{sum(tested.values()) or 'none'} of {several(len(tested), 'change')} clear of noise"
    if not tested:
        count = f"{len(better)} of {several(len(order), run.word)} do better, {len(worse)} worse"
        who = f"{count}, {new} against {old}; whether that is noise was not tested."
        sure = "not tested"
    else:
        who = f"{_some(clear_gain)}, clearly" if clear_gain else "Nobody clearly"
        who = f"{who}: {new} against {old}."
    cost = f"Nobody: no {run.word} does worse."
    if clear_loss:
        cost = f"{_some(clear_loss)}, clearly, by up to {_size(run, gain[clear_loss[0]])}."
    elif worse:
        largest = f"The largest loss is {_size(run, gain[worse[0]])} at {brief(worse[0])}"
        cost = f"Nobody clearly. {largest}, within noise." if tested else f"{largest}."
    do = f"Weigh it: {new} helps some and costs others."
    if run.path:
        unclear = "; no gain is clear of noise" if tested and not clear_gain else ""
        do = f"Use {new}, which is suggested{unclear}."
    elif tested and not clear_gain:
        do = f"Keep {old}: no gain of {new} is clear of noise."
    elif not clear_loss and (tested or not worse):
        do = f"Use {new}: it costs nobody{' clearly' if tested else ''}."
    ends = [
        f"{measured(a, run.measure)} → {measured(b, run.measure)}"
        for a, b in (
            (before.overall.worst_20, after.overall.worst_20),
            (before.overall.mean, after.overall.mean),
        )
    ]
    much = f"The {run.bottom} {ends[0]}, the mean over {plural(run.word)} {ends[1]}; {sure}."
    return {"who": who, "much": much, "do": do, "cost": cost}


def _some(names: Sequence[str]) -> str:
    """Name the first few."""
    shown = [brief(name) for name in names[: NAMED if len(names) > NAMED + 1 else NAMED + 1]]
    shown += [f"{len(names) - len(shown)} more"] if len(names) > len(shown) else []
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _size(run: RunRecord, gain: float) -> str:
    return f"{100 * abs(gain):.1f} points" if run.upwards else plain(abs(gain))


def _sure(run: RunRecord) -> str:
    """Say what is proven of the run's models."""
    models = [model for model in run.models if model.role] or run.models[-1:]
    if any(model.status in UNFINISHED for model in models):
        return ""
    if run.privacy is not None:
        return "Nothing is proven: noise hides how close the model is to the optimum."
    bare = [model for model in models if model.certificate is None]
    if bare:
        return f"Nothing is proven of “{brief(bare[0].name)}”: it has no certificate."
    worst = max(models, key=lambda m: (m.certificate or 0.0) / (m.value or 1.0))
    if worst.vacuous:
        gap = plain(worst.certificate)
        return (
            f"Not at all: the proven gap, {gap}, is larger than the objective itself, "
            f"{plain(worst.value)}, so the certificate says nothing."
        )
    share = ""
    if worst.value:
        share = f", {percent((worst.certificate or 0.0) / worst.value)} of what is minimised"
    which = " and ".join(f"“{brief(model.name)}”" for model in models)
    early = [model.status for model in models if model.status != "converged"]
    ended = f" (training ended early: {early[0]})" if early else ""
    return (
        f"Proven for {which}: on the rows trained on, no model of this kind does better by more "
        f"than {small(worst.certificate)}{share}{ended}. How it does on new rows is measured, "
        "not proven."
    )


def cautions(run: RunRecord) -> list[str]:
    """List what a reader must know before believing the verdict, the most important first."""
    found = []
    if run.split == "train" and run.scored:
        found.append(
            "Nothing was held out: all numbers are about the rows trained on, "
            "and new rows may fare worse."
        )
    found += run.cautions
    found += [_few_rows(run), _one_label(run), _noise(run), drift(run)]
    if run.privacy is not None:
        found += _privacy_cautions(run, run.privacy)
    return [text for text in found if text]


def _few_rows(run: RunRecord) -> str:
    scores = run.main.clients
    few = [score for score in scores if uncertain(run, score)]
    if not few:
        return ""
    who = f"{several(len(few), run.word)} of {len(scores)}"
    if len(few) == len(scores) > 1:
        who = f"All {len(few)} {plural(run.word)}"
    one = len(few) == 1
    have = f"{who} {'has' if one else 'have'} fewer than {FEW} test rows (marked †)"
    return f"{have}: {'its number is' if one else 'their numbers are'} uncertain."


def _one_label(run: RunRecord) -> str:
    """Warn where giving every row of a client the same label would be right as often."""
    known = [(s.client, run.value(s), s.majority) for s in run.main.clients]
    alike = [
        client
        for client, value, most in known
        if value is not None and most is not None and value <= most + 1e-9
    ]
    if not alike or not run.upwards:
        return ""
    who = f"{len(alike)} of {len(known)} {plural(run.word)}"
    if len(alike) == 1:
        who = brief(alike[0])
    return (
        f"At {who}, one label for every row would be right at least as often: "
        "accuracy says little there."
    )


def _noise(run: RunRecord) -> str:
    tested = run.tested
    clear = sum(tested.values())
    if not tested or run.pair is None or (not clear and not run.verdict):  # the headline says so
        return ""
    change = f"change in {run.measure} is" if clear < 2 else f"changes in {run.measure} are"
    pair = f"From “{brief(run.pair[0].name)}” to “{brief(run.pair[1].name)}”"
    mark = " (marked *)" if clear else ""
    count = f"{len(tested)} {plural(run.word)}, {clear or 'no'} {change}"
    return f"{pair}: of {count} clear of noise{mark}."


def meanings(run: RunRecord) -> str:
    """Say what the parameters of the run's objectives mean."""
    # the ends of a path are the average and the worst case, which have no strength
    goals = [m.objective for m in run.models if m.strength is not None or not run.path]
    found = [text for name, text in MEANINGS.items() if any(f"{name}=" in goal for goal in goals)]
    return "".join(f"{text}. " for text in found)


def promise(privacy: PrivacyRecord) -> str:
    """Write (ε, δ), the unit that it protects, and the smallest ε_i where clients differ."""
    together = "both" if privacy.models == 2 else f"all {privacy.models}"
    scope = "" if privacy.models < 2 else f", {together} models together"
    low = min(privacy.clients.values(), default=privacy.epsilon)
    same = f"{low:.2f}" == f"{privacy.epsilon:.2f}"
    least = "" if same else f"; the least of a client is {low:.2f}"
    pair = f"(ε, δ) = ({privacy.epsilon:.2f}, {privacy.delta:g})"
    return f"{pair} for every record{scope}{least}."


def _privacy_cautions(run: RunRecord, privacy: PrivacyRecord) -> list[str]:
    """List what the promise does not cover."""
    found = [SEEDED] if privacy.seeded else []
    rows = {score.client: score.train_rows for score in run.main.clients}
    many = [(client, n) for client, n in rows.items() if n and privacy.delta * n >= 1]
    for client, n in many[:1]:
        found.append(
            f"δ = {privacy.delta:g} is no less than one over the {n} rows of {client}: "
            "one of them may be given away."
        )
    return [*found, NOT_COVERED if privacy.scored else SENT]
