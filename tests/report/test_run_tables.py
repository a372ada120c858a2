"""The tables of run folders have the same columns whoever writes them, and folders of version 0.1 still open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scaffpd as sp
from scaffpd.errors import InputError
from scaffpd.report.read import read
from scaffpd.report.verdict import verdict
from scaffpd.runs import number, read_table, whole
from scaffpd.runs.folder import client_rows
from scaffpd.runs.prepare import Prepared
from scaffpd.runs.train import train_model

OLD = Path(__file__).parent / "fixtures"  # written by version 0.1
ROWS = [(212, 91), (206, 88), (87, 36), (140, 60)]


@pytest.mark.parametrize(
    ("kind", "title", "models", "sentence", "totals", "rounds", "rows"),
    [
        ("train", "hospitals: 4 hospitals", ["average", "fair"],
         "No change is clear of noise: the worst-served hospital gains 3.6 points; the average gives up 0.8.",
         {"average": (0.8510197277021394, 0.8), "fair": (0.843380800222284, 0.8360655737704918)}, 18,
         [(242, 61), (235, 59), (98, 25), (160, 40)]),
        ("path", "hospitals: 4 hospitals", ["average", "ρ = 1.9", "ρ = 0.11", "ρ = 0.0063", "worst case"],
         "No change is clear of noise: at ρ\u00a0=\u00a00.11, which is suggested, the worst-served hospital gains "
         "3.6 points; the average gives up 0.8.", {"ρ = 0.11": (0.843380800222284, 0.8360655737704918)}, 34,
         [(242, 61), (235, 59), (98, 25), (160, 40)]),
        ("demo", "Four hospitals, one model", ["average", "fair"],
         "Long Beach, served worst, gains 1.8 points; Switzerland loses 3.2 points: both within noise.",
         {"fair": (0.8258820346320348, 0.7566666666666667)}, 16, ROWS),
        ("compare", "hospitals: 2 methods", ["Scaff-PD", "FedAvg"],
         "Scaff-PD serves the worst-served client best, with 78.3 ± 2.4 %: 1.7 points more than FedAvg; the average "
         "gives up 0.5.", {"Scaff-PD": (0.8177201270951271, 0.7833333333333334)}, 0, ROWS),
        ("deployed", "deployed: 4 silos", ["deployed"],
         "The worst-served silo, va, is right on 75.0\u00a0% of its held-out rows; the average is 84.7\u00a0%.",
         {"deployed": (0.8468267843267844, 0.75)}, 24, ROWS),
    ],
)  # fmt: skip
def test_folders_of_version_0_1_open(kind, title, models, sentence, totals, rounds, rows):
    run = read(OLD / kind)
    assert (run.title, [m.name for m in run.models]) == (title, models)
    assert verdict(run)[0] == sentence
    for name, (mean, worst) in totals.items():
        assert (run.overall[name].mean, run.overall[name].worst_20) == pytest.approx((mean, worst), rel=1e-12)
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
    problem = Prepared(silos.names, silos.train, silos.test, sp.Linear("logistic", 0.1), "classification", (), "", "")
    cohort = sp.Cohort(silos.train, problem.model, silos.names, test=silos.test)
    trained = train_model("average", "before", sp.fair(sp.Average()), problem, cohort, 2, None)
    raced = sp.compare([sp.FedAvg()], sp.Problem(silos, problem.model), rounds=1, tune=1, processes=1)
    assert list(client_rows([trained], "accuracy")[0]) == [*wanted, "change_clear"]
    assert list(raced.client_rows[0]) == [*wanted, "seed"]
    assert header(deployed, "clients.csv") == wanted
    assert header(deployed, "rounds.csv")[:3] == ["model", "segment", "round"]


def test_names_stay_texts_and_numbers_become_numbers(tmp_path):
    file = tmp_path / "clients.csv"
    file.write_text("silo,train rows,weight,change_clear,other\n007,3,0.5,True,x\n1e3,,nan,,\n")
    first, second = read_table(file, "client", "train_rows")
    assert first == {"client": "007", "train_rows": 3, "weight": 0.5, "change_clear": True, "other": "x"}
    assert second["client"] == "1e3"
    assert (whole(second, "train_rows"), number(second, "weight"), second["change_clear"]) == (None, None, None)
    with pytest.raises(InputError, match="The column 'other' has 'x' where a number should be"):
        number(first, "other")


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
