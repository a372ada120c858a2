"""`scaffpd train` and `scaffpd path` as a user meets them; wrong inputs get one sentence."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from scaffpd import cli, objectives
from scaffpd.cli.train import requested
from scaffpd.errors import InputError
from scaffpd.study import choosing
from scaffpd.study import joining as gains


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(1)
    lines = ["hospital,age,sex,note,ill"]
    for k in range(150):
        site = ["North", "South", "West"][k % 3]
        age = random.normal(60, 10)
        sex = random.choice(["f", "m", ""])
        ill = int(
            age + 12 * (sex == "m") * (1 if site != "West" else -1) + random.normal(0, 9) > 63
        )
        lines.append(f"{site},{age:.1f},{sex},note {k},{ill}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def here(tmp_path, monkeypatch, rows):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "patients.csv").write_text(rows)
    return tmp_path


def ran(command, capsys, code=0):
    assert cli.run(shlex.split(command)) == code
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return found


TABLE = "train patients.csv --client hospital --target ill"
QUICK = f"{TABLE} --no-choose --splits 0"  # without what joining brings


def test_two_options_are_enough(here, capsys, monkeypatch):
    for name, few in (
        ("L2S", choosing.L2S[1:3]),
        ("KAPPAS", choosing.KAPPAS[::2]),
        ("STRENGTHS", 1),
    ):
        monkeypatch.setattr(choosing, name, few)
    monkeypatch.setattr(gains, "PATH", gains.PATH[::3])
    found = ran(f"{TABLE} --splits 1", capsys)
    for words in (
        "patients: 3 clients by hospital",
        "North",
        "South",
        "West",
        "accuracy",
        "certified gap",
    ):
        assert words in found.out
    assert "Run:    runs/patients\n" in found.out
    assert "Report: runs/patients/report.html" in found.out
    assert "Column 'note' left out: 150 different texts in 150 rows." in found.err
    assert "Numbers: age." in found.err
    assert "Categories: sex (2)." in found.err
    assert "fair round" in found.err
    page = (here / "runs" / "patients" / "report.html").read_text()
    assert "Served worst" in page


def test_the_same_command_finds_its_run_and_another_one_its_own_folder(here, capsys):
    ran(QUICK, capsys)
    assert "runs/patients\n" in ran(QUICK, capsys).out
    assert "runs/patients-2\n" in ran(f"{QUICK} --objective CVaR", capsys).out
    assert "runs/patients\n" in ran("train runs/patients/config.toml", capsys).out
    ran(f"{QUICK} --objective CVaR --out runs/patients", capsys, code=2)
    ran(f"{QUICK} --objective CVaR --out runs/patients --fresh --no-report", capsys)


def test_quiet_and_json(here, capsys):
    quiet = ran(f"{QUICK} --quiet --no-report", capsys)
    assert quiet.out == quiet.err == ""
    assert not (here / "runs" / "patients" / "report.html").exists()
    found = json.loads(ran(f"{QUICK} --json", capsys).out)
    assert found["folder"] == "runs/patients"
    assert found["models"][1]["status"] == "converged"
    assert len(found["verdict"]) == 2
    assert found["cautions"]
    rows = found["models"][1]["clients"]
    assert {row["client"] for row in rows} == {"North", "South", "West"}
    assert all(isinstance(row["test_score"], float) for row in rows)


def test_a_path_is_drawn_and_suggests_its_knee(here, capsys):
    found = ran("path patients.csv --client hospital --target ill --points 2", capsys)
    assert "worst case" in found.out
    assert "Suggested: " in found.out
    assert "4 models in " in found.out
    assert (here / "runs" / "patients-path" / "report.html").exists()


@pytest.mark.parametrize("folder", ["./hospitals", "hospitals/", "Hospitals/."])
def test_a_known_name_means_the_data_set_and_a_path_the_folder_of_that_name(here, folder):
    (here / folder).mkdir()
    for name in ("north", "south"):
        (here / folder / f"{name}.csv").write_text("age,ill\n1,0\n2,1\n3,0\n")
    asked = {"client": "file", "target": "ill"}
    plain = folder.strip("./")
    assert (
        requested(plain, {}).data.source
        == requested("heart_disease", {}).data.source
        == "hospitals"
    )
    read = requested(folder, asked).data
    assert read.source is None
    assert Path(read.file) == here / plain
    for options, sentence in (
        (asked, "leave --client out"),
        ({"more_files": ["a.csv"]}, "name it alone"),
    ):
        with pytest.raises(InputError, match=f"{sentence}, or write ./{plain} for the folder here"):
            requested(plain, options)
    with pytest.raises(InputError, match=r"'digits' is a data set of its own: name it alone[.]"):
        requested("digits", {"more_files": ["a.csv"]})


def test_a_path_does_not_take_the_folder_of_a_run(here, capsys):
    ran(f"{QUICK} --no-report", capsys)
    found = ran("path hospitals --out runs/patients", capsys, code=2)
    assert (
        found.err
        == "The folder 'runs/patients' is that of `scaffpd train`: choose another with --out.\n"
    )
    ran("path hospitals --points 1 --no-report", capsys)
    assert "runs/hospitals-path-2\n" in ran("path hospitals --points 2 --no-report", capsys).out


def test_options_take_the_place_of_the_settings(here, capsys):
    (here / "c.toml").write_text(
        '[data]\nsource = "hospitals"\n[objective]\nkind = "CVaR"\nalpha = 0.3\n'
    )
    found = json.loads(
        ran(
            "train c.toml --objective tilted --strength 0.2 --rounds 2 --tol 0 --splits 0 --json",
            capsys,
        ).out
    )
    assert [m["objective"] for m in found["models"]] == ["Average()", "Tilted(rho=0.2)"]
    assert [m["rounds"] for m in found["models"]] == [2, 2]


def test_an_interruption_says_how_to_go_on(here, capsys, monkeypatch):
    from scaffpd.cli.screens import RoundsScreen

    def stop(self, moment):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RoundsScreen, "show", stop)
        found = ran(f"{QUICK}", capsys, code=130)
    assert "Interrupted; the same command goes on." in found.err
    assert "certified gap" in ran(QUICK, capsys).out


def test_regression(here, capsys):
    text = "site,x,price\n" + "".join(
        f"{'ab'[k % 2]},{2 * k},{3.5 * k + (k % 7) + 1000}\n" for k in range(80)
    )
    (here / "prices.csv").write_text(text)
    found = ran(
        "train prices.csv --client site --target price --objective Agnostic --splits 0", capsys
    )
    assert "held-out rmse" in found.out
    assert "rmse" in (here / "runs" / "prices" / "clients.csv").read_text()


OBJECTIVES = ", ".join(map(repr, objectives.OBJECTIVES))
WRONG = [
    ("train", "WHAT"),
    ("train nothing.csv", "Cannot read the data file 'nothing.csv': No such file or directory."),
    ("train federation.toml", "looks like a federation.toml"),
    (
        f"{QUICK} --columns age,ill",
        "Column 'ill' is the target, so it cannot be one to learn from.",
    ),
    (
        f"{QUICK} --columns age,hospital",
        "Column 'hospital' is the client, so it cannot be one to learn from.",
    ),
    (
        "train patients.csv",
        "train needs --client: which column of 'patients.csv' has every row's client? There are",
    ),
    (
        "train patients.csv --client hospital",
        "train needs --target: which column of 'patients.csv' is to be predicted?",
    ),
    ("train nothing.csv --client a --target b", "Cannot read the data file"),
    (
        "train patients.csv --client hospitl --target ill",
        "Unknown column of 'patients.csv', 'hospitl': did you mean",
    ),
    (
        "train patients.csv --client hospital --target il",
        "Unknown column of 'patients.csv', 'il': did you mean 'ill'?",
    ),
    (
        "train patients.csv --client ill --target ill",
        "Column 'ill' cannot be both the client and the target.",
    ),
    ("train patients.csv --clinet hospital", "No such option '--clinet'. Did you mean '--client'?"),
    (f"{QUICK} --columns aeg", "Unknown column of 'patients.csv', 'aeg': did you mean 'age'?"),
    (f"{QUICK} --objective ChiSqare", "Unknown objective 'ChiSqare': did you mean 'ChiSquare'?"),
    (f"{QUICK} --objective xyz", f"Unknown objective 'xyz': choose one of {OBJECTIVES}."),
    (f"{QUICK} --objective CVaR --strength 2", "CVaR needs 0 < alpha <= 1, got 2.0."),
    (f"{QUICK} --objective ChiSquare --strength=-1", "ChiSquare needs rho > 0"),
    (
        f"{QUICK} --objective Agnostic --strength 1",
        "Agnostic has no strength: leave --strength out.",
    ),
    (f"{QUICK} --objective Nash", "Nash needs --strength"),
    ("train key.toml --strength 1", "--strength needs --objective"),
    (f"{QUICK} --task classify", "Unknown --task 'classify': did you mean 'classification'?"),
    (f"{QUICK} --test 1", "--test needs a number from 0 to below 1, got 1."),
    (f"{QUICK} --test nan", "--test needs a number from 0 to below 1, got nan."),
    (f"{QUICK} --l2 -1", "--l2 needs a number >= 0 and finite, got -1."),
    (f"{QUICK} --rounds 0", "--rounds"),
    (f"{QUICK} --tol -1", "--tol needs a number >= 0 and finite, got -1."),
    (f"{QUICK} --l2 0 --tol 1e-3", "tol needs a certificate, and there is none"),
    (f"{QUICK} --seed -1", "--seed"),
    (f"{QUICK} --device gpu", "Device 'gpu' cannot be used here: there is no such kind of device."),
    (f"{QUICK} --out patients.csv", "Cannot write to the folder 'patients.csv': it is a file."),
    (f"{QUICK} --task regression --objective Nash --strength 0.1", "Nash needs"),
    (
        "train hospitls",
        "'hospitls' is no file, and no data set of that name is known; did you mean hospitals?",
    ),
    (
        "train hospitals --client age",
        "'hospitals' brings its own clients and columns: leave --client out.",
    ),
    ("train nothing.toml", "Cannot read"),
    ("train wrong.toml", "The file 'wrong.toml' is not TOML"),
    ("train empty.toml", "'empty.toml' needs exactly one of file, source and entry in [data]."),
    ("train key.toml", "Unknown key in [data] of 'key.toml', 'sorce': did you mean 'source'?"),
    ("train .", "'broken.csv.gz' is no gzip file, or is cut off."),
    (
        "train notes.doc",
        "'notes.doc' is neither a settings file (.toml) nor a table (.csv, .tsv, .json, .xlsx or",
    ),
    (
        "train broken.csv.gz --client a --target b",
        "'broken.csv.gz' is no gzip file, or is cut off.",
    ),
    ("train spoilt.parquet --client a --target b", "'spoilt.parquet' cannot be read as Parquet"),
    ("train logistic.toml", "Logistic loss tells two labels apart, and there are 10: use softmax."),
    (
        "path patients.csv --client hospital --target ill --objective Nash",
        "A fairness path goes along",
    ),
    ("path hospitals --points 0", "--points"),
    ("path fedavg.toml", "A fairness path"),
    ("report nowhere", "There is no folder 'nowhere'."),
    ("report .", "it has no run.json"),
    ("report patients.csv", "is a file; name the folder of a run"),
]


@pytest.mark.parametrize(("command", "sentence"), WRONG, ids=[command for command, _ in WRONG])
def test_wrong_inputs_get_one_sentence(here, capsys, command, sentence):
    files = {
        "wrong.toml": "name = \n",
        "empty.toml": "",
        "key.toml": '[data]\nsorce = "digits"\n',
        "notes.doc": "",
        "logistic.toml": '[data]\nsource = "digits"\n[model]\nloss = "logistic"\n',
        "fedavg.toml": '[data]\nsource = "hospitals"\n[algorithm]\nkind = "FedAvg"\n',
        "federation.toml": 'silos = ["a", "b"]\n',
        "broken.csv.gz": "no",
        "spoilt.parquet": "no",
    }
    for name, text in files.items():
        (here / name).write_text(text)
    found = ran(command, capsys, code=2)
    last = found.err.strip().splitlines()[-1]
    assert sentence in last
    assert found.out == ""
    assert not (here / "runs").exists()
