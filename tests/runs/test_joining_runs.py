"""What joining brings, in the folder of a run, on the terminal, as JSON and on the page."""

from __future__ import annotations

import contextlib
import csv
import io
import json

import numpy as np
import pytest

import scaffpd as sp
from scaffpd import cli
from scaffpd.run import page as report
from scaffpd.run import train
from scaffpd.run.page.read import read
from scaffpd.run.prepare import prepare
from scaffpd.run.settings.run import RunConfig


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Five sites with few rows of the same truth, and one target that is a number."""
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
    command = [
        "train",
        str(table),
        "--client",
        "site",
        "--target",
        "y",
        "--test",
        "0.75",
        "--splits",
        "1",
    ]
    command += ["--no-choose", "--out", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert cli.run(command) == 0
    return folder, command, shown.getvalue()


def test_the_folder_has_every_client_and_model(run):
    folder, *_ = run
    with (folder / "joining.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["client"], row["model"]) for row in rows[:5]] == [
        ("s0", model) for model in ("constant", "alone", "average", "fair", "personal")
    ]
    assert len(rows) == 25
    with (folder / "clients.csv").open(newline="") as file:
        known = {(row["client"], row["model"]): row for row in csv.DictReader(file)}
    for row in rows:  # the shared models are those of the run
        if row["model"] in ("average", "fair"):
            other = known[row["client"], row["model"]]
            assert float(row["test_rmse"]) == pytest.approx(float(other["test_rmse"]), rel=1e-9)
            assert float(row["test_loss"]) == pytest.approx(float(other["test_loss"]), rel=1e-9)
    found = json.loads((folder / "summary.json").read_text())["joining"]
    assert found["recommendation"] in ("average", "fair", "personal")
    assert "lower than alone (95 % interval" in found["sentence"]


def test_the_folder_has_the_path_in_kappa(run):
    folder, *_ = run
    with (folder / "kappa_path.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    strengths = [float(row["kappa"]) for row in rows]
    assert strengths == sorted(strengths, reverse=True)
    assert (strengths[0], strengths[-1]) == (np.inf, 0.0)
    assert (
        [row["chosen"] for row in rows].count("True")
        == [row["personal"] for row in rows].count("True")
        == 1
    )
    found = json.loads((folder / "summary.json").read_text())["joining"]
    assert next(float(row["kappa"]) for row in rows if row["personal"] == "True") == found["kappa"]
    assert all(
        float(row["validation_loss_mean"]) <= float(row["validation_loss_worst_20"]) for row in rows
    )
    assert all(float(row["validation_loss_mean_se"]) > 0 for row in rows)


def test_the_folder_has_the_matrix_of_who_gains_by_whom(run):
    """Against a game of the same rows, trained once more with the run's own model."""
    folder, *_ = run
    with (folder / "coalition.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [f"s{k}" for k in range(5)]
    assert [(row["client"], row["leaving"]) for row in rows] == [
        (a, b) for a in names for b in names
    ]
    summary = json.loads((folder / "summary.json").read_text())
    game = summary["coalition"]
    rise = {(row["client"], row["leaving"]): float(row["rise"]) for row in rows}
    assert [rise[name, name] for name in names] == [one["gets"] for one in game["clients"]]
    config = RunConfig.read(folder / "config.toml")
    prepared = prepare(config)
    found = summary["joining"]
    told = found["recommendation"] if found["recommendation"] != "alone" else "personal"
    model = prepared.model if told != "personal" else sp.Personal(prepared.model, found["kappa"])
    with (folder / "joining.csv").open(newline="") as file:
        losses = {
            (row["model"], row["client"]): float(row["test_loss"]) for row in csv.DictReader(file)
        }
    alone, together = ([losses[which, name] for name in names] for which in ("alone", told))
    assert [one["alone"] for one in game["clients"]] == pytest.approx(
        alone, rel=1e-12
    )  # one number, said twice
    assert [one["together"] for one in game["clients"]] == pytest.approx(together, rel=1e-4)
    goal = sp.Average() if told == "average" else config.goal
    again = sp.coalition(
        prepared.train, prepared.test, model, goal, names=names, word="site", alone=alone
    )
    np.testing.assert_allclose([one["shapley"] for one in game["clients"]], again.shapley)
    assert game["sentence"] == str(again)
    assert game["would_leave"] == len(again.leaving)


def test_terminal_json_and_page_say_the_same(run, capsys):
    folder, command, shown = run
    sentence = json.loads((folder / "summary.json").read_text())["joining"]["sentence"]
    shown = " ".join(shown.split())
    assert sentence in shown
    assert "does it" in shown
    assert (
        "Why be in it (one split, no intervals): Together, the mean held-out loss of 5 sites is"
        in shown
    )
    assert cli.run([*command, "--json", "--no-coalition", "--no-report"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["joining"]["sentence"] == sentence
    assert len(values["joining"]["clients"]) == 25
    page = (folder / "report.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert (
        page.index(sentence) < page.index('id="figure-joining"') < page.index('id="figure-clients"')
    )
    assert "joining.png" in report.pictures(read(folder), "png", "joining")


def test_splits_give_intervals_over_splits(run, tmp_path, capsys):
    _, command, _ = run
    assert (
        cli.run(
            [
                *command[:-1],
                str(tmp_path / "k"),
                "--splits",
                "2",
                "--no-coalition",
                "--no-report",
                "--json",
            ]
        )
        == 0
    )
    values = json.loads(capsys.readouterr().out)["joining"]
    assert values["splits"] == 2
    assert values["interval"].startswith("Student's t over 2 random splits")


def test_a_folder_without_joining_still_opens(run, tmp_path, capsys):
    _, command, _ = run
    folder = tmp_path / "old"
    assert cli.run([*command[:-1], str(folder), "--splits", "0", "--coalition"]) == 2
    assert "--coalition compares models on held-out rows" in capsys.readouterr().err
    assert cli.run([*command[:-1], str(folder), "--splits", "0"]) == 0
    assert not (folder / "coalition.csv").exists()
    assert not (folder / "joining.csv").exists()
    assert "does it" not in capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    del summary["joining"]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert read(folder).joining is None
    assert "figure-joining" not in report.write(folder).read_text(encoding="utf-8")


def test_a_table_that_lacks_models_is_refused(run, tmp_path):
    folder, *_ = run
    for name in ("summary.json", "clients.csv", "joining.csv"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    lines = (tmp_path / "joining.csv").read_text().splitlines()
    (tmp_path / "joining.csv").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(
        sp.InputError, match=r"lacks models of some clients; the run has to be made again\."
    ):
        read(tmp_path)


def test_a_private_run_says_why_it_is_not_measured(run, tmp_path):
    _, command, _ = run
    folder = tmp_path / "private"
    assert (
        cli.run(
            [
                *command[:-1],
                str(folder),
                "--epsilon",
                "4",
                "--rounds",
                "2",
                "--quiet",
                "--no-report",
            ]
        )
        == 0
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["joining"] is None
    assert (
        "What joining brings is not measured for a private run: that takes linear models without noise."
        in summary["cautions"]
    )


def test_rows_that_are_held_out_by_a_column_are_one_split(table, tmp_path):
    data = {"file": str(table), "client": "site", "target": "y", "split_by": "a", "test": 0.5}
    config = RunConfig.of(
        {"data": data, "model": {"l2": 0.1}, "objective": {"kind": "Average"}}, "c.toml"
    )
    prepared = prepare(config)
    assert train.splits_of(config, prepared) == 1
    assert (
        train.splits_of(RunConfig.of({"data": data | {"split_by": "site"}}, "c.toml"), prepared)
        == 1
    )
    drawn = {name: value for name, value in data.items() if name != "split_by"}
    assert (
        train.splits_of(RunConfig.of({"data": drawn}, "c.toml"), prepared) == 5
    )  # of a small table
    asked = RunConfig.of(
        {"data": data, "training": {"splits": 3}, "objective": {"kind": "Average"}}, "c.toml"
    )
    (tmp_path / "checkpoint").mkdir()
    models = train.carry_out(
        asked.with_tol(1e-3), prepared, prepared.cohort(asked), tmp_path, Silent()
    )
    assert train.joining_of(asked, prepared, models) == (
        "What joining brings is not known: the held-out rows are the same whatever the seed, so --splits says nothing."
    )


class Silent:
    def begin(self, *_):
        pass

    def show(self, _):
        pass


def test_one_client_with_too_few_rows_takes_nothing_from_the_others(table, tmp_path, capsys):
    file = tmp_path / "few.csv"
    folder = tmp_path / "run"
    lines = table.read_text().splitlines()
    file.write_text("\n".join([*lines, *(line.replace("s0,", "tiny,", 1) for line in lines[1:4])]))
    command = ["train", str(file), "--client", "site", "--target", "y", "--out", str(folder)]
    assert cli.run(command) == 0
    shown, said = capsys.readouterr()
    with (folder / "joining.csv").open(newline="") as rows:
        assert {row["client"] for row in csv.DictReader(rows)} == {f"s{k}" for k in range(5)}
    sentence = "What joining brings is not known at tiny: with fewer than 3 rows to train on, too few for folds, a site"
    assert " ".join(shown.split()).count(sentence) == 1
    assert "Chosen by 3 folds of the 5 clients with rows enough:" in said
    page = (folder / "report.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert page.count(f'<li class="caution">{sentence}') == 1
    assert len(read(folder).coalition.names) == 5
    assert cli.run([*command, "--fresh", "--recalibrate", "--quiet"]) == 2
    assert (
        cli.run(
            [
                "predict",
                str(folder),
                str(file),
                "--model",
                "personal",
                "--out",
                str(tmp_path / "p.csv"),
            ]
        )
        == 0
    )
