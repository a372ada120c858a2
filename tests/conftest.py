"""One thread everywhere: on small problems and busy machines, more threads only fight each other.

A test marked `cover(k)` runs on a few combinations of its parameters, in which every k values meet
(k = 1: every value once; k = 2: every pair). One marked `sample(n)`, whose parameters only repeat,
runs on n of them, evenly spaced. `make test-all` runs all.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
from collections import defaultdict

import pytest

import lacking
from covering import covering, spaced

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

gc.disable()  # until everything is imported; see below
os.fsync = lambda file: (
    None
)  # no test pulls the plug, and thousands of small files wait for the disk otherwise
# the folders of tests are there, where it has room, and go with each test that passes
MEMORY = "/dev/shm"
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4e9:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)


def pytest_configure(config):
    """Load what processes that run tests need; the one that hands them out (`-n`) runs none."""
    config.pluginmanager.register(lacking)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch  # after the environment is set

    torch.set_num_threads(1)
    try:
        import hypothesis
    except ImportError:  # machines with nothing but the run-time dependencies
        return
    # A landing must not hang on luck: with CI set, every run draws the same examples. Elsewhere
    # they are new each time.
    if os.environ.get("CI"):
        hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
        hypothesis.settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)  # before long ones are deselected
def pytest_collection_modifyitems(items):
    """Keep those combinations of a test's parameters that `cover` and `sample` leave, and mark the
    others as long.
    """
    _thin(
        items,
        "cover",
        lambda group, k: covering([tuple(enumerate(item.callspec._idlist)) for item in group], k),
    )
    _thin(items, "sample", lambda group, n: spaced(len(group), n))


def _thin(items, name, choose):
    groups = defaultdict(list)
    for item in items:
        if (
            item.get_closest_marker(name)
            and hasattr(item, "callspec")
            and not item.get_closest_marker("long")
        ):
            groups[item.parent.nodeid, item.originalname].append(item)
    for group in groups.values():
        kept = choose(group, *group[0].get_closest_marker(name).args)
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.long)


def pytest_collection_finish():
    """Leave what was imported and collected out of every later search for garbage.

    From now on nothing is cached as bytecode either: tests write modules anew within a second, and
    Python would take the old one. All loggers pass on what they log: to each that does not, such as
    fifty of PyTorch's, pytest would add its handlers six times a test. Searches are rare, because
    hardly anything of a test is left to them, and at Python's thresholds they take a tenth of the
    time.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()
    sys.dont_write_bytecode = True
