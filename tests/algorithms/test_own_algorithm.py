"""An algorithm in a file outside the package: trained, deployed and run by commands."""

import importlib
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import scaffpd as sp
from experiments.central import GradientDescentAscent
from scaffpd.cli import app
from scaffpd.deploy.agreement import Agreement
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.local import agree_for_all, write_hospitals
from scaffpd.deploy.messages import InProcess
from scaffpd.deploy.silo import Silo
from scaffpd.settings.federation import FederationFile
from scaffpd.settings.methods import kind_of

OWN = '''
from dataclasses import dataclass

from scaffpd import ChiSquare
from experiments.central import CentralMethod, descent


@dataclass(frozen=True)
class Alternating(CentralMethod):
    """Gradient descent-ascent whose weights answer the new model."""

    published = "Alternating GDA"

    def round(self, federation, state):
        x = state.x - state.server_rate * descent(state.at, state.weights)
        state = self._moved(federation, state, x, state.weights)
        weights = self.objective.prox(state.losses, state.weights, state.dual_rate)
        return self._certified(state.__class__(**{**vars(state), "weights": weights}), state.at)


READY = Alternating(ChiSquare(rho=0.3))
SETTINGS = {"rounds": 3}
'''
ALGORITHM = "own_algorithm:Alternating"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module, in a folder that is the working directory."""
    (tmp_path / "own_algorithm.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_algorithm", raising=False)
    yield importlib.import_module("own_algorithm")
    sys.modules.pop("own_algorithm", None)


def command(*words):
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words):
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code != 0
    return " ".join((done.output + str(done.exception)).split())


def test_it_trains_and_proves(own):
    cohort = sp.Cohort(sp.data.synthetic(N=4, d=5, m=30), sp.Linear("squared", l2=0.1))
    result = sp.train(own.Alternating(sp.ChiSquare(rho=0.1)), cohort, rounds=3000, tol=1e-6)
    assert result.status == "converged"
    known = sp.train(sp.fair(sp.ChiSquare(rho=0.1)), cohort, tol=1e-9)
    assert np.sum((result.x - known.x) ** 2) <= 2 * (result.certificate + known.certificate) / 0.1
    assert own.Alternating(sp.Average()).releases(7) == GradientDescentAscent(
        sp.Average()
    ).releases(7)
    assert kind_of(own.READY) == ALGORITHM
    assert kind_of(sp.FedAvg()) == "FedAvg"


def test_it_is_deployed_where_operators_agree(own, tmp_path):
    """Every file has a name for its owner's own copy, and the agreement announces it."""
    path, places = write_hospitals(tmp_path / "silos")
    entry = f'\n[methods]\nalternating = "{ALGORITHM}"\n'
    for place in places.values():
        place.write_text(place.read_text() + entry)
    text = path.read_text().replace(
        "[objective]",
        '[algorithm]\nkind = "alternating"\nserver_rate = 0.1\ndual_rate = 0.1\n\n[objective]',
    )
    path.write_text(text[: text.index("[training]")] + f"[training]\nrounds = 4\ntol = 0\n{entry}")
    silos = {name: Silo.open(place) for name, place in places.items()}
    agree_for_all(FederationFile.read(path), places)
    outcome = coordinate(path, InProcess(silos))
    assert (outcome.status, outcome.rounds) == ("round limit", 4)
    va = silos["va"]
    (document,) = va.records.known().documents.values()
    assert ALGORITHM not in str(document)
    code = Agreement(document).summary(va.file, {})["code"]
    assert code == [f"method 'alternating' = {ALGORITHM} of this silo's own file"]


def test_commands_take_it(own, tmp_path):
    command(
        *("train", "hospitals", "--algorithm", ALGORITHM, "--rounds", "3", "--tol", "0"),
        *("--splits", "0", "--no-report", "--out", "run"),
    )
    config = (tmp_path / "run" / "config.toml").read_text()
    assert f'kind = "{ALGORITHM}"' in config
    (tmp_path / "again.toml").write_text(config.replace('folder = "."', 'folder = "second"'))
    command("train", "again.toml", "--no-report", "--fresh")


def test_a_config_that_loads_somebody_elses_code_says_so(own, tmp_path, caplog):
    sys.modules.pop("own_algorithm")
    (tmp_path / "theirs.toml").write_text(
        '[data]\nsource = "hospitals"\n[algorithm]\nkind = "own_algorithm:Alternating"\n'
        "[training]\nrounds = 1\ntol = 0\nsplits = 0\n"
    )
    command("train", "theirs.toml", "--no-report", "--out", "theirs")
    said = [line for line in caplog.messages if "not the package's own" in line]
    assert said == ["This runs code that is not the package's own: own_algorithm:Alternating"]


def test_what_is_no_algorithm_is_refused(own):
    for kind, sentence in (
        ("own_algorithm:SETTINGS", "'own_algorithm:SETTINGS' is no algorithm"),
        ("own_algorithm:Missing", "Unknown name in 'own_algorithm', 'Missing'"),
        ("no_such_module:Algorithm", "There is no module 'no_such_module'"),
        ("Alternating", "'Alternating'"),
    ):
        assert sentence in refused("train", "hospitals", "--algorithm", kind, "--quiet")
