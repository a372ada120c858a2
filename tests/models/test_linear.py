"""`Linear` with every loss against a plain loop over clients and samples, and against autograd."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import scaffpd as sp
from naive import Client, relative, unequal_clients
from scaffpd.federation import LocalPlan
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


# --- losses and gradients


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


# --- local steps


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


# --- minibatches


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


# --- constants


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


# --- the layout of unequal clients


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


# --- shapes


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
