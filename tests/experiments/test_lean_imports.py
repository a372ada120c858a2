"""The experiments run where only numerics, scikit-learn, matplotlib, rich, typer and Pillow are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from importlib import import_module
from pathlib import Path

for name in ("pydantic", "pyarrow", "filelock", "tomli_w", "jinja2", "threadpoolctl", "pandas", "psutil"):
    sys.modules[name] = None  # an import of it fails
for file in sorted(Path("experiments").glob("*.py")):
    import_module(f"experiments.{file.stem}".removesuffix(".__init__"))
from experiments.reproduce import run
sys.exit(run(["synthetic", "--help"]))
"""


def test_every_experiment_can_be_imported_without_the_packages_of_deployments_and_tables():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
