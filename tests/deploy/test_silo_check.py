"""`scaffpd silo check` and `init`: what the operator sees, and that nothing private is promised
wrongly.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from scaffpd import cli
from scaffpd.settings.silo import SiloFile

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


def test_it_shows_the_data_and_how_to_declare_it(tmp_path, capsys):
    out = checked(capsys, site(tmp_path, data="test = 0"))
    words = " ".join(out.split())
    for text in (
        "Silo a",
        "classification",
        "41 to train on, 0 held out",
        "Rows without a target are left out: 1.",
        "All values are the same in one.",
        "No training row has a value in nothing",
        "Column 'v' is read as categories because of 'x' in line 42.",
        "labels = [0, 1, 2]",
        '"c" = ["also", "often", "seldom"]',
        '"k" = "number"',
    ):
        assert text in words, text
    assert str(tmp_path) not in out
    assert "a.csv" not in out


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_the_screen_and_is_plain_in_a_pipe(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = checked(capsys, site(tmp_path))
    assert "\x1b" not in out
    lines = [line for line in out.splitlines() if " = " not in line]  # those are to be copied
    assert max(map(len, lines)) <= min(max(width, 50), 100)


def test_the_same_as_json(tmp_path, capsys):
    found = json.loads(checked(capsys, site(tmp_path, data="test = 0"), "--json"))
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
    }
    assert by_name["c"]["categories"] == 3
    assert found["warnings"]


def test_a_silo_that_could_not_take_part_is_shown_and_refused(tmp_path, capsys):
    path = site(tmp_path, "x,y\n1,0\n2,1\n3,0\n4,1\n", data="test = 0")
    assert cli.run(["silo", "check", str(path)]) == 2
    shown = capsys.readouterr()
    assert "4 to train on" in shown.out
    assert "has 4 training rows, and its limits.rows asks for 20" in shown.err
    path = site(tmp_path, "x,y\n" + "".join(f"{k},patient {k}\n" for k in range(60)))
    assert cli.run(["silo", "check", str(path)]) == 2
    assert "60 different texts" in capsys.readouterr().err


def test_regression_arrays_and_names_with_control_characters(tmp_path, capsys):
    few = "test = 0\n[limits]\nrows = 2\n"
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
    (tmp_path / "b.toml").write_text('name = "b"\n[data]\nentry = "rows_b:load"\ntest = 0\n')
    words = " ".join(checked(capsys, str(tmp_path / "b.toml")).split())
    for text in (
        "31 values",
        "All values are the same in x0",
        "a value in x2",
        "columns = [3]",
    ):
        assert text in words


def test_a_mistake_is_one_sentence_and_code_2(tmp_path, capsys):
    assert cli.run(["silo", "check", site(tmp_path, data="tes = 0.1")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Unknown key in [data] of 'silo.toml', 'tes': did you mean 'test'?\n"
    assert cli.run(["silo", "check", str(tmp_path / "none.toml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_template_of_a_silos_file_says_the_defaults(tmp_path):
    text = files("scaffpd.settings").joinpath("silo.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text)
    file = SiloFile.read(path)
    path.with_name("short.toml").write_text(
        'name = "my-hospital"\n[data]\nfile = "data.csv"\ntarget = "disease"\n'
    )
    short = SiloFile.read(path.with_name("short.toml"))
    assert (file.limits, file.data) == (short.limits, short.data)
    # every commented key works once it stands there
    bare = re.sub(r"(?m)^# (?=\w+ = |\[)(?!entry)", "", text)
    path.write_text(bare)
    file = SiloFile.read(path)
    assert (file.data.missing, file.models) == ((-999,), {"small": "networks:small"})
