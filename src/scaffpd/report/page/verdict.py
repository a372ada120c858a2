"""The verdict: what to do, what changes for whom, and what to be careful about."""

from __future__ import annotations

from collections.abc import Sequence

from scaffpd.numbers import brief, called, capital, plain, plural, several, small
from scaffpd.objectives import OBJECTIVES
from scaffpd.report.page.tables import FEW, uncertain
from scaffpd.report.record import PrivacyRecord, RunRecord
from scaffpd.study.verdict import ALONE, CONSTANT, some
from scaffpd.training.metrics import NO, NOISE, YES

QUESTIONS = {
    "do": "What to do?",
    "who": "Who gains or loses?",
    "much": "How much, how sure?",
    "fair": "What of fairness?",
    "late": "Who joins later?",
    "sure": "What is proven?",
}
MEANINGS = {kind.parameter: kind.meaning for kind in OBJECTIVES.values() if kind.meaning}
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
    """State the result: the recommendation first, then what it rests on."""
    return [*_stated(run), *(run.newcomers.sentences(run.word) if run.newcomers else ())]


def _stated(run: RunRecord) -> list[str]:
    if run.joining is not None:
        return run.joining.sentences(run.task, run.word)
    main = run.pair[1] if run.pair else run.main
    one = main.overall
    if one is None:
        return ["There is no result yet.", run.main.message or "The run has not ended."]
    worst = f"{brief(one.worst_client)} with {run.measure.written(one.worst)}"
    served = f"On {run.scored_rows}, {worst} is served worst by “{brief(main.name)}”"
    if run.pair and (before := run.pair[0].overall):
        was, now = (f"“{brief(model.name)}”" for model in run.pair)
        moved = run.measure.moved
        worst = f"{run.measure.subject}the {run.bottom} {moved(before.worst_20, one.worst_20)}"
        change = f"{worst}; the average {moved(before.mean, one.mean)}"
        return [capital(f"with {now} in the place of {was}, {change}."), f"{served}."]
    suggested = [f"Suggested: {run.path.why}"] if run.path else []
    return [*suggested, f"{served}; the mean is {run.measure.written(one.mean)}."]


def asked(run: RunRecord) -> str:
    if run.joining is None:
        return run.title
    goal = run.reading.target if run.reading else ""
    what = f"predict “{goal}”" if goal else "predict times" if run.curves else "train"
    many = several(len(run.clients), run.word)
    return f"{run.title.split(':')[0]}: should {many} {what} together, or alone?"


def answers(run: RunRecord) -> dict[str, str]:
    """Answer the questions of a reader who knows no optimisation, as far as the run can."""
    paying = run.paying
    # a run that has measured what joining brings begins with its advice
    do = f"Use “{brief(run.path.knee)}”, which is suggested." if run.path else ""
    found = {"do": do, "much": _much(run), "sure": sure(run)}
    if any(paying.values()):
        clear = {"Clear gains": YES, "Clear losses": NO}
        said = [
            f"{name}: {_some(paying[one], run.word) or 'nobody'}." for name, one in clear.items()
        ]
        quiet = len(paying[NOISE])
        found["who"] = " ".join(
            said + [f"Within noise: {quiet} of {len(run.clients)}."] * bool(quiet)
        )
    if run.joining and run.newcomers:
        found["late"] = " ".join(run.newcomers.sentences(run.word))
    if run.joining and run.joining.fair:
        found["fair"] = run.joining.fairness(run.task, run.word)
    return {question: found[name] for name, question in QUESTIONS.items() if found.get(name)}


def _much(run: RunRecord) -> str:
    """Give the change of the mean and of the worst-served fifth."""
    if run.joining:
        return f"{run.joining.much(run.task, run.word)}."
    if run.pair is None:
        return ""
    ends = [one.overall for one in run.pair]
    texts = [
        f"the {what} goes from {' to '.join(run.measure.written(getattr(e, name)) for e in ends)}"
        for what, name in (("mean", "mean"), (run.bottom, "worst_20"))
    ]
    return capital(f"{', '.join(texts)}; whether that is noise was not tested.")


def _some(names: Sequence[str], word: str) -> str:
    return some([called(name, word) for name in names])


def sure(run: RunRecord) -> str:
    """Say what is proven of the model that is recommended, else of the run's main model."""
    main = run.main
    if main.status in ("running", "paused", "failed"):
        return ""
    name = run.joining.recommendation if run.joining else main.name
    if name == CONSTANT:
        return "A constant answer needs no proof: it is counted, not trained."
    main = run.model(name) if name in run.names else main
    gap = run.joining.certificates.get(name) if run.joining else main.certificate
    called = f"“{brief(name)}”"
    if gap is None:
        end = f"{main.status} after {several(round(main.rounds or 0), 'round')}"
        return f"Nothing is proven of {called}: it has no certificate ({end})."
    if name == main.name and main.vacuous:
        return (
            f"Nothing is proven of {called}: the certified gap, {small(gap)}, is larger than the "
            f"objective itself, {plain(main.value)}."
        )
    each = f", at every {run.word}" if name == ALONE else ""
    honest = "This holds if all silos keep to the protocol. " if run.kind == "deploy" else ""
    return (
        f"{called} is the best for the rows that it learnt from, to within {small(gap)} of what it "
        f"minimises{each}. {honest}How it does on new rows is measured, not proven."
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
    scores = run.main.clients
    few = sum(uncertain(run, score) for score in scores)
    if few:
        found.append(
            f"† Fewer than {FEW} test rows ({few} of {several(len(scores), run.word)}): uncertain."
        )
    if run.task.unscored:
        rows = run.score_rows(run.main.name)
        known = [c for c in run.clients if c not in rows or run.measure.name in rows[c].values]
        none = [
            c for c in run.clients if c not in (run.joining.by_client if run.joining else known)
        ]
        if none:
            word = run.word if len(none) == 1 else plural(run.word)
            found.append(run.task.unscored.format(f"{word} {', '.join(none)}"))
    if run.privacy is not None:
        found += [SEEDED] if run.privacy.seeded else []
        found.append(NOT_COVERED if run.privacy.scored else SENT)
    return found


def meanings(run: RunRecord) -> str:
    """Say what the parameters of the run's objectives mean."""
    # the ends of a path are the average and the worst case, which have no strength
    goals = [m.objective for m in run.models if m.strength is not None or not run.path]
    found = [text for name, text in MEANINGS.items() if any(f"{name}=" in goal for goal in goals)]
    return "".join(f"{text}. " for text in found)


def promise(privacy: PrivacyRecord) -> str:
    """Write the largest (ε, δ) of a client, and the unit that it protects."""
    scope = "" if privacy.models < 2 else f", all {privacy.models} models together"
    return f"{privacy} for every record{scope}."
