"""Versions that meet: on the wire, in checkpoints, and in the folder of a run that an earlier one has begun.

`fixtures/version-0.1` was written by version 0.1.0: a deployed run of three rounds, and checkpoints of three rounds on
the clients below.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from deploy_cases import QUICK, Faulty, events, federation, is_right, rough, run
from safetensors.numpy import load, save

import scaffpd as sp
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.messages import HEADER, PROTOCOL, VERSION, Message, WireError, decode, encode
from scaffpd.errors import InputError
from scaffpd.run.settings.federation import FederationFile
from scaffpd.training.history import read, series

OLD = Path(__file__).parent / "fixtures" / "version-0.1"


def as_version(data, protocol, version=None):
    """A message as a silo or a coordinator of another version writes it."""
    arrays = load(data)
    about = json.loads(arrays[HEADER].tobytes())
    about.pop("version")
    about |= {"protocol": protocol} | ({"version": version} if version else {})
    return save({**arrays, HEADER: np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)})


class OtherVersion(Faulty):
    """A silo of another version: it cannot read ours where protocols differ, and writes its own."""

    def __init__(self, places, silo, protocol, version):
        super().__init__(places)
        self.theirs = silo
        self.other = (protocol, version)

    def ask(self, questions, timeout):
        replies = super().ask(questions, timeout)
        return {
            s: as_version(r, *self.other) if s == self.theirs else r for s, r in replies.items()
        }


# --- on the wire


@pytest.mark.parametrize("version", [None, "0.3.1", "0.1.9"])
def test_one_minor_version_apart_works_where_the_protocol_is_the_same(tmp_path, version):
    path, places = rough(tmp_path, more=QUICK)
    is_right(path, places, coordinate(path, OtherVersion(places, "va", PROTOCOL, version)))
    assert not events(path)


@pytest.mark.parametrize(
    ("protocol", "version", "words"), [(1, None, "0.1"), (PROTOCOL + 1, "0.3.0", "0.3.0")]
)
def test_another_protocol_is_refused_with_both_versions(
    tmp_path, fake_clock, protocol, version, words
):
    path, places = federation(tmp_path, more='\n[faults]\nmissing = "pause"\nstart_timeout = 0.2\n')
    outcome = coordinate(path, OtherVersion(places, "va", protocol, version))
    assert outcome.status == "paused"
    both = f"scaffpd {words} (protocol {protocol}), this one {VERSION} (protocol {PROTOCOL})"
    assert "Silo 'va'" in outcome.sentence
    assert both in outcome.sentence
    assert [both in event["sentence"] for event in events(path)] == [True]


def test_the_others_go_on_where_the_federation_allows_it(tmp_path, fake_clock):
    path, places = rough(tmp_path, more=QUICK)
    outcome = coordinate(path, OtherVersion(places, "va", 1, None))
    is_right(path, places, outcome)
    assert outcome.members == ("cleveland", "hungarian", "switzerland")


def test_a_silo_says_so_too_and_no_text_of_the_other_side_gets_through(tmp_path):
    _, places = federation(tmp_path)
    silo = Faulty(places).silos["va"]
    question = encode(Message("hello", {"question": "1"}))
    reply = decode(silo.answer(as_version(question, 3, "0.9.0")), 2**20)
    assert reply.kind == "refused"
    assert "0.9.0 (protocol 3)" in reply.values["sentence"]
    with pytest.raises(WireError) as refused:
        decode(as_version(question, "\x1b[2J" * 99, "\x1b" * 1000), 2**20)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


# --- in checkpoints


def clients(shift=0.0):
    rng = np.random.default_rng(7)
    found = {}
    for i in range(3):
        X = rng.standard_normal((24, 4))
        y = (X @ rng.standard_normal(4) + 0.3 * rng.standard_normal(24) > 0).astype(int)
        found[f"c{i}"] = X + shift, y
    return found


def cohort(**how):
    return sp.Cohort(clients(**how), sp.Linear("logistic", l2=0.05))


METHODS = {
    "scaff-pd": sp.ScaffPD(sp.ChiSquare(0.1), local_steps=5),
    "subspace": sp.SubspaceSaddle(sp.ChiSquare(0.1)),
    "fed-avg": sp.FedAvg(local_steps=5),
}


@pytest.fixture
def old(tmp_path, request):
    copy = tmp_path / "checkpoint.npz"
    shutil.copyfile(OLD / f"{request.param}.npz", copy)
    return METHODS[request.param], copy


@pytest.mark.parametrize("old", METHODS, indirect=True)
def test_a_checkpoint_of_an_earlier_version_goes_on_from_its_x(old):
    method, file = old
    arrays, about = read(file)
    assert "version" not in about
    result = sp.train(method, cohort(), rounds=4, seed=1, checkpoint=file, progress=False)
    np.testing.assert_allclose(result.history.losses[0], arrays["history.losses"][-1], rtol=1e-9)
    assert "version 0.1" in result.message
    assert read(file)[1]["version"] == series()
    more = sp.train(
        method, cohort(), rounds=6, seed=1, checkpoint=file, progress=False
    )  # it is ours now
    assert (more.rounds, "version 0.1" in more.message) == (6, False)


@pytest.mark.parametrize("old", ["scaff-pd"], indirect=True)
def test_its_certificate_is_true(old):
    result = sp.train(
        old[0], cohort(), rounds=400, tol=1e-8, seed=1, checkpoint=old[1], progress=False
    )
    best = sp.train(
        sp.SubspaceSaddle(sp.ChiSquare(0.1)), cohort(), rounds=100, tol=1e-13, progress=False
    )
    value = [sp.ChiSquare(0.1).support(cohort().evaluate(found.x).loss) for found in (result, best)]
    assert -1e-12 <= value[0] - value[1] <= result.certificate <= 1e-8


@pytest.mark.parametrize("old", ["scaff-pd"], indirect=True)
def test_of_other_data_or_with_noise_it_is_refused(old):
    method, file = old
    with pytest.raises(InputError, match=r"version 0\.1, and clients have other losses"):
        sp.train(method, cohort(shift=0.1), rounds=4, seed=1, checkpoint=file, progress=False)
    other = sp.Cohort(
        dict(zip("abc", clients().values(), strict=True)), sp.Linear("logistic", l2=0.05)
    )
    with pytest.raises(InputError, match=r"version 0\.1, and is of another problem"):
        sp.train(method, other, rounds=4, seed=1, checkpoint=file, progress=False)


# --- in the folder of a deployed run


def begun(folder, **replacing):
    path, places = federation(folder, replacing=replacing, more=QUICK)
    shutil.copytree(OLD / "run", folder / "run")
    return path, places


def test_a_run_that_an_earlier_version_began_goes_on(tmp_path):
    path, places = begun(tmp_path)
    outcome, transport = run(path, places)
    is_right(path, places, outcome)
    folder = DeployedRun(FederationFile.read(path).folder)
    assert [segment.before for segment in folder.segments()] == [0, 3]
    assert outcome.rounds > 3
    assert "describe" not in {
        decode(question, 2**31).kind for _, question, _ in transport.log
    }  # its agreement holds
    assert {
        row.split(",")[1] for row in (folder.path / "rounds.csv").read_text().splitlines()[1:]
    } == {"0", "1"}


def test_one_that_had_ended_is_not_trained_again_and_another_federation_is_refused(tmp_path):
    path, places = begun(tmp_path / "a", **{"rounds = 500": "rounds = 3"})
    file = tmp_path / "a" / "run" / "settings.json"
    settings = json.loads(file.read_text())
    goal = "algorithm or objective"
    settings["about"][goal] = FederationFile.read(path).identity()[
        goal
    ]  # a method whose settings are called the same
    file.write_text(json.dumps(settings))
    outcome, transport = run(path, places)
    assert (outcome.rounds, outcome.status, transport.log) == (3, "round limit", [])
    assert events(path) == []
    path, places = begun(tmp_path / "b", **{"l2 = 0.03": "l2 = 0.04"})
    assert "is of another model" in run(path, places)[0].sentence


def test_an_outcome_of_another_objective_is_no_answer(tmp_path):
    path, places = begun(tmp_path, **{"rounds = 500": "rounds = 3", "rho = 0.1": "rho = 0.5"})
    outcome, transport = run(path, places)
    assert outcome.rounds > 3
    assert transport.log
    (said,) = events(path)
    assert said["what"] == "upgraded"
    assert "rho=0.1" in said["sentence"]
    assert "rho=0.5" in said["sentence"]
    again, transport = run(path, places)  # it is ours now
    assert (again.sentence, transport.log, len(events(path))) == (outcome.sentence, [], 1)
