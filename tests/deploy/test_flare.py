"""FLARE without any process: what travels, what is written, what is refused, and when a job is
started anew.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import types
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

pytest.importorskip("nvflare", reason="nvflare is an extra: pip install 'scaffpd[flare]'")

from nvflare.collab.api.exceptions import CollabCallError, RunAborted

from cases.refusals import refuses
from cases.silos import federation
from forked import forked
from scaffpd import cli
from scaffpd.deploy.deployed_run import DeployedRun, Outcome
from scaffpd.deploy.flare import admin, client, provision, server, serving
from scaffpd.deploy.flare.admin import LostError
from scaffpd.deploy.flare.kit import SITE_PARTS, SiteKit
from scaffpd.deploy.flare.provision import FlareProject
from scaffpd.deploy.flare.serving import (
    SITE_FILE,
    check_port,
    checked_kit,
    empty_store,
    expiry_warning,
)
from scaffpd.deploy.flare.workspace import SITE_CLASSES
from scaffpd.deploy.messages import REFUSED, Failure, decode
from scaffpd.deploy.processes import Processes
from scaffpd.deploy.recording import record_of
from scaffpd.errors import InputError
from scaffpd.report.page import page
from scaffpd.settings.federation import FederationFile


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


@pytest.mark.parametrize("reply", [hangs, raises(RunAborted("end"))])
def test_an_aborted_job_ends_the_question(reply):
    transport = server.CollabTransport({"a": Proxy(reply)}, aborted=lambda: True)
    with pytest.raises(RunAborted, match=r"FLARE ended the job.* \(no answer yet: a\)"):
        transport.ask({"a": b"1"}, 30.0)


def test_a_silo_of_another_name_is_refused(monkeypatch, tmp_path):
    fake = types.ModuleType("scaffpd.deploy.silo")
    fake.Silo = types.SimpleNamespace(open=lambda file: types.SimpleNamespace(name="south"))
    monkeypatch.setitem(sys.modules, "scaffpd.deploy.silo", fake)
    with refuses("silo-of-another-name"):
        client.open_silo("north", tmp_path / "silo.toml")


def test_a_refusal_tells_nothing_but_its_sentence(monkeypatch):
    secret = "/data/patients.csv has no column 'hiv'"
    monkeypatch.setenv(SITE_FILE, "silo.toml")
    monkeypatch.setattr(client, "open_silo", raises_input(secret))
    monkeypatch.setattr(client, "collab", types.SimpleNamespace(site_name="north"))
    reply = client.SiloClient().answer(question=b"1")
    assert decode(reply).kind == REFUSED
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
    for part, allowed in (("server", provision.SERVER_CLASSES), ("client", SITE_CLASSES)):
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
        ({"silos": ("kit",)}, "silo-named-like-server"),
    ],
)
def test_names_that_flare_cannot_use_are_refused(change, code):
    with refuses(code):
        FlareProject(**({"name": "f", "silos": ("a",), "host": "localhost"} | change))


def test_a_server_allows_two_classes_one_job_and_no_code(tmp_path):
    default = {
        "servers": [{}],
        "components": [{"id": "job_scheduler", "args": {}}, {"id": "log_receiver"}],
    }
    (tmp_path / "resources.json.default").write_text(json.dumps(default))
    (tmp_path / "log_config.json.default").write_text(
        json.dumps({"loggers": {"root": {"handlers": ["x"]}}})
    )
    project = types.SimpleNamespace(get_server=lambda: "server")
    context = types.SimpleNamespace(get_local_dir=lambda part: tmp_path)
    provision.ServerRules().build(project, context)
    resources = json.loads((tmp_path / "resources.json").read_text())
    assert resources["class_allow_list"] == list(provision.SERVER_CLASSES)
    assert [part["id"] for part in resources["components"]] == ["job_scheduler"]
    assert resources["components"][0]["args"]["max_jobs"] == 1
    rights = json.loads((tmp_path / "authorization.json").read_text())["permissions"]
    assert all(role.get("byoc", "none") == "none" for role in rights.values())


def test_the_server_stores_its_jobs_in_its_own_kit_and_begins_without_any(tmp_path):
    """FLARE's choice is the temporary folder, which restarts empty and two federations share."""
    (tmp_path / "local").mkdir()
    (tmp_path / "store" / "jobs" / "of a server that died").mkdir(parents=True)
    storage = {"args": {"root_dir": "/tmp/nvflare/snapshots"}}
    resources = {
        "snapshot_persistor": {"args": {"storage": storage}},
        "components": [{"id": "job_manager", "args": {"uri_root": "/tmp/nvflare/jobs"}}],
    }
    (tmp_path / "local" / "resources.json").write_text(json.dumps(resources))
    empty_store(tmp_path.resolve())
    text = (tmp_path / "local" / "resources.json").read_text()
    assert text.count(f"{tmp_path.resolve()}/store") == 2
    assert "/tmp/nvflare" not in text
    assert not (tmp_path / "store").exists()


def test_processes_are_found_by_their_mark_and_all_of_them_killed(tmp_path):
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
        "start_new_session=True)\n"
        "time.sleep(60)\n"
    )
    processes = Processes()
    path = os.pathsep.join([str(Path(client.__file__).parents[3]), str(tmp_path)])
    environment = os.environ | {"PYTHONPATH": path}
    processes.start(["parent"], tmp_path / "log", environment, tmp_path)
    deadline = time.monotonic() + 10
    while len(processes.members()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(processes.members()) == 2
    assert not Processes().members()
    processes.kill()
    assert processes.members() == []


def test_processes_end_with_the_one_that_started_them(tmp_path):
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(60)\n")
    program = (
        "import os, sys, time; from pathlib import Path; from scaffpd.deploy.processes import "
        "Processes\n"
        "processes = Processes()\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "processes.start(['sleeper'], folder / 'log', os.environ, folder)\n"
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


@contextlib.contextmanager
def answering(kit):
    """A server with the certificate of a kit, which shakes hands."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(kit / "startup" / "server.crt", kit / "startup" / "server.key")

    def shake():
        for _ in range(2):
            with contextlib.suppress(OSError):
                context.wrap_socket(server.accept()[0], server_side=True).close()

    with socket.create_server(("localhost", 0)) as server:
        thread = threading.Thread(target=shake, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(10)


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
    path, places = federation(tmp_path / "f", 3)
    places["va"].unlink()  # its operator gets one to fill in
    home = path.parent
    assert cli.run(["deploy", "provision", str(path)]) == 0
    assert f"deploy run {path}" in capsys.readouterr().out
    kits = [home / "kit", *(home / name / "kit" for name in places)]
    assert all(kit.stat().st_mode & 0o077 == 0 for kit in (*kits, home / "authority"))
    for kit in kits[1:]:
        assert sorted(file.name for file in kit.rglob("*.*")) == sorted(SITE_PARTS)
    keys = [file.read_bytes() for kit in kits for file in kit.rglob("*.key")]
    assert len(keys) == len(set(keys)) == len(places) + 2  # silos, server and administrator
    assert 'name = "va"' in places["va"].read_text()
    assert cli.run(["deploy", "provision", str(path)]) == 2
    assert "already" in capsys.readouterr().err
    root = (kits[0] / "startup" / "rootCA.pem").read_bytes()
    path.write_text(path.read_text().replace('"va"', '"new"'))  # one leaves, another one comes
    assert cli.run(["deploy", "provision", str(home), "--renew"]) == 0
    roots = {kit: (kit / "startup" / "rootCA.pem").read_bytes() for kit in kits}
    assert roots.pop(home / "va" / "kit") == root  # an old kit is of no use
    assert set(roots.values()) == {(home / "new" / "kit/startup/rootCA.pem").read_bytes()} != {root}
    assert SiteKit.read(home / "new" / "kit", "new").federation == FederationFile.read(path).name
    with refuses("not-a-kit-for-silos"):
        SiteKit.read(home / "kit" / "admin", "new")
    with refuses("not-a-kit-for-silos"):
        SiteKit.read(home / "kit", "new")
    assert 'name = "new"' in (home / "new" / "silo.toml").read_text()
    with answering(home / "kit") as port:
        monkeypatch.setattr(serving, "address", lambda kit: ("localhost", port))
        assert "has other certificates than this kit" in serving.trouble(home / "va" / "kit")
        assert serving.trouble(home / "new" / "kit") == ""
    assert "Nobody answers" in serving.trouble(home / "new" / "kit")


def test_keys_are_written_where_nobody_else_can_look(tmp_path, monkeypatch):
    seen = []

    def fail(command, cwd, **_):
        seen.append(cwd.stat().st_mode & 0o777)
        return types.SimpleNamespace(returncode=1, stdout="", stderr="")

    monkeypatch.setattr(provision.subprocess, "run", fail)
    (tmp_path / "here").mkdir(mode=0o755)
    with refuses("provision-failed"):
        provision.provision(FlareProject("f", ("a",), "localhost"), tmp_path / "here")
    assert seen == [0o700]


# --- certificates


def certified(folder, start, end):
    """A kit whose certificates are valid from and to so many days from now."""
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    now = datetime.now(UTC)
    built = x509.CertificateBuilder(
        name, name, key.public_key(), 1, now + timedelta(start), now + timedelta(end)
    )
    content = built.sign(key, None).public_bytes(Encoding.PEM)
    (folder / "kit" / "startup").mkdir(parents=True)
    for file in ("client.crt", "rootCA.pem"):
        (folder / "kit" / "startup" / file).write_bytes(content)
    return folder / "silo.toml"


@pytest.mark.parametrize(("start", "end"), [(-400, -1), (1, 300)])
def test_a_certificate_that_does_not_hold_is_refused_before_anything_hangs(tmp_path, start, end):
    with refuses("certificate-not-valid"):
        checked_kit(certified(tmp_path, start, end))


def test_certificates_that_end_soon_are_announced(tmp_path):
    assert expiry_warning(certified(tmp_path / "a", -1, 59.9))
    later = certified(tmp_path / "b", -1, 60.1)
    assert expiry_warning(later) == ""
    assert checked_kit(later) == tmp_path / "b" / "kit"
    assert expiry_warning(tmp_path / "silo.toml") == ""  # without a kit
    with refuses("no-startup-kit"):
        checked_kit(tmp_path / "silo.toml")
    path, _ = federation(tmp_path / "f", 2)
    certified(path.parent, -1, 59.9)
    file = FederationFile.read(path)
    record = record_of(file, DeployedRun(file.folder), Outcome("paused", "it waits", 0))
    assert "renew the kits before." in page(record, "")


# --- a job and its run


class Clock:
    """`time` for whoever follows a job: nothing passes but what it sleeps."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Scripted:
    """A server that answers from scripts: who is connected, a job's statuses; `None` is silence.

    The last word of a script is repeated. `ends` happens when the job is over.
    """

    def __init__(self, sites, statuses, ends):
        self.scripts = {"sites": list(sites), "status": list(statuses), "submit": ["job"]}
        self.ends = ends
        self.alive = True
        self.calls = []

    def call(self, command, *about):
        self.calls.append(command)
        script = self.scripts[command]
        said = script.pop(0) if len(script) > 1 else script[0]
        if said is None:
            raise LostError(f"FLARE's server did not answer {command!r}.")
        if said == "dead":
            self.alive = False
            raise LostError("gone")
        if str(said).startswith("FINISHED"):
            self.ends()
        return said

    def close(self):
        pass


ALL = ["cleveland", "va"]
DONE = Outcome("converged", "Done.", 3, 1e-7)


@pytest.fixture
def followed(tmp_path, monkeypatch):
    path, _ = federation(tmp_path, 2)
    file = FederationFile.read(path)
    folder = DeployedRun(file.folder)
    said = []
    monkeypatch.setattr(admin, "time", Clock())

    def run(sites, statuses, outcome=DONE, seconds=3600.0):
        server = Scripted(sites, statuses, lambda: outcome and folder.end(outcome))
        processes = types.SimpleNamespace(alive=lambda: server.alive, mark="")
        monkeypatch.setattr(admin, "served", lambda path: contextlib.nullcontext(processes))
        monkeypatch.setattr(admin, "AdminSession", lambda *_: server)
        return admin.run(file, lambda line: None, said.append, seconds), server.calls

    return run, said, folder


def test_a_run_is_submitted_once_and_followed_to_its_outcome(followed):
    run, said, _ = followed
    outcome, calls = run([ALL], ["SUBMITTED", "RUNNING", "RUNNING", "FINISHED:COMPLETED"])
    assert outcome == DONE
    assert calls.count("submit") == 1
    assert run([], [])[0] == DONE  # and not again
    assert said[-1] == "This run had ended before: nothing was trained."


def test_silos_and_a_slow_server_are_waited_for(followed):
    run, said, _ = followed
    sites = [None, None, [], ["va"], ["va"], ALL]
    assert run(sites, ["RUNNING", None, "RUNNING", "FINISHED:COMPLETED"])[0] == DONE
    assert said[:2] == ["Waiting for cleveland, va.", "Waiting for cleveland."]


@pytest.mark.parametrize(
    ("sites", "statuses", "reason"),
    [
        ([["va"]], [], "The time is up. Not connected: cleveland."),
        ([None], [], "did not answer 'sites'"),
        ([ALL], ["RUNNING", None], "did not answer 'status'"),
        ([ALL], ["RUNNING", "dead"], "FLARE's server has ended"),
        ([ALL], ["RUNNING", "FINISHED:ABORTED"], "FLARE ended the job (FINISHED:ABORTED)"),
    ],
)
def test_what_ends_early_pauses_with_its_reason_for_terminal_and_status(
    followed, sites, statuses, reason
):
    run, _, folder = followed
    outcome, _ = run(sites, statuses, None)
    assert (outcome.status, outcome.final) == ("paused", False)
    assert reason in outcome.sentence
    assert folder.status()["sentence"] == outcome.sentence
    assert run([ALL], ["RUNNING", "FINISHED:COMPLETED"])[0] == DONE  # and goes on


def test_the_coordinators_own_reason_comes_first(followed):
    run, _, _ = followed
    paused = Outcome("paused", "Silo 'va' did not answer.", 2)
    assert run([ALL], ["RUNNING", "FINISHED:COMPLETED"], paused)[0] == paused


def test_a_full_disk_is_the_reason_that_it_cannot_hold(followed, monkeypatch):
    run, _, folder = followed

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    outcome, _ = run([ALL], ["RUNNING", "FINISHED:EXECUTION_EXCEPTION"], None)
    assert "No space left on device" in outcome.sentence
    assert str(folder.path) in outcome.sentence


def test_a_port_that_another_server_has_is_refused():
    with socket.create_server(("", 0)) as other, refuses("port-in-use"):
        check_port(other.getsockname()[1])
