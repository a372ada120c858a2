"""The subspace saddle method without some clients and with minibatches: its books, its proofs, and where it ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from awkward import AWKWARD

import scaffpd as sp
from cases.reference import reference_optimum
from naive import Client, relative, unequal_clients
from scaffpd.algorithms import subspace_sampled
from scaffpd.algorithms.subspace_sampled import CAUTION, FAIR, PartialAnswers
from scaffpd.errors import InputError

OBJECTIVES = [
    sp.Average(),
    sp.Agnostic(),
    sp.ChiSquare(rho=0.05),
    sp.ChiSquareBall(delta=0.5),
    sp.CVaR(alpha=0.3),
    sp.Tilted(rho=0.1),
    sp.QFair(q=1.0),
    sp.Nash(b=40.0),
]
SOME = [sp.Average(), sp.Agnostic(), sp.ChiSquare(rho=0.05), sp.QFair(q=1.0), sp.Nash(b=40.0)]
HOSPITALS = sp.data.heart_disease().train
SYNTHETIC = sp.data.synthetic(N=10, sigma=0.5)


def hospitals():
    return sp.Cohort(HOSPITALS, sp.Linear("logistic", l2=0.01, intercept=True))


def synthetic(**options):
    return sp.Cohort(SYNTHETIC, sp.Linear("squared", l2=0.1), **options)


PROBLEMS = {"hospitals": hospitals, "synthetic": synthetic}


@cache
def optimum(name, objective):
    if name == "hospitals":
        return reference_optimum(HOSPITALS, "logistic", 0.01, objective, intercept=True).value
    return reference_optimum(SYNTHETIC, "squared", 0.1, objective).value


def states(method, cohort, rounds, seed=0, x0=None):
    """The state at the start and after every round."""
    seen = [method.init(cohort, seed, x0)]
    for _ in range(rounds):
        seen.append(method.round(cohort, seen[-1]))
    return seen


def far():
    """A start from which some trial points are rejected."""
    return 30 * torch.from_numpy(np.random.default_rng(0).standard_normal(6))


def value(cohort, objective, x):
    return objective.support(cohort.evaluate(x).loss)


@dataclass(frozen=True)
class Missing(sp.SampledSubspaceSaddle):
    """Client 0 cannot be reached from round `first` to round `last`."""

    first: int = 3
    last: int = 6

    def _present(self, state, everyone):
        away = self.first <= state.rounds + 1 <= self.last
        return super()._present(state, everyone) & ~((np.arange(everyone) == 0) & away)


class AlwaysHeld(sp.SubspaceSaddle):
    """With w where ψ is flat, too, as in rounds without some clients, and with V of directions that were found."""

    everywhere = False

    def _held(self, state, k):
        return True


# ------------------------------------------------------------------ what it is where everyone is there


@pytest.mark.sample(4)
@pytest.mark.cover(1)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_with_everyone_and_all_samples_it_is_the_subspace_saddle_method(name, objective):
    ours = sp.train(sp.SampledSubspaceSaddle(objective), PROBLEMS[name](), rounds=8)
    theirs = sp.train(AlwaysHeld(objective), PROBLEMS[name](), rounds=8)
    np.testing.assert_allclose(ours.history.losses, theirs.history.losses, rtol=1e-11)
    np.testing.assert_allclose(ours.x, theirs.x, atol=1e-8)
    assert ours.certificate == pytest.approx(theirs.certificate, rel=1e-3, abs=1e-13)


def test_it_follows_through_rejected_trials():
    cohort = sp.Cohort(unequal_clients("logistic"), sp.Linear("logistic", l2=0.05))
    pair = [method(sp.ChiSquare(rho=0.05)) for method in (sp.SampledSubspaceSaddle, AlwaysHeld)]
    runs = [states(method, cohort, 12, x0=far()) for method in pair]
    for ours, theirs in zip(*runs, strict=True):
        assert relative(ours.x, theirs.x) < 1e-8
        assert (ours.accepted, ours.moving, ours.damping) == (
            theirs.accepted,
            theirs.moving,
            theirs.damping,
        )
    assert not all(state.accepted for state in runs[0])


# ------------------------------------------------------------------ what the server holds


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "objective", [sp.ChiSquare(rho=0.05), sp.Agnostic(), sp.Nash(b=1e6)], ids=str
)
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_c_is_the_sum_of_what_everybody_has_said_last(loss, objective):
    """Σ_{i∈P} λ_i ∇f_i(x) + Σ_{i∉P} λ_i′ ∇f_i(x_i), by a loop over clients with their last points and weights."""
    data = unequal_clients(loss)
    cohort = sp.Cohort(data, sp.Linear(loss, l2=0.05))
    clients = [Client(*pair, loss, 0.05) for pair in data.values()]
    method = sp.SampledSubspaceSaddle(objective, clients_per_round=5)
    state = method.init(cohort, 1, far())
    points = [far().numpy()] * 8
    weights = state.weights.copy()
    absences = 0
    rejections = 0
    for _ in range(15):
        mask = method._present(state, 8)
        state = method.round(cohort, state)
        for i in np.flatnonzero(mask):
            points[i], weights[i] = state.iterate.numpy(), state.mixture[i]
        parts = [
            w * client.gradient(x) for w, client, x in zip(weights, clients, points, strict=True)
        ]
        assert np.linalg.norm(state.direction.numpy() - sum(parts)) < 1e-11 * max(
            map(np.linalg.norm, parts)
        )
        np.testing.assert_allclose(
            state.losses, [c.loss_at(x) for c, x in zip(clients, points, strict=True)]
        )
        assert np.array_equal(state.counted, weights)
        absences = absences + int((~mask).sum())
        rejections = rejections + (not state.accepted)
    assert absences >= 12
    assert rejections or loss == "squared"


@pytest.mark.parametrize(
    "weights", [np.arange(8.0) / 28, np.where(np.arange(8) < 4, 0.0, 0.3), np.zeros(8)]
)
def test_the_view_of_a_round_is_what_dense_matrices_say(weights):
    data = unequal_clients("logistic")
    cohort = sp.Cohort(data, sp.Linear("logistic", l2=0.05))
    clients = [Client(*p, "logistic", 0.05) for p in data.values()]
    random = np.random.default_rng(0)
    mask = np.arange(8) < 4
    x, S, V, D = (random.standard_normal(shape) for shape in (6, 6, (6, 3), 6))
    D = D**2 + 0.1
    sizes = random.random(8)
    answers = cohort.gradients(torch.from_numpy(x), clients=np.flatnonzero(mask))
    at = PartialAnswers(answers, mask, np.arange(8.0), torch.from_numpy(S), sizes, 0.7)
    seen = at.restriction(torch.from_numpy(V), weights, torch.from_numpy(D))

    total = weights.sum() or 1.0
    share = np.array(
        [max(w, FAIR * total / 8) if there else 0.0 for w, there in zip(weights, mask, strict=True)]
    )
    share *= total / share.sum()
    c = np.array(
        [
            client.gradient(x) if there else 0 * x
            for client, there in zip(clients, mask, strict=True)
        ]
    )
    Q = sum(w * V.T @ client.hessian(x) @ V for w, client in zip(share, clients, strict=True))
    own = c @ V
    slopes = c @ V + V.T @ S / total
    unseen = np.where(mask, (c**2 / D).sum(1) - (own**2).sum(1), sizes)
    assert relative(at.stand_in(weights), share) < 1e-14
    assert at.stand_in(weights).sum() == pytest.approx(total)
    assert relative(seen.slopes, slopes) < 1e-12
    assert relative(seen.curvature, Q + 0.7 * weights[4:].sum() * np.eye(3)) < 1e-12
    assert relative(seen.sizes - (seen.slopes**2).sum(1), unseen) < 1e-12
    assert np.array_equal(at.losses[4:], np.arange(4.0, 8.0))
    assert relative(at.sum(weights), weights[:4] @ c[:4] + S) < 1e-12


def test_everybody_stands_for_themselves_where_all_are_there():
    cohort = hospitals()
    at = PartialAnswers(
        cohort.gradients(cohort.start()),
        np.ones(4, bool),
        np.zeros(4),
        cohort.start(),
        np.zeros(4),
        CAUTION,
    )
    weights = np.array([0.0, 0.0, 0.3, 0.7])
    assert np.array_equal(at.stand_in(weights), weights)


def test_the_sizes_that_are_kept_are_those_of_the_gradients():
    """Without the pull of the others, which is in the slopes."""
    cohort = synthetic()
    method = sp.SampledSubspaceSaddle(sp.ChiSquare(rho=0.05), clients_per_round=5)
    before, state = states(method, cohort, 2)[-2:]
    c = cohort.gradients(before.iterate).each()
    mask = method._present(before, 10)
    assert relative(state.sizes[mask], (c.square() / state.metric).sum(1)[mask]) < 1e-10


def test_traffic_of_a_round():
    """x, c and β, d, and (α, λ⁺) down, with the columns that a client has missed; c_i twice, d_i and scalars up."""
    cohort = sp.Cohort(unequal_clients("logistic"), sp.Linear("logistic", l2=0.05))
    n = 8
    d = 6
    size = 8
    method = sp.SampledSubspaceSaddle(sp.ChiSquare(rho=0.05), clients_per_round=5)
    state = method.init(cohort)
    missed = np.zeros(n, int)
    held = 0
    for k in (2, 4, 6):  # d and c of every round; the steps lie in their span
        mask = method._present(state, n)
        before = cohort.traffic.snapshot()
        state = method.round(cohort, state)
        p = int(mask.sum())
        assert state.accepted
        sent = cohort.traffic
        assert sent.exchanges - before.exchanges == 4
        down = d + (d + 1) + d + (k + n)
        assert sent.bytes_down - before.bytes_down == size * (
            p * down + d * int(missed[mask].sum())
        )
        assert sent.bytes_up - before.bytes_up == size * p * (
            (d + 3) + d + (k + 1 + k * (k + 1) // 2) + (d + 3)
        )
        held += 3  # the step, d and c
        missed = np.where(mask, 0, np.minimum(missed + 3, held))
    assert p == n  # a certificate was due


# ------------------------------------------------------------------ what is proven


@pytest.mark.sample(3)
@pytest.mark.cover(1)
@pytest.mark.parametrize("objective", SOME, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_certificates_are_true_and_given_where_everyone_was_asked(name, objective):
    cohort = PROBLEMS[name]()
    best = optimum(name, objective)
    n = len(cohort.names)
    method = sp.SampledSubspaceSaddle(objective, clients_per_round=n // 2)
    state = method.init(cohort)
    given = 0
    for _ in range(20):
        everyone = bool(method._present(state, n).all())
        certified = np.isfinite(state.certificate)
        state = method.round(cohort, state)
        assert np.isfinite(state.certificate) == (everyone or (certified and not state.accepted))
        given += everyone
        assert value(cohort, objective, state.x) - best <= state.certificate + 1e-9 * abs(best)
    assert 1 <= given < 10


@pytest.mark.sample(4)
@pytest.mark.cover(1)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_half_of_the_clients_are_enough(name, objective):
    cohort = PROBLEMS[name]()
    method = sp.SampledSubspaceSaddle(objective, clients_per_round=len(cohort.names) // 2)
    result = sp.train(method, cohort, rounds=60, tol=1e-6)
    assert result.status is sp.Status.CONVERGED
    assert result.certificate <= 1e-6
    assert value(cohort, objective, result.x) - optimum(name, objective) <= 1e-6


@pytest.mark.parametrize(("number", "least"), [(1, 2), (5, 2)])
def test_fewer_than_half_or_more_than_all_are_refused(number, least):
    with pytest.raises(InputError, match=f"clients_per_round between {least} and 4, got {number}"):
        sp.train(
            sp.SampledSubspaceSaddle(sp.Agnostic(), clients_per_round=number), hospitals(), rounds=2
        )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"clients_per_round": 2.5}, "clients_per_round"),
        ({"memory": 2}, "memory"),
    ],
)
def test_mistakes_get_a_sentence(settings, words):
    with pytest.raises(InputError, match=words):
        sp.SampledSubspaceSaddle(sp.Agnostic(), **settings)


# ------------------------------------------------------------------ clients that cannot be reached


@pytest.mark.sample(3)
@pytest.mark.cover(1)
@pytest.mark.parametrize("clients_per_round", [None, 5])
@pytest.mark.parametrize("objective", SOME, ids=str)
def test_a_client_that_is_away_for_some_rounds(objective, clients_per_round):
    cohort = synthetic()
    method = Missing(objective, clients_per_round=clients_per_round)
    seen = states(method, cohort, 24)
    values = [value(cohort, objective, state.x) for state in seen]
    assert all(bool(state.x.isfinite().all()) and np.isfinite(state.losses).all() for state in seen)
    assert all(state.certificate == np.inf for state in seen[3:7] if state.accepted)
    assert max(values[1:]) <= values[0] + 1e-9 * abs(values[0])
    assert min(state.certificate for state in seen[7:]) < 1e-6
    assert values[-1] - optimum("synthetic", objective) < 1e-6


@pytest.mark.sample(3)
@pytest.mark.cover(1)
@pytest.mark.parametrize("clients_per_round", [None, 5])
@pytest.mark.parametrize("objective", SOME, ids=str)
def test_a_client_that_does_not_come_back(objective, clients_per_round):
    """It is never asked again, nothing is proven any more, and the run stays below where it was."""
    cohort = synthetic()
    asked = []
    ask = cohort.gradients

    def gradients(x, batch_size=None, key=(0,), clients=None, **more):
        asked.append((key[1] if len(key) > 1 else 0, range(10) if clients is None else clients))
        return ask(x, batch_size, key, clients, **more)

    cohort.gradients = gradients
    seen = states(Missing(objective, clients_per_round=clients_per_round, last=10**9), cohort, 24)
    assert all(0 not in clients for round_, clients in asked if round_ >= 3)
    assert all(bool(state.x.isfinite().all()) for state in seen)
    values = [value(cohort, objective, state.x) for state in seen]
    assert max(values[3:]) <= values[0]
    assert all(state.certificate == np.inf for state in seen[3:] if state.accepted)
    steps = [float((b.x - a.x).norm()) for a, b in pairwise(seen[-6:])]
    assert max(steps) < 1e-2 * float(seen[-1].x.norm())  # it comes to rest


def test_a_certificate_that_is_due_is_not_asked_for_in_every_round_while_a_client_is_away():
    method = Missing(sp.ChiSquare(rho=0.05), clients_per_round=5, last=10**9)
    seen = states(method, synthetic(), 20)
    crowded = sum(method._present(state, 10).sum() > 5 for state in seen[3:])
    assert crowded <= 8


# ------------------------------------------------------------------ minibatches


def noisy(cohort, seed, rounds=40, objective=None, **settings):
    method = sp.SampledSubspaceSaddle(objective or sp.ChiSquare(rho=0.1), batch_size=10, **settings)
    return sp.train(method, cohort, rounds=rounds, seed=seed)


def test_the_same_seed_is_the_same_run():
    cohort = synthetic()
    first, again, other = (noisy(cohort, seed, 8) for seed in (3, 3, 4))
    assert np.array_equal(first.x, again.x)
    assert not np.array_equal(first.x, other.x)


@pytest.mark.parametrize("clients_per_round", [None, 5])
def test_without_noise_none_is_counted(clients_per_round):
    cohort = synthetic()
    everything = max(len(y) for _, y in SYNTHETIC)
    full, batch = (
        states(
            sp.SampledSubspaceSaddle(sp.CVaR(alpha=0.3), None, clients_per_round, size), cohort, 8
        )
        for size in (None, everything)
    )
    assert [state.noisy for state in batch] == [0] * 9
    if clients_per_round is None:
        assert relative(batch[-1].x, full[-1].x) < 1e-8


def test_noise_is_counted_and_damps():
    seen = states(sp.SampledSubspaceSaddle(sp.Average(), batch_size=5), synthetic(), 25)
    counts = [state.noisy for state in seen]
    assert counts == sorted(counts)
    assert counts[-1] > 10
    steps = [float((b.iterate - a.iterate).norm()) for a, b in pairwise(seen)]
    assert np.mean(steps[-5:]) < 0.5 * np.mean(steps[3:8])


@pytest.mark.sample(1)
@pytest.mark.cover(1)
@pytest.mark.parametrize("objective", [sp.Average(), sp.ChiSquare(rho=0.1)], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_error_falls_and_ends_below_that_without_averages(name, objective, monkeypatch):
    cohort = PROBLEMS[name]()
    best = optimum(name, objective)

    def errors():
        runs = [
            states(sp.SampledSubspaceSaddle(objective, batch_size=10), cohort, 20, seed)
            for seed in range(2)
        ]
        return np.mean(
            [[value(cohort, objective, run[at].x) - best for at in (0, 3, 20)] for run in runs], 0
        )

    start, early, late = errors()
    monkeypatch.setattr(subspace_sampled, "NOISE", 3.0)  # ν is at most 2
    assert early < 0.5 * start
    assert late < 0.7 * early
    assert late < 0.3 * errors()[-1]


@pytest.mark.parametrize("name", [pytest.param("hospitals", marks=pytest.mark.long), "synthetic"])
def test_minibatches_of_half_of_the_clients(name):
    cohort = PROBLEMS[name]()
    objective = sp.ChiSquare(rho=0.1)
    runs = [
        noisy(cohort, s, 25, objective, clients_per_round=len(cohort.names) // 2) for s in range(2)
    ]
    late = np.mean([value(cohort, objective, run.x) for run in runs]) - optimum(name, objective)
    assert late < 0.4 * (value(cohort, objective, cohort.start()) - optimum(name, objective))


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 10}, {"clients_per_round": 5}, {"batch_size": 10, "clients_per_round": 5}],
    ids=str,
)
def test_a_resumed_run_is_the_run(tmp_path, settings):
    method = sp.SampledSubspaceSaddle(sp.CVaR(alpha=0.4), memory=5, **settings)
    whole = sp.train(method, synthetic(), rounds=9, seed=2)
    sp.train(method, synthetic(), rounds=4, seed=2, checkpoint=tmp_path / "run")
    rest = sp.train(method, synthetic(), rounds=9, seed=2, checkpoint=tmp_path / "run")
    assert np.array_equal(rest.x, whole.x)
    assert np.array_equal(rest.weights, whole.weights)
    assert np.array_equal(rest.history["bytes_down"], whole.history["bytes_down"])


def test_a_run_resumed_after_a_rejected_trial_is_the_run(tmp_path):
    def cohort():
        return sp.Cohort(unequal_clients("logistic"), sp.Linear("logistic", l2=0.05))

    method = sp.SampledSubspaceSaddle(sp.ChiSquare(rho=0.05), clients_per_round=5)
    accepted = []
    note = [lambda moment: accepted.append(moment.state.accepted) or False]
    whole = sp.train(method, cohort(), rounds=8, seed=1, x0=far(), callbacks=note)
    assert not all(accepted)
    for stop in (2, 5):
        path = tmp_path / str(stop)
        sp.train(method, cohort(), rounds=stop, seed=1, x0=far(), checkpoint=path)
        rest = sp.train(method, cohort(), rounds=8, seed=1, checkpoint=path)
        assert np.array_equal(rest.x, whole.x)
        for column in ("bytes_down", "bytes_up", "exchanges"):
            assert np.array_equal(rest.history[column], whole.history[column])


def test_nothing_is_proven_from_minibatches():
    result = noisy(synthetic(), 0, 3)
    assert result.certificate == np.inf
    assert "minibatches; leave batch_size out" in result.message
    with pytest.raises(
        InputError,
        match="tol needs a certificate, and there is none: losses and gradients come from",
    ):
        sp.train(
            sp.SampledSubspaceSaddle(sp.Average(), batch_size=10), synthetic(), rounds=3, tol=1e-3
        )


# ------------------------------------------------------------------ awkward problems


@pytest.mark.cover(1)
@pytest.mark.parametrize("objective", SOME, ids=str)
@pytest.mark.parametrize("clients", AWKWARD.values(), ids=AWKWARD)
def test_awkward_problems(clients, objective):
    cohort = sp.Cohort(clients, sp.Linear("squared", l2=0.1))
    method = sp.SampledSubspaceSaddle(objective, clients_per_round=-(-len(clients) // 2))
    result = sp.train(method, cohort, rounds=80, tol=1e-7)
    assert result.status is sp.Status.CONVERGED
    assert np.isfinite(result.x).all()
    noisy(cohort, 0, 3, objective)


@pytest.mark.sample(2)
@pytest.mark.parametrize("objective", SOME[:4], ids=str)
def test_starting_far_away(objective):
    method = sp.SampledSubspaceSaddle(objective, clients_per_round=5)
    result = sp.train(method, synthetic(), rounds=150, tol=1e-5, x0=np.full(10, 1e4))
    assert result.status is sp.Status.CONVERGED


@pytest.mark.sample(1)
@pytest.mark.parametrize("objective", SOME[1:4], ids=str)
def test_float32(objective):
    method = sp.SampledSubspaceSaddle(objective, clients_per_round=5)
    single = sp.train(method, synthetic(dtype=torch.float32), rounds=18)
    exact = sp.train(method, synthetic(), rounds=18)
    np.testing.assert_allclose(single.x, exact.x, atol=2e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "objective", [sp.Agnostic(), sp.ChiSquare(rho=0.05), sp.QFair(q=1.0)], ids=str
)
def test_clients_of_no_weight_can_be_alone(objective):
    """Everybody with a weight is away: those that are there stand in, and nothing breaks."""
    cohort = synthetic()
    method = sp.SampledSubspaceSaddle(objective, clients_per_round=5)
    state = method.init(cohort)
    weights = np.where(method._present(state, 10), 0.0, 0.2)
    at = cohort.gradients(state.x)
    state = replace(
        state, weights=weights, mixture=weights, counted=weights, direction=at.sum(weights)
    )
    for _ in range(40):
        state = method.round(cohort, state)
        assert bool(state.x.isfinite().all())
        assert np.isfinite(state.weights).all()
    assert value(cohort, objective, state.x) - optimum("synthetic", objective) < 1e-5


def test_two_hundred_clients_and_half_of_them_in_a_round():
    clients = sp.data.synthetic(N=200, d=5, m=6, sigma=0.3)
    cohort = sp.Cohort(clients, sp.Linear(l2=0.1))
    objective = sp.ChiSquare(rho=0.5)
    result = sp.train(
        sp.SampledSubspaceSaddle(objective, clients_per_round=100), cohort, rounds=60, tol=1e-6
    )
    assert result.status is sp.Status.CONVERGED
    assert (
        value(cohort, objective, result.x)
        - reference_optimum(clients, "squared", 0.1, objective).value
        <= 1e-6
    )
