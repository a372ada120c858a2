"""What a run stands on: versions that are the modules' own, plain values, and files that outlive a
crash.
"""

import errno
import io
import json
import os
import platform
from pathlib import Path

import numpy
import pytest
import torch

import scaffpd
from scaffpd import machine
from scaffpd.files import DRAFT, JsonLines, atomic_write, clear_drafts

GIB = 2**30


def test_the_environment_is_plain_json_with_the_modules_own_versions(monkeypatch):
    monkeypatch.setattr(machine, "PACKAGES", ("numpy", "torch", "no-such-package-at-all"))
    found = machine.environment()
    assert json.loads(json.dumps(found)) == found
    assert found["scaffpd"] == scaffpd.__version__
    assert found["python"] == platform.python_version()
    assert found["numpy"] == numpy.__version__
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "no-such-package-at-all" not in found
    assert found["threads"] == torch.get_num_threads()
    assert found["cores"] == machine.cores()
    assert found["memory"] > 2**28


# --- files of JSON lines

ENTRIES = [{"a": 1}, ["é", None, "x" * 70_000], 3, "", {"link": "0"}]


def filled(path):
    for entry in ENTRIES:
        JsonLines(path).append(entry)
    return path.read_bytes()


def test_a_file_cut_anywhere_has_its_whole_lines_and_goes_on_after_them(tmp_path):
    path = tmp_path / "some.jsonl"
    text = filled(path)
    assert text == b"".join(json.dumps(entry).encode() + b"\n" for entry in ENTRIES)
    ends = [i + 1 for i, byte in enumerate(text) if byte == ord("\n")]
    near = {place + k for place in (0, *ends) for k in range(-12, 13)} | set(
        range(0, len(text), 4999)
    )
    for cut in sorted(near & set(range(len(text) + 1))):
        path.write_bytes(text[:cut])
        whole = ENTRIES[: sum(end <= cut for end in ends)]
        lines = JsonLines(path)
        late = JsonLines(path)
        late.skip()
        assert list(lines.read()) == whole
        assert lines.last() == (whole[-1] if whole else None)
        assert path.read_bytes() == text[:cut]  # a reader changes nothing
        lines.append("new")
        assert list(lines.read()) == list(late.read()) == ["new"]
        assert list(JsonLines(path).read()) == [*whole, "new"]


def test_an_entry_is_on_disk_before_append_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    path = tmp_path / "some.jsonl"
    JsonLines(path).append("first")
    assert synced[0] == path.stat().st_size == 8
    JsonLines(path).append("second")
    assert synced[-1] == path.stat().st_size == 17


def test_a_disk_that_fills_up_in_the_middle_of_a_line(tmp_path, monkeypatch):
    path = tmp_path / "some.jsonl"
    JsonLines(path).append("first")

    def full(file):
        os.ftruncate(file, os.fstat(file).st_size - 3)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            JsonLines(path).append("second")
    assert path.read_bytes() == b'"first"\n"secon'
    JsonLines(path).append("third")
    assert list(JsonLines(path).read()) == ["first", "third"]


def test_a_line_that_is_finished_while_it_is_read_is_left_for_the_next_reading(
    tmp_path, monkeypatch
):
    class Slow(io.BytesIO):
        """A file whose last line arrives in two parts."""

        def __iter__(self):
            return iter([b"1\n", b'{"two"', b": 2}\n"])

    path = tmp_path / "some.jsonl"
    path.write_bytes(b'1\n{"two": 2}\n')
    lines = JsonLines(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode: Slow())
        assert list(lines.read()) == [1]
    assert list(lines.read()) == [{"two": 2}]


def test_a_line_in_the_middle_that_is_not_json_is_met_every_time(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("1\nno\n3\n")
    lines = JsonLines(path)
    for _ in range(2):
        with pytest.raises(ValueError, match="Expecting value"):
            list(lines.read())
    assert lines.last() == 3


def test_only_half_written_files_of_ours_are_cleared_away(tmp_path):
    others = {".env", ".gitignore", ".scaffpd", ".bashrc.swp", "table.csv"}
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    with atomic_write(tmp_path / "table.csv") as file:
        (half,) = {path.name for path in tmp_path.iterdir()} - others - {".ipynb_checkpoints"}
        file.write(b"whole")
    (tmp_path / half).touch()  # as a process leaves it that is killed
    assert half.startswith(".table.csv.")
    assert half.endswith(DRAFT)
    clear_drafts(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*others, ".ipynb_checkpoints"}
    assert (tmp_path / "table.csv").read_bytes() == b"whole"
