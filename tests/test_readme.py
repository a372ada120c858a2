"""Every snippet that the README shows is executed here; `make demo` is in test_cli.py."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from snippets import ROOT, blocks, run_python

PAGE = ROOT / "README.md"
README = PAGE.read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_python(PAGE)
    shown = next(block for block in blocks(PAGE, "text") if block.startswith("Average()"))
    gap = re.compile(r"\S+e-\d+")  # at the level of rounding, so processors differ in it
    printed = capsys.readouterr().out
    assert gap.sub("·", printed).split() == gap.sub("·", shown).split()
    assert all(float(bound) < 1e-8 for bound in gap.findall(printed))


def test_it_fits_on_two_screens():
    assert len(README.splitlines()) <= 100
    assert len(blocks(PAGE, "python")[0].strip().splitlines()) == 8


def test_the_commands_are_the_two_that_are_checked():
    assert "\n".join(blocks(PAGE, "console")).split("\n")[:2] == ["make demo", "make test"]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_test_runs_these_tests():
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "test"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1].endswith("-m pytest -n auto --dist worksteal")


def test_links_point_to_files_that_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
