"""The verdict says what the numbers say: gains, losses, nothing, few rows, no proof."""

from dataclasses import replace

import numpy as np
import pytest

from cases.records import model, record, rounds
from scaffpd.federation import ClientScores
from scaffpd.numbers import brief, plain, plural, small, whole
from scaffpd.report.page.tables import client_lines, joining_table
from scaffpd.report.page.verdict import (
    NOT_COVERED,
    SEEDED,
    answers,
    cautions,
    promise,
    sure,
    verdict,
)
from scaffpd.report.record import (
    Overall,
    PathRecord,
    PrivacyRecord,
)
from scaffpd.study.verdict import ClientRow, Gain, ModelRow, Verdict
from scaffpd.tasks.base import RMSE
from scaffpd.tasks.classification import ACCURACY
from scaffpd.training.metrics import Summary


def story(before, after, *, rows=500, names=None, measure="accuracy", **about):
    """Two models with these scores at every client."""
    names = names or [f"site {i}" for i in range(len(before))]
    upwards = measure == "accuracy"
    old = dict(zip(names, before, strict=True))
    new = dict(zip(names, after, strict=True))
    return record(
        model("average", old, role="before", upwards=upwards, rows=rows),
        model("fair", new, role="after", upwards=upwards, rows=rows),
        measure=measure,
        **about,
    )


INSTEAD = "With “fair” in the place of “average”"
TEN = [0.5, 0.6, *[0.9] * 8]


def moved(worst, rest):
    return [0.5 + worst, 0.6 + worst, *[0.9 + rest] * 8]


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (moved(0.112, -0.038), "gains 11.2 points; the average loses 0.8 points."),
        (moved(-0.03, 0.02), "loses 3.0 points; the average gains 1.0 points."),
        (moved(0.0004, 0.0), "stays where it was; the average stays where it was."),
        (moved(0.0006, 0.0), "gains 0.1 points; the average stays where it was."),
    ],
)
def test_gains_and_losses(after, sentence):
    said = verdict(story(TEN, after))[0]
    assert said == f"{INSTEAD}, the worst-served fifth of clients {sentence}"


def test_errors_fall_and_rise():
    """And of two clients the worst-served fifth is one."""
    told = story([60.0, 40.0], [54.0, 47.0], measure="rmse", word="decade")
    sentence = "falls by 10.0 %; the average rises by 1.0 %."
    assert verdict(told)[0] == f"{INSTEAD}, the error of the worst-served decade {sentence}"


def test_rows_that_were_trained_on_are_called_so():
    told = story(TEN, TEN)
    models = [
        m.model_copy(
            update={
                "clients": [s.model_copy(update={"train_score": s.test_score}) for s in m.clients]
            }
        )
        for m in told.models
    ]
    trained = record(*models, split="train")
    served = "On rows trained on, site 0 with 50.0\u00a0% is served worst by “fair”."
    assert verdict(trained)[1] == served
    assert cautions(trained)[0].startswith("Nothing was held out")


def test_one_model_is_not_compared():
    one = record(model("fair", {"a": 0.5, "b": 0.9}))
    assert verdict(one) == [
        "On held-out rows, a with 50.0\u00a0% is served worst by “fair”; the mean is 70.0\u00a0%."
    ]
    waits = model("deployed", {}, message="It waits.", status="paused")
    assert verdict(record(waits)) == ["There is no result yet.", "It waits."]


def test_a_path_is_about_its_knee():
    about = PathRecord(parameter="rho", objective="ChiSquare", knee="average", why="w.", rounds=3)
    told = story(TEN, moved(0.1, 0))
    models = [told.models[0], told.models[1].model_copy(update={"role": ""})]
    stays = record(*models, kind="path", path=about)
    assert verdict(stays)[0] == "Suggested: w."
    assert answers(stays)["What to do?"] == "Use “average”, which is suggested."


def test_the_table_paints_no_change_as_no_gain():
    told = story([0.5, 0.6, 0.7, 0.8], [0.5001, 0.65, 0.6, 0.9])
    cells = [(line.change.text, line.change.tone) for line in client_lines(told)]
    assert cells == [("0.0", ""), ("+5.0", "gain"), ("−10.0", "loss"), ("+10.0", "gain")]
    errors = story([2.0, 1.0], [1.5, 1.25], measure="rmse")
    cells = [(line.change.text, line.change.tone) for line in client_lines(errors)]
    assert cells == [("−0.500", "gain"), ("+0.250", "loss")]


def joined(gains, recommendation="personal"):
    """What joining brings these clients: gains of personal models over alone, half an interval."""
    rows = []
    for client, (gain, half) in gains.items():
        for name, value in (("alone", None), ("average", 0.0), ("personal", gain)):
            over = {}
            if value is not None:
                over["alone"] = Gain(value=value, low=value - half, high=value + half)
            loss = 1.0 - (value or 0.0)
            about = {"client": client, "model": name, "train_rows": 9, "test_rows": 9}
            pays = "within noise"
            if value is not None and abs(value) > half:
                pays = "yes" if value > 0 else "no"
            about |= {"test_loss": loss, "gains": over, "pays": {"alone": pays}}
            rows.append(ClientRow(**about))
    mean, worst = (
        dict.fromkeys(("alone", "average"), gain)
        for gain in (Gain(0.1, -0.1, 0.3), Gain(0.5, 0.4, 0.6))
    )
    overall = [
        ModelRow(m, loss, 0.9, mean, worst)
        for m, loss in (("alone", 1.0), ("average", 1.1), ("personal", 0.9))
    ]
    return Verdict(recommendation, "too few rows", 0.2, overall, rows)


def test_the_answers_are_those_of_what_joining_brings():
    gains = {"a": (0.3, 0.1), "b": (0.2, 0.1), "j": (-0.04, 0.01)}
    gains |= dict.fromkeys("cdefghi", (0.01, 0.1))
    found = replace(joined(gains), certificates={"personal": 1e-7})
    told = story(TEN, TEN, names=[*"abcdefghij"], word="site", joining=found)
    assert verdict(told) == found.sentences(told.task, "site")
    assert list(answers(told).values()) == [
        "Clear gains: a and b. Clear losses: j. Within noise: 7 of 10.",
        "With personal models the loss is 10 % lower than alone (95 % interval: 10 % higher to "
        "30 % lower) in the mean over 10 sites, for the worst-served fifth 50 % lower (95 % "
        "interval: 40 to 60 %).",
        "“personal” is the best for the rows that it learnt from, to within 1.0 · 10⁻⁷ of what "
        "it minimises. How it does on new rows is measured, not proven.",
    ]


def test_noise_is_called_noise_in_every_answer():
    gains = {c: (0.05 - 0.02 * i, 0.5) for i, c in enumerate("abcdefghij")}
    found = joined(gains, "alone")
    who, *_ = answers(story(TEN, TEN, names=[*"abcdefghij"], joining=found)).values()
    assert who == "Clear gains: nobody. Clear losses: nobody. Within noise: 10 of 10."


def test_what_is_proven_is_proven_of_the_model_that_is_recommended():
    names = {"a": 0.5, "b": 0.9}
    models = [model(name, names) for name in ("average", "fair", "personal")]
    found = joined(dict.fromkeys(names, (0.1, 0.2)))
    proofs = {"alone": 1e-12, "average": 2e-7, "fair": 3e-7, "personal": 4e-7}
    for advice, gap in proofs.items():
        about = {"recommendation": advice, "certificates": proofs}
        said = sure(record(*models, joining=replace(found, **about)))
        assert said.startswith(f"“{advice}” is the best ")
        assert f" to within {small(gap)} of what it minimises" in said
        assert (", at every client." in said) == (advice == "alone")
    nothing = replace(found, recommendation="constant", certificates=proofs)
    assert "needs no proof" in sure(record(*models, joining=nothing))
    unknown = replace(found, recommendation="alone", certificates={})
    assert sure(record(*models, joining=unknown)).startswith("Nothing is proven of “alone”")


@pytest.mark.parametrize(
    ("task", "values"),
    [("classification", [100 * np.exp(-1.0), 100 * np.exp(-0.7)]), ("counts", [1.0, 0.7])],
)
def test_the_table_is_better_exactly_where_the_loss_is_lower(task, values):
    found = joined({"a": (0.3, 0.1)})
    run = record(model("personal", {"a": 0.5}, rows=20), joining=found, task=task)
    table = joining_table(run, found)
    (names, cells) = table.rows[0]
    assert names == ("a †",)
    assert [cells[0].value, cells[2].value] == pytest.approx(values)
    texts = [cell.text.replace("\u00a0", " ") for cell in cells[3:]]
    assert texts[0] == "+30 %*"


def test_without_joining_the_change_from_before_to_after_answers():
    told = story([0.7, 0.8, 0.9], [0.75, 0.8, 0.85], names=["va", "b", "c"], word="hospital")
    said = answers(told)
    assert not {"What to do?", "Who gains or loses?"} & said.keys()
    assert "from 70.0\u00a0% to 75.0\u00a0%" in said["How much, how sure?"]


def changed(told, **changes):
    return record(told.models[0], told.models[1].model_copy(update=changes))


def test_what_is_proven_is_said():
    told = story(TEN, moved(0.1, 0))
    assert cautions(told) == []
    assert sure(changed(told, certificate=None)).startswith("Nothing is proven of “fair”")
    assert "What is proven?" not in answers(changed(told, status="paused"))
    # a gap above the objective itself proves nothing: losses, and so the optimum, are at least zero
    history = rounds(61.0, losses=[0.5] * 10, weights=[0.1] * 10)
    empty = sure(changed(told, certificate=61.0, history=history))
    assert "is larger than the objective itself, 0.500" in empty


def test_few_rows_and_the_limits_of_privacy_are_warned_of():
    few = cautions(story(TEN, moved(0.1, 0), rows=20))
    assert few[0] == "† Fewer than 30 test rows (10 of 10 clients): uncertain."
    about = {"epsilon": 3.9996, "delta": 1e-5, "models": 2}
    both = "(ε, δ) = (4.00, 1e-05) for every record, all 2 models together."
    assert promise(PrivacyRecord(**about)) == both
    assert cautions(story(TEN, TEN, privacy=PrivacyRecord(**about))) == [NOT_COVERED]
    seeded = PrivacyRecord(**about, seeded=True)
    assert cautions(story(TEN, TEN, privacy=seeded)) == [SEEDED, NOT_COVERED]


def test_the_worst_fifth_is_that_of_the_metrics():
    values = np.random.default_rng(0).random(23)
    names = tuple(map(str, range(23)))
    found = Overall.of(dict(zip(names, values, strict=True)), True)
    expected = Summary.of(ClientScores(names, -values, values, np.ones(23, int))).score
    assert (found.mean, found.worst_20) == pytest.approx((expected.mean, expected.worst_20))
    assert (found.worst, found.worst_client) == (expected.worst, expected.worst_client)


def test_numbers_as_they_are_written():
    assert [ACCURACY.written(v) for v in (0.12345, None)] == ["12.3\u00a0%", "–"]
    assert [ACCURACY.change(v) for v in (0.0123, -0.02, 0.0001)] == ["+1.2", "−2.0", "0.0"]
    assert [RMSE.change(v) for v in (1.234, -0.5, 0.0)] == ["+1.23", "−0.500", "0"]
    values = (0.0, 0.00123, 0.5, 12.345, 123.45, 12345.6, -2.5)
    texts = ["0.000", "0.0012", "0.500", "12.35", "123.5", "12\u202f346", "−2.50"]
    assert [plain(v) for v in values] == texts
    assert [whole(v) for v in (8.0, 12.5, 100000)] == ["8", "12.50", "100\u202f000"]
    assert [small(v) for v in (3.2e-7, 0.0, None)] == ["3.2 · 10⁻⁷", "0", "–"]
    words = ("client", "country", "box", "day", "class", "epoch")
    assert " ".join(map(plural, words)) == "clients countries boxes days classes epochs"
    assert brief("x" * 100) == "x" * 47 + "…"
