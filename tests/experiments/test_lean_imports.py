"""The experiments run where only numerics, scikit-learn, matplotlib, rich, typer and Pillow are installed."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ABSENT = (
    "pydantic",
    "pyarrow",
    "filelock",
    "tomli_w",
    "jinja2",
    "threadpoolctl",
    "pandas",
    "psutil",
)
ROOT = Path(__file__).parents[2]


def test_every_experiment_can_be_imported_without_the_packages_of_deployments_and_tables(capsys):
    """All of the package and of the experiments anew, in this process, which has the large libraries already."""
    before = dict(sys.modules)
    for name in before:
        if name.partition(".")[0] in ("scaffpd", "experiments", *ABSENT):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(ABSENT))  # an import of it fails
    try:
        for file in sorted(ROOT.glob("experiments/*.py")):
            name = f"experiments.{file.stem}".removesuffix(".__init__")
            assert import_module(name) is not before.get(name)
        assert import_module("experiments.reproduce").run(["synthetic", "--help"]) == 0
    finally:
        sys.modules.clear()
        sys.modules.update(before)
    assert "--quick" in capsys.readouterr().out
