"""Coordinators of the tests wait on a clock of their own: an hour takes no time."""

from __future__ import annotations

from importlib import import_module

import pytest


class FakeClock:
    """`time` for a coordinator: nothing passes but what it sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def fake_clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(import_module("scaffpd.deploy.coordinate"), "time", clock)
    return clock
