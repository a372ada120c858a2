"""The page on networks shows what the runs in results/ say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import networks
from experiments import tct_end_to_end as tct

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "networks.md").read_text(encoding="utf-8").splitlines()


def test_fair_networks_at_full_size():
    runs = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "results/networks").glob("*.json"))
    ]
    table = networks.in_pairs(
        runs, [name for name in networks.METHODS if name != "SCAFFOLD"]
    ).replace("|  |", "| |")
    assert {line.split("|")[1].strip() for line in table.splitlines()} >= {"seed 4", "mean"}
    assert not [line for line in table.splitlines() if line not in PAGE]


def test_runs_of_different_lengths_are_not_compared():
    runs = [
        {"seed": 0, "method": "FedAvg", "rounds": r, "images": 9, "accuracies": [[1.0]]}
        for r in (1, 2)
    ]
    with pytest.raises(SystemExit, match="different lengths"):
        networks.in_pairs(runs, ["FedAvg"])


def test_train_convexify_train():
    shown = {tuple(line.split("|")[2:]) for line in PAGE}
    rows = [line for line in tct.page(ROOT / "results" / "tct").splitlines() if "α" not in line]
    assert len(rows) == 1 + len(tct.ROWS)
    assert not [line for line in rows if tuple(line.split("|")[2:]) not in shown]
