"""What a server may ask beyond full gradients: some clients only, plain local steps, vectors that
clients keep.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import scaffpd as sp
from naive import Client, relative, unequal_clients
from scaffpd.federation import LocalPlan
from scaffpd.federation.border import QUESTIONS
from scaffpd.federation.questions import Question, Scores
from scaffpd.models.draws import Draws

LOSSES = {"squared": 1, "logistic": 1, "softmax": 3}
SOME = [5, 0, 3]


def problem(loss, dtype=torch.float64):
    outputs = LOSSES[loss]
    data = unequal_clients(loss, outputs)
    model = sp.Linear(loss, l2=0.05, classes=3 if loss == "softmax" else None)
    clients = [Client(X, y, loss, 0.05, outputs) for X, y in data.values()]
    return sp.Cohort(data, model, dtype=dtype), clients


def point(cohort, seed=1):
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.standard_normal(cohort.dimension))


def alone(n, i):
    return np.eye(n)[i]


def rows(key, name, m, size, steps):
    """The batches that a client draws, as the package documents them."""
    if m <= size:
        return [np.arange(m)] * steps
    draws = Draws(key, [name])
    return [
        np.minimum((draws.uniform(size)[0].numpy() * m).astype(int), m - 1) for _ in range(steps)
    ]


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_some_clients_answer_what_they_answer_in_company(loss, batch_size):
    cohort, _ = problem(loss)
    x = point(cohort)
    n = 8
    key = (4, 2)
    everybody, some = (cohort.gradients(x, batch_size, key, clients) for clients in (None, SOME))
    assert np.isnan(np.delete(some.losses, SOME)).all()
    np.testing.assert_allclose(some.losses[SOME], everybody.losses[SOME], rtol=1e-13)
    np.testing.assert_allclose(
        cohort.losses(x, batch_size, key, SOME)[SOME], everybody.losses[SOME], rtol=1e-13
    )
    np.testing.assert_allclose(some.norms()[SOME], everybody.norms()[SOME], rtol=1e-12)
    torch.testing.assert_close(some.each(), everybody.each()[SOME], atol=1e-12, rtol=1e-12)
    plan = LocalPlan(4, 0.01, batch_size=batch_size, key=key, prox=0.3)
    c = point(cohort, 2)
    kept = cohort.memory().plus(0.1, everybody)
    for at in (None, kept):
        a, b = (cohort.local_updates(x, at, c, plan, clients) for clients in (None, SOME))
        for i in SOME:
            assert relative(b.sum(alone(n, i)), a.sum(alone(n, i))) < 1e-12
        np.testing.assert_allclose(b.norms()[SOME], a.norms()[SOME], rtol=1e-11)


@pytest.mark.cover(2)
@pytest.mark.parametrize("prox", [0.0, 0.7])
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("kind", ["nothing", "kept", "answered elsewhere"])
@pytest.mark.parametrize("loss", LOSSES)
def test_local_steps_match_a_naive_loop(loss, kind, batch_size, prox):
    """With and without c_i and a correction, pulled back or not."""
    cohort, clients = problem(loss)
    x = point(cohort)
    c = point(cohort, 2)
    key = (7, 1)
    rate = 0.01
    at = {
        "nothing": lambda: None,
        "kept": lambda: (
            cohort.memory().plus(1.0, cohort.gradients(point(cohort, 3))).plus(-0.5, c, [1, 2])
        ),
        "answered elsewhere": lambda: cohort.gradients(point(cohort, 3)),
    }[kind]()
    updates = cohort.local_updates(
        x, at, None if kind == "nothing" else c, LocalPlan(5, rate, 1.0, batch_size, key, prox)
    )
    for i, (name, client) in enumerate(zip(cohort.names, clients, strict=True)):
        c_i = (
            np.zeros(cohort.dimension)
            if kind == "nothing"
            else client.gradient(point(cohort, 3).numpy())
        )
        c_i -= 0.5 * c.numpy() if kind == "kept" and i in (1, 2) else 0
        shift = 0 if kind == "nothing" else c.numpy() - c_i
        batches = (
            [None] * 5 if batch_size is None else rows(key, name, len(client.A), batch_size, 5)
        )
        u = x.numpy().copy()
        for batch in batches:
            u = u - rate * (client.gradient(u, batch) + shift + prox * (u - x.numpy()))
        assert relative(updates.sum(alone(8, i)), x.numpy() - u) < 1e-10, name


def test_memory_is_a_value():
    cohort, _ = problem("logistic")
    zero = cohort.memory()
    v = point(cohort)
    one = zero.plus(2.0, v, [1, 4])
    assert torch.equal(zero.sum(np.ones(8)), torch.zeros_like(v))
    assert relative(one.sum(np.arange(8.0)), 10 * v) < 1e-14
    at = cohort.gradients(v, clients=SOME)
    kept = one.plus(1.0, at)
    for i in range(8):
        expected = one.sum(alone(8, i)) + (at.sum(alone(8, i)) if i in SOME else 0)
        assert torch.allclose(kept.sum(alone(8, i)), expected, atol=1e-14)


def test_traffic_of_questions_to_some_clients():
    cohort, _ = problem("softmax")
    d = cohort.dimension
    size = 8
    last = [(0, 0, 0)]

    def sent():
        now = (
            cohort.traffic.exchanges,
            cohort.traffic.bytes_up // size,
            cohort.traffic.bytes_down // size,
        )
        last.append(now)
        return tuple(b - a for a, b in zip(*last[-2:], strict=True))

    x = point(cohort)
    y = point(cohort, 2)
    c = point(cohort, 3)
    cohort.losses(x, clients=SOME)
    assert sent() == (1, 3, 3 * d)  # x down, a scalar up
    cohort.local_updates(x, None, None, LocalPlan(2), [5, 0])
    assert sent() == (1, 2 * d, 0)  # they have x
    cohort.local_updates(x, None, None, LocalPlan(2), [5, 1])
    assert sent() == (1, 2 * d, d)  # one of them has not
    cohort.losses(y, clients=SOME, alone=False)
    cohort.local_updates(y, None, None, LocalPlan(2), SOME).norms()
    assert sent() == (1, 3 * d + 6, 3 * d)  # q-FFL: one exchange
    cohort.local_updates(c, cohort.memory(), x, LocalPlan(2))
    assert sent() == (1, 8 * d, 16 * d)  # SCAFFOLD: x and c down
    cohort.local_updates(x, None, None, LocalPlan(2, snapshot=1), [4])
    assert sent() == (1, 2 * d, d)  # DRFA: two vectors up
    cohort.ask(Scores(y, "train"), alone=False)
    assert sent() == (0, 8 * 2, 0)  # no point goes down for the logs, and x is known still
    cohort.losses(x, clients=[4])
    assert sent() == (1, 1, 0)


def test_only_a_vector_is_a_point_that_goes_down():
    @dataclass(frozen=True, eq=False)
    class Shifted(Question):
        """A question whose x is a number."""

        kind = "a shift"
        x: float

    try:
        assert Shifted(2.0).sent is None
    finally:
        del QUESTIONS[Shifted.kind]
