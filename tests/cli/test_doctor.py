"""`scaffpd doctor`: what is installed, and an honest exit code."""

from __future__ import annotations

import json
import sys
from importlib import metadata

import numpy as np
import pytest

import scaffpd as sp
from scaffpd import cli


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "SCAFFPD_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def test_all_is_well(capsys):
    assert cli.run(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in ("scaffpd", "torch", "cores", "GPU", "Self-check", "All is well"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80


def test_as_json(capsys):
    assert cli.run(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.err == ""
    assert found["works"] is True
    assert found["self_check"] == "ok"
    assert found["environment"]["scaffpd"] == sp.__version__


def test_an_extra_that_is_missing_says_how_to_get_it(capsys, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert cli.run(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert 'pip install "scaffpd[flare]"' in out
    assert "[dev]" not in out


def wrong_x(*_, **__):
    class Result:
        x = np.array([1.1])
        weights = np.array([2 / 3, 1 / 3])
        certificate = 1e-9
        message = "converged"

    return Result


def no_proof(*_, **__):
    class Result:
        x = np.array([1.0])
        weights = np.array([2 / 3, 1 / 3])
        certificate = 0.1
        message = "round limit"

    return Result


def broken(*_, **__):
    raise RuntimeError("illegal instruction")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (wrong_x, "the optimum is"),
        (no_proof, "no certified gap"),
        (broken, "RuntimeError: illegal instruction"),
    ],
)
def test_what_does_not_work_is_said_with_exit_code_1(train, words, capsys, monkeypatch):
    monkeypatch.setattr("scaffpd.training.loop.train", train)
    assert cli.run(["doctor"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert words in out
    assert "Training does not work on this machine" in out


def test_a_library_that_cannot_be_loaded(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "scaffpd.objectives", None)
    assert cli.run(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["self_check"]
    assert found.startswith("ModuleNotFoundError: import of scaffpd.objectives halted")
