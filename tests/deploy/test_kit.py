"""A startup kit is data from outside: what a site takes from it, and what it refuses."""

from __future__ import annotations

import json
import os

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

pytest.importorskip("nvflare", reason="nvflare is an extra: pip install 'scaffpd[flare]'")

from cases.kits import booby_trap, new_key, secret, signed, write_kit, write_target
from cases.refusals import refuses
from scaffpd.deploy.flare.kit import LARGEST, SiteKit
from scaffpd.deploy.flare.serving import checked_kit, served, trouble
from scaffpd.deploy.flare.workspace import (
    SITE_CLASSES,
    private_folder,
    write_workspace,
)
from scaffpd.files import lock_folder


def test_a_site_takes_four_things_and_writes_the_rest_itself(tmp_path):
    kit = write_kit(tmp_path / "kit")
    booby_trap(kit, tmp_path)
    with (kit / "startup" / "client.crt").open("ab") as more:
        more.write(b"\nnot a certificate\n")
    own = SiteKit.read(kit, "va")
    assert (own.host, own.port, own.federation) == ("localhost", 8002, "hospitals")
    folder = tmp_path / "engine" / "workspace"
    private_folder(folder.parent)
    (folder / "local" / "custom").mkdir(parents=True)  # of somebody's who packed the silo's folder
    write_workspace(folder, "va", own)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {
        *(f"local/{name}.json" for name in ("resources", "authorization", "log_config")),
        *(f"startup/{name}" for name in ("fed_client.json", "client.crt", "client.key")),
        "startup/rootCA.pem",
    }
    assert not (folder / "local" / "custom").exists()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, folder.parent))
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / "startup").iterdir())
    texts = [path.read_text() for path in folder.rglob("*.*") if path.is_file()]
    assert not [text for text in texts if "Popen" in text or "not a certificate" in text]
    key = load_pem_private_key((folder / "startup" / "client.key").read_bytes(), None)
    written = x509.load_pem_x509_certificate((folder / "startup" / "client.crt").read_bytes())
    assert written == own.certificate
    assert key.public_key() == written.public_key()
    resources = json.loads((folder / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == list(SITE_CLASSES)
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["allow_log_streaming"] is False
    assert len(resources["components"]) == 3


def test_links_that_come_with_a_silos_folder_are_not_followed(tmp_path):
    write_kit(tmp_path / "kit")
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "workspace" / "kept").mkdir(parents=True)
    engine = tmp_path / "engine"
    engine.symlink_to(elsewhere)
    private_folder(engine)
    assert not engine.is_symlink()
    assert [path.name for path in (elsewhere / "workspace").iterdir()] == ["kept"]
    (engine / "lock").symlink_to(elsewhere / "workspace")
    (engine / "logs" / "va").mkdir(parents=True)
    (engine / "logs" / "va" / "log.txt").symlink_to(elsewhere / "log")
    private_folder(engine)
    assert {path.name for path in engine.rglob("*")} == {"logs", "va"}


def test_a_kit_for_another_silo_is_named_as_such(tmp_path):
    kit = write_kit(tmp_path / "kit", "west")
    with refuses("kit-of-another-silo") as caught, served(tmp_path / "silo.toml", "va"):
        pass
    assert "This is the kit of silo 'west'" in str(caught.value)
    assert not (tmp_path / "engine").exists()
    assert SiteKit.read(kit, "west").certificate


def only_the_server(kit):
    for old, new in (("client.crt", "server.crt"), ("fed_client.json", "fed_server.json")):
        (kit / "startup" / old).rename(kit / "startup" / new)


def another_key(kit):
    (kit / "startup" / "client.key").write_bytes(secret(new_key("another")))


def locked_key(kit):
    (kit / "startup" / "client.key").write_text("-----BEGIN PRIVATE KEY-----\nQQ==\n")


def foreign_root(kit):
    other = write_kit(kit.parent / "other", root="another root")
    (other / "startup" / "rootCA.pem").replace(kit / "startup" / "rootCA.pem")


def root_of_a_root(kit):
    signature = signed("hospitals", "hospitals", new_key("root"), new_key("another"))
    (kit / "startup" / "rootCA.pem").write_bytes(signature)


def two_certificates(kit):
    path = kit / "startup" / "client.crt"
    path.write_bytes(path.read_bytes() * 2)


def linked_key(kit):
    path = kit / "startup" / "client.key"
    path.rename(kit.parent / "somewhere.key")
    path.symlink_to("../../somewhere.key")


def linked_folder(kit):
    (kit / "startup").rename(kit.parent / "somewhere")
    (kit / "startup").symlink_to("../somewhere")


def a_pipe(kit):
    (kit / "startup" / "client.key").unlink()
    os.mkfifo(kit / "startup" / "client.key")


def too_large(kit):
    with (kit / "startup" / "fed_client.json").open("ab") as stream:
        stream.write(b" " * LARGEST)


def no_root(kit):
    (kit / "startup" / "rootCA.pem").unlink()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (only_the_server, "not-a-kit-for-silos"),
        (another_key, "kit-does-not-fit"),
        (locked_key, "kit-does-not-fit"),
        (foreign_root, "kit-does-not-fit"),
        (root_of_a_root, "kit-does-not-fit"),
        (two_certificates, "certificate-unreadable"),
        (linked_key, "kit-incomplete"),
        (linked_folder, "kit-incomplete"),
        (a_pipe, "kit-incomplete"),
        (no_root, "kit-incomplete"),
        (too_large, "kit-file-too-large"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path, change, code):
    change(write_kit(tmp_path / "kit"))
    with refuses(code), served(tmp_path / "silo.toml", "va"):
        pass
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"role": "project_admin"}, "not-a-kit-for-silos"),
        ({"name": "localhost"}, "not-a-kit-for-silos"),
        ({"of": "hospitals --set"}, "kit-does-not-fit"),
        ({"days": (-300, -1)}, "certificate-not-valid"),
        ({"days": (1, 300)}, "certificate-not-valid"),
    ],
)
def test_kits_that_are_not_a_silos_or_not_valid_now_are_refused(tmp_path, options, code):
    write_kit(tmp_path / "kit", **options)
    with refuses(code), served(tmp_path / "silo.toml", "va"):
        pass


@pytest.mark.parametrize(
    "target",
    [
        "localhost",
        "localhost:0",
        "localhost:65536",
        "localhost:8002 --set secure_train=false",
        "localhost:8002\n",
        "-m:1",
        "http://localhost:8002",
        "@localhost:8002",
        f"{'a' * 254}:8002",
        8002,
        ["localhost:8002"],
    ],
)
def test_an_address_is_a_host_and_a_port(tmp_path, target):
    kit = write_kit(tmp_path / "kit")
    write_target(kit, target)
    with refuses("kit-without-address"):
        SiteKit.read(kit, "va")


@pytest.mark.parametrize("text", ["", "[]", '{"servers": []}', "[" * 60_000, "\ud800"])
def test_an_address_that_cannot_be_read_is_no_traceback(tmp_path, text):
    kit = write_kit(tmp_path / "kit")
    (kit / "startup" / "fed_client.json").write_text(text, "utf-8", "surrogatepass")
    with refuses("kit-without-address"):
        SiteKit.read(kit, "va")


def test_a_site_is_run_once(tmp_path):
    write_kit(tmp_path / "kit")
    (tmp_path / "engine").mkdir()
    file = tmp_path / "silo.toml"
    with lock_folder(tmp_path / "engine", ""), refuses("locked"), served(file, "va"):
        pass


def test_the_same_kit_says_where_nobody_answers(tmp_path):
    kit = write_kit(tmp_path / "kit", port=1)
    assert checked_kit(tmp_path / "silo.toml") == kit
    assert "Nobody answers at localhost:1" in trouble(kit)
