"""FLARE for real: the processes that the documentation starts, mutual TLS, and what is killed."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise

import numpy as np
import psutil
import pytest

from cases.silos import entries, federation, in_one_process, model_of, patients_who_die
from faults import FAULTS, SLOWLY, Parts, good, play
from scaffpd.deploy.flare.serving import address
from scaffpd.deploy.local import silo_files
from scaffpd.settings.federation import FederationFile

pytest.importorskip("nvflare", reason="nvflare is an extra: pip install 'scaffpd[flare]'")

pytestmark = pytest.mark.deploy
SHORT = ("site killed and restarted", "server killed")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    found = Parts(tmp_path_factory.mktemp("faults") / "federation")
    try:
        yield found
    finally:
        found.stop()
    assert not [process for name in ("run", *found.places) for process in found.processes(name)]


@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in FAULTS],
)
def test_no_fault_wedges_a_run_or_changes_its_model(parts, name):
    found = play(name, parts)
    assert good(found), found
    assert all("va" in said for said in found["said"]) or "site" not in name


def test_strangers_are_refused(parts):
    """Nobody gets to talk to the server without a certificate of this federation."""
    parts.ensure()
    parts.write()
    parts.start("run")
    port = address(parts.home / "kit")[1]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            plain = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except OSError:
            time.sleep(0.5)
    root = parts.home / "va" / "kit" / "startup" / "rootCA.pem"
    context = ssl.create_default_context(cafile=str(root))
    context.set_alpn_protocols(["h2"])
    with plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as stream:
                stream.settimeout(5)
                stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                assert stream.recv(1) == b""
        except (ssl.SSLError, ConnectionError):
            pass
    parts.kill("run")


def test_deploy_local_leaves_no_process_behind(tmp_path):
    """It is the same processes: those of `silo start` and `deploy run`, without torch in the
    former.
    """
    folder = tmp_path / "here"
    command = [sys.executable, "-m", "scaffpd", "deploy", "local", str(folder)]
    mapped = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as local:
        while local.poll() is None:
            for process in psutil.Process(local.pid).children():
                if _words(process)[-3:-1] == ["silo", "start"]:
                    with suppress(psutil.Error):  # it may end meanwhile
                        mapped += " ".join(one.path for one in process.memory_maps())
            time.sleep(2.0)
        said = local.stdout.read()
    assert local.returncode == 0, said
    assert "libtorch" not in mapped
    assert mapped
    file = FederationFile.read(folder / "federation.toml")
    wanted = in_one_process(file.path, silo_files(file))
    assert 0 <= wanted.certificate <= 1e-6
    np.testing.assert_allclose(model_of(file.path), wanted.x, rtol=0, atol=1e-8)
    assert not [one for one in psutil.process_iter() if str(folder) in " ".join(_words(one))]


def test_times_to_an_event_on_flare(tmp_path):
    """Four silos train Cox's model in processes of their own, to the answer of this process."""
    path, places = patients_who_die(tmp_path / "here")
    command = [sys.executable, "-m", "scaffpd", "deploy", "local", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    wanted = in_one_process(path, places)
    assert 0 <= wanted.certificate <= 1e-6
    np.testing.assert_allclose(model_of(path), wanted.x, rtol=0, atol=1e-8)


def test_two_federations_over_the_same_tables_at_once(tmp_path):
    """Two coordinators, two servers and two silos a table: one run waits, and both end right."""

    def write(folder, tables=None):
        path, places = federation(folder, 3, SLOWLY, granted=False)
        for name, place in places.items():
            if tables is not None:
                table = place.parent / "patients.csv"
                table.unlink()
                table.symlink_to(tables[name].parent / table.name)
                place.with_name("identity.key").unlink()
        return path, places

    one = Parts(tmp_path / "one", write=write)
    two = Parts(tmp_path / "two", write=lambda folder: write(folder, one.places))
    try:
        folders = [parts.write(60.0) for parts in (one, two)]
        for parts in (one, two):
            parts.ensure()
        started = [parts.start("run") for parts in (one, two)]
        assert [run.wait(110) for run in started] == [0, 0], (one.said("run"), two.said("run"))
    finally:
        one.stop()
        two.stop()
    said = [event.sentence for folder in folders for event in folder.entries()[1]]
    assert any("Another run uses this silo's rows" in sentence for sentence in said)
    for place in one.places.values():
        runs = [line["run"] for line in entries(place)]
        assert len(set(runs)) == 2
        assert sum(a != b for a, b in pairwise(runs)) == 1  # one after the other
    assert one.right()
    assert two.right()


def _words(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []
