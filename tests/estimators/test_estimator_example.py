"""The example runs as a script, and what it says is what it found."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import sklearn

pytest.importorskip("pandas")
SCRIPT = Path(__file__).parents[2] / "examples" / "fair_model_with_scikit_learn.py"


@sklearn.config_context()  # the script turns routing on
def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    runpy.run_path(str(SCRIPT))
    plt.close("all")
    said = capsys.readouterr().out
    assert (tmp_path / "fair_model_with_scikit_learn.png").stat().st_size > 10_000
    average, fair = (float(value) for value in re.findall(r"training loss at the worst-served hospital (\S+)", said))
    assert fair < average
    assert re.search(r"^converged after \d+ rounds: at most .* proven$", said, flags=re.MULTILINE)
    assert len(re.findall(r"^(cleveland|hungarian|switzerland|va) +\d+( +0\.\d+){4}$", said, re.MULTILINE)) == 4
    assert "chosen: ChiSquare(rho=0.1)" in said
