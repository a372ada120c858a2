"""`scaffpd doctor`: what is installed, and whether training works here; `scaffpd bundle`: all of it for elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from email.message import Message
from email.parser import Parser
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

import scaffpd
from scaffpd.cli.screens import facts, say
from scaffpd.cli.typer_ext import FAILED, AsJson, checked, listed, option, tell
from scaffpd.errors import InputError
from scaffpd.files import make_folder, write_file
from scaffpd.machine import PACKAGES, environment
from scaffpd.numbers import format_bytes, several
from scaffpd.run import read_text

EXTRAS = {  # of pyproject.toml: what each is for, and the packages that tell that it is there
    "report": ("report.html, and its pictures", ("jinja2", "vl-convert-python")),
    "sklearn": ("estimators, and three embedded data sets", ("scikit-learn",)),
    "pandas": ("results as data frames", ("pandas",)),
    "excel": ("tables from Excel files", ("openpyxl",)),
    "images": ("data sets of images, and pictures of partitions", ("matplotlib", "pillow")),
    "flare": ("training across organisations on NVIDIA FLARE", ("nvflare",)),
    "flower": ("training across organisations on Flower", ("flwr", "psutil")),
    "privacy": ("secure sums and differential privacy", ("cryptography", "dp-accounting")),
    "tensorboard": ("curves in TensorBoard", ("tensorboard",)),
    "mlflow": ("runs in MLflow", (("mlflow-skinny", "mlflow"),)),
}
# the solution of the self-check, known by hand
X = 1.0
VALUE = 0.5
WEIGHTS = (2 / 3, 1 / 3)
TOL = 1e-8


def doctor(as_json: AsJson = False) -> None:
    """Check the installation, and whether training works on this machine.

    A self-check trains a small problem with a proof and compares it with the solution that is known by hand.

    Exit code 0 where the core works, 1 where it does not; what is only optional never fails.

    Examples:
        scaffpd doctor
        scaffpd doctor --json
    """
    found = findings()
    tell(found, _show, as_json)
    if not found["works"]:
        raise typer.Exit(FAILED)


def findings() -> dict[str, Any]:
    """Collect what there is to say, ready for JSON."""
    checked = self_check()
    folder = os.environ.get("SCAFFPD_DATA") or None
    return {
        "works": all(outcome == "ok" for outcome in checked.values()),
        "self_check": checked,
        "environment": environment(),
        "extras": {
            name: {"for": use, "installed": _installed(need)}
            for name, (use, need) in EXTRAS.items()
        },
        "terminal": {
            "terminal": bool(sys.stdout is not None and sys.stdout.isatty()),
            "encoding": getattr(sys.stdout, "encoding", None),
            "unicode": _unicode(),
        },
        "data": {"SCAFFPD_DATA": folder, "there": bool(folder and os.path.isdir(folder))},
    }


def self_check() -> dict[str, str]:
    r"""Solve a problem that can be solved by hand; return, by method, "ok" or what is wrong.

    Two clients with f_1(x) = x²/2 and f_2(x) = (2x − 3)²/2. The worst of the two is smallest where they are equal and
    their slopes cancel: x = 1, both losses 1/2, λ = (2/3, 1/3).
    """
    try:
        from scaffpd.algorithms import ScaffPD, fair
        from scaffpd.objectives import Agnostic
    except Exception as error:  # NumPy, PyTorch or one of ours cannot even be loaded
        return {"loading": f"{type(error).__name__}: {error}"}
    found = {}
    for name, make in (("subspace saddle", fair), ("Scaff-PD", ScaffPD)):
        try:
            found[name] = _difference(make(Agnostic())) or "ok"
        except Exception as error:  # this is where whatever is broken has to be said
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _difference(algorithm: Any) -> str:
    """Return what is not as it should be; an empty text where all is well."""
    import numpy as np

    from scaffpd.models import Linear
    from scaffpd.training.cohort import Cohort
    from scaffpd.training.loop import train

    clients = [(np.array([[1.0]]), np.array([0.0])), (np.array([[2.0]]), np.array([3.0]))]
    result = train(algorithm, Cohort(clients, Linear("squared")), rounds=1000, tol=TOL)
    x = float(result.x[0])
    gap = max(x**2 / 2, (2 * x - 3) ** 2 / 2) - VALUE
    if result.certificate is None or not result.certificate <= TOL:
        return f"no certified gap of {TOL:g}: {result.message}"
    if gap > result.certificate:
        return f"the certificate says {result.certificate:.1e}, and the optimum is {gap:.1e} away"
    if abs(x - X) > 1e-4 or not np.allclose(result.weights, WEIGHTS, atol=1e-3):
        return f"x = {x:.6f} and λ = {np.round(result.weights, 4).tolist()}, expected {X:g} and (2/3, 1/3)"
    return ""


def _installed(needed: tuple[str | tuple[str, ...], ...]) -> bool:
    from scaffpd.machine import version

    options = ((name,) if isinstance(name, str) else name for name in needed)
    return all(any(version(name) is not None for name in any_of) for any_of in options)


def _unicode() -> bool:
    try:
        "ρ λ ≤ █".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _show(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    right = Text("ok: certified, and at the optimum known by hand", "green")
    extras: dict[str, str | Text] = {
        name: f"installed: {extra['for']}"
        if extra["installed"]
        else Text(f'not installed: {extra["for"]} (pip install "scaffpd[{name}]")', "dim")
        for name, extra in found["extras"].items()
    }
    checks = {
        name: right if said == "ok" else Text(said, "red")
        for name, said in found["self_check"].items()
    }
    parts: dict[str, Mapping[str, str | Text]] = {"This machine": _machine(found), "Extras": extras}
    for title, lines in (parts | {"Self-check": checks}).items():
        console.print(title, style="bold")
        facts(console, lines)
        console.print()
    good = "All is well: training works on this machine."
    bad = "Training does not work on this machine: see the self-check above."
    console.print(
        good if found["works"] else bad, style="bold green" if found["works"] else "bold red"
    )


def _machine(found: dict[str, Any]) -> dict[str, str | Text]:
    about = found["environment"]
    screen = found["terminal"]
    data = found["data"]
    own = [f"{name} {about[name]}" for name in PACKAGES if name in about]
    gpus = [f"{gpu['name']}, {_size(gpu['memory'])}" for gpu in about["gpus"]]
    said = f"{screen['encoding']}{'' if screen['unicode'] else ': Greek letters become ?; set PYTHONIOENCODING=utf-8'}"
    folder = (
        data["SCAFFPD_DATA"]
        or "not named (SCAFFPD_DATA); only images and Adult need one: see scaffpd data"
    )
    missing = data["SCAFFPD_DATA"] is not None and not data["there"]
    return {
        "scaffpd": f"{about['scaffpd']} on Python {about['python']}",
        "packages": ", ".join(own),
        "system": about["platform"],
        "processor": f"cores: {about['cores']}; threads in PyTorch: {about['threads'] or 'unknown'}",
        "memory": _size(about["memory"]) if about["memory"] else "unknown",
        "GPU": "; ".join(gpus) or "none; none is needed",
        "terminal": Text(said, "" if screen["unicode"] else "yellow"),
        "data folder": Text(
            f"{folder}{' is not there' if missing else ''}", "yellow" if missing else ""
        ),
    }


def _size(number: int) -> str:
    return f"{number / 1e9:.3g} GB"


# --- a bundle for machines without internet


PINS = "requirements.txt"
SUMS = "SHA256SUMS"
BILL = "sbom.cdx.json"
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)(?P<versions>.*)")


class Wheel(NamedTuple):
    """A file of the bundle: its hash, and what it says of itself."""

    file: Path
    sha256: str
    about: Message

    @property
    def name(self) -> str:
        """Its name, as indexes compare names."""
        return _normal(self.about["Name"])

    @property
    def url(self) -> str:
        """Its package URL."""
        return f"pkg:pypi/{self.name}@{self.about['Version'].replace('+', '%2B')}"


def bundle(
    folder: Annotated[Path, typer.Argument(help="The bundle: a new folder.")] = Path(
        "scaffpd-bundle"
    ),
    extras: Annotated[
        str, option("Extras to bundle, joined by commas.", (*EXTRAS, "all"), several=True)
    ] = "flare,privacy,report",
    source: Annotated[
        str | None, typer.Option(help="A clone, or a requirement; left out, this clone or version.")
    ] = None,
    constraints: Annotated[
        Path | None,
        typer.Option(help="Pinned versions; left out, those of the clone.", show_default=False),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check a bundle, hash by hash; write nothing.")
    ] = False,
    noted: Annotated[
        str, typer.Option(help="The fingerprint that the bundle must have, with --verify.")
    ] = "",
) -> None:
    """Collect wheels, hashes and an SBOM for machines without internet; or check such a folder.

    Indexes and proxies are pip's own settings. The bundle is for machines with the same system and Python version.

    Examples:
        scaffpd bundle scaffpd-bundle --extras flare,privacy
        scaffpd bundle --verify scaffpd-bundle
    """
    console = Console(highlight=False)
    if not verify:
        if source is None:
            for name in listed(extras):
                checked("extra", name, (*EXTRAS, "all"))
        say(console, "pip collects and builds wheels; this may take minutes.")
        clone = Path(scaffpd.__file__).resolve().parents[2]
        here = (
            str(clone)
            if (clone / "pyproject.toml").is_file()
            else f"scaffpd=={scaffpd.__version__}"
        )
        write_bundle(folder, source or here, listed(extras), constraints)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    found = verified(folder)
    if noted and noted != found:
        raise InputError(
            "bundle-fingerprint-noted",
            f"The bundle's fingerprint is {found}, not the one that was noted down.",
        )
    wheels = several(len(list((folder / "wheels").iterdir())), "wheel")
    say(console, f"{folder} has {wheels}, {format_bytes(size)}, and every file is as {SUMS} says.")
    say(console, "Note down its fingerprint, and send it by another way than the bundle:")
    typer.echo(found)
    say(console, f"At the site: sh {folder.name}/install.sh VENV")


def write_bundle(
    folder: Path, source: str, extras: Sequence[str], constraints: Path | None = None
) -> None:
    """Write the folder, all of it or nothing: wheels, pins with hashes, a bill of materials, sums and a script."""
    if folder.exists():
        raise InputError(
            "folder-already-name", f"The folder {str(folder)!r} is there already: name another one."
        )
    clone = Path(source)
    named = REQUIREMENT.fullmatch(source)
    wanted = f"[{','.join(extras)}]" if extras else ""
    if (clone / "pyproject.toml").is_file():
        root = tomllib.loads((clone / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "name"
        ]
        wanted = f"{clone.resolve()}{wanted}"
        pins = constraints or next(
            (file for file in [clone / "constraints.txt"] if file.is_file()), None
        )
    elif named is not None:
        root = named["name"]
        wanted = f"{named['name']}{wanted}{named['versions']}"
        pins = constraints
    else:
        raise InputError(
            "source-clone-requirement",
            f"--source needs a clone or a requirement such as scaffpd==0.2.0, got {source!r}.",
        )
    with tempfile.TemporaryDirectory(
        dir=make_folder(folder.resolve().parent), prefix=".bundle-"
    ) as work:
        made = Path(work, "bundle")
        options = [] if pins is None else ["--constraint", str(pins)]
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--wheel-dir",
            str(made / "wheels"),
        ]
        if subprocess.run(
            [*command, *options, wanted], stdin=subprocess.DEVNULL, check=False
        ).returncode:
            raise InputError(
                "pip-collect-wheels",
                "pip could not collect the wheels, and has said why. It finds indexes and proxies by its "
                "own settings, such as PIP_INDEX_URL and HTTPS_PROXY.",
            )
        wheels = [_wheel(file) for file in sorted((made / "wheels").iterdir())]
        where = f"# for Python {sysconfig.get_python_version()} on {sysconfig.get_platform()}\n"
        pinned = (f"{w.name}=={w.about['Version']} --hash=sha256:{w.sha256}\n" for w in wheels)
        write_file(made / PINS, where + "".join(pinned))
        write_file(
            made / BILL, json.dumps(bill_of_materials(wheels, _normal(root)), indent=1) + "\n"
        )
        write_file(
            made / "install.sh",
            files("scaffpd.cli").joinpath("install.sh").read_text(encoding="utf-8"),
        )
        write_file(
            made / SUMS, "".join(f"{_sha256(made / name)}  {name}\n" for name in _files(made))
        )
        made.rename(folder)


def bill_of_materials(wheels: Sequence[Wheel], root: str) -> dict[str, Any]:
    """Return a CycloneDX 1.6 document; the same wheels make the same document."""
    known = {wheel.name: wheel for wheel in wheels}
    parts = {
        wheel.name: {
            "type": "library",
            "bom-ref": wheel.url,
            "name": wheel.about["Name"],
            "version": wheel.about["Version"],
            "purl": wheel.url,
            "hashes": [{"alg": "SHA-256", "content": wheel.sha256}],
            **_licence(wheel.about),
        }
        for wheel in wheels
    }
    needs = {}
    for wheel in wheels:
        named = (REQUIREMENT.match(line) for line in wheel.about.get_all("Requires-Dist", []))
        others = {_normal(match["name"]) for match in named if match is not None} & known.keys() - {
            wheel.name
        }
        needs[wheel.url] = sorted(known[name].url for name in others)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, ' '.join(w.sha256 for w in wheels))}",
        "metadata": {"component": parts[root] | {"type": "application"}},
        "components": [part for name, part in parts.items() if name != root],
        "dependencies": [{"ref": url, "dependsOn": on} for url, on in needs.items()],
    }


def verified(folder: Path) -> str:
    """Return the fingerprint of a bundle whose files are all there, unchanged and alone; refuse any other."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        raise InputError(
            "bundle-read", f"{str(folder)!r} is no bundle: it has no {SUMS} that can be read."
        ) from None
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = set(_files(folder))
    wheels = {digest for name, digest in sums.items() if name.startswith("wheels/")}
    pins = [line for line in read_text(folder / PINS).splitlines() if "--hash=" in line]
    pinned = {line.rpartition(":")[2]: line.partition("==")[0] for line in pins}
    if not pinned:
        raise InputError(
            "bundle-pins-nothing", f"{str(folder)!r} is no bundle: its {PINS} pins nothing."
        )
    if links := sorted(
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_symlink()
    ):
        raise InputError("install-link", f"Do not install {str(folder)!r}: {links[0]} is a link.")
    found = {
        "is missing": sorted(sums.keys() - there),
        f"is not in {SUMS}": sorted(there - sums.keys()),
        "was changed": sorted(
            name for name in there & sums.keys() if _sha256(folder / name) != sums[name]
        ),
        f"is not what {PINS} pins": sorted(
            n for n, digest in sums.items() if n.startswith("wheels/") and digest not in pinned
        ),
        f"is pinned by {PINS}, and has no wheel": sorted(
            pinned[digest] for digest in pinned.keys() - wheels
        ),
    }
    for what, names in found.items():
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise InputError(
                "install-verified", f"Do not install {str(folder)!r}: {names[0]}{more} {what}."
            )
    return _sha256(folder / SUMS)


def _wheel(file: Path) -> Wheel:
    with zipfile.ZipFile(file) as content:
        name = next(
            name for name in content.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
        )
        return Wheel(
            file, _sha256(file), Parser().parsestr(content.read(name).decode("utf-8", "replace"))
        )


def _licence(about: Message) -> dict[str, Any]:
    if expression := about["License-Expression"]:
        return {"licenses": [{"expression": expression}]}
    named = [
        line.rpartition(" :: ")[2]
        for line in about.get_all("Classifier", [])
        if line.startswith("License ::")
    ]
    own = (about["License"] or "").strip()
    words = named or ([own] if own and "\n" not in own else [])
    return {"licenses": [{"license": {"name": name}} for name in words]} if words else {}


def _files(folder: Path) -> list[str]:
    files = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir())
    return sorted(name for name in files if name != SUMS)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
