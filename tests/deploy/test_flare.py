"""FLARE without any process: what travels, what is written, what is refused, and when a job is started anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="nvflare is an extra: pip install 'scaffpd[flare]'")

import yaml
from deploy_cases import federation
from nvflare.collab.api.exceptions import CollabCallError, RunAborted
from nvflare.fuel.utils import fobs

from forked import forked
from scaffpd import cli
from scaffpd.deploy import supervise
from scaffpd.deploy.flare import client, provision, server
from scaffpd.deploy.flare.admin import AdminSession, LostError, _adopted
from scaffpd.deploy.flare.local import FlareEngine
from scaffpd.deploy.flare.provision import FlareProject, write_project
from scaffpd.deploy.messages import Failure
from scaffpd.deploy.processes import Processes, free_ports
from scaffpd.errors import InputError


class Proxy:
    """FLARE's stand-in for a site."""

    def __init__(self, reply):
        self.reply = reply

    def __call__(self, timeout):
        self.timeout = timeout
        return types.SimpleNamespace(answer=self.answer)

    def answer(self, question):
        return self.reply(question, self.timeout)


def hangs(question, timeout):
    time.sleep(timeout)
    raise CollabCallError(
        "b", "answer", TimeoutError(f"function answer timed out after {timeout} seconds")
    )


def raises(error):
    def reply(question, timeout):
        raise error

    return reply


def test_every_site_gets_its_own_bytes():
    transport = server.CollabTransport({name: Proxy(lambda q, t: q[::-1]) for name in "ba"})
    assert transport.sites() == ("a", "b")
    assert transport.ask({"a": b"12", "b": b"34"}, 1.0) == {"a": b"21", "b": b"43"}


def test_only_those_asked_are_waited_for():
    transport = server.CollabTransport({"a": Proxy(lambda q, t: q), "b": Proxy(hangs)})
    start = time.monotonic()
    assert transport.ask({"a": b"1"}, 5.0) == {"a": b"1"}
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (hangs, "No reply within 0.2 seconds."),
        (raises(CollabCallError("b", "answer", "broken")), "broken"),
        (raises(OSError("surprise")), "surprise"),
        (lambda q, t: "text", "str instead of bytes"),
        (lambda q, t: client.REFUSAL + b"Not with me.", "Not with me."),
    ],
)
def test_a_site_that_fails_does_not_keep_the_others_back(reply, words):
    transport = server.CollabTransport({"a": Proxy(lambda q, t: q), "b": Proxy(reply)})
    answers = transport.ask({"a": b"1", "b": b"2"}, 0.2)
    assert answers["a"] == b"1"
    assert isinstance(answers["b"], Failure)
    assert words in answers["b"].reason


class Wired(Proxy):
    """One whose connection FLARE can tell about; `codes` are what pings return, the last one for good."""

    def __init__(self, reply, *codes):
        super().__init__(reply)
        self.codes = list(codes)
        cell = types.SimpleNamespace(core_cell=types.SimpleNamespace(send_request=self.ping))
        self.backend = types.SimpleNamespace(cell=cell, target_fqcn="b.job")

    def ping(self, channel, topic, target, request, timeout, optional):
        code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        return types.SimpleNamespace(get_header=lambda name: code)


@pytest.mark.parametrize(
    ("codes", "gone"),
    [
        (["comm_error"], True),
        (["target_unreachable"], True),
        (["timeout"], False),
        (["comm_error", "ok"], False),
    ],
)
def test_a_closed_connection_is_not_waited_for_and_a_busy_site_is(monkeypatch, codes, gone):
    """What FLARE returns is one thing: a ping to a closed connection comes back; a late one says nothing."""
    monkeypatch.setattr(server, "LOOK", 0.05)
    transport = server.CollabTransport({"a": Proxy(lambda q, t: q), "b": Wired(hangs, *codes)})
    start = time.monotonic()
    answers = transport.ask({"a": b"1", "b": b"2"}, 1.5)
    assert answers["a"] == b"1"
    assert ("No connection" in answers["b"].reason, time.monotonic() - start < 1.4) == (gone, gone)


def test_a_site_of_no_job_is_gone():
    answer = server.CollabTransport({}).ask({"z": b"1"}, 0.2)["z"]
    assert answer == Failure("The site is not part of this job.")


def test_a_call_that_outlives_its_timeout_is_given_up(monkeypatch):
    monkeypatch.setattr(server, "GRACE", 0.1)
    release = threading.Event()
    transport = server.CollabTransport({"a": Proxy(lambda q, t: release.wait(5) and q)})
    start = time.monotonic()
    answer = transport.ask({"a": b"1"}, 0.1)["a"]
    release.set()
    assert isinstance(answer, Failure)
    assert time.monotonic() - start < 2.0


def test_an_aborted_job_ends_the_question():
    transport = server.CollabTransport({"a": Proxy(hangs)}, aborted=lambda: True)
    with pytest.raises(RunAborted):
        transport.ask({"a": b"1"}, 30.0)
    transport = server.CollabTransport({"a": Proxy(raises(RunAborted("end")))})
    with pytest.raises(RunAborted):
        transport.ask({"a": b"1"}, 30.0)


def test_bytes_travel_as_they_are_and_nothing_is_pickled():
    payload = bytes(range(256)) * 4096
    packed = fobs.dumps({"kwargs": {"question": payload}})
    assert payload in bytes(packed)  # no base64, no copy in another form
    assert len(packed) < len(payload) + 1000
    assert b"pickle" not in bytes(packed)
    assert fobs.loads(packed)["kwargs"]["question"] == payload


def test_a_silo_is_found_only_by_what_is_local(tmp_path, monkeypatch):
    monkeypatch.delenv(client.VARIABLE, raising=False)
    with pytest.raises(InputError, match="no silo file"):
        client.silo_file(tmp_path, "north")
    own = tmp_path / "local" / "silo.toml"
    own.parent.mkdir()
    own.touch()
    assert client.silo_file(tmp_path, "north") == own.resolve()
    other = tmp_path / "north.toml"
    other.touch()
    monkeypatch.setenv(client.VARIABLE, str(other))
    assert client.silo_file(tmp_path, "north") == other.resolve()
    monkeypatch.setenv(client.VARIABLE, str(tmp_path))
    assert client.silo_file(tmp_path, "north") == other.resolve()


def test_a_silo_of_another_name_is_refused(monkeypatch, tmp_path):
    fake = types.ModuleType("scaffpd.deploy.silo.silo")
    fake.Silo = types.SimpleNamespace(open=lambda file, kit: types.SimpleNamespace(name="south"))
    monkeypatch.setitem(sys.modules, "scaffpd.deploy.silo.silo", fake)
    with pytest.raises(InputError, match="'south', but FLARE knows this site as 'north'"):
        client.open_silo("north", tmp_path / "silo.toml", tmp_path / "startup")


def test_a_refusal_tells_nothing_but_its_sentence(monkeypatch):
    secret = "/data/patients.csv has no column 'hiv'"
    monkeypatch.setattr(client, "site_root", raises_input(secret))
    monkeypatch.setattr(client, "collab", types.SimpleNamespace(site_name="north", workspace=None))
    reply = client.SiloClient().answer(question=b"1")
    assert reply.startswith(client.REFUSAL)
    assert b"hiv" not in reply
    assert b"patients" not in reply


def raises_input(words):
    def reply(*_):
        raise InputError("reply", words)

    return reply


def test_the_federation_file_is_named_by_the_job_the_environment_or_the_folder(
    tmp_path, monkeypatch
):
    monkeypatch.delenv(server.VARIABLE, raising=False)
    with pytest.raises(InputError, match="no federation file"):
        server.federation_file("", tmp_path)
    file = tmp_path / "f.toml"
    file.touch()
    assert server.federation_file(str(file), tmp_path) == file
    monkeypatch.setenv(server.VARIABLE, str(file))
    assert server.federation_file("", tmp_path) == file


# --- what is written


def test_the_job_carries_no_code(tmp_path):
    folder = provision.write_job("hospitals", tmp_path, quorum=3)
    assert {file.suffix for file in folder.rglob("*") if file.is_file()} == {".json"}
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["min_clients"] == 3
    for part, allowed in (("server", provision.SERVER_CLASSES), ("client", provision.SITE_CLASSES)):
        config = (folder / "app" / "config" / f"config_fed_{part}.json").read_text()
        assert paths(json.loads(config)) == set(allowed)
        assert "silo.toml" not in config


def test_the_jobs_path_of_the_federation_survives_flare(tmp_path):
    folder = provision.write_job("hospitals", tmp_path, federation="/somewhere/federation.toml")
    assert (
        "/somewhere/federation.toml"
        in (folder / "app" / "config" / "config_fed_server.json").read_text()
    )


def paths(node):
    if isinstance(node, dict):
        return ({node["path"]} if "path" in node else set()).union(*map(paths, node.values()))
    return set().union(*map(paths, node)) if isinstance(node, list) else set()


def test_a_project_names_server_silos_and_coordinator(tmp_path):
    written = write_project(
        FlareProject("hospitals", ("north", "south"), "fl.example.org", quorum=2), tmp_path
    )
    document = yaml.safe_load(written.project.read_text())
    kinds = {person["name"]: person["type"] for person in document["participants"]}
    assert kinds == {
        "fl.example.org": "server",
        "north": "client",
        "south": "client",
        "coordinator@scaffpd.org": "admin",
    }
    assert any("nvflare provision -p project.yml" in line for line in written.coordinator)
    assert any(str(written.job) in line for line in written.coordinator)
    assert any("start.sh" in line for line in written.silo)
    assert written.job.is_absolute()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "two words"}, "two words"),
        ({"silos": ("Long Beach",)}, "Long Beach"),
        ({"silos": ()}, "at least one silo"),
        ({"silos": ("a", "a")}, "name of its own"),
        ({"silos": ("server",)}, "called like the server"),
        ({"host": "-nowhere"}, "-nowhere"),
    ],
)
def test_names_that_flare_cannot_use_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        FlareProject(**({"name": "f", "silos": ("a",), "host": "localhost"} | change))


def test_a_site_allows_two_classes_no_code_and_no_log_streaming(tmp_path):
    local = tmp_path
    default = {
        "client": {},
        "components": [{"id": "site_log_streamer"}, {"id": "resource_manager"}],
    }
    (local / "resources.json.default").write_text(json.dumps(default))
    (local / "log_config.json.default").write_text(
        json.dumps({"loggers": {"root": {"handlers": ["x"]}}})
    )
    builder = provision.SiteRules()
    builder._write(local, builder._site)
    resources = json.loads((local / "resources.json").read_text())
    assert resources["class_allow_list"] == list(provision.SITE_CLASSES)
    assert resources["allow_log_streaming"] is False
    assert [part["id"] for part in resources["components"]] == ["resource_manager"]
    rights = json.loads((local / "authorization.json").read_text())["permissions"]
    assert all(role.get("byoc", "none") == "none" for role in rights.values())


def test_tls_cannot_be_turned_off(tmp_path):
    with pytest.raises(InputError, match="mutual TLS"):
        FlareEngine(tmp_path / "f.toml", {"a": tmp_path / "a.toml"}, tmp_path, tls=False)


def test_an_engine_that_was_never_started_stops_quietly(tmp_path):
    engine = FlareEngine(tmp_path / "f.toml", {"a": tmp_path / "a.toml"}, tmp_path)
    assert not engine.running()
    assert engine.connected() == set()
    engine.stop()
    engine.stop()
    assert engine.processes.pids() == set()


def test_a_silo_that_does_not_come_is_named(tmp_path):
    engine = FlareEngine(
        tmp_path / "f.toml", {name: tmp_path / f"{name}.toml" for name in "ab"}, tmp_path
    )
    with pytest.raises(
        InputError, match=r"come up within 0 seconds: 'b' is not there, and .*b\.log says"
    ):
        engine.wait(lambda: set(engine.silos) - {"a"}, "FLARE did not come up", 0)


def test_ports_are_free_and_different():
    assert len(set(free_ports(4))) == 4


def test_a_folder_without_a_kit_is_no_administrator(tmp_path):
    with pytest.raises(InputError, match="startup kit"):
        AdminSession(tmp_path, tmp_path / "log")


def test_processes_are_found_by_their_mark_and_all_of_them_killed(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    processes = Processes()
    path = os.pathsep.join([str(Path(client.__file__).parents[3]), str(tmp_path)])
    processes.start("north", ["parent"], tmp_path / "log", os.environ | {"PYTHONPATH": path})
    deadline = time.monotonic() + 10
    while len(processes.pids("north")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes.pids("north")) == 2
    assert processes.pids("south") == set()
    assert not Processes().pids()
    processes.kill("north")
    assert processes.pids() == set()


def test_processes_end_with_the_one_that_started_them(tmp_path):
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(60)\n")
    program = (
        "import os, sys, time; from pathlib import Path; from scaffpd.deploy.processes import Processes\n"
        "processes = Processes()\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "processes.start('north', ['sleeper'], folder / 'log', os.environ)\n"
        "time.sleep(2); print(processes.mark, flush=True); os._exit(1)\n"
    )
    source = str(Path(client.__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    orphans = Processes(done.stdout.strip())
    assert len(orphans.mark) == 32, done.stderr
    deadline = time.monotonic() + 10
    while orphans.pids() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert orphans.pids() == set()


# --- the supervisor


class Scripted:
    """A job that goes through a list of lives; each is (rounds at its end, whether the outcome is final then)."""

    def __init__(self, lives, sites=("a", "b"), outside=()):
        self.lives, self.sites, self.away = list(lives), set(sites), set(outside)
        self.rounds = 0
        self.final = False
        self.looks = 0
        self.events = []

    def submit(self):
        self.events.append("submit")
        self.looks = 2

    def running(self):
        if self.looks > 0:
            self.looks -= 1
            self.rounds += self.looks > 0
            if self.looks == 0:
                self.rounds, self.final = self.lives.pop(0)
        return self.looks > 0

    def abort(self):
        self.events.append("abort")
        self.looks, self.away = 1, set()

    def connected(self):
        return self.sites

    def outside(self):
        return self.away


def supervised(scripted, **limits):
    said = []
    settings = (
        supervise.RetryPolicy(every=0.001)
        if not limits
        else supervise.RetryPolicy(**({"every": 0.001} | limits))
    )
    folder = types.SimpleNamespace(final=lambda: scripted.final, seen=lambda: scripted.rounds)
    run = supervise.Supervisor(scripted, folder, settings, said.append)
    run.run()
    return said


def test_a_run_that_ends_well_is_submitted_once():
    scripted = Scripted([(10, True)])
    assert supervised(scripted) == []
    assert scripted.events == ["submit"]


def test_a_job_that_died_is_submitted_again():
    scripted = Scripted([(3, False), (3, False), (9, False), (10, True)])
    said = supervised(scripted)
    assert scripted.events == ["submit"] * 4
    assert said[0] == "The job ended early; it is started anew from round 3."


def test_standstill_is_given_up_with_a_sentence():
    scripted = Scripted([(3, False)] * 9)
    with pytest.raises(InputError, match="ended 4 times without completing a round"):
        supervised(scripted, attempts=4)
    assert len(scripted.events) == 5


def test_a_site_that_is_back_restarts_the_job_once():
    scripted = Scripted([(50, False), (60, True)], outside={"b"})
    scripted.submit()
    scripted.looks = 50
    said = supervised(scripted, settle=0.0)
    assert scripted.events == ["submit", "abort", "submit"]
    assert said[0].startswith("b can take part again")


def test_a_site_that_is_outside_a_job_that_stands_still_restarts_nothing():
    scripted = Scripted([(0, False), (0, False), (1, True)], outside={"b"})
    supervised(scripted, settle=0.0)
    assert "abort" not in scripted.events


def test_too_few_sites_are_waited_for_and_then_given_up():
    scripted = Scripted([], sites=("a",))
    with pytest.raises(InputError, match="Only 1 of at least 2 silos"):
        supervised(scripted, quorum=2, waiting=0.05)


class Late(Scripted):
    """Its second site connects after some looks."""

    def connected(self):
        self.sites |= {"b"} if len(self.events) >= 20 else set()
        self.events.append(f"{len(self.sites)} there")
        return self.sites


def test_all_silos_are_waited_for_before_the_first_submission_as_nobody_can_join_later():
    late = Late([(10, True)], sites=("a",))
    supervised(late, quorum=1, silos=2, waiting=60.0)
    assert late.events[late.events.index("submit") - 1] == "2 there"
    never = Scripted([(10, True)], sites=("a",))
    supervised(never, quorum=1, silos=2, waiting=0.05)
    assert never.events == ["submit"]


def test_time_is_limited():
    scripted = Scripted([(n, False) for n in range(1, 10_000)])
    with pytest.raises(InputError, match=r"not over after 0\.05 seconds"):
        supervised(scripted, seconds=0.05)


# --- a folder for every part


def in_a_fork(command, cwd, **_):
    """Run `python -m nvflare.cli …` where FLARE is loaded already; the deploy tests start a real one."""
    assert command[:3] == [sys.executable, "-m", "nvflare.cli"]
    return forked(
        f"import os, runpy, sys; os.chdir({str(cwd)!r}); sys.argv = {command[2:]}\n"
        "runpy.run_module('nvflare.cli', run_name='__main__', alter_sys=True)"
    )


def test_provisioning_gives_every_part_its_own_keys_and_nobody_elses(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(provision.subprocess, "run", in_a_fork)
    path, places = federation(tmp_path / "f", 2)
    assert cli.run(["deploy", "flare", str(path), "--out", str(tmp_path / "o"), "--provision"]) == 0
    assert f"deploy resume {tmp_path / 'o' / 'parts' / 'coordinator'}" in capsys.readouterr().out
    parts = tmp_path / "o" / "parts"
    assert {part.name for part in parts.iterdir()} == {*places, "coordinator"}
    assert all(
        part.stat().st_mode & 0o077 == 0 for part in (tmp_path / "o" / "kits", *parts.iterdir())
    )
    keys = [file.read_bytes() for file in (tmp_path / "o").rglob("*.key")]
    assert len(keys) == len(set(keys)) == len(places) + 2  # silos, server and administrator
    assert (parts / "coordinator" / "federation.toml").read_text() == path.read_text()
    assert cli.run(["deploy", "flare", str(path), "--out", str(tmp_path / "o"), "--provision"]) == 2
    assert "already" in capsys.readouterr().err


def test_keys_are_written_where_nobody_else_can_look(tmp_path, monkeypatch):
    seen = []

    def fail(command, cwd, **_):
        seen.append((cwd / "kits").stat().st_mode & 0o777)
        return types.SimpleNamespace(returncode=1, stdout="", stderr="")

    monkeypatch.setattr(provision.subprocess, "run", fail)
    (tmp_path / "kits").mkdir(mode=0o755)
    with pytest.raises(InputError, match="could not be provisioned"):
        provision.provision(tmp_path)
    assert seen == [0o700]


def test_a_coordinators_folder_without_a_job_is_not_resumed(tmp_path, capsys):
    for name in ("admin", "job"):
        (tmp_path / name).mkdir()
    assert cli.run(["deploy", "resume", str(tmp_path)]) == 2
    assert "There is no job" in capsys.readouterr().err


def test_a_part_without_a_kit_is_not_started(tmp_path, capsys):
    assert cli.run(["deploy", "start", str(tmp_path)]) == 2
    assert "no startup kit" in capsys.readouterr().err


class SlowServer:
    """A server that answers the third request."""

    def __init__(self, answers):
        self.left = answers

    def adopt(self):
        self.left -= 1
        if self.left > 0:
            raise LostError("FLARE's server did not answer.")
        return True


def test_a_run_is_handed_in_once_the_server_is_up(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    said = []
    assert _adopted(SlowServer(3), float("inf"), said.append)
    assert said == ["FLARE's server does not answer yet."]
    with pytest.raises(InputError, match="Start the server"):
        _adopted(SlowServer(3), 0.0, said.append)
