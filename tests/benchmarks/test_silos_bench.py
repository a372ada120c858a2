"""Regions give the flat run's numbers; the judge of random faults finds a wrong answer wrong."""

from __future__ import annotations

import numpy as np
import pytest
from deploy_cases import FakeClock

import faults
import scaffpd as sp
import silos

METHODS = {
    "Scaff-PD": sp.ScaffPD(sp.ChiSquare(0.1), local_steps=5),
    "subspace saddle": sp.SubspaceSaddle(sp.CVaR(0.5)),
    "SCAFFOLD, some clients": sp.Scaffold(local_steps=3, clients_per_round=4),
    "FedAvg on minibatches": sp.FedAvg(local_steps=3, batch_size=8),
}


@pytest.mark.parametrize("method", METHODS)
def test_regions_that_sum_for_their_clients_give_the_flat_run_s_numbers(method):
    model = sp.Linear("logistic", l2=0.05)
    clients = silos.drawn(9, m=16, d=4)
    flat = sp.train(METHODS[method], sp.Cohort(clients, model), rounds=6, seed=3, progress=False)
    for regions in (1, 2, 4):
        other = sp.train(
            METHODS[method],
            silos.regional(clients, model, regions),
            rounds=6,
            seed=3,
            progress=False,
        )
        np.testing.assert_allclose(other.x, flat.x, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(other.history.losses, flat.history.losses, rtol=1e-9)
        np.testing.assert_allclose(other.certificate, flat.certificate, rtol=1e-3, atol=1e-12)


def test_a_wrong_model_is_called_wrong(tmp_path):
    trial = faults.Trial(1, "in process", "clear", "Fair", "drop", "silo killed", "va", 12)
    path, places, outcome = faults.play(trial, tmp_path, np.random.default_rng(0), FakeClock())
    assert faults.judge(trial, path, places, outcome) == "right"
    assert trial.members == 3
    file = path.parent / "run" / "model.safetensors"
    from scaffpd.run.settings.model_file import model_bytes, read_model

    x, setup = read_model(file)
    file.write_bytes(model_bytes(x + 0.01, setup))
    assert faults.judge(trial, path, places, outcome).startswith(
        "WRONG: ended converged with a gap of"
    )
    other = faults.Trial(1, "in process", "clear", "Fair", "drop", "silo killed", "hungarian", 12)
    assert "hungarian" not in faults.judge(other, path, places, outcome)
    assert "va is not in the result" in faults.judge(other, path, places, outcome)


def test_a_truncated_checkpoint_is_stopped_at_and_made_good():
    trial = faults.Trial(1, "in process", "clear", "Fair", "drop", "checkpoint truncated", "va", 14)
    faults.in_process(trial, np.random.default_rng(0))
    assert trial.verdict == "stopped, resumed, right"
    assert "not a readable scaffpd checkpoint" in trial.why
