"""`scaffpd deploy` and federation.toml: what they write, and what they say when it is wrong."""

from __future__ import annotations

import sys

import click
import pytest

from cases.refusals import refuses
from cases.silos import QUICK, federation, run
from scaffpd.cli import run as cli
from scaffpd.cli.deploy import _follow
from scaffpd.deploy.deployed_run import PROGRESS, DeployedRun, Outcome
from scaffpd.deploy.local import write_hospitals
from scaffpd.errors import InputError
from scaffpd.files import DRAFT, JsonLines, clear_drafts
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.silo import SiloFile


def refused(capsys, *arguments):
    assert cli(["deploy", *map(str, arguments)]) == 2
    words = capsys.readouterr().err.strip()
    assert "Traceback" not in words
    return words


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("silos = [", "silo = [", "unknown-name"),
        ('silos = ["cleveland", "hungarian", "switzerland", "va"]', "", "setting-missing"),
        ('"va"]', '"cleveland"]', "named-twice"),
        ("l2 = 0.03", "l2 = -1", "setting-invalid"),
        ("l2 = 0.03", "los = 1", "unknown-name"),
        ('"logistic"', '"logistik"', "unknown-name"),
        ('"ChiSquare"', '"ChiSqare"', "unknown-name"),
        ("rho = 0.1", "row = 0.1", "unknown-name"),
        ("rho = 0.1", "", "settings-incomplete"),
        ("rho = 0.1", "rho = -2", "setting-invalid"),
        ('[objective]\nkind = "ChiSquare"\nrho = 0.1', "", "objective-missing"),
        ("[objective]", '[algorithm]\nkind = "FedAvg"\n[objective]', "objective-of-its-own"),
        ("[objective]", '[algorithm]\nkind = "FedAverage"\n[objective]', "unknown-name"),
        (
            "[objective]",
            '[algorithm]\nkind = "ScaffPD"\nsteps = {kind = "Auto", x = 1}\n[objective]',
            "unknown-name",
        ),
        ("[objective]", "[algorithm]\nlocal_step = 3\n[objective]", "unknown-name"),
        ("tol = 1e-6", "tol = -1", "setting-invalid"),
        ("rounds = 500", "rounds = 0", "setting-invalid"),
        ('folder = "run"', 'folder = "run"\ntimeout = 0', "setting-invalid"),
        ('folder = "run"', 'folder = "run"\nserver = "a b"', "setting-invalid"),
        ('age = "number"', 'age = "numbers"', "column-kind-unknown"),
        ('age = "number"', "age = 3", "setting-invalid"),
        ('age = "number"', "age = [3, 1]", "agreement-unusable"),
        ("labels = [0, 1]", "labels = [0]", "setting-invalid"),
        ("labels = [0, 1]", f"labels = {list(range(100_000))}", "setting-invalid"),
        ("[objective]", '[algorithm]\nkind = "MinimaxNewton"\n[objective]', "method-needs-vectors"),
        (
            "[objective]",
            '[algorithm]\nkind = "SubspaceSaddle"\n[objective]',
            "method-needs-vectors",
        ),
        ("[training]", "[privacy]\nepsilon = 1.0\n[training]", "tol-without-certificate"),
        ("tol = 1e-6", "[privacy]\nepsilon = 1.0", "range-missing"),
        ("[training]", "[training", "settings-not-toml"),
    ],
)
def test_a_federations_file_is_read_strictly(tmp_path, old, new, code):
    path, _ = write_hospitals(tmp_path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with refuses(code) as error:
        FederationFile.read(path)
    assert "\n" not in str(error.value)


def test_defaults(tmp_path):
    path = tmp_path / "federation.toml"
    path.write_text('silos = ["a", "b", "c"]\ncolumns = [2]\n[objective]\nkind = "Agnostic"\n')
    file = FederationFile.read(path)
    assert file.tol == 1e-6
    assert file.address == ("localhost", 8002)
    assert file.folder == tmp_path / "run"
    fair = "Floored(objective=Agnostic(), floor=0.2728)"  # of three silos
    assert repr(file.method) == f"Fair(objective={fair}, local_steps=None, batch_size=None)"


def test_what_cannot_be_deployed(tmp_path, capsys):
    path, places = write_hospitals(tmp_path / "h")
    places["va"].unlink()
    assert "names the silo 'va', but there is no" in refused(capsys, "local", tmp_path / "h")
    assert "No such file" in refused(capsys, "local", tmp_path)
    assert "no startup kit" in refused(capsys, "run", path)
    assert "There is no run" in refused(capsys, "status", tmp_path / "h")


def test_flare_that_is_not_installed_is_said_in_a_sentence(tmp_path, capsys, monkeypatch):
    for name in list(sys.modules):
        if name.startswith(("nvflare.", "scaffpd.deploy.flare.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nvflare", None)
    assert "pip install 'scaffpd[flare]'" in refused(capsys, "local", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_hospitals(tmp_path):
    path, places = write_hospitals(tmp_path)
    assert len(places) == 4
    assert FederationFile.read(path).silos == tuple(places)
    for name, place in places.items():
        assert SiloFile.read(place).name == name
    rows = [
        len((place.parent / "patients.csv").read_text().splitlines()) - 1
        for place in places.values()
    ]
    assert sum(rows) == 920


@pytest.fixture
def no_signals(monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)


def test_the_screen_shows_rounds_and_events_as_plain_lines(
    tmp_path, capsys, fake_clock, no_signals
):
    path, places = federation(tmp_path, replacing=QUICK)
    outcome, _ = run(path, places, {24: [("kill", "va")]})

    def carry(file, watch, say, seconds):
        say("Up.")
        for line in JsonLines(tmp_path / "run" / PROGRESS).read():
            watch(line)
        return outcome

    with pytest.raises(click.exceptions.Exit) as ended:
        _follow(FederationFile.read(path), False, 1.0, carry)
    assert ended.value.exit_code == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "Silo 'va' did not answer: nobody answers." in printed
    assert "certified gap" in printed
    assert printed.endswith(outcome.sentence)  # the reason of the pause is the last line


def test_quiet_is_quiet(tmp_path, capsys, no_signals):
    def carry(file, watch, say, seconds):
        say("Up.")
        return Outcome("converged", "Done.")

    with pytest.raises(click.exceptions.Exit) as ended:
        _follow(FederationFile.read(federation(tmp_path)[0]), True, 1.0, carry)
    assert ended.value.exit_code == 0
    assert capsys.readouterr().out == ""


def test_a_coordinator_removes_nothing_from_its_folder_but_its_own_half_written_files(tmp_path):
    for name in (".env", ".gitignore"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    half = tmp_path / f".outcome.json.abcdefgh{DRAFT}"
    half.touch()
    clear_drafts(DeployedRun(tmp_path).path)
    assert not half.exists()
    assert {path.name for path in tmp_path.glob(".*")} == {
        ".env",
        ".gitignore",
        ".ipynb_checkpoints",
    }


def test_what_a_run_has_written_is_read_back(tmp_path):
    folder = DeployedRun(tmp_path)
    assert folder.outcome() is None
    outcome = Outcome("converged", "Done.", 9, 0.1 + 0.2)
    folder.end(outcome)
    assert folder.outcome() == outcome


def test_two_coordinators_do_not_share_a_folder(tmp_path):
    from scaffpd.deploy.deployed_run import DeployedRun

    with (
        DeployedRun(tmp_path / "run").locked(),
        pytest.raises(InputError, match="Another coordinator is at work"),
    ):
        DeployedRun(tmp_path / "run").locked().__enter__()
