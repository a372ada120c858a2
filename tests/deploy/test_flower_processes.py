"""Flower's real processes on loopback, with TLS and node keys; a stand-in for the silo and the coordinator."""

from __future__ import annotations

import json
import os
import socket
import ssl
import time

import flower_stand_in
import pytest
from hurting import kill_server, kill_silo, pause_silo, restart_server, restart_silo, wake_silo

pytest.importorskip("flwr", reason="needs scaffpd[flower]")

from scaffpd.deploy.flower.local import FlowerEngine
from scaffpd.deploy.flower.project import write_node_key
from scaffpd.errors import InputError

pytestmark = pytest.mark.deploy


class Federation:
    """An engine with a plan that can be changed between runs."""

    def __init__(self, folder, names, **options):
        self.folder = folder
        self.names = names
        self.silos = {name: folder / f"{name}.toml" for name in names}
        for name, path in self.silos.items():
            path.write_text(name)
        self.out = folder / "out.jsonl"
        self.engine = FlowerEngine(
            folder / "federation.toml", self.silos, folder / "work", **options
        )

    def submit(self, *steps):
        self.out.unlink(missing_ok=True)
        plan = {
            "out": str(self.out),
            "steps": [{"timeout": 60, "sites": len(self.names), **step} for step in steps],
        }
        (self.folder / "federation.toml").write_text(json.dumps(plan))
        self.engine.submit()

    def seen(self):
        return (
            [json.loads(line) for line in self.out.read_text().splitlines()]
            if self.out.exists()
            else []
        )

    def run(self, *steps):
        self.submit(*steps)
        self.until(lambda: not self.engine.running())
        return self.seen()

    def until(self, done, seconds=120):
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "took too long"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flower")
    patch = pytest.MonkeyPatch()
    path = [flower_stand_in.stand_in(folder / "stand_in"), os.environ.get("PYTHONPATH", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    (folder / "home").mkdir()
    patch.setenv("HOME", str(folder / "home"))
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def federation(folder):
    federation = Federation(folder, ["north", "south"])
    try:
        federation.engine.start()
        yield federation
    finally:
        federation.engine.stop()
    assert federation.engine.processes.pids() == set()
    assert list((folder / "home").iterdir()) == []


def test_questions_and_answers(federation):
    assert federation.engine.connected() == {"north", "south"}
    seen = federation.run({"ask": "echo", "times": 2}, {"ask": "big", "bytes": 12_000_000})
    assert [[reply["count"] for reply in step["replies"]] for step in seen] == [
        [1, 1],
        [2, 2],
        [3, 3],
    ]
    assert all(reply["same"] for step in seen for reply in step["replies"])
    assert {reply["name"] for reply in seen[0]["replies"]} == {"north", "south"}


def test_only_tls_and_only_loopback(federation):
    port = federation.engine.port
    plain = socket.create_connection(("127.0.0.1", port), timeout=5)
    with plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")
    context = ssl.create_default_context(cafile=str(federation.folder / "work" / "keys" / "ca.pem"))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as safe,
    ):
        assert safe.version() == "TLSv1.3"


def test_a_killed_silo_returns_under_its_name(federation):
    kill_silo(federation.engine, "south")
    assert federation.engine.connected() == {"north"}
    restart_silo(federation.engine, "south")
    federation.until(lambda: federation.engine.connected() == {"north", "south"})
    seen = federation.run({"ask": "echo"})
    assert all(reply["same"] for reply in seen[0]["replies"])


def test_a_killed_server_is_started_again_and_the_silos_find_it(federation):
    federation.submit({"ask": "echo", "times": 1000})
    federation.until(lambda: len(federation.seen()) >= 1)
    kill_server(federation.engine)
    assert not federation.engine.running()
    assert federation.engine.connected() == set()
    restart_server(federation.engine)
    assert not federation.engine.running()
    seen = federation.run({"ask": "echo"})
    assert {reply["name"] for reply in seen[0]["replies"]} == {"north", "south"}


def test_a_hanging_silo_costs_the_timeout_and_no_more(federation):
    pause_silo(federation.engine, "north")
    seen = federation.run({"ask": "echo", "timeout": 8})
    wake_silo(federation.engine, "north")
    assert 8 <= seen[0]["seconds"] < 12
    assert sorted("failure" in reply for reply in seen[0]["replies"]) == [False, True]


def test_abort_leaves_the_processes_up(federation):
    federation.submit({"ask": "echo", "times": 1000})
    federation.until(lambda: len(federation.seen()) >= 1)
    federation.engine.abort()
    federation.until(lambda: not federation.engine.running(), 10)
    assert federation.engine.connected() == {"north", "south"}


def test_a_key_that_was_not_registered_is_not_let_in(federation):
    keys = federation.folder / "work" / "keys"
    kept = (keys / "silo-south.key").read_bytes()
    kill_silo(federation.engine, "south")
    write_node_key(keys, "stranger")
    (keys / "silo-south.key").write_bytes((keys / "stranger.key").read_bytes())
    restart_silo(federation.engine, "south")
    log = federation.engine.logs()["silo-south"]
    federation.until(lambda: "Failed to initialize the connection" in log.read_text())
    assert federation.engine.connected() == {"north"}
    (keys / "silo-south.key").write_bytes(kept)
    restart_silo(federation.engine, "south")
    federation.until(lambda: federation.engine.connected() == {"north", "south"})


def test_a_failed_start_is_a_sentence_and_leaves_nothing(folder):
    (folder / "broken").mkdir()
    broken = Federation(folder / "broken", ["east"])
    with (
        socket.create_server(("127.0.0.1", broken.engine.port)),
        pytest.raises(InputError, match="SuperLink does not"),
    ):
        broken.engine.start()
    broken.engine.stop()
    assert broken.engine.processes.pids() == set()
