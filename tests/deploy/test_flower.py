"""Flower without processes: the apps, the transport and the files."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import flower_stand_in
import pytest

pytest.importorskip("flwr", reason="needs scaffpd[flower]")

from flower_simulator import InProcessGrid, simulate
from flwr.app import Context, Error, Message, RecordDict

from scaffpd.deploy.flower import apps
from scaffpd.deploy.flower.apps import GridTransport
from scaffpd.deploy.flower.project import write_app, write_certificates, write_node_key
from scaffpd.deploy.messages import Failure
from scaffpd.errors import InputError


@dataclass(frozen=True)
class Server:
    host: str = "coordinator.example.org"
    port: int = 8443


@dataclass(frozen=True)
class Description:
    path: Path
    silos: tuple[str, ...] = ("north", "south")
    server: Server = Server()


@pytest.fixture
def silos(tmp_path):
    files = {}
    for name in ("north", "south", "west"):
        files[name] = tmp_path / f"{name}.toml"
        files[name].write_text(name)
    return files


@pytest.fixture
def grid(silos, monkeypatch):
    monkeypatch.setattr(apps, "open_silo", flower_stand_in.Silo.open)
    return InProcessGrid(silos)


def ask(grid, question=b"echo", timeout=5.0):
    transport = GridTransport(grid, poll=0.01)
    return transport.ask(dict.fromkeys(transport.sites(), question), timeout)


def heads(replies):
    return {site: json.loads(reply.partition(b"\n")[0]) for site, reply in replies.items()}


class TestPayload:
    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 50_000])
    def test_comes_back_as_it_went(self, data):
        assert apps.unpack(apps.pack(data)) == data

    def test_something_else_is_refused(self):
        with pytest.raises(ValueError, match="one array of bytes"):
            apps.unpack(RecordDict())


class TestTransport:
    def test_every_site_gets_its_own_question(self, grid):
        transport = GridTransport(grid)
        questions = {site: site.encode() for site in transport.sites()}
        replies = transport.ask(questions, 5.0)
        assert list(replies) == list(questions) == ["101", "102", "103"]
        assert all(replies[site].endswith(b"\n" + site.encode()) for site in replies)
        assert [head["name"] for head in heads(replies).values()] == ["north", "south", "west"]

    def test_what_a_silo_keeps_lasts_until_its_node_restarts(self, grid):
        ask(grid)
        assert {head["count"] for head in heads(ask(grid)).values()} == {2}
        grid.restart("south")
        assert [head["count"] for head in heads(ask(grid)).values()] == [3, 1, 3]

    def test_a_site_that_is_away_is_gone_and_keeps_nobody_back(self, grid):
        sites = GridTransport(grid).sites()
        grid.away.add("south")
        replies = GridTransport(grid).ask(dict.fromkeys(sites, b"echo"), 5.0)
        assert replies["102"] == Failure("the site is not connected")
        assert set(heads({site: replies[site] for site in ("101", "103")})) == {"101", "103"}

    def test_a_site_that_goes_away_with_the_question(self, grid, monkeypatch):
        monkeypatch.setattr(grid, "push_messages", leaving(grid, grid.push_messages))
        replies = ask(grid)
        assert replies["102"] == Failure("the SuperLink has had no heartbeat from the site")
        assert isinstance(replies["101"], bytes)

    def test_an_exception_at_the_site_is_a_failure(self, grid, silos):
        silos["west"].unlink()
        replies = ask(grid)
        assert isinstance(replies["103"], Failure)
        assert "error 2" in replies["103"].reason

    def test_a_late_reply_is_never_taken_for_a_later_one(self, grid, monkeypatch):
        silent = Slow(grid, {102})
        replies = GridTransport(silent, poll=0.01).ask(dict.fromkeys(("101", "102"), b"first"), 0.1)
        assert replies["102"] == Failure("no reply within 0.1 seconds")
        silent.silent.clear()
        replies = GridTransport(silent, poll=0.01).ask(
            dict.fromkeys(("101", "102"), b"second"), 1.0
        )
        assert all(reply.endswith(b"second") for reply in replies.values())

    def test_errors_are_told_apart_by_the_message_that_they_reply_to(self, grid):
        transport = GridTransport(Broken(grid, node=103, code=5), poll=0.01)
        replies = transport.ask(dict.fromkeys(transport.sites(), b"echo"), 1.0)
        assert [isinstance(reply, bytes) for reply in replies.values()] == [True, True, False]
        assert replies["103"] == Failure("the SuperLink has had no heartbeat from the site")

    def test_nobody_to_ask(self, grid):
        assert GridTransport(grid).ask({}, 1.0) == {}

    def test_a_superlink_that_takes_nothing(self, grid, monkeypatch):
        monkeypatch.setattr(grid, "push_messages", lambda messages: [])
        assert {reply.reason for reply in ask(grid).values()} == {
            "the SuperLink did not accept the question"
        }

    def test_traffic_is_the_payload_and_little_more(self, grid):
        question = bytes(1_000_000)
        ask(grid, question)
        assert 3_000_000 < grid.sent < 3_000_000 * 1.01
        assert 3_000_000 < grid.received < 3_000_000 * 1.01


def leaving(grid, push):
    def pushed(messages):
        keys = push(messages)
        grid.away.add("south")
        return keys

    return pushed


class Slow:
    """A grid that does not let some nodes' replies through."""

    def __init__(self, grid, silent):
        self.grid = grid
        self.silent = silent
        self.held = []

    def get_node_ids(self):
        return self.grid.get_node_ids()

    def push_messages(self, messages):
        return self.grid.push_messages(messages)

    def pull_messages(self, keys):
        self.held += self.grid.pull_messages(keys)
        free = [message for message in self.held if message.metadata.src_node_id not in self.silent]
        self.held = [message for message in self.held if message not in free]
        return free


class Broken(Slow):
    """A grid that answers for one node with an error of its own, as the SuperLink does for a lost node."""

    def __init__(self, grid, node, code):
        super().__init__(grid, set())
        self.node = node
        self.code = code
        self.asked = {}

    def push_messages(self, messages):
        keys = self.grid.push_messages(messages)
        self.asked = dict(zip(keys, messages, strict=True))
        return keys

    def pull_messages(self, keys):
        return [self.change(message) for message in self.grid.pull_messages(keys)]

    def change(self, reply):
        if reply.metadata.src_node_id != self.node:
            return reply
        error = Message(
            Error(self.code, "lost"), reply_to=self.asked[reply.metadata.reply_to_message_id]
        )
        error.metadata.__dict__["_src_node_id"] = 1
        return error


class TestApps:
    def test_the_silo_is_the_sites_own_setting(self, monkeypatch):
        context = Context(1, 2, {"silo": "/there/silo.toml"}, RecordDict(), {"silo": "/evil.toml"})
        assert apps.silo_file(context) == Path("/there/silo.toml")
        bare = Context(1, 2, {}, RecordDict(), {"silo": "/evil.toml"})
        monkeypatch.delenv("SCAFFPD_SILO", raising=False)
        with pytest.raises(InputError, match="--node-config"):
            apps.silo_file(bare)
        monkeypatch.setenv("SCAFFPD_SILO", "/here/silo.toml")
        assert apps.silo_file(bare) == Path("/here/silo.toml")

    def test_the_run_config_names_the_federation(self):
        assert apps.federation_file({"federation": "/a/federation.toml"}) == Path(
            "/a/federation.toml"
        )
        with pytest.raises(InputError, match="flwr run -c"):
            apps.federation_file({"federation": ""})

    def test_a_whole_run(self, silos, tmp_path, monkeypatch):
        monkeypatch.setattr(apps, "open_silo", flower_stand_in.Silo.open)
        monkeypatch.setattr(sys, "meta_path", [flower_stand_in.Finder(), *sys.meta_path])
        for name in flower_stand_in.Finder.NAMES:
            monkeypatch.delitem(sys.modules, name, raising=False)
        plan = {
            "out": str(tmp_path / "out"),
            "steps": [{"ask": "echo", "sites": 3, "times": 2, "timeout": 5}],
        }
        (tmp_path / "federation.toml").write_text(json.dumps(plan))
        simulate(tmp_path / "federation.toml", silos)
        for name in flower_stand_in.Finder.NAMES:
            monkeypatch.delitem(sys.modules, name, raising=False)
        seen = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
        assert [[reply["count"] for reply in step["replies"]] for step in seen] == [
            [1, 1, 1],
            [2, 2, 2],
        ]

    def test_the_client_is_light(self):
        code = "import sys, scaffpd.deploy.flower.apps; print(*{'torch', 'sklearn', 'scipy'} & set(sys.modules))"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == ""


class TestProject:
    @pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
    def test_flower_takes_the_app(self, tmp_path):
        from flwr.cli.build import build_fab_from_disk

        commands = write_app(Description(tmp_path / "federation.toml"), tmp_path / "app")
        assert len(build_fab_from_disk(tmp_path / "app")) > 500
        project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
        assert project["tool"]["flwr"]["app"]["config"] == {
            "federation": str(tmp_path / "federation.toml")
        }
        assert set(commands.silos) == set(commands.admit) == {"north", "south"}

    def test_commands_are_ones_that_flower_knows(self, tmp_path):
        from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
        from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

        commands = write_app(Description(tmp_path / "federation.toml"), tmp_path / "app")
        words = [
            word for word in shlex.split(commands.server[0]) if not word.startswith(("FLWR_", "&"))
        ]
        link = _parse_args_run_superlink().parse_args(words[1:])
        assert link.enable_supernode_auth
        assert (link.host, link.insecure) == ("127.0.0.1", False)
        line = next(
            line for line in commands.silos["north"] if "flower-supernode" in line
        ).removesuffix(" &")
        words = [word for word in shlex.split(line) if not word.startswith("FLWR_")]
        node = _parse_args_run_supernode().parse_args(words[1:])
        assert node.superlink == "coordinator.example.org:8443"
        assert node.node_config == 'silo="$PWD/silo.toml"'
        assert "/v1/fleet/" in (tmp_path / "app" / "proxy.conf").read_text()


class TestSecrets:
    def test_private_keys_are_private(self, tmp_path):
        write_certificates(tmp_path)
        write_node_key(tmp_path, "north")
        for name in ("server.key", "north.key"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        assert not list(tmp_path.glob("*ca*key*"))

    def test_the_server_certificate_holds_for_loopback_only(self, tmp_path):
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        write_certificates(tmp_path)
        authority = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
        server = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
        server.verify_directly_issued_by(authority)
        assert isinstance(authority.public_key(), ec.EllipticCurvePublicKey)
        names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(name.value) for name in names] == ["localhost", "127.0.0.1"]
