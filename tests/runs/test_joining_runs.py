"""What joining brings, in the folder of a run, on the terminal, as JSON and on the page."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from html import unescape

import numpy as np
import pytest

from cases.runs import prepared, trained
from scaffpd import cli
from scaffpd.program.train import splits_of
from scaffpd.report import page as report
from scaffpd.report.record import RunRecord
from scaffpd.settings.run import RunConfig


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("data") / "sites.csv"
    w = rng.normal(size=10)
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["site", *"abcdefghij", "y"])
        for site in range(5):
            X = rng.normal(size=(60, 10))
            writer.writerows(
                [f"s{site}", *x.round(4), round(float(x @ w + rng.normal()), 4)] for x in X
            )
    return file


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    words = "--client site --target y --test 0.75 --splits 1 --out"
    command = ["train", str(table), *words.split(), str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert cli.run(command) == 0
    return folder, command, shown.getvalue()


def test_the_record_has_every_client_and_model(run):
    folder, *_ = run
    whole = RunRecord.read(folder)
    models = ("constant", "alone", "average", "fair", "personal")
    assert whole.joining.models == models
    assert {client: tuple(own) for client, own in whole.joining.by_client.items()} == {
        f"s{k}": models for k in range(5)
    }
    assert whole.names == models[2:]
    assert whole.main.name == whole.joining.recommendation
    assert all(model.certificate <= 1e-6 for model in whole.models)
    for name in whole.names:  # the models are those of the run
        for score in whole.model(name).clients:
            row = whole.joining.by_client[score.client][name]
            assert row.test_score == pytest.approx(score.test_score, rel=1e-9)
            assert row.test_loss == pytest.approx(score.test_loss, rel=1e-9)
    for row in whole.joining.rows:
        if row.model != "alone":
            alone = whole.joining.by_client[row.client]["alone"].test_loss
            gain = row.gains["alone"]
            assert gain.value == pytest.approx(1 - row.test_loss / alone)
            assert gain.low < gain.value < gain.high
    with (folder / "joining.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert not [column for column in rows[0] if column.startswith("over_")]
    gains = [row.gains.get("alone") for row in whole.joining.rows]
    assert [float(row["gain_over_alone"] or "nan") for row in rows] == pytest.approx(
        [np.nan if gain is None else gain.value for gain in gains], nan_ok=True
    )
    assert whole.joining.recommendation in ("average", "fair", "personal")
    assert "lower than alone (" in whole.joining.compared(whole.task, whole.word)


def test_terminal_json_and_page_say_the_same(run, capsys):
    folder, command, shown = run
    whole = RunRecord.read(folder)
    sentence, *others = whole.joining.sentences(whole.task, whole.word)
    shown = " ".join(shown.split())
    assert sentence in shown
    assert "clear of noise" in shown
    assert cli.run([*command, "--json", "--no-report"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["verdict"] == [sentence, *others]
    assert len(values["joining"]["rows"]) == 25
    page = unescape((folder / "report.html").read_text(encoding="utf-8")).replace("\u00a0", " ")
    assert page.index(sentence) < page.index('id="figure-joining"')
    for one in others:
        assert one in page
    for one in others[:3]:  # the page has all
        assert one in shown
    assert "joining.png" in report.pictures(RunRecord.read(folder), "png")


def test_splits_give_intervals_over_splits(run, tmp_path, capsys):
    _, command, _ = run
    again = [*command[:-1], str(tmp_path / "k"), *["--splits", "2", "--no-report", "--json"]]
    assert cli.run(again) == 0
    values = json.loads(capsys.readouterr().out)["joining"]
    assert values["splits"] == 2
    assert values["interval"].startswith("Student's t over 2 random splits")


def test_a_folder_without_joining_still_opens(run, tmp_path, capsys):
    _, command, _ = run
    folder = tmp_path / "old"
    assert cli.run([*command[:-1], str(folder), "--splits", "0", "--kappa", "3"]) == 2
    assert "are for personal models" in capsys.readouterr().err
    assert cli.run([*command[:-1], str(folder), "--splits", "0"]) == 0
    assert not (folder / "joining.csv").exists()
    assert "clear of noise" not in capsys.readouterr().out
    assert RunRecord.read(folder).joining is None
    assert "figure-joining" not in report.write(folder).read_text(encoding="utf-8")


def test_a_private_run_says_why_it_is_not_measured(run, tmp_path):
    _, command, _ = run
    folder = tmp_path / "private"
    words = "--epsilon 4 --rounds 2 --quiet --no-report"
    assert cli.run([*command[:-1], str(folder), *words.split()]) == 0
    whole = RunRecord.read(folder)
    assert whole.joining is None
    assert "What joining brings is not measured for a private run" in whole.cautions[0]


def test_rows_that_are_held_out_by_a_column_are_one_split(table, tmp_path):
    data = {"file": str(table), "client": "site", "target": "y", "split_by": "a", "test": 0.5}
    config = RunConfig.of(
        {"data": data, "model": {"l2": 0.1}, "objective": {"kind": "Average"}}, "c.toml"
    )
    rows = prepared(config)
    assert splits_of(config, rows) == 1
    assert splits_of(RunConfig.of({"data": data | {"split_by": "site"}}, "c.toml"), rows) == 1
    drawn = {name: value for name, value in data.items() if name != "split_by"}
    assert splits_of(RunConfig.of({"data": drawn}, "c.toml"), rows) == 10  # of a small table
    asked = RunConfig.of(
        {"data": data, "training": {"splits": 3}, "objective": {"kind": "Average"}}, "c.toml"
    )
    *_, joining = trained(asked.with_tol(1e-3), tmp_path / "run")
    assert "the same for every seed" in joining


def test_the_recommended_model_predicts(run, table, tmp_path, capsys):
    folder, *_ = run
    best = RunRecord.read(folder).joining.recommendation
    found = {}
    for words in ([], ["--model", best], ["--model", "constant"]):
        out = tmp_path / f"{len(found)}.csv"
        assert cli.run(["predict", str(folder), str(table), *words, "--out", str(out)]) == 0
        with out.open(newline="") as file:
            found[len(found)] = [row["predicted"] for row in csv.DictReader(file)]
    assert found[0] == found[1]
    assert len(set(found[2])) <= 5  # a number per client, or one for all of them
    capsys.readouterr()


def test_a_client_with_few_rows_is_compared_as_well(table, tmp_path, capsys):
    file = tmp_path / "few.csv"
    folder = tmp_path / "run"
    lines = table.read_text().splitlines()
    file.write_text("\n".join([*lines, *(line.replace("s0,", "tiny,", 1) for line in lines[1:4])]))
    command = ["train", str(file), "--client", "site", "--target", "y", "--out", str(folder)]
    assert cli.run([*command, "--splits", "1", "--no-report"]) == 0
    with (folder / "joining.csv").open(newline="") as rows:
        assert {row["client"] for row in csv.DictReader(rows)} == {
            "tiny",
            *(f"s{k}" for k in range(5)),
        }
    capsys.readouterr()
