"""Times to an event, from a table to the page: events as files have them, scores, refusals."""

import csv
from datetime import date, timedelta

import numpy as np
import pytest

from cases.commands import ran, refusal
from scaffpd.models.baseline import breslow, brier, kaplan_meier, log_rank
from scaffpd.models.concordance import interval
from scaffpd.report.page.figures import figures
from scaffpd.report.page.tables import effect_table, score_tables
from scaffpd.report.page.verdict import cautions, verdict
from scaffpd.report.predict import predict
from scaffpd.report.record import RunRecord
from scaffpd.tasks.base import EVERYONE

LINE = "train patients.csv --client hospital --time days --event died --curves off --splits 1 -q"


def patients(n=240, seed=3):
    """Three hospitals with baselines of their own; age and sex count."""
    random = np.random.default_rng(seed)
    rows = []
    for k in range(n):
        site = ["North", "South", "West"][k % 3]
        age, sex = random.normal(60, 8), random.choice(["f", "m"])
        rate = np.exp(0.12 * (age - 60) + 0.8 * (sex == "m")) / (400 + 300 * (k % 3))
        own, left = random.exponential(1 / rate), random.uniform(100, 900)
        rows.append((site, int(np.ceil(min(own, left))), int(own <= left), f"{age:.1f}", sex))
    return rows


def write(rows, spelt=str, header="hospital,days,died,age,sex", name="patients.csv"):
    with open(name, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows((site, days, spelt(died), *more) for site, days, died, *more in rows)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_table_becomes_models_scores_and_curves(place, capsys):
    write(patients(), lambda died: "1:DECEASED" if died else "0:LIVING")
    ran(f"{LINE} --no-report --out run", capsys)
    run = RunRecord.read(place / "run")
    assert (run.task.name, run.measure.name) == ("survival", "concordance")
    assert run.main.certificate < 1e-5
    everyone = run.score_rows("average")[EVERYONE].values
    assert everyone["concordance"] > 0.6
    assert everyone["log_rank_p"] < 0.05
    for row in run.score_rows("average").values():
        if "concordance_low" in row.values:
            low, mid, high = (row.values[f"concordance{end}"] for end in ("_low", "", "_high"))
            assert 0 < low <= mid <= high < 1
            assert high - low > 0.1
    effects = {row.column: row.values for row in run.effects}
    assert effects["age"]["low"] < 0.12 < effects["age"]["high"]
    assert "intercept" not in effects
    drawn = {figure.name: figure for figure in figures(run)}
    assert {"survival", "risks"} <= drawn.keys()
    assert "with the most" not in drawn["survival"].caption
    run.clients.append("a seventh")
    named = next(one for one in figures(run) if one.name == "survival").caption
    assert named.endswith("These are the 3 clients with the most of them.")
    assert run.joining.loss == "cox"
    assert "wrong pairs" in " ".join(verdict(run))
    for own in run.model("average").clients:
        row = run.joining.by_client[own.client]["average"]
        assert row.test_score == pytest.approx(own.test_score)
    found = predict(place / "run", place / "patients.csv")
    age = np.array([float(row[3]) for row in patients()])
    assert np.corrcoef(found.predicted, age)[0, 1] > 0.5
    chances = predict(place / "run" / "average.safetensors", place / "patients.csv").survival
    ((until, chance),) = chances.items()
    y = np.array([row[1:3] for row in patients()], dtype=float)
    assert chance.mean() == pytest.approx(float(kaplan_meier(y)(until)), abs=0.1)
    ran("predict run patients.csv --model average", capsys)
    head = (place / "predictions.csv").read_text().splitlines()[0]
    assert head == f"client,trained,risk,probability to survive {until:g}"
    said = ran("predict run patients.csv --model alone --out alone.csv", capsys).out
    assert "Predicted by the model “alone”." in said
    assert (place / "alone.csv").read_text().splitlines()[0] == "client,trained,risk"
    assert effects["age"]["ratio"] == pytest.approx(np.exp(effects["age"]["estimate"]))
    assert "hazard" in drawn["forest"].caption
    assert f"expected by {until:g}" in score_tables(run)[0].heads
    table = {names[0]: [cell.text for cell in cells] for names, cells in effect_table(run).rows}
    assert " to " in table["age"][1]
    run.effects[0].values.update(ratio=2.0, ratio_low=1e-99, ratio_high=1e99)
    unknown = effect_table(run).rows
    assert [cell.text for _, cells in unknown for cell in cells].count("not known") == 1


def test_periods_are_the_second_way_with_noise_too(place, capsys):
    write(patients(600))
    ends = [150.0, 300.0, 500.0]
    periods = "--periods 150,300,500"
    ran(f"{LINE} {periods} --no-report --out run", capsys)
    run = RunRecord.read(place / "run")
    assert run.measure.name == "concordance"
    assert run.remarks[0].startswith("Discrete time: a logistic hazard in each of the periods")
    assert run.main.certificate < 1e-5
    for name in ("average", "fair", "personal"):
        everyone = run.score_rows(name)[EVERYONE].values
        assert everyone["concordance"] > 0.6
        assert everyone["horizon"] == 300
        assert abs(everyone["mean_probability"] - everyone["base_rate"]) < 0.15
        assert everyone["brier"] < 0.25
    assert {"survival", "risks"} <= {figure.name for figure in figures(run)}
    effects = {row.column: row.values for row in run.effects}
    assert not any(column.startswith("until") for column in effects)
    assert 0.05 < effects["age"]["low"] < effects["age"]["high"] < 0.25  # of log-odds
    y = np.array([row[1:3] for row in patients(600)], dtype=float)
    for name in ("constant", "average", "personal"):
        chances = predict(place / "run" / f"{name}.safetensors", place / "patients.csv").survival
        assert list(chances) == ends
        for end, chance in chances.items():
            assert chance.mean() == pytest.approx(float(kaplan_meier(y)(end)), abs=0.1)
    ran(f"{LINE} {periods} --no-report --epsilon 8 --out private", capsys)
    private = RunRecord.read(place / "private")
    assert private.privacy.epsilon <= 8 + 1e-6
    assert private.score_rows("fair")[EVERYONE].values["concordance"] > 0.55
    assert refusal(f"{LINE} --epsilon 8 --out cox") == "private-cox"


def test_weights_of_rows_are_no_entries(place, capsys):
    rows = [(site, days / 365, *more) for site, days, *more in patients()]
    weighted = [(*row, 1 + 200 * (k % 2)) for k, row in enumerate(rows)]
    write(weighted, header="hospital,days,died,age,sex,weight")
    line = f"{LINE} --periods 0.5,1.5 --columns age,sex --no-report"
    ran(f"{line} --out one", capsys)
    ran(f"{line} --weight weight --out two", capsys)
    one, two = (RunRecord.read(place / name) for name in ("one", "two"))
    assert {"mean_probability", "base_rate"} <= one.score_rows("average")[EVERYONE].values.keys()
    names = ("North", "South", "West")
    seen = [
        [row.values["observed"] for row in run.curves if row.group in names] for run in (one, two)
    ]
    assert seen[0] == seen[1]
    files = (place / name / "constant.safetensors" for name in ("one", "two"))
    chances = [predict(file, place / "patients.csv").survival for file in files]
    for end in (0.5, 1.5):
        np.testing.assert_allclose(chances[0][end], chances[1][end])


def test_where_columns_predict_no_time_the_model_written_is_the_constant(place, capsys):
    random = np.random.default_rng(5)
    rows = [(site, days, died, random.normal(60, 8), "f") for site, days, died, *_ in patients(120)]
    write(rows)
    ran(f"{LINE} --no-report --out run", capsys)
    run = RunRecord.read(place / "run")
    assert run.joining.recommendation == "constant"
    assert "columns predict the time" in verdict(run)[0]
    names = ("model", "constant", "alone", "average", "fair", "personal")
    risks = {
        name: np.ptp(
            predict(place / "run" / f"{name}.safetensors", place / "patients.csv").predicted
        )
        for name in names
    }
    assert risks["model"] == risks["constant"] == 0
    assert risks["alone"] > 0


def test_clients_without_a_comparable_pair_are_named(place, capsys):
    rows = patients(120)
    write([row if row[0] != "West" else (row[0], row[1], 0, *row[3:]) for row in rows])
    for splits in (1, 2):
        line = LINE.replace("--splits 1", f"--splits {splits}")
        ran(f"{line} --no-report --out run{splits}", capsys)
        run = RunRecord.read(place / f"run{splits}")
        (said,) = [one for one in cautions(run) if "compared" in one]
        assert "rows of client West can" in said
        assert set(run.joining.by_client) == {"North", "South"}
        assert "of 2 clients clearly" in " ".join(verdict(run))
        assert "joining" in {figure.name for figure in figures(run)}
    ran("report run1", capsys)


def test_files_spell_events_in_many_ways(place, capsys):
    """The same rows give the same model."""
    ends = []
    ways = (
        str,
        lambda died: "TRUE" if died else "FALSE",
        lambda died: "dead" if died else "alive",
        lambda died: died + 1,
    )
    for k, spelt in enumerate(ways):
        write(patients(60), spelt)
        ran(f"{LINE.replace('--splits 1', '--splits 0')} --no-report --out run{k}", capsys)
        ends.append(RunRecord.read(place / f"run{k}"))
    losses = [[score.train_loss for score in run.main.clients] for run in ends]
    for one in losses[1:]:
        np.testing.assert_allclose(one, losses[0])
    assert any("2 is read as an event" in remark for remark in ends[3].remarks)


def test_dates_of_entry_and_exit_are_days(place, capsys):
    rows = patients(60)
    write(rows)
    start = date(2020, 1, 1)
    dated = [
        (site, (start + timedelta(k + days)).isoformat(), died, age, sex, str(start + timedelta(k)))
        for k, (site, days, died, age, sex) in enumerate(rows)
    ]
    write(dated, header="hospital,left,died,age,sex,came", name="dated.csv")
    plain = LINE.replace("--splits 1", "--splits 0")
    ran(f"{plain} --no-report --out one", capsys)
    other = plain.replace("patients.csv", "dated.csv").replace("days", "left --entry came")
    ran(f"{other} --no-report --out two", capsys)
    one, two = (RunRecord.read(place / name) for name in ("one", "two"))
    assert [c.train_loss for c in one.main.clients] == [c.train_loss for c in two.main.clients]
    assert "Times are days from 'came' to 'left'." in two.remarks
    entered = [(*row, 0.5) for row in rows]
    write(entered, header="hospital,days,died,age,sex,since", name="late.csv")
    late = plain.replace("patients.csv", "late.csv").replace("days", "days --entry since")
    ran(f"{late} --no-report --out three", capsys)
    settings = (place / "three" / "config.toml").read_text()
    assert 'entry = "since"' in settings


def test_what_cannot_be_a_time_or_an_event_is_refused(place):
    rows = patients(30)
    write([*rows[:11], ("North", 0, 1, "50", "f"), *rows[11:]])
    assert refusal(LINE) == "time-not-positive"
    write(rows, lambda died: "moved away" if died else "alive")
    assert refusal(LINE) == "event-unclear"
    write(rows, lambda died: 3 * died)
    assert refusal(LINE) == "event-not-binary"
    write(rows)
    assert refusal(LINE.replace("--event died", "")) == "time-and-event"
    assert refusal(f"{LINE} --target age") == "time-and-target"
    assert refusal(f"{LINE} --epsilon 3") == "private-cox"
    assert refusal(LINE.replace("--time days", "--time sex")) == "texts-for-numbers"
    assert refusal(f"{LINE} --entry days") in ("entry-after-time", "time-and-event")


def test_intervals_of_few_events_are_wide():
    from scaffpd.models import Linear

    y = np.array([[1.0, 1.0], [2.0, 0.0], [3.0, 0.0]])
    found = interval(y, np.array([3.0, 2.0, 1.0]), Linear("cox"))
    assert found[0] == 1.0
    assert found[1] < 0.3
    assert interval(y * [1, 0], np.zeros(3), Linear("cox")) is None


def test_intervals_of_concordance_cover():
    """The true C of many rows is in 93 % of the intervals of 60, within what chance allows."""
    from scaffpd.models import Linear

    random = np.random.default_rng(0)

    def drawn(n):
        z = random.standard_normal(n)
        time, left = random.exponential(np.exp(-z)), random.exponential(1.0, n)
        return np.column_stack([np.minimum(time, left), time <= left]), z

    truth = interval(*drawn(3000), Linear("cox"))[0]
    inside = 0
    for _ in range(200):
        _, low, high = interval(*drawn(60), Linear("cox"))
        inside += low <= truth <= high
    assert inside >= 180


def test_curves_are_those_of_loops():
    random = np.random.default_rng(1)
    y = np.column_stack([np.ceil(5 * random.random(40)), random.random(40) < 0.6, np.zeros(40)])
    y[::3, 2] = np.floor(y[::3, 0] * random.random(14))
    z = random.standard_normal(40)
    share, hazard = 1.0, 0.0
    curve, baseline = kaplan_meier(y), breslow(y, z)
    for t in np.unique(y[y[:, 1] > 0, 0]):
        risk = (y[:, 0] >= t) & (y[:, 2] < t)
        d = ((y[:, 0] == t) & (y[:, 1] > 0)).sum()
        assert curve(t, before=True) == pytest.approx(share)
        share *= 1 - d / risk.sum()
        hazard += d / np.exp(z[risk]).sum()
        assert curve(t) == pytest.approx(share)
        assert baseline(t) == pytest.approx(hazard)


def test_scores_are_those_of_other_packages():
    from sksurv import metrics
    from sksurv.compare import compare_survival

    random = np.random.default_rng(2)
    time = random.exponential(5, 80)
    event = random.random(80) < 0.6
    y = np.column_stack([time, event])
    structured = np.array(list(zip(event, time, strict=True)), dtype=[("e", bool), ("t", float)])
    times = np.quantile(time, [0.2, 0.4, 0.6])
    guess = np.sort(random.random((80, 3)))[:, ::-1]
    theirs = metrics.brier_score(structured, structured, guess, times)[1]
    np.testing.assert_allclose(brier(y, times, guess), theirs, rtol=1e-10)
    group = random.integers(0, 3, 80)
    ours = log_rank(group, np.zeros(80, dtype=np.int64), y)
    assert ours == pytest.approx(compare_survival(structured, group)[0], rel=1e-9)
