"""The record of a run: what is written is read back, and what is no record is refused."""

import math

import pytest

from cases.records import model, record, rounds
from cases.refusals import refuses
from scaffpd.report.page.tables import client_lines
from scaffpd.report.record import (
    RunRecord,
    is_run,
)
from scaffpd.study.newcomers import LeftOut, Newcomers
from scaffpd.study.verdict import ClientRow, Gain, ModelRow, Verdict


def joining():
    gains = {"A": 0.2, "B": -0.1}
    rows = [
        ClientRow(
            client=client,
            model=name,
            train_rows=10,
            test_rows=5,
            test_loss=loss,
            gains={"alone": Gain(value=g, low=g - 0.05, high=g + 0.05)} if name != "alone" else {},
            pays={"alone": "yes" if g > 0 else "no"},
        )
        for client, g in gains.items()
        for name, loss in (("alone", 1.0), ("fair", 1 - g))
    ]
    overall = [ModelRow("alone", 1.0), ModelRow("fair", 0.95, 0.8, {"alone": Gain(0.05, -0.1)})]
    return Verdict("fair", "joining pays", 0.001, overall, rows)


def test_what_is_written_is_read_back(tmp_path):
    history = rounds(math.inf, 0.1, 1e-7, losses=(0.5, math.nan))
    whole = record(
        model("average", {"A": 0.9, "B": 0.5}, role="before", history=history),
        model("fair", {"A": 0.8, "B": 0.7}, role="after", certificate=math.nan),
        joining=joining(),
        newcomers=Newcomers(
            [LeftOut("average", 1.0, 2.0, [1.0, 2.0])], "average", Gain(0.1), Gain(0.0), 2
        ),
        fills={"A": {"age": 61.5, "sex": "f"}},
        environment={"python": "3.11", "threads": 2},
    )
    whole.write(tmp_path)
    back = RunRecord.read(tmp_path)
    assert back == whole
    # JSON has no infinity and no NaN: nothing is proven there
    assert [one.certificate for one in back.models[0].history] == [None, 0.1, 1e-7]
    assert back.models[0].last.losses == [0.5, None]
    assert back.models[1].certificate is None


def test_a_damaged_record_is_refused(tmp_path):
    with refuses("no-such-folder"):
        RunRecord.read(tmp_path / "nowhere")
    with refuses("not-a-run"):
        RunRecord.read(tmp_path)
    file = record().write(tmp_path)
    with refuses("run-is-file"):
        RunRecord.read(file)
    text = file.read_text()
    for wrong in (text[:-40], text.replace('"format":2', '"format":1'), text.replace("0.9", '"x"')):
        file.write_text(wrong)
        with refuses("run-damaged"):
            RunRecord.read(tmp_path)


def test_a_folder_of_runs_is_none_itself(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        record(title=name).write(tmp_path / name)
    assert not is_run(tmp_path)
    assert RunRecord.read(tmp_path / "a").title == "a"


def test_gains_count_upwards_where_more_is_better():
    run = record()
    _, after = run.pair
    moved = {line.score.client: line.change.value for line in client_lines(run)}
    assert moved == pytest.approx({"A": -0.02, "B": 0.05, "C": 0.1})
    assert [line.change.tone for line in client_lines(run)] == ["loss", "gain", "gain"]
    errors = record(*run.models, measure="rmse")
    assert [line.change.tone for line in client_lines(errors)] == ["gain", "loss", "loss"]
    assert (after.overall.mean, after.overall.worst_20) == pytest.approx((2.23 / 3, 0.6))
    assert after.overall.worst_client == "C"


def test_a_gap_wider_than_the_loss_is_vacuous():
    history = rounds(1.0, losses=(0.5, 0.3), weights=(0.25, 0.75))
    one = model("fair", {"A": 1.0, "B": 1.0}, certificate=0.34, history=history)
    assert one.value == pytest.approx(0.35)
    assert not one.vacuous
    assert one.model_copy(update={"certificate": 0.35}).vacuous
    assert one.model_copy(update={"objective": "Nash(b=1)", "certificate": 9.0}).value is None


def test_who_gains_from_joining():
    found = joining()
    assert found.order == ["A", "B"]
    assert record(joining=found).paying == {"yes": ["A"], "no": ["B"], "within noise": []}
    assert found.gain("B") == pytest.approx(-0.1)
