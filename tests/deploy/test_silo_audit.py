"""The log of a silo: every byte that leaves is in it, and nobody changes it unseen."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import threading
from collections import Counter
from http.client import HTTPConnection
from pathlib import Path

import pytest
from deploy_cases import QUICK, federation, opened
from secure_silos import SCAFF_PD, secured
from test_private_deploy import WILLING, another_run, private
from typer.testing import CliRunner

from scaffpd.cli import app
from scaffpd.cli.deploy import run_pages
from scaffpd.deploy.coordinate import coordinate
from scaffpd.deploy.deployed_record import deployed_record
from scaffpd.deploy.deployed_run import DeployedRun, run_metrics
from scaffpd.deploy.local import LocalDeployment, follower
from scaffpd.deploy.messages import InProcess, Message, decode, encode
from scaffpd.deploy.silo.disclosure import audit, silo_metrics, silo_pages, silo_status
from scaffpd.deploy.silo.records import AuditLog
from scaffpd.deploy.silo.silo import Silo
from scaffpd.errors import InputError
from scaffpd.files import lock_folder
from scaffpd.run.settings.federation import FederationFile
from scaffpd.run.settings.silo import SiloFile
from scaffpd.training.trackers import page_server, prometheus

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
    with pytest.raises(
        InputError, match=r"last line of the silo's log 'audit.jsonl' cannot be read"
    ):
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

SAMPLE = re.compile(
    r'scaffpd_\w+(\{\w+="(?:[^"\\\n]|\\.)*"(?:,\w+="(?:[^"\\\n]|\\.)*")*\})? -?[\d.e+naif-]+'
)


def scraped(text):
    """Read Prometheus's text format, strictly, into numbers by name and labels."""
    lines = text.splitlines()
    assert text.endswith("\n")
    assert all(
        SAMPLE.fullmatch(line) or re.fullmatch(r"# TYPE \w+ (gauge|counter)", line)
        for line in lines
    )
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if not line.startswith("#")
    }


def test_a_run_is_watched_from_another_shell(tapped):
    places, transport = tapped
    folder = places["va"].parents[1] / "run"
    run = DeployedRun(folder)
    now = run.status()
    assert now["state"] == "converged"
    numbers = scraped(run_metrics(now))
    assert numbers["scaffpd_round"] == now["round"] > 0
    assert numbers['scaffpd_bytes_total{way="up"}'] <= sum(transport.up.values())
    assert numbers['scaffpd_absent{silo="va"}'] == 0
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
    assert scraped(run_metrics(run.status()))["scaffpd_running"] == 0
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
    made = LocalDeployment.hospitals(tmp_path / "trial", "flare", 2, False)
    DeployedRun(FederationFile.read(made.federation).folder).write(
        "outcome.json", {"status": "converged", "sentence": "Done.", "final": True}
    )
    found = CliRunner().invoke(app, ["deploy", "status", str(tmp_path / "trial"), "--json"])
    assert json.loads(found.output)["state"] == "converged"


def test_a_silo_is_watched_and_names_cannot_break_the_format(tapped):
    found = audit(tapped[0]["va"].parent / "audit.jsonl")
    numbers = scraped(silo_metrics(found, now=2e9))
    assert numbers["scaffpd_silo_bytes_total"] == found["bytes"]
    assert numbers['scaffpd_silo_answers_total{question="gradients",reply="answer"}'] > 0
    assert scraped(prometheus("scaffpd", {"x": {(("silo", 'a"}\n\\ 1'),): 2.0}, "gone": None})) == {
        'scaffpd_x{silo="a\\"}\\n\\\\ 1"}': 2.0
    }


def fetched(server, path, **headers):
    with contextlib.closing(
        HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    ) as connection:
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read()


@contextlib.contextmanager
def served(pages):
    with page_server(pages, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_the_report_of_a_run_that_goes_on_is_served_and_refreshed_until_it_has_ended(
    tapped, tmp_path, monkeypatch
):
    monkeypatch.setattr("scaffpd.run.page.library", lambda: "")
    ended = tapped[0]["va"].parents[1] / "run"
    going = Path(shutil.copytree(ended, tmp_path / "going"))
    for name in ("outcome.json", "clients.json", "run.json", "model.safetensors"):
        (going / name).unlink()
    lines = (going / "progress.jsonl").read_text().splitlines()[:3]
    last = json.loads(lines[-1])
    half = [*lines[:2], lines[1], lines[-1].replace(f"{last['losses'][0]}", "NaN"), lines[-1][:40]]
    (going / "progress.jsonl").write_text("\n".join(half))
    with served(run_pages(DeployedRun(going))) as server:
        code, body = fetched(server, "/")
        assert code == 200, body
        assert body.count(b'http-equiv="refresh"') == 1
        assert f"round {last['round']} is done".encode() in body
        assert fetched(server, "/healthz") == (200, b"interrupted\n")
    history = deployed_record(DeployedRun(going)).models[0].history
    assert [one.round for one in history] == [json.loads(line)["round"] for line in lines]
    assert sum(loss is None for loss in history[-1].losses) == 1
    with served(run_pages(DeployedRun(ended))) as server:
        assert b'http-equiv="refresh"' not in fetched(server, "/")[1]
        assert fetched(server, "/healthz") == (200, b"converged\n")


def test_a_silo_says_how_it_does_from_another_shell(tapped, tmp_path):
    file = tapped[0]["va"]
    done = CliRunner().invoke(app, ["silo", "status", str(file)])
    assert done.exit_code == 0
    assert "answering, last asked" in done.output
    now = json.loads(CliRunner().invoke(app, ["silo", "status", str(file), "--json"]).output)
    found = audit(file.parent / "audit.jsonl")
    assert (now["bytes"], now["answers"], now["run"]) == (
        found["bytes"],
        found["lines"],
        found["runs"][-1]["run"],
    )
    assert (
        now["asked"]
        == now["answered"]
        == sum(row["asked"] for row in found["runs"][-1]["questions"])
    )
    for name in ("silo.toml", "audit.jsonl"):
        shutil.copy(file.parent / name, tmp_path / name)
    log = tmp_path / "audit.jsonl"
    log.write_text(re.sub(r"T\d\d:", "T00:", log.read_text().replace("2026-", "2020-")))
    settings = SiloFile.read(tmp_path / "silo.toml")
    assert "was changed" in silo_status(settings)["broken"]
    with served(silo_pages(settings)) as server:
        assert fetched(server, "/healthz")[0] == 500
        assert b"log_whole 0" in fetched(server, "/metrics")[1]
        assert fetched(server, "/livez") == (200, b"up\n")
        log.unlink()
        assert fetched(server, "/healthz") == (200, b"not asked yet\n")


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


def test_pages_are_made_anew_and_a_mistake_is_one_line():
    count = itertools.count()
    pages = {
        "/metrics": lambda: f"scaffpd_x {next(count)}\n",
        "/bad": lambda: Path("/secret/place").read_text(),
    }
    with page_server(pages, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert [fetched(server, "/metrics") for _ in range(2)] == [
            (200, b"scaffpd_x 0\n"),
            (200, b"scaffpd_x 1\n"),
        ]
        code, text = fetched(server, "/bad")
        assert (code, text.count(b"\n"), b"secret" in text, b"FileNotFoundError" in text) == (
            500,
            1,
            False,
            True,
        )
        assert (
            fetched(server, "/metrics", Host="evil.example:80")[0] == 403
        )  # a name that somebody lets lead here
        assert (
            fetched(server, "/metrics", Host="LocalHost")[0]
            == fetched(server, "/metrics", Host="[::1]:9")[0]
            == 200
        )
        assert fetched(server, "/etc/passwd")[0] == 404
        with pytest.raises(InputError, match="in use"):
            page_server(pages, "127.0.0.1", server.server_port)
        server.shutdown()
