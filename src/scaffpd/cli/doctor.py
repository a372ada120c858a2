"""`scaffpd doctor`: what is installed, and whether training works here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from scaffpd.cli.screens import facts
from scaffpd.cli.typer_ext import FAILED, AsJson, tell
from scaffpd.machine import PACKAGES, environment

EXTRAS = {  # of pyproject.toml: what each is for, and the packages that tell that it is there
    "report": ("report.html, and its pictures", ("jinja2", "vl-convert-python")),
    "sklearn": ("estimators, and three embedded data sets", ("scikit-learn",)),
    "pandas": ("results as data frames", ("pandas",)),
    "excel": ("tables from Excel files", ("openpyxl",)),
    "flare": ("training across organisations on NVIDIA FLARE", ("nvflare",)),
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
    folder = data["SCAFFPD_DATA"] or "not named (SCAFFPD_DATA); only Adult and the schools need one"
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
