"""`Linear` with every loss against a plain loop over clients and samples, and against autograd."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from naive import Client, relative, unequal_clients
from scaffpd.federation import LocalPlan
from scaffpd.models import numerics
from scaffpd.models import samples as ragged
from scaffpd.models.draws import Draws
from scaffpd.models.samples import Ragged, cheapest_cuts

CASES = {
    "squared": ("squared", 1, False),
    "squared, 3 outputs": ("squared", 3, False),
    "squared, intercept": ("squared", 2, True),
    "logistic": ("logistic", 1, False),
    "logistic, intercept": ("logistic", 1, True),
    "softmax": ("softmax", 4, False),
    "softmax, intercept": ("softmax", 3, True),
}
ITERATIVE = [name for name in CASES if not name.startswith("squared")]


def problem(case, l2=0.03, dtype=None, seed=0):
    """A cohort, the same clients as naive ones, and a point x; every column has an l2 of its own
    where there is an intercept.
    """
    loss, outputs, intercept = CASES[case]
    data = unequal_clients(loss, outputs, seed=seed)
    l2 = l2 * 10 ** np.linspace(-1, 1, 7) if intercept else l2
    model = sp.Linear(
        loss, l2=l2, intercept=intercept, classes=outputs if loss == "softmax" else None
    )
    cohort = sp.Cohort(data, model, dtype=dtype)
    ridge = np.repeat(l2, outputs) if intercept else l2
    clients = [Client(X, y, loss, ridge, outputs, intercept) for X, y in data.values()]
    x = np.random.default_rng(seed + 1).standard_normal(cohort.dimension)
    return cohort, clients, x


def tensor(x):
    return torch.tensor(x)


def drawn_rows(cohort, key, batch_size, steps):
    """Per client the rows of every step, as the cohort draws them, from its first row on."""
    layout = cohort._oracle.rows.layout
    draws = Draws(key, cohort.names)
    starts = layout.starts.tolist()
    sizes = layout.sizes.tolist()
    batches = [[] for _ in sizes]
    for _ in range(steps):
        block = layout.minibatch(draws.uniform(batch_size))
        for i, (rows, weight) in enumerate(zip(block.rows, block.weight, strict=True)):
            batches[i].append(rows[weight > 0].numpy() - starts[i])
    return batches


# ------------------------------------------------------------------ losses and gradients


@pytest.mark.parametrize("case", CASES)
def test_losses_sums_projections_and_norms_match_a_loop_over_samples(case):
    cohort, clients, x = problem(case)
    random = np.random.default_rng(3)
    weights = random.standard_normal(len(clients))
    answers = [client.value_and_gradient(x) for client in clients]
    losses = np.array([a for a, _ in answers])
    gradients = np.array([g for _, g in answers])
    for client, gradient in zip(clients, gradients, strict=True):
        assert relative(client.fast_gradient(x), gradient) < 1e-13
    at = cohort.gradients(tensor(x))
    np.testing.assert_allclose(at.losses, losses, rtol=1e-12)
    assert relative(at.sum(weights), weights @ gradients) < 1e-12
    np.testing.assert_allclose(at.norms(), (gradients**2).sum(1), rtol=1e-11)
    np.testing.assert_allclose(cohort.evaluate(x).loss, losses, rtol=1e-12)


@pytest.mark.parametrize("case", ["squared, 3 outputs", "logistic, intercept", "softmax"])
def test_outputs_of_ten_thousand_stay_finite(case):
    cohort, clients, x = problem(case)
    far = x * 1e4 / max(np.abs(client.A @ x.reshape(-1, client.k)).max() for client in clients)
    at = cohort.gradients(tensor(far))
    np.testing.assert_allclose(at.losses, [client.loss_at(far) for client in clients], rtol=1e-12)
    c = at.sum(np.full(len(clients), 1 / len(clients)))
    d = cohort.local_updates(tensor(far), at, c, LocalPlan(20)).sum(np.ones(len(clients)))
    assert torch.isfinite(c).all()
    assert torch.isfinite(d).all()


@pytest.mark.parametrize("case", CASES)
def test_single_precision_follows_double(case):
    (single, clients, x), (double, _, _) = problem(case, dtype=torch.float32), problem(case)
    weights = np.full(len(clients), 1 / len(clients))
    assert single.start().dtype == torch.float32
    x32 = torch.tensor(x, dtype=torch.float32)
    x64 = torch.tensor(x.astype(np.float32).astype(np.float64))
    a = single.gradients(x32)
    b = double.gradients(x64)
    np.testing.assert_allclose(a.losses, b.losses, rtol=2e-5)
    assert a.losses.dtype == a.norms().dtype == np.float64
    assert a.sum(weights).dtype == torch.float32
    assert relative(a.sum(weights), b.sum(weights)) < 2e-5
    np.testing.assert_allclose(
        single.constants().smoothness, double.constants().smoothness, rtol=1e-4
    )
    for plan in (LocalPlan(10), LocalPlan(10, batch_size=3)):
        d32 = single.local_updates(x32, a, a.sum(weights), plan).sum(weights)
        d64 = double.local_updates(x64, b, b.sum(weights), plan).sum(weights)
        assert d32.dtype == torch.float32
        assert relative(d32, d64) < 2e-4


@pytest.mark.cover(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_rounding_stays_within_the_bounds_that_clients_report(case, seed):
    """Single precision against double on the same stored data, badly scaled columns too."""
    loss, outputs, intercept = CASES[case]
    random = np.random.default_rng(seed)
    data = unequal_clients(loss, outputs, seed=seed)
    scale = 10.0 ** np.linspace(-3, 3, 6)
    data["badly scaled"] = (random.standard_normal((40, 6)) * scale, data["many"][1])
    data = {name: (X.astype(np.float32), y.astype(np.float32)) for name, (X, y) in data.items()}
    l2 = float(np.float32(0.03))
    model = sp.Linear(
        loss, l2=l2, intercept=intercept, classes=outputs if loss == "softmax" else None
    )
    cohort = sp.Cohort(data, model, dtype=torch.float32)
    shrink = np.repeat([*scale, 1.0][: 6 + intercept], outputs)
    for size in (0.0, 1e-3, 1.0, 100.0):
        x = (size * random.standard_normal(cohort.dimension) / (shrink if seed % 2 else 1)).astype(
            np.float32
        )
        at = cohort.gradients(torch.tensor(x))
        loss_error, gradient_error = at.rounding()
        for i, (X, y) in enumerate(data.values()):
            client = Client(X, y.astype(np.float64), loss, l2, outputs, intercept)
            value, gradient = client.value_and_gradient(x.astype(np.float64))
            got = at.sum(np.eye(len(data))[i]).double().numpy()
            assert abs(at.losses[i] - value) <= loss_error[i]
            assert np.linalg.norm(got - gradient) <= gradient_error[i]
            assert loss_error[i] <= 1e-4 * (1 + value) * (
                1 + np.abs(client.A).max() * np.abs(x).max()
            )


# ------------------------------------------------------------------ local steps


def check_local_steps(cohort, clients, x, plan, rates, tolerance=1e-10):
    at = cohort.gradients(tensor(x))
    each = np.array([client.fast_gradient(x) for client in clients])
    c = at.sum(np.linspace(0.1, 1, len(clients)))
    updates = cohort.local_updates(tensor(x), at, c, plan)
    for i, client in enumerate(clients):
        d = client.descend(x, each[i], c.numpy(), rates[i], plan.steps)
        only = np.eye(len(clients))[i]
        assert relative(updates.sum(only), d) < tolerance, list(cohort.names)[i]


@pytest.mark.parametrize("case", ITERATIVE)
@pytest.mark.parametrize("steps", [1, 2, 10, 100])
def test_local_steps_match_algorithm_2(case, steps):
    cohort, clients, x = problem(case)
    L = np.array([client.smoothness for client in clients])
    check_local_steps(cohort, clients, x, LocalPlan(steps), 1 / L)
    check_local_steps(cohort, clients, x, LocalPlan(steps, scale=1.9), 1.9 / L)
    check_local_steps(
        cohort, clients, x, LocalPlan(steps, rate=0.7 / L.max()), np.full(len(L), 0.7 / L.max())
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ITERATIVE)
def test_a_thousand_local_steps_without_regulariser(case):
    cohort, clients, x = problem(case, l2=0.0)
    L = np.array([client.smoothness for client in clients])
    rates = np.divide(
        1, L, out=np.zeros_like(L), where=L > 1e-12
    )  # a flat loss has no scale of its own: it stays put
    if not CASES[case][2]:
        assert (rates == 0).any()
    check_local_steps(cohort, clients, x, LocalPlan(1000), rates)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("origin", ["minibatch", "earlier point"])
def test_local_steps_use_the_control_variates_that_were_answered(case, origin):
    """c_i from a minibatch or from another point: the corrected gradient at x is then not c."""
    cohort, clients, x = problem(case)
    at = (
        cohort.gradients(tensor(x), batch_size=2, key=(4,))
        if origin == "minibatch"
        else cohort.gradients(tensor(x / 2))
    )
    own = [at.sum(np.eye(len(clients))[i]).numpy() for i in range(len(clients))]
    c = cohort.gradients(tensor(x)).sum(np.full(len(clients), 1 / len(clients)))
    updates = cohort.local_updates(tensor(x), at, c, LocalPlan(25))
    for i, client in enumerate(clients):
        d = client.descend(x, own[i], c.numpy(), 1 / client.smoothness, 25)
        assert relative(updates.sum(np.eye(len(clients))[i]), d) < 1e-10


def test_the_first_step_is_the_correction_and_a_zero_correction_stays():
    cohort, clients, x = problem("logistic")
    at = cohort.gradients(tensor(x))
    c = torch.randn(len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = np.ones(len(clients))
    one = cohort.local_updates(tensor(x), at, c, LocalPlan(1, rate=0.25)).sum(weights)
    # gradients that are computed twice may differ in their last digit, of the size of the largest
    assert relative(one, 0.25 * len(clients) * c) < 1e-13
    still = cohort.local_updates(tensor(x), at, torch.zeros_like(c), LocalPlan(50)).sum(weights)
    assert torch.equal(still, torch.zeros_like(c))


# ------------------------------------------------------------------ minibatches


@pytest.mark.parametrize("case", CASES)
def test_minibatch_gradients_match_a_loop_over_the_drawn_rows(case):
    cohort, clients, x = problem(case)
    at = cohort.gradients(tensor(x), batch_size=5, key=(3, 1, 4))
    rows = [batches[0] for batches in drawn_rows(cohort, (3, 1, 4), 5, 1)]
    answers = [client.value_and_gradient(x, r) for client, r in zip(clients, rows, strict=True)]
    gradients = np.array([g for _, g in answers])
    weights = np.random.default_rng(0).standard_normal(len(clients))
    np.testing.assert_allclose(at.losses, [value for value, _ in answers], rtol=1e-12)
    assert relative(at.sum(weights), weights @ gradients) < 1e-12
    np.testing.assert_allclose(at.norms(), (gradients**2).sum(1), rtol=1e-11)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scale", [None, 1.0])
def test_minibatch_local_steps_match_a_loop_over_the_drawn_rows(case, scale):
    cohort, clients, x = problem(case)
    at = cohort.gradients(tensor(x))
    c = at.sum(np.full(len(clients), 1 / len(clients)))
    L = np.array([client.smoothness for client in clients])
    plan = LocalPlan(30, rate=0.05 / L.max() if scale is None else None, batch_size=4, key=(7, 2))
    batches = drawn_rows(cohort, (7, 2), 4, 30)
    updates = cohort.local_updates(tensor(x), at, c, plan)
    rates = cohort._oracle.rates(plan).flatten().numpy() if scale else np.full(len(L), plan.rate)
    for i, client in enumerate(clients):
        d = client.descend(x, client.fast_gradient(x), c.numpy(), rates[i], 30, batches[i])
        assert relative(updates.sum(np.eye(len(clients))[i]), d) < 1e-10


def test_minibatch_rates_follow_the_expected_smoothness():
    """(1 − 1/b) L_i + max_j L_ij / b; all rows: L_i."""
    cohort, clients, _ = problem("logistic")
    for batch_size in (1, 4, 15):
        rates = cohort._oracle.rates(LocalPlan(1, batch_size=batch_size)).flatten().numpy()
        for rate, client in zip(rates, clients, strict=True):
            steepest = 0.25 * (client.A**2).sum(1).max() + np.max(client.l2)
            L = client.smoothness
            expected = (
                L
                if len(client.A) <= batch_size
                else L * (1 - 1 / batch_size) + steepest / batch_size
            )
            assert rate == pytest.approx(1 / expected, rel=1e-12)


def test_draws_are_uniform_and_independent_between_clients_and_steps():
    names = [f"client-{i}" for i in range(6)]
    draws = Draws((0, 1), names)
    u = np.concatenate([draws.uniform(500).numpy() for _ in range(40)], axis=1)
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.array([np.histogram(row, 20, (0, 1))[0] for row in u])
    chi_square = ((counts - u.shape[1] / 20) ** 2 / (u.shape[1] / 20)).sum(1)
    assert chi_square.max() < 50  # 19 degrees of freedom: P < 1e-4 each
    correlation = np.corrcoef(
        np.vstack(
            [u, u[:, ::-1], np.roll(u, 1, axis=1), Draws((0, 2), names).uniform(20_000).numpy()]
        )
    )
    assert np.abs(correlation - np.eye(len(correlation))).max() < 0.04


# ------------------------------------------------------------------ constants


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("l2", [0.0, 0.02])
def test_smoothness_and_strong_convexity_hold_at_random_points(case, l2):
    cohort, clients, x = problem(case, l2=l2)
    constants = cohort.constants()
    assert constants.convex
    random = np.random.default_rng(8)
    for i, client in enumerate(clients):
        assert constants.smoothness[i] == pytest.approx(client.smoothness, rel=1e-10, abs=1e-12)
        for size in (0.0, 0.1, 3.0):
            spectrum = np.linalg.eigvalsh(client.hessian(size * random.standard_normal(len(x))))
            slack = 1e-13 * max(1.0, spectrum[-1])
            assert spectrum[-1] <= constants.smoothness[i] + slack
            assert spectrum[0] >= constants.strong_convexity[i] - slack
            assert constants.strong_convexity[i] >= np.min(client.l2)


@pytest.mark.parametrize("case", ITERATIVE)
def test_power_iteration_is_close_to_exact_and_not_below(case, monkeypatch):
    exact = problem(case)[0].constants().smoothness
    monkeypatch.setattr(numerics, "EXACT", 0)
    iterated = problem(case)[0].constants().smoothness
    assert np.all(iterated >= 0.999 * exact)
    assert np.all(iterated <= 1.03 * exact)


def test_power_iteration_finds_eigenvectors_that_ones_cannot_see(monkeypatch):
    """Columns that come in pairs (a, −a) make A·1 vanish; the largest eigenvalue is still there."""
    monkeypatch.setattr(numerics, "EXACT", 0)
    half = torch.randint(-9, 10, (30, 5), generator=torch.Generator().manual_seed(1)).double()
    A = torch.cat([half, -half], 1)
    exact = float(torch.linalg.eigvalsh(A.T @ A)[-1])
    assert exact <= float(numerics.largest_eigenvalues(A[None])) <= 1.03 * exact
    assert float(numerics.largest_eigenvalues(torch.zeros(1, 4, 3))) == 0.0


# ------------------------------------------------------------------ the layout of unequal clients


SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=14)


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, overhead=st.integers(0, 3000), width=st.integers(1, 40))
def test_blocks_cover_every_row_exactly_once(sizes, overhead, width):
    saved = ragged.OVERHEAD["cpu"]
    ragged.OVERHEAD["cpu"] = overhead
    try:
        layout = Ragged(sizes, torch.device("cpu"), torch.float64)
        share = 1 / layout.sizes[layout.owner].double()
        blocks = layout.blocks(share, width)
    finally:
        ragged.OVERHEAD["cpu"] = saved
    seen = torch.zeros(sum(sizes))
    clients = []
    stack = torch.arange(2 * sum(sizes), dtype=torch.float64).view(-1, 2)
    for block in blocks:
        seen.index_add_(0, block.rows[block.weight > 0], torch.ones(int((block.weight > 0).sum())))
        clients += block.clients.tolist()
        assert torch.equal(layout.owner[block.rows], block.clients[:, None].expand_as(block.rows))
        torch.testing.assert_close(
            block.weight.sum(1), torch.ones(len(block.clients), dtype=torch.float64)
        )
        assert torch.equal(block.of(stack), stack[block.rows])
    assert torch.equal(seen, torch.ones(sum(sizes)))
    assert sorted(clients) == list(range(len(sizes)))


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), overhead=st.floats(0, 200))
def test_blocks_are_the_cheapest_of_all_partitions(sizes, overhead):
    ordered = np.sort(np.array(sizes))[::-1]

    def cost(ends):
        starts = [0, *ends[:-1]]
        return sum(overhead + (b - a) * ordered[a] for a, b in zip(starts, ends, strict=True))

    n = len(ordered)
    every = [[*cuts, n] for k in range(n) for cuts in itertools.combinations(range(1, n), k)]
    assert cost(cheapest_cuts(ordered, overhead)) == pytest.approx(min(map(cost, every)))


def test_equal_neighbours_are_not_copied():
    X = np.random.default_rng(0).standard_normal((20, 3))
    cohort = sp.Cohort([(X, X[:, 0])] * 4, sp.Linear("squared"))
    rows = cohort._oracle.rows
    [block] = rows.blocks
    A, _ = rows.of(block)
    assert A.shape == (4, 20, 3)
    assert A.data_ptr() == rows.A.data_ptr()
    assert block.first == 0


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, batch_size=st.integers(1, 20), seed=st.integers(0, 100))
def test_minibatches_stay_inside_their_client(sizes, batch_size, seed):
    layout = Ragged(sizes, torch.device("cpu"), torch.float32)
    uniform = torch.from_numpy(np.random.default_rng(seed).random((len(sizes), batch_size)))
    uniform[:, 0] = 1 - 2.0**-53  # the largest that a draw can be
    block = layout.minibatch(uniform)
    assert torch.equal(
        layout.owner[block.rows], torch.arange(len(sizes))[:, None].expand_as(block.rows)
    )
    assert block.weight.dtype == torch.float32
    torch.testing.assert_close(block.weight.sum(1), torch.ones(len(sizes)))
    for i, m in enumerate(sizes):
        chosen = block.rows[i][block.weight[i] > 0] - layout.starts[i]
        assert len(chosen) == min(m, batch_size)
        if m <= batch_size:
            assert chosen.tolist() == list(range(m))


# ------------------------------------------------------------------ shapes


@pytest.mark.parametrize("case", CASES)
def test_reshape_gives_the_coefficients_that_predict(case):
    cohort, clients, x = problem(case)
    _, outputs, intercept = CASES[case]
    model = cohort.model
    X = clients[3].A[:, :6]
    for given_x in (x, torch.tensor(x)):
        weights, offset = model.reshape(given_x, 6)
        assert weights.shape == (6, outputs)
        assert (offset is None) == (not intercept)
        flat = weights.ravel() if offset is None else np.vstack([weights, offset]).ravel()
        assert np.array_equal(flat, x)
    z = X @ weights + (0 if offset is None else offset)
    np.testing.assert_allclose(z, clients[3].A @ x.reshape(-1, outputs), rtol=1e-12, atol=1e-12)
