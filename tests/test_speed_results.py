"""What is told of the speed measurements is what was stored."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

SPEED = Path(__file__).resolve().parents[1] / "benchmarks" / "speed"


@pytest.fixture
def publish(monkeypatch):
    monkeypatch.syspath_prepend(str(SPEED))
    monkeypatch.delitem(sys.modules, "publish", raising=False)
    import publish

    yield publish
    sys.modules.pop("publish", None)


@pytest.fixture
def found(publish):
    found = publish.stored(SPEED)
    if not found:
        pytest.skip("no measurements are stored: run benchmarks/speed/run.py")
    return found


def test_the_page_is_that_of_the_stored_measurements(publish, found):
    assert (SPEED / "RESULTS.md").read_text(encoding="utf-8") == publish.page(found)


def test_the_numbers_are_those_of_the_stored_measurements(publish, found):
    with open(SPEED / "results.csv", encoding="utf-8", newline="") as file:
        assert file.read() == publish.long(found)


def test_the_documentation_says_what_is_stored(publish, found):
    texts = {
        "benchmarks.md": publish.headline(found),
        "networks.md": publish.beside(found.get("network_simulators")),
    }
    for page, text in texts.items():
        assert text.join(publish.MARKS) in (publish.DOCS / page).read_text(encoding="utf-8")


def test_no_rehearsal_is_stored(found):
    assert not [name for name, part in found.items() if part.get("quick")]


def test_the_picture_can_be_drawn(publish, found, tmp_path):
    pytest.importorskip("matplotlib")
    import picture

    picture.draw({name: part["rows"] for name, part in found.items()}, tmp_path / "results.png")
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_a_page_of_two_parts(publish):
    row = {"loss": "squared", "seconds": 1.23456, "note": None}
    part = {
        "title": "T",
        "docstring": "(b) One\ntwo.\n\nMore.",
        "sentences": ["It is."],
        "rows": [row],
        "seconds": 9.0,
    }
    part["machine"] = {"CPU": "C", "cores": 2, "torch": "2", "numpy": "1"}
    gpu = {"title": "G", "machine": "H", "command": "run it", "rows": [{"a": 1}], "sentences": []}
    page = publish.page({"memory": part, "gpu": gpu})
    assert "## T\n\nOne two.\n\n- It is.\n\n| loss | seconds | note |" in page
    assert "## G\n\nOn H, by `run it`.\n\n| a |" in page
    assert page.endswith("## Machine\n\n- C, 2 cores; torch 2, numpy 1: memory (9 s).\n")
    lines = list(csv.reader(publish.long({"memory": part}).splitlines()))
    assert lines[1:] == [
        ["memory", "0", "loss", "squared"],
        ["memory", "0", "seconds", "1.23456"],
        ["memory", "0", "note", ""],
    ]


def test_networks_stand_beside_each_other(publish):
    def row(network, candidate, speed, times, note=""):
        values = {"version": "1", "accuracy": 0.301, "note": note}
        return {
            "network": network,
            "candidate": candidate,
            "s a round": speed,
            publish.TIMES: times,
            **values,
        }

    rows = [row("CNN", "scaffpd", 2.0, 1.0), row("CNN", "pfl", 5.0, 2.5)]
    rows += [row("ResNet", "scaffpd", 8.0, 1.0), row("ResNet", "pfl", None, None, "failed: no")]
    part = {"rows": rows, "seconds": 61.0, "machine": {"CPU": "abacus", "cores": 2, "torch": "2"}}
    lines = publish.beside(part).splitlines()
    assert lines[2] == "On 2 cores (abacus, torch 2), 61 s in all:"
    assert lines[-3:-1] == [
        "| scaffpd 1 | 2 | 1 | 30.1% | 8 | 1 | 30.1% |",
        "| pfl 1 | 5 | 2.5 | 30.1% | failed: no |  | 30.1% |",
    ]
