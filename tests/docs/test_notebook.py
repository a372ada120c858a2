"""The notebook prints what is stored in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def test_the_notebook_prints_what_is_stored_in_it(capsys):
    pytest.importorskip("matplotlib")
    path = Path(__file__).parents[2] / "docs" / "generate_notebook.py"
    spec = importlib.util.spec_from_file_location("generate_notebook", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(check=True) == 0, capsys.readouterr().out
    stored = module.json.loads(module.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    pictures = [
        out
        for cell in stored
        for out in cell.get("outputs", [])
        if out["output_type"] == "display_data"
    ]
    assert len(pictures) == 1
