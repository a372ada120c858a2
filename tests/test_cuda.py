"""The same run on a GPU: the same optimum, certified, and bit for bit the same when repeated."""

import numpy as np
import pytest
import torch

import scaffpd as sp
from scaffpd.models import glm, quadratic
from scaffpd.models.local_steps import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def problem(loss):
    clients = sp.data.synthetic(N=6, sizes=(5, 30, 60, 100, 200, 7), sigma=0.5)
    if loss == "logistic":
        return [(X, (y > 0).astype(int)) for X, y in clients]
    if loss == "softmax":
        return [(X, np.digitize(y, [-2, 0, 2])) for X, y in clients]
    return clients


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize(
    "objective", [sp.Average(), sp.Agnostic(), sp.ChiSquare(0.1), sp.QFair(1.0)]
)
def test_a_gpu_finds_the_same_certified_optimum(loss, objective):
    results = []
    for device in ("cpu", "cuda", "cuda"):
        cohort = sp.Cohort(problem(loss), sp.Linear(loss, l2=0.05), device=device)
        results.append(
            sp.train(sp.ScaffPD(objective, local_steps=20), cohort, rounds=1000, tol=1e-10)
        )
    cpu, gpu, again = results
    assert cpu.status == gpu.status == "converged"
    np.testing.assert_allclose(
        gpu.x, cpu.x, atol=2 * np.sqrt(2 * 1e-10 / (0.05 * cpu.weights.sum()))
    )
    np.testing.assert_array_equal(gpu.x, again.x)
    np.testing.assert_array_equal(gpu.history.losses, again.history.losses)


@pytest.mark.parametrize("columns", [None, [0, 3]])
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_personal_models_are_the_same_on_a_gpu(loss, columns):
    model = sp.Personal(sp.Linear(loss, l2=0.05), 5.0, columns)
    results = []
    for device in ("cpu", "cuda"):
        cohort = sp.Cohort(problem(loss), model, device=device, test=problem(loss))
        results.append(sp.train(sp.fair(sp.CVaR(0.5)), cohort, tol=1e-10))
        sp.train(sp.ScaffPD(sp.CVaR(0.5), local_steps=3, batch_size=8), cohort, rounds=2)
        assert np.all(np.isfinite(cohort.evaluate(results[-1].x, "test").loss))
    np.testing.assert_allclose(results[1].personal, results[0].personal, atol=1e-3)
    assert results[0].status == results[1].status == "converged"


def test_minibatches_and_networks_run_on_a_gpu():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    cohort = sp.Cohort(problem("softmax"), sp.Module(network, "cross_entropy"), device="cuda")
    result = sp.train(sp.ScaffPD(sp.Agnostic(), local_steps=10, batch_size=16), cohort, rounds=20)
    assert result.history.losses[-1].max() < result.history.losses[0].max()
    personal = sp.Cohort(
        problem("softmax"), sp.Personal(sp.Module(network, "cross_entropy"), 5.0), device="cuda"
    )
    own = sp.train(sp.ScaffPD(sp.Agnostic(), local_steps=2, batch_size=16), personal, rounds=2)
    assert np.all(np.isfinite(own.personal))


def test_single_precision_keeps_its_bounds_on_a_gpu():
    """More features than rows, in single precision: within the bounds of its answers."""
    random = np.random.default_rng(0)
    X = random.normal(size=(300, 700)).astype(np.float32) * 700**-0.5
    y = random.integers(0, 5, 300)
    pairs = [(X[p], y[p]) for p in np.split(np.arange(300), [20, 25, 140])]
    model = sp.Linear("squared", l2=1e-3, classes=5)
    cpu = sp.Cohort(pairs, model)
    gpu = sp.Cohort(pairs, model, device="cuda", dtype=torch.float32)
    for method in (sp.FedAvg(local_steps=7), sp.ScaffPD(sp.ChiSquare(0.1))):
        exact, single = (sp.train(method, cohort, rounds=10) for cohort in (cpu, gpu))
        np.testing.assert_allclose(single.x, exact.x, rtol=0, atol=2e-4 * np.abs(exact.x).max())
    x = torch.randn(3500, generator=torch.Generator().manual_seed(0))
    ours = gpu.gradients(x.cuda())
    theirs = cpu.gradients(x.double())
    assert np.all(np.abs(ours.losses - theirs.losses) <= ours.rounding()[0] + theirs.rounding()[0])
    for i, weights in enumerate(np.eye(4)):
        error = ours.sum(weights).cpu() - theirs.sum(weights)
        assert error.norm() <= ours.rounding()[1][i] + theirs.rounding()[1][i]


@pytest.mark.parametrize("path", [Path.SAMPLES, Path.FEATURES])
@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
def test_recorded_local_steps_are_those_of_the_cpu(loss, path, monkeypatch):
    """Minibatches by samples and over features, often enough to be recorded and replayed."""
    for module in (glm, quadratic):
        monkeypatch.setattr(module, "cheapest_path", lambda *_: path)
    method = sp.FedAvg(local_steps=9, batch_size=8, local_rate=0.01)
    ends = []
    for device in ("cpu", "cuda"):
        cohort = sp.Cohort(problem(loss), sp.Linear(loss, l2=0.05), device=device)
        ends.append(sp.train(method, cohort, rounds=8))
    np.testing.assert_allclose(ends[1].x, ends[0].x, rtol=1e-9, atol=1e-11)
