"""Coordinators of the tests wait on a clock of their own: an hour takes no time. Their silos wait for no lock."""

from __future__ import annotations

from importlib import import_module

import pytest
from deploy_cases import FakeClock, no_locks  # noqa: F401 - a fixture


@pytest.fixture
def fake_clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(import_module("scaffpd.deploy.coordinate"), "time", clock)
    return clock
