"""Answers of private clients: size and origin of their noise, what they cost, and what is
refused."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from scipy.stats import kstest

import scaffpd as sp
from cases.private import SIZES, clients, linear, network, oracle
from cases.refusals import refuses
from scaffpd.federation import LocalPlan, ProximalPlan
from scaffpd.privacy.noise import PrivateQuestion, client_key, digest, key_stream, secret_bytes

CHI = sp.ChiSquare(rho=0.5)
PLAN = LocalPlan(3, 0.05, key=(1, 2))
X = torch.full((5,), 0.2, dtype=torch.float64)


def private(noise=3.0, secret=7, loss="logistic", **more):
    options = {"radius": 2.0, "clip": 0.5} | more
    return sp.Private(linear(loss), noise=noise, secret=secret, **options)


def clipped(made, x):
    sizes = torch.tensor([member.samples for member in made.members])
    means = made.sums.gradients(x) * made.clips[0].unit / sizes[:, None]
    losses = made.sums.losses(x) * made.clips[1].unit / sizes
    return means + made.ridge.times(x), losses + made.ridge.half(x)


def test_noise_has_the_promised_size_and_no_bias():
    """Released minus clipped sums, at many points: z C/m per number of a gradient, z_L B/m for a
    loss.

    Every bound is five standard errors or a p-value of 1e-6: together they fail once in 10⁵ draws.
    """
    made = oracle(private(3.0, loss_noise=0.02, loss_clip=40.0), clients())
    points = [torch.full((5,), 0.001 * k, dtype=torch.float64) for k in range(500)]
    off = []
    off_losses = []
    for x in points:
        at = made.evaluate(x, None, (0,))
        gradients, losses = clipped(made, x)
        off.append((at.gradients - gradients) * torch.tensor(SIZES)[:, None] / 1.5)
        off_losses.append((at.losses - losses) * torch.tensor(SIZES) / 0.8)
    noise = torch.stack(off).flatten(1).numpy()
    assert kstest(noise.flatten(), "norm").pvalue > 1e-6
    np.testing.assert_allclose(noise.std(0), 1, atol=5 / 1000**0.5)
    correlation = np.corrcoef(noise.T) - np.eye(15)
    assert np.abs(correlation).max() < 5 / 500**0.5
    noise = torch.stack(off_losses).numpy()
    np.testing.assert_allclose(noise.std(0), 1, atol=5 / 1000**0.5)
    np.testing.assert_allclose(noise.mean(0), 0, atol=5 / 500**0.5)


def test_the_same_question_gets_the_same_answer_and_is_counted_once():
    cohort = sp.Cohort(clients(), private())
    x = cohort.start() + 0.1
    weights = np.full(3, 1 / 3)

    def ask(x, key):
        at = cohort.gradients(x, key=key)
        steps = cohort.local_updates(x, at, at.sum(weights), PLAN).each()
        return at, steps

    first, steps = ask(x, (1, 2))
    again, same = ask(x.clone(), (5, 6))
    assert torch.equal(first.each(), again.each())
    assert np.array_equal(first.losses, again.losses)
    assert np.array_equal(cohort.losses(x), first.losses)
    assert torch.equal(steps, same)
    assert cohort.account.total == 3 * (2 + 2)  # the first gradient of a plan is known already
    c = torch.linspace(-1, 1, 5, dtype=torch.float64)
    one = cohort.local_updates(x, first, c, LocalPlan(1, 0.1)).each()
    torch.testing.assert_close(one, (0.1 * c).expand(3, 5), rtol=0, atol=1e-12)
    assert cohort.account.total == 3 * (2 + 2)
    # what is made of released vectors costs nothing
    C = first.each().numpy()
    np.testing.assert_allclose(first.sum(weights).numpy(), weights @ C)
    np.testing.assert_allclose(first.norms(), (C**2).sum(1))
    assert cohort.account.total == 3 * (2 + 2)


def test_a_shorter_plan_is_the_beginning_of_the_longer_one():
    made = oracle(private(), clients())
    for steps in (1, 2, 5, 3):
        made.local_updates(X, None, None, LocalPlan(steps, 0.05))
    assert made.account.total == 3 * 5


def test_another_question_gets_fresh_noise():
    """Differences of answers never give the noise away: no two questions share it."""
    made = oracle(private(), clients())
    noise = [
        made.evaluate(at, None, (0,)).gradients - clipped(made, at)[0] for at in (X, X + 1e-12)
    ]
    plans = [(0.05, 0.0, (1, 2)), (0.06, 0.0, (1, 2)), (0.05, 0.1, (1, 2))]
    for rate, prox, key in plans:
        for at in (None, torch.ones(3, 5, dtype=torch.float64)):
            plan = LocalPlan(1, rate, prox=prox, key=key)
            step = made.local_updates(X, at, None, plan).each() / rate
            noise.append(step - clipped(made, X)[0] + (0 if at is None else at))
    flat = torch.stack(noise).flatten(1)
    distances = torch.cdist(flat, flat) + 1e9 * torch.eye(len(flat), dtype=torch.float64)
    assert float(distances.min()) > 0.1


@pytest.mark.parametrize("change", ["secret", "clip", "data", "name", "frozen"])
def test_noise_is_bound_to_secret_settings_data_client_and_network(change):
    """With the same noise for two of them, a difference of answers would be without noise."""
    data = clients(sizes=(6,))
    rows, labels = data["silo 0"]

    def noise(changed):
        given = {"silo x" if changed and change == "name" else "silo 0": (rows, labels)}
        if changed and change == "data":
            given = {"silo 0": (rows, 1 - labels)}
        more = {"secret": 8} if changed and change == "secret" else {}
        more |= {"clip": 0.6} if changed and change == "clip" else {}
        model = private(**more)
        if change == "frozen":
            torch.manual_seed(int(changed))
            frozen = torch.nn.Linear(4, 6).double().requires_grad_(False)
            torch.manual_seed(5)
            head = torch.nn.Linear(6, 2).double()
            net = sp.Module(torch.nn.Sequential(frozen, head))
            model = sp.Private(net, noise=3.0, smoothness=1.0, secret=7)
        made = oracle(model, given)
        x = made.start() + 0.2
        return (made.evaluate(x, None, (0,)).gradients - clipped(made, x)[0]) / model.clip

    assert float((noise(False) - noise(True)).abs().min()) > 1e-4


def test_nobody_without_the_secret_can_draw_or_read():
    answers = [oracle(private(secret=None), clients()).losses(X, None, (0,)) for _ in range(2)]
    assert not torch.equal(*answers)
    assert secret_bytes(5) == secret_bytes(5) != secret_bytes(6)
    assert len({secret_bytes(None) for _ in range(3)}) == 3
    keys = [client_key(secret, "a", b"data") for secret in (b"1" * 16, b"2" * 16)]
    marks = {PrivateQuestion(key, digest("loss")).mark for key in keys}
    assert len(marks) == 2
    model = private(secret=b"a most secret secret")
    cohort = sp.Cohort(clients(), model)
    assert "secret" not in repr(model) + repr(cohort)
    assert cohort.fingerprint == sp.Cohort(clients(), private(secret=9)).fingerprint
    assert cohort.fingerprint != sp.Cohort(clients(), private(noise=3.1)).fingerprint
    assert "tensor" not in repr(cohort._oracle)
    with refuses("secret-too-short") as refusal:
        private(secret=b"short one")
    assert "short one" not in str(refusal.value)


def test_streams_go_on_and_hashes_tell_what_looks_alike():
    parts = key_stream(b"k" * 32)
    assert np.array_equal(key_stream(b"k" * 32)(9), np.concatenate([parts(4), parts(5)]))
    x = torch.zeros(2, dtype=torch.float64)
    alike = [("a", "bc"), ("ab", "c"), (b"abc",), ("abc",), (x,), (x.float(),), (x[None],), (x, x)]
    alike += [(1,), (1.0,)]
    assert len({digest(*part) for part in alike}) == len(alike)


def test_some_clients_answer_as_they_do_among_all_and_they_alone_pay():
    whole, part = (sp.Cohort(clients(), private()) for _ in range(2))
    every = whole.gradients(X)
    some = part.gradients(X, clients=[2, 0])
    torch.testing.assert_close(some.each(), every.each()[[2, 0]], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(some.losses[[0, 2]], every.losses[[0, 2]])
    assert part.privacy.epsilon[1] == 0 < part.privacy.epsilon[0] == whole.privacy.epsilon[0]
    plan = LocalPlan(2)
    together = whole.local_updates(X, every, None, plan)
    alone = part.local_updates(X, some, None, plan, [2, 0])
    torch.testing.assert_close(alone.each(), together.each()[[2, 0]], rtol=1e-9, atol=1e-12)


def test_nothing_in_the_constants_depends_on_a_record():
    data = clients()
    other = {name: (100 * rows[::-1], 1 - y) for name, (rows, y) in data.items()}
    known, same = (sp.Cohort(rows, private()).constants() for rows in (data, other))
    for item in fields(known):
        assert np.array_equal(getattr(known, item.name), getattr(same, item.name)), item.name
    assert known.noisy
    given = sp.Cohort(data, sp.Private(network(outputs=2), smoothness=3.0)).constants()
    assert np.array_equal(given.smoothness, np.full(3, 3.0))
    assert not given.convex


def test_held_out_rows_and_scores_are_the_experimenters():
    data = clients()
    plain = sp.Cohort(data, linear(), test=data)
    cohort = sp.Cohort(data, private(9.0), test=data)
    for split in ("train", "test"):
        assert np.array_equal(cohort.evaluate(X, split).loss, plain.evaluate(X, split).loss)
    assert cohort.privacy.worst == 0


def test_clipped_and_noisy_losses_that_stay_do_not_say_that_nothing_moves():
    """All records' losses are above the clip, wherever x is."""
    model = sp.Private(linear(), noise=0.1, loss_noise=1e-4, loss_clip=0.1, radius=2.0, secret=1)
    method = sp.ScaffPD(CHI, local_steps=1, steps=sp.Fixed(tau=0.02, sigma=0.1))
    result = sp.train(method, sp.Cohort(clients(), model), rounds=5)
    np.testing.assert_allclose(result.history.losses, 0.1, rtol=4e-4)
    assert np.abs(result.x).max() > 1e-3
    assert result.status is sp.Status.ROUND_LIMIT


class Odd(torch.nn.Module):
    """Looks at a value, which cannot be batched."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2).double()

    def forward(self, rows):
        return self.layer(rows) * (1 if float(rows.sum()) > 0 else 2)


def test_questions_that_are_refused():
    cohort = sp.Cohort(clients(), private())
    at = cohort.gradients(X)
    bare = sp.Cohort(clients(), sp.Private(linear()))
    odd = sp.Cohort(clients(), sp.Private(sp.Module(Odd()), smoothness=1.0))
    ones = torch.ones(5, dtype=torch.float64)
    w = np.full(3, 1 / 3)
    refused = {
        "no-second-derivatives": [
            lambda: at.restriction(ones[:, None], w, ones),
            lambda: at.diagonal(w),
            lambda: cohort.proximal_steps(at, ones, ProximalPlan(1.0, ones)),
        ],
        "private-minibatch": [
            lambda: cohort.gradients(X, 4),
            lambda: cohort.losses(X, 4),
            lambda: cohort.local_updates(X, None, None, LocalPlan(1, 0.1, batch_size=4)),
        ],
        "no-public-smoothness": [lambda: sp.train(sp.FedAvg(), bare, rounds=1)],
        "network-not-per-record": [lambda: odd.gradients(odd.start())],
    }
    for code, asks in refused.items():
        for ask in asks:
            with refuses(code):
                ask()
    sp.train(sp.FedAvg(local_rate=0.1), bare, rounds=1)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"model": 3}, "private-of-other-model"),
        ({"model": sp.Linear("poisson")}, "private-rows-weighted"),
        ({"clip": 0.0}, "number-not-positive"),
        ({"noise": 0.0}, "number-not-positive"),
        ({"noise": 2.0**33}, "noise-too-large"),
        ({"loss_clip": float("inf")}, "number-not-positive"),
        ({"model": network(), "radius": 1.0}, "radius-with-network"),
        ({"secret": "words"}, "secret-too-short"),
        ({"delta": 2.0}, "delta-out-of-range"),
        ({"colluding": -1}, "not-a-count"),
    ],
)
def test_mistakes_are_refused(arguments, code):
    with refuses(code):
        sp.Private(**{"model": linear()} | arguments)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"algorithm": sp.FedAvg(batch_size=3)}, "private-minibatch"),
        ({"epsilon": -1}, "number-not-positive"),
        ({"rounds": 0}, "not-a-count"),
        ({"loss_share": 1.0}, "loss-share-out-of-range"),
    ],
)
def test_mistakes_of_solving_are_refused(arguments, code):
    given = {"model": linear(), "epsilon": 1.0, "algorithm": sp.FedAvg(), "rounds": 3}
    with refuses(code):
        sp.Private.solved(**given | arguments)
