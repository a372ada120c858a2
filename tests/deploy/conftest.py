"""Coordinators of the tests wait on a clock of their own: an hour takes no time. Their silos wait for no lock."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module

import pytest
from deploy_cases import FakeClock


@pytest.fixture
def fake_clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(import_module("scaffpd.deploy.coordinate"), "time", clock)
    records = import_module("scaffpd.deploy.silo.records")
    monkeypatch.setattr(records, "lock_file", lambda path: nullcontext())  # there is no other process
    return clock
