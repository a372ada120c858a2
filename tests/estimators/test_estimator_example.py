"""The example runs as a script, and what it says is what it found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pandas")
SCRIPT = Path(__file__).parents[2] / "examples" / "fair_model_with_scikit_learn.py"


def test_the_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT)], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fair_model_with_scikit_learn.png").stat().st_size > 10_000
    average, fair = (
        float(value) for value in re.findall(r"training loss at the worst-served hospital (\S+)", done.stdout)
    )
    assert fair < average
    assert re.search(r"^converged after \d+ rounds: at most .* proven$", done.stdout, flags=re.MULTILINE)
    assert len(re.findall(r"^(cleveland|hungarian|switzerland|va) +\d+( +0\.\d+){4}$", done.stdout, re.MULTILINE)) == 4
    assert "chosen: ChiSquare(rho=0.1)" in done.stdout
