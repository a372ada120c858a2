"""Folders that are really trained, once for all tests of the report."""

from __future__ import annotations

import csv

import pytest
import run_folders


@pytest.fixture(scope="session")
def hospitals(tmp_path_factory):
    return run_folders.hospitals(tmp_path_factory.mktemp("report") / "hospitals")


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    return run_folders.digits(tmp_path_factory.mktemp("report") / "digits")


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    return run_folders.path(tmp_path_factory.mktemp("report") / "path")


@pytest.fixture(scope="session")
def diabetes(tmp_path_factory):
    return run_folders.diabetes(tmp_path_factory.mktemp("report") / "diabetes")


@pytest.fixture(scope="session")
def stations(tmp_path_factory):
    return run_folders.stations(tmp_path_factory.mktemp("report") / "stations")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """Names that break pages, and an average without a certificate."""
    made = run_folders.hospitals(
        tmp_path_factory.mktemp("report") / "hostile",
        names=list(run_folders.HOSTILE),
        title=run_folders.HOSTILE[0],
    )
    with (made / "rounds.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    run_folders.table(
        made / "rounds.csv",
        [row | {"certificate": "inf"} if row["model"] == "average" else row for row in rows],
    )
    return made


@pytest.fixture(scope="session")
def deployed(tmp_path_factory):
    return run_folders.deployed(tmp_path_factory.mktemp("federation"))
