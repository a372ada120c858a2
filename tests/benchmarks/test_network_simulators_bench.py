"""The comparison on networks: everybody is given the same work, and who ends elsewhere gets no speed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

SPEED = Path(__file__).parents[2] / "benchmarks" / "speed"
SCRIPTS = (
    "network_simulators",
    "networks",
    "simulators",
    "images",
    "torch_problems",
    "run_loop",
    "run_scaffpd",
)


@pytest.fixture
def bench(monkeypatch):
    """The module, on few random images in the place of CIFAR-10's."""
    for folder in (SPEED / "peers", SPEED):
        monkeypatch.syspath_prepend(str(folder))
    for name in SCRIPTS:
        sys.modules.pop(name, None)
    import network_simulators

    networks = sys.modules["networks"]

    random = np.random.default_rng(0)
    part = SimpleNamespace(
        x=random.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8), y=random.integers(0, 10, 200)
    )
    monkeypatch.setattr(networks, "everything", lambda: SimpleNamespace(train=part, test=part))
    monkeypatch.setattr(networks, "EACH", 10)
    monkeypatch.setattr(networks, "BATCH", 6)
    yield network_simulators
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def contest(bench, network):
    torch.manual_seed(0)
    return bench.Rounds(bench.NETWORKS[network](), "cpu", 20, None, 2)


def trained(network, given, tick):
    """By our script and by the loop's, without their processes."""
    import run_loop
    import run_scaffpd
    import torch_problems

    return {
        "scaffpd": run_scaffpd.network(given, tick),
        "loop": torch_problems.network(run_loop.train, 1, given, tick),
    }


@pytest.mark.parametrize(
    ("network", "rounds"), [("cnn", 2), pytest.param("resnet", 1, marks=pytest.mark.long)]
)
def test_ours_and_the_loop_do_the_same_work(bench, network, rounds, tmp_path):
    import images

    here = contest(bench, network)
    ticks = []
    bench.problem(network, here, rounds).save(tmp_path / "problem.npz")
    given = images.load(str(tmp_path / "problem.npz"))
    assert given.rows.shape == (rounds, 2, 2, 6)
    assert given.X.shape == (20, 10, 3, 32, 32)
    models = trained(network, given, lambda: ticks.append(len(ticks)))
    assert len(ticks) == 2 * (1 + rounds)  # by two of them, before the first round and after each
    ours, loop = (bench.vector(here, models[name]) for name in ("scaffpd", "loop"))
    start = torch.cat([p.detach().flatten() for p in here.network.parameters()])
    assert (loop - start).norm() > 1e-2
    for other in (ours, here.loop(rounds)):  # by rounding a ReLU or a maximum may turn
        assert (other - loop).norm() < 2e-2 * (loop - start).norm()


def test_other_minibatches_are_noticed(bench):
    here = contest(bench, "cnn")
    given = bench.problem("cnn", here, 1)
    other = bench.Images(**vars(given) | {"rows": given.rows[:, ::-1]})
    import run_loop
    import torch_problems

    found = [
        torch_problems.network(run_loop.train, 1, problem, lambda: None)
        for problem in (given, other)
    ]
    first, second = (bench.vector(here, model) for model in found)
    assert (first - second).norm() > 0.1 * (first - bench.vector(here, given.start)).norm()


def test_who_ends_elsewhere_has_no_speed(bench):
    here = contest(bench, "cnn")
    start = bench.problem("cnn", here, 1).start
    bad = start | {"7.bias": np.where(np.arange(10) == 3, 1e6, 0.0).astype("f4")}
    said = {"version": "1", "setting": "", "startup_seconds": 1.0}
    found = {name: said | {"seconds": [9.0, 1.0, 3.0]} for name in ("scaffpd", "loop", "pfl")}
    found |= {"loop": said | {"seconds": [9.0, 4.0, 4.0]}, "flower": "not installed: flwr"}
    here.accuracy = lambda x: 0.1 if x[-7] > 1e5 else 0.3
    rows = bench.judged("cnn", here, found, {"scaffpd": start, "loop": start, "pfl": bad})
    assert [row["s a round"] for row in rows] == [2.0, 4.0, None, None]
    assert [row[bench.TIMES] for row in rows] == [1.0, 2.0, None, None]
    assert (rows[1]["from"], rows[1]["to"], rows[1]["first round, s"]) == (4 / 3, 4.0, 9.0)
    assert "accuracy 0.100, the plain loop's is 0.300" in rows[2]["note"]
    told = bench.sentences(rows)
    assert "plain PyTorch loop takes 2.00 times as long" in told[0]
    assert "Flower (Ray) has no speed (not installed: flwr)" in told[0]
    with pytest.raises(RuntimeError, match="scaffpd: failed: accuracy"):
        bench.judged("cnn", here, found, {"scaffpd": bad, "loop": start, "pfl": start})
