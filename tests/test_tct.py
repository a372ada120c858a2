"""Train, convexify, train: the convex problem is the network made linear, and its optimum is certified."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import scaffpd as sp
from scaffpd.convexify import representation
from scaffpd.models.quadratic import QuadraticOracle


def network(hidden=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def clients(n=4, m=30, seed=0):
    """Three classes that no linear model of the inputs separates, in other proportions everywhere."""
    random = np.random.default_rng(seed)
    pairs = []
    for i in range(n):
        X = random.normal(size=(m + 10 * i, 5))
        radius = np.linalg.norm(X[:, :3], axis=1) + 0.3 * i
        pairs.append((X, np.digitize(radius, [1.5, 2.0])))
    return pairs


FAST = {"network_rounds": 5, "progress": False, "coordinates": 10_000}


def test_the_three_stages():
    silos = clients()
    test = clients(seed=1)
    found = sp.tct(network(), silos, "2", test=test, tol=1e-6, rounds=300, l2=1e-2, **FAST)
    assert found.trained is not None
    assert found.trained.rounds == 5
    assert found.trained.history.losses[-1].mean() < found.trained.history.losses[0].mean()
    assert found.result.status == "converged"
    assert found.result.certificate <= 1e-6
    scores = found.cohort.evaluate(found.result.x, "test")
    for (X, y), accuracy in zip(test, scores.accuracy, strict=True):
        assert np.mean(found.predict(X) == y) == pytest.approx(accuracy)
    assert scores.accuracy.mean() > 0.6


def test_features_are_gradients_of_the_trained_network():
    """Against autograd, sample by sample, on all coordinates; standardised by all clients' rows."""
    net = network()
    silos = clients()
    represent = representation(net, [X for X, _ in silos], "2", coordinates=10_000)
    w = represent.entk.w
    body = net[:2]
    rows = []
    for x in torch.from_numpy(np.concatenate([X for X, _ in silos])).float():
        h = body(x[None])[0]
        gradients = torch.autograd.grad(h @ w, list(body.parameters()))
        rows.append(torch.cat([*(g.flatten() for g in gradients), h.detach()]))
    raw = torch.stack(rows).double().numpy()
    deviation = raw.std(0)
    expected = (raw - raw.mean(0)) / np.where(deviation > 0, deviation, 1)
    ours = np.concatenate([represent(X) for X, _ in silos])
    np.testing.assert_allclose(ours, expected, atol=2e-4)
    np.testing.assert_allclose(ours.mean(0), 0, atol=1e-5)


def test_another_chunk_gives_the_same_rows():
    net = network()
    silos = clients()
    one, other = (
        representation(net, [X for X, _ in silos], "2", 20, chunk=chunk)(silos[0][0])
        for chunk in (1, 64)
    )
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_network_that_is_trained_already():
    net = network()
    before = [p.detach().clone() for p in net.parameters()]
    found = sp.tct(net, clients(), "2", **FAST | {"network_rounds": 0})
    assert found.trained is None
    assert found.network is net
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_any_method_and_objective():
    options = FAST | {"network_rounds": 0}
    ours = sp.tct(
        network(), clients(), "2", method=sp.fair(sp.Agnostic()), tol=1e-6, l2=1e-2, **options
    )
    theirs = sp.tct(
        network(), clients(), "2", method=sp.FedAvg(local_steps=5), rounds=10, l2=1e-2, **options
    )
    assert ours.result.status == "converged"
    worst = [found.cohort.evaluate(found.result.x).loss.max() for found in (ours, theirs)]
    assert worst[0] < worst[1]


def test_many_coordinates_take_a_single_copy():
    found = sp.tct(network(60), clients(), "2", rounds=2, **FAST | {"network_rounds": 0})
    assert isinstance(found.cohort._oracle, QuadraticOracle)


def test_names_and_labels():
    named = dict(zip("abcd", clients(), strict=True))
    test = {name: named[name] for name in "dcba"}
    found = sp.tct(
        network(), named, "2", test=test, rounds=2, classes=3, **FAST | {"network_rounds": 0}
    )
    assert found.cohort.names == tuple("abcd")
    assert found.cohort.evaluate(found.result.x, "test").counts.tolist() == [30, 40, 50, 60]


def test_the_network_of_x():
    model = sp.Module(network())
    x = np.arange(57.0)
    flat = torch.cat([p.detach().flatten() for p in model.network(x).parameters()])
    np.testing.assert_array_equal(flat.numpy(), x)
    with pytest.raises(sp.InputError, match="x has shape"):
        model.network(x[1:])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"head": "fc"}, "Unknown head 'fc'"),
        ({"module": "resnet"}, "torch.nn.Module"),
        ({"test": {"x": clients()[0]}}, "test data cannot be used"),
        ({"network_rounds": -1}, "network_rounds >= 1"),
        ({"classes": 0}, "classes >= 1"),
        ({"classes": 1}, "classes >= 2"),
        ({"chunk": -3}, "chunk >= 1"),
    ],
)
def test_refusals(change, sentence, monkeypatch):
    """Before any work."""
    monkeypatch.setattr(
        "scaffpd.convexify.train", lambda *_, **__: pytest.fail("it should not have come to this")
    )
    options = {
        "module": network(),
        "clients": clients(),
        "head": "2",
        "network_rounds": 1,
        "rounds": 1,
    } | change
    with pytest.raises(sp.InputError, match=sentence):
        sp.tct(**options)


def test_samples_that_the_network_does_not_take():
    found = sp.tct(network(), clients(), "2", rounds=1, **FAST | {"network_rounds": 0})
    assert found.predict(np.zeros((0, 5))).shape == (0,)
    for shape in ((3, 4), (5,)):
        with pytest.raises(
            sp.InputError, match=r"An array of shape \(n, 5\) is expected, n samples, got one of"
        ):
            found.predict(np.zeros(shape))
