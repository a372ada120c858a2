"""What private clients answer and what they refuse, constants without data, and sentences for mistakes."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from private_cases import clients, linear, network, oracle

import scaffpd as sp
from scaffpd.federation import LocalPlan, ProximalPlan

CHI = sp.ChiSquare(rho=0.5)


def test_what_is_printed_of_private_clients_has_neither_rows_nor_secrets():
    made = oracle(sp.Private(linear(), noise=2.0, radius=1.5, secret=3), clients())
    assert type(made).__name__ == "PrivateOracle"
    assert "tensor" not in repr(made)
    assert repr(made.members[0].key) not in repr(made)


def test_nothing_in_the_constants_depends_on_a_record():
    data = clients()
    other = {name: (100 * X[::-1], 1 - y) for name, (X, y) in data.items()}
    model = sp.Private(linear(), noise=2.0, radius=1.5)
    known, same = (sp.Cohort(rows, model).constants() for rows in (data, other))
    for item in fields(known):
        assert np.array_equal(getattr(known, item.name), getattr(same, item.name)), item.name
    np.testing.assert_allclose(known.smoothness, 0.25 * 1.5**2 + 0.02)
    assert known.noisy
    given = sp.Cohort(data, sp.Private(network(outputs=2), noise=2.0, smoothness=3.0)).constants()
    assert np.array_equal(given.smoothness, np.full(3, 3.0))
    assert not given.convex


def test_without_a_public_smoothness_a_method_needs_rates_of_its_own():
    cohort = sp.Cohort(clients(), sp.Private(linear(), noise=2.0))
    with pytest.raises(sp.InputError, match=r"public smoothness= \(or radius="):
        sp.train(sp.FedAvg(), cohort, rounds=1, progress=False)
    sp.train(sp.FedAvg(local_rate=0.1), cohort, rounds=1, progress=False)


def test_second_order_questions_are_refused():
    cohort = sp.Cohort(clients("squared"), sp.Private(linear("squared"), noise=2.0, radius=1.0))
    at = cohort.gradients(cohort.start())
    V = torch.ones(5, 1, dtype=torch.float64)
    w = np.full(3, 1 / 3)
    ones = torch.ones(5, dtype=torch.float64)
    for ask in (
        lambda: at.restriction(V, w, ones),
        lambda: at.diagonal(w),
        at.diagonals,
        lambda: cohort.proximal_steps(at, ones, ProximalPlan(1.0, ones)),
        lambda: sp.train(sp.SubspaceSaddle(CHI), cohort, rounds=2, progress=False),
    ):
        with pytest.raises(sp.InputError, match="no second derivatives"):
            ask()


def test_there_is_no_certificate_and_the_reason_is_noise():
    cohort = sp.Cohort(clients(), sp.Private(linear(), noise=2.0, radius=1.0, secret=1))
    result = sp.train(sp.fair(CHI, local_steps=2), cohort, rounds=3, progress=False)
    assert result.certificate == np.inf
    assert "no certificate: losses and gradients carry noise" in result.message
    assert "Scaff-PD" in result.message
    with pytest.raises(sp.InputError, match="carry noise"):
        sp.train(sp.ScaffPD(CHI, local_steps=1), cohort, rounds=3, tol=1e-3, progress=False)


def test_what_is_made_of_answers_is_made_of_released_vectors():
    cohort = sp.Cohort(clients(), sp.Private(linear(), noise=2.0, radius=1.0, secret=1))
    at = cohort.gradients(cohort.start() + 0.3)
    C = at.each().numpy()
    w = np.array([0.5, 0.2, 0.3])
    spent = cohort.privacy.worst
    v = np.linspace(-1, 1, 5)
    np.testing.assert_allclose(at.sum(w).numpy(), w @ C)
    np.testing.assert_allclose(at.project(torch.from_numpy(v)), C @ v)
    np.testing.assert_allclose(at.norms(), (C**2).sum(1))
    assert np.isinf(at.rounding[0]).all()
    assert cohort.privacy.worst == spent


def test_some_clients_answer_as_they_do_among_all_and_they_alone_pay():
    model = sp.Private(linear(), noise=(2.0, 3.0, 4.0), radius=1.0, secret=1)
    whole = sp.Cohort(clients(), model)
    part = sp.Cohort(clients(), model)
    x = whole.start() + 0.1
    every = whole.gradients(x)
    some = part.gradients(x, clients=[2, 0])
    torch.testing.assert_close(some.each(), every.each()[[2, 0]], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(some.losses[[0, 2]], every.losses[[0, 2]])
    spent = part.privacy.epsilon
    assert spent[1] == 0
    assert spent[0] == whole.privacy.epsilon[0] > spent[2] == whole.privacy.epsilon[2] > 0
    plan = LocalPlan(2, batch_size=3, key=(1,))
    together = whole.local_updates(x, every, None, plan)
    alone = part.local_updates(x, some, None, plan, [2, 0])
    torch.testing.assert_close(alone.each(), together.each()[[2, 0]], rtol=1e-9, atol=1e-12)


def test_the_first_gradient_of_a_plan_is_not_asked_for_twice():
    """With all records g_i(x) = c_i has been released: the first step moves along the correction, without noise."""
    made = oracle(sp.Private(linear(), noise=50.0, radius=1.0, secret=1), clients())
    x = torch.full((5,), 0.1, dtype=torch.float64)
    c = torch.linspace(-1, 1, 5, dtype=torch.float64)
    at = made.evaluate(x, None, (0,))
    total = made.account.total
    d = made.local_updates(x, at, c, LocalPlan(1, 0.1)).each()
    torch.testing.assert_close(d, (0.1 * c).expand(3, 5), rtol=0, atol=1e-12)
    assert made.account.total == total


def test_held_out_rows_and_scores_are_the_experimenters():
    data = clients()
    plain = sp.Cohort(data, linear(), test=data)
    cohort = sp.Cohort(data, sp.Private(linear(), noise=9.0, radius=0.5), test=data)
    x = plain.start() + 0.4
    for split in ("train", "test"):
        assert np.array_equal(cohort.evaluate(x, split).loss, plain.evaluate(x, split).loss)
    assert cohort.privacy.worst == 0


def test_rows_of_a_table_are_as_private_as_arrays():
    data = clients("squared")
    table = sp.data.Table(np.concatenate([X for X, _ in data.values()]))
    ends = np.cumsum([0, *(len(y) for _, y in data.values())])
    rows = {
        name: (table.rows(np.arange(ends[i], ends[i + 1])), y)
        for i, (name, (_, y)) in enumerate(data.items())
    }
    model = sp.Private(sp.Linear("squared", l2=0.02), noise=3.0, radius=2.0, secret=1)
    answers = [
        sp.Cohort(given, model, test=given).gradients(torch.ones(4, dtype=torch.float64))
        for given in (data, rows)
    ]
    assert torch.equal(answers[0].each(), answers[1].each())
    assert np.array_equal(answers[0].losses, answers[1].losses)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": 3}, "needs a model"),
        ({"clip": 0.0}, "clip > 0"),
        ({"noise": -1.0}, "noise >= 0"),
        ({"noise": ()}, "noise >= 0"),
        ({"clip": float("inf")}, "finite clip with noise"),
        ({"loss_clip": float("inf")}, "finite loss_clip with loss_noise"),
        ({"radius": -1}, "radius > 0"),
        ({"model": network(), "radius": 1.0}, "Linear models only"),
        ({"secret": "words"}, "at least 16 bytes"),
        ({"delta": 2.0}, "0 < delta < 1"),
        ({"budget": 0}, "budget > 0"),
    ],
)
def test_mistakes_get_a_sentence(arguments, sentence):
    with pytest.raises(sp.InputError, match=sentence):
        sp.Private(**{"model": linear()} | arguments)


def test_mistakes_of_solving_get_a_sentence():
    method = sp.FedAvg(batch_size=3)
    for arguments, sentence in (
        ({"algorithm": method}, "needs samples="),
        ({"algorithm": sp.ProxSkip()}, "is not known beforehand"),
        ({"algorithm": sp.AFL(sp.QFair(q=1.0))}, "not on the simplex"),
        ({"epsilon": -1}, "epsilon > 0"),
        ({"rounds": 0}, "rounds >= 1"),
        ({"loss_share": 1.0}, "loss_share"),
        ({"noise": 1.0}, "finds noise by itself"),
    ):
        with pytest.raises(sp.InputError, match=sentence):
            sp.Private.solved(
                **{"model": linear(), "epsilon": 1.0, "algorithm": sp.FedAvg(), "rounds": 3}
                | arguments
            )
    with pytest.raises(sp.InputError, match="for 2 clients, but there are 3"):
        sp.Cohort(clients(), sp.Private(linear(), noise=(1.0, 2.0)))


def test_a_network_that_cannot_be_taken_record_by_record_gets_a_sentence():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2).double()

        def forward(self, X):
            return self.layer(X) * (1 if float(X.sum()) > 0 else 2)

    cohort = sp.Cohort(clients(), sp.Private(sp.Module(Odd()), noise=1.0, smoothness=1.0))
    with pytest.raises(sp.InputError, match="record by record"):
        cohort.gradients(cohort.start())


def test_clipped_and_noisy_losses_that_stay_do_not_say_that_nothing_moves():
    """All records' losses are above the clip, wherever x is."""
    model = sp.Private(linear(), noise=0.1, loss_noise=1e-4, loss_clip=0.1, radius=2.0, secret=1)
    method = sp.ScaffPD(CHI, local_steps=1, steps=sp.Fixed(tau=0.02, sigma=0.1))
    result = sp.train(method, sp.Cohort(clients(), model), rounds=5, progress=False)
    np.testing.assert_allclose(result.history.losses, 0.1, rtol=4e-4)
    assert np.abs(result.x).max() > 1e-3
    assert result.status is sp.Status.ROUND_LIMIT
