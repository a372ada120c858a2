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
    return clock


@pytest.fixture(scope="module", autouse=True)
def no_locks():
    """A silo of the tests is one process; two locks are a fifth of the time of an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("scaffpd.deploy.silo.records"), "lock_file", lambda path: nullcontext())
        yield
