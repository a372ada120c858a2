"""`scaffpd doctor`: what is installed, what this machine has, and whether training works on it."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from scaffpd.cli.typer_ext import print_json
from scaffpd.cli.usage_errors import FAILED

EXTRAS = {  # of pyproject.toml: what each is for, and the packages that tell that it is there
    "pandas": ("results as data frames", ("pandas",)),
    "parquet": ("tables in Parquet files", ("pandas", "pyarrow")),
    "flare": ("training across organisations on NVIDIA FLARE", ("nvflare",)),
    "flower": ("training across organisations on Flower", ("flwr", "psutil")),
    "privacy": ("secure sums and differential privacy", ("cryptography", "dp-accounting")),
    "tensorboard": ("curves in TensorBoard", ("tensorboard",)),
    "mlflow": ("runs in MLflow", (("mlflow-skinny", "mlflow"),)),
}
WIDEST = 100  # columns: longer lines of prose are hard to read


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

    checked = _self_check()
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
        "data": _data_folder(),
    }


def _self_check() -> dict[str, str]:
    try:
        from scaffpd.cli.self_check import self_check

        return self_check()
    except Exception as error:  # NumPy, PyTorch or one of ours cannot even be loaded
        return {"loading": f"{type(error).__name__}: {error}"}


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


def _data_folder() -> dict[str, Any]:
    named = os.environ.get("SCAFFPD_DATA") or None
    return {"SCAFFPD_DATA": named, "there": bool(named and os.path.isdir(named))}


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    width = min(console.width, WIDEST)
    for title, lines in (("This machine", _machine(found)), ("Extras", _extras(found)), ("Self-check", _check(found))):
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        for name, text, style in lines:
            grid.add_row(name, Text(text, style=style))
        console.print(title, style="bold")
        console.print(grid, width=width)
        console.print()
    good = "All is well: training works on this machine."
    bad = "Training does not work on this machine: see the self-check above."
    console.print(good if found["works"] else bad, style="bold green" if found["works"] else "bold red", width=width)


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
