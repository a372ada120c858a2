"""Clients of a network side by side: the numbers of one after the other, whoever is computed beside
whom."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import scaffpd as sp
from cases.refusals import refuses
from experiments.central import Extragradient, GradientDescentAscent
from scaffpd.federation import LocalPlan
from scaffpd.models import network_oracle
from scaffpd.models.network import SeededDropout

SIZES = (9, 14, 20, 7, 14)
STEPS = 3  # local ones, from which a momentum and its correction are known
NEAR = {"rtol": 1e-9, "atol": 1e-11}


def pictures(seed=0, dtype=np.float64, channels=1):
    random = np.random.default_rng(seed)
    return [
        (random.standard_normal((m, channels, 6, 6)).astype(dtype), random.integers(0, 3, m))
        for m in SIZES
    ]


def network(kind="plain", dtype=torch.float64):
    torch.manual_seed(1)
    head = [nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    layers = {
        "plain": [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)],
        "dropout": [nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3), *head[:2], nn.Dropout(0.5), head[2]],
        "batch norm": [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4).eval(), *head],
        "group norm": [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), *head],
    }
    return nn.Sequential(*layers[kind]).to(dtype)


def oracle(net, data=None, **options):
    return sp.Cohort(pictures() if data is None else data, sp.Module(net, **options))._oracle


def steps(oracle, batch_size, steps=STEPS, **more):
    plan = LocalPlan(steps, 0.05, batch_size=batch_size, key=(3, 1), **more)
    return oracle.local_updates(oracle.start(), None, None, plan).each()


def mean_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.cover(2)
@pytest.mark.parametrize("kind", ["plain", "dropout", "batch norm", "group norm"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "clip": 0.5}], ids=["sgd", "momentum"])
@pytest.mark.parametrize("batch_size", [4, 10, None])
@pytest.mark.parametrize("loss", ["cross_entropy", mean_loss])
def test_side_by_side_is_one_after_the_other(kind, options, batch_size, loss, monkeypatch):
    found = oracle(network(kind), loss=loss, l2=0.01, **options)
    beside = steps(found, batch_size)
    at = found.evaluate(found.start())
    scores = found.scores(found.start())
    assert found.function.together
    some = steps(found.only([3, 1]), batch_size)
    np.testing.assert_allclose(some, beside[[3, 1]], **NEAR)
    monkeypatch.setitem(network_oracle.TOGETHER, "cpu", 1)  # every client a group of its own
    monkeypatch.setattr(network_oracle, "CHUNK", 4)  # rows of a named loss in pieces
    np.testing.assert_allclose(steps(found, batch_size), beside, **NEAR)
    pieces = found.evaluate(found.start())
    np.testing.assert_allclose(pieces.losses, at.losses, rtol=1e-12)
    np.testing.assert_allclose(pieces.each(), at.each(), **NEAR)
    np.testing.assert_allclose(found.scores(found.start()), scores, rtol=1e-12)
    np.testing.assert_allclose(found.losses(found.start()), at.losses, rtol=1e-12)


def test_threads_do_not_share_a_network():
    """A pass exchanges a module's parameters for a while, so that threads need copies of their
    own."""
    found = oracle(network("dropout"), pictures() * 3)
    alone = steps(found, 4, 10)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for _ in range(3):
            beside = steps(found, 4, 10)
            assert not beside.requires_grad
            np.testing.assert_allclose(beside, alone, **NEAR)
    finally:
        torch.set_num_threads(before)
    assert len(found.function.copies) > 1


@pytest.mark.parametrize(
    ("options", "momentum"), [({"l2": 0.1}, 0.0), ({"momentum": 0.8, "clip": 0.3}, 0.8)]
)
def test_local_steps_are_those_of_pytorch(options, momentum):
    data = pictures()
    found = oracle(network(), **options)
    ours = found.start() - steps(found, 4)
    for i, (X, y) in enumerate(data):
        draws = network_oracle.Draws((3, 1), [found.names[i]])
        own = network()
        decay = options.get("l2", 0.0)
        rate = 0.05 * (1 - momentum)
        stepper = torch.optim.SGD(own.parameters(), rate, momentum, weight_decay=decay)
        for _ in range(STEPS):
            rows = (draws.uniform(4)[0] * len(X)).long().numpy()
            stepper.zero_grad()
            mean_loss(own(torch.tensor(X[rows])), torch.tensor(y[rows])).backward()
            if "clip" in options:
                nn.utils.clip_grad_norm_(own.parameters(), options["clip"])
            stepper.step()
        theirs = torch.cat([p.detach().flatten() for p in own.parameters()])
        # PyTorch adds 1e-6 to the norm that it clips
        near = {"rtol": 1e-5, "atol": 1e-7} if "clip" in options else NEAR
        np.testing.assert_allclose(ours[i], theirs, **near)


def test_dropout_is_off_in_losses_and_new_in_every_round_and_layer():
    cohort = sp.Cohort(pictures(), sp.Module(network("dropout")))
    x = cohort.start()
    still = sp.Cohort(pictures(), sp.Module(network("dropout").eval()))
    np.testing.assert_array_equal(cohort.evaluate(x).loss, still.evaluate(x).loss)
    first, second = (
        cohort._oracle.local_updates(x, None, None, LocalPlan(1, 0.1, key=(r, 0))).each()
        for r in (1, 2)
    )
    off = still._oracle.local_updates(x, None, None, LocalPlan(1, 0.1, key=(1, 0))).each()
    assert float((first - second).abs().max()) > 1e-4
    assert float((first - off).abs().max()) > 1e-4
    layer = SeededDropout(0.3, whole=False, layer=2)
    out = layer(torch.ones(100, 200))
    # of 20,000 draws with p = 0.3 the share is off by more than 5 standard errors once in 10⁶
    assert float((out == 0).double().mean()) == pytest.approx(0.3, abs=5 * 0.0033)
    assert float(out.max()) == pytest.approx(1 / 0.7)
    assert torch.equal(out, layer(torch.ones(100, 200)))
    assert not torch.equal(out, SeededDropout(0.3, False, 3)(torch.ones(100, 200)))
    whole = SeededDropout(0.5, whole=True, layer=0)(torch.ones(20, 30, 2, 2)).flatten(2)
    assert torch.equal(whole.amax(2), whole.amin(2))


class Branching(nn.Module):
    """Looks at a value, which cannot be batched."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 3).double()

    def forward(self, X):
        out = self.layer(X.flatten(1))
        return out if float(out.detach().sum()) < 1e9 else -out


def test_what_does_not_batch_goes_one_after_the_other(caplog):
    with caplog.at_level(logging.INFO, logger="scaffpd"):
        found = oracle(Branching())
        separate = steps(found, 4)
    assert not found.function.together
    assert "one after the other" in caplog.text
    same = nn.Sequential(nn.Flatten(), nn.Linear(36, 3).double())
    same[1].load_state_dict(found.network.layer.state_dict())
    np.testing.assert_allclose(separate, steps(oracle(same), 4), **NEAR)


def test_bytes_stay_bytes_until_the_network_scales_them():
    class Scaled(nn.Sequential):
        def forward(self, X):
            return super().forward(X.float() / 255)

    random = np.random.default_rng(0)
    raw = [(random.integers(0, 256, X.shape).astype(np.uint8), y) for X, y in pictures()]
    net = network("plain", torch.float32)
    found = oracle(Scaled(*net), raw)
    assert found.rows.X.dtype == torch.uint8
    scaled = oracle(net, [((X / np.float32(255)).astype(np.float32), y) for X, y in raw])
    np.testing.assert_allclose(steps(found, 4), steps(scaled, 4), rtol=1e-3, atol=1e-6)


def test_half_precision_is_near():
    net = network("plain", torch.float32)
    data = pictures(dtype=np.float32)
    exact, half = (steps(oracle(net, data, precision=p), 4) for p in (None, "bf16"))
    # bf16 rounds every product to 2⁻⁸ of it
    assert 0 < float((exact - half).norm() / exact.norm()) < 0.05


# --- with the methods


def zoo():
    """Every method of gradients, as short as it can be."""
    fair = sp.ChiSquare(0.1)
    short = {"local_steps": 3, "batch_size": 4}
    plain = [sp.FedAvg, sp.FedProx, sp.DeltaFL, sp.QFFL, sp.Scaffold, sp.ProxSkip, sp.AFL, sp.DRFA]
    return [
        *(kind(**short) for kind in plain),
        sp.ScaffPD(fair, local_steps=1),
        sp.ScaffPD(fair, **short),
        sp.ScaffPD(sp.Average(), local_steps=3),
        sp.fair(fair, **short),
        GradientDescentAscent(fair),
        Extragradient(fair),
    ]


@pytest.mark.parametrize("method", zoo(), ids=lambda m: type(m).__name__)
def test_every_method_of_gradients_trains_a_network(method):
    cohort = sp.Cohort(pictures(), sp.Module(network()), test=pictures(1))
    result = sp.train(method, cohort, rounds=2)
    losses = result.history.losses
    assert np.isfinite(result.x).all()
    assert losses[-1].mean() < losses[0].mean()
    assert result.certificate == np.inf
    assert np.isfinite(cohort.evaluate(result.x, "test").score).all()


def test_questions_about_curvature_are_refused():
    cohort = sp.Cohort(pictures(), sp.Module(network()))
    with refuses("no-second-derivatives"):
        sp.train(sp.SubspaceSaddle(sp.Agnostic()), cohort, rounds=1)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: sp.Module(nn.Linear(2, 2), momentum=1.0), "momentum-out-of-range"),
        (lambda: sp.Module(nn.Linear(2, 2), clip=0.0), "number-not-positive"),
        (lambda: sp.Module(nn.Linear(2, 2), precision="int8"), "unknown-name"),
        (lambda: sp.Module(network("batch norm").train()), "layer-with-statistics"),
        (lambda: sp.Module(nn.Linear(2, 2)).network(np.zeros(5)), "point-length"),
    ],
)
def test_mistakes_are_refused(make, code):
    with refuses(code):
        make()
