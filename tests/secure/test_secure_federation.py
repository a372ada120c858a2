"""Training with masked sums: the same optimum, certified; the same steps of every method; the same
run twice.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from secure_cases import L2, clients, cohort, off, secure

import scaffpd as sp
from cases.reference import reference_optimum
from scaffpd.errors import InputError

CHI = sp.ChiSquare(rho=0.05)
OBJECTIVES = {
    "ChiSquare": sp.ChiSquare(rho=0.1),
    "CVaR": sp.CVaR(alpha=0.5),
    "Agnostic": sp.Agnostic(),
}
METHODS = {"ScaffPD": sp.ScaffPD, "fair": sp.fair}
FORMATS = {"float64": torch.float64, "float32": torch.float32}
HARD = ("logistic",)  # with a dual solution in a corner Scaff-PD needs hundreds of rounds there


CASES = [
    (loss, *rest)
    for loss in ("squared", "logistic", "softmax")
    for rest in product(OBJECTIVES, METHODS, FORMATS)
]
SHORT = {
    *[("squared", "ChiSquare", "ScaffPD", "float64"), ("squared", "Agnostic", "fair", "float64")],
    *[("logistic", "CVaR", "fair", "float64"), ("softmax", "CVaR", "ScaffPD", "float64")],
    *[("logistic", "ChiSquare", "ScaffPD", "float32"), ("softmax", "Agnostic", "fair", "float32")],
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("loss", "name", "method", "dtype"),
    [case if case in SHORT else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_the_optimum_is_that_of_plain_sums_and_of_an_independent_solver(loss, name, method, dtype):
    method = METHODS[method]
    dtype = FORMATS[dtype]
    objective = OBJECTIVES[name]
    single = dtype is torch.float32
    tol = 1e-3 if single else 1e-5 if loss in HARD else 1e-7
    federation = secure(cohort(loss, dtype))
    plain = cohort(loss, dtype)
    kind = np.float32 if single else np.float64
    stored = [
        (X.astype(kind).astype(float), y.astype(kind).astype(y.dtype)) for X, y in clients(loss)
    ]
    optimum = reference_optimum(stored, loss, L2, objective)
    exact = sp.Cohort(stored, cohort(loss, dtype).model)

    def never_below(moment):
        excess = objective.support(exact.evaluate(moment.state.x.double()).loss) - optimum.value
        assert excess <= moment.state.certificate + 1e-12

    result = sp.train(
        method(objective, local_steps=10), federation, rounds=400, tol=tol, callbacks=[never_below]
    )
    assert result.status == "converged"
    assert result.certificate <= tol
    gap = objective.support(plain.evaluate(result.x).loss) - optimum.value
    assert -1e-6 * single - 1e-12 <= gap <= tol
    other = sp.train(method(objective, local_steps=10), plain, rounds=400, tol=tol)
    assert other.certificate <= tol
    assert abs(objective.support(plain.evaluate(other.x).loss) - optimum.value - gap) <= tol


def test_vectors_that_are_kept_are_not_summed_over_different_clients():
    """Scaffold (option I) adds up kept variates over whoever is drawn: differences of such sums
    show single ones.
    """
    method = sp.Scaffold(local_steps=4, option="I", clients_per_round=3, weights="samples")
    with pytest.raises(InputError, match="one over other clients would show a client's own"):
        sp.train(method, secure(cohort()), rounds=8)


def test_one_sum_of_gradients_at_every_point():
    """Also after rejected steps, at which plain Scaff-PD would change λ and ask again."""
    rng = np.random.default_rng(2)
    seen = []
    rows = [rng.standard_normal((80, 12)) * (1 + 2 * i) for i in range(6)]
    clients = [
        (A, (A @ rng.standard_normal(12) + rng.standard_normal(80) > 0).astype(int)) for A in rows
    ]
    federation = sp.SecureAggregation(
        sp.Cohort(clients, sp.Linear("logistic", l2=0.01)),
        share=1,
        record=lambda kind, *who: seen.append((kind, who[0])),
    )
    result = sp.train(sp.ScaffPD(sp.Agnostic(), local_steps=20), federation, rounds=60)
    accepted = int(result.history["accepted"].sum())
    assert accepted < len(result.history)  # some were rejected
    assert seen.count(("c", federation.names[0])) == accepted


FIRST_ORDER = {
    "FedAvg": sp.FedAvg(local_steps=4),
    "FedAvg, some clients, minibatches": sp.FedAvg(
        local_steps=4, clients_per_round=3, batch_size=5
    ),
    "FedProx": sp.FedProx(local_steps=4, mu=0.5, weights="uniform"),
    "Scaffold II": sp.Scaffold(local_steps=4),
    "Scaffold II, some clients": sp.Scaffold(local_steps=4, clients_per_round=3, batch_size=5),
    "Scaffold I": sp.Scaffold(local_steps=4, option="I", weights="samples"),
    "ProxSkip": sp.ProxSkip(),
    "ProxSkip, minibatches": sp.ProxSkip(local_steps=3, batch_size=5, weights="samples"),
    "AFL": sp.AFL(),
    "AFL, local steps": sp.AFL(CHI, local_steps=4, batch_size=5),
    "DRFA": sp.DRFA(CHI, local_steps=4),
    "DRFA, minibatches": sp.DRFA(CHI, local_steps=4, batch_size=5),
    "q-FedSGD": sp.QFFL(q=2.0, local_steps=1),
    "q-FedAvg, some clients": sp.QFFL(q=0.5, local_steps=4, clients_per_round=3, batch_size=5),
    "DeltaFL": sp.DeltaFL(tail=0.9, local_steps=4),
    "GradientDescentAscent": sp.GradientDescentAscent(CHI),
    "Extragradient": sp.Extragradient(sp.CVaR(alpha=0.5)),
    "ScaffPD, one step": sp.ScaffPD(CHI, local_steps=1),
    "ScaffPD": sp.ScaffPD(CHI, local_steps=4),
    "ScaffPD, minibatches": sp.ScaffPD(CHI, local_steps=4, batch_size=5),
    "fair, minibatches": sp.fair(CHI, local_steps=4, batch_size=5),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("method", FIRST_ORDER.values(), ids=FIRST_ORDER)
def test_every_first_order_method_takes_the_same_steps(method):
    plain = sp.train(method, cohort(), rounds=8, seed=3)
    masked = sp.train(method, secure(cohort()), rounds=8, seed=3)
    assert np.abs(plain.x).max() > 1e-2
    assert off(masked.x, plain.x) <= 1e-12
    assert off(masked.weights, plain.weights) <= 1e-11


@pytest.mark.parametrize("kind", [sp.MinimaxNewton, sp.SubspaceSaddle])
def test_methods_that_look_at_single_clients_are_refused(kind):
    with pytest.raises(InputError, match=r"use a method that needs sums only|use ScaffPD"):
        sp.train(kind(CHI), secure(cohort()), rounds=5)


def test_projections_do_not_let_newton_in():
    with pytest.raises(InputError, match="hide every client's own vector"):
        sp.train(sp.MinimaxNewton(CHI), secure(cohort(), projections=True), rounds=5)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize(
    "method", [sp.SubspaceSaddle(CHI), sp.fair(CHI)], ids=["SubspaceSaddle", "fair"]
)
def test_with_projections_the_subspace_method_is_the_plain_one(loss, method):
    plain = sp.train(sp.SubspaceSaddle(CHI), cohort(loss), rounds=50, tol=1e-9)
    masked = sp.train(method, secure(cohort(loss), projections=True), rounds=50, tol=1e-9)
    assert (masked.status, masked.rounds) == ("converged", plain.rounds)
    assert off(masked.x, plain.x) <= 1e-9


@pytest.mark.parametrize(
    "name", ["ScaffPD", "Scaffold I", "FedAvg, some clients, minibatches", "DRFA"]
)
def test_a_resumed_run_is_the_same_run(tmp_path, name):
    method = FIRST_ORDER[name]
    file = tmp_path / "state.npz"
    whole = sp.train(method, secure(cohort()), rounds=9, seed=3)
    sp.train(method, secure(cohort()), rounds=4, seed=3, checkpoint=file)
    federation = secure(cohort())
    resumed = sp.train(method, federation, rounds=9, seed=3, checkpoint=file)
    assert resumed.rounds == whole.rounds
    # the clip of a sum follows earlier sums, which a new process has not seen: its last digit may
    # differ
    np.testing.assert_allclose(resumed.x, whole.x, rtol=0, atol=1e-16)
    np.testing.assert_allclose(resumed.weights, whole.weights, rtol=0, atol=1e-16)


@pytest.mark.parametrize("name", ["ScaffPD", "ProxSkip", "q-FedAvg, some clients"])
def test_new_keys_and_the_same_digits(name):
    """Masks are new with every run, and cancel exactly."""
    seen = []
    runs = []
    for _ in range(2):
        masked = []
        federation = secure(
            cohort(), record=lambda kind, client, array, masked=masked: masked.append(array.copy())
        )
        runs.append(sp.train(FIRST_ORDER[name], federation, rounds=8, seed=3))
        seen.append(masked)
    np.testing.assert_array_equal(runs[0].x, runs[1].x)
    assert len(seen[0]) == len(seen[1]) > 8
    assert not any(np.any(a == b) for a, b in zip(*seen, strict=True))


def test_without_masks_the_record_shows_the_vectors_themselves(monkeypatch):
    """What `record` sees is what the server gets: a scaled vector, were it not masked."""
    monkeypatch.setattr("scaffpd.secure.masking.add_stream", lambda total, key, sign: None)
    plain = cohort()
    seen = {}
    federation = secure(
        cohort(), record=lambda kind, client, array: seen.setdefault((kind, client), array.copy())
    )
    x = torch.ones(4, dtype=torch.float64)
    w = np.full(5, 0.2)
    federation.gradients(x).sum(w)
    own = plain.gradients(x).each().numpy()
    for i, name in enumerate(plain.names):
        ratio = seen["c", name].view(np.int64) / own[i]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-12)
