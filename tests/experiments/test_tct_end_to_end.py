"""Train, convexify, train, end to end, on made-up images: all rows; a run in pieces gives what a single one does."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import scaffpd as sp
from experiments import tct_end_to_end as tct

TINY = tct.Setting(
    "cifar10",
    0.5,
    clients=3,
    width=8,
    rounds=2,
    final=2,
    local_steps=2,
    batch=4,
    epochs=1,
    coordinates=40,
    per_class=(8, 4),
    rate=0.1,
)


class Small(torch.nn.Module):
    """Every fourth pixel through one convolution."""

    def __init__(self, classes, width, mean, std):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, width, 3), torch.nn.GroupNorm(1, width)
        self.fc = torch.nn.Linear(width, classes)
        for name, value in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32).view(3, 1, 1))

    def forward(self, x):
        x = (x[..., ::4, ::4].to(self.mean.dtype) - self.mean) / self.std
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.fixture
def _few(monkeypatch):
    monkeypatch.setattr(tct, "RATES", (0.01, 0.1))
    monkeypatch.setattr(tct, "L2S", (1e-4, 1e-2))
    monkeypatch.setattr(tct, "RHOS", (0.1,))
    monkeypatch.setattr(tct, "KAPPAS", (1.0, 100.0))
    monkeypatch.setattr(tct, "ResNet8", Small)  # which is taken below


def rows(folder):
    with (folder / "runs.csv").open(newline="", encoding="utf-8") as lines:
        return {row["row"]: row for row in csv.DictReader(lines)}


@pytest.mark.usefixtures("_few")
def test_all_rows_and_a_run_in_pieces(root, tmp_path):
    whole = tct.Study(TINY, tmp_path / "whole", "cpu", root)
    assert whole.carry_out()
    found = rows(tmp_path / "whole")
    assert set(found) == set(tct.ROWS)
    for row in found.values():
        each = np.array(row["accuracies"].split(), dtype=float)
        assert float(row["average"]) == pytest.approx(each.mean(), abs=0.01)
        assert float(row["worst_20"]) == pytest.approx(each.min(), abs=0.01)  # one of three clients
    cohort = whole.cohort()
    tried = json.loads((tmp_path / "whole" / "rates.json").read_text(encoding="utf-8"))
    assert whole.rate == float(max(tried, key=tried.get))
    assert found[tct.LONGER]["chosen"] == f"rate={whole.rate:g}"
    method = sp.FedAvg(local_steps=2, batch_size=4, local_rate=whole.rate)
    longer = sp.train(method, cohort, rounds=4).x  # the same network by itself, in one go
    accuracy = cohort.evaluate(longer, "test").accuracy
    assert found[tct.LONGER]["accuracies"] == " ".join(f"{100 * a:.2f}" for a in accuracy)

    for _ in range(
        4
    ):  # a call that is late has time for one round (one for each rate), and for no row of stage 3
        assert not tct.Study(TINY, tmp_path / "pieces", "cpu", root, deadline=0.0).carry_out()
    assert set(rows(tmp_path / "pieces")) == {tct.STAGE_1}
    assert not (tmp_path / "pieces" / "about.json").exists()
    assert tct.Study(TINY, tmp_path / "pieces", "cpu", root).carry_out()
    again = rows(tmp_path / "pieces")
    for name, row in found.items():
        assert again[name]["accuracies"] == row["accuracies"], name
        assert again[name]["chosen"] == row["chosen"], name
    page = tct.write(tmp_path, "command")
    assert "CIFAR-10, α = 0.5" in page
    assert "not run" not in page


def test_the_network_takes_bytes_and_batches_side_by_side(root):
    study = tct.Study(replace(TINY, rounds=2), root / "unused", "cpu", root)
    oracle = study.cohort()._oracle
    oracle.local_updates(oracle.start(), None, None, sp.federation.LocalPlan(1, 0.1, batch_size=4))
    assert oracle.function.together
    assert oracle.rows.X.dtype == torch.uint8
