"""A machine with few packages: all others are hidden from this process, as if not installed.

As a plugin of pytest, `python -m pytest -p bare`, the core's dependencies and pytest's are left.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from importlib.machinery import PathFinder

import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook

CORE = ("numpy", "scipy", "torch")


class Fewer(PathFinder):
    """Finds modules as Python does, but for those that are hidden."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in cls.hidden:
            return None
        return PathFinder.find_spec(fullname, path, target)


def hide_all_but(*packages, with_theirs=True):
    """Leave these packages, and what they need themselves."""
    left = set()
    more = {name.lower() for name in packages}
    while more:
        name = more.pop()
        left.add(name)
        try:
            wanted = metadata.requires(name) or [] if with_theirs else []
        except metadata.PackageNotFoundError:
            continue
        found = {re.split(r"[^\w.-]", one)[0].lower() for one in wanted if "extra ==" not in one}
        more |= found - left
    homes = metadata.packages_distributions().items()
    plain = {name.replace("_", "-") for name in left}
    Fewer.hidden = frozenset(
        module
        for module, owners in homes
        if not {owner.lower().replace("_", "-") for owner in owners} & plain and module != "scaffpd"
    )
    sys.meta_path[sys.meta_path.index(PathFinder)] = Fewer


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Hide packages from the tests, and from processes that `-n` starts, before anything else."""
    os.environ["PYTEST_ADDOPTS"] = "-p bare"
    hide_all_but(*CORE, "pytest", "pytest-xdist")
    AssertionRewritingHook._find_spec = Fewer.find_spec  # which looks before Python does


def pytest_configure(config):
    """Leave out a plugin that was loaded before this."""
    if plugin := config.pluginmanager.get_plugin("hypothesispytest"):
        config.pluginmanager.unregister(plugin)
