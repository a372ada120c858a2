"""Settings written down and read again; what is misspelt gets the nearest right word."""

from __future__ import annotations

import tomllib

import pytest

from scaffpd.errors import InputError
from scaffpd.objectives import CVaR
from scaffpd.run.settings.run import RunConfig

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
    for key in ("standardise", "seed", "test"):
        assert key in complete["data"]
    assert complete["training"]["device"] == "cpu"


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
    ("old", "new", "sentence"),
    [
        (
            "rounds = 7",
            "roundz = 7",
            "Unknown key in [training] of 'c.toml', 'roundz': did you mean 'rounds'?",
        ),
        ("[training]", "[trainig]", "Unknown key in 'c.toml', 'trainig': did you mean 'training'?"),
        (
            'kind = "CVaR"',
            'kind = "CVar"',
            "Unknown objective.kind in 'c.toml', 'CVar': did you mean 'CVaR'?",
        ),
        (
            "alpha = 0.4",
            "alfa = 0.4",
            "Unknown key in [objective] of 'c.toml', 'alfa': did you mean 'alpha'?",
        ),
        ("alpha = 0.4", "alpha = 4", "CVaR needs 0 < alpha <= 1, got 4."),
        (
            "rounds = 7",
            "rounds = 0",
            "'c.toml' needs a whole number >= 1 for training.rounds, got 0.",
        ),
        (
            "rounds = 7",
            "tol = -1",
            "'c.toml' needs a number >= 0 (0: make all rounds) for training.tol, got -1.",
        ),
        (
            "rounds = 7",
            'numbers = "float16"',
            "Unknown training.numbers in 'c.toml', 'float16': did you mean",
        ),
        (
            "test = 0.25",
            "test = 1.0",
            "'c.toml' needs a share from 0 to below 1 for data.test, got 1.0.",
        ),
        (
            "test = 0.25",
            'source = "digits"',
            "'c.toml' needs exactly one of file, source and entry in [data].",
        ),
        (
            "test = 0.25",
            "clients = 4",
            "'c.toml' has data.clients, which goes with data.source, but not with file.",
        ),
        (
            'target = "ill"',
            "",
            "'c.toml' needs the name of a column for data.target, but it is missing.",
        ),
        (
            "test = 0.25",
            'task = "classify"',
            "Unknown data.task in 'c.toml', 'classify': did you mean",
        ),
        (
            "test = 0.25",
            'columns = "age"',
            "'c.toml' needs a list such as [\"a\", \"b\"] for data.columns, got 'age'.",
        ),
        ("rounds = 7", '[algorithm]\nkind = "FedAvg"', "FedAvg has an objective of its own"),
        ("rounds = 7", '[algorithm]\nkind = "ScaffPd"', "did you mean 'ScaffPD'?"),
        (
            "rounds = 7",
            '[model]\nloss = "logistik"',
            "Unknown model.loss in 'c.toml', 'logistik': did you mean 'logistic'?",
        ),
        ("rounds = 7", "[model]\nl2 = -1", "'c.toml' needs a number >= 0 for model.l2, got -1."),
        (
            "rounds = 7",
            '[model]\nnetwork = "n:f"\nintercept = true',
            "model.intercept, which goes with a linear",
        ),
        (
            "rounds = 7",
            '[model]\nnetwork = "n:f"\nstrength = 3.0',
            "model.strength, which goes with a linear",
        ),
        ("rounds = 7", "[model]\nstrength = 0", "for model.strength, got 0."),
        ("[data]", "data = 3\n[date]", "Unknown key in 'c.toml', 'date': did you mean 'data'?"),
        ('name = "patients"', "name = ", "The file 'c.toml' is not TOML"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path, old, new, sentence):
    assert old in FULL
    with pytest.raises(InputError) as caught:
        RunConfig.read(written(tmp_path, FULL.replace(old, new)))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
