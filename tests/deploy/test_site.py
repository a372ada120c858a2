"""What a site lets a kit and a server do: nothing but a run of the package's own job."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
import time
import zipfile

import pytest

pytest.importorskip("nvflare", reason="nvflare is an extra: pip install 'scaffpd[flare]'")

from nvflare.private.admin_defs import Message, ok_reply
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.client.training_cmds import DeployProcessor

from cases.kits import booby_trap, write_kit
from cases.silos import federation
from forked import forked
from scaffpd.deploy.flare import site
from scaffpd.deploy.flare.provision import write_job
from scaffpd.deploy.flare.serving import log_file
from scaffpd.deploy.flare.workspace import SITE_CLASSES
from scaffpd.deploy.processes import Processes, free_port

CONFIG = "config/config_fed_client.json"
ID = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
SHELL = {"path": "subprocess.Popen", "args": {"args": ["touch", "x"]}}


def packed(files):
    """A job's folder as a server sends it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    return stream.getvalue()


def changed(change):
    """Our job, but for a change."""
    job = copy.deepcopy(site.JOB)
    change(job)
    return {CONFIG: json.dumps(job)}


def executor(**more):
    return changed(lambda job: job["executors"][0]["executor"].update(more))


def argument(value):
    return changed(lambda job: job["executors"][0]["executor"]["args"].update(props=value))


OURS = {CONFIG: json.dumps(site.JOB)}
FOREIGN = {
    "another executor": executor(**SHELL),
    "a name in place of a path": executor(name="CommandExecutor"),
    "a class of the list with arguments": argument({"x": SHELL}),
    "a list of classes as arguments": argument([SHELL]),
    "attributes of a class": changed(
        lambda job: job["components"][0].update(args={"class_attributes": {"lock": SHELL}})
    ),
    "one more component": changed(lambda job: job["components"].append({"id": "x", **SHELL})),
    "a module below a class": executor(path=f"{SITE_CLASSES[1]}.x"),
    "a filter": changed(lambda job: job["task_data_filters"].append({"tasks": ["*"]})),
    "an unknown setting": changed(lambda job: job.update(workflows=[SHELL])),
    "its own code": OURS | {"custom/scaffpd/__init__.py": "open('x', 'w')"},
    "an empty folder for code": OURS | {"custom/": ""},
    "a file of FLARE's settings": OURS | {"config/comm_config.json": "{}"},
    "resources": OURS | {"config/resources.json": json.dumps({"class_allow_list": ["*"]})},
    "another format": {"config/config_fed_client.conf": "include file('/etc/passwd')"},
    "two formats": OURS | {"config/config_fed_client.yml": "{}"},
    "deep brackets": {CONFIG: "[" * 60_000},
    "much air": OURS | {".__nvfl_sig.json": " " * 10**6},
    "a way out": OURS | {"../local/resources.json": "{}"},
    "nothing": {"config/config_fed_server.json": "{}"},
}


@pytest.fixture
def asked(monkeypatch):
    """Send a job to a site as a server does; return what it says and whether FLARE would see it."""
    seen = []
    monkeypatch.setattr(DeployProcessor, "process", lambda *_: seen.append("job") or ok_reply())

    def ask(packed, name=ID):
        seen.clear()
        request = Message(topic="train.deploy", body=packed)
        request.set_header(RequestHeader.JOB_ID, name)
        request.set_header(RequestHeader.JOB_META, {"submitter_role": "super", "byoc": True})
        return str(site.OnlyOurJob().process(request, None).body), bool(seen)

    return ask


@pytest.mark.parametrize("name", FOREIGN)
def test_a_site_refuses_every_job_but_ours_before_flare_unpacks_it(asked, name):
    said, seen = asked(packed(FOREIGN[name]))
    assert "This silo" in said
    assert not seen


@pytest.mark.parametrize("name", ["startup", "local", "..", f"{{{ID}}}", ID.upper(), None])
def test_a_job_is_not_named_like_a_folder_of_flares(asked, name):
    """FLARE empties the folder of that name."""
    said, seen = asked(packed(OURS), name)
    assert "This silo" in said
    assert not seen


def test_what_is_no_archive_is_refused(asked):
    whole = packed(OURS)
    twice = packed({"config/config_fed_client.jsox": json.dumps({"executors": [SHELL]})} | OURS)
    for content in (b"", b"PK", whole[:-30], whole.replace(b"PK\3\4", b"XX\3\4"), None):
        assert asked(content)[1] is False
    assert asked(twice.replace(b".jsox", b".json"))[1] is False  # two files of one name


def test_the_job_that_a_site_takes_is_the_one_that_provisioning_writes(tmp_path, asked):
    job = write_job("hospitals", tmp_path, 3) / "app"
    files = {path.relative_to(job).as_posix(): path for path in job.rglob("*.json")}
    sent = {name: path.read_text() for name, path in files.items()}
    assert json.loads(sent[CONFIG]) == site.JOB
    signed = dict.fromkeys(site.FILES - {*sent}, "{}") | {"config/": ""}
    assert asked(packed(signed | sent))[1]


# A server's message to FLARE's agent, which does not say that the site is to be asked for rights.
READ_A_FILE = """
import runpy
from types import SimpleNamespace
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.core_cell import Message as CellMessage
from nvflare.fuel.sec.audit import AuditService
from nvflare.private.admin_defs import Message
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from scaffpd.deploy.flare import site

class Engine:
    def new_context(self):
        return FLContext()

def said():
    cell = SimpleNamespace(register_request_cb=lambda **_: None)
    agent = FedAdminAgent("va", cell, Engine())
    for processor in ClientRequestProcessors.request_processors:
        agent.register_processor(processor)
    request = CellMessage({{}}, Message("sys.shell", "cat {patients}"))
    return str(agent._dispatch_request(request).payload.body), sorted(agent.processors)

AuditService.initialize({audit!r})
print(said()[0])
runpy.run_module = lambda *_, **__: None
site.main()
print(*said(), sep="\\n")
"""


def test_a_site_hears_what_a_run_needs_and_no_commands(tmp_path):
    """FLARE's site shows files to a server; ours does not."""
    patients = tmp_path / "patients.csv"
    patients.write_text("age,hiv")
    done = forked(READ_A_FILE.format(patients=patients, audit=str(tmp_path / "audit.log")))
    assert done.returncode == 0, done.stderr
    flares, ours, topics = done.stdout.splitlines()
    assert flares == "age,hiv"
    assert "invalid_request" in ours
    assert topics == str(
        [
            "scheduler.cancel_resource",
            "scheduler.check_resource",
            "train.abort",
            "train.deploy",
            "train.notify_job_status",
            "train.start_job",
        ]
    )


@pytest.mark.deploy
def test_a_kit_with_commands_and_code_runs_nothing(tmp_path):
    """FLARE is started for real; it waits for its server, and nothing that was in the kit runs."""
    _, places = federation(tmp_path / "f", 2)
    place = places["va"]
    kit = write_kit(place.parent / "kit", port=free_port())
    marks = tmp_path / "marks"
    marks.mkdir()
    booby_trap(kit, marks)
    command = [sys.executable, "-m", "scaffpd", "silo", "start", str(place)]
    log = log_file(place, "va")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as silo:
        try:
            deadline = time.monotonic() + 60
            while b"AuxRunner" not in (log.read_bytes() if log.exists() else b""):
                assert silo.poll() is None
                assert time.monotonic() < deadline, log
                time.sleep(0.2)
            time.sleep(3.0)
            running = Processes(str(kit)).members()
            words = " ".join(word for process in running for word in process.cmdline())
        finally:
            silo.terminate()
            said = silo.communicate()[0]
    assert [path.name for path in marks.iterdir()] == []
    assert str(place.parent / "engine" / "workspace") in words
    assert f"-m {kit}" not in words
    assert f"FLARE's log is {log}." in said
    assert Processes(str(kit)).members() == []
