"""`scaffpd silo check` and `init`: what the operator sees, and that nothing private is promised
wrongly.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from scaffpd import cli
from scaffpd.cli.silo import silo
from scaffpd.run.settings.silo import SiloFile

if "silo" not in [group.name for group in cli.app.registered_groups]:
    cli.app.add_typer(silo, name="silo")

ROWS = "".join(
    f"{k},{'' if k % 5 == 0 else k / 10},{'often' if k % 3 else 'also'},7,p{k},,{k % 2}\n"
    for k in range(40)
)
ODD = "41,x,seldom,7,p41,,2\n42,0.1,seldom,7,p42,,\n"


def site(
    folder: Path, text: str = f"k,v,c,one,id,nothing,y\n{ROWS}{ODD}", data: str = "", rest: str = ""
) -> str:
    (folder / "a.csv").write_text(text, encoding="utf-8")
    path = folder / "silo.toml"
    path.write_text(
        f'name = "a"\n[data]\nfile = "a.csv"\ntarget = "y"\n{data}\n{rest}', encoding="utf-8"
    )
    return str(path)


def checked(capsys, path: str, *more: str) -> str:
    assert cli.run(["silo", "check", path, *more]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_it_shows_the_data_and_what_leaves(tmp_path, capsys):
    out = checked(capsys, site(tmp_path, rest="[split]\ntest = 0.3\n"))
    words = " ".join(out.split())
    for text in (
        "Silo a",
        "classification",
        "29 to train on, 12 held out",
        "6 columns",
        "Rows without a target are left out: 1.",
        "All values are the same in one.",
        "No training row has a value in nothing",
        "The label 2 has one row only.",
        "Column 'v' is read as categories because of 'x' in line 42.",
        "Column 'id' has 41 categories, each in fewer",
        "What leaves this site",
        "What never leaves",
        "Categories of 'c': also, often.",
        "Labels: 0, 1, 2.",
        "never fewer than 20 rows",
        "not anonymous",
        "predictions of single rows",
    ):
        assert text in words, text
    assert "seldom" not in out
    assert str(tmp_path) not in out
    assert "a.csv" not in out


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_the_screen_and_is_plain_in_a_pipe(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = checked(capsys, site(tmp_path))
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= min(max(width, 50), 100)


def test_the_same_as_json(tmp_path, capsys):
    found = json.loads(checked(capsys, site(tmp_path, rest="[split]\ntest = 0\n"), "--json"))
    assert found["rows"] == {"train": 41, "test": 0, "without_target": 1}
    assert found["labels"] == [
        {"label": 0, "train": 20, "test": 0},
        {"label": 1, "train": 20, "test": 0},
        {"label": 2, "train": 1, "test": 0},
    ]
    by_name = {column["name"]: column for column in found["columns"]}
    assert by_name["v"]["missing"] == 8
    assert by_name["nothing"] == {
        "name": "nothing",
        "kind": "unknown",
        "missing": 41,
        "categories": 0,
        "withheld": 0,
    }
    assert by_name["c"] == {
        "name": "c",
        "kind": "category",
        "missing": 0,
        "categories": 3,
        "withheld": 1,
    }
    assert by_name["id"]["withheld"] == 41
    assert found["bytes"]["encoded"] == 8 * 41 * found["features"]["encoded"]
    assert found["warnings"]
    assert found["leaves"]
    assert found["stays"]


def test_a_silo_that_could_not_take_part_is_shown_and_refused(tmp_path, capsys):
    path = site(tmp_path, "x,y\n1,0\n2,1\n3,0\n4,1\n", rest="[split]\ntest = 0\n")
    assert cli.run(["silo", "check", str(path)]) == 2
    shown = capsys.readouterr()
    assert "There are 4 training rows, and limits.rows asks for 20" in " ".join(shown.out.split())
    assert "has 4 training rows, and its limits.rows asks for 20" in shown.err
    path = site(tmp_path, "x,y\n" + "".join(f"{k},patient {k}\n" for k in range(60)))
    assert cli.run(["silo", "check", str(path)]) == 2
    assert "60 different texts" in capsys.readouterr().err


def test_regression_arrays_and_names_with_control_characters(tmp_path, capsys):
    few = "[limits]\nrows = 2\n"
    out = checked(capsys, site(tmp_path, "x\x1b[31m,y\n1,0.5\n2,1\n3,0\n4,1\n", rest=few))
    assert "\x1b" not in out
    assert "smallest 0, mean 0.625, largest 1" in out
    X = np.ones((30, 3))
    X[:, 1] = np.arange(30)
    X[4, 1] = np.nan
    X[:, 2] = np.nan
    np.save(tmp_path / "b.npy", X)
    (tmp_path / "rows_b.py").write_text(
        "import numpy as np\nfrom pathlib import Path\ndef load():\n"
        "    return np.load(Path(__file__).parent / 'b.npy'), np.arange(30) % 2\n"
    )
    (tmp_path / "b.toml").write_text('name = "b"\n[data]\nentry = "rows_b:load"\n')
    words = " ".join(checked(capsys, str(tmp_path / "b.toml")).split())
    for text in (
        "31 values",
        "All values are the same in x0",
        "a value in x2",
        "The shape of the features: 3.",
    ):
        assert text in words


def test_a_cohort_of_ones_own(tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "import numpy as np, scaffpd as sp\n"
        "def load():\n"
        "    return sp.Cohort({'b': (np.ones((25, 3)), np.ones(25))}, sp.Linear('squared', "
        "l2=1.0))\n"
    )
    (tmp_path / "b.toml").write_text('name = "b"\n[data]\nentry = "own:load"\n')
    words = " ".join(checked(capsys, str(tmp_path / "b.toml")).split())
    assert "the entry's own Cohort" in words
    assert "a model of 3 parameters" in words


def test_a_mistake_is_one_sentence_and_code_2(tmp_path, capsys):
    assert cli.run(["silo", "check", site(tmp_path, data='colums = ["k"]')]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err == "Unknown key in [data] of 'silo.toml', 'colums': did you mean 'columns'?\n"
    )
    assert cli.run(["silo", "check", str(tmp_path / "none.toml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_init_writes_a_template_that_can_be_read_and_is_never_overwritten(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    assert cli.run(["silo", "init", "--out", str(path)]) == 0
    assert "scaffpd silo check" in capsys.readouterr().out
    file = SiloFile.read(path)
    path.with_name("short.toml").write_text(
        'name = "my-hospital"\n[data]\nfile = "data.csv"\ntarget = "disease"\n'
    )
    short = SiloFile.read(path.with_name("short.toml"))
    assert (file.limits, file.data, file.split) == (short.limits, short.data, short.split)
    text = path.read_text()
    assert cli.run(["silo", "init", "--out", str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert path.read_text() == text
    assert cli.run(["silo", "init", "--out", str(tmp_path / "no" / "where.toml")]) == 2
    # every commented key works once it stands there
    bare = re.sub(r"(?m)^# (?=\w+ = |\[)(?!entry)", "", text)
    path.write_text(bare)
    file = SiloFile.read(path)
    assert (file.data.columns, file.models) == (("age", "sex"), {"small": "networks:small"})


def test_it_says_what_a_dishonest_coordinator_could_learn(tmp_path, capsys):
    """Every number in it is a limit of the file; tests/security shows that silos keep to them."""
    words = " ".join(
        checked(capsys, site(tmp_path, rest="[limits]\npoints = 77\nruns = 5\n")).split()
    )
    for text in (
        "If the coordinator is dishonest",
        "at 77 points of its choice",
        "accuracy at 20 points",
        "in 5 runs",
        "your gradients and updates at those points, as they are",
        "secure.pins",
    ):
        assert text in words, text
    rest = "[secure]\nrequired = true\nshare = 0.5\nmembers = 4\ncolluding = 2\n"
    path = site(tmp_path, rest=rest)
    words = " ".join(checked(capsys, path).split())
    for text in (
        "sums over 4 silos or more",
        "yours is up to 50%",
        "2 other silos help it",
        "needs the others' keys in secure.pins",
    ):
        assert text in words, text
    Path(path).write_text(Path(path).read_text() + f'[secure.pins]\nb = "{"0" * 64}"\n')
    assert "would not take part" not in " ".join(checked(capsys, path).split())
