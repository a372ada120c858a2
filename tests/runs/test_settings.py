"""Settings written to a file and read again; what is wrong is refused."""

import tomllib

import pytest

from cases.refusals import refuses
from scaffpd.objectives import CVaR
from scaffpd.privacy import RADIUS, ROUNDS, Private
from scaffpd.settings.run import RunConfig

FULL = """
name = "patients"
[data]
file = "patients.csv"
client = "hospital"
target = "ill"
test = 0.25
[objective]
kind = "CVaR"
alpha = 0.4
[training]
rounds = 7
"""


def written(tmp_path, text):
    (tmp_path / "c.toml").write_text(text)
    return tmp_path / "c.toml"


def test_settings_are_complete_and_repeat_themselves(tmp_path):
    config = RunConfig.read(written(tmp_path, FULL))
    assert isinstance(config.goal, CVaR)
    assert config.training.rounds == 7
    text = config.toml(tmp_path, "a heading")
    assert text.startswith("# a heading\n")
    again = RunConfig.read(written(tmp_path, text))
    complete = tomllib.loads(text)
    assert again.toml(tmp_path, "a heading") == text
    assert repr(again.method) == repr(config.method)
    assert complete["data"]["test"] == 0.25
    assert (complete["training"]["device"], complete["training"]["seed"]) == ("cpu", 0)


def test_changes_take_the_place_of_what_the_file_says(tmp_path):
    config = RunConfig.read(
        written(tmp_path, FULL), {"training": {"rounds": 9}, "objective": {"alpha": 0.2}}
    )
    assert config.training.rounds == 9
    assert repr(config.goal) == "CVaR(alpha=0.2)"
    other = RunConfig.read(written(tmp_path, FULL), {"objective": {"kind": "Agnostic"}})
    assert repr(other.goal) == "Agnostic()"
    capped = RunConfig.read(
        written(tmp_path, FULL.replace('"CVaR"\nalpha = 0.4', '"ChiSquare"\nrho = 0.1\ncap = 0.5'))
    )
    assert repr(capped.goal) == "ChiSquare(rho=0.1, cap=0.5)"


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("rounds = 7", "roundz = 7", "unknown-name"),
        ("[training]", "[trainig]", "unknown-name"),
        ('kind = "CVaR"', 'kind = "CVar"', "unknown-name"),
        ("alpha = 0.4", "alfa = 0.4", "unknown-name"),
        ("rounds = 7", "rounds = 0", "setting-invalid"),
        ("rounds = 7", "tol = -1", "setting-invalid"),
        ("rounds = 7", "[model]\nl2 = -1", "setting-invalid"),
        ("rounds = 7", "[model]\nkappa = 0", "setting-invalid"),
        ("test = 0.25", "test = 1.0", "setting-invalid"),
        ("test = 0.25", 'columns = "age"', "setting-invalid"),
        ("test = 0.25", 'columns = ["age", "age"]', "named-twice"),
        ("test = 0.25", 'task = "classify"', "unknown-name"),
        ("test = 0.25", 'source = "digits"', "data-source-unclear"),
        ('file = "patients.csv"', 'source = "digits"', "unknown-name"),
        ('target = "ill"', "", "setting-missing"),
        ("[data]", "data = 3\n[date]", "unknown-name"),
        ("rounds = 7", '[algorithm]\nkind = "FedAvg"', "objective-of-its-own"),
        ("rounds = 7", '[algorithm]\nkind = "ScaffPd"', "unknown-name"),
        ("rounds = 7", '[algorithm]\nkind = "json:dumps"', "wrong-class"),
        ("rounds = 7", '[algorithm]\nkind = "nowhere:A"', "entry-not-found"),
        ('name = "patients"', "name = ", "settings-not-toml"),
        ('name = "patients"', 'silos = ["a"]', "other-settings-file"),
    ],
)
def test_what_is_wrong_is_refused(tmp_path, old, new, code):
    assert old in FULL
    with refuses(code):
        RunConfig.read(written(tmp_path, FULL.replace(old, new)))


def test_files_are_found_from_the_settings_and_written_from_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    text = FULL.replace('"patients.csv"', '["data/a.csv", "data/b.csv"]').replace("0.25", '"t.csv"')
    config = RunConfig.read(written(tmp_path, text))
    assert config.table.file == (tmp_path / "data/a.csv", tmp_path / "data/b.csv")
    assert config.table.test == tmp_path / "t.csv"
    found = tomllib.loads(config.toml(tmp_path / "runs" / "p"))["data"]
    assert found["file"] == ["../../data/a.csv", "../../data/b.csv"]
    assert found["test"] == "../../t.csv"


def test_defaults_with_noise_cost_less_of_it(tmp_path):
    private = FULL.replace("rounds = 7", "[privacy]\nepsilon = 2.0")
    config = RunConfig.read(written(tmp_path, private))
    assert (config.training.rounds, config.privacy.radius) == (ROUNDS, RADIUS)
    assert config.method.local_steps == 1
    assert (config.privacy.clip, config.privacy.loss_clip) == (Private.clip, Private.loss_clip)
    assert config.privacy.delta == Private.delta
