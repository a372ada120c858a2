"""FLARE for real: mutual TLS, a process tree per silo on loopback, and what is killed."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import time

import numpy as np
import psutil
import pytest

import scaffpd as sp
from cases.silos import (
    OBJECTIVE,
    agree,
    federation,
    in_one_process,
    is_right,
    model_of,
    opened,
)
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.local import LocalDeployment
from scaffpd.deploy.messages import InProcess
from scaffpd.run.settings.federation import FederationFile

pytest.importorskip("nvflare", reason="nvflare is an extra: pip install 'scaffpd[flare]'")

from scaffpd.deploy.flare.admin import follow
from scaffpd.deploy.flare.local import FlareEngine

pytestmark = pytest.mark.deploy
SLOWLY = {
    "[objective]": '[algorithm]\nkind = "ScaffPD"\nlocal_steps = 2\n\n[objective]',
    "1e-6": "1e-9",
}
FAULTS = {'folder = "run': 'timeout = 20.0\nfolder = "run'}


class Deployed:
    """One engine for many runs: the federation's file is written anew for each."""

    def __init__(self, folder):
        self.path, self.places = federation(folder)
        self.text = self.path.read_text()
        self.engine = FlareEngine(self.path, self.places, folder / "work")
        self.runs = 0

    def write(self, replacing=None, more=""):
        """A new run's settings, and its folder."""
        self.runs += 1
        text = self.text.replace('folder = "run"', f'folder = "run-{self.runs}"')
        for old, new in (replacing or {}).items():
            assert old in text, old
            text = text.replace(old, new)
        self.path.write_text(text + more)
        agree(self.path, self.places)
        return DeployedRun(FederationFile.read(self.path).folder)

    def follow(self, look=lambda: None):
        file = FederationFile.read(self.path)
        return follow(self.engine, file, 400.0, lambda words: None, look)


@pytest.fixture(scope="module")
def flare(tmp_path_factory):
    deployed = Deployed(tmp_path_factory.mktemp("flare"))
    try:
        deployed.engine.start()
        yield deployed
    finally:
        deployed.engine.stop()
    assert deployed.engine.processes.members() == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", deployed.engine.port), timeout=2)


def at_round(folder, number, act):
    """Do something once, when a run has come to a round."""
    done = []

    def look():
        if not done and folder.rounds() >= number:
            done.append(True)
            act()

    return look


METHODS = {
    "fair": {},
    "Scaffold": {
        OBJECTIVE: '[algorithm]\nkind = "Scaffold"\nlocal_steps = 3\n\n',
        "rounds = 500\ntol = 1e-6": "rounds = 10",
    },
}


@pytest.mark.parametrize("name", METHODS)
def test_processes_give_the_cohorts_numbers(flare, name):
    flare.write(METHODS[name])
    is_right(flare.path, flare.places, flare.follow())


def test_strangers_are_refused(flare):
    """Nobody gets to talk to the server without a certificate of this federation."""
    root = flare.engine.kit("va") / "startup" / "rootCA.pem"
    context = ssl.create_default_context(cafile=str(root))
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", flare.engine.port), timeout=5) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as stream:
                stream.settimeout(5)
                stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                assert stream.recv(1) == b""
        except (ssl.SSLError, ConnectionError):
            pass


def test_a_site_that_was_killed_takes_part_in_the_next_job_of_the_same_run(flare):
    """FLARE admits nobody to a job that runs. It may also end the job before the run pauses."""
    folder = flare.write(SLOWLY | FAULTS)
    strike = at_round(folder, 3, lambda: flare.engine.processes.kill("va"))
    with contextlib.suppress(sp.InputError):  # the job ended early
        outcome = flare.follow(strike)
        assert (outcome.status, outcome.final) == ("paused", False)
        assert "'va'" in outcome.sentence
    flare.engine.start_silo("va")
    assert_undisturbed(flare, as_a_service(flare))


@pytest.mark.long
def test_a_site_that_hangs_for_a_while_is_waited_for(flare):
    folder = flare.write(SLOWLY | {'folder = "run': 'timeout = 60.0\nfolder = "run'})

    def hang():
        members = flare.engine.processes.members("va")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in members:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            time.sleep(12.0 if number == signal.SIGSTOP else 0.0)

    assert_undisturbed(flare, flare.follow(at_round(folder, 3, hang)))


def test_a_killed_server_goes_on_with_the_same_numbers(flare):
    folder = flare.write(SLOWLY | FAULTS)

    def strike():
        flare.engine.processes.kill("server")
        flare.engine.start_server()

    assert_undisturbed(flare, as_a_service(flare, at_round(folder, 4, strike)))


def as_a_service(deployed, look=lambda: None):
    """Follow a run as a service manager would that starts the command again where it fails."""
    for _ in range(6):
        with contextlib.suppress(sp.InputError):
            outcome = deployed.follow(look)
            if outcome.final:
                return outcome
    raise AssertionError("the run does not end")


def assert_undisturbed(deployed, outcome):
    """The run has the model of one in this process, to the last digit."""
    disturbed = model_of(deployed.path)
    deployed.write(SLOWLY | FAULTS)
    expected = coordinate(deployed.path, InProcess(opened(deployed.places)))
    assert outcome == expected
    np.testing.assert_array_equal(disturbed, model_of(deployed.path))


def test_deploy_local_leaves_nothing_behind(tmp_path):
    before = {p.pid for p in psutil.process_iter()}
    lines = []
    deployment = LocalDeployment.hospitals(tmp_path / "here")
    outcome = deployment.run(lines.append, lambda words: None)
    assert outcome.certificate <= 1e-6
    wanted = in_one_process(deployment.federation, deployment.silos)
    np.testing.assert_allclose(model_of(deployment.federation), wanted.x, rtol=0, atol=1e-9)
    made = [line["round"] for line in lines if "round" in line]
    assert made == list(range(1, outcome.rounds + 1))

    def mine():
        return [
            p
            for p in psutil.process_iter()
            if p.pid not in before and str(tmp_path) in " ".join(_words(p))
        ]

    deadline = time.monotonic() + 10.0
    while mine() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert mine() == []
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == sorted(
        ["deployment.json", "federation.toml", "run", *deployment.silos]
    )


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
