"""How command lines end: pipes that close, disks that are full, screens that are narrow, bugs, and
their exit codes.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from forked import CLOSED, command
from scaffpd import cli
from scaffpd.cli.commands import print_json
from scaffpd.cli.screens import MOST, print_table
from scaffpd.program import demo

SCRIPT = [sys.executable, "-m", "scaffpd"]
COLOURFUL = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR", "SCAFFPD_DATA")


def forked(words, **more):
    return command(*words.split(), env=dict.fromkeys(COLOURFUL), **more)


def called(*arguments, **more):
    env = {name: value for name, value in os.environ.items() if name not in COLOURFUL} | more.pop(
        "env", {}
    )
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    return subprocess.run([*SCRIPT, *arguments], check=False, env=env, **more)


@pytest.mark.parametrize(
    ("call", "word"), [(called, "--help"), (forked, "train --help"), (forked, "--version")]
)
def test_a_reader_that_has_gone_is_no_trouble(call, word):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = call(word, stdout=writing)
    finally:
        os.close(writing)
    assert not done.stderr
    assert done.returncode in (0, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("word", ["--help", "--version"])
def test_an_output_that_is_full_is_said_in_one_sentence(word):
    with open("/dev/full", "wb") as full:
        done = forked(word, stdout=full)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_mistake_that_cannot_be_told_is_one_still():
    with open("/dev/full", "wb") as full:
        assert called("dmo", stderr=full).returncode == 2


@pytest.mark.parametrize(
    ("word", "closed", "code"), [("--version", 1, 0), ("dmo", 2, 2), ("--help", 2, 0)]
)
def test_outputs_that_are_closed(word, closed, code):
    done = forked(word, **dict.fromkeys(("stdout", "stderr")[:closed], CLOSED))
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_an_output_that_a_shell_has_closed():
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m scaffpd --help >&-"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["path", "--help"]])
@pytest.mark.parametrize("width", ["20", "1"])
def test_narrow_screens(arguments, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.delenv("SCAFFPD_DATA", raising=False)
    assert cli.run(arguments) == 0
    assert capsys.readouterr().err == ""


def test_rows_are_left_out_only_where_a_file_has_them(capsys):
    rows = [[f"row {k}", str(k)] for k in range(MOST + 3)]
    for file, shown in (("", MOST + 3), ("clients.csv", MOST)):
        print_table(Console(width=80), ("name", "number"), rows, file)
        out = " ".join(capsys.readouterr().out.split())
        assert out.count("row ") == shown
        assert (
            f"the first and last {MOST // 2} of {MOST + 3}; all are in clients.csv" in out
        ) == bool(file)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_old_encodings(arguments):
    done = called(
        *arguments,
        env={"PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "", "LC_ALL": "C", "PYTHONUTF8": "0"},
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("plain", ["1", None])
def test_no_color(plain):
    done = command("--help", env={"NO_COLOR": plain, "FORCE_COLOR": "1", "TERM": "xterm-256color"})
    assert ("\x1b[3" in done.stdout) == (plain is None)


def test_json_on_an_old_terminal_is_still_json(tmp_path, monkeypatch):
    file = tmp_path / "out"
    with file.open("w", encoding="ascii") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        print_json({"λ": [0.5, float("inf")]})
    assert json.loads(file.read_text(encoding="ascii")) == {"λ": [0.5, None]}


def test_a_full_disk_is_no_bug_and_not_your_mistake(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere.csv")

    monkeypatch.setattr(demo, "stations", full)
    assert cli.run(["demo", "--quiet", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "Cannot write 'somewhere.csv': No space left on device.\n"


def test_completion_that_cannot_be_installed_is_said_in_one_sentence():
    variables = {"HOME": "/dev/null/home"}
    done = command("--install-completion", "zsh", env=variables)
    assert done.returncode == 1
    assert done.stderr.startswith("Cannot use '/dev/null/")
    assert done.stderr.count("\n") == 1


def test_a_bug_is_shown_whole_and_says_where_to_take_it(tmp_path, monkeypatch, capsys):
    def bug(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr(demo, "stations", bug)
    monkeypatch.setattr(sys, "argv", ["scaffpd", "demo", "--quiet", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.rstrip().endswith(cli.BUG)
