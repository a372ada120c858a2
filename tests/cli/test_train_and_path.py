"""`scaffpd train` and `scaffpd path` as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from cases.commands import QUICK, TABLE, patients, ran
from cases.refusals import refuses
from scaffpd.cli.settings import SETTINGS
from scaffpd.cli.train import requested
from scaffpd.report.record import RunRecord
from scaffpd.settings.model_file import model_bytes, read_model


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "patients.csv").write_text(patients())
    return tmp_path


def test_two_options_are_enough(here, capsys):
    found = ran(f"{TABLE} --splits 1", capsys)
    for words in (
        "Right of 100 held-out rows",
        "North",
        "South",
        "West",
        "over constant",
        "What is proven? ",
    ):
        assert words in found.out
    assert len(found.out.splitlines()) <= 25
    assert "Report: runs/patients/report.html" in found.out
    assert "Column 'note' left out: 150 different texts in 150 rows." in found.err
    assert "Numbers, as lines and 9 steps: age." in found.err
    assert "Categories: sex (2)." in found.err
    assert " round " not in found.err  # it was quick
    page = (here / "runs" / "patients" / "report.html").read_text()
    assert "should 3 clients predict “ill” together, or alone?" in page


@pytest.mark.cover(1)
@pytest.mark.parametrize("width", ["80", "100"])
@pytest.mark.parametrize("splits", [0, 1])
def test_a_run_of_many_clients_fits_on_one_screen(here, capsys, monkeypatch, width, splits):
    monkeypatch.setenv("COLUMNS", width)
    rows = patients(1200).replace("North", "N").splitlines()
    text = "\n".join(
        [rows[0], *(f"site {k % 60}{row[row.index(',') :]}" for k, row in enumerate(rows[1:]))]
    )
    (here / "many.csv").write_text(text + "\n")
    found = ran(f"train many.csv --client hospital --target ill --splits {splits}", capsys)
    assert len(found.out.splitlines()) <= 25
    assert " of 60; all are in " in found.out


def test_the_same_command_finds_its_run_and_another_one_its_own_folder(here, capsys):
    ran(QUICK, capsys)
    assert "Report: runs/patients/report.html\n" in ran(QUICK, capsys).out
    assert "runs/patients-2/report.html\n" in ran(f"{QUICK} --objective CVaR", capsys).out
    assert "runs/patients/report.html\n" in ran("train runs/patients/config.toml", capsys).out
    ran(f"{QUICK} --objective CVaR --out runs/patients", capsys, code=2)
    ran(f"{QUICK} --objective CVaR --out runs/patients --fresh --no-report", capsys)


def test_quiet_and_json(here, capsys):
    quiet = ran(f"{QUICK} --quiet --no-report", capsys)
    assert quiet.out == quiet.err == ""
    assert not (here / "runs" / "patients" / "report.html").exists()
    found = json.loads(ran(f"{QUICK} --json", capsys).out)
    assert found["folder"] == "runs/patients"
    assert found["models"][1]["status"] == "converged"
    assert len(found["verdict"]) == 2
    assert found["cautions"]
    rows = found["models"][1]["clients"]
    assert {row["client"] for row in rows} == {"North", "South", "West"}
    assert all(isinstance(row["test_score"], float) for row in rows)


def test_a_path_is_drawn_and_suggests_its_knee(here, capsys):
    found = ran("path patients.csv --client hospital --target ill --points 2", capsys)
    assert "worst case" in found.out
    assert "Suggested: " in found.out
    assert "4 models in " in found.out
    assert (here / "runs" / "patients-path" / "report.html").exists()


@pytest.mark.parametrize("folder", ["./hospitals", "hospitals/"])
def test_a_known_name_means_the_data_set_and_a_path_the_folder_of_that_name(here, folder):
    (here / folder).mkdir()
    for name in ("north", "south"):
        (here / folder / f"{name}.csv").write_text("age,ill\n1,0\n2,1\n3,0\n")
    assert requested(["hospitals"], SETTINGS["train"], {}).data.source == "hospitals"
    read = requested([folder], SETTINGS["train"], {"client": "file", "target": "ill"}).data
    assert read.file == (here / folder.strip("./"),)


def test_a_path_does_not_take_the_folder_of_a_run(here, capsys):
    ran(f"{QUICK} --no-report", capsys)
    found = ran("path hospitals --out runs/patients", capsys, code=2)
    assert (
        found.err
        == "The folder 'runs/patients' belongs to `scaffpd train`: choose another with --out.\n"
    )
    ran("path hospitals --points 1 --no-report", capsys)
    assert "runs/hospitals-path-2\n" in ran("path hospitals --points 2 --no-report", capsys).out


def test_options_take_the_place_of_the_settings(here, capsys):
    (here / "c.toml").write_text(
        '[data]\nsource = "hospitals"\n[objective]\nkind = "CVaR"\nalpha = 0.3\n'
    )
    found = json.loads(
        ran(
            "train c.toml --objective tilted --strength 0.2 --rounds 2 --tol 0 --splits 0 --json",
            capsys,
        ).out
    )
    assert [m["objective"] for m in found["models"]] == ["Average()", "Tilted(rho=0.2)"]
    assert [m["rounds"] for m in found["models"]] == [2, 2]


PHASES = {  # where Ctrl-C comes, and whether something was trained before
    "scaffpd.program.train.Source": False,
    "scaffpd.program.train.settled": False,
    "scaffpd.cli.screens.RoundsScreen.show": True,
    "scaffpd.program.train.joining": True,
    "scaffpd.program.train.held_out_scores": True,
    "scaffpd.report.folder.RunFolder.write": True,
}


@pytest.mark.parametrize("phase", PHASES)
def test_an_interruption_in_any_phase_says_what_is_kept_and_goes_on(
    phase, here, capsys, monkeypatch
):
    quick = QUICK.replace("--splits 0", "--splits 1") if phase.endswith("joining") else QUICK
    kept = "what was trained is saved in runs/patients; the same command goes on"
    lost = "nothing was saved; the same command starts anew"

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(phase, stop)
        found = ran(quick, capsys, code=130)
    assert found.err.endswith(f"Interrupted: {kept if PHASES[phase] else lost}.\n")
    assert found.err.count("Interrupted") == 1
    assert "What is proven? " in ran(quick, capsys).out
    assert sorted(one.name for one in (here / "runs").iterdir()) == ["patients"]


INTERRUPTED = """
import signal
from scaffpd import cli
from scaffpd.cli.screens import RoundsScreen

phase = RoundsScreen.phase
def interrupted(self, text, done=0.0):
    phase(self, text, done)
    if text.startswith({!r}):
        signal.raise_signal(signal.SIGINT)
RoundsScreen.phase = interrupted
cli.main()
"""


@pytest.mark.long
@pytest.mark.parametrize("phase", ["Setting the strength", "Training every client alone"])
def test_a_signal_ends_the_process_in_one_line(phase, here):
    words = TABLE.split()
    code = INTERRUPTED.format(phase)
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].startswith("Interrupted: ")
    assert "Traceback" not in done.stderr
    again = subprocess.run(
        [sys.executable, "-m", "scaffpd", *words], capture_output=True, text=True, check=True
    )
    assert "What is proven? " in again.stdout


def test_regression(here, capsys):
    text = "site,x,price\n" + "".join(
        f"{'ab'[k % 2]},{2 * k},{3.5 * k + (k % 7) + 1000}\n" for k in range(80)
    )
    (here / "prices.csv").write_text(text)
    found = ran(
        "train prices.csv --client site --target price --objective Agnostic --splits 0", capsys
    )
    assert "held-out rmse" in found.out
    assert "rmse" in (here / "runs" / "prices" / "clients.csv").read_text()


# ------------------------------------------------------------------ differential privacy


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
    assert "Report: runs/patients/report.html\n" in again.out
    assert "(ε, δ) = (4.00, 1e-05)" in again.out
    assert (
        "runs/patients-2/report.html\n" in ran(f"{TABLE} --epsilon 4 --rounds 5", capsys).out
    )  # its noise is another one's


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


@pytest.mark.parametrize("part", ["mean", "pairs"])
def test_a_model_file_whose_parts_do_not_fit_is_refused(here, capsys, part):
    ran(f"{TABLE} --no-report --splits 0 --curves off", capsys)
    path = here / "runs" / "patients" / "model.safetensors"
    x, setup = read_model(path)
    other = {"name": "elsewhere", "kind": "category", "categories": ["a"], "other": False}
    pair = {"left": other, "right": other}
    changed = {
        "mean": replace(setup, mean=setup.mean[1:]),
        "pairs": replace(setup, schema=setup.schema | {"pairs": [pair]}),
    }
    path.write_bytes(model_bytes(x, changed[part]))
    with refuses("not-a-model-file"):
        read_model(path)


def test_predictions_say_how_private_the_model_is(here, capsys):
    ran(f"{TABLE} --epsilon 3 --rounds 4 --no-report", capsys)
    found = ran("predict runs/patients patients.csv", capsys)
    said = found.out.splitlines()
    assert said[0] == "150 rows written to predictions.csv."
    assert said[-1] == "The model was trained with (ε, δ) = (3.00, 1e-05) for every record."
