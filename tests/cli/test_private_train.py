"""`scaffpd train --epsilon` as a user meets it."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest

from scaffpd import cli
from scaffpd.run.record import RunRecord
from scaffpd.run.settings.model_file import read_model

TABLE = "train patients.csv --client hospital --target ill"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    random = np.random.default_rng(1)
    lines = ["hospital,age,sex,ill"]
    for k in range(300):
        age = random.normal(60, 10)
        sex = random.choice(["f", "m"])
        lines.append(
            f"{'NSW'[k % 3]},{age:.1f},{sex},{int(age + 12 * (sex == 'm') + random.normal(0, 9) > 66)}"
        )
    (tmp_path / "patients.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def ran(command, capsys, code=0):
    assert cli.run(shlex.split(command)) == code
    found = capsys.readouterr()
    assert "Traceback" not in found.err
    return found


def test_one_option_is_enough(here, capsys):
    found = ran(f"{TABLE} --epsilon 4", capsys)
    assert "(ε, δ) = (4.00, 1e-05) for every record." in found.out
    assert "are exact and not covered" in " ".join(found.out.split())
    assert "Noise for ε = 4 in 30 rounds: z = " in found.err
    assert "round limit after 30 rounds" in found.out
    page = (
        (here / "runs" / "patients" / "report.html")
        .read_text(encoding="utf-8")
        .replace("\u00a0", " ")
    )
    assert "Differential privacy: (ε, δ) = (4.00, 1e-05)" in page
    again = ran(f"{TABLE} --epsilon 4", capsys)
    assert "runs/patients\n" in again.out
    assert "(ε, δ) = (4.00, 1e-05)" in again.out
    assert (
        "runs/patients-2\n" in ran(f"{TABLE} --epsilon 4 --rounds 5", capsys).out
    )  # its noise is another one's


def test_every_option_ends_in_the_settings_and_the_numbers_in_json(here, capsys):
    options = "--epsilon 2 --delta 1e-6 --clip 0.5 --loss-clip 2 --radius 2.5 --noise-seed 3 --baseline --rounds 6"
    found = json.loads(ran(f"{TABLE} {options} --json", capsys).out)
    privacy = found["privacy"]
    assert privacy["epsilon"] <= 2 == privacy["budget"]
    clips = {name: privacy["clips"][name] for name in ("clip", "loss_clip", "radius")}
    assert clips == {"clip": 0.5, "loss_clip": 2.0, "radius": 2.5}
    assert (privacy["delta"], privacy["seeded"], privacy["models"]) == (1e-6, True, 2)
    assert [m["name"] for m in found["models"]] == ["average", "fair"]
    rows = [row for model in found["models"] for row in model["clients"]]
    assert all(row["epsilon"] <= privacy["epsilon"] for row in rows)
    assert any("from a seed" in sentence for sentence in found["cautions"])
    same = json.loads(ran("train runs/patients/config.toml --json --out again", capsys).out)
    assert [model["clients"] for model in same["models"]] == [
        model["clients"] for model in found["models"]
    ]


def test_with_declared_ranges_the_folder_has_no_exact_statistics(here, capsys):
    """The model's scale is the settings' own, and no medians lie beside it."""
    ran(f"{TABLE} --epsilon 3 --rounds 4 --no-report", capsys)
    settings = (here / "runs" / "patients" / "config.toml").read_text()
    assert RunRecord.read(here / "runs" / "patients").fills
    (here / "runs" / "patients" / "ranges.toml").write_text(
        settings.replace("[data]", "[data]\nranges.age = [20, 100]")
    )
    ran("train runs/patients/ranges.toml --out ranged --no-report", capsys)
    x, setup = read_model(here / "ranged" / "model.safetensors")
    assert setup.mean.tolist() == [60.0, 0.0, 0.0]  # age, and two categories
    assert setup.deviation.tolist() == [20.0, 1.0, 1.0]
    assert len(x) == 4
    assert RunRecord.read(here / "ranged").fills == {}
    ran("predict ranged patients.csv", capsys)
    assert "ranges" in (here / "ranged" / "config.toml").read_text()


def test_predictions_say_how_private_the_model_is(here, capsys):
    ran(f"{TABLE} --epsilon 3 --rounds 4 --no-report", capsys)
    found = ran("predict runs/patients patients.csv", capsys)
    said = found.out.splitlines()
    assert said[0] == "300 rows written to predictions.csv."
    assert said[-1] == "The model was trained with (ε, δ) = (3.00, 1e-05) for every record."


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--epsilon 0", "--epsilon needs a number above 0, got 0."),
        ("--epsilon 4 --delta 1", "--delta needs a number between 0 and 1, got 1."),
        ("--epsilon 4 --loss-clip -1", "--loss-clip needs a number above 0, got -1."),
        ("--delta 1e-6", "--delta goes with --epsilon: how private is it to be?"),
        ("--noise-seed 1", "--noise-seed goes with --epsilon: how private is it to be?"),
        (
            "--epsilon 4 --tol 1e-6",
            "tol needs a certificate, and with noise there is none: leave it out.",
        ),
    ],
)
def test_mistakes_get_one_sentence(here, capsys, options, sentence):
    found = ran(f"{TABLE} {options}", capsys, code=2)
    assert sentence in found.err
    assert not (here / "runs").exists()
