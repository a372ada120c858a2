"""The verdict says what the numbers say: gains, losses, nothing, few rows, no proof."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scaffpd.numbers import change, measured, plain, plural, small
from scaffpd.numbers import whole as count
from scaffpd.run.page.client_figures import _pairs
from scaffpd.run.page.data import (
    JoiningReport,
    ModelSummary,
    Overall,
    ReportData,
    Score,
    brief,
    overall,
)
from scaffpd.run.page.verdict import answers, cautions, meanings, verdict
from scaffpd.training.metrics import RelativeGain


def story(before, after, rows=500, measure="accuracy", names=None, **about):
    """Two models with these values at every client."""
    names = names or [f"site {i}" for i in range(len(before))]
    models = (
        ModelSummary("average", "before", status="converged", certificate=1e-7),
        ModelSummary("fair", "after", status="converged", certificate=1e-7),
    )
    scores = {
        model.name: tuple(
            Score(c, v, train_rows=rows, test_rows=rows) for c, v in zip(names, values, strict=True)
        )
        for model, values in zip(models, (before, after), strict=True)
    }
    totals = {name: overall(found, measure == "accuracy") for name, found in scores.items()}
    parts = {"kind": "train", "title": "t", "command": "", "split": "test", "word": "client"}
    return ReportData(
        **{
            **parts,
            "measure": measure,
            "models": models,
            "scores": scores,
            "overall": totals,
            **about,
        }
    )


FIFTH = "the worst-served fifth of clients"
TEN = [0.5, 0.6, *[0.9] * 8]


def moved(worst, rest):
    return [0.5 + worst, 0.6 + worst, *[0.9 + rest] * 8]


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (
            moved(0.112, -0.038),
            "The worst-served fifth of clients gains 11.2 points; the average gives up 0.8.",
        ),
        (
            moved(0.112, 0.0),
            "The worst-served fifth of clients gains 11.2 points; the average gains 2.2 too.",
        ),
        (
            moved(0.08, -0.02),
            "The worst-served fifth of clients gains 8.0 points; the average stays where it was.",
        ),
        (
            moved(-0.03, 0.02),
            "The worst-served fifth of clients loses 3.0 points; the average gains 1.0.",
        ),
        (
            moved(-0.03, 0.0),
            "The worst-served fifth of clients loses 3.0 points; the average loses 0.6.",
        ),
        (
            moved(0.0, 0.02),
            "The worst-served fifth of clients stays where it was; the average gains 1.6.",
        ),
        (
            moved(0.0, -0.02),
            "The worst-served fifth of clients stays where it was; the average loses 1.6.",
        ),
        (
            moved(0.0004, 0.0),
            f"Neither {FIFTH} nor the average moves: both change by less than 0.05 points.",
        ),
        (
            moved(0.0006, 0.0),
            "The worst-served fifth of clients gains 0.1 points; the average stays where it was.",
        ),
    ],
)
def test_gains_and_losses(after, sentence):
    assert verdict(story(TEN, after))[0] == sentence


def test_one_of_four_is_a_client_not_a_fifth():
    said = verdict(
        story(
            [0.7, 0.8, 0.9, 0.9],
            [0.76, 0.8, 0.9, 0.9],
            names=["va", "b", "c", "d"],
            word="hospital",
        )
    )
    assert said == (
        "The worst-served hospital gains 6.0 points; the average gains 1.5 too.",
        "Served worst is va, before with 70.0\u00a0% and after with 76.0\u00a0%.",
    )


def test_the_worst_served_may_change():
    said = verdict(story([0.7, 0.8, 0.9], [0.85, 0.75, 0.9], names=["va", "swiss", "c"]))
    assert said[1] == "Served worst was va with 70.0\u00a0%; now it is swiss with 75.0\u00a0%."
    few = verdict(story([0.75, 0.8, 0.9], [0.75, 0.8, 0.9], rows=4, names=["va", "swiss", "c"]))
    assert few[1] == "Served worst is va, before and after, with 75.0\u00a0% of 4 test rows."


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (
            [55.0, 40.0],
            "The error of the worst-served decade falls by 8.3 %; the average one falls by 5.0 %.",
        ),
        (
            [54.0, 47.0],
            "The error of the worst-served decade falls by 10.0 %; the average one rises by 1.0 %.",
        ),
        (
            [66.0, 40.0],
            "The error of the worst-served decade rises by 10.0 %; the average one rises by 6.0 %.",
        ),
        (
            [60.01, 40.0],
            "Neither the worst-served decade nor the average moves: both change by less than 0.05 %.",
        ),
    ],
)
def test_errors_fall_and_rise(after, sentence):
    assert verdict(story([60.0, 40.0], after, measure="rmse", word="decade"))[0] == sentence


def test_training_rows_are_named():
    told = story(TEN, moved(0.1, 0), split="train")
    assert verdict(told)[0].startswith("On the rows trained on, the worst-served fifth")
    assert cautions(told)[0].startswith("Nothing was held out")


def test_a_path_names_its_knee():
    told = story(TEN, moved(0.1, 0), kind="path", path={"knee": "ρ = 0.1"})
    assert verdict(told)[0].startswith(
        "At ρ\u00a0=\u00a00.1, which is suggested, the worst-served fifth of clients gains 10.0 points"
    )


def test_on_a_path_the_headline_and_what_to_do_agree():
    told = story(
        TEN,
        moved(0.1, 0),
        kind="path",
        path={"knee": "fair", "why": "fair, chosen on training rows."},
    )
    assert dict(answers(told))["What to do?"] == "Use “fair”, which is suggested."
    unclear = replace(
        told,
        scores={n: tuple(replace(s, clear=False) for s in own) for n, own in told.scores.items()},
    )
    assert (
        dict(answers(unclear))["What to do?"]
        == "Use “fair”, which is suggested; no gain is clear of noise."
    )
    why = "average; fair, chosen on training rows, is no better on held-out rows."
    models = (told.models[0], replace(told.models[1], role=""))
    kept = replace(told, models=models, path={"knee": "average", "why": why})
    assert verdict(kept)[0] == f"Suggested: {why}"
    assert dict(answers(kept))["What to do?"] == "Keep “average”, which is suggested."


def test_no_change_is_painted_as_no_gain():
    told = story([0.5, 0.6, 0.7], [0.5001, 0.65, 0.6])
    tones = {row["client"]: (row["change"], row["tone"]) for row in _pairs(told)}
    assert tones == {
        "site 0": ("0.0", "quiet"),
        "site 1": ("+5.0", "gain"),
        "site 2": ("−10.0", "loss"),
    }


def test_a_folder_may_bring_its_own_verdict():
    assert verdict(story(TEN, TEN, verdict=("One.", "Two."))) == ("One.", "Two.")


def test_one_model_is_not_compared():
    told = story(TEN, TEN)
    one = replace(
        told,
        models=told.models[1:2],
        scores={"fair": told.scores["fair"]},
        overall={"fair": told.overall["fair"]},
    )
    one = replace(one, models=(replace(one.models[0], role=""),))
    assert (
        "site 0, is right on 50.0\u00a0% of its held-out rows; the average is 83.0\u00a0%."
        in verdict(one)[0]
    )
    nothing = replace(
        one, scores={}, overall={}, models=(replace(one.models[0], message="It waits."),)
    )
    assert verdict(nothing) == ("There is no result yet.", "It waits.")


def test_comparisons_name_the_best_and_who_is_as_good():
    told = story(TEN, TEN, kind="compare")
    totals = {
        "average": Overall(0.80, 0.60, 0.5, ""),
        "fair": Overall(0.79, 0.70, 0.6, "", worst_20_sd=0.02),
    }
    first, second = verdict(replace(told, overall=totals))
    assert first == (
        "fair serves the worst-served fifth of clients best, with 70.0 ± 2.0 %: 10.0 points more than average; "
        "the average gives up 1.0."
    )
    assert second == "No other method is within one standard deviation of it."
    close = {**totals, "average": Overall(0.79, 0.69, 0.5, "")}
    assert (
        verdict(replace(told, overall=close))[1]
        == "average is within one standard deviation of it."
    )
    behind = {**totals, "average": Overall(0.79, 0.75, 0.5, "")}
    assert verdict(replace(told, overall=behind)) == (
        "average serves the worst-served fifth of clients best; fair comes next, with 70.0 ± 2.0 %: 5.0 points less "
        "than average, at the same average.",
        "No other method is within one standard deviation of it.",
    )


def with_status(told, **changed):
    return replace(told, models=(told.models[0], replace(told.models[1], **changed)))


def test_what_is_not_proven_is_said():
    told = story(TEN, moved(0.1, 0))
    assert cautions(told) == ()
    assert cautions(with_status(told, certificate=None)) == (
        "The model “fair” has no certificate.",
    )
    assert "but proven within 1.0 · 10⁻⁷ of" in cautions(with_status(told, status="round limit"))[0]
    blind = cautions(with_status(told, status="round limit", certificate=None))[0]
    assert blind == (
        "The model “fair” is not converged (round limit), and how far it is from the optimum is not known."
    )


def test_few_rows_are_uncertain():
    few = cautions(story(TEN, moved(0.1, 0), rows=20))
    assert few[0] == (
        "All 10 clients have fewer than 30 test rows (marked †): at site 0, which is served among the worst, "
        "one row is 5 points."
    )
    assert cautions(story(TEN, moved(0.1, 0), rows=30)) == ()


def test_a_change_of_three_rows_may_be_chance():
    told = cautions(story([0.7, 0.8, 0.9], [0.75, 0.8, 0.9], rows=60))
    assert told == (
        "For the worst-served client, that is about three of 60 test rows: chance could do as much. "
        "More held-out rows would tell.",
    )
    assert cautions(story([0.7, 0.8, 0.9], [0.75, 0.8, 0.9], rows=100)) == ()


def test_numbers_as_they_are_written():
    assert [measured(v, "accuracy") for v in (0.12345, None)] == ["12.3\u00a0%", "–"]
    assert [change(v, "accuracy") for v in (0.0123, -0.02, 0.0001)] == ["+1.2", "−2.0", "0.0"]
    assert [change(v, "rmse") for v in (1.234, -0.5, 0.0)] == ["+1.23", "−0.500", "0"]
    assert [plain(v) for v in (0.0, 0.00123, 0.5, 12.345, 123.45, 12345.6, -2.5)] == [
        "0.000",
        "0.0012",
        "0.500",
        "12.35",
        "123.5",
        "12\u202f346",
        "−2.50",
    ]
    assert [count(v) for v in (8.0, 12.5, 100000)] == ["8", "12.50", "100\u202f000"]
    assert [small(v) for v in (3.2e-7, 0.0, None)] == ["3.2 · 10⁻⁷", "0", "–"]
    assert [plural(w) for w in ("client", "country", "box", "day", "class")] == [
        "clients",
        "countries",
        "boxes",
        "days",
        "classes",
    ]
    assert brief("x" * 100) == "x" * 47 + "…"


def test_the_worst_fifth_is_that_of_the_metrics():
    import numpy as np

    from scaffpd.federation import ClientScores
    from scaffpd.training.metrics import Summary

    values = np.random.default_rng(0).random(23)
    found = overall([Score(str(i), v) for i, v in enumerate(values)], True)
    expected = Summary.of(
        ClientScores(tuple(map(str, range(23))), -values, values, np.ones(23, int))
    ).accuracy
    assert found.worst_20 == pytest.approx(expected.worst_20)
    assert (found.mean, found.worst) == pytest.approx((expected.mean, expected.worst))
    assert found.worst_client == expected.worst_client


def test_changes_that_somebody_has_judged_are_not_judged_again():
    told = story([0.7, 0.8, 0.9], [0.75, 0.8, 0.9], rows=60)
    judged = tuple(replace(s, clear=i == 0) for i, s in enumerate(told.scores["fair"]))
    said = cautions(replace(told, scores={**told.scores, "fair": judged}))
    assert said == ("Of 3 clients, 1 change in accuracy is clear of noise (marked *).",)


def test_where_one_label_would_do_as_well_that_is_said():
    """Switzerland: 93.5 % of the patients are ill, and a model that is right for 90 % is worth little there."""
    shares = [
        ("a", "ill", 60),
        ("a", "well", 40),
        ("b", "ill", 93),
        ("b", "well", 7),
        ("c", "ill", 5),
        ("c", "well", 95),
    ]
    partition = [
        {"client": c, "label": label, "train_rows": 50, "test_rows": rows}
        for c, label, rows in shares
    ]
    values = ([0.7, 0.9, 0.96], [0.8, 0.9, 0.96])
    told = story(*values, rows=100, names=["a", "b", "c"], partition=partition, word="hospital")
    tail = "one label for every row would be right at least as often: accuracy says little there."
    assert cautions(told) == (f"At b, {tail}",)
    worse = story(
        values[0],
        [0.8, 0.9, 0.9],
        rows=100,
        names=["a", "b", "c"],
        partition=partition,
        word="hospital",
    )
    assert f"At 2 of 3 hospitals, {tail}" in cautions(worse)
    assert cautions(replace(told, kind="demo")) == ()
    on_training_rows = replace(told, split="train")  # 50 to 50 there: no label is right more often
    assert not any(tail in sentence for sentence in cautions(on_training_rows))


def joined(gains, recommendation="personal", overall=(0.2, 0.1, 0.3)):
    """Clients with these gains of personal models over alone, and whether they pay."""
    rows = {
        client: {
            "alone": {"test_loss": 1.0},
            "average": {"test_loss": 1.0, "gain_over_alone": 0.0, "pays": "within noise"},
            "personal": {"test_loss": 1 - gain, "gain_over_alone": gain, "pays": pays},
        }
        for client, (gain, pays) in gains.items()
    }
    found = {"personal": RelativeGain(*overall)}
    return JoiningReport(
        recommendation, "Sentence.", "", "t", ("alone", "average", "personal"), rows, found
    )


def test_the_five_questions_are_answered_by_what_joining_brings():
    told = story(TEN, TEN, names=[*"abcdefghij"], word="site")
    gains = {
        "a": (0.3, "yes"),
        "b": (0.2, "yes"),
        **dict.fromkeys("cdefghi", (0.01, "within noise")),
        "j": (-0.04, "no"),
    }
    said = dict(answers(replace(told, joining=joined(gains))))
    assert said == {
        "Who gains?": "a and b, clearly, against training alone; for the other 7 sites it is within noise.",
        "How much, and is it clear of noise?": (
            "With personal models the mean loss on held-out rows is 20 % lower than alone (95 % interval 10 to 30 %): "
            "clear of noise."
        ),
        "What to do?": "Join, and let every site make the shared model its own: “personal”.",
        "Whom does it cost?": "j: with personal models clearly worse off than alone, by up to 4.0\u00a0%.",
        "How sure is the optimum?": (
            "Proven for “average” and “fair”: on the rows trained on, no model of this kind does better by more than "
            "1.0 · 10⁻⁷. How it does on new rows is measured, not proven."
        ),
    }


def test_noise_is_called_noise_in_every_answer():
    told = story(TEN, TEN, names=[*"abcdefghij"], word="site")
    gains = {c: (0.05 - 0.02 * i, "within noise") for i, c in enumerate("abcdefghij")}
    said = dict(answers(replace(told, joining=joined(gains, "alone", (0.01, -0.1, 0.1)))))
    assert (
        said["Who gains?"]
        == "Nobody clearly: with personal models, every difference from alone is within noise."
    )
    assert said["How much, and is it clear of noise?"].endswith(
        "no different from alone (95 % interval 10 % higher to 10 % lower): within noise."
    )
    assert said["What to do?"] == "Let every site train alone: joining is not clearly better."
    assert (
        said["Whom does it cost?"]
        == "Nobody clearly. The most is 13\u00a0% at j, which is within noise."
    )


def test_without_joining_the_change_from_before_to_after_answers():
    def said(clear):
        told = story([0.7, 0.8, 0.9], [0.75, 0.8, 0.85], names=["va", "b", "c"], word="hospital")
        scores = tuple(
            replace(s, clear=flag) for s, flag in zip(told.scores["fair"], clear, strict=True)
        )
        return dict(answers(replace(told, scores={**told.scores, "fair": scores})))

    clearly = said([True, False, False])
    nothing = said([False] * 3)
    untested = said([None] * 3)
    assert clearly["Who gains?"] == "va, clearly: “fair” against “average”."
    assert clearly["What to do?"] == "Use “fair”: it costs nobody clearly."
    assert (
        clearly["Whom does it cost?"]
        == "Nobody clearly. The largest loss is 5.0 points at c, within noise."
    )
    assert clearly["How much, and is it clear of noise?"] == (
        "The worst-served hospital 70.0\u00a0% → 75.0\u00a0%, the mean over hospitals 80.0\u00a0% → 80.0\u00a0%; "
        "1 of 3 changes clear of noise."
    )
    assert nothing["Who gains?"] == "Nobody clearly, “fair” against “average”."
    assert nothing["What to do?"] == "Keep “average”: no gain of “fair” is clear of noise."
    assert untested["Who gains?"].startswith(
        "1 of 3 hospitals do better and 1 worse, “fair” against “average”"
    )
    assert untested["What to do?"] == "Weigh it: “fair” helps some and costs others."


def test_where_nothing_is_clear_of_noise_the_headline_says_so():
    told = story(TEN, moved(0.112, -0.038))
    scores = tuple(replace(s, clear=False) for s in told.scores["fair"])
    assert verdict(replace(told, scores={**told.scores, "fair": scores}))[0] == (
        "No change is clear of noise: the worst-served fifth of clients gains 11.2 points; the average gives up 0.8."
    )


def test_a_useless_certificate_is_not_called_comfort():
    """A gap above the objective itself proves nothing: losses, and so the optimum, are at least zero anyway."""
    told = story(TEN, moved(0.1, 0))
    for status in ("round limit", "converged"):
        empty = with_status(told, status=status, certificate=61.0, value=0.5)
        name = "the proven gap, 61.00, is larger than the objective itself, 0.500"
        assert cautions(empty) == (f"The model “fair” has a useless certificate: {name}.",)
        assert dict(answers(empty))["How sure is the optimum?"] == (
            f"Not at all: {name}, so the certificate is useless."
        )
    proven = with_status(told, certificate=0.001, value=0.5)
    assert cautions(proven) == ()
    assert (
        "more than 1.0 · 10⁻³, 0.2\u00a0% of what is minimised"
        in dict(answers(proven))["How sure is the optimum?"]
    )
    private = with_status(told, certificate=None)
    assert dict(answers(private))["How sure is the optimum?"].startswith("Nothing is proven")
    assert answers(replace(told, kind="compare")) == ()


def test_symbols_are_explained_where_they_stand():
    told = story(TEN, moved(0.1, 0))
    assert meanings(told) == ""
    fair = with_status(told, objective="ChiSquare(rho=0.1)")
    assert (
        meanings(fair)
        == "ρ says how fair: small looks at those served worst, large at the average. "
    )
    assert meanings(with_status(told, objective="CVaR(alpha=0.2)")).startswith(
        "α is the share that counts"
    )
    end = with_status(
        replace(told, path={"parameter": "rho"}), objective="CVaR(alpha=0.8)"
    )  # of a capped path
    assert meanings(end) == ""


def test_a_folder_may_bring_answers_of_its_own():
    told = dict(answers(story(TEN, moved(0.1, 0), answers={"who": "The new ones."})))
    assert told["Who gains?"] == "The new ones."
    assert len(told) == 5
