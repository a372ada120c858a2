"""One made-up data root for all tests of the studies on images."""

from __future__ import annotations

import pytest
from image_study_cases import packed_tiny, python_batches, random_weights


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    python_batches(folder)
    packed_tiny(folder)
    random_weights(folder)
    return folder


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "SCAFFPD_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
