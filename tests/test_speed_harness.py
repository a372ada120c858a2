"""The harness of benchmarks/speed: turns, ratios, fits and tables."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "benchmarks" / "speed" / "harness.py"


@pytest.fixture(scope="module")
def harness():
    spec = importlib.util.spec_from_file_location("speed_harness", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("p", [0.0, 1.0, 2.5])
def test_exponent_of_a_power_law(harness, p):
    sizes = [10, 100, 1000]
    assert harness.exponent(sizes, [3 * n**p for n in sizes]) == pytest.approx(p, abs=1e-9)


@pytest.fixture(autouse=True)
def _quick(harness, monkeypatch):
    """Without looking for garbage before every turn: there is much of it among all other tests."""
    monkeypatch.setattr(harness.gc, "collect", lambda: 0)


def test_candidates_take_turns_in_changing_order(harness):
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timing = harness.interleaved(calls, turns=3, least=0.0)
    assert order == [
        *"aabbcc",
        *"abc",
        *"bca",
        *"cab",
    ]  # first each twice, to warm up and to learn how long it takes
    assert {name: len(seconds) for name, seconds in timing.seconds.items()} == {
        "a": 3,
        "b": 3,
        "c": 3,
    }


def test_short_calls_are_repeated_and_the_device_is_waited_for(harness):
    called = []
    waited = []
    calls = {"short": lambda: (called.append(1), time.sleep(1e-4))}
    timing = harness.interleaved(calls, turns=2, least=0.01, sync=lambda: waited.append(1))
    assert len(called) > 2 + 2 * 5
    assert len(waited) == 2 + 2 * 2
    assert 1e-4 <= timing.median("short") < 0.1


def test_a_ratio_is_taken_within_turns(harness):
    timing = harness.Timing(
        {"fast": [1.0, 10.0, 1.0], "slow": [2.0, 30.0, 4.0]}
    )  # a busy second turn
    assert timing.ratio("slow", to="fast") == (3.0, 2.5, 3.5)
    assert timing.ratio("fast", to="fast") == (1.0, 1.0, 1.0)
    assert timing.median("slow") == 4.0


def test_a_ratio_of_one_turn_has_no_spread(harness):
    assert harness.Timing({"a": [3.0], "b": [2.0]}).ratio("a", to="b") == (1.5, 1.5, 1.5)


def test_table(harness):
    rows = [
        {"name": "a", "n": 10000, "s": 0.012345, "note": None},
        {"name": "b", "n": 2, "s": 12345.6, "note": "> 300 s"},
    ]
    assert harness.table(rows).splitlines() == [
        "| name | n | s | note |",
        "|---|---|---|---|",
        "| a | 10,000 | 0.0123 |  |",
        "| b | 2 | 12,346 | > 300 s |",
    ]
