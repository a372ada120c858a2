"""Several runs side by side: paired where they hold out the same rows, refused where they are about something else."""

from __future__ import annotations

import csv
import json
import re
import shutil

import numpy as np
import pytest
from scipy.stats import t

from scaffpd import cli
from scaffpd.errors import InputError
from scaffpd.run import page as report
from scaffpd.run.page.read import read
from scaffpd.run.page.several import read_several
from scaffpd.run.page.verdict import answers, verdict

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
    """Three clients, one with a rule of its own; runs by two objectives, and one with other held-out rows."""
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
    found = read_several(runs)
    assert found.names == ("average", "chisquare")
    assert [model.role for model in found.models] == ["before", "after"]
    for name, folder in zip(found.names, runs, strict=True):
        own = read(folder)
        main = own.role("after") or own.models[0].name
        assert [s.value for s in found.scores[name]] == [s.value for s in own.scores[main]]
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
    shown = [
        float(word)
        for word in re.findall(r"[\d.]+(?= %| to| higher| lower)", found.against["chisquare"])
    ][-2:]
    assert sorted(shown) == pytest.approx(sorted(ends), rel=0.06)
    assert dict(found.differences)["objective.kind"] == ("Average", "ChiSquare")
    assert dict(answers(found))["What to do?"].startswith(("Use “", "Keep “average”"))
    assert found.predictions.models == found.names


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
def test_advice_is_by_losses_and_not_by_labels(place, tmp_path, others, worst, do, costs):
    """Labels say in every case that y clearly gains and nobody loses; only losses differ."""
    runs = [
        shutil.copytree(place / "both" / name, tmp_path / name) for name in ("average", "chisquare")
    ]
    random = np.random.default_rng(0)
    for folder, model, factors in zip(
        runs, ("average", "fair"), ((1.0, 1.0), (others, worst)), strict=True
    ):
        held = dict(np.load(folder / "held_out.npz"))
        at = np.repeat(read(folder).clients, held["counts"])
        noise = random.uniform(0.99, 1.01, at.shape)
        held[f"loss {model}"] = np.where(at == "y", 1.5 * factors[1], 0.3 * factors[0]) * noise
        held[f"wrong {model}"] = (at == "y") & (model == "average")
        np.savez(folder / "held_out.npz", **held)
    found = read_several(runs)
    assert [score.clear for score in found.scores["chisquare"]] == [
        client == "y" for client in found.clients
    ]
    said = dict(answers(found))
    assert said["What to do?"].startswith(do)
    assert verdict(found) == (said["What to do?"],)
    assert said["Whom does it cost?"].startswith(costs)


def test_the_folder_of_several_objectives_has_one_page_and_each_run_its_own_model(place):
    page = (place / "both" / "report.html").read_text(encoding="utf-8")
    assert "What differs in their settings" in page
    assert (place / "both" / "chisquare" / "model.safetensors").exists()
    assert report.opened([place / "both"]).names == ("average", "chisquare")


def test_other_rows_have_no_intervals_and_other_tables_are_refused(place, tmp_path, capsys):
    pair = [place / "both" / "average", place / "other"]
    found = read_several(pair)
    assert not found.against
    assert any("held out different rows" in remark for remark in found.remarks)
    assert all(score.clear is None for scores in found.scores.values() for score in scores)
    assert cli.run(["report", *map(str, pair), "--out", str(tmp_path / "two.html")]) == 0
    assert "held out different rows" in (tmp_path / "two.html").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="named twice"):
        read_several([pair[0], pair[0]])
    stranger = tmp_path / "stranger"
    shutil.copytree(pair[1], stranger)
    text = (stranger / "clients.csv").read_text().replace(",x,", ",somebody else,")
    (stranger / "clients.csv").write_text(text)
    with pytest.raises(InputError, match="about other clients"):
        read_several([pair[0], stranger])
    summary = json.loads((stranger / "summary.json").read_text())
    shutil.copy(pair[1] / "clients.csv", stranger / "clients.csv")
    config = (stranger / "config.toml").read_text().replace('target = "ill"', 'target = "well"')
    (stranger / "config.toml").write_text(config)
    assert summary["measure"] == "accuracy"
    with pytest.raises(InputError, match="have other targets: 'ill' and 'well'"):
        read_several([pair[0], stranger])
    capsys.readouterr()
    asked = ["train", str(place / "p.csv"), *TRAIN, "--objective", "chi2,cvar", "--strength", "0.1"]
    assert cli.run(asked) == 2
    assert "--strength goes with one objective" in capsys.readouterr().err
