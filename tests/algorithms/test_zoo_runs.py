"""Every method, run as users run it: resumed, repeated, on networks, in float32, alone, badly asked, and to the end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

import scaffpd as sp
from cases.reference import reference_optimum
from scaffpd.algorithms import Fair
from scaffpd.errors import InputError

CHI = sp.ChiSquare(rho=0.05)
METHODS = {
    "FedAvg": sp.FedAvg(local_steps=4),
    "FedAvg, some clients, minibatches": sp.FedAvg(
        local_steps=4, clients_per_round=2, batch_size=5
    ),
    "FedProx": sp.FedProx(local_steps=4, mu=0.5, weights="uniform"),
    "Scaffold II": sp.Scaffold(local_steps=4),
    "Scaffold II, some clients": sp.Scaffold(local_steps=4, clients_per_round=2, batch_size=5),
    "Scaffold I": sp.Scaffold(local_steps=4, option="I", clients_per_round=3, weights="samples"),
    "ProxSkip": sp.ProxSkip(),
    "ProxSkip, minibatches": sp.ProxSkip(local_steps=3, batch_size=5, weights="samples"),
    "AFL": sp.AFL(),
    "AFL, local steps, mean": sp.AFL(CHI, local_steps=4, batch_size=5),
    "DRFA": sp.DRFA(CHI, local_steps=4),
    "DRFA, some clients": sp.DRFA(local_steps=4, clients_per_round=2, batch_size=5),
    "q-FedSGD": sp.QFFL(q=2.0, local_steps=1),
    "q-FedAvg": sp.QFFL(q=0.5, local_steps=4, clients_per_round=3, batch_size=5),
    "DeltaFL": sp.DeltaFL(tail=0.4, local_steps=4, clients_per_round=4),
    "GradientDescentAscent": sp.GradientDescentAscent(CHI),
    "Extragradient": sp.Extragradient(sp.CVaR(alpha=0.5)),
    "ScaffPD, one step": sp.ScaffPD(CHI, local_steps=1),
    "MinimaxNewton": sp.MinimaxNewton(CHI),
    "SubspaceSaddle": sp.SubspaceSaddle(CHI),
    "fair": sp.fair(CHI, local_steps=20),
    "fair, minibatches": sp.fair(CHI, local_steps=4, batch_size=5),
    "ScaffPD": sp.ScaffPD(CHI, local_steps=4),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
CENTRAL = (sp.GradientDescentAscent, sp.Extragradient, partial(sp.ScaffPD, local_steps=1))
PROVING = (*CENTRAL[:2], sp.MinimaxNewton, sp.ScaffPD, sp.SubspaceSaddle, Fair)


def cohort(dtype=None, N=5):
    sizes = (3, 8, 15, 40, 25)[:N]
    return sp.Cohort(
        sp.data.synthetic(N=N, d=4, sizes=sizes, sigma=0.5, seed=2),
        sp.Linear("squared", l2=0.1),
        dtype=dtype,
    )


def network():
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).double()
    data = [(random.standard_normal((m, 3)), random.integers(0, 2, m)) for m in (4, 9, 13, 6)]
    return sp.Cohort(data, sp.Module(net, l2=0.01))


@every_method
def test_a_resumed_run_is_the_run(method, tmp_path):
    """Begun on clients that have seen another run: nothing of it stays behind (no stale control variates)."""
    clients = cohort()
    whole = sp.train(method, clients, rounds=5, seed=3)
    sp.train(method, clients, rounds=2, seed=3, checkpoint=tmp_path / "run")
    rest = sp.train(method, cohort(), rounds=5, seed=3, checkpoint=tmp_path / "run")
    assert np.array_equal(rest.x, whole.x)
    assert np.array_equal(rest.weights, whole.weights)
    for column in ("certificate", "exchanges", "bytes_up", "bytes_down"):
        assert np.array_equal(rest.history[column], whole.history[column]), column


@pytest.mark.long  # tests/models/test_networks.py trains one by every method
@pytest.mark.parametrize(
    "method",
    [m for m in METHODS.values() if not isinstance(m, sp.SubspaceSaddle | sp.MinimaxNewton)],
)
def test_networks_train(method):
    federation = network()
    start = federation.evaluate(federation.start()).loss
    result = sp.train(method, federation, rounds=6)
    assert result.history.losses.mean(1).min() < 0.95 * start.mean()
    assert result.certificate == np.inf
    assert "no certificate" in result.message


@every_method
def test_float32_stays_near_and_weights_are_weights(method):
    a, b = (sp.train(method, cohort(dtype), rounds=4) for dtype in (torch.float32, torch.float64))
    assert a.x.dtype == np.float32
    np.testing.assert_allclose(a.x, b.x, atol=2e-3)
    weights = b.history.weights
    assert np.all(weights >= 0)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-9)


@pytest.mark.parametrize("method", [m for m in METHODS.values() if not isinstance(m, PROVING)])
def test_without_a_proof_it_says_so(method):
    result = sp.train(method, cohort(), rounds=2)
    assert f"{type(method).__name__} does not measure" in result.message
    with pytest.raises(InputError, match="tol needs a certificate"):
        sp.train(method, cohort(), rounds=2, tol=1e-3)


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", CENTRAL)
@pytest.mark.parametrize(
    "objective", [CHI, sp.CVaR(alpha=0.5), sp.Tilted(rho=0.2), sp.QFair(q=1.0)], ids=str
)
def test_centralised_references_reach_the_optimum_of_an_interior_point_solver(kind, objective):
    clients = sp.data.synthetic(N=4, d=3, m=20, sigma=0.3, seed=1)
    federation = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    best = reference_optimum(clients, "squared", 0.1, objective)
    result = sp.train(kind(objective), federation, rounds=4000, tol=1e-7)
    assert result.status is sp.Status.CONVERGED
    value = objective.support(federation.evaluate(result.x).loss)
    assert -1e-9 <= value - best.value <= 1e-7


def test_corrected_methods_reach_the_average_optimum_and_fed_avg_does_not():
    clients = sp.data.synthetic(N=4, d=3, m=20, sigma=1.0, seed=1)
    federation = sp.Cohort(clients, sp.Linear("squared", l2=1.0))
    best = reference_optimum(clients, "squared", 1.0, sp.Average())
    half = sp.Scaffold(clients_per_round=2)
    for method, rounds in (
        (sp.Scaffold(), 80),
        (sp.Scaffold(option="I"), 20),
        (sp.ProxSkip(), 20),
        (half, 160),
    ):
        result = sp.train(method, federation, rounds=rounds)
        assert np.linalg.norm(result.x - best.x) < 1e-4, method
    drifted = sp.train(sp.FedAvg(weights="uniform"), federation, rounds=60)
    assert np.linalg.norm(drifted.x - best.x) > 1e-3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sp.FedAvg(local_steps=0), "local_steps >= 1"),
        (lambda: sp.FedAvg(local_steps=None), "local_steps >= 1"),
        (lambda: sp.FedAvg(batch_size=2.5), "batch_size >= 1"),
        (lambda: sp.FedAvg(local_rate=-1), "local_rate > 0"),
        (lambda: sp.FedAvg(server_rate=None), "server_rate"),
        (lambda: sp.FedAvg(weights="sample"), "did you mean 'samples'"),
        (lambda: sp.ProxSkip(weights="equal"), "Unknown weights"),
        (lambda: sp.FedProx(mu=-0.1), "mu >= 0"),
        (lambda: sp.Scaffold(option="III"), "Unknown option"),
        (lambda: sp.QFFL(q=-1), "q >= 0"),
        (lambda: sp.QFFL(q=float("nan")), "NaN"),
        (lambda: sp.DeltaFL(tail=0), "0 < tail <= 1"),
        (lambda: sp.DRFA(0.1), "DRFA needs an objective"),
        (lambda: sp.AFL(sp.Agnostic), "AFL needs an objective"),
        (lambda: sp.AFL(dual_rate=0), "dual_rate > 0"),
        (lambda: sp.Extragradient("chi"), "Extragradient needs an objective"),
        (lambda: sp.MinimaxSums(CHI, pairs=0), "pairs >= 1"),
        (lambda: sp.SubspaceSaddle(sp.Agnostic), "SubspaceSaddle needs an objective"),
        (lambda: sp.ScaffPD(CHI, steps=3), "ScaffPD needs steps"),
        (
            lambda: sp.train(sp.FedAvg(clients_per_round=9), cohort(), rounds=1),
            "clients_per_round <= 5",
        ),
        (
            lambda: sp.train(sp.DRFA(clients_per_round=9), cohort(), rounds=1),
            "clients_per_round <= 5",
        ),
        (
            lambda: sp.train(sp.DRFA(sp.ChiSquare(rho=1, prior=[1, 2])), cohort(), rounds=1),
            "prior for 2 clients",
        ),
    ],
)
def test_mistakes_get_a_sentence(make, words):
    with pytest.raises(InputError, match=words):
        make()


@dataclass(frozen=True)
class Mine(sp.FedProx):
    """A user's own method, whose `momentum` and `q` are not those of ours, and whose `mu` is."""

    momentum: float = 1.0
    q: float | None = None


def test_ranges_hold_for_arguments_of_ours_alone():
    assert (Mine().momentum, Mine(q=-1.0, momentum=7.0).q) == (1.0, -1.0)
    with pytest.raises(InputError, match="Mine needs mu >= 0 and finite, got -1"):
        Mine(mu=-1)
    with pytest.raises(InputError, match="Mine needs a number for mu, got None"):
        Mine(mu=None)


@pytest.mark.parametrize(
    "name", ["FedAvg", "Scaffold II", "DRFA", "AFL", "q-FedAvg", "DeltaFL", "ProxSkip"]
)
def test_a_rate_too_large_is_called_divergence(name):
    """Never a NaN as a result: the last finite point is returned."""
    from dataclasses import replace

    method = replace(METHODS[name], local_rate=50.0)
    result = sp.train(method, cohort(), rounds=60)
    if name != "q-FedAvg":  # its steps shrink with the size of the updates
        assert result.status is sp.Status.DIVERGED
    assert np.isfinite(result.x).all()
    assert np.isfinite(result.weights).all()


def test_the_seed_decides():
    """Who takes part, which snapshot, how many steps: another seed, another run; minibatches too."""
    for method in (
        sp.FedAvg(clients_per_round=2),
        sp.Scaffold(clients_per_round=2),
        sp.DRFA(CHI, local_steps=20),
        sp.DRFA(CHI, clients_per_round=2),
        sp.ProxSkip(local_steps=5),
        sp.FedAvg(batch_size=2),
        sp.QFFL(batch_size=2),
    ):
        one, other = (sp.train(method, cohort(), rounds=4, seed=seed) for seed in (0, 1))
        assert not np.array_equal(one.history.losses, other.history.losses), method


def test_every_round_draws_other_rows():
    for method in (
        sp.FedAvg(batch_size=2),
        sp.Scaffold(batch_size=2),
        sp.AFL(local_steps=2, batch_size=2),
    ):
        federation = cohort()
        keys = []
        ask = federation.local_updates
        federation.local_updates = lambda *what, ask=ask, keys=keys: (
            keys.append(what[3].key) or ask(*what)
        )
        sp.train(method, federation, rounds=4)
        assert len(set(keys)) == len(keys) == 4, method


@pytest.mark.parametrize(
    ("method", "exchanges", "up", "down"),
    [
        (sp.FedAvg(local_rate=0.01), 1, 4, 4),
        (sp.FedProx(local_rate=0.01), 1, 4, 4),
        (sp.Scaffold(local_rate=0.01), 1, 4, 8),
        (sp.Scaffold(local_rate=0.01, option="I"), 1, 4 + 4 + 3, 8),
        (sp.ProxSkip(local_rate=0.01, local_steps=2), 1, 4, 4),
        (sp.AFL(local_rate=0.01, dual_rate=0.01), 1, 4 + 1, 4),
        (sp.DRFA(CHI, local_rate=0.01, dual_rate=1e-6), 2, 8 + 1, 8),
        (sp.QFFL(local_rate=0.01), 1, 4 + 2, 4),
        (sp.DeltaFL(local_rate=0.01, tail=1.0), 2, 4 + 1, 4),
        (sp.GradientDescentAscent(CHI), 1, 4 + 3, 4),
        (sp.Extragradient(CHI), 2, 8 + 6, 8),
        (sp.ScaffPD(CHI, local_steps=1, steps=sp.Fixed(0.01, 0.01)), 1, 4 + 3, 4),
        (sp.MinimaxNewton(CHI), 1, 4 + 3, 4),  # Hessians of squared losses go up once
        (sp.SubspaceSaddle(CHI, memory=3), 3, 8 + 3 * (3 + 3) // 2 + 4, 8 + 3 + 5 + 1),
        (sp.SubspaceSaddle(CHI), 2, 4 + 4 * (4 + 3) // 2 + 4, 4 + 4 + 5),
        (sp.ScaffPD(CHI, steps=sp.Fixed(0.01, 0.01, local_rate=0.01)), 2, 8 + 3, 8),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else "",
)
def test_what_a_round_sends(method, exchanges, up, down):
    """As docs/methods.md says: per client, in numbers (d = 4)."""
    federation = cohort()
    state = method.round(federation, method.init(federation))
    before = federation.traffic.snapshot()
    method.round(federation, state)
    sent = federation.traffic
    assert sent.exchanges - before.exchanges == exchanges
    assert sent.bytes_up - before.bytes_up == 5 * 8 * up
    assert sent.bytes_down - before.bytes_down == 5 * 8 * down


def test_automatic_settings():
    federation = cohort()
    known = federation.constants()
    L = known.smoothness.max()
    mu = known.strong_convexity.min()
    assert sp.ProxSkip().init(federation).expected_steps == round(np.sqrt(L / mu))
    assert sp.FedAvg().init(federation).local_rate == pytest.approx(1 / L)
    at = federation.gradients(federation.start())
    c = np.array([at.sum(row).numpy() for row in np.eye(5)])
    K = ((c - c.mean(0)) ** 2).sum()
    assert sp.DRFA(local_steps=4).init(federation).dual_rate == pytest.approx(
        0.45 / (K * 4 * 4 / L)
    )
    assert sp.AFL(local_steps=4).init(federation).dual_rate == pytest.approx(0.45 / (K * 4 / L))
    gda = sp.GradientDescentAscent(CHI).init(federation)
    assert gda.server_rate == pytest.approx(1 / (2 * L))
    assert gda.dual_rate == pytest.approx(0.45 / (K / (2 * L)))


def test_the_tail_is_not_moved_by_rounding():
    from scaffpd.algorithms.delta_fl import quantile

    losses = np.arange(10.0)
    equal = np.full(10, 0.1)
    assert [quantile(losses, equal, 1 - t) for t in (0.1, 0.3, 0.5, 0.7, 0.9)] == [8, 6, 4, 2, 0]
    assert quantile(losses, equal, 0.0) == 0


def test_flat_losses_get_a_sentence_and_flat_clients_stay_behind():
    flat = sp.Cohort([(np.zeros((3, 2)), np.ones(3))] * 2, sp.Linear("squared", l2=0.0))
    for method in (sp.FedAvg(), sp.AFL(), sp.GradientDescentAscent(CHI), sp.SubspaceSaddle(CHI)):
        with pytest.raises(InputError, match="do not depend on the model"):
            sp.train(method, flat, rounds=1)
    clients = [*sp.data.synthetic(N=2, d=3, m=10), (np.zeros((3, 3)), np.ones(3))]
    half = sp.Cohort(clients, sp.Linear("squared", l2=0.0))
    found = sp.train(sp.ScaffPD(sp.Average(), local_steps=1), half, rounds=10)
    assert np.abs(found.x).max() > 0.01


def test_sampling_is_fair():
    """Every client takes part equally often, and the seed decides who."""
    clients = sp.data.synthetic(N=6, d=2, m=5)
    result = sp.train(
        sp.FedAvg(clients_per_round=2, weights="uniform"),
        sp.Cohort(clients, sp.Linear()),
        rounds=150,
    )
    took_part = (result.history.weights[1:] > 0).sum(0)
    assert took_part.sum() == 300
    assert np.abs(took_part - 50).max() < 23  # four standard deviations
