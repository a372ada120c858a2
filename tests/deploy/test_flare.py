"""FLARE without any process: what travels, what is written, what is refused, and when a job is
started anew.
"""

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

from nvflare.collab.api.exceptions import CollabCallError, RunAborted

from cases.refusals import refuses
from cases.silos import federation
from forked import forked
from scaffpd import cli
from scaffpd.deploy.deployed_run import DeployedRun, Outcome, write_outcome
from scaffpd.deploy.flare import admin, client, provision, server
from scaffpd.deploy.flare.admin import AdminSession, FlareJob, LostError, follow
from scaffpd.deploy.flare.local import place_store
from scaffpd.deploy.flare.provision import FlareProject
from scaffpd.deploy.messages import Failure
from scaffpd.deploy.processes import Processes
from scaffpd.errors import InputError
from scaffpd.run.settings.federation import FederationFile


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
    assert transport.ask({"a": b"12", "b": b"34"}, 1.0) == {"a": b"21", "b": b"43"}
    assert isinstance(transport.ask({"c": b"1"}, 1.0)["c"], Failure)


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


def test_a_silo_of_another_name_is_refused(monkeypatch, tmp_path):
    fake = types.ModuleType("scaffpd.deploy.silo")
    fake.Silo = types.SimpleNamespace(open=lambda file: types.SimpleNamespace(name="south"))
    monkeypatch.setitem(sys.modules, "scaffpd.deploy.silo", fake)
    with refuses("silo-of-another-name"):
        client.open_silo("north", tmp_path / "silo.toml")


def test_a_refusal_tells_nothing_but_its_sentence(monkeypatch):
    secret = "/data/patients.csv has no column 'hiv'"
    monkeypatch.setenv(client.VARIABLE, "silo.toml")
    monkeypatch.setattr(client, "open_silo", raises_input(secret))
    monkeypatch.setattr(client, "collab", types.SimpleNamespace(site_name="north"))
    reply = client.SiloClient().answer(question=b"1")
    assert reply.startswith(client.REFUSAL)
    assert b"hiv" not in reply
    assert b"patients" not in reply


def raises_input(words):
    def reply(*_):
        raise InputError("reply", words)

    return reply


# --- what is written


def test_the_job_carries_no_code(tmp_path):
    folder = provision.write_job("hospitals", tmp_path, 3)
    assert {file.suffix for file in folder.rglob("*") if file.is_file()} == {".json"}
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["min_clients"] == 3
    for part, allowed in (("server", provision.SERVER_CLASSES), ("client", provision.SITE_CLASSES)):
        config = (folder / "app" / "config" / f"config_fed_{part}.json").read_text()
        assert paths(json.loads(config)) == set(allowed)
        assert "silo.toml" not in config


def paths(node):
    if isinstance(node, dict):
        return ({node["path"]} if "path" in node else set()).union(*map(paths, node.values()))
    return set().union(*map(paths, node)) if isinstance(node, list) else set()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"name": "two words"}, "name-not-for-flare"),
        ({"silos": ("Long Beach",)}, "name-not-for-flare"),
        ({"silos": ("server",)}, "silo-named-like-server"),
        ({"silos": ("coordinator",)}, "silo-named-like-server"),
    ],
)
def test_names_that_flare_cannot_use_are_refused(change, code):
    with refuses(code):
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


def test_the_server_stores_its_jobs_in_its_own_kit(tmp_path):
    """FLARE's choice is the temporary folder, which restarts empty and two federations share."""
    (tmp_path / "local").mkdir()
    storage = {"args": {"root_dir": "/tmp/nvflare/snapshots"}}
    resources = {
        "snapshot_persistor": {"args": {"storage": storage}},
        "components": [{"id": "job_manager", "args": {"uri_root": "/tmp/nvflare/jobs"}}],
    }
    (tmp_path / "local" / "resources.json").write_text(json.dumps(resources))
    place_store(tmp_path)
    text = (tmp_path / "local" / "resources.json").read_text()
    assert text.count(f"{tmp_path.resolve()}/store") == 2
    assert "/tmp/nvflare" not in text


def test_a_folder_without_a_kit_is_no_administrator(tmp_path):
    with refuses("no-admin-kit"):
        AdminSession(tmp_path, tmp_path / "log")


def test_processes_are_found_by_their_mark_and_all_of_them_killed(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
        "start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    processes = Processes()
    path = os.pathsep.join([str(Path(client.__file__).parents[3]), str(tmp_path)])
    processes.start("north", ["parent"], tmp_path / "log", os.environ | {"PYTHONPATH": path})
    deadline = time.monotonic() + 10
    while len(processes.members("north")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes.members("north")) == 2
    assert processes.members("south") == []
    assert not Processes().members()
    processes.kill("north")
    assert processes.members() == []


def test_processes_end_with_the_one_that_started_them(tmp_path):
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(60)\n")
    program = (
        "import os, sys, time; from pathlib import Path; from scaffpd.deploy.processes import "
        "Processes\n"
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
    while orphans.members() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert orphans.members() == []


# --- a folder for every part


def in_a_fork(command, cwd, **_):
    """Run `python -m nvflare.cli …` where FLARE is loaded already; the deploy tests start a real
    one.
    """
    assert command[:3] == [sys.executable, "-m", "nvflare.cli"]
    return forked(
        f"import os, runpy, sys; os.chdir({str(cwd)!r}); sys.argv = {command[2:]}\n"
        "runpy.run_module('nvflare.cli', run_name='__main__', alter_sys=True)"
    )


def test_provisioning_gives_every_part_its_own_keys_and_nobody_elses(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(provision.subprocess, "run", in_a_fork)
    path, places = federation(tmp_path / "f", 2)
    assert cli.run(["deploy", "flare", str(path), "--out", str(tmp_path / "o")]) == 0
    assert f"deploy resume {tmp_path / 'o' / 'parts' / 'coordinator'}" in capsys.readouterr().out
    parts = tmp_path / "o" / "parts"
    assert {part.name for part in parts.iterdir()} == {*places, "coordinator"}
    assert all(
        part.stat().st_mode & 0o077 == 0 for part in (tmp_path / "o" / "kits", *parts.iterdir())
    )
    keys = [file.read_bytes() for file in (tmp_path / "o").rglob("*.key")]
    assert len(keys) == len(set(keys)) == len(places) + 2  # silos, server and administrator
    assert (parts / "coordinator" / "federation.toml").read_text() == path.read_text()
    assert cli.run(["deploy", "flare", str(path), "--out", str(tmp_path / "o")]) == 2
    assert "already" in capsys.readouterr().err


def test_keys_are_written_where_nobody_else_can_look(tmp_path, monkeypatch):
    seen = []

    def fail(command, cwd, **_):
        seen.append((cwd / "kits").stat().st_mode & 0o777)
        return types.SimpleNamespace(returncode=1, stdout="", stderr="")

    monkeypatch.setattr(provision.subprocess, "run", fail)
    (tmp_path / "kits").mkdir(mode=0o755)
    with refuses("provision-failed"):
        provision.provision(FlareProject("f", ("a",), "localhost"), tmp_path)
    assert seen == [0o700]


def test_a_coordinators_folder_without_a_job_is_not_resumed(tmp_path, capsys):
    for name in ("admin", "job"):
        (tmp_path / name).mkdir()
    (tmp_path / "federation.toml").write_text(federation(tmp_path / "f", 2)[0].read_text())
    assert cli.run(["deploy", "resume", str(tmp_path)]) == 2
    assert "There is no job" in capsys.readouterr().err


# --- a job and its run


class Scripted(FlareJob):
    """A job whose server answers from a script: statuses, or `None` where it does not answer."""

    def __init__(self, statuses, sites=("cleveland", "va"), unfinished=(), end=lambda: None):
        self.statuses = list(statuses)
        self.sites = set(sites)
        self.unfinished = list(unfinished)
        self.end = end
        self.calls = []
        self.current = None
        self._listed = 0.0
        self.folder = Path("hospitals")
        self.session = types.SimpleNamespace(call=self.call)

    def call(self, command, *about):
        self.calls.append(command)
        if command == "unfinished":
            return self.unfinished
        if command == "sites":
            return sorted(self.sites)
        if command == "submit":
            return "job-1"
        said = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if said is None:
            raise LostError("FLARE's server did not answer 'status'.")
        if said[0].startswith("FINISHED"):
            self.end()
        return said


class Clock:
    """`time` for whoever follows a job: nothing passes but what it sleeps."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def followed(tmp_path, monkeypatch):
    path, _ = federation(tmp_path, 2)
    file = FederationFile.read(path)
    monkeypatch.setattr(admin, "time", Clock())
    folder = DeployedRun(file.folder)
    done = Outcome("converged", True, "Done.", 3, 1e-7)
    said = []

    def run(job):
        job.end = lambda: write_outcome(folder, done)
        return follow(job, file, 3600.0, said.append, lambda: None)

    return run, said, done


RUNNING = ("RUNNING", True)
FINISHED = ("FINISHED:COMPLETED", False)


def test_a_run_is_submitted_once_and_followed_to_its_outcome(followed):
    run, said, done = followed
    job = Scripted([("SUBMITTED", False), RUNNING, RUNNING, FINISHED])
    assert run(job) == done
    assert job.calls.count("submit") == 1
    assert run(Scripted([])) == done  # and not again
    assert said == ["This run had ended before: nothing was trained."]


def test_a_job_that_is_running_is_taken_over(followed):
    run, said, done = followed
    job = Scripted([RUNNING, RUNNING, RUNNING, FINISHED], unfinished=["job-0"])
    assert run(job) == done
    assert "submit" not in job.calls
    assert said == ["The job is running already."]


def test_a_job_that_only_the_store_remembers_is_lost_by_the_servers_list_and_no_clock(followed):
    """FLARE lists the job of a server that died as running for ever: another is submitted."""
    run, _, done = followed
    lost = [("RUNNING", False)] * int(2 * admin.UNLISTED / admin.EVERY + 2)
    job = Scripted([*lost, RUNNING, FINISHED], unfinished=["job-0"])
    job.call = _until_submitted(job, lost)
    assert run(job) == done
    assert job.calls.count("submit") == 1


def _until_submitted(job, lost):
    plain = job.call

    def call(command, *about):
        if command == "submit":
            job.statuses = [RUNNING, FINISHED]
        return plain(command, *about)

    job.session = types.SimpleNamespace(call=call)
    return call


def test_a_server_that_is_down_for_a_while_is_waited_for_and_then_given_up(followed):
    run, said, done = followed
    assert run(Scripted([RUNNING, None, None, RUNNING, FINISHED])) == done
    assert said == ["FLARE's server does not answer yet."]


def test_a_server_that_stays_away_ends_the_command_in_a_sentence(followed):
    run, _, _ = followed
    with refuses("server-not-answering"):
        run(Scripted([RUNNING, None]))


def test_silos_that_do_not_come_are_named(followed):
    run, said, _ = followed
    with refuses("silos-not-connected") as refusal:
        run(Scripted([RUNNING], sites=("va",)))
    assert "cleveland" in str(refusal.value)
    assert said == ["Waiting for cleveland."]


def test_a_job_that_ends_without_an_outcome_says_so(followed, monkeypatch):
    run, _, _ = followed
    job = Scripted([RUNNING, ("FINISHED:ABORTED", False)])
    with refuses("job-ended-early"):
        follow_without_outcome(run, job)


def follow_without_outcome(run, job):
    call = job.call

    def quiet(*request):
        job.end = lambda: None
        return call(*request)

    job.session = types.SimpleNamespace(call=quiet)
    run(job)
