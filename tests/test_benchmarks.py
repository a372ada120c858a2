"""One smoke test: benchmarks measure, and what is published is what they have stored."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import intervals
import rounds

SPEED = Path(__file__).resolve().parents[1] / "benchmarks" / "speed"


def test_rounds_are_counted():
    cell = rounds.measure(("synthetic", "ChiSquare", rounds.OURS, 0))
    assert cell["cost"][0] <= 20


def test_intervals_cover():
    found = intervals.gains(60, 6, 0.3, labels=False, seed=0)
    assert set(map(len, found.values())) == {180}
    for name in ("mean over clients", "one client", "worst fifth"):
        assert 0.9 <= np.mean(found[name]) <= 0.99


def test_speed_pages_are_those_of_the_stored_measurements(monkeypatch):
    monkeypatch.syspath_prepend(str(SPEED))
    monkeypatch.delitem(sys.modules, "publish", raising=False)
    import publish

    found = publish.stored(SPEED)
    if not found:
        pytest.skip("no measurements are stored: run benchmarks/speed/run.py")
    assert (SPEED / "RESULTS.md").read_text(encoding="utf-8") == publish.page(found)
    sys.modules.pop("publish", None)
