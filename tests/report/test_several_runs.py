"""Several runs side by side: one model each, and refused on other clients."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from cases.refusals import refuses
from scaffpd import cli
from scaffpd.numbers import measured
from scaffpd.run import page as report
from scaffpd.run.page.figures import figures
from scaffpd.run.page.several import read_runs, side_by_side
from scaffpd.run.page.verdict import verdict
from scaffpd.run.record import RunRecord

TRAIN = [
    "--client",
    "site",
    "--target",
    "ill",
    "--l2",
    "0.01",
    "--splits",
    "0",
    "--test",
    "0.4",
    "--quiet",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three clients, and runs by two objectives."""
    folder = tmp_path_factory.mktemp("several")
    random = np.random.default_rng(0)
    with (folder / "p.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", "a", "b", "ill"])
        for k in range(360):
            a, b = random.normal(size=2)
            site = "xxy"[k % 3] if k % 9 else "z"
            writer.writerow(
                [
                    site,
                    round(a, 3),
                    round(b, 3),
                    int((b if site == "y" else a) + random.normal() / 2 > 0),
                ]
            )
    table = str(folder / "p.csv")
    for name, objective in (("average", "average"), ("chisquare", "chi2")):
        own = ("--objective", objective, "--no-report", "--out", str(folder / "both" / name))
        assert cli.run(["train", table, *TRAIN, *own]) == 0
    return folder


def test_runs_on_the_same_clients_are_one_record_with_a_model_each(place):
    runs = [place / "both" / name for name in ("average", "chisquare")]
    found = side_by_side(read_runs(runs))
    assert found.names == ("average", "chisquare")
    for name, folder in zip(found.names, runs, strict=True):
        main = RunRecord.read(folder).main
        assert found.model(name).clients == main.clients
        assert found.model(name).overall == main.overall
    best = max(found.models, key=lambda model: model.overall.mean)
    assert verdict(found)[0].endswith(
        f"mean is best with “{best.name}”: {measured(best.overall.mean, 'accuracy')}."
    )
    assert {figure.name for figure in figures(found)} == {"clients"}


def test_a_folder_of_runs_has_one_page(place):
    assert cli.run(["report", str(place / "both")]) == 0
    page = (place / "both" / "report.html").read_text(encoding="utf-8")
    assert "2 runs on 3 clients" in page
    assert report.opened([place / "both"]).names == ("average", "chisquare")


def test_runs_that_cannot_be_compared_are_refused(place):
    runs = read_runs([place / "both" / "average", place / "both" / "chisquare"])
    with refuses("run-named-twice"):
        side_by_side([runs[0], runs[0]])
    folder, other = runs[1]
    reading = other.reading.model_copy(update={"target": "well"})
    for code, changes in (
        ("runs-differ", {"clients": ["x", "y", "somebody else"]}),
        ("runs-differ", {"reading": reading}),
        ("runs-differ", {"measure": "loss"}),
        ("not-comparable", {"kind": "deploy"}),
    ):
        with refuses(code):
            side_by_side([runs[0], (folder, other.model_copy(update=changes))])
