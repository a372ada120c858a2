"""What a page adds to the package, or switches on elsewhere, is gone when its test is over."""

from __future__ import annotations

import pytest
import sklearn
from deploy_cases import no_locks  # noqa: F401 - a fixture

from scaffpd.models import losses


@pytest.fixture(autouse=True)
def same_losses(monkeypatch):
    for name in ("share", "huber"):
        monkeypatch.setitem(losses.LOSSES, name, None)
        del losses.LOSSES[name]


@pytest.fixture(autouse=True)
def same_scikit_learn():
    with sklearn.config_context():
        yield
