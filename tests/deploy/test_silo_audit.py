"""The log of a silo: every byte that leaves is in it, and nobody changes it unseen."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest
from test_private_deploy import WILLING, another_run, private
from typer.testing import CliRunner

from cases.refusals import refuses
from cases.silos import QUICK, SCAFF_PD, federation, opened, secured
from scaffpd.cli import app
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_run import DeployedRun
from scaffpd.deploy.local import LocalDeployment, follower
from scaffpd.deploy.messages import InProcess, Message, decode, encode
from scaffpd.deploy.silo.records import AuditLog, audit
from scaffpd.deploy.silo.silo import Silo
from scaffpd.files import lock_folder
from scaffpd.run.settings.federation import FederationFile

HELLO = encode(Message("hello", {"question": "1"}))


class Tapped(InProcess):
    """Counts what every silo sends."""

    def __init__(self, places):
        super().__init__(opened(places))
        self.up = Counter()

    def ask(self, questions, timeout):
        replies = super().ask(questions, timeout)
        self.up.update({site: len(reply) for site, reply in replies.items()})
        return replies


@pytest.fixture(scope="module")
def tapped(tmp_path_factory):
    path, places = federation(tmp_path_factory.mktemp("audited"), more=QUICK)
    transport = Tapped(places)
    coordinate(path, transport)
    return places, transport


@pytest.fixture
def log(tapped, tmp_path):
    """A copy of a silo's log."""
    copy = tmp_path / "audit.jsonl"
    copy.write_bytes((tapped[0]["va"].parent / "audit.jsonl").read_bytes())
    return copy


def accounted(places, transport):
    found = {name: audit(file.parent / "audit.jsonl") for name, file in places.items()}
    assert all(own["whole"] for own in found.values())
    assert {name: own["bytes"] for name, own in found.items()} == transport.up
    return found["va"]


def test_every_byte_that_left_is_accounted_for(tapped):
    found = accounted(*tapped)
    assert sum(row["bytes"] for run in found["runs"] for row in run["questions"]) == found["bytes"]
    assert [(run["algorithm"], run["masked"], run["private"]) for run in found["runs"]] == [
        ("", False, False),
        ("Fair", False, False),
    ]


def test_with_masks_too(tmp_path):
    path, places = secured(tmp_path, replacing={**SCAFF_PD, "500": "3"})
    transport = Tapped(places)
    coordinate(path, transport)
    run = accounted(places, transport)["runs"][-1]
    assert run["masked"]
    assert "masked vectors" in {row["what"] for row in run["questions"]}


def test_with_noise_and_over_restarts_and_refusals_too(tmp_path):
    path, places = private(tmp_path, silo=WILLING.replace("epsilon = 20", "epsilon = 9"))
    transport = Tapped(places)
    coordinate(path, transport)
    transport.silos = opened(
        places
    )  # every silo is started anew, for another run, which its budget does not allow
    path.write_text(another_run(path))
    coordinate(path, transport)
    found = accounted(places, transport)
    assert [run["private"] for run in found["runs"] if run["run"]] == [True, True]
    assert any("budget" in why for why in found["refused"])


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [*lines[:4], lines[4].replace('"bytes": ', '"bytes": 1'), *lines[5:]],
        lambda lines: lines[:4] + lines[5:],
        lambda lines: lines[1:],
        lambda lines: [*lines[:4], lines[3], *lines[4:]],
        lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]],
        lambda lines: [*lines[:4], "[]", *lines[4:]],
        lambda lines: [*lines[:4], lines[4][:-9], *lines[5:]],
    ],
    ids=["changed", "removed", "beginning removed", "repeated", "swapped", "inserted", "cut"],
)
def test_a_change_is_noticed(log, change):
    log.write_text("\n".join(change(log.read_text().splitlines())) + "\n")
    found = audit(log)
    assert not found["whole"]
    assert found["lines"] <= 4


@pytest.mark.parametrize("last", ["[]", "null", "{}", "0", '{"number": "3", "link": ""}'])
def test_a_log_whose_last_line_makes_no_sense_is_not_begun_anew(log, last):
    """No answer leaves: line 1 after it would be the beginning of another log."""
    with log.open("a") as file:
        file.write(f"{last}\n")
    before = log.read_bytes()
    with refuses("log-unreadable"):
        AuditLog(log).note(None, Message("refused", {}), 0, {})
    assert log.read_bytes() == before


def test_an_end_that_was_cut_off_shows_by_the_link_that_was_noted_down(log):
    noted = audit(log)["link"]
    assert audit(log, noted)["whole"]
    log.write_text("\n".join(log.read_text().splitlines()[:-2]) + "\n")
    assert audit(log)["whole"]
    assert "cut off" in audit(log, noted)["broken"]


def test_several_processes_and_a_crash_in_the_middle_of_a_line(tapped, tmp_path):
    file = tmp_path / "silo.toml"
    file.write_text(tapped[0]["va"].read_text())
    first = Silo.open(file)
    second = Silo.open(file)
    for silo in (first, second, second, first):
        silo.answer(HELLO)
    log = tmp_path / "audit.jsonl"
    with log.open("a") as half:
        half.write('{"number": 5, "ti')
    assert audit(log)["whole"]  # its answer has not left
    second.answer(b"nonsense")
    first.answer(HELLO)
    found = audit(log)
    assert (found["whole"], found["lines"]) == (True, 6)
    assert [json.loads(line)["question"] for line in log.read_text().splitlines()][
        4
    ] == "unreadable"
    assert len(found["refused"]) == 1
    assert log.stat().st_mode & 0o077 == 0


def test_nothing_leaves_that_cannot_be_written_down(tapped, tmp_path):
    file = tmp_path / "silo.toml"
    file.write_text(tapped[0]["va"].read_text())
    (tmp_path / "audit.jsonl").mkdir()
    reply = decode(Silo.open(file).answer(HELLO), 2**20)
    assert reply.kind == "refused"
    assert "version" not in reply.values


def test_the_command_says_it_in_words(tapped, log):
    file = tapped[0]["va"]
    done = CliRunner().invoke(app, ["silo", "audit", str(file)])
    assert done.exit_code == 0
    for words in ("losses and gradients", "vectors were in the clear", "are accounted for"):
        assert words in " ".join(done.output.split())
    link = done.output.split()[-1]
    assert (
        json.loads(CliRunner().invoke(app, ["silo", "audit", str(file), "--json"]).output)["link"]
        == link
    )
    assert CliRunner().invoke(app, ["silo", "audit", str(file), "--noted", link]).exit_code == 0
    assert CliRunner().invoke(app, ["silo", "audit", str(file), "--noted", "0" * 64]).exit_code != 0


# --- for whoever watches


def test_a_run_is_watched_from_another_shell(tapped):
    places, transport = tapped
    folder = places["va"].parents[1] / "run"
    run = DeployedRun(folder)
    now = run.status()
    assert now["state"] == "converged"
    assert now["round"] > 0
    assert 0 < now["messages_up"] <= sum(transport.up.values())
    with run.locked():
        assert DeployedRun(folder).status()["state"] == "running"
    done = CliRunner().invoke(app, ["deploy", "status", str(folder)])
    assert "converged, last heard of" in done.output
    assert (
        json.loads(CliRunner().invoke(app, ["deploy", "status", str(folder), "--json"]).output)[
            "round"
        ]
        == now["round"]
    )


def test_runs_that_have_not_begun_or_were_killed(tmp_path):
    run = DeployedRun(tmp_path / "run")
    assert run.status()["state"] == "not begun"
    run.progress(
        {"event": {"round": 0, "client": "a", "what": "absent", "sentence": "Silo 'a' is away."}}
    )
    with (run.path / "progress.jsonl").open("a") as half:
        half.write('{"round": 1, "mem')
    now = run.status()
    assert (now["state"], now["round"]) == ("interrupted", 0)
    assert now["events"][0]["client"] == "a"
    seen = []
    look = follower(run.path / "progress.jsonl", seen.append)
    run.progress(
        {"event": {"round": 2, "client": "b", "what": "absent", "sentence": "Silo 'b' is away."}}
    )
    look()
    assert [event["client"] for event in run.status()["events"]] == [
        "a",
        "b",
    ]  # after the half line, not in it
    assert [line["event"]["client"] for line in seen] == ["b"]
    assert CliRunner().invoke(app, ["deploy", "status", str(tmp_path / "nowhere")]).exit_code != 0


def test_the_status_of_a_local_deployment_is_that_of_its_run(tmp_path):
    made = LocalDeployment.hospitals(tmp_path / "trial")
    DeployedRun(FederationFile.read(made.federation).folder).write(
        "outcome.json", {"status": "converged", "sentence": "Done.", "final": True}
    )
    found = CliRunner().invoke(app, ["deploy", "status", str(tmp_path / "trial"), "--json"])
    assert json.loads(found.output)["state"] == "converged"


def test_a_look_at_a_run_does_not_keep_a_coordinator_from_it(tmp_path):
    run = DeployedRun(tmp_path / "run")
    held = threading.Event()

    def look():
        with lock_folder(run.path, ""):
            held.set()
            threading.Event().wait(0.3)

    threading.Thread(target=look).start()
    held.wait()
    with run.locked():
        assert run.busy()
