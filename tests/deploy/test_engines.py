"""The engines give the cohort's numbers, survive what they must survive, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import time

import numpy as np
import psutil
import pytest
from deploy_cases import (
    asking_for_sums,
    cohort,
    federation,
    is_right,
    model_of,
    mostly_long,
    opened,
)
from hurting import kill_job, kill_server, kill_silo, restart_server
from test_runtime_agreement import OBJECTIVE, agrees, settings

import scaffpd as sp
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun, Outcome
from scaffpd.deploy.local import LocalDeployment, engine_named
from scaffpd.deploy.messages import InProcess
from scaffpd.deploy.supervise import RetryPolicy, Supervisor, wait_for
from scaffpd.run.settings.federation import FederationFile

NAMES = ("ScaffPD", "Scaffold", "FedAvg", "DRFA")


def outcome_of(path):
    return Outcome.of(DeployedRun(FederationFile.read(path).folder))


@pytest.mark.parametrize(
    "name", mostly_long(NAMES, "ScaffPD", "Scaffold")
)  # the silos' answers: test_conformance
def test_flower_in_this_process(tmp_path, name):
    pytest.importorskip("flwr", reason="needs scaffpd[flower]")
    from flower_simulator import simulate

    path, places = settings(tmp_path, name, rounds=5)
    simulate(path, places)
    agrees(path, places, outcome_of(path))


@pytest.mark.deploy
@pytest.mark.parametrize("name", NAMES)
def test_flares_simulator(tmp_path, name):
    pytest.importorskip("nvflare", reason="needs scaffpd[flare]")
    from flare_simulator import simulate

    path, places = settings(tmp_path, name)
    simulate(path, places, tmp_path / "work")
    agrees(path, places, outcome_of(path))


class Deployed:
    """One engine for many runs: the federation's file is written anew for each."""

    def __init__(self, kind, folder):
        self.folder = folder
        self.path, self.places = federation(folder)
        self.text = self.path.read_text()
        for place in self.places.values():
            place.write_text(place.read_text() + '\n[limits]\nalgorithms = "all"\n')
        self.engine = engine_named(kind, self.path, self.places, folder / "work")
        self.runs = 0

    def write(self, replacing=None, more=""):
        """A new run's settings."""
        self.runs += 1
        text = self.text.replace('folder = "run"', f'folder = "run-{self.runs}"')
        for old, new in (replacing or {}).items():
            assert old in text, old
            text = text.replace(old, new)
        self.path.write_text(text + more)
        return DeployedRun(FederationFile.read(self.path).folder)

    def supervise(self, folder, look=lambda: None, seconds=400):
        quorum = FederationFile.read(self.path).faults.quorum
        said = []
        Supervisor(
            self.engine,
            folder,
            RetryPolicy(quorum, waiting=90, seconds=seconds, settle=5),
            said.append,
            look,
        ).run()
        if self.engine.running():
            self.engine.abort()
        wait_for(lambda: not self.engine.running(), 60)
        return outcome_of(self.path), said


def engine(kind, factory):
    pytest.importorskip(
        {"flare": "nvflare", "flower": "flwr"}[kind], reason=f"needs scaffpd[{kind}]"
    )
    deployed = Deployed(kind, factory.mktemp(kind))
    try:
        deployed.engine.start()
        yield deployed
    finally:
        deployed.engine.stop()
    assert deployed.engine.processes.pids() == set()


@pytest.fixture(scope="module")
def flare(tmp_path_factory):
    yield from engine("flare", tmp_path_factory)


@pytest.fixture(scope="module")
def flower(tmp_path_factory):
    yield from engine("flower", tmp_path_factory)


def conforms(deployed, name):
    from test_runtime_agreement import EVERYTHING

    change = {OBJECTIVE: EVERYTHING[name][0], "rounds = 500\ntol = 1e-6": "rounds = 20\ntol = 0"}
    folder = deployed.write(change)
    outcome, _ = deployed.supervise(folder, seconds=1200)
    agrees(deployed.path, deployed.places, outcome)


@pytest.mark.deploy
@pytest.mark.parametrize("name", NAMES)
def test_flares_processes_give_the_cohorts_numbers(flare, name):
    conforms(flare, name)


@pytest.mark.deploy
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "FedAvg" else pytest.mark.long) for n in NAMES]
)
def test_flowers_processes_give_the_cohorts_numbers(flower, name):
    conforms(flower, name)


@pytest.mark.deploy
def test_flares_processes_with_secure_sums_known_by_their_certificates(flare):
    """Every silo takes cards that are signed by a startup kit only; the coordinator adds masked vectors."""
    from scaffpd.deploy.silo.silo import Silo

    folder = flare.write(more="\n[secure]\n")
    outcome, _ = flare.supervise(folder)
    is_right(flare.path, flare.places, outcome)
    kit = flare.engine.kit("va") / "startup"
    card = Silo.open(flare.places["va"], kit).masking.party.identity.card
    assert card.certificate == (kit / "client.crt").read_bytes()


SLOWLY = {
    "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 2\n\n[objective]',
    "1e-6": "1e-9",
}
FAULTS = "\n[faults]\nquorum = 2\ntimeout = 8.0\nprobe = 4.0\nstart_timeout = 90.0\nmax_age = 2\n"


def at_round(folder, number, act):
    """Do something once, when a run has come to a round."""
    done = []

    def look():
        if not done and folder.seen() >= number:
            done.append(True)
            act()

    return look


@pytest.mark.deploy
def test_a_killed_flare_site_is_dropped_or_back(flare):
    folder = flare.write(SLOWLY, FAULTS)
    outcome, _ = flare.supervise(folder, at_round(folder, 3, lambda: kill_silo(flare.engine, "va")))
    flare.engine.start_silo("va")
    is_right(flare.path, flare.places, outcome)
    assert "va" not in outcome.members
    wait_for(lambda: "va" in flare.engine.connected(), 60)


@pytest.mark.deploy
def test_a_killed_flare_job_process_is_made_good(flare):
    folder = flare.write(SLOWLY, FAULTS)
    outcome, said = flare.supervise(
        folder, at_round(folder, 3, lambda: kill_job(flare.engine, "hungarian"))
    )
    is_right(flare.path, flare.places, outcome)
    assert any("started anew" in sentence for sentence in said)


@pytest.mark.deploy
@pytest.mark.parametrize("kind", ["flare", pytest.param("flower", marks=pytest.mark.long)])
def test_a_killed_server_goes_on_with_the_same_numbers(kind, request):
    deployed = request.getfixturevalue(kind)
    folder = deployed.write(SLOWLY, FAULTS.replace("timeout = 8.0", "timeout = 60.0"))

    def strike():
        kill_server(deployed.engine)
        restart_server(deployed.engine)

    outcome, _ = deployed.supervise(folder, at_round(folder, 4, strike))
    disturbed = model_of(deployed.path)
    deployed.write(SLOWLY, FAULTS)
    undisturbed = coordinate(deployed.path, InProcess(opened(deployed.places)))
    assert outcome == undisturbed
    np.testing.assert_array_equal(disturbed, model_of(deployed.path))


@pytest.mark.deploy
def test_deploy_local_leaves_nothing_behind(tmp_path):
    pytest.importorskip("nvflare", reason="needs scaffpd[flare]")
    before = {p.pid for p in psutil.process_iter()}
    lines = []
    said = []
    started = time.monotonic()
    deployment = LocalDeployment.hospitals(tmp_path / "here", "flare", 4)
    outcome = deployment.run(lines.append, said.append)
    assert outcome.certificate <= 1e-6
    assert time.monotonic() - started < 120
    wanted = sp.train(
        asking_for_sums(FederationFile.read(deployment.federation).method),
        cohort(deployment.federation, deployment.silos),
        rounds=500,
        tol=1e-6,
    )
    np.testing.assert_allclose(model_of(deployment.federation), wanted.x, rtol=0, atol=1e-9)
    assert [line["round"] for line in lines if "round" in line] == list(
        range(1, outcome.rounds + 1)
    )
    mine = [
        p
        for p in psutil.process_iter()
        if p.pid not in before and str(tmp_path) in " ".join(_words(p))
    ]
    assert mine == []
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == sorted(
        ["deployment.json", "federation.toml", "run", *deployment.silos]
    )


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.deploy
@pytest.mark.long
def test_soak_twenty_random_kills(tmp_path_factory):
    """Twenty kills of silos, their job processes and the server at random: never a wrong result, never a hang."""
    pytest.importorskip("nvflare", reason="needs scaffpd[flare]")
    random = np.random.default_rng(int(os.environ.get("SOAK_SEED", "0")))
    kills = []
    deployed = Deployed("flare", tmp_path_factory.mktemp("soak"))
    deployed.engine.start()
    try:
        while len(kills) < int(os.environ.get("SOAK_KILLS", "20")):
            folder = deployed.write(SLOWLY, FAULTS)
            when = sorted(random.integers(1, 12, size=2).tolist())

            def look(when=when, folder=folder):
                if when and folder.seen() >= when[0]:
                    when.pop(0)
                    kills.append(_strike(deployed.engine, random, list(deployed.places)))

            started = time.monotonic()
            outcome, _ = deployed.supervise(folder, look)
            assert time.monotonic() - started < 400
            is_right(deployed.path, deployed.places, outcome)
            for name in deployed.places:
                if name not in deployed.engine.connected():
                    kill_silo(deployed.engine, name)
                    deployed.engine.start_silo(name)
            assert wait_for(lambda: deployed.engine.connected() == set(deployed.places), 90)
    finally:
        deployed.engine.stop()
    assert deployed.engine.processes.pids() == set()
    shutil.rmtree(deployed.folder)


def _strike(engine, random, silos):
    """Kill something, and let it come back or not."""
    kind = random.choice(["silo", "job", "server", "silo and back"])
    name = str(random.choice(silos))
    if kind == "server":
        kill_server(engine)
        engine.start_server()
    elif kind == "job":
        kill_job(engine, name)
    else:
        kill_silo(engine, name)
        if kind == "silo and back":
            engine.start_silo(name)
    return kind, name
