"""Every runtime gives the cohort's numbers."""

from __future__ import annotations

import numpy as np
import pytest

import scaffpd as sp
from cases.silos import MODEL, asking_for_sums, cohort, federation, model_of, opened
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.messages import InProcess
from scaffpd.run.settings.federation import FederationFile

OBJECTIVE = '[objective]\nkind = "ChiSquare"\nrho = 0.1\n'
ALGORITHMS = {
    "ScaffPD": (OBJECTIVE + '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 20\n', 1),
    "ScaffPD-minibatch": (
        OBJECTIVE + '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 10\nbatch_size = 24\n',
        1,
    ),
    "Scaffold": ('[algorithm]\nkind = "Scaffold"\nlocal_steps = 5\n', 0),
    "Scaffold-I": (
        '[algorithm]\nkind = "Scaffold"\noption = "I"\nclients_per_round = 2\nbatch_size = 24\n',
        0,
    ),
    "FedAvg": ('[algorithm]\nkind = "FedAvg"\nlocal_steps = 5\nbatch_size = 24\n', 0),
    "DRFA": ('[algorithm]\nkind = "DRFA"\nclients_per_round = 2\nbatch_size = 24\n', 0),
}
MORE = {
    "Fair": (OBJECTIVE, 1),
    "AFL": ('[algorithm]\nkind = "AFL"\n', 0),
    "ScaffPD, one step": (OBJECTIVE + '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 1\n', 1),
    "DeltaFL": ('[algorithm]\nkind = "DeltaFL"\nclients_per_round = 2\n', 0),
    "Extragradient": (OBJECTIVE + '[algorithm]\nkind = "Extragradient"\n', 1),
    "FedOpt": ('[algorithm]\nkind = "FedOpt"\nserver_rate = 0.01\n', 0),
    "FedProx": ('[algorithm]\nkind = "FedProx"\n', 0),
    "GradientDescentAscent": (OBJECTIVE + '[algorithm]\nkind = "GradientDescentAscent"\n', 1),
    "MinimaxNewton": (OBJECTIVE + '[algorithm]\nkind = "MinimaxNewton"\n', 1),
    "ProxSkip": ('[algorithm]\nkind = "ProxSkip"\n', 0),
    "QFFL": ('[algorithm]\nkind = "QFFL"\n', 0),
    "SubspaceSaddle": (OBJECTIVE + '[algorithm]\nkind = "SubspaceSaddle"\n', 1),
}
EVERYTHING = {**ALGORITHMS, **MORE}


def settings(folder, name, rounds=6, silos=4):
    """The files of a run of so many rounds, without a tolerance that would end it sooner."""
    text, _ = EVERYTHING[name]
    path, places = federation(
        folder,
        silos,
        replacing={OBJECTIVE: text, "rounds = 500\ntol = 1e-6": f"rounds = {rounds}\ntol = 0"},
    )
    for (
        place
    ) in places.values():  # these look at every vector of every silo, which has to be allowed
        place.write_text(place.read_text() + '\n[limits]\nalgorithms = "all"\n')
    return path, places


def expected(path, places):
    """The cohort's run."""
    file = FederationFile.read(path)
    return sp.train(
        asking_for_sums(file.method),
        cohort(path, places),
        rounds=file.training.rounds,
        seed=file.training.seed,
    )


def agrees(path, places, outcome, within=1e-9):
    wanted = expected(path, places)
    assert outcome.rounds == wanted.rounds
    np.testing.assert_allclose(model_of(path), wanted.x, rtol=0, atol=within)
    return wanted


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", EVERYTHING)
def test_silos_behind_bytes_give_the_numbers_of_the_cohort(tmp_path, name):
    path, places = settings(tmp_path, name, rounds=4, silos=3)
    outcome = coordinate(path, InProcess(opened(places)))
    assert outcome.status == "round limit"
    within = (
        1e-6 if "Subspace" in name or name == "Fair" else 1e-9
    )  # beyond convergence these amplify rounding
    agrees(path, places, outcome, within)


@pytest.mark.sample(2)
@pytest.mark.parametrize("loss", ["logistic", "softmax", "squared"])
def test_every_loss(tmp_path, loss):
    path, places = federation(tmp_path, replacing={MODEL: MODEL.replace("logistic", loss)})
    outcome = coordinate(path, InProcess(opened(places)))
    assert outcome.status == "converged"
    assert outcome.certificate <= 1e-6
    method = asking_for_sums(FederationFile.read(path).method)
    result = sp.train(method, cohort(path, places), rounds=500, tol=1e-6)
    np.testing.assert_allclose(model_of(path), result.x, rtol=0, atol=1e-9)
