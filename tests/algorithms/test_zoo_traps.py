"""What public implementations of these methods get wrong, one named test each.

Every test holds the package against the right loop *and* shows that the wrong one gives other numbers: a test that
could not tell them apart would guard nothing.
"""

from __future__ import annotations

import naive_zoo as naive
import numpy as np
import pytest
import torch
from zoo_cases import agree, case, play

import scaffpd as sp
from naive import relative, unequal_clients
from scaffpd.federation import ClientScores
from scaffpd.training.metrics import Summary

ROUNDS = 6
DIFFERENT = 1e-4  # a wrong variant is at least this far away, where right ones agree to 1e-10


def differ(seen, wrong):
    """The wrong variant ends somewhere else."""
    assert relative(seen[-1], wrong[-1]) > DIFFERENT


def points(pairs):
    return [x for x, _ in pairs]


# ------------------------------------------------------------------ AFL


def test_afl_lambda_reaches_the_model_step():
    problem = case("logistic")
    rates = {"local_rate": problem.rate, "dual_rate": 3 * problem.dual_rate}
    run = play(sp.AFL(**rates), problem, ROUNDS)
    right = naive.afl(problem.clients, problem.x0, ROUNDS, problem.rate, rates["dual_rate"])
    blind = naive.fed_avg(
        problem.clients, problem.x0, ROUNDS, 1, problem.rate, problem.weights("uniform")
    )
    agree(run.x, points(right))
    agree(run.x[:1], blind[:1])  # the first step is that of λ⁰ = 1/N
    differ(run.x, blind)
    before = run.states[1]
    gradients = naive.gradients_at(problem.clients, before.x.numpy())
    step = before.x.numpy() - run.x[1]
    assert relative(step, problem.rate * (before.weights @ gradients)) < 1e-10
    assert relative(step, problem.rate * np.mean(gradients, axis=0)) > DIFFERENT


def test_afl_lambda_is_a_projection_and_not_a_clipping():
    """Clipping at 0 and dividing by the sum is not the projection on the simplex."""
    problem = case("squared")
    rate = problem.rate
    dual_rate = 10 * problem.dual_rate
    run = play(sp.AFL(local_rate=rate, dual_rate=dual_rate), problem, ROUNDS)

    def clipped(s, centre, sigma):
        return np.maximum(centre + sigma * s, 0) / np.maximum(centre + sigma * s, 0).sum()

    right, wrong = (
        naive.afl(problem.clients, problem.x0, ROUNDS, rate, dual_rate, prox=prox)
        for prox in (naive.agnostic_prox, clipped)
    )
    agree(run.x, points(right))
    differ(run.x, points(wrong))


# ------------------------------------------------------------------ q-FFL

Q = 2.0


def q_fed_avg_gone_wrong(problem, mistake, rounds=ROUNDS, steps=3, q=Q):
    """`naive.q_fed_avg` with one mistake."""
    x = problem.x0
    L = 1 / problem.rate
    p = problem.weights("uniform")
    iterates = []
    for _ in range(rounds):
        top = np.zeros_like(x)
        bottom = 0.0
        central = np.mean([naive.loss_of(f, x) for f in problem.clients.values()])
        for name, f in problem.clients.items():
            F = naive.loss_of(f, x)
            if mistake == "one central loss":
                F = central
            if mistake == "a sum of losses":
                F = F * len(f.A)
            change = L * (x - naive.descent(f, x, steps, problem.rate, lambda j: None)[-1])
            scaled = F**q * change if mistake == "scaled twice" else change
            top = top + p[name] * F**q * change
            bottom = bottom + p[name] * (q * F ** (q - 1) * scaled @ scaled + L * F**q)
        x = x - top / bottom
        iterates.append(x)
    return iterates


def q_ffl(problem, **changes):
    return sp.QFFL(
        **{"q": Q, "local_steps": 3, "local_rate": problem.rate, "weights": "uniform"} | changes
    )


@pytest.fixture
def right_q_fed_avg():
    problem = case("squared")
    right = naive.q_fed_avg(
        problem.clients, problem.x0, ROUNDS, Q, 3, problem.rate, problem.weights("uniform")
    )
    agree(q_fed_avg_gone_wrong(problem, None), right)
    return problem, right


def test_qffl_uses_every_clients_own_loss(right_q_fed_avg):
    problem, right = right_q_fed_avg
    run = play(q_ffl(problem), problem, ROUNDS)
    agree(run.x, right)
    differ(run.x, q_fed_avg_gone_wrong(problem, "one central loss"))
    F = naive.losses_at(problem.clients, run.x[-2])
    assert relative(run.weights[-1], F**Q / np.sum(F**Q)) < 1e-10
    assert np.ptp(run.weights[-1]) > 0.01, "q has an effect"


def test_qffl_takes_the_mean_and_not_the_sum_of_losses(right_q_fed_avg):
    problem, right = right_q_fed_avg
    run = play(q_ffl(problem), problem, ROUNDS)
    agree(run.x, right)
    differ(run.x, q_fed_avg_gone_wrong(problem, "a sum of losses"))
    # Every row of some clients written down three times is the same mean loss, and three times the sum.
    data = unequal_clients("squared")
    copied = data | {
        k: tuple(np.repeat(a, 3, axis=0) for a in data[k])
        for k in ("many", "one sample", "as many")
    }
    agree(play(q_ffl(problem), case("squared", copied), ROUNDS).x, right)


def one_row_each(copies):
    """Clients whose rows are all alike, so that a minibatch is as good as all rows."""
    data = unequal_clients("logistic")
    names = ("one sample", "as many", "many", "repeated rows")
    pairs = {name: (data[name][0][:1], data[name][1][:1]) for name in names}
    return {
        name: tuple(np.repeat(a, k, axis=0) for a in pairs[name])
        for name, k in zip(names, copies, strict=True)
    }


@pytest.mark.parametrize("batch_size", [1, 2, 50])
def test_qffl_takes_the_mean_of_a_minibatch_whatever_its_size(batch_size):
    problem = case("logistic", one_row_each((3, 5, 40, 80)))
    run = play(q_ffl(problem, batch_size=batch_size), problem, ROUNDS)
    agree(run.x, play(q_ffl(problem), problem, ROUNDS).x)


def test_qffl_does_not_scale_the_update_twice_in_h(right_q_fed_avg):
    problem, right = right_q_fed_avg
    run = play(q_ffl(problem), problem, ROUNDS)
    agree(run.x, right)
    wrong = q_fed_avg_gone_wrong(problem, "scaled twice")
    differ(run.x, wrong)
    # The first step goes the same way and is of another length: it is h that the mistake is in.
    one = run.x[0] - problem.x0
    other = wrong[0] - problem.x0
    assert one @ other == pytest.approx(np.linalg.norm(one) * np.linalg.norm(other), rel=1e-9)
    assert np.linalg.norm(one) > 1.1 * np.linalg.norm(other)


# ------------------------------------------------------------------ DRFA


def test_drfa_snapshot_index_is_shared():
    problem = case("logistic")
    steps = 5
    rate = problem.rate
    dual_rate = 3 * problem.dual_rate / 5
    run = play(sp.DRFA(local_steps=steps, local_rate=rate, dual_rate=dual_rate), problem, ROUNDS)
    snapshots = [call.plan.snapshot for call in run.local]
    assert all(isinstance(t, int) and 1 <= t <= steps for t in snapshots)
    right = naive.drfa(problem.clients, problem.x0, ROUNDS, steps, rate, dual_rate, snapshots)
    agree(run.x, points(right))
    agree(run.weights, [w for _, w in right])
    # Per client: λ after the first round is another one for nearly every way to draw them.
    random = np.random.default_rng(0)
    x = problem.x0
    paths = [naive.descent(f, x, steps, rate, lambda j: None) for f in problem.clients.values()]
    weights = np.full(len(paths), 1 / len(paths))
    for _ in range(5):
        drawn = random.integers(1, steps + 1, len(paths))
        mixed = np.mean([path[t] for path, t in zip(paths, drawn, strict=True)], axis=0)
        wrong = naive.agnostic_prox(
            naive.losses_at(problem.clients, mixed), weights, steps * dual_rate
        )
        assert relative(run.weights[0], wrong) > 1e-7


def test_drfa_snapshot_index_is_uniform_and_includes_the_last_step():
    problem = case("squared")
    run = play(sp.DRFA(local_steps=3, local_rate=problem.rate, dual_rate=1e-9), problem, 150)
    times = np.bincount([call.plan.snapshot for call in run.local], minlength=4)
    assert times[0] == 0
    assert times[1:].min() > 30  # 50 expected, standard deviation 5.8


def test_drfa_samples_clients_by_lambda():
    """λ is held still by a tiny dual rate; how often clients are drawn then tells by what."""
    problem = case("squared")
    prior = np.array([30, 1, 5, 20, 2, 10, 2, 30]) / 100
    method = sp.DRFA(
        sp.Agnostic(prior=prior),
        local_steps=2,
        local_rate=problem.rate,
        clients_per_round=4,
        dual_rate=1e-12,
    )
    rounds = 150
    run = play(method, problem, rounds)
    times = sum(np.rint(4 * call.sums[0]) for call in run.local)
    draws = 4 * rounds
    assert times.sum() == draws
    surprise = lambda p: np.sum((times - draws * p) ** 2 / (draws * p))
    assert surprise(prior) < 29.9  # the 0.9999 quantile
    assert surprise(np.full(8, 1 / 8)) > 200
    repeated = sum(np.max(np.rint(4 * call.sums[0])) > 1 for call in run.local)
    assert repeated > rounds / 4, "with replacement: some client is drawn twice"
    # ... but whose losses are asked for does not depend on λ, and nobody is asked twice.
    asked = [calls[0].clients for calls in run.questions("losses")]
    assert all(len(set(names)) == len(names) == 4 for names in asked)
    often = np.array([sum(name in names for names in asked) for name in problem.names])
    assert np.abs(often - rounds / 2).max() < 30  # standard deviation 6.1


def test_drfa_means_over_the_draws_are_not_weighted_by_lambda_again():
    """λ has been paid for by the draw: D counts alike."""
    problem = case("squared")
    prior = np.array([30, 1, 5, 20, 2, 10, 2, 30]) / 100
    method = sp.DRFA(
        sp.Agnostic(prior=prior),
        local_steps=2,
        local_rate=problem.rate,
        clients_per_round=4,
        dual_rate=1e-12,
    )
    for call in play(method, problem, 10).local:
        np.testing.assert_allclose(call.sums[0] * 4, np.rint(call.sums[0] * 4), atol=1e-12)


# ------------------------------------------------------------------ SCAFFOLD


def scaffold_gone_wrong(problem, mistake, option="II", steps=4, rounds=ROUNDS):
    """`naive.scaffold` with one mistake, all clients in every round."""
    x = problem.x0
    n = len(problem.clients)
    rate = problem.rate
    c = np.zeros_like(x)
    own = {
        name: x if mistake == "starts at the model" else np.zeros_like(x)
        for name in problem.clients
    }
    iterates = []
    for _ in range(rounds):
        ends = {}
        fresh = {}
        for name, f in problem.clients.items():
            count = len(f.A) if mistake == "an epoch each" else steps
            ends[name] = naive.descent(f, x, count, rate, lambda j: None, shift=c - own[name])[-1]
            divisor = {"no K": 1, "one step too few": steps - 1, "the samples": len(f.A)}.get(
                mistake, count
            )
            fresh[name] = own[name] - c + (x - ends[name]) / (divisor * rate)
            if option == "I":
                fresh[name] = f.fast_gradient(x)
        x = sum(ends.values()) / n
        added = (
            fresh if mistake == "adds c_i" else {name: fresh[name] - own[name] for name in fresh}
        )
        c = c + sum(added.values()) / n
        own = fresh
        iterates.append(x)
    return iterates


def scaffold(problem, **changes):
    return sp.Scaffold(**{"local_steps": 4, "local_rate": problem.rate} | changes)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_variates_start_at_zero_and_not_at_the_model(option):
    problem = case("logistic")
    run = play(scaffold(problem, option=option), problem, ROUNDS)
    agree(run.x, scaffold_gone_wrong(problem, None, option))
    first = naive.fed_avg(
        problem.clients, problem.x0, 1, 4, problem.rate, problem.weights("uniform")
    )
    agree(run.x[:1], first)  # without variates there is nothing to correct
    differ(run.x[:1], scaffold_gone_wrong(problem, "starts at the model", option)[:1])
    differ(run.x, scaffold_gone_wrong(problem, "starts at the model", option))


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_server_adds_the_change_of_c_i_and_not_c_i(option):
    problem = case("logistic")
    run = play(scaffold(problem, option=option), problem, ROUNDS)
    wrong = scaffold_gone_wrong(problem, "adds c_i", option)
    agree(run.x, scaffold_gone_wrong(problem, None, option))
    agree(run.x[:2], wrong[:2])  # from zero the two are the same once
    differ(run.x, wrong)
    for state in run.states:
        mean = state.variates.sum(np.full(len(problem.names), 1 / len(problem.names)))
        assert torch.allclose(state.variate, mean, rtol=1e-10, atol=1e-12), (
            "c = (1/N) Σ c_i at all times"
        )


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_scaffold_c_stays_the_mean_of_all_c_i_when_clients_are_sampled(weights):
    problem = case("logistic")
    p = np.array(list(problem.weights(weights).values()))
    for option in ("I", "II"):
        for state in play(
            scaffold(problem, option=option, clients_per_round=3, weights=weights), problem, 12
        ).states:
            assert torch.allclose(state.variate, state.variates.sum(p), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mistake", ["no K", "one step too few", "the samples"])
def test_scaffold_divides_by_eta_k(mistake):
    problem = case("squared")
    run = play(scaffold(problem), problem, ROUNDS)
    agree(run.x, scaffold_gone_wrong(problem, None))
    differ(run.x[:2], scaffold_gone_wrong(problem, mistake)[:2])
    # c_i is a mean of gradients along the way: with tiny steps the gradient at x itself.
    still = play(scaffold(problem, local_rate=1e-9), problem, 1).states[-1]
    for i, f in enumerate(problem.clients.values()):
        assert (
            relative(still.variates.sum(np.eye(len(problem.names))[i]), f.fast_gradient(problem.x0))
            < 1e-4
        )


@pytest.mark.parametrize("batch_size", [None, 2])
def test_scaffold_local_steps_are_equal_whatever_a_client_has(batch_size):
    """Rows that are all alike, 3 or 300 of them: an epoch is longer, four local steps are not."""
    few, many = (
        case("logistic", one_row_each(copies)) for copies in ((3, 3, 3, 3), (3, 30, 100, 300))
    )
    runs = [
        play(scaffold(problem, batch_size=batch_size), problem, ROUNDS) for problem in (few, many)
    ]
    agree(runs[0].x, runs[1].x)
    assert [call.plan.steps for call in runs[1].local] == [4] * ROUNDS
    differ(runs[1].x, scaffold_gone_wrong(many, "an epoch each"))


@pytest.mark.parametrize(
    "method", [sp.Scaffold(), sp.Scaffold(option="I", clients_per_round=3), sp.ProxSkip()]
)
def test_scaffold_variates_do_not_survive_into_another_run(method):
    """The second run on the same cohort is the first one again, and that of a cohort that has seen nothing."""
    problem = case("logistic")
    untouched = case("logistic")
    first, second = (
        sp.train(method, problem.cohort, rounds=ROUNDS, x0=problem.x0) for _ in range(2)
    )
    fresh = sp.train(method, untouched.cohort, rounds=ROUNDS, x0=problem.x0)
    assert np.array_equal(first.x, second.x)
    assert np.array_equal(first.x, fresh.x)
    assert np.array_equal(first.history.losses, second.history.losses)
    assert list(first.history["bytes_up"]) == list(second.history["bytes_up"])
    # Had the second run gone on with the variates of the first, its first step would have been corrected by them.
    state = method.init(problem.cohort, 0, torch.tensor(problem.x0))
    for _ in range(ROUNDS):
        state = method.round(problem.cohort, state)
    memory = "shifts" if isinstance(method, sp.ProxSkip) else "variates"
    assert float(getattr(state, memory).vectors.abs().max()) > 0
    again = method.init(problem.cohort, 0, torch.tensor(problem.x0))
    assert float(getattr(again, memory).vectors.abs().max()) == 0


def test_a_state_is_a_value_that_a_later_round_does_not_change():
    """The variates of an earlier state must not move on when the run does."""
    problem = case("logistic")
    for method in (
        sp.Scaffold(clients_per_round=3),
        sp.Scaffold(option="I"),
        sp.ProxSkip(local_steps=3),
    ):
        states = play(method, problem, 2).states
        once, twice = (method.round(problem.cohort, states[1]).x for _ in range(2))
        assert torch.equal(once, twice)
        assert torch.equal(once, states[2].x)


# ------------------------------------------------------------------ metrics


def test_worst_accuracy_always_comes_with_what_it_is_over():
    """Whoever asks for the worst accuracy gets whose it is, the worst and best fifth, both means and the spread."""
    accuracy = np.array([0.9, 0.5, 0.8, 0.7, 0.6, 1.0])
    counts = np.array([10, 1000, 10, 10, 10, 10])
    scores = ClientScores(tuple("abcdef"), 1 - accuracy, accuracy, counts)
    spread = Summary.of(scores).accuracy
    assert (spread.worst, spread.worst_client, spread.best, spread.best_client) == (
        0.5,
        "b",
        1.0,
        "f",
    )
    assert spread.worst_20 == pytest.approx((0.5 + 0.6) / 2)  # ⌈6/5⌉ = 2 clients
    assert spread.best_20 == pytest.approx((1.0 + 0.9) / 2)
    assert spread.mean == pytest.approx(0.75)
    assert spread.weighted_mean == pytest.approx((0.5 * 1000 + 40.0 * 1) / 1050, abs=1e-12)
    assert spread.deviation == pytest.approx(np.std(accuracy))
    # Over samples the worst fifth would be all "b", over clients the mean would hide it: the numbers do differ.
    assert spread.worst < spread.worst_20 < spread.mean
    assert spread.weighted_mean < spread.worst_20
