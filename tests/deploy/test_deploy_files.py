"""The files in deploy/ and the page about them: they fit the package, each other, and what they
promise.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import scaffpd
from cases.pages import ROOT, blocks, understood
from scaffpd.deploy.processes import free_port

DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "deploy" / "install.md"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
PARTS = ("coordinator", "cleveland", "hungarian", "switzerland", "va")
HARDENED = {
    "ProtectSystem=strict",
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "PrivateTmp=yes",
    "ProtectHome=yes",
}


def instructions():
    """The Dockerfile's instructions, a line each, by stage."""
    text = re.sub(r"\\\n", "", (DEPLOY / "Dockerfile").read_text())
    stages = {}
    name = ""
    for line in filter(
        None, (line.strip() for line in text.splitlines() if not line.startswith("#"))
    ):
        if found := re.fullmatch(r"FROM (\S+) AS (\w+)", line):
            name = found[2]
        stages.setdefault(name, []).append(line)
    return stages


def value(lines, word):
    return next(line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} "))


def test_the_image_starts_a_part_without_root():
    stages = instructions()
    start = json.loads(value(stages["runtime"], "ENTRYPOINT")) + json.loads(
        value(stages["runtime"], "CMD")
    )
    understood(start)
    assert value(stages["runtime"], "VOLUME") in start
    assert value(stages["online"], "USER") == "10001"
    assert value(stages["online"], "FROM") == "runtime AS online"
    assert list(stages)[-1] == "online"  # what `docker build` makes without --target
    sent = (ROOT / ".dockerignore").read_text().split()
    for name in ("src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        assert f"!{name}" in sent
        assert (ROOT / name).exists()


def test_every_part_has_a_volume_of_its_own_and_no_rights():
    services = COMPOSE["services"]
    assert set(services) == {*PARTS, "prepare"}
    for name in PARTS:
        part = services[name]
        assert part["volumes"] == [f"{name}:/var/lib/scaffpd"]
        assert (part["read_only"], part["cap_drop"], "user" in part) == (True, ["ALL"], False)
        assert "no-new-privileges:true" in part["security_opt"]
    understood(["scaffpd", *services["coordinator"]["command"]])
    assert services["coordinator"]["restart"] == "on-failure"  # and not once the run is done
    given = {mount.split(":")[1] for mount in services["prepare"]["volumes"]}
    assert given == {"/prepare.sh", *(f"/parts/{name}" for name in PARTS)}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_are_hardened_and_start_commands_that_exist(unit, tmp_path):
    text = unit.read_text()
    command = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.M)[1])
    assert command[0] == "/opt/scaffpd/bin/scaffpd"
    understood(["scaffpd", *command[1:]])
    assert set(text.splitlines()) >= HARDENED
    if shutil.which("systemd-analyze"):
        for one in UNITS:
            (tmp_path / one.name).write_text(one.read_text().replace(command[0], "/bin/true"))
        words = ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        words = [
            "systemd-analyze",
            "security",
            "--offline=true",
            "--threshold=20",
            str(tmp_path / unit.name),
        ]
        assert subprocess.run(words, capture_output=True, check=False).returncode == 0


def test_manifests_fit_the_image():
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert [one["kind"] for one in found] == ["Service", "StatefulSet", "StatefulSet"]
    service, *sets = found
    runtime = instructions()["runtime"]
    assert {str(port["port"]) for port in service["spec"]["ports"]} == set(
        value(runtime, "EXPOSE").split()
    )
    assert service["spec"]["selector"] == sets[0]["spec"]["template"]["metadata"]["labels"]
    for one in sets:
        pod = one["spec"]["template"]["spec"]
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"] == labels
        assert pod["securityContext"]["runAsUser"] == int(value(instructions()["online"], "USER"))
        assert pod["securityContext"]["runAsNonRoot"]
        volumes = {v["name"] for v in pod["volumes"]} | {
            v["metadata"]["name"] for v in one["spec"]["volumeClaimTemplates"]
        }
        for part in (*pod["containers"], *pod["initContainers"]):
            assert (part["image"], part["imagePullPolicy"]) == (
                f"scaffpd:{scaffpd.__version__}",
                "IfNotPresent",
            )
            assert part["securityContext"]["readOnlyRootFilesystem"]
            assert part["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in part["volumeMounts"]} <= volumes
        (main,) = pod["containers"]
        home = value(runtime, "VOLUME")
        assert main["args"][-1] == f"{home}/part"
        understood(["scaffpd", *main["args"]])
        mounted = {mount["mountPath"] for mount in main["volumeMounts"]}
        assert mounted == {value(runtime, "VOLUME"), "/tmp"}


def test_a_part_is_unpacked_all_of_it_or_not_at_all(tmp_path):
    manifests = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    (home := tmp_path / "home").mkdir()
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "key").write_bytes(os.urandom(100_000))
    subprocess.run(["tar", "-C", tmp_path, "-czf", tmp_path / "part.tgz", "kit"], check=True)
    whole = (tmp_path / "part.tgz").read_bytes()
    commands = {
        one["spec"]["template"]["spec"]["initContainers"][0]["command"][-1] for one in manifests[1:]
    }
    (command,) = commands
    command = command.replace("/var/lib/scaffpd", str(home)).replace(
        "/part/part.tgz", str(tmp_path / "part.tgz")
    )
    for content, code, there in ((whole[:50_000], 2, []), (whole, 0, ["part"]), (b"", 0, ["part"])):
        (tmp_path / "part.tgz").write_bytes(content)
        done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
        assert (done.returncode, [file.name for file in home.iterdir() if file.name != "new"]) == (
            code,
            there,
        )
    assert (home / "part" / "kit" / "key").read_bytes() == (tmp_path / "kit" / "key").read_bytes()


def test_the_pages_commands_exist():
    for code in blocks(PAGE, "sh"):
        for line in code.splitlines():
            words = shlex.split(line.rstrip("& "))
            if "scaffpd" in words and words[0] != "docker":
                understood(words[words.index("scaffpd") :])
            for file in (word for word in words if word.startswith("deploy/")):
                assert (ROOT / file).is_file()
    compose = [line for line in blocks(PAGE, "sh")[0].splitlines() if "compose" in line]
    for line in (line for line in compose if " run " in line):
        assert line.split()[-1] in COMPOSE["services"]
        assert (
            line.split()[line.split().index("--profile") + 1]
            in COMPOSE["services"][line.split()[-1]]["profiles"]
        )


# --- the page, played


def converged(run):
    outcome = json.loads((run / "outcome.json").read_text())
    assert outcome["status"] == "converged"
    assert 0 <= outcome["certificate"] <= 1e-6


class Proxy(socketserver.ThreadingTCPServer):
    """Knows CONNECT, and remembers to where."""

    daemon_threads = True
    asked = ()

    def handle_error(self, request, client_address):
        """A connection that was cut is no news."""


class Tunnel(socketserver.BaseRequestHandler):
    def handle(self):
        asked = self.request.recv(65536).decode("latin-1").split()
        self.server.asked += (" ".join(asked[:2]),)
        host, _, port = asked[1].rpartition(":")
        with socket.create_connection((host, int(port))) as other:
            self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            ends = {self.request: other, other: self.request}
            while True:
                for one in select.select(list(ends), [], [])[0]:
                    content = one.recv(65536)
                    if not content:
                        return
                    ends[one].sendall(content)


@pytest.fixture
def proxy():
    with Proxy(("127.0.0.1", 0), Tunnel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.deploy
def test_the_commands_for_plain_services_train_a_model_and_leave_no_process(tmp_path, proxy):
    """As they stand on the page, with ports that are free and this very package; and through a
    proxy.
    """
    code = blocks(PAGE, "sh")[1]
    port = free_port()
    (tmp_path / "deploy").symlink_to(DEPLOY)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scaffpd").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m scaffpd "$@"\n'
    )
    (tmp_path / "bin" / "scaffpd").chmod(0o755)
    (tmp_path / "page.sh").write_text(f"{code}\nwait\n")
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SCAFFPD_PLAYED": str(tmp_path),
        "SERVER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "https_proxy": f"http://127.0.0.1:{proxy.server_address[1]}",
    }
    with (tmp_path / "said").open("w") as said:
        play = {"cwd": tmp_path, "env": environment, "stdout": said, "stderr": subprocess.STDOUT}
        done = subprocess.run(["bash", "-e", "page.sh"], timeout=900, check=False, **play)
    words = (tmp_path / "said").read_text()
    assert done.returncode == 0, words[-3000:]
    converged(tmp_path / "parts" / "coordinator" / "run")
    assert (tmp_path / "parts" / "coordinator" / "run" / "report.html").is_file()
    assert "converged, last heard of" in words
    assert "No line was changed" in " ".join(words.split())
    assert proxy.asked.count(f"CONNECT localhost:{port}") >= len(PARTS) - 1
    mark = f"SCAFFPD_PLAYED={tmp_path}".encode()
    assert [p.name for p in Path("/proc").glob("[0-9]*") if mark in _environment(p)] == []


def _environment(process):
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.deploy
@pytest.mark.skipif(
    "SCAFFPD_COMPOSE" not in os.environ, reason="SCAFFPD_COMPOSE names no `docker compose`"
)
def test_the_commands_for_containers_train_a_model(tmp_path):
    """With an image that is there already, SCAFFPD_IMAGE; the page's first line, the build, needs
    an index.
    """
    compose = os.environ["SCAFFPD_COMPOSE"]
    there = str(tmp_path / "run")
    for written in (line for line in blocks(PAGE, "sh")[0].splitlines() if "compose" in line):
        line = written.replace("docker compose", compose).replace("run run", f"run {there}")
        if " cp " in line and "podman" in compose:  # podman-compose has no cp
            line = f"podman cp scaffpd_coordinator_1:/var/lib/scaffpd/run {there}"
        line += " -v" if line.endswith(" down") else ""
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, timeout=900, check=False, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, line
    converged(tmp_path / "run")
