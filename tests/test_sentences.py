"""Sentences of a verdict, read back: none contradicts the fields that it is made from."""

import re

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from scaffpd.numbers import plain
from scaffpd.study.newcomers import LEAST, LeftOut, Newcomers
from scaffpd.study.verdict import (
    ALONE,
    AS_GOOD,
    AVERAGE,
    CALLED,
    CONSTANT,
    FAIR,
    JOINT,
    MARGIN,
    MODELS,
    PAYS,
    TOO_FEW,
    ClientRow,
    Gain,
    ModelRow,
    Verdict,
    sided,
)
from scaffpd.tasks import TASKS
from scaffpd.tasks.regression import Regression

OVER = (CONSTANT, ALONE, AVERAGE)
WORD = "site"
OUTCOMES = ("yes", "no", "within noise")
losses = st.floats(1e-3, 1e3)
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # to shrink a record takes minutes


@st.composite
def gains(draw):
    """A gain, most often with an interval around it."""
    value = draw(st.one_of(st.floats(-2, 0.999), st.floats(-1e4, 0)))
    if draw(st.integers(0, 4)) == 0:
        return Gain(value)
    low, high = (draw(st.floats(0, 0.6)) for _ in range(2))
    return Gain(value, value - low * (1 + abs(value)), min(value + high, 1.0))


@st.composite
def verdicts(draw):
    """Fields that agree with each other as those of `Joining.verdict` do."""
    models = [m for m in MODELS if m not in draw(st.sets(st.sampled_from([AVERAGE, FAIR])))]
    clients = [f"c{i}" for i in range(draw(st.integers(1, 6)))]
    over = {m: [o for o in OVER if o != m and o in models] for m in models}
    overall = [
        ModelRow(
            m,
            draw(losses),
            draw(st.one_of(st.none(), st.floats(0, 1))),
            {o: draw(gains()) for o in over[m]},
            {o: draw(gains()) for o in over[m]},
        )
        for m in models
    ]
    rows = [
        ClientRow(
            c,
            m,
            9,
            9,
            draw(losses),
            None,
            {o: draw(gains()) for o in over[m]},
            {o: draw(st.sampled_from(OUTCOMES)) for o in over[m]},
        )
        for c in clients
        for m in models
    ]
    least = min(row.loss for row in overall)
    near = [row.model for row in overall if row.loss <= (1 + MARGIN) * least]
    best = draw(st.sampled_from(near))
    shown = draw(st.booleans())
    outcome = (PAYS if best in JOINT else AS_GOOD) if shown else TOO_FEW
    chance = draw(st.floats(0, 0.01) if shown else st.floats(0.0101, 1))
    return Verdict(best, outcome, chance, overall, rows)


def shares(text):
    """The shares that a sentence names, with their sides: 12 % lower is .12."""
    found = re.findall(r"([\d.]+) % (lower|higher)", text)
    return [float(n) / 100 * (1 if side == "lower" else -1) for n, side in found]


@settings(max_examples=25, phases=QUICK, suppress_health_check=[HealthCheck.too_slow])
@given(verdicts(), st.sampled_from(TASKS))
def test_no_sentence_contradicts_its_fields(found, task):
    said = found.sentences(task, WORD)
    first, text = said[0], " ".join(said)
    many = len(found.by_client)
    # what is called shown is, and the best guess is called one
    assert ("(shown)" in first) == (found.outcome != TOO_FEW)
    assert ("Too few rows to tell" in first and "best guess" in first) == (found.outcome == TOO_FEW)
    if found.recommendation in JOINT:
        assert CALLED[found.recommendation] in first
    assert f"test at 1 % {'does not show' if found.outcome == TOO_FEW else 'shows'}" in text
    # no interval without its level, no mean without what it is over
    assert text.count("interval: ") == text.count("95 % interval: ")
    assert "interval" not in text.replace("95 % interval: ", "").replace("rows for an interval", "")
    for mean in re.findall(r"\bmean\b.{0,40}", text):
        assert re.match(r"mean over (\d+ sites?|the other \d+ sites|them)\b", mean), mean
    if "mean over them" in text:
        assert f"of {many} sites" in text
    assert many > 1 or "mean" not in text
    # nobody is called nobody who is somebody
    if many > 1:
        clear = {o: found.marked(o, found.shown, found.base) for o in OUTCOMES}
        gain, lose = re.search(
            rf"(\w+) of {many} sites clearly gains?, (\w+) clearly loses?", text
        ).groups()
        counts = [len(clear["yes"]), len(clear["no"])]
        assert [gain, lose] == ["none" if not n else str(n) for n in counts]
    if found.fair:
        line = found.fairness(task, WORD)
        assert line in said
        better, worse = (found.marked(o, FAIR, AVERAGE) for o in ("yes", "no"))
        head = line.partition(" clearly better")[0]
        assert ("none of" in head) == (not better)
        for names, part in ((better, head), (worse, line.partition("clearly better")[2])):
            named = set(re.findall(r"\bc\d+\b", part))
            assert named <= set(names)
            more = re.search(r"(\d+) more", part.partition(";")[0])
            assert len(named) + int(more[1] if more else 0) == len(names)
    else:
        assert "fair one serves" not in text
    # numbers are those of the fields, and on their side
    row = found.by_model[found.shown]
    value = row.gains[found.base].value
    compared = found.compared(task, WORD)
    if value >= -10:
        assert shares(compared)[0] == pytest.approx(value, abs=5.1e-3)
    else:
        assert f"{plain(1 - value)} times as high as {CALLED[found.base]}" in compared
    least = min(found.overall, key=lambda one: one.loss)
    if found.by_model[found.recommendation].loss > least.loss:
        assert CALLED[least.model] in found.chosen
        assert 0 <= shares(found.chosen)[0] <= MARGIN
    else:
        assert found.chosen.startswith("No other model")
    assert "%%" not in text
    assert not re.search(r"\d{4,} %", text)


@settings(max_examples=25, phases=QUICK, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(3, 40), gains(), gains(), st.sampled_from(["average", "ρ = 1"]))
def test_what_is_said_of_new_sites_follows_from_the_fields(clients, gain, mean, best):
    points = [LeftOut("average", 1.0, 2.0), LeftOut("ρ = 1", 1.1, 1.9)]
    found = Newcomers(points, best, gain, mean, clients)
    first, rests = found.sentences(WORD)
    assert ("cannot be said" in first) == (clients < LEAST)
    clear = gain.low is not None and gain.low > 0 and best != "average"
    assert ("“ρ = 1”" in first) == (clear and clients >= LEAST)
    assert ("use the average model" in first) == (not clear and clients >= LEAST)
    assert f"Of {clients} sites" in rests
    assert sided(gain.value) in rests or gain.low == gain.high == 0


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        (Gain(0.12, 0.081, 0.15), "12 % lower (95 % interval: 8.1 to 15 %)"),
        (Gain(-0.12, -0.2, -0.05), "12 % higher (95 % interval: 5.0 to 20 %)"),
        (Gain(0.01, -0.02, 0.04), "1.0 % lower (95 % interval: 2.0 % higher to 4.0 % lower)"),
        (
            Gain(-168.67, -400.0, 0.5),
            "169.7 times as high (95 % interval: 401.0 times as high to 50 % lower)",
        ),
        (
            Gain(-168.67, -400.0, -20),
            "169.7 times as high (95 % interval: 401.0 times as high to 21.00 times as high)",
        ),
        (Gain(0.5), "50 % lower (too few rows for an interval)"),
    ],
)
def test_gains_in_words(gain, said):
    assert gain.than() == said


def test_a_fair_model_that_serves_somebody_is_said_to():
    """Six sites, one of opposite slopes: it gains by the fair model, and the line names it."""

    def row(client, model, loss, pays):
        over = {AVERAGE: Gain(0.4 if pays == "yes" else -0.02)} if model == FAIR else {}
        return ClientRow(client, model, 48, 12, loss, None, over, {AVERAGE: pays} if over else {})

    rows = [
        row(
            f"s{i}",
            model,
            loss * (0.6 if i == 5 and model == FAIR else 1),
            "yes" if i == 5 else "within noise",
        )
        for i in range(6)
        for model, loss in ((AVERAGE, 1.0), (FAIR, 1.0))
    ]
    overall = [
        ModelRow(m, 1.0, None, {AVERAGE: Gain(0.0)} if m == FAIR else {}) for m in (AVERAGE, FAIR)
    ]
    found = Verdict(AVERAGE, TOO_FEW, 0.5, overall, rows)
    assert found.fairness(Regression(), WORD) == (
        "Against one average model, the fair one serves s5 (40 % lower) clearly better and none "
        "clearly worse; in the mean over the other 5 sites its loss is 0.0 % lower."
    )
