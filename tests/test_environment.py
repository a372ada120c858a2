"""What a run stands on: versions that are the modules' own, plain values, and nothing where nothing is."""

from __future__ import annotations

import json
import platform
import sys
from types import SimpleNamespace

import numpy
import torch

import scaffpd
from scaffpd import system
from scaffpd.system import cores


def test_versions_are_those_that_the_modules_name():
    found = system.environment()
    assert found["scaffpd"] == scaffpd.__version__
    assert found["python"] == platform.python_version()
    assert found["numpy"] == numpy.__version__
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_it_is_plain_json():
    found = system.environment()
    assert json.loads(json.dumps(found)) == found


def test_threads_and_cores():
    found = system.environment()
    assert found["threads"] == torch.get_num_threads()
    assert found["cores"] == cores()
    assert found["memory"] is None or found["memory"] > 2**28


def test_a_package_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr(system, "PACKAGES", ("numpy", "no-such-package-at-all"))
    assert list(system.versions()) == ["numpy"]


def test_gpus_have_a_name_and_a_size(monkeypatch):
    card = SimpleNamespace(name="Some GPU", total_memory=8 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert system.environment()["gpus"] == [{"name": "Some GPU", "memory": 8 * 2**30}] * 2

    def refuse(_):
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    assert system.environment()["gpus"] == []


def test_without_torch_the_rest_is_still_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = system.environment()
    assert found["threads"] is None
    assert found["gpus"] == []
    assert found["numpy"] == numpy.__version__
