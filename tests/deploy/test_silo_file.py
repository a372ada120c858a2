"""silo.toml: what is read, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases.refusals import refuses
from scaffpd.errors import InputError
from scaffpd.fields import tables_in
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.silo import SiloFile

PIN = "0" * 64
FULL = f"""
name = "cleveland"
agree = "always"
[data]
file = "data/cleveland.csv"
target = "disease"
test = 0.3
[limits]
rows = 4
runs = 3
share = 0.5
epsilon = 2
[members]
va = "{PIN}"
[models]
small = "networks:small"
"""
SHORT = 'name = "a"\n[data]\nfile = "a.csv"\ntarget = "y"\n'


def read(folder: Path, text: str) -> SiloFile:
    path = folder / "silo.toml"
    path.write_text(text, encoding="utf-8")
    return SiloFile.read(path)


def keys(table):
    """All keys of a settings file; a table whose names are the user's or a method's own is one."""
    found = 0
    for field in table.model_fields.values():
        inner = [
            one for one in tables_in(field.annotation) if one.model_config["extra"] == "forbid"
        ]
        found += keys(inner[0]) if inner else 1
    return found


def test_there_is_little_to_set():
    assert keys(SiloFile) <= 21
    assert keys(FederationFile) <= 35


def test_everything_can_be_said(tmp_path):
    file = read(tmp_path, FULL)
    assert (file.name, file.data.test, file.agree) == ("cleveland", 0.3, "always")
    assert file.data.file == tmp_path / "data" / "cleveland.csv"
    assert (file.members, file.models) == ({"va": PIN}, {"small": "networks:small"})
    limits = file.limits
    assert (limits.rows, limits.runs, limits.share, limits.epsilon) == (4, 3, 0.5, 2)
    assert read(tmp_path, 'folder = "state"\n' + SHORT).records == tmp_path / "state/records.jsonl"


def test_a_ledger_belongs_to_the_table(tmp_path):
    (tmp_path / "a.csv").touch()
    (tmp_path / "link.csv").symlink_to("a.csv")
    wanted = tmp_path.resolve() / ".a.csv.scaffpd"
    for name in ("a.csv", f"../{tmp_path.name}/a.csv", str(tmp_path / "link.csv")):
        text = SHORT.replace("a.csv", name)
        assert read(tmp_path, text).ledger == wanted
        assert read(tmp_path, 'folder = "state"\n' + text).ledger == wanted
    assert read(tmp_path, f'{SHORT}ledger = "rows"').ledger == tmp_path.resolve() / "rows"
    entry = 'name = "a"\nfolder = "state"\n[data]\nentry = "mine:load"\n'
    assert read(tmp_path, entry).ledger == tmp_path.resolve() / "state" / "ledger"


def test_little_has_to_be_said(tmp_path):
    file = read(tmp_path, SHORT)
    assert (file.data.test, file.agree, file.members) == (0.2, "ask", {})
    assert (file.limits.rows, file.limits.epsilon) == (20, None)


def test_the_path_may_be_relative(tmp_path, monkeypatch):
    read(tmp_path, SHORT)
    monkeypatch.chdir(tmp_path)
    assert SiloFile.read("silo.toml").data.file == tmp_path / "a.csv"


def test_entries_have_defaults(tmp_path):
    source = read(tmp_path, 'name = "a"\n[data]\nentry = "hospital.data:load"\n').data
    assert (source.file, source.entry) == (None, "hospital.data:load")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (SHORT + "[limits]\nrowss = 1\n", "unknown-name"),
        ('nmae = "a"\n', "unknown-name"),
        ("[data]\n", "setting-missing"),
        ("name = 3\n", "setting-invalid"),
        ('name = "a b/../c"\n', "setting-invalid"),
        ('name = "a"\ndata = 3\n', "setting-not-a-table"),
        ('name = "a"\n', "data-source-unclear"),
        ('name = "a"\n[data]\nfile="a.csv"\nentry="a:b"\n', "data-source-unclear"),
        ('name = "a"\n[data]\nfile = "a.docx"\n', "not-a-table"),
        ('name = "a"\n[data]\nfile = "a.csv"\n', "setting-missing"),
        ('name = "a"\n[data]\nentry = "load"\n', "setting-invalid"),
        ('name = "a"\n[data]\nentry = "a:b"\ntarget = "y"\n', "target-with-entry"),
        ('name = "a"\n[data]\nentry = "a:b"\nmissing = [-9]\n', "missing-without-table"),
        (SHORT + "test = 1\n", "setting-invalid"),
        (SHORT + "test = nan\n", "setting-invalid"),
        (SHORT + "[limits]\nrows = 0\n", "setting-invalid"),
        (SHORT + "[limits]\nshare = 1.5\n", "setting-invalid"),
        (SHORT + '[members]\nb = "12"\n', "setting-invalid"),
        ('agree = "always"\n' + SHORT, "members-missing"),
        ('agree = "never"\n' + SHORT, "unknown-name"),
        (SHORT + '[models]\nsmall = "small"\n', "setting-invalid"),
        ("models = 3\n" + SHORT, "setting-not-a-table"),
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
