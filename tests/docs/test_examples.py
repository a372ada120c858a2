"""Every example runs as it stands, in an empty folder, and says what it promises."""

from __future__ import annotations

import re
import runpy

import pytest
from sklearn import model_selection

from snippets import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "compare_fair_methods": ("Scaff-PD", "away from its optimum", "certified gap"),
    "certified_fairness_across_hospitals": (
        "the same model, bit for bit: True",
        "hungarian,dropped",
        "200 predictions",
    ),
}
WRITES = {
    "compare_fair_methods": ("fair-methods/fair_methods.png", "fair-methods/table.csv"),
    "certified_fairness_across_hospitals": (
        "hospitals/fair/model.safetensors",
        "hospitals/va/predictions.csv",
    ),
}


def closing_words(away):
    """Corrected methods are at their own optimum, the others are not yet."""
    assert max(away["SCAFFOLD"], away["Scaff-PD"]) < 1e-3
    assert min(away[name] for name in ("FedAvg", "AFL", "DRFA", "q-FFL")) > 0.01


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=pytest.mark.long if p.stem == "compare_fair_methods" else ())
        for p in EXAMPLES
    ],
    ids=lambda path: path.stem,
)
def test_it_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folds = model_selection.StratifiedKFold
    monkeypatch.setattr(model_selection, "StratifiedKFold", lambda n, **more: folds(2, **more))
    import matplotlib.pyplot as plt  # here: it is slow to import

    plt.switch_backend("agg")
    scope = runpy.run_path(str(path), run_name="__main__")
    plt.close("all")
    printed = capsys.readouterr().out
    for words in SAYS.get(path.stem, ()):
        assert words in printed
    for name in WRITES.get(path.stem, ()):
        assert (tmp_path / name).stat().st_size > 500
    if path.stem == "compare_fair_methods":
        closing_words(scope["away"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_reads_like_a_notebook(path):
    text = path.read_text(encoding="utf-8")
    assert len(re.findall(r"^# %%", text, flags=re.MULTILINE)) >= 4
