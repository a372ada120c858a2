"""Several runs side by side: paired on the same held-out rows, refused on other clients."""

from __future__ import annotations

import csv
import re
import shutil

import numpy as np
import pytest
from scipy.stats import t

from cases.refusals import refuses
from scaffpd import cli
from scaffpd.run import page as report
from scaffpd.run.page.several import side_by_side
from scaffpd.run.page.verdict import answers, verdict
from scaffpd.run.record import RunRecord, read_runs

TRAIN = (
    "--client",
    "site",
    "--target",
    "ill",
    "--l2",
    "0.01",
    "--no-choose",
    "--splits",
    "0",
    "--test",
    "0.4",
    "--quiet",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three clients; runs by two objectives, and one with other held-out rows."""
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
    both = ("--objective", "average,chi2", "--out", str(folder / "both"))
    assert cli.run(["train", table, *TRAIN, *both]) == 0
    other = (
        "--objective",
        "Agnostic",
        "--seed",
        "1",
        "--no-report",
        "--out",
        str(folder / "other"),
    )
    assert cli.run(["train", table, *TRAIN, *other]) == 0
    return folder


def test_differences_are_paired_over_the_same_rows(place):
    runs = [place / "both" / name for name in ("average", "chisquare")]
    shown = side_by_side(read_runs(runs))
    found = shown.run
    assert found.names == ("average", "chisquare")
    assert [model.role for model in found.models] == ["before", "after"]
    for name, folder in zip(found.names, runs, strict=True):
        main = RunRecord.read(folder).main
        scores = [score.test_score for score in main.clients]
        assert [score.test_score for score in found.model(name).clients] == scores
    files = [np.load(folder / "held_out.npz") for folder in runs]
    ends = np.cumsum(files[0]["counts"])[:-1]
    old, new = (
        np.split(f[f"loss {name}"], ends)
        for f, name in zip(files, ("average", "fair"), strict=True)
    )
    gap = [a.mean() - b.mean() for a, b in zip(old, new, strict=True)]
    errors = [np.var(a - b, ddof=1) / len(a) for a, b in zip(old, new, strict=True)]
    freedom = sum(errors) ** 2 / sum(e**2 / (len(a) - 1) for e, a in zip(errors, old, strict=True))
    mean = np.mean(gap)
    half = t.ppf(0.975, freedom) * np.sqrt(sum(errors)) / 3
    base = np.mean([a.mean() for a in old])
    ends = [100 * abs(v) / base for v in (mean - half, mean + half)]
    words = re.findall(r"[\d.]+(?= %| to| higher| lower)", shown.against["chisquare"])[-2:]
    assert sorted(map(float, words)) == pytest.approx(sorted(ends), rel=0.06)
    assert shown.differences["objective.kind"] == ["Average", "ChiSquare"]
    assert answers(found)["What to do?"].startswith(("Use “", "Keep “average”"))
    assert found.scored_models == found.names


# times the loss before
LOWER = 0.8
SAME = 1.0
HIGHER = 1.2


@pytest.mark.parametrize(
    ("others", "worst", "do", "costs"),
    [
        (
            LOWER,
            LOWER,
            "Use “chisquare”: its mean loss on held-out rows is 20 % lower",
            "Nobody: no site",
        ),
        (
            LOWER,
            SAME,
            "Use “chisquare”: its mean loss on held-out rows is 5.7 % lower",
            "Nobody: no site",
        ),
        (
            1.5,
            LOWER,
            "Use “chisquare”: its loss for the worst-served site on held-out rows is 20 % lower",
            "x, z: ",
        ),
        (SAME, SAME, "Keep “average”: no other run is clearly better.", "Nobody: no site"),
        (
            LOWER,
            HIGHER,
            "Keep “average”: no other run is clearly better.",
            "y: clearly higher losses with “chisquare”",
        ),
        (
            HIGHER,
            HIGHER,
            "Keep “average”: no other run is clearly better.",
            "x, y, z: clearly higher losses",
        ),
    ],
)
def test_advice_is_by_losses(place, tmp_path, others, worst, do, costs):
    runs = [
        shutil.copytree(place / "both" / name, tmp_path / name) for name in ("average", "chisquare")
    ]
    random = np.random.default_rng(0)
    for folder, model, factors in zip(
        runs, ("average", "fair"), ((1.0, 1.0), (others, worst)), strict=True
    ):
        held = dict(np.load(folder / "held_out.npz"))
        at = np.repeat(RunRecord.read(folder).clients, held["counts"])
        noise = random.uniform(0.99, 1.01, at.shape)
        held[f"loss {model}"] = np.where(at == "y", 1.5 * factors[1], 0.3 * factors[0]) * noise
        np.savez(folder / "held_out.npz", **held)
    found = side_by_side(read_runs(runs)).run
    clear = {"x": others != SAME, "y": worst != SAME, "z": others != SAME}
    assert {s.client: s.clear for s in found.model("chisquare").clients} == clear
    said = answers(found)
    assert said["What to do?"].startswith(do)
    assert verdict(found) == [said["What to do?"]]
    assert said["Whom does it cost?"].startswith(costs)


def test_the_folder_of_several_objectives_has_one_page_and_each_run_its_own_model(place):
    page = (place / "both" / "report.html").read_text(encoding="utf-8")
    assert "What differs in their settings" in page
    assert (place / "both" / "chisquare" / "model.safetensors").exists()
    assert report.opened([place / "both"]).run.names == ("average", "chisquare")


def test_other_rows_have_no_intervals_and_other_tables_are_refused(place, tmp_path, capsys):
    pair = [place / "both" / "average", place / "other"]
    runs = read_runs(pair)
    found = side_by_side(runs)
    assert not found.against
    assert any("held out different rows" in remark for remark in found.run.remarks)
    assert all(score.clear is None for model in found.run.models for score in model.clients)
    assert cli.run(["report", *map(str, pair), "--out", str(tmp_path / "two.html")]) == 0
    assert "held out different rows" in (tmp_path / "two.html").read_text(encoding="utf-8")
    with refuses("run-named-twice"):
        side_by_side([runs[0], runs[0]])
    folder, other = runs[1]
    reading = other.reading.model_copy(update={"target": "well"})
    for code, changes in (
        ("other-clients", {"clients": ["x", "y", "somebody else"]}),
        ("other-targets", {"reading": reading}),
        ("other-measures", {"measure": "loss"}),
        ("not-comparable", {"kind": "compare"}),
    ):
        with refuses(code):
            side_by_side([runs[0], (folder, other.model_copy(update=changes))])
    capsys.readouterr()
    asked = ["train", str(place / "p.csv"), *TRAIN, "--objective", "chi2,cvar", "--strength", "0.1"]
    assert cli.run(asked) == 2
    assert "--strength goes with one objective" in capsys.readouterr().err
