"""What a reader must know before believing the verdict."""

from __future__ import annotations

from scaffpd.metrics import a_fifth
from scaffpd.report.formats import brief, plural, several, small
from scaffpd.report.story import FEW, Model, Score, Story
from scaffpd.report.words import bottom

CLEAR = 4.0  # rows: z = rows / √(rows that changed sides) ≤ √rows, so fewer are never clear at two deviations


def cautions(story: Story) -> tuple[str, ...]:
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


def _privacy(story: Story) -> tuple[str, ...]:
    if story.privacy is None:
        return ()
    rows = {s.client: s.train_rows for scores in story.scores.values() for s in scores}
    return story.privacy.cautions(rows)


def _main(story: Story) -> list[Model]:
    if story.kind == "compare":
        return []
    return [m for m in story.models if m.role] or list(story.models[:1])


def _training(story: Story) -> str:
    if story.split != "train" or not story.overall:
        return ""
    return "Nothing was held out: all numbers are about the rows trained on, and new rows may fare worse."


def uncertain(story: Story, score: Score) -> bool:
    """Whether a client has too few held-out rows for its number to mean much."""
    return story.split == "test" and score.test_rows is not None and score.test_rows < FEW


def _few_rows(story: Story) -> list[str]:
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


def _noise(story: Story) -> list[str]:
    after = story.role("after")
    judged = [s for s in story.scores.get(after.name, ()) if s.clear is not None] if after else []
    if not judged:
        return []
    clear = sum(bool(s.clear) for s in judged)
    who = "no" if clear == 0 else str(clear)
    changes = f"change in {story.measure} is" if clear < 2 else f"changes in {story.measure} are"
    return [f"Of {len(judged)} {plural(story.word)}, {who} {changes} clear of noise{' (marked *)' if clear else ''}."]


def _majority(story: Story) -> str:
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


def _chance(story: Story) -> str:
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


def _proof(story: Story, model: Model) -> str:
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
