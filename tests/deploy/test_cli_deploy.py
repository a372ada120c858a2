"""`scaffpd deploy` and federation.toml: what they write, and what they say when something is wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest
from deploy_cases import federation, progress, run

from scaffpd.cli import run as cli
from scaffpd.cli.deploy import _end, _screen
from scaffpd.deploy.deployed_run import DeployedRun, Outcome, Segment
from scaffpd.deploy.local import LocalDeployment, write_hospitals
from scaffpd.errors import InputError
from scaffpd.files import DRAFT
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.silo import SiloFile


def refused(capsys, *arguments):
    assert cli(["deploy", *map(str, arguments)]) == 2
    words = capsys.readouterr().err.strip()
    assert "Traceback" not in words
    return words


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "silos = [",
            "silo = [",
            "Unknown key in 'federation.toml', 'silo': did you mean 'silos'?",
        ),
        (
            'silos = ["cleveland", "hungarian", "switzerland", "va"]',
            "",
            "needs the names of all silos",
        ),
        ('"va"]', '"cleveland"]', "names 'cleveland' twice in silos"),
        ("l2 = 0.03", "l2 = -1", "needs a number >= 0 for model.l2, got -1."),
        (
            "l2 = 0.03",
            "los = 1",
            "Unknown key in [model] of 'federation.toml', 'los': did you mean 'loss'?",
        ),
        ('"logistic"', '"logistik"', "did you mean 'logistic'?"),
        (
            '"ChiSquare"',
            '"ChiSqare"',
            "Unknown objective.kind in 'federation.toml', 'ChiSqare': did you",
        ),
        (
            "rho = 0.1",
            "row = 0.1",
            "Unknown key in [objective] of 'federation.toml', 'row': did you mean 'rho'?",
        ),
        ("rho = 0.1", "", "[objective] of 'federation.toml' is not complete"),
        ("rho = 0.1", "rho = -2", "rho"),
        ('[objective]\nkind = "ChiSquare"\nrho = 0.1', "", "Fair needs an [objective]"),
        (
            "[objective]",
            '[algorithm]\nkind = "FedAvg"\n[objective]',
            "FedAvg has an objective of its own",
        ),
        ("[objective]", '[algorithm]\nkind = "FedAverage"\n[objective]', "did you mean 'FedAvg'?"),
        (
            "[objective]",
            '[algorithm]\nkind = "ScaffPD"\nsteps = {kind = "Auto", x = 1}\n[objective]',
            "algorithm.steps",
        ),
        ("[objective]", "[algorithm]\nlocal_step = 3\n[objective]", "did you mean 'local_steps'?"),
        ("tol = 1e-6", "tol = -1", "training.tol"),
        ("rounds = 500", "rounds = 0", "a whole number >= 1 for training.rounds"),
        ("[training]", "[faults]\nquorum = 9\n[training]", "a quorum of 9, but only 4 silos"),
        (
            "[training]",
            '[faults]\nmissing = "wait"\n[training]',
            "Unknown faults.missing in 'federation.toml', 'wait'",
        ),
        (
            "[training]",
            "[faults]\ntimeout = 0\n[training]",
            "a number above 0 for faults.timeout, got 0.",
        ),
        (
            "[training]",
            "[faults]\nmax_age = -1\n[training]",
            "a whole number >= 0 for faults.max_age, got -1.",
        ),
        ("[training]", '[features]\nnumbers = "float16"\n[training]', "did you mean"),
        ("[training]", "[server]\nport = 99999\n[training]", "from 1 to 65535"),
        ("[training]", "[training", "is not TOML"),
    ],
)
def test_a_federations_file_is_read_strictly(tmp_path, capsys, old, new, sentence):
    path, _ = write_hospitals(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert sentence in refused(capsys, "flare", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_defaults(tmp_path):
    path = tmp_path / "federation.toml"
    path.write_text('silos = ["a", "b", "c"]\n[objective]\nkind = "Agnostic"\n')
    file = FederationFile.read(path)
    assert file.faults.quorum == 2
    assert file.training.tol == 1e-6
    assert file.folder == tmp_path / "run"
    assert repr(file.method) == "Fair(objective=Agnostic(), local_steps=None, batch_size=None)"


@pytest.mark.parametrize("engine", ["flare"])
def test_files_and_commands_for_production(tmp_path, capsys, engine):
    pytest.importorskip({"flare": "nvflare"}[engine])
    path, _ = write_hospitals(tmp_path)
    assert cli(["deploy", engine, str(path), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "At the coordinator" in printed
    wanted = {
        "flare": ("project.yml", "nvflare provision"),
    }[engine]
    assert (tmp_path / "out" / wanted[0]).is_file()
    assert wanted[1] in printed
    assert "--insecure" not in printed.replace("127.0.0.1:9094 --insecure", "")


def test_what_cannot_be_deployed(tmp_path, capsys):
    path, places = write_hospitals(tmp_path / "h")
    assert "not empty" in refused(capsys, "local", "--out", tmp_path / "h")
    assert "2 to 22 silos" in refused(capsys, "local", "--silos", 99, "--out", tmp_path / "p")
    assert "belong to a federation.toml" in refused(
        capsys, "local", "--silo", places["va"], "--out", tmp_path / "q"
    )
    words = refused(capsys, "local", path, "--silo", places["va"], "--out", tmp_path / "r")
    assert "names the silo 'cleveland': give --silo FILE for each silo (given: va)" in words
    assert "is a file: name a folder" in refused(capsys, "local", "--out", path)
    assert "is a file: name a folder" in refused(capsys, "flare", path, "--out", path)
    assert "no deployment" in refused(capsys, "resume", tmp_path)
    assert "needs both --kit and --job" in refused(capsys, "resume", path, "--kit", tmp_path)


@pytest.mark.parametrize("engine", ["flare"])
def test_an_engine_that_is_not_installed_is_said_in_a_sentence(
    tmp_path, capsys, monkeypatch, engine
):
    for name in list(sys.modules):
        if name.startswith(("nvflare.", "flwr.", f"scaffpd.deploy.{engine}.")):
            monkeypatch.delitem(sys.modules, name)
    for name in ("nvflare", "flwr"):
        monkeypatch.setitem(sys.modules, name, None)
    assert f"pip install 'scaffpd[{engine}]'" in refused(capsys, "local", "--out", tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("silos", [2, 3, 4, 5, 12])
def test_hospitals_and_their_wards(tmp_path, silos):
    path, places = write_hospitals(tmp_path, silos)
    assert len(places) == silos
    assert FederationFile.read(path).silos == tuple(places)
    for name, place in places.items():
        assert SiloFile.read(place).name == name
    rows = [
        len((place.parent / "patients.csv").read_text().splitlines()) - 1
        for place in places.values()
    ]
    assert min(rows) >= 40
    assert sum(rows) == 920 or silos < 4


def test_the_screen_shows_rounds_and_events_as_plain_lines(tmp_path, capsys):
    path, places = federation(
        tmp_path, more="\n[faults]\nquorum = 2\nstart_timeout = 0.2\nprobe = 0.1\n"
    )
    outcome, _ = run(path, places, {9: [("kill", "va")]})
    with _screen(FederationFile.read(path), quiet=False) as screen:
        screen.say("Up.")
        for line in progress(path):
            screen.watch(json.loads(json.dumps(line)))
    _end(screen, outcome, tmp_path / "run")
    printed = capsys.readouterr().out
    assert "nothing is certified: va away" in printed
    assert "Silo 'va' does not take part: nobody answers." in printed
    assert "certified gap" in printed
    assert "dropped" in printed


def test_quiet_is_quiet(tmp_path, capsys):
    with _screen(FederationFile.read(federation(tmp_path)[0]), quiet=True) as screen:
        screen.say("Up.")
    assert capsys.readouterr().out == ""


def test_a_coordinator_removes_nothing_from_its_folder_but_its_own_half_written_files(tmp_path):
    for name in (".env", ".gitignore"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    half = tmp_path / f".outcome.json.abcdefgh{DRAFT}"
    half.touch()
    with DeployedRun(tmp_path).locked():
        assert not half.exists()
    assert {path.name for path in tmp_path.glob(".*")} == {
        ".env",
        ".gitignore",
        ".ipynb_checkpoints",
    }


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("segments.json", "["),
        ("segments.json", "[]"),
        ("segments.json", '{"parts": []}'),
        ("segments.json", '{"segments": [{"number": 0, "before": 0}]}'),
        ("segments.json", '{"segments": [{"number": "first", "members": [], "before": 0}]}'),
        ("outcome.json", '{"final": true}'),
        ("outcome.json", '{"status": "converged", "final": true, "sentence": "", "members": 3}'),
    ],
)
def test_a_damaged_file_of_a_run_is_named_in_one_sentence(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    folder = DeployedRun(tmp_path)
    with pytest.raises(
        InputError,
        match=rf"{name}' cannot be read; use another folder, or remove it to start anew\.",
    ):
        folder.segments() if name == "segments.json" else Outcome.of(folder)


def test_what_a_run_has_written_is_read_back(tmp_path):
    folder = DeployedRun(tmp_path)
    first = Segment(0, ("a", "b"), 0)
    second = Segment(1, ("a",), 7)
    assert folder.segments() == []
    with pytest.raises(InputError, match="has no outcome yet"):
        Outcome.of(folder)
    folder.begin(first, None)
    folder.begin(second, None)
    assert folder.segments() == [first, second]
    outcome = Outcome(
        "converged", True, "Done.", ("a",), 9, 0.1 + 0.2, {"epsilon": float("inf"), "delta": 1e-5}
    )
    folder.write("outcome.json", asdict(outcome))
    assert Outcome.of(folder) == outcome


def test_a_folder_that_the_user_happens_to_call_engine_is_not_removed(tmp_path):
    path, places = federation(tmp_path)
    (tmp_path / "engine").mkdir()
    with pytest.raises(InputError, match=r"engine' would be removed"):
        LocalDeployment.of(tmp_path, "flare", path, list(places.values()))
    (tmp_path / "engine").rmdir()
    LocalDeployment.of(tmp_path, "flare", path, list(places.values()))
    (tmp_path / "engine").mkdir()  # as an earlier run leaves it that was killed
    LocalDeployment.of(tmp_path, "flare", path, list(places.values()))


def test_two_coordinators_do_not_share_a_folder(tmp_path):
    from scaffpd.deploy.deployed_run import DeployedRun

    with (
        DeployedRun(tmp_path / "run").locked(),
        pytest.raises(InputError, match="Another coordinator is at work"),
    ):
        DeployedRun(tmp_path / "run").locked().__enter__()
