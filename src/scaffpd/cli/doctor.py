"""`scaffpd doctor`: what is installed, what this machine has, and whether training works on it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from scaffpd.cli.screens import facts
from scaffpd.cli.typer_ext import FAILED, print_json

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
X, VALUE, WEIGHTS, TOL = 1.0, 0.5, (2 / 3, 1 / 3), 1e-8  # the solution of the self-check, known by hand


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON, and nothing else.")] = False,
) -> None:
    """What is installed, and whether training works on this machine.

    A self-check trains a small problem with a proof and compares it with the solution that is known by hand.

    Exit code 0 where the core works, 1 where it does not; what is only optional never fails.

    Examples:
        scaffpd doctor
        scaffpd doctor --json
    """
    found = findings()
    if as_json:
        print_json(found)
    else:
        _show(found)
    if not found["works"]:
        raise typer.Exit(FAILED)


def findings() -> dict[str, Any]:
    """All that there is to say, ready for JSON."""
    from scaffpd.system import environment

    checked, folder = self_check(), os.environ.get("SCAFFPD_DATA") or None
    return {
        "works": all(outcome == "ok" for outcome in checked.values()),
        "self_check": checked,
        "environment": environment(),
        "extras": {name: {"for": use, "installed": _installed(need)} for name, (use, need) in EXTRAS.items()},
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
    """What is not as it should be; nothing where all is well."""
    import numpy as np

    from scaffpd.cohort import Cohort
    from scaffpd.models import Linear
    from scaffpd.training import train

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
    from scaffpd.system import version

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
    for title, lines in (("This machine", _machine(found)), ("Extras", _extras(found)), ("Self-check", _check(found))):
        console.print(title, style="bold")
        facts(console, lines)
        console.print()
    good = "All is well: training works on this machine."
    bad = "Training does not work on this machine: see the self-check above."
    console.print(good if found["works"] else bad, style="bold green" if found["works"] else "bold red")


Lines = list[tuple[str, str, str]]


def _machine(found: dict[str, Any]) -> Lines:
    from scaffpd.system import PACKAGES

    about, screen, data = found["environment"], found["terminal"], found["data"]
    own = [f"{name} {about[name]}" for name in PACKAGES if name in about]
    gpus = [f"{gpu['name']}, {_size(gpu['memory'])}" for gpu in about["gpus"]]
    said = f"{screen['encoding']}{'' if screen['unicode'] else ': Greek letters become ?; set PYTHONIOENCODING=utf-8'}"
    folder = data["SCAFFPD_DATA"] or "not named (SCAFFPD_DATA); only images and Adult need one: see scaffpd data"
    missing = data["SCAFFPD_DATA"] is not None and not data["there"]
    return [
        ("scaffpd", f"{about['scaffpd']} on Python {about['python']}", ""),
        ("packages", ", ".join(own), ""),
        ("system", about["platform"], ""),
        ("processor", f"cores: {about['cores']}; threads in PyTorch: {about['threads'] or 'unknown'}", ""),
        ("memory", _size(about["memory"]) if about["memory"] else "unknown", ""),
        ("GPU", "; ".join(gpus) or "none; none is needed", ""),
        ("terminal", said, "" if screen["unicode"] else "yellow"),
        ("data folder", f"{folder}{' is not there' if missing else ''}", "yellow" if missing else ""),
    ]


def _extras(found: dict[str, Any]) -> Lines:
    return [
        (name, f"installed: {extra['for']}", "")
        if extra["installed"]
        else (name, f'not installed: {extra["for"]} (pip install "scaffpd[{name}]")', "dim")
        for name, extra in found["extras"].items()
    ]


def _check(found: dict[str, Any]) -> Lines:
    right = "ok: certified, and at the optimum known by hand"
    return [
        (name, right if outcome == "ok" else outcome, "green" if outcome == "ok" else "red")
        for name, outcome in found["self_check"].items()
    ]


def _size(number: int) -> str:
    return f"{number / 1e9:.3g} GB"
