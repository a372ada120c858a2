"""FLARE for real: with mutual TLS, as separate processes on loopback. Silo and coordinator are stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import threading
import time
import types
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="nvflare is an extra: pip install 'scaffpd[flare]'")

from flare_simulator import simulate
from hurting import kill_job, kill_server, kill_silo, pause_silo, wake_silo

from scaffpd.deploy.flare.admin import AdminSession, FlareJob
from scaffpd.deploy.flare.local import FlareEngine
from scaffpd.deploy.supervise import RetryPolicy, Supervisor

pytestmark = pytest.mark.deploy

FINDER = """
import importlib.util, pathlib, sys
class Standins:
    files = {
        "scaffpd.deploy.silo.silo": "silo_standin.py",
        "scaffpd.deploy.coordinate": "coordinate_standin.py",
    }
    def find_spec(self, name, path=None, target=None):
        if name in self.files:
            return importlib.util.spec_from_file_location(name, pathlib.Path(__file__).parent / self.files[name])
sys.meta_path.insert(0, Standins())
"""
SILO = """
import tomllib
class Silo:
    def __init__(self, name):
        self.name = name
    @classmethod
    def open(cls, file, kit=None):
        return cls(tomllib.loads(file.read_text())["name"])
    def answer(self, question):
        return self.name.encode() + question
"""
COORDINATE = """
import json, time, tomllib
def coordinate(file, transport):
    settings = tomllib.loads(file.read_text())
    folder = file.parent
    path = folder / "rounds.json"
    rounds = json.loads(path.read_text()) if path.exists() else []
    absent = set()
    while len(rounds) < settings["rounds"]:
        number = len(rounds)
        asked = {site: b"%d " % number + bytes(settings["size"]) for site in transport.sites() if site not in absent}
        start = time.monotonic()
        replies = transport.ask(asked, settings["timeout"])
        good = sorted(site for site, reply in replies.items() if reply == site.encode() + asked[site])
        absent |= set(asked) - set(good)
        rounds.append({"good": good, "seconds": time.monotonic() - start,
                       "bad": {site: reply.reason for site, reply in replies.items() if not isinstance(reply, bytes)}})
        written = folder / "rounds.tmp"
        written.write_text(json.dumps(rounds))
        written.replace(path)
        time.sleep(settings["pause"])
    (folder / "outcome.json").write_text(json.dumps({"final": True}))
"""


class Federation:
    """A folder with everything, and what the stand-in of a coordinator has left there."""

    def __init__(self, folder, rounds, names, size=80, pause=0.0, timeout=3.0):
        self.folder = folder
        self.file = folder / "federation.toml"
        self.file.write_text(
            f"rounds = {rounds}\nsize = {size}\npause = {pause}\ntimeout = {timeout}\n"
        )
        self.silos = {}
        for name, inside in names.items():
            self.silos[name] = folder / f"{name}.toml"
            self.silos[name].write_text(f'name = "{inside}"\n')

    def rounds(self):
        try:
            return json.loads((self.folder / "rounds.json").read_text())
        except OSError:
            return []

    def final(self):
        return (self.folder / "outcome.json").exists()


@pytest.fixture(autouse=True)
def standins(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("standins")
    (folder / "sitecustomize.py").write_text(FINDER)
    (folder / "silo_standin.py").write_text(SILO)
    (folder / "coordinate_standin.py").write_text(COORDINATE)
    before = os.environ.get("PYTHONPATH")
    source = str(Path(__file__).parents[2] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), source, before])))


def until(condition, limit=90.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_every_fault_is_survived_and_nothing_is_left_behind(tmp_path):
    federation = Federation(
        tmp_path, 100_000, {"north": "north", "south": "south", "east": "west"}, pause=0.2
    )
    engine = FlareEngine(federation.file, federation.silos, tmp_path / "work")
    said = []
    limits = RetryPolicy(quorum=2, settle=5.0, waiting=60.0)
    folder = types.SimpleNamespace(final=federation.final, seen=lambda: len(federation.rounds()))
    supervisor = Supervisor(engine, folder, limits, said.append)
    try:
        engine.start()
        assert engine.connected() == {"north", "south", "east"}
        assert strangers_are_refused(engine)
        thread = threading.Thread(target=supervisor.run, daemon=True)
        thread.start()

        # A silo whose file is for another site is refused, and only that one.
        until(lambda: federation.rounds())
        first = federation.rounds()[0]
        assert first["good"] == ["north", "south"]
        assert "its operator finds the reason" in first["bad"]["east"]

        kill_job(engine, "south")
        came_back(federation, {"north", "south"})
        assert "ended early" in said[-1]

        kill_silo(engine, "south")
        until(lambda: federation.rounds()[-1]["good"] == ["north"])
        said = next(row["bad"]["south"] for row in federation.rounds() if "south" in row["bad"])
        assert any(words in said for words in ("No reply", "No connection"))
        engine.start_silo("south")
        came_back(federation, {"north", "south"})
        assert "south can take part again" in "".join(said)
        assert "north can" not in "".join(said)

        kill_server(engine)
        assert engine.connected() == set()
        engine.start_server()
        came_back(federation, {"north", "south"})

        federation.file.write_text(federation.file.read_text().replace("100000", "1"))
        engine.abort()
        thread.join(90)
        assert not thread.is_alive()
    finally:
        engine.stop()
    assert federation.final()
    assert engine.processes.pids() == set()
    engine.stop()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", engine.port), timeout=2)


def came_back(federation, names):
    """There are rounds after now in which all of them answer."""
    here = len(federation.rounds())
    until(lambda: any(set(row["good"]) == names for row in federation.rounds()[here + 2 :]), 120.0)


def strangers_are_refused(engine):
    """Nobody gets to talk to the server without a certificate of this federation."""
    context = ssl.create_default_context(cafile=str(engine.kit("north") / "startup" / "rootCA.pem"))
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(("127.0.0.1", engine.port), timeout=5) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as stream:
                stream.settimeout(5)
                stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                return stream.recv(1) == b""
        except (ssl.SSLError, ConnectionError):
            return True


def test_a_job_that_only_the_store_remembers_is_handed_in_again(tmp_path):
    """The server's process is killed and its job's process is not: FLARE's store says RUNNING for ever."""
    federation = Federation(tmp_path, 100_000, {"north": "north", "south": "south"}, pause=0.2)
    engine = FlareEngine(federation.file, federation.silos, tmp_path / "work")
    try:
        engine.start()
        engine.submit()
        until(lambda: len(federation.rounds()) >= 2)
        (server,) = engine.processes.started["server"]
        server.kill()
        until(lambda: not engine.running())
        until(
            lambda: engine.processes.pids("server") == set()
        )  # the job's own process notices and ends
        engine.start_server()
        until(lambda: engine.connected() == {"north", "south"})

        with contextlib.closing(
            AdminSession(engine.kit("coordinator@scaffpd.org"), tmp_path / "admin.log")
        ) as session:
            job = FlareJob(session, tmp_path / "work" / "job" / "scaffpd")
            assert session.call("status", engine.current) == "LOST"
            assert not job.adopt()
            job.submit()
            assert job.running()
            here = len(federation.rounds())
            until(lambda: len(federation.rounds()) > here + 2, 120.0)
            assert federation.rounds()[-1]["good"] == ["north", "south"]
            other = FlareJob(session, job.folder)
            assert other.adopt()
            assert other.current == job.current
    finally:
        engine.stop()


def test_a_hanging_site_answers_again_without_a_new_job_and_five_million_numbers_travel(tmp_path):
    federation = Federation(
        tmp_path, 100_000, {"north": "north", "south": "south"}, size=40_000_000, timeout=60.0
    )
    engine = FlareEngine(federation.file, federation.silos, tmp_path / "work")
    try:
        engine.start()
        engine.submit()
        until(lambda: len(federation.rounds()) >= 2)
        assert federation.rounds()[1]["good"] == ["north", "south"]
        pause_silo(engine, "south")
        time.sleep(12.0)
        assert engine.connected() == {"north"}
        wake_silo(engine, "south")
        here = len(federation.rounds())
        until(lambda: len(federation.rounds()) > here + 2)
        assert federation.rounds()[-1]["good"] == ["north", "south"]
        assert engine.running()
        assert engine.outside() == set()
    finally:
        engine.stop()
    assert engine.processes.pids() == set()


def test_the_simulator_runs_the_same_objects(tmp_path):
    federation = Federation(tmp_path, 5, {"north": "north", "south": "south"})
    simulate(federation.file, federation.silos, tmp_path / "work")
    assert [row["good"] for row in federation.rounds()] == [["north", "south"]] * 5
    assert federation.final()
