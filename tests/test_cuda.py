"""The same run on a GPU: the same optimum, certified, and bit for bit the same when repeated.

TRITON_INTERPRET=1 runs the kernels on a CPU, where Triton is installed.
"""

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import scaffpd as sp
from scaffpd.models import glm, numerics, quadratic
from scaffpd.models.local_steps import Path, _sample_loop
from scaffpd.models.losses import Logistic, Softmax
from scaffpd.models.numerics import DoubleProducts, gamma
from scaffpd.models.samples import table

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="no CUDA device here")
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or not (GPU or os.environ.get("TRITON_INTERPRET")),
    reason="no Triton, or no CUDA device and TRITON_INTERPRET is not set",
)
# of Triton's interpreter, for NumPy before 2.4
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
WHERE = torch.device("cuda" if GPU else "cpu")


def problem(loss):
    clients = sp.data.synthetic(N=6, sizes=(5, 30, 60, 100, 200, 7), sigma=0.5)
    if loss == "logistic":
        return [(X, (y > 0).astype(int)) for X, y in clients]
    if loss == "softmax":
        return [(X, np.digitize(y, [-2, 0, 2])) for X, y in clients]
    return clients


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("m", "d"), [(1, 1), (1, 700), (700, 1), (37, 131), (64, 48), (5, 300), (513, 1040)]
)
def test_products_of_one_pass_err_less_than_their_bound(m, d, dtype):
    """Tables in whole lines and others, tiny numbers, and the same bits again."""
    from scaffpd.models import kernels

    random = torch.Generator().manual_seed(m + d)
    least = -140 if GPU else -110  # the interpreter rounds what is below normal numbers
    sizes = 2.0 ** torch.randint(least, 3, (m, d), generator=random)
    given = torch.randn(m, d, generator=random) * sizes
    aligned = table(m, d, dtype, WHERE)
    aligned.copy_(given)
    for A in (aligned, aligned.contiguous()):
        for k in (1, 2, 10, 100):
            if not kernels.takes(A, k):
                assert (dtype, k) != (dtype, 1)
                continue
            X = torch.randn(d, k, generator=random).to(WHERE)
            V = torch.randn(m, k, generator=random, dtype=torch.float64).to(WHERE)
            for turned, B, right in ((False, A, X), (True, A.T, V)):
                ours = kernels.product(A, right, turned)
                assert torch.equal(ours, kernels.product(A, right, turned))
                exact = B.double() @ right.double()
                room = 2 * gamma(B.shape[1] + 2) * (B.double().abs() @ right.double().abs())
                assert bool(((ours - exact).abs() <= room + 1e-300).all())


@needs_triton
def test_products_go_to_the_kernel_where_there_is_one(monkeypatch):
    """A X and AᵀV of a table of some size, and of one of two columns in two bytes, without it."""
    from scaffpd.models import kernels

    monkeypatch.setattr(numerics, "kernels", lambda: kernels)
    A = torch.randn(1040, 1024, device=WHERE)
    X = torch.randn(1024, 2, device=WHERE)
    asked = []
    taken = kernels.product
    monkeypatch.setattr(kernels, "product", lambda *a, **k: asked.append(a) or taken(*a, **k))
    for table_, times in ((A, 2), (A.bfloat16(), 0), (A[:8], 0), (A.double(), 0)):
        products = DoubleProducts(table_)
        products.large |= not GPU and table_.numel() >= numerics.LARGE and not products.double
        ahead = products.times(X.to(table_.dtype) if products.double else X)
        back = products.transposed(ahead)
        torch.testing.assert_close(ahead, table_.double() @ X.double(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(back, table_.double().T @ ahead, rtol=1e-11, atol=1e-9)
        assert len(asked) == times
        asked.clear()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("loss", "k"), [(Softmax(), 100), (Softmax(), 3), (Logistic(), 1)])
def test_steps_of_a_kernel_are_those_of_torch(loss, k, dtype):
    """All samples in every step, and minibatches as weights, whose l2 x fades."""
    from scaffpd.models import kernels

    torch.manual_seed(0)
    n, m, J = 3, 37, 5

    def drawn(*shape):
        return torch.rand(shape, dtype=dtype, device=WHERE)

    A = drawn(n, m, 20)
    K = -(A @ A.mT) / 20
    label = torch.randint(0, max(k, 2), (n, m), device=WHERE)
    y = torch.nn.functional.one_hot(label, k).mT if k > 1 else 1 - 2 * label[:, None]
    y = y.to(dtype).contiguous()
    Z, P, r, R = drawn(4, n, k, m)
    keep, p, none = drawn(n, 1, 1), drawn(J, n, 1, 1), drawn()
    full = (r, drawn(1, n, 1, m), p, torch.ones(J, dtype=dtype, device=WHERE))
    batches = (0 * none, drawn(J, n, 1, m), p, drawn(J, n, 1, 1))
    for own, weight, ahead, fade in (full, batches):
        parts = (R, Z, P, own, weight, ahead, fade, keep)
        theirs = _sample_loop(loss, K, y, *parts)
        ours = kernels.sample_loop(k > 1, K, y, *parts)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@needs_gpu
def test_a_gpu_without_triton_converts_pieces(monkeypatch):
    """Without Triton the same certificates, within their bounds."""
    random = np.random.default_rng(0)
    X = random.standard_normal((700, 2000)).astype(np.float32) * 2000**-0.5
    pairs = list(zip(np.split(X, 7), np.split(X[:, 0] * 9, 7), strict=True))
    found = []
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(numerics, "kernels", lambda: None)
        cohort = sp.Cohort(pairs, sp.Linear(l2=0.1), device="cuda", dtype=torch.float32)
        assert (cohort._oracle.rows.products.fused(1) is None) != (
            fast and bool(numerics.kernels())
        )
        found.append(sp.train(sp.ScaffPD(sp.ChiSquare(0.1)), cohort, rounds=100, tol=1e-7))
    assert found[0].status == found[1].status == "converged"
    np.testing.assert_allclose(found[0].x, found[1].x, atol=2e-3)


@needs_gpu
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


@needs_gpu
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


@needs_gpu
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


@needs_gpu
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


@needs_gpu
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
