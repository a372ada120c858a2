"""silo.toml: what is read, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaffpd.algorithms import ALGORITHMS
from scaffpd.algorithms.base import VECTORS
from scaffpd.errors import InputError
from scaffpd.run.settings.silo import SiloFile

FULL = """
name = "cleveland"
[data]
file = "data/cleveland.csv"
target = "disease"
columns = ["age", "sex"]
categories = ["cp"]
task = "classification"
[split]
test = 0.3
[limits]
algorithms = ["ScaffPD", "Fair"]
dimension = 100
rarest = 3
rows = 4
[models]
small = "networks:small"
"""
SHORT = 'name = "a"\n[data]\nfile = "a.csv"\ntarget = "y"\n'


def read(folder: Path, text: str) -> SiloFile:
    path = folder / "silo.toml"
    path.write_text(text, encoding="utf-8")
    return SiloFile.read(path)


def refused(folder: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        read(folder, text)
    sentence = str(caught.value)
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence
    assert "silo.toml" in sentence
    return sentence


def test_everything_can_be_said(tmp_path):
    file = read(tmp_path, FULL)
    assert (file.name, file.split.test) == ("cleveland", 0.3)
    assert file.data.file == tmp_path / "data" / "cleveland.csv"
    assert (file.data.target, file.data.entry, file.data.task) == (
        "disease",
        None,
        "classification",
    )
    assert (file.data.columns, file.data.categories) == (("age", "sex"), ("cp",))
    assert file.models == {"small": "networks:small"}
    limits = file.limits
    assert limits.algorithms == ("ScaffPD", "Fair")
    assert (limits.dimension, limits.rarest, limits.rows) == (100, 3, 4)
    assert file.audit == tmp_path / "audit.jsonl"
    assert read(tmp_path, 'folder = "state"\n' + SHORT).audit == tmp_path / "state" / "audit.jsonl"


def test_little_has_to_be_said(tmp_path):
    file = read(tmp_path, SHORT)
    assert (file.split.test, file.data.columns, file.data.categories) == (0.2, (), ())
    limits = file.limits
    assert (limits.dimension, limits.rarest, limits.rows) == (1_000_000, 5, 20)
    assert limits.algorithms is not None
    assert {"ScaffPD", "SubspaceSaddle", "Fair", "FedAvg", "Scaffold", "DRFA"} <= set(
        limits.algorithms
    )
    assert not any(VECTORS in ALGORITHMS[name].needs for name in limits.algorithms)


def test_the_path_may_be_relative(tmp_path, monkeypatch):
    read(tmp_path, SHORT)
    monkeypatch.chdir(tmp_path)
    assert SiloFile.read("silo.toml").data.file == tmp_path / "a.csv"


def test_npz_and_entries_have_defaults(tmp_path):
    source = read(tmp_path, 'name = "a"\n[data]\nfile = "a.npz"\n').data
    assert source.target == "y"
    source = read(tmp_path, 'name = "a"\n[data]\nentry = "hospital.data:load"\n').data
    assert (source.file, source.entry) == (None, "hospital.data:load")


def test_all_algorithms_can_be_allowed(tmp_path):
    assert read(tmp_path, SHORT + '[limits]\nalgorithms = "all"\n').limits.algorithms is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            SHORT + "[split]\ntets = 0.1\n",
            "Unknown key in [split] of 'silo.toml', 'tets': did you mean 'test'?",
        ),
        ('nmae = "a"\n', "Unknown key in 'silo.toml', 'nmae': did you mean 'name'?"),
        ("[data]\n", "(the first a letter or digit) for name, but it is missing."),
        ("name = 3\n", "(the first a letter or digit) for name, got 3."),
        ('name = "a b/../c"\n', "letters, digits, - and _"),
        ('name = "a"\ndata = 3\n', "needs a table [data], got data = 3."),
        ('name = "a"\n', "needs either file or entry in [data], and has neither."),
        ('name = "a"\n[data]\nfile="a.csv"\nentry="a:b"\n', "and has both."),
        ('name = "a"\n[data]\nfile = "a.docx"\n', "needs a table (.csv "),
        (
            'name = "a"\n[data]\nfile = "a.csv"\n',
            "the column to be predicted for data.target, but it is missing.",
        ),
        (
            'name = "a"\n[data]\nentry = "load"\n',
            "needs module:function for data.entry, got 'load'.",
        ),
        ('name = "a"\n[data]\nentry = "a:b"\ntarget = "y"\n', "leave it out"),
        (SHORT + 'columns = "age"\n', "a list such as"),
        (SHORT + 'columns = ["age", "age"]\n', "names 'age' twice."),
        (SHORT + 'columns = ["age", "y"]\n', "names the target 'y' in data.columns as well"),
        (SHORT + 'task = "regresion"\n', "did you mean 'regression'?"),
        (SHORT + "[split]\ntest = 1\n", "a share from 0 to below 1 for split.test, got 1."),
        (SHORT + "[split]\ntest = nan\n", "a share from 0 to below 1 for split.test, got nan."),
        (SHORT + "[limits]\nrows = 0\n", "a whole number >= 1 for limits.rows, got 0."),
        (SHORT + "[limits]\nrarest = 2.5\n", "a whole number >= 1 for limits.rarest, got 2.5."),
        (SHORT + '[limits]\nalgorithms = ["ScafPD"]\n', "did you mean 'ScaffPD'?"),
        (SHORT + "[limits]\nalgorithms = []\n", "a list such as"),
        (SHORT + "[models]\nsmall = 3\n", "for models.small, got 3."),
        (
            SHORT + '[models]\nsmall = "small"\n',
            "needs module:function for models.small, got 'small'.",
        ),
        ("models = 3\n" + SHORT, "needs a table [models], got models = 3."),
        ("name = \n", "is not TOML"),
    ],
)
def test_mistakes_get_one_sentence_with_file_and_key(tmp_path, text, words):
    assert words in refused(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        SiloFile.read(tmp_path / "silo.toml")
    (tmp_path / "silo.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(InputError, match="not UTF-8"):
        SiloFile.read(tmp_path / "silo.toml")
    (tmp_path / "silo.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InputError, match="too large"):
        SiloFile.read(tmp_path / "silo.toml")
