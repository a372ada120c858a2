"""Every way to take local steps takes the same ones: by samples, over features, on any cores."""

import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from scaffpd.federation import LocalPlan
from scaffpd.models import execution, glm, local_problem, local_steps, quadratic
from scaffpd.models.draws import Draws
from scaffpd.models.execution import GraphReplay
from scaffpd.models.glm import LinearOracle
from scaffpd.models.local_steps import Path, cheapest_path
from scaffpd.models.numerics import extreme_values, triangle_of
from scaffpd.models.quadratic import compress

SIZES = (3, 40, 17, 40, 9)
LOSSES = ("squared", "logistic", "softmax", "poisson")


def cohort(loss, sizes=SIZES, features=6, seed=0, dtype=torch.float64):
    random = np.random.default_rng(seed)
    pairs = []
    for m in sizes:
        X = random.standard_normal((m, features))
        z = X @ random.standard_normal((features, 3))
        y = {
            "squared": z[:, 0],
            "logistic": (z[:, 0] > 0).astype(int),
            "softmax": z.argmax(1),
            "poisson": np.round(np.exp(np.clip(z[:, 0], -2, 2))),
        }[loss]
        pairs.append((X, y))
    classes = 3 if loss == "softmax" else None
    return sp.Cohort(pairs, sp.Linear(loss, l2=0.05, classes=classes), dtype=dtype)


def go_by(monkeypatch, path):
    """Take all steps that have no closed form by one path."""
    for module in (glm, quadratic):
        monkeypatch.setattr(module, "cheapest_path", lambda *_: path)


def displacements(federation, plan, corrected):
    """d_i of every client, and a sum of them that was not made from those."""
    x = 0.3 * torch.randn(
        federation.dimension,
        dtype=federation.start().dtype,
        generator=torch.Generator().manual_seed(1),
    )
    at = federation.gradients(x) if corrected else None
    c = at.sum(np.full(len(SIZES), 1 / len(SIZES))) if corrected else None
    updates = federation.local_updates(x, at, c, plan)
    return updates.each(), updates.sum(np.linspace(0, 1, len(SIZES)))


PLANS = {
    "full": LocalPlan(7),
    "one step": LocalPlan(1),
    "full, prox, common rate": LocalPlan(5, 0.03, prox=0.2),
    "minibatches": LocalPlan(7, 0.05, batch_size=8, key=(3, 1)),
    "minibatches, own rates": LocalPlan(6, batch_size=4, key=(1,)),
    "minibatches, prox": LocalPlan(6, 0.05, batch_size=11, key=(2,), prox=0.3),
}


CASES = [
    (loss, name, corrected)
    for loss in LOSSES
    for name, plan in PLANS.items()
    for corrected in (True, False)
    # the others have a closed form, or go over features
    if (loss != "squared" if plan.batch_size is None else loss != "poisson")
]


@pytest.mark.parametrize(("loss", "name", "corrected"), CASES)
def test_the_space_of_samples_and_features_agree(loss, name, corrected, monkeypatch):
    answers = []
    for path in (Path.SAMPLES, Path.FEATURES):
        go_by(monkeypatch, path)
        answers.append(displacements(cohort(loss), PLANS[name], corrected))
    same(*answers)
    each, total = answers[0]
    weights = torch.linspace(0, 1, len(SIZES), dtype=torch.float64)
    torch.testing.assert_close(weights @ each, total, rtol=1e-11, atol=1e-13)


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("path", [Path.SAMPLES, Path.FEATURES])
def test_steps_may_be_drawn_a_few_at_a_time(path, monkeypatch):
    go_by(monkeypatch, path)
    whole = displacements(cohort("softmax"), PLANS["minibatches"], corrected=True)
    monkeypatch.setitem(local_problem.SLAB, "cpu", 1)
    same(displacements(cohort("softmax"), PLANS["minibatches"], corrected=True), whole)


def test_memory_does_not_grow_with_the_number_of_steps():
    """Draws and targets of a thousand steps are never held together."""
    plan = LocalPlan(1000, 0.01, batch_size=8)
    most = []
    uniform = Draws.uniform
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(local_problem.SLAB, "cpu", 2**12)
        patch.setattr(
            Draws,
            "uniform",
            lambda self, size: most.append(size * len(self.seeds)) or uniform(self, size),
        )
        displacements(cohort("softmax"), plan, corrected=False)
    assert max(most) <= 2**12
    assert sum(most) == 1000 * 8 * len(SIZES)


def test_sampled_clients_are_rotated_once(monkeypatch):
    """Whoever takes part in a round, the decomposition is that of all clients."""
    made = []
    rotate = quadratic.rotate
    monkeypatch.setattr(quadratic, "rotate", lambda *data: made.append(1) or rotate(*data))
    federation = cohort("squared")
    sp.train(sp.FedAvg(local_steps=3, clients_per_round=2), federation, rounds=6)
    assert len(made) == 1
    first = cohort("squared")
    first.local_updates(first.start(), first.gradients(first.start()), first.start(), LocalPlan(1))
    assert len(made) == 1


@pytest.mark.parametrize("loss", LOSSES)
def test_inference_mode_reaches_the_threads(loss, monkeypatch):
    monkeypatch.setattr("scaffpd.models.samples.CACHE", 60)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            each, _ = displacements(cohort(loss), PLANS["full"], corrected=True)
        assert torch.isfinite(each).all()
    finally:
        torch.set_num_threads(before)


def test_nothing_runs_any_more_after_a_failure():
    before = torch.get_num_threads()
    finished = []
    begun = threading.Event()
    torch.set_num_threads(2)

    def work(number):
        if number == 0:
            begun.wait(10)
            raise ValueError("first")
        begun.set()
        time.sleep(0.2)
        finished.append(number)

    try:
        with pytest.raises(ValueError, match="first"):
            execution.parallel_map(work, [0, 1], torch.device("cpu"))
        assert finished == [1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("loss", "sizes", "features", "plan", "path"),
    [
        ("squared", (60,) * 5, 10, LocalPlan(9), Path.CLOSED),
        ("squared", (60,) * 5, 1000, LocalPlan(9, batch_size=40), Path.SAMPLES),
        ("softmax", (72,) * 20, 65, LocalPlan(50, batch_size=32), Path.SAMPLES),  # digits
        ("logistic", (60,) * 5, 1000, LocalPlan(10), Path.SAMPLES),
        ("logistic", (1000,) * 5, 100, LocalPlan(100), Path.FEATURES),
        ("logistic", (60, 3000), 10, LocalPlan(100), Path.FEATURES),  # K_i would be too large
    ],
)
def test_the_path_is_the_one_with_fewer_multiplications(loss, sizes, features, plan, path):
    oracle = cohort(loss, sizes, features)._oracle
    assert cheapest_path(oracle.rows, oracle.loss, oracle.outputs, plan) is path


@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("loss", LOSSES)
def test_cores_change_nothing(loss, batch_size, monkeypatch):
    """Work on two threads is that on one, but for rounding; PyTorch's setting is as before."""
    monkeypatch.setattr("scaffpd.models.samples.CACHE", 60)
    monkeypatch.setattr(local_steps, "CACHE", 60)
    before = torch.get_num_threads()
    answers = []
    for number in (1, 2):
        torch.set_num_threads(number)
        try:
            answers.append(
                displacements(
                    cohort(loss), LocalPlan(4, 0.02, batch_size=batch_size), corrected=True
                )
            )
            assert torch.get_num_threads() == number
        finally:
            torch.set_num_threads(before)
    same(*answers)  # sums may be made in another order


def test_small_problems_run_on_one_thread_and_large_ones_do_not():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with execution.limit_threads(1000):
            assert torch.get_num_threads() == 1
            assert execution.thread_count() == 2
            used = set()
            meeting = threading.Barrier(2)

            def work(_):
                meeting.wait(10)
                used.add((threading.get_ident(), torch.get_num_threads()))

            execution.parallel_map(work, [0, 1], torch.device("cpu"))
            assert len(used) == 2
            assert {number for _, number in used} == {1}
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with execution.limit_threads(10**9):
            assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError, match="stop"), execution.limit_threads(1):
            raise RuntimeError("stop")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_training_uses_one_thread_for_a_small_problem_and_restores_the_rest(monkeypatch):
    """Also where `fair` chooses a method: constants on two threads cost more than all rounds."""
    before = torch.get_num_threads()
    seen = []
    federation = cohort("squared")
    constants = federation.constants

    def watched():
        seen.append(torch.get_num_threads())
        return constants()

    monkeypatch.setattr(federation, "constants", watched)
    torch.set_num_threads(2)
    try:
        sp.train(
            sp.fair(sp.ChiSquare(0.1)),
            federation,
            rounds=2,
            callbacks=[lambda _: seen.append(torch.get_num_threads())],
        )
        assert len(seen) > 2
        assert set(seen) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_a_sample_drawn_often_counts_often(m, b, n, steps, seed):
    random = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, m, (n, steps, b), generator=random)
    share = torch.rand(n, b, dtype=torch.float64, generator=random)
    weights = local_steps.counted(positions, share, m + seed % 3)
    assert weights.shape[:3] == (steps, n, 1)
    naive = np.zeros((steps, n, weights.shape[3]))
    step = np.arange(steps)[None, :, None]
    client = np.arange(n)[:, None, None]
    np.add.at(naive, (step, client, positions.numpy()), share.numpy()[:, None])
    torch.testing.assert_close(weights[:, :, 0], torch.from_numpy(naive))


def test_draws_are_splitmix64():
    """Against the published algorithm, one number at a time in whole numbers of Python."""

    def splitmix(state):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return state, z ^ (z >> 31)

    draws = Draws((7, 2**40, 1), ["a", "some client", "ß"])
    seeds = [int(seed) % 2**64 for seed in draws.seeds]
    drawn = torch.cat([draws.uniform(5), draws.uniform(3)], 1)
    for state, row in zip(seeds, drawn, strict=True):
        for ours in row.tolist():
            state, z = splitmix(state)
            assert ours == (z >> 11) / 2**53


@pytest.mark.parametrize("sizes", [(30, 30, 30), (200, 3, 31, 90, 7), (4, 5)])
def test_compressed_rows_have_the_same_losses(sizes, monkeypatch):
    monkeypatch.setattr("scaffpd.models.quadratic.FEW", 0)
    oracle = cohort("squared", sizes, features=8)._oracle
    x = torch.randn(8, dtype=torch.float64)
    small = compress(oracle.rows)
    ours = oracle.evaluate(x)
    exact = LinearOracle.evaluate(oracle, x)
    torch.testing.assert_close(ours.losses, exact.losses, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(ours.each(), exact.each(), rtol=1e-12, atol=1e-13)
    loss, gradient = ours.rounding()
    assert torch.all((ours.losses - exact.losses).abs() <= loss)
    assert torch.all((ours.each() - exact.each()).norm(dim=1) <= gradient)
    assert small.rows.layout.lengths == [min(m, 8) for m in sizes]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 12), st.integers(1, 12), st.floats(-12, 0), st.integers(0, 1000))
def test_triangles_have_the_same_products(extra, columns, exponent, seed):
    """By Cholesky or Householder: the bound holds, and columns of any size have their digits."""
    random = np.random.default_rng(seed)
    B = random.standard_normal((3, columns + extra, columns)) * np.logspace(
        0, 10 * exponent, columns
    )
    B[1, :, -1] = B[1, :, 0] + 10.0**exponent * B[1, :, -1]  # nearly dependent, or not
    R, eta = triangle_of(torch.from_numpy(B))
    assert torch.equal(R, R.triu())
    for b, r, most in zip(B, R.numpy(), eta.tolist(), strict=True):
        size = np.linalg.norm(b, axis=0)
        each = range(columns)
        off = np.array(
            [[float(dot(b[:, i], b[:, j]) - dot(r[:, i], r[:, j])) for i in each] for j in each]
        )
        assert np.all(np.abs(off) <= most * np.outer(size, size) * (1 + 1e-12))
        assert most < 1e-12


def dot(a, b):
    """⟨a, b⟩, exactly."""
    return sum(
        (Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)),
        Fraction(0),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.floats(-9, 0), st.integers(0, 1000))
def test_extreme_values_are_never_too_narrow(extra, columns, exponent, seed):
    """λ_max is right, and the bound on λ_min is one, however ill-conditioned the rows are."""
    random = np.random.default_rng(seed)
    A = random.standard_normal((columns + extra, columns)) * np.logspace(0, exponent, columns)
    s = np.linalg.svd(A, compute_uv=False)
    top, bottom = extreme_values(torch.from_numpy(A)[None], torch.zeros(1, dtype=torch.float64))
    assert float(top) == pytest.approx(s[0] ** 2, rel=1e-12)
    assert 0 <= float(bottom) <= s[-1] ** 2 * (1 + 1e-12)
    if s[-1] > 1e-5 * s[0]:
        assert float(bottom) >= 0.9 * s[-1] ** 2


def test_a_replay_off_the_gpu_is_a_call():
    calls = []
    replay = GraphReplay(lambda a, b: calls.append(1) or a + b)
    for _ in range(4):
        assert torch.equal(replay(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    assert len(calls) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_replay_on_the_gpu_is_the_same_function():
    replay = GraphReplay(lambda a, b: (a @ b).relu_())
    for k in range(6):
        a, b = torch.randn(2, 5, 5, device="cuda", generator=torch.Generator("cuda").manual_seed(k))
        assert torch.equal(replay(a, b), (a @ b).relu())
    assert replay.recorded is not None
    replay(torch.ones(3, 3, device="cuda"), torch.ones(3, 3, device="cuda"))
    assert replay.recorded is None
