"""`scaffpd bundle`: installs without a network, and a byte that was changed shows."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scaffpd import cli

ROOT = Path(__file__).parents[2]
TINY = """\
Metadata-Version: 2.1
Name: {name}
Version: {version}
{more}
"""
NEEDS = (
    "License-Expression: MIT\nProvides-Extra: more\nRequires-Dist: Tiny.Needed>=1\n"
    'Requires-Dist: tiny-more; extra == "more"\nRequires-Dist: tiny-other; extra == "other"'
)
PACKAGES = {  # what an index has: two versions of one, names that are written differently, all ways to name a licence
    ("tiny", "1.0"): NEEDS,
    (
        "Tiny_Needed",
        "1.5+cpu",
    ): "Classifier: License :: OSI Approved :: BSD License\nRequires-Dist: tiny; extra == 'x'",
    ("Tiny_Needed", "2.0"): "",
    ("tiny-more", "3"): "License: Apache 2.0",
    ("tiny-other", "4"): "",
}


def write_wheel(folder, name, version, more):
    plain = name.replace("-", "_")
    about = {"METADATA": TINY.format(name=name, version=version, more=more).replace("\n\n", "\n")}
    about["WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    home = f"{plain}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{plain}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{plain.lower()}.py", f"VERSION = {version!r}\n")
        for part, text in about.items():
            file.writestr(f"{home}/{part}", text)
        file.writestr(
            f"{home}/RECORD", "".join(f"{home}/{part},,\n" for part in (*about, "RECORD"))
        )


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    for (name, version), more in PACKAGES.items():
        write_wheel(folder, name, version, more)
    return folder


@pytest.fixture(scope="module")
def made(index, tmp_path_factory):
    """A bundle of tiny[more] with a pin, made by the command without any network."""
    place = tmp_path_factory.mktemp("bundles")
    (place / "pins.txt").write_text("tiny-needed==1.5\n")
    words = [
        "bundle",
        "b",
        "--source",
        "tiny==1.0",
        "--extras",
        "more",
        "--constraints",
        "pins.txt",
    ]
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}
    run = [sys.executable, "-m", "scaffpd", *words]
    done = subprocess.run(
        run, cwd=place, env=os.environ | offline, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return place / "b", done.stdout


@pytest.fixture
def bundle(made, tmp_path):
    """A copy to be spoilt."""
    return Path(shutil.copytree(made[0], tmp_path / "copy"))


def install(bundle, target):
    """Install as install.sh does, without a virtual environment of its own: here all others would be looked through."""
    options = [
        "--no-compile",
        "--no-warn-conflicts",
        "--no-index",
        "--find-links",
        bundle / "wheels",
        "--require-hashes",
        "-r",
        bundle / "requirements.txt",
    ]
    command = [sys.executable, "-m", "pip", "--isolated", "install", *options, "--target", target]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_holds_what_was_asked_for_with_the_pinned_versions_and_installs_offline(made, tmp_path):
    bundle, said = made
    wheels = sorted((bundle / "wheels").iterdir())
    assert [wheel.name.split("-py3")[0] for wheel in wheels] == [
        "Tiny_Needed-1.5+cpu",
        "tiny-1.0",
        "tiny_more-3",
    ]
    pins = (bundle / "requirements.txt").read_text()
    for wheel in wheels:
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() in pins
    done = install(bundle, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "tiny_needed.py").read_text() == "VERSION = '1.5+cpu'\n"
    assert not (tmp_path / "site" / "tiny_other.py").exists()
    assert hashlib.sha256((bundle / "SHA256SUMS").read_bytes()).hexdigest() in said
    if shutil.which("sha256sum"):
        subprocess.run(
            ["sha256sum", "--check", "--strict", "SHA256SUMS"],
            cwd=bundle,
            check=True,
            capture_output=True,
        )


def invalid(text):
    """What CycloneDX says against a bill of materials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            sys.modules, "rfc3987_syntax", None
        )  # takes two seconds, for addresses, and a bill has none
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator

    assert "://" not in text
    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


def test_the_bill_of_materials_is_valid_and_complete(made):
    text = (made[0] / "sbom.cdx.json").read_text()
    assert invalid(text) is None
    assert invalid(text.replace("SHA-256", "SHA-257")) is not None
    bill = json.loads(text)
    parts = {part["purl"]: part for part in (bill["metadata"]["component"], *bill["components"])}
    assert set(parts) == {
        "pkg:pypi/tiny@1.0",
        "pkg:pypi/tiny-needed@1.5%2Bcpu",
        "pkg:pypi/tiny-more@3",
    }
    hashes = {
        hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (made[0] / "wheels").iterdir()
    }
    assert {part["hashes"][0]["content"] for part in parts.values()} == hashes
    licences = [json.dumps(part.get("licenses")) for part in parts.values()]
    assert all(
        any(name in found for found in licences) for name in ("MIT", "BSD License", "Apache 2.0")
    )
    on = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert on["pkg:pypi/tiny@1.0"] == ["pkg:pypi/tiny-more@3", "pkg:pypi/tiny-needed@1.5%2Bcpu"]


def spoil_wheel(bundle):
    with next((bundle / "wheels").glob("tiny_more*")).open("ab") as file:
        file.write(b"\0")
    return "was changed"


def swap_wheel_and_sums(bundle):
    """Somebody who changes the sums as well has still to change the pins."""
    wheel = next((bundle / "wheels").glob("tiny_more*"))
    sums = bundle / "SHA256SUMS"
    before = hashlib.sha256(wheel.read_bytes()).hexdigest()
    spoil_wheel(bundle)
    sums.write_text(
        sums.read_text().replace(before, hashlib.sha256(wheel.read_bytes()).hexdigest())
    )
    return "is not what requirements.txt pins"


def remove_wheel(bundle):
    next((bundle / "wheels").glob("tiny_more*")).unlink()
    return "is missing"


def add_wheel(bundle):
    (bundle / "wheels" / "evil-1-py3-none-any.whl").write_bytes(b"PK")
    return "is not in SHA256SUMS"


def change_bill(bundle):
    (bundle / "sbom.cdx.json").write_text("{}")
    return "was changed"


def empty(bundle):
    (bundle / "SHA256SUMS").unlink()
    return "is no bundle"


def link_wheel(bundle):
    wheel = next((bundle / "wheels").glob("tiny_more*"))
    wheel.rename(bundle.parent / "elsewhere")
    wheel.symlink_to(bundle.parent / "elsewhere")
    return "is a link"


def forget(bundle, *words):
    sums = bundle / "SHA256SUMS"
    lines = [
        line for line in sums.read_text().splitlines() if not any(word in line for word in words)
    ]
    sums.write_text("".join(f"{line}\n" for line in lines))


def forget_wheel(bundle):
    remove_wheel(bundle)
    forget(bundle, "tiny_more")
    return "tiny-more is pinned by requirements.txt, and has no wheel"


def forget_all_wheels(bundle):
    shutil.rmtree(bundle / "wheels")
    (bundle / "requirements.txt").unlink()
    forget(bundle, "wheels/", "requirements.txt")
    return "pins nothing"


SPOILT = [spoil_wheel, swap_wheel_and_sums, remove_wheel, add_wheel, change_bill, empty]


@pytest.mark.parametrize("spoil", [*SPOILT, link_wheel, forget_wheel, forget_all_wheels])
def test_whatever_is_not_as_it_was_made_shows(spoil, bundle, capsys):
    assert cli.run(["bundle", "--verify", str(bundle)]) == 0
    words = spoil(bundle)
    assert cli.run(["bundle", "--verify", str(bundle)]) == 2
    assert words in capsys.readouterr().err


def test_pip_refuses_a_wheel_that_was_changed(bundle, tmp_path):
    spoil_wheel(bundle)
    done = install(bundle, tmp_path / "site")
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()


def test_the_fingerprint_tells_one_bundle_from_another(bundle, capsys):
    own = hashlib.sha256((bundle / "SHA256SUMS").read_bytes()).hexdigest()
    assert cli.run(["bundle", "--verify", str(bundle), "--noted", own]) == 0
    assert cli.run(["bundle", "--verify", str(bundle), "--noted", "0" * 64]) == 2
    assert "not the one that was noted down" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--extras", "flair"], "flare"),
        (["--source", "./nowhere"], "needs a clone or a requirement"),
        (["--source", "tiny==7"], "pip could not collect"),
    ],
)
def test_what_cannot_be_bundled_is_refused_and_leaves_nothing(
    words, sentence, index, tmp_path, monkeypatch, capfd
):
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(index),
        "CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert cli.run(["bundle", str(tmp_path / "b"), "--extras", "", *words]) == 2
    assert sentence in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(bundle, capsys):
    before = sorted(bundle.rglob("*"))
    assert cli.run(["bundle", str(bundle), "--source", "tiny"]) == 2
    assert "there already" in capsys.readouterr().err
    assert sorted(bundle.rglob("*")) == before


@pytest.mark.long
def test_the_package_itself_installs_from_its_bundle_alone_and_trains(tmp_path):
    """Needs an index, as any first installation does; the second half has none."""
    bundle = tmp_path / "bundle"
    assert cli.run(["bundle", str(bundle), "--source", str(ROOT), "--extras", "flare,privacy"]) == 0
    assert invalid((bundle / "sbom.cdx.json").read_text()) is None
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
    }
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    } | nowhere
    python = {"PYTHON": sys.executable}
    done = subprocess.run(
        ["sh", bundle / "install.sh", "v"], cwd=tmp_path, env=plain | python, check=False
    )
    assert done.returncode == 0
    scaffpd = tmp_path / "v" / "bin" / "scaffpd"
    assert subprocess.run([scaffpd, "doctor"], env=plain, cwd=tmp_path, check=False).returncode == 0
    assert (
        subprocess.run(
            [scaffpd, "bundle", "--verify", bundle], env=plain, cwd=tmp_path, check=False
        ).returncode
        == 0
    )
    run = [scaffpd, "train", "hospitals", "--quiet", "--splits", "0"]
    assert subprocess.run(run, env=plain, cwd=tmp_path, check=False).returncode == 0
