"""silo.toml: what is read, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.refusals import refuses
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


def test_entries_have_defaults(tmp_path):
    source = read(tmp_path, 'name = "a"\n[data]\nentry = "hospital.data:load"\n').data
    assert (source.file, source.entry) == (None, "hospital.data:load")


def test_all_algorithms_can_be_allowed(tmp_path):
    assert read(tmp_path, SHORT + '[limits]\nalgorithms = "all"\n').limits.algorithms is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (SHORT + "[split]\ntets = 0.1\n", "unknown-name"),
        ('nmae = "a"\n', "unknown-name"),
        ("[data]\n", "setting-missing"),
        ("name = 3\n", "setting-invalid"),
        ('name = "a b/../c"\n', "setting-invalid"),
        ('name = "a"\ndata = 3\n', "not-a-table"),
        ('name = "a"\n', "file-or-entry"),
        ('name = "a"\n[data]\nfile="a.csv"\nentry="a:b"\n', "file-or-entry"),
        ('name = "a"\n[data]\nfile = "a.docx"\n', "not-a-table"),
        ('name = "a"\n[data]\nfile = "a.csv"\n', "setting-missing"),
        ('name = "a"\n[data]\nentry = "load"\n', "setting-invalid"),
        ('name = "a"\n[data]\nentry = "a:b"\ntarget = "y"\n', "target-of-entry"),
        (SHORT + 'columns = "age"\n', "setting-invalid"),
        (SHORT + 'columns = ["age", "age"]\n', "named-twice"),
        (SHORT + 'columns = ["age", "y"]\n', "learning-from-target"),
        (SHORT + 'task = "regresion"\n', "unknown-name"),
        (SHORT + "[split]\ntest = 1\n", "setting-invalid"),
        (SHORT + "[split]\ntest = nan\n", "setting-invalid"),
        (SHORT + "[limits]\nrows = 0\n", "setting-invalid"),
        (SHORT + "[limits]\nrarest = 2.5\n", "setting-invalid"),
        (SHORT + '[limits]\nalgorithms = ["ScafPD"]\n', "unknown-name"),
        (SHORT + "[limits]\nalgorithms = []\n", "setting-invalid"),
        (SHORT + "[models]\nsmall = 3\n", "setting-invalid"),
        (SHORT + '[models]\nsmall = "small"\n', "setting-invalid"),
        ("models = 3\n" + SHORT, "not-a-table"),
        ("name = \n", "settings-not-toml"),
    ],
)
def test_mistakes_get_one_sentence_with_the_file(tmp_path, text, code):
    with refuses(code) as error:
        read(tmp_path, text)
    assert "silo.toml" in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        SiloFile.read(tmp_path / "silo.toml")
    (tmp_path / "silo.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(InputError, match="not UTF-8"):
        SiloFile.read(tmp_path / "silo.toml")
    (tmp_path / "silo.toml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(InputError, match="too large"):
        SiloFile.read(tmp_path / "silo.toml")
