"""Every method against its paper's pseudo-code in plain NumPy, and run as users run it.

The first table is of methods × losses × settings, each with the method's own draws handed to the
naive loop; the second of methods × checks: resumed, in float32, refused, sent, to the end.
"""

from dataclasses import dataclass, replace
from functools import partial

import naive_zoo as naive
import numpy as np
import pytest
import torch
from zoo_cases import OUTPUTS, case, compare, play

import scaffpd as sp
from cases.refusals import refuses
from experiments.central import Extragradient, GradientDescentAscent
from scaffpd.algorithms.delta_fl import quantile

ROUNDS = 4
CHI = sp.ChiSquare(rho=0.05)
every_loss = pytest.mark.parametrize("loss", OUTPUTS)
# batch size, clients per round, weights
SETTINGS = [
    (None, None, "samples"),
    (None, None, "uniform"),
    (None, 4, "samples"),
    (3, None, "uniform"),
    (3, 4, "samples"),
    (3, 4, "uniform"),
]
AVERAGING = {
    "FedAvg": (sp.FedAvg, naive.fed_avg),
    "FedProx": (partial(sp.FedProx, mu=0.7), partial(naive.fed_avg, mu=0.7)),
    **{
        f"FedOpt, {optimizer}": (
            partial(
                sp.FedOpt,
                optimizer=optimizer,
                momentum=0.8,
                second_momentum=0.7,
                adaptivity=0.05,
            ),
            partial(naive.fed_opt, optimizer=optimizer),
        )
        for optimizer in ("momentum", "adagrad", "adam", "yogi")
    },
    "Scaffold": (sp.Scaffold, naive.scaffold),
    "q-FFL, 0.5": (partial(sp.QFFL, q=0.5), partial(naive.q_ffl, q=0.5)),
    "q-FFL, 3": (partial(sp.QFFL, q=3.0), partial(naive.q_ffl, q=3.0)),
    "Δ-FL": (partial(sp.DeltaFL, tail=0.31), partial(naive.delta_fl, tail=0.31)),
}


@pytest.mark.sample(40)
@pytest.mark.cover(2)
@every_loss
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(("batch_size", "chosen", "weights"), SETTINGS)
@pytest.mark.parametrize("name", AVERAGING)
def test_methods_that_average(name, loss, steps, batch_size, chosen, weights):
    problem = case(loss)
    make, loop = AVERAGING[name]
    method = make(
        local_steps=steps,
        server_rate=0.9,
        batch_size=batch_size,
        clients_per_round=chosen,
        weights=weights,
        local_rate=problem.rate,
    )
    run = play(method, problem, ROUNDS)
    setting = problem.setting(ROUNDS, weights, steps=steps, server_rate=0.9, run=run)
    compare(run, loop(setting))
    if chosen is not None and name != "Δ-FL":
        assert {len(set(names)) for names in run.participants} == {chosen}
        assert len({tuple(sorted(names)) for names in run.participants}) > 1


@pytest.mark.cover(2)
@every_loss
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_prox_skip(loss, batch_size, weights):
    problem = case(loss)
    method = sp.ProxSkip(
        local_steps=4, batch_size=batch_size, local_rate=problem.rate, weights=weights
    )
    run = play(method, problem, ROUNDS)
    steps = [call.plan.steps for call in run.local]
    assert len(set(steps)) > 1, "the number of local steps is random"
    compare(run, naive.prox_skip(problem.setting(ROUNDS, weights, run=run), steps, 4))


OBJECTIVES = {
    "agnostic": (sp.Agnostic(), naive.agnostic_prox),
    "chi-square": (sp.ChiSquare(0.7), naive.chi_square_prox(0.7)),
    "q-fair": (sp.QFair(1.0), naive.q_fair_prox),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


@pytest.mark.cover(2)
@every_loss
@every_objective
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("steps", [1, 5])
def test_afl(loss, objective, batch_size, steps):
    problem = case(loss)
    goal, prox = OBJECTIVES[objective]
    rates = {"server_rate": 0.9, "dual_rate": problem.dual_rate}
    method = sp.AFL(
        goal, local_steps=steps, batch_size=batch_size, local_rate=problem.rate, **rates
    )
    run = play(method, problem, ROUNDS)
    start = run.states[0].weights
    setting = problem.setting(ROUNDS, steps=steps, prox=prox, start=start, run=run, **rates)
    compare(run, naive.afl(setting))


@pytest.mark.cover(2)
@every_loss
@every_objective
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("chosen", [None, 4])
def test_drfa(loss, objective, batch_size, chosen):
    problem = case(loss)
    goal, prox = OBJECTIVES[objective]
    rates = {"server_rate": 0.9, "dual_rate": problem.dual_rate / 5}
    method = sp.DRFA(
        goal,
        local_steps=5,
        batch_size=batch_size,
        local_rate=problem.rate,
        clients_per_round=chosen,
        **rates,
    )
    run = play(method, problem, ROUNDS)
    snapshots = [call.plan.snapshot for call in run.local]
    assert len(set(snapshots)) > 1
    drawn = None
    if chosen is not None:
        # D with its repetitions, from the weights (how often drawn)/m that the server summed with.
        times = [np.rint(chosen * call.sums[0]).astype(int) for call in run.local]
        assert all(
            np.allclose(t / chosen, c.sums[0]) for t, c in zip(times, run.local, strict=True)
        )
        drawn = [list(np.repeat(problem.names, number)) for number in times]
        assert all(len(names) == len(set(names)) == chosen for names in run.asked_for_losses)
    setting = problem.setting(ROUNDS, prox=prox, start=run.states[0].weights, run=run, **rates)
    compare(run, naive.drfa(setting, snapshots, drawn, run.asked_for_losses))


@pytest.mark.cover(1)
@every_loss
@every_objective
@pytest.mark.parametrize(
    ("method", "loop"),
    [
        (GradientDescentAscent, naive.descent_ascent),
        (Extragradient, naive.extragradient),
    ],
)
def test_saddle_methods_without_local_steps(loss, objective, method, loop):
    problem = case(loss)
    goal, prox = OBJECTIVES[objective]
    run = play(method(goal, server_rate=problem.rate, dual_rate=problem.dual_rate), problem, ROUNDS)
    start = run.states[0].weights
    compare(run, loop(problem.setting(ROUNDS, dual_rate=problem.dual_rate, prox=prox, start=start)))


@pytest.mark.cover(2)
@every_loss
@every_objective
@pytest.mark.parametrize("theta", [0.0, 0.8])
@pytest.mark.parametrize("steps", [1, 2, 25])
def test_scaff_pd(loss, objective, theta, steps):
    """One local step is the accelerated primal-dual method, and costs one exchange."""
    problem = case(loss)
    goal, prox = OBJECTIVES[objective]
    rate = problem.rate / 4
    start = goal.start(naive.losses_at(problem.clients, problem.x0))
    tau = 0.5 * rate * steps / start.sum()
    rule = sp.Fixed(tau, problem.dual_rate, theta, rate)
    run = play(sp.ScaffPD(goal, local_steps=steps, steps=rule), problem, ROUNDS)
    # A state holds the dual step at its x: λ of this round's x step is that of the state before.
    used = replace(run, states=[run.states[0], *run.states[:-1]])
    more = {"dual_rate": problem.dual_rate, "prox": prox, "start": start}
    setting = problem.setting(ROUNDS, steps=steps, rate=rate, **more)
    expected = list(naive.scaff_pd(setting, tau, theta))
    compare(run, [(x, None) for x, _ in expected])
    for seen, (_, weights) in zip(used.weights, expected, strict=True):
        np.testing.assert_allclose(seen, weights, rtol=1e-9, atol=1e-12)


@every_loss
@pytest.mark.parametrize("batch_size", [None, 3])
def test_the_automatic_local_rate_is_one_over_the_largest_smoothness(loss, batch_size):
    """L_i, or L_i + (max_j L_ij − L_i)/b for minibatches of b rows of a client that has more."""
    problem = case(loss)
    steepness = []
    for f in problem.clients.values():
        single = lambda j, f=f: type(f)(f.A[j : j + 1], f.y[j : j + 1], f.loss, f.l2, f.k)
        most = max(single(j).smoothness for j in range(len(f.A)))
        extra = 0.0
        if batch_size is not None and len(f.A) > batch_size:
            extra = max(0.0, most - f.smoothness) / batch_size
        steepness.append(f.smoothness + extra)
    for method in (sp.FedAvg, sp.Scaffold, sp.ProxSkip, sp.QFFL, sp.DeltaFL, sp.AFL, sp.DRFA):
        found = method(batch_size=batch_size).automatic(problem.cohort)["local_rate"]
        assert found == pytest.approx(1 / max(steepness), rel=1e-9)
        run = play(method(batch_size=batch_size, local_steps=2), problem, 1)
        assert run.local[0].plan.rate == pytest.approx(found, rel=1e-9)
    pulled = sp.FedProx(mu=3.0, batch_size=batch_size).automatic(problem.cohort)["local_rate"]
    assert pulled == pytest.approx(1 / (max(steepness) + 3.0), rel=1e-9)


# --- methods × checks

METHODS = {
    "FedAvg": sp.FedAvg(local_steps=4),
    "FedAvg, some": sp.FedAvg(local_steps=4, clients_per_round=2, batch_size=5),
    "FedProx": sp.FedProx(local_steps=4, mu=0.5, weights="uniform"),
    "FedOpt": sp.FedOpt(optimizer="yogi", local_steps=4, server_rate=0.01),
    "Scaffold": sp.Scaffold(local_steps=4),
    "Scaffold, some": sp.Scaffold(
        local_steps=4, clients_per_round=3, weights="samples", batch_size=5
    ),
    "ProxSkip": sp.ProxSkip(),
    "AFL": sp.AFL(CHI, local_steps=4, batch_size=5),
    "DRFA": sp.DRFA(CHI, local_steps=4),
    "DRFA, some": sp.DRFA(local_steps=4, clients_per_round=2, batch_size=5),
    "q-FFL": sp.QFFL(q=0.5, local_steps=4, clients_per_round=3, batch_size=5),
    "Δ-FL": sp.DeltaFL(tail=0.4, local_steps=4, clients_per_round=4),
    "GDA": GradientDescentAscent(CHI),
    "Extragradient": Extragradient(sp.CVaR(alpha=0.5)),
    "Minimax Newton": sp.MinimaxNewton(CHI),
    "Subspace saddle": sp.SubspaceSaddle(CHI),
    "fair": sp.fair(CHI, local_steps=20),
    "fair, minibatches": sp.fair(CHI, local_steps=4, batch_size=5),
    "Scaff-PD": sp.ScaffPD(CHI, local_steps=4),
    "Scaff-PD, one step": sp.ScaffPD(CHI, local_steps=1),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def cohort(dtype=None):
    sizes = (3, 8, 15, 40, 25)
    data = sp.data.synthetic(N=5, d=4, sizes=sizes, sigma=0.5, seed=2)
    return sp.Cohort(data, sp.Linear("squared", l2=0.1), dtype=dtype)


@every_method
def test_a_resumed_run_is_the_run(method, tmp_path):
    """Begun on clients that have seen another run: nothing of it stays behind."""
    clients = cohort()
    whole = sp.train(method, clients, rounds=5, seed=3)
    sp.train(method, clients, rounds=2, seed=3, checkpoint=tmp_path / "run")
    rest = sp.train(method, cohort(), rounds=5, seed=3, checkpoint=tmp_path / "run")
    assert np.array_equal(rest.x, whole.x)
    assert np.array_equal(rest.weights, whole.weights)
    for column in ("certificate", "exchanges", "bytes_up", "bytes_down"):
        assert np.array_equal(rest.history[column], whole.history[column]), column


@every_method
def test_float32_stays_near_and_weights_are_weights(method):
    a, b = (sp.train(method, cohort(dtype), rounds=4) for dtype in (torch.float32, torch.float64))
    assert a.x.dtype == np.float32
    np.testing.assert_allclose(a.x, b.x, atol=2e-3)
    weights = b.history.weights
    assert np.all(weights >= 0)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-9)


@pytest.mark.parametrize("method", [m for m in METHODS.values() if not m.proves])
def test_without_a_proof_it_says_so(method):
    result = sp.train(method, cohort(), rounds=2)
    assert f"{type(method).__name__} does not measure" in result.message
    with refuses("tol-without-certificate"):
        sp.train(method, cohort(), rounds=2, tol=1e-3)


SENDS = [  # exchanges, and numbers per client up and down, as docs/methods.md says (d = 4)
    (sp.FedAvg(local_rate=0.01), 1, 4, 4),
    (sp.FedOpt(local_rate=0.01), 1, 4, 4),
    (sp.Scaffold(local_rate=0.01), 1, 4, 8),
    (sp.ProxSkip(local_rate=0.01, local_steps=2), 1, 4, 4),
    (sp.AFL(local_rate=0.01, dual_rate=0.01), 1, 4 + 1, 4),
    (sp.DRFA(CHI, local_rate=0.01, dual_rate=1e-6), 2, 8 + 1, 8),
    (sp.QFFL(local_rate=0.01), 1, 4 + 2, 4),
    (sp.DeltaFL(local_rate=0.01, tail=1.0), 2, 4 + 1, 4),
    (GradientDescentAscent(CHI), 1, 4 + 3, 4),
    (Extragradient(CHI), 2, 8 + 6, 8),
    (sp.ScaffPD(CHI, local_steps=1, steps=sp.Fixed(0.01, 0.01)), 1, 4 + 3, 4),
    (sp.ScaffPD(CHI, steps=sp.Fixed(0.01, 0.01, local_rate=0.01)), 2, 8 + 3, 8),
    (sp.MinimaxNewton(CHI), 1, 4 + 3, 4),  # Hessians of squared losses go up once
    (sp.SubspaceSaddle(CHI, memory=3), 3, 8 + 3 * (3 + 3) // 2 + 4, 8 + 3 + 5 + 1),
    (sp.SubspaceSaddle(CHI), 2, 4 + 4 * (4 + 3) // 2 + 4, 4 + 4 + 5),
]


@pytest.mark.parametrize(("method", "exchanges", "up", "down"), SENDS)
def test_what_a_round_sends(method, exchanges, up, down):
    federation = cohort()
    state = method.round(federation, method.init(federation))
    before = federation.traffic.snapshot()
    method.round(federation, state)
    sent = federation.traffic
    assert sent.exchanges - before.exchanges == exchanges
    assert sent.bytes_up - before.bytes_up == 5 * 8 * up
    assert sent.bytes_down - before.bytes_down == 5 * 8 * down


@pytest.mark.parametrize("name", ["FedAvg", "Scaffold", "DRFA", "AFL", "q-FFL", "Δ-FL", "ProxSkip"])
def test_a_rate_too_large_is_called_divergence(name):
    """Never a NaN as a result: the last finite point is returned."""
    result = sp.train(replace(METHODS[name], local_rate=50.0), cohort(), rounds=60)
    if name != "q-FFL":  # its steps shrink with the size of the updates
        assert result.status is sp.Status.DIVERGED
    assert np.isfinite(result.x).all()
    assert np.isfinite(result.weights).all()


@pytest.mark.parametrize(
    "method",
    [
        sp.FedAvg(clients_per_round=2),
        sp.DRFA(CHI, local_steps=20),
        sp.DRFA(CHI, clients_per_round=2),
        sp.ProxSkip(local_steps=5),
        sp.FedAvg(batch_size=2),
        sp.AFL(local_steps=2, batch_size=2),
    ],
)
def test_the_seed_decides_and_every_round_draws_anew(method):
    one, other = (sp.train(method, cohort(), rounds=4, seed=seed) for seed in (0, 1))
    assert not np.array_equal(one.history.losses, other.history.losses)
    keys = [call.plan.key for call in play(method, case("squared"), 4).local]
    assert len(set(keys)) == 4


def test_sampling_is_fair():
    """Every client takes part equally often: 300 draws, 50 each with standard deviation 5.8."""
    data = sp.data.synthetic(N=6, d=2, m=5)
    method = sp.FedAvg(clients_per_round=2, weights="uniform")
    result = sp.train(method, sp.Cohort(data, sp.Linear()), rounds=150)
    took_part = (result.history.weights[1:] > 0).sum(0)
    assert took_part.sum() == 300
    assert np.abs(took_part - 50).max() < 29  # five of them: less than one run in a million


def test_automatic_settings():
    federation = cohort()
    known = federation.constants()
    L = known.smoothness.max()
    mu = known.strong_convexity.min()
    assert sp.ProxSkip().init(federation).expected_steps == round(np.sqrt(L / mu))
    at = federation.gradients(federation.start())
    c = np.array([at.sum(row).numpy() for row in np.eye(5)])
    K = ((c - c.mean(0)) ** 2).sum()
    drfa = sp.DRFA(local_steps=4).init(federation)
    assert drfa.dual_rate == pytest.approx(0.45 / (K * 4 * 4 / L))
    afl = sp.AFL(local_steps=4).init(federation)
    assert afl.dual_rate == pytest.approx(0.45 / (K * 4 / L))
    gda = GradientDescentAscent(CHI).init(federation)
    assert gda.server_rate == pytest.approx(1 / (2 * L))
    assert gda.dual_rate == pytest.approx(0.45 / (K / (2 * L)))


def test_the_tail_is_not_moved_by_rounding():
    losses = np.arange(10.0)
    equal = np.full(10, 0.1)
    assert [quantile(losses, equal, 1 - t) for t in (0.1, 0.3, 0.5, 0.7, 0.9)] == [8, 6, 4, 2, 0]
    assert quantile(losses, equal, 0.0) == 0


def test_flat_losses_are_refused_and_flat_clients_stay_behind():
    flat = sp.Cohort([(np.zeros((3, 2)), np.ones(3))] * 2, sp.Linear("squared", l2=0.0))
    for method in (sp.FedAvg(), sp.AFL(), GradientDescentAscent(CHI), sp.SubspaceSaddle(CHI)):
        with refuses("flat-losses"):
            sp.train(method, flat, rounds=1)
    clients = [*sp.data.synthetic(N=2, d=3, m=10), (np.zeros((3, 3)), np.ones(3))]
    half = sp.Cohort(clients, sp.Linear("squared", l2=0.0))
    found = sp.train(sp.ScaffPD(sp.Average(), local_steps=1), half, rounds=10)
    assert np.abs(found.x).max() > 0.01


@dataclass(frozen=True)
class Mine(sp.FedProx):
    """A user's own method, whose `tail` and `q` are not those of ours, and whose `mu` is."""

    tail: float = 7.0
    q: float | None = None


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: sp.FedAvg(local_steps=0), "not-a-count"),
        (lambda: sp.FedAvg(local_steps=None), "not-a-count"),
        (lambda: sp.FedAvg(batch_size=2.5), "not-a-count"),
        (lambda: sp.FedAvg(local_rate=-1), "number-not-positive"),
        (lambda: sp.FedAvg(server_rate=None), "not-a-number"),
        (lambda: sp.AFL(dual_rate=0), "number-not-positive"),
        (lambda: sp.FedAvg(weights="sample"), "unknown-name"),
        (lambda: sp.FedProx(mu=-0.1), "setting-out-of-range"),
        (lambda: sp.FedOpt(optimizer="adma"), "unknown-name"),
        (lambda: sp.FedOpt(momentum=1), "setting-out-of-range"),
        (lambda: sp.FedOpt(adaptivity=0), "number-not-positive"),
        (lambda: sp.QFFL(q=-1), "setting-out-of-range"),
        (lambda: sp.QFFL(q=float("nan")), "not-a-number"),
        (lambda: sp.DeltaFL(tail=0), "setting-out-of-range"),
        (lambda: Mine(mu=-1), "setting-out-of-range"),
        (lambda: Mine(mu=None), "not-a-number"),
        (lambda: sp.DRFA(0.1), "not-an-objective"),
        (lambda: sp.AFL(sp.Agnostic), "not-an-objective"),
        (lambda: sp.ScaffPD(CHI, steps=3), "not-a-step-rule"),
        (lambda: sp.ScaffPD(CHI, steps=sp.Auto), "not-a-step-rule"),
        (lambda: sp.SubspaceSaddle(CHI, memory=2), "memory-too-small"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, code):
    with refuses(code):
        make()


def test_what_fits_no_clients_is_refused():
    for method in (sp.FedAvg(clients_per_round=9), sp.DRFA(clients_per_round=9)):
        with refuses("too-many-clients-per-round"):
            sp.train(method, cohort(), rounds=1)
    assert Mine(q=-1.0).q == -1.0  # a name that is not ours has no range
