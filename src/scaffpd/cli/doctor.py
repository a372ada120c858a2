"""`scaffpd doctor`: what is installed, and whether training works here."""

from __future__ import annotations

import re
from importlib import metadata

import typer
from rich.console import Console

from scaffpd.cli.screens import facts, section
from scaffpd.cli.typer_ext import FAILED, AsJson, print_json
from scaffpd.machine import PACKAGES, environment, version

NOT_FOR_USERS = ("all", "dev", "docs", "experiments")  # extras of those who work on the package
TOL = 1e-8  # of the self-check


def doctor(as_json: AsJson = False) -> None:
    """Check the installation, and whether training works on this machine.

    A self-check trains a small problem with a proof and compares it with the solution known by
    hand. Exit code 0 where that works, 1 where it does not; extras never fail.

    Examples:
        scaffpd doctor
        scaffpd doctor --json
    """
    try:
        outcome = self_check()
    except Exception as error:  # this is where whatever is broken has to be said
        outcome = f"{type(error).__name__}: {error}"
    works = outcome == "ok"
    about = environment()
    extras = installed_extras()
    if as_json:
        print_json({"works": works, "self_check": outcome, "environment": about, "extras": extras})
    else:
        packages = (f"{name} {about[name]}" for name in PACKAGES if name in about)
        gpus = (f"{gpu['name']}, {gpu['memory'] / 1e9:.3g} GB" for gpu in about["gpus"])
        lines = {
            "scaffpd": f"{about['scaffpd']} on Python {about['python']}, {about['platform']}",
            "packages": ", ".join(packages),
            "processor": f"cores: {about['cores']}; threads in PyTorch: {about['threads']}",
            "memory": f"{about['memory'] / 1e9:.3g} GB",
            "GPU": "; ".join(gpus) or "none; none is needed",
        }
        for name, there in extras.items():
            lines[f"[{name}]"] = "installed" if there else f'pip install "scaffpd[{name}]"'
        lines["Self-check"] = outcome
        console = Console(highlight=False)
        facts(console, lines)
        good = "All is well: training works on this machine."
        bad = "Training does not work on this machine: see the self-check above."
        section(console, None, good if works else bad)
    if not works:
        raise typer.Exit(FAILED)


def installed_extras() -> dict[str, bool]:
    """Return, for every extra of the package, whether all that it needs is installed."""
    found: dict[str, bool] = {}
    for requirement in metadata.requires("scaffpd") or ():
        match = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", requirement)
        if match is not None and match[2] not in NOT_FOR_USERS:
            found[match[2]] = found.get(match[2], True) and version(match[1]) is not None
    return found


def self_check() -> str:
    r"""Solve a problem that can be solved by hand; return "ok" or what is wrong.

    Two clients with f_1(x) = x²/2 and f_2(x) = (2x − 3)²/2. The worst of the two is smallest where
    they are equal and their slopes cancel: x = 1, both losses 1/2, λ = (2/3, 1/3).
    """
    import numpy as np

    from scaffpd.algorithms import fair
    from scaffpd.models import Linear
    from scaffpd.objectives import Agnostic
    from scaffpd.training.cohort import Cohort
    from scaffpd.training.loop import train

    clients = [(np.array([[1.0]]), np.array([0.0])), (np.array([[2.0]]), np.array([3.0]))]
    result = train(fair(Agnostic()), Cohort(clients, Linear("squared")), rounds=1000, tol=TOL)
    x = float(result.x[0])
    gap = max(x**2 / 2, (2 * x - 3) ** 2 / 2) - 0.5
    if result.certificate is None or not result.certificate <= TOL:
        return f"no certified gap of {TOL:g}: {result.message}"
    if gap > result.certificate:
        return f"the certificate says {result.certificate:.1e}, and the optimum is {gap:.1e} away"
    if abs(x - 1) > 1e-4 or not np.allclose(result.weights, (2 / 3, 1 / 3), atol=1e-3):
        λ = np.round(result.weights, 4).tolist()
        return f"x = {x:.6f} and λ = {λ}, expected 1 and (2/3, 1/3)"
    return "ok"
