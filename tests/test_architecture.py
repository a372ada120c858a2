"""Imports only point down: a floor may use the floors below it and itself, never those above."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import scaffpd

ROOT = Path(scaffpd.__file__).parent

# From the ground up. A module may import from its own floor only within its own package.
FLOORS = [
    {"errors"},
    {"system"},
    {"federation", "objectives", "data", "checkpoint", "masking"},
    {
        "certificate",
        "figures",
        "history",
        "metrics",
        "models",
        "steps",
        "progress",
        "quasi_newton",
        "reference",
        "saddle",
        "tabular",
    },
    {"subspace", "features", "privacy"},
    {"algorithms", "cohort"},
    {"training", "config", "secure"},
    {"comparison", "convexify", "deploy", "estimators", "fairness_path", "trackers"},
    {"runs"},
    {"report"},
    {"demo"},
    {"cli"},
]
FORBIDDEN = {
    ("algorithms", "cohort"),
    ("algorithms", "models"),
    ("cohort", "algorithms"),
    ("cohort", "steps"),
    ("deploy", "comparison"),
    ("deploy", "convexify"),
}


def floor(part):
    return next(i for i, names in enumerate(FLOORS) if part in names)


def imports():
    """(importing part, imported part, file) for every import of our own modules."""
    for file in ROOT.rglob("*.py"):
        relative = file.relative_to(ROOT)
        if relative in (Path("__init__.py"), Path("__main__.py")):  # the doors of the house, not floors of it
            continue
        part = relative.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
                if node.module == "scaffpd":
                    names = [f"scaffpd.{alias.name}" for alias in node.names]
            for name in names:
                pieces = name.split(".")
                if pieces[0] == "scaffpd" and len(pieces) > 1:
                    yield part, pieces[1], relative


def test_every_module_has_a_floor():
    parts = {p.name.removesuffix(".py") for p in ROOT.iterdir() if not p.name.startswith(("_", "."))}
    parts -= {"py.typed"}
    assert parts == set().union(*FLOORS) & parts
    assert set().union(*FLOORS) <= parts


def test_arrows_point_down():
    seen = 0
    for part, used, file in imports():
        seen += 1
        assert part == used or floor(used) < floor(part), f"{file} imports scaffpd.{used}, which is not below it"
        assert (part, used) not in FORBIDDEN, f"{file} must not know scaffpd.{used}"
    assert seen > 50


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"torch", "scipy", "sklearn", "matplotlib", "rich", "typer", "pandas", "numpy"}
    code = f"import sys, scaffpd; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_core_needs_nothing_but_torch_numpy_and_scipy():
    """With every other dependency hidden, the quick start still runs."""
    code = (
        "import sys\n"
        "for name in ('sklearn','matplotlib','rich','typer','pandas','threadpoolctl','cvxpy','hypothesis'):\n"
        "    sys.modules[name] = None\n"
        "import scaffpd as sp\n"
        "cohort = sp.Cohort(sp.data.synthetic(), sp.Linear('squared', l2=0.1))\n"
        "result = sp.train(sp.ScaffPD(sp.ChiSquare(rho=0.1)), cohort, rounds=500, tol=1e-8, progress=True)\n"
        "sp.reference.reference_optimum(sp.data.synthetic(), 'squared', 0.1, sp.ChiSquare(rho=0.1))\n"
        "print(result.status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "converged", done.stderr


def test_every_public_name_can_be_imported():
    for name in scaffpd.__all__:
        assert getattr(scaffpd, name) is not None
    assert set(scaffpd.__all__) <= set(dir(scaffpd))
