"""`Module`: autograd on any network; with a single linear layer it must be `Linear`, to
rounding."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import scaffpd as sp
from naive import relative, unequal_clients

TWINS = {
    "squared": ("squared", "squared", 1),
    "squared, 3 outputs": ("squared", "squared", 3),
    "logistic": ("logistic", "logistic", 1),
    "cross_entropy": ("softmax", "cross_entropy", 4),
    "softmax": ("softmax", "softmax", 2),
}


def as_module(x, outputs, features=6):
    """The vector of a linear model with intercept, (features + 1) × outputs, as that of an
    `nn.Linear`."""
    table = np.asarray(x).reshape(features + 1, outputs)
    return np.concatenate([table[:features].T.ravel(), table[features]])


def twins(case, l2=0.05, dtype=torch.float64):
    """The same problem as `Linear` and as `Module`, and a point x of the first."""
    loss, name, outputs = TWINS[case]
    data = unequal_clients(loss, outputs)
    classes = outputs if loss == "softmax" else None
    linear = sp.Cohort(data, sp.Linear(loss, l2=l2, intercept=True, classes=classes), dtype=dtype)
    network = sp.Cohort(data, sp.Module(nn.Linear(6, outputs), loss=name, l2=l2), dtype=dtype)
    x = np.random.default_rng(2).standard_normal(linear.dimension)
    return linear, network, x, outputs


@pytest.mark.parametrize("case", TWINS)
def test_a_linear_layer_is_a_linear_model(case):
    linear, network, x, outputs = twins(case)
    n = len(linear.names)
    y = torch.tensor(as_module(x, outputs))
    a = linear.gradients(torch.tensor(x))
    b = network.gradients(y)
    weights = np.linspace(-1, 2, n)
    np.testing.assert_allclose(b.losses, a.losses, rtol=1e-12)
    assert relative(b.sum(weights), as_module(a.sum(weights), outputs)) < 1e-12
    np.testing.assert_allclose(b.norms(), a.norms(), rtol=1e-11)
    scores = linear.evaluate(x), network.evaluate(y)
    np.testing.assert_allclose(scores[1].loss, scores[0].loss, rtol=1e-12)
    np.testing.assert_array_equal(scores[1].score, scores[0].score)
    few = linear.gradients(torch.tensor(x), 3, (9, 9)), network.gradients(y, 3, (9, 9))
    np.testing.assert_allclose(few[1].losses, few[0].losses, rtol=1e-12)
    counts = scores[0].counts
    all_of_it = network.gradients(y, 9).losses[counts <= 9]
    np.testing.assert_allclose(all_of_it, b.losses[counts <= 9], rtol=1e-14)


def test_curvature_at_the_start_is_found():
    """Squared loss has one Hessian everywhere, so the estimate can be held against the truth."""
    linear, network, _, _ = twins("squared")
    exact = linear.constants()
    estimate = network.constants()
    assert not estimate.convex
    assert np.array_equal(estimate.strong_convexity, np.zeros(len(exact.smoothness)))
    assert np.all(estimate.smoothness >= 0.95 * exact.smoothness)
    assert np.all(estimate.smoothness <= 1.05 * exact.smoothness)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_one_output_may_come_without_its_axis(loss):
    class Flat(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, X):
            return self.layer(X).squeeze(-1)

    data = unequal_clients(loss)
    layer = nn.Linear(6, 1).double()
    column = sp.Cohort(data, sp.Module(layer, loss))
    flat = sp.Cohort(data, sp.Module(Flat(layer), loss))
    x = column.start()
    np.testing.assert_allclose(flat.gradients(x).losses, column.gradients(x).losses, rtol=1e-13)
    np.testing.assert_array_equal(flat.evaluate(x).score, column.evaluate(x).score)


def test_frozen_and_shared_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight
            self.head = nn.Linear(6, 1)
            for p in self.head.parameters():
                p.requires_grad_(False)

        def forward(self, X):
            return self.head(torch.tanh(self.second(torch.tanh(self.first(X)))))

    network = Tied().double()
    cohort = sp.Cohort(unequal_clients("squared"), sp.Module(network, "squared"))
    assert cohort.dimension == 36 + 6 + 6
    at = cohort.gradients(cohort.start())
    step = 1e-6
    v = torch.randn(48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    up, down = (cohort.gradients(cohort.start() + s * step * v).losses for s in (1, -1))
    np.testing.assert_allclose(at.each() @ v, (up - down) / (2 * step), rtol=1e-6, atol=1e-8)


def test_the_users_network_is_left_alone():
    network = nn.Linear(6, 1)
    before = copy.deepcopy(network.state_dict())
    data = unequal_clients("squared")
    features = [X.copy() for X, _ in data.values()]
    cohort = sp.Cohort(data, sp.Module(network, "squared"), dtype=torch.float64)
    sp.train(sp.ScaffPD(sp.Agnostic(), local_steps=3), cohort, rounds=3)
    with torch.no_grad():
        network.weight += 1
    assert torch.equal(cohort.start()[:6], before["weight"].double().flatten())
    assert all(p.dtype == torch.float32 and p.grad is None for p in network.parameters())
    assert all(np.array_equal(X, old) for (X, _), old in zip(data.values(), features, strict=True))
    start = cohort.gradients(cohort.start()).losses
    next(iter(data.values()))[0][:] = 7  # the cohort has a copy of the data, too
    assert np.array_equal(cohort.gradients(cohort.start()).losses, start)


def test_embeddings_get_their_whole_numbers():
    network = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 2))
    random = np.random.default_rng(0)
    data = [(random.integers(0, 5, (6, 4)), random.integers(0, 2, 6)) for _ in range(2)]
    cohort = sp.Cohort(data, sp.Module(network))
    assert np.all(np.isfinite(cohort.gradients(cohort.start()).losses))


def test_the_users_own_loss():
    def huber(outputs, targets):
        return nn.functional.huber_loss(outputs.flatten(), targets)

    data = unequal_clients("squared")
    cohort = sp.Cohort(data, sp.Module(nn.Linear(6, 1), huber), dtype=torch.float64)
    W = cohort.start().numpy()
    expected = []
    for X, y in data.values():
        r = X @ W[:6] + W[6] - y
        expected.append(np.mean(np.where(np.abs(r) < 1, r**2 / 2, np.abs(r) - 0.5)))
    scores = cohort.evaluate(W)
    np.testing.assert_allclose(scores.loss, expected, rtol=1e-12)
    assert np.all(np.isnan(scores.score))
    assert "huber" in repr(cohort.model)
    assert "0x" not in repr(cohort.model)


def test_a_network_is_a_model_as_it_is():
    """What docs/index.md says: any torch.nn.Module in place of sp.Linear."""
    random = np.random.default_rng(0)
    clients = [(random.normal(size=(20, 4)), random.integers(0, 3, 20)) for _ in range(2)]
    network = torch.nn.Sequential(torch.nn.Linear(4, 3))
    answers = [
        sp.train(sp.FedAvg(local_rate=0.1), sp.Cohort(clients, model), 2).x
        for model in (network, sp.Module(network))
    ]
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize("model", [sp.Linear(), sp.Module(nn.Linear(3, 1).double(), "squared")])
def test_bytes_in_any_order_are_the_same_numbers(model):
    X = np.arange(12.0).reshape(4, 3)
    losses = []
    for kind in ("<f8", ">f8"):
        cohort = sp.Cohort([(X.astype(kind), np.arange(4.0).astype(kind))], model)
        losses.append(cohort.losses(cohort.start() + 1))
    np.testing.assert_array_equal(*losses)
