"""Noise: its size, that only the question decides it, and that nobody without the secret can draw it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from private_cases import clients, linear, network, oracle
from scipy.stats import kstest

import scaffpd as sp
from scaffpd.federation import LocalPlan
from scaffpd.privacy.noise import PrivateQuestion, client_key, digest, key_stream, secret_bytes

PLAN = LocalPlan(3, 0.05, key=(1, 2))


def private(noise=3.0, secret=7, loss="logistic", **more):
    return sp.Private(
        linear(loss), noise=noise, secret=secret, **{"radius": 2.0, "clip": 0.5} | more
    )


def test_streams_go_on_where_they_were():
    whole = key_stream(b"k" * 32)(9)
    parts = key_stream(b"k" * 32)
    assert np.array_equal(whole, np.concatenate([parts(4), parts(5)]))


def test_a_hash_tells_apart_what_looks_alike():
    x = torch.zeros(2, dtype=torch.float64)
    parts = [
        ("a", "bc"),
        ("ab", "c"),
        (b"abc",),
        ("abc",),
        (x,),
        (x.float(),),
        (x[None],),
        (x, x),
        (1,),
        (1.0,),
    ]
    assert len({digest(*part) for part in parts}) == len(parts)


def test_noise_has_the_promised_size_and_no_bias():
    """Released minus clipped sums, at many points: z C/m per number of a gradient, z_L B/m for a loss."""
    made = oracle(private(3.0, loss_noise=0.02, loss_clip=40.0), clients())
    exact = oracle(private(0.0, loss_noise=0.0, loss_clip=40.0), clients())
    points = [torch.full((5,), 0.001 * k, dtype=torch.float64) for k in range(500)]
    answers = [(made.evaluate(x, None, (0,)), exact.evaluate(x, None, (0,))) for x in points]
    gradients = torch.stack([a.gradients - b.gradients for a, b in answers])
    sizes = np.array([9, 5, 14])
    for i, m in enumerate(sizes):
        noise = (gradients[:, i] * m / 1.5).flatten().numpy()
        assert kstest(noise, "norm").pvalue > 1e-4
        assert noise.std() == pytest.approx(1, abs=0.045)  # three standard errors of 2,500 numbers
    correlation = np.corrcoef(gradients.flatten(1).numpy().T)
    assert np.abs(correlation - np.eye(15)).max() < 0.15
    losses = torch.stack([a.losses - b.losses for a, b in answers]).numpy()
    np.testing.assert_allclose(losses.std(0) * sizes / 0.8, 1, atol=0.1)
    np.testing.assert_allclose(losses.mean(0) * sizes / 0.8, 0, atol=0.15)


def test_the_same_question_gets_the_same_answer_and_is_counted_once():
    cohort = sp.Cohort(clients(), private())
    x = cohort.start() + 0.1
    first = cohort.gradients(x)
    spent = cohort.privacy
    again = cohort.gradients(x.clone(), key=(5, 6))  # without minibatches the key decides nothing
    assert torch.equal(first.each(), again.each())
    assert np.array_equal(first.losses, again.losses)
    assert np.array_equal(cohort.losses(x), first.losses)
    updates = [
        cohort.local_updates(x, first, first.sum(np.full(3, 1 / 3)), PLAN).each() for _ in range(2)
    ]
    assert torch.equal(*updates)
    after = cohort.privacy
    assert after.worst > spent.worst
    cohort.gradients(x), cohort.local_updates(x, first, first.sum(np.full(3, 1 / 3)), PLAN)
    assert np.array_equal(cohort.privacy.epsilon, after.epsilon)
    assert cohort.account.total == 3 * (2 + 2)


def test_another_question_gets_fresh_noise():
    """Differences of answers never give the noise away: no two questions share it."""
    made, exact = (oracle(private(z), clients()) for z in (3.0, 0.0))
    x = torch.full((5,), 0.2, dtype=torch.float64)
    noise = []
    for at in (x, x + 1e-12):
        noise.append(
            made.evaluate(at, None, (0,)).gradients - exact.evaluate(at, None, (0,)).gradients
        )
    plans = [PLAN, LocalPlan(3, 0.06, key=(1, 2)), LocalPlan(3, 0.05, key=(1, 2), prox=0.1)]
    for plan in plans:
        for at in (None, torch.ones(3, 5, dtype=torch.float64)):
            one = LocalPlan(1, plan.rate, prox=plan.prox, key=plan.key)
            pair = [o.local_updates(x, at, None, one).each() / plan.rate for o in (made, exact)]
            noise.append(pair[0] - pair[1])
    flat = torch.stack(noise).flatten(1)
    distances = torch.cdist(flat, flat) + 1e9 * torch.eye(len(flat), dtype=torch.float64)
    assert float(distances.min()) > 0.1


def test_a_shorter_plan_is_the_beginning_of_the_longer_one():
    made = oracle(private(), clients())
    x = torch.full((5,), 0.2, dtype=torch.float64)
    long = [
        made.local_updates(x, None, None, LocalPlan(j, 0.05, batch_size=4, key=(1,))).each()
        for j in (1, 2, 5)
    ]
    assert made.account.total == 3 * 5
    steps = torch.stack(long)
    assert float((steps[1] - steps[0]).norm()) > 0
    made.local_updates(x, None, None, LocalPlan(3, 0.05, batch_size=4, key=(1,)))
    assert made.account.total == 3 * 5


@pytest.mark.parametrize("change", ["secret", "clip", "data", "name"])
def test_noise_is_bound_to_secret_settings_data_and_client(change):
    """With the same noise for two data sets or two clips, a difference of answers would be without noise."""
    data = clients(sizes=(6,))
    more = {}
    other = dict(data)
    if change == "secret":
        more = {"secret": 8}
    if change == "clip":
        more = {"clip": 0.6}
    if change == "data":
        X, y = data["silo 0"]
        other = {"silo 0": (X, 1 - y)}
    if change == "name":
        other = {"silo x": data["silo 0"]}
    x = torch.full((5,), 0.2, dtype=torch.float64)
    noise = []
    for rows, extra in ((data, {}), (other, more)):
        pair = [
            oracle(private(**{"noise": z} | extra), rows).evaluate(x, None, (0,)).gradients
            for z in (3.0, 0.0)
        ]
        noise.append((pair[0] - pair[1]) * 6 / (1.5 * extra.get("clip", 0.5) / 0.5))
    assert float((noise[0] - noise[1]).abs().min()) > 1e-4


def test_a_secret_left_out_is_another_one_each_time():
    x = torch.zeros(5, dtype=torch.float64)
    answers = [
        oracle(private(secret=None), clients()).evaluate(x, None, (0,)).gradients for _ in range(2)
    ]
    assert not torch.equal(*answers)
    assert len({secret_bytes(None) for _ in range(3)}) == 3
    assert secret_bytes(5) == secret_bytes(5) != secret_bytes(6)


def test_the_secret_is_nowhere_to_be_read():
    model = private(secret=b"a most secret secret")
    assert "secret" not in repr(model)
    assert "secret" not in repr(sp.Cohort(clients(), model))
    assert (
        sp.Cohort(clients(), model).fingerprint
        == sp.Cohort(clients(), private(secret=9)).fingerprint
    )
    assert (
        sp.Cohort(clients(), model).fingerprint
        != sp.Cohort(clients(), private(noise=3.1)).fingerprint
    )
    with pytest.raises(sp.InputError) as refusal:
        private(secret=b"short one")
    assert "short one" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["linear", "network"])
def test_poisson_samples_have_their_rate_and_are_independent(kind):
    """Rows are in or out one by one; sums over a sample are divided by b, whatever its size."""
    sizes = (40, 12, 8)
    b = 10
    model = linear() if kind == "linear" else network(outputs=2)
    made = oracle(
        sp.Private(model, noise=0.0, clip=0.5, smoothness=1.0, secret=1), clients(sizes=sizes)
    )
    seen = []
    for k in range(250):
        questions = made._questions("gradient", b, (k,), torch.zeros(3))
        rows, count = made._drawn(questions, b, torch.zeros(3, dtype=torch.float64))
        seen.append(rows.numpy())
        np.testing.assert_allclose(count.numpy(), [10, 10, 8])
    seen = np.array(seen)
    rates = np.array([seen[:, :40].mean(), seen[:, 40:52].mean(), seen[:, 52:].mean()])
    np.testing.assert_allclose(rates, [0.25, 10 / 12, 1], atol=0.03)
    per_round = seen[:, :40].sum(1)
    assert per_round.var() == pytest.approx(
        40 * 0.25 * 0.75, rel=0.25
    )  # of a binomial, not of a fixed size
    x = torch.full((made.dimension,), 0.1, dtype=torch.float64)
    mean = torch.stack([made.evaluate(x, b, (k,)).gradients for k in range(80)]).mean(0)
    torch.testing.assert_close(mean, made.evaluate(x, None, (0,)).gradients, rtol=0, atol=0.08)


def test_rows_are_drawn_by_the_secret_and_not_by_the_plans_key_alone():
    x = torch.zeros(5, dtype=torch.float64)
    samples = []
    for secret in (1, 2):
        made = oracle(private(secret=secret), clients(sizes=(50, 50)))
        samples.append(made._drawn(made._questions("gradient", 10, (3,), x), 10, x)[0])
    assert not torch.equal(*samples)


def test_loss_and_gradient_of_one_question_draw_samples_of_their_own():
    """They are accounted for as two sampled releases, which one common sample would not be."""
    made = oracle(private(), clients(sizes=(50, 50)))
    x = torch.zeros(5, dtype=torch.float64)
    rows = [
        made._drawn(made._questions(kind, 10, (3,), x), 10, x)[0] for kind in ("loss", "gradient")
    ]
    assert not torch.equal(*rows)


def test_marks_and_keys_need_the_secret():
    keys = [client_key(secret, "a", b"data") for secret in (b"1" * 16, b"2" * 16)]
    questions = [PrivateQuestion(key, digest("loss")) for key in keys]
    assert questions[0].mark != questions[1].mark
    assert questions[0].noise(1) != questions[0].rows(1)


def test_networks_that_differ_in_what_is_frozen_do_not_share_noise():
    """Else the difference of two answers would be exact, and the second would not be counted."""
    rows = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32), np.arange(40) % 2
    answers = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        frozen = torch.nn.Linear(4, 6).requires_grad_(False)
        head = torch.nn.Linear(6, 2)
        with torch.no_grad():
            for p in head.parameters():
                p.fill_(0.1)
        model = sp.Private(
            sp.Module(torch.nn.Sequential(frozen, head)), noise=1.0, smoothness=10.0, secret=7
        )
        cohort = sp.Cohort({"a": rows}, model)
        noisy = cohort.gradients(cohort.start()).each()[0]
        bare = sp.Cohort({"a": rows}, sp.Private(model.model, noise=0.0, smoothness=10.0, secret=7))
        answers.append((noisy - bare.gradients(bare.start()).each()[0]).numpy())
    assert np.abs(answers[0] - answers[1]).max() > 1e-3  # the noise itself
