"""The tables of run folders have the same columns whoever writes them, and folders of version 0.1 still open."""

from __future__ import annotations

import csv
import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_runs import patients

import columns
import scaffpd as sp
from scaffpd import cli
from scaffpd.errors import InputError
from scaffpd.files import csv_text
from scaffpd.run import number, read_table, whole
from scaffpd.run.folder import client_rows
from scaffpd.run.page.read import read
from scaffpd.run.page.verdict import verdict
from scaffpd.run.prepare import Prepared
from scaffpd.run.train import train_model
from scaffpd.study.comparison.runs import Run

OLD = (
    Path(__file__).parent / "fixtures"
)  # written by version 0.1, and "joining" by the one after it
ROWS = [(212, 91), (206, 88), (87, 36), (140, 60)]


@pytest.mark.parametrize(
    ("kind", "title", "models", "sentence", "totals", "rounds", "rows"),
    [
        (
            "train",
            "hospitals: 4 hospitals",
            ["average", "fair"],
            "No change is clear of noise: the worst-served hospital gains 3.6 points; the average gives up 0.8.",
            {"average": (0.8510197277021394, 0.8), "fair": (0.843380800222284, 0.8360655737704918)},
            18,
            [(242, 61), (235, 59), (98, 25), (160, 40)],
        ),
        (
            "path",
            "hospitals: 4 hospitals",
            ["average", "ρ = 1.9", "ρ = 0.11", "ρ = 0.0063", "worst case"],
            "No change is clear of noise: at ρ\u00a0=\u00a00.11, which is suggested, the worst-served hospital gains "
            "3.6 points; the average gives up 0.8.",
            {"ρ = 0.11": (0.843380800222284, 0.8360655737704918)},
            34,
            [(242, 61), (235, 59), (98, 25), (160, 40)],
        ),
        (
            "demo",
            "Four hospitals, one model",
            ["average", "fair"],
            "Long Beach, served worst, gains 1.8 points; Switzerland loses 3.2 points: both within noise.",
            {"fair": (0.8258820346320348, 0.7566666666666667)},
            16,
            ROWS,
        ),
        (
            "compare",
            "hospitals: 2 methods",
            ["Scaff-PD", "FedAvg"],
            "Scaff-PD serves the worst-served client best, with 78.3 ± 2.4 %: 1.7 points more than FedAvg; the average "
            "gives up 0.5.",
            {"Scaff-PD": (0.8177201270951271, 0.7833333333333334)},
            0,
            ROWS,
        ),
        (
            "deployed",
            "deployed: 4 silos",
            ["deployed"],
            "The worst-served silo, va, is right on 75.0\u00a0% of its held-out rows; the average is 84.7\u00a0%.",
            {"deployed": (0.8468267843267844, 0.75)},
            24,
            ROWS,
        ),
    ],
)
def test_folders_of_version_0_1_open(kind, title, models, sentence, totals, rounds, rows):
    run = read(OLD / kind)
    assert (run.title, [m.name for m in run.models]) == (title, models)
    assert verdict(run)[0] == sentence
    for name, (mean, worst) in totals.items():
        assert (run.overall[name].mean, run.overall[name].worst_20) == pytest.approx(
            (mean, worst), rel=1e-12
        )
    assert len(run.rounds) == rounds
    assert [(s.train_rows, s.test_rows) for s in next(iter(run.scores.values()))] == rows
    assert all(s.weight is not None for scores in run.scores.values() for s in scores)
    assert [e["client"] for e in run.events] == (["va"] * 4 if kind == "deployed" else [])


def header(folder, name):
    return (folder / name).read_text(encoding="utf-8").splitlines()[0].split(",")


def test_every_writer_names_columns_alike(deployed):
    splits = ("train", "test")
    wanted = ["model", "client", *(f"{split}_rows" for split in splits), "weight"]
    wanted += [f"{split}_{what}" for what in ("loss", "accuracy") for split in splits]
    silos = sp.data.heart_disease(test_fraction=0.3)
    problem = Prepared(
        silos.names,
        silos.train,
        silos.test,
        sp.Linear("logistic", 0.1),
        "classification",
        (),
        "",
        "",
    )
    cohort = sp.Cohort(silos.train, problem.model, silos.names, test=silos.test)
    trained = train_model("average", "before", sp.fair(sp.Average()), problem, cohort, 2, None)
    raced = sp.compare(
        [sp.FedAvg()], sp.Problem(silos, problem.model), rounds=1, tune=1, processes=1
    )
    assert list(client_rows([trained], "accuracy")[0]) == [*wanted, "change_clear"]
    assert list(raced.client_rows[0]) == [*wanted, "seed"]
    assert header(deployed, "clients.csv") == wanted
    assert header(deployed, "rounds.csv")[:3] == ["model", "segment", "round"]


def test_names_stay_texts_and_numbers_become_numbers(tmp_path):
    file = tmp_path / "clients.csv"
    file.write_text("silo,train rows,weight,change_clear,other\n007,3,0.5,True,x\n1e3,,nan,,\n")
    first, second = read_table(file, "client", "train_rows")
    assert first == {
        "client": "007",
        "train_rows": 3,
        "weight": 0.5,
        "change_clear": True,
        "other": "x",
    }
    assert second["client"] == "1e3"
    assert (whole(second, "train_rows"), number(second, "weight"), second["change_clear"]) == (
        None,
        None,
        None,
    )
    with pytest.raises(InputError, match="The column 'other' has 'x' where a number should be"):
        number(first, "other")


@given(st.text(st.sampled_from("'=+-@\t1.e5ab"), max_size=6))
@example("'-low")
@example("-0.942")
@settings(max_examples=200)
def test_texts_come_back_as_they_were_written_and_none_is_a_formula(name):
    written = csv_text([{"client": name, "weight": -0.5}])
    assert not re.match(r"client,weight\r\n\"?[=+@\t-](?![\d.]+(e\d+)?,)", written)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clients.csv"
        file.write_text(written, newline="")
        assert read_table(file) == [{"client": name, "weight": -0.5}]


def test_the_terminal_and_json_read_an_old_folder_too(capsys):
    from scaffpd.cli.results import as_values, show

    show(OLD / "path")
    shown = " ".join(capsys.readouterr().out.split())
    assert verdict(read(OLD / "path"))[1].replace("\u00a0", " ") in shown.replace("\u00a0", " ")
    assert "worst case" in shown
    values = as_values(OLD / "train")
    assert values["verdict"] == list(verdict(read(OLD / "train")))
    assert values["clients"][0]["train_rows"] == 242
    json.dumps(values)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of every command that trains in this process, by kind."""
    home = tmp_path_factory.mktemp("tables")
    labels = patients(home / "labels.csv")
    numbers = patients(home / "numbers.csv", number=True)
    columns = ["--client", "hospital", "--target", "outcome", "--quiet", "--no-report"]
    few = [*columns, "--no-choose", "--splits", "1"]
    commands = {
        "labels": ["train", str(labels), *few, "--groups", "sex", "--recalibrate"],
        "numbers": ["train", str(numbers), *few],
        "private": ["train", str(labels), *few[:-2], "--epsilon", "4"],
        "all": ["train", str(labels), *few[:-2], "--test", "0", "--objective", "average"],
        "path": ["path", str(labels), *columns, "--points", "2"],
        "compare": [
            "compare",
            "hospitals",
            "--methods",
            "FedAvg,ScaffPD",
            "--rounds",
            "2",
            "--seeds",
            "2",
            "--tune",
            "2",
            "--processes",
            "1",
        ],
    }
    for name, command in commands.items():
        assert cli.run([*command, "--out", str(home / name)]) == 0, name
    return {name: home / name for name in commands}


def test_every_column_has_the_name_that_the_page_lists(folders, deployed):
    """A name that is not on the page is a second one for something, or belongs there; none there is out of use."""
    used = set().union(*map(columns.check, [*folders.values(), deployed]))
    assert columns.documented() - used == set()


def test_many_clients_have_columns_that_the_page_lists(tmp_path):
    silos = sp.data.heart_disease()
    cohort = sp.Cohort(silos.train, sp.Linear("logistic", 0.1), silos.names)
    sp.train(sp.fair(sp.Average()), cohort, rounds=1, every_client=False).history.to_csv(
        tmp_path / "rounds.csv"
    )
    assert "loss 95 %" in columns.check(tmp_path)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("compare", "bytes_up", "megabytes_up"),
        ("compare", "bytes_up", "up_bytes"),
        ("labels", "test_rows", "held_out"),
        ("path", "test_accuracy_mean", "mean_accuracy"),
    ],
)
def test_a_second_name_would_be_noticed(folders, tmp_path, name, old, new):
    folder = tmp_path / name
    shutil.copytree(folders[name], folder)
    file = next(
        file for file in folder.glob("*.csv") if f"{old}," in file.read_text().splitlines()[0]
    )
    file.write_text(file.read_text().replace(f"{old},", f"{new},", 1))
    with pytest.raises(AssertionError):
        columns.check(folder)


def test_costs_of_a_comparison_are_whole_bytes(folders):
    """As a run's own history has them; means over seeds are means of these."""
    with (folders["compare"] / "runs.csv").open(newline="") as file:
        runs = [row for row in csv.DictReader(file) if row["phase"] == "final"]
    for line in read_table(folders["compare"] / "table.csv", "model"):
        own = [int(row["bytes_up"]) for row in runs if row["model"] == line["model"]]
        assert len(own) == 2
        assert line["bytes_up_mean"] == np.mean(own) > 1000
    silos = sp.data.heart_disease(test_fraction=0.3)
    cohort = sp.Cohort(silos.train, sp.Linear("logistic", 0.1), silos.names, test=silos.test)
    history = sp.train(sp.FedAvg(), cohort, rounds=2).history
    run = sp.compare(
        [sp.FedAvg()], sp.Problem(silos, cohort.model), rounds=2, tune=1, processes=1
    ).finals[0]
    assert (run.bytes_up, run.bytes_down) == (history["bytes_up"][-1], history["bytes_down"][-1])


def test_a_record_of_runs_in_megabytes_reads_in_bytes(folders):
    table = json.loads((folders["compare"] / "runs.jsonl").read_text().splitlines()[0])
    old = table | {f"megabytes_{way}": table[f"bytes_{way}"] / 1e6 for way in ("up", "down")}
    old.pop("bytes_up")
    old.pop("bytes_down")
    assert json.dumps(Run.from_json(old).to_json()) == json.dumps(Run.from_json(table).to_json())


def test_megabytes_of_version_0_1_read_as_bytes():
    rows = read_table(OLD / "compare" / "table.csv", "bytes_up_mean")
    with (OLD / "compare" / "table.csv").open(newline="") as file:
        old = list(csv.DictReader(file))
    assert [row["bytes_up_mean"] for row in rows] == [
        1e6 * float(row["megabytes_up_mean"]) for row in old
    ]
    assert [m.megabytes for m in read(OLD / "compare").models] == pytest.approx(
        [float(row["megabytes_up_mean"]) + float(row["megabytes_down_mean"]) for row in old]
    )


def test_a_folder_with_the_names_before_these_opens():
    run = read(OLD / "joining")
    assert run.joining.rows["north"]["fair"]["test_loss"] == 0.5244136039996745
    assert run.joining.rows["north"]["fair"]["test_accuracy"] == 0.8
    assert set(run.joining.overall) == {"constant", "average", "fair", "personal"}
    assert run.strengths[0].mean == 0.6349246957727304
    assert (run.strengths[0].mean_error, run.strengths[0].strength) == (0.02830229808271408, np.inf)
    assert run.predictions.bins[0]["base_rate_low"] == 0.4328191934549279
    assert [(r.mean, r.worst_20) for r in run.rounds[1:2]] == [
        (0.665359477124183, 0.5294117647058824)
    ]
    from scaffpd.cli.results import as_values

    values = as_values(OLD / "joining")
    assert values["joining"]["clients"][3]["test_loss"] == 0.5244136039996745
    assert values["predictions"]["reliability"][0]["base_rate"] == 0.574468085106383


def test_scores_of_a_run_of_the_names_before_these_are_not_made_again(folders):
    """A run that goes on reads its own rounds.csv, on held-out rows or on those trained on."""
    from scaffpd.run.train import earlier_scores

    for name, split in (("labels", "test"), ("all", "train")):
        prepared = Prepared(
            (),
            [],
            [0] if split == "test" else [],
            sp.Linear("logistic", 0.1),
            "classification",
            (),
            "",
            "",
        )
        found = earlier_scores(folders[name], "average", prepared)
        old = folders[name].with_name(f"{name} before")
        shutil.copytree(folders[name], old)
        text = (old / "rounds.csv").read_text()
        for which in ("mean", "worst_20", "worst"):
            text = text.replace(f",{split}_accuracy_{which},", f",{which}_accuracy,", 1)
        (old / "rounds.csv").write_text(text)
        assert "_accuracy_" not in text.splitlines()[0]
        assert earlier_scores(old, "average", prepared) == found != {}


@pytest.mark.parametrize("gone", [0, 1, 3])
def test_a_deployed_run_has_the_measure_of_any_silo(deployed, tmp_path, gone):
    """Silos that test nothing, or send no accuracy, do not take that of the others away."""
    shutil.copytree(deployed, tmp_path / "run")
    rows = read_table(deployed / "clients.csv")
    for row in rows[:gone]:
        row |= {"test_rows": 0, "test_loss": None, "test_accuracy": None}
    for row in rows[1:gone]:
        row["test_loss"] = 0.5  # and no accuracy
    with (tmp_path / "run" / "clients.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    run = read(tmp_path / "run")
    assert (run.measure, run.split) == ("accuracy", "test")
    assert [score.value is None for score in run.scores["deployed"]] == [
        i < gone for i in range(len(rows))
    ]
    assert run.overall["deployed"].mean == pytest.approx(
        np.mean([row["test_accuracy"] for row in rows[gone:]])
    )


def test_a_deployed_run_without_accuracies_has_losses(deployed, tmp_path):
    shutil.copytree(deployed, tmp_path / "run")
    rows = read_table(deployed / "clients.csv")
    text = ["client,train_rows,test_rows,weight,train_loss,test_loss,train_accuracy,test_accuracy"]
    text += [f"{row['client']},9,9,0.25,0.1,0.2,," for row in rows]
    (tmp_path / "run" / "clients.csv").write_text("\n".join(text) + "\n")
    assert (read(tmp_path / "run").measure, read(tmp_path / "run").overall["deployed"].mean) == (
        "loss",
        0.2,
    )


def test_a_comparison_whose_first_method_is_always_wrong_has_accuracies(folders, tmp_path):
    shutil.copytree(folders["compare"], tmp_path / "run")
    with (tmp_path / "run" / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[0]["test_accuracy_mean_mean"] = "0.0"
    with (tmp_path / "run" / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert read(tmp_path / "run").measure == "accuracy"


def test_a_run_that_goes_on_reads_like_the_finished_one(deployed, tmp_path):
    """progress.jsonl has what rounds.csv has, traffic of earlier segments included, but not the segments' starts."""
    shutil.copytree(deployed, tmp_path / "run")
    (tmp_path / "run" / "outcome.json").unlink()
    live, done = (
        {r.number: r for r in read(folder).rounds} for folder in (tmp_path / "run", deployed)
    )
    starts = {
        part["before"] for part in json.loads((deployed / "segments.json").read_text())["segments"]
    }
    assert len(starts) == 3
    assert set(done) - set(live) == {0}
    for place in set(live) - starts:
        one = live[place]
        other = done[place]
        assert (one.exchanges, one.megabytes, one.losses) == (
            other.exchanges,
            other.megabytes,
            other.losses,
        )


def test_what_is_not_a_number_is_an_empty_cell_in_every_table(folders, deployed):
    for folder in [*folders.values(), deployed]:
        for file in folder.glob("*.csv"):
            with file.open(newline="", encoding="utf-8") as text:
                assert "nan" not in {cell.lower() for row in csv.reader(text) for cell in row}, file
