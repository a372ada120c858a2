"""Clipped sums: against a loop over records by autograd, and that no record moves them by more than the clip."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from private_cases import clients, linear, network, oracle
from torch.func import functional_call

import scaffpd as sp

MODELS = ["squared", "logistic", "softmax", "network"]
LOSSES = {"squared": "squared", "logistic": "logistic", "softmax": "softmax", "network": "softmax"}


def value(name, x, a, label):
    """ℓ of one record, from its definition."""
    if name == "network":
        model = network().module
        shapes = {k: p.shape for k, p in model.named_parameters()}
        parts = torch.split(x, [s.numel() for s in shapes.values()])
        parameters = {k: part.view(s) for (k, s), part in zip(shapes.items(), parts, strict=True)}
        z = functional_call(model, parameters, (a[None],))[0]
    else:
        z = torch.cat([a, a.new_ones(1)]) @ x.view(5, -1)
    if name == "squared":
        return (z - float(label)).square().sum()
    if name == "logistic":
        return torch.nn.functional.binary_cross_entropy_with_logits(z[0], z.new_tensor(float(label)))
    return torch.nn.functional.cross_entropy(z[None], torch.tensor([int(label)]))


def naive(name, data, x, clip, loss_clip, taken):
    """Clipped sums by a loop over records."""
    losses, gradients = [], []
    for i, (X, y) in enumerate(data.values()):
        u = x if x.ndim == 1 else x[i]
        loss, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(u)
        for a, label, inside in zip(torch.as_tensor(X), y, taken[i], strict=True):
            leaf = u.clone().requires_grad_()
            one = value(name, leaf, a, label)
            g = torch.autograd.grad(one, leaf)[0]
            if inside:
                loss += one.detach().clamp(0, loss_clip)
                gradient += g * min(1.0, clip / float(g.norm()))
        losses.append(loss)
        gradients.append(gradient)
    return torch.stack(losses), torch.stack(gradients)


def bound(name, data, clip=0.7, loss_clip=0.9, **more):
    model = network() if name == "network" else linear(LOSSES[name])
    more = more or {"smoothness": 1.0}
    return oracle(sp.Private(model, noise=1.0, clip=clip, loss_clip=loss_clip, secret=3, **more), data)


@pytest.mark.cover(1)
@pytest.mark.parametrize("own", [False, True], ids=["one point", "own points"])
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_are_those_of_a_loop_over_records(name, own):
    data = clients(LOSSES[name])
    sums, d = bound(name, data).sums, bound(name, data).dimension
    torch.manual_seed(1)
    x = torch.randn((3, d) if own else d, dtype=torch.float64)
    taken = [torch.rand(len(y)) < 0.6 for _, y in data.values()]
    everyone = [torch.ones(len(y), dtype=torch.bool) for _, y in data.values()]
    for drawn, inside in ((None, everyone), (torch.cat(taken), taken)):
        losses, gradients = naive(name, data, x, 0.7, 0.9, inside)
        torch.testing.assert_close(sums.gradients(x, drawn), gradients, rtol=1e-11, atol=1e-12)
        if not own:
            torch.testing.assert_close(sums.losses(x, drawn), losses, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_some_clients_have_the_sums_they_have_among_all(name):
    data = clients(LOSSES[name])
    sums, d = bound(name, data).sums, bound(name, data).dimension
    x = torch.linspace(-1, 1, d, dtype=torch.float64)
    torch.testing.assert_close(sums.only([2, 0]).gradients(x, None), sums.gradients(x, None)[[2, 0]])
    torch.testing.assert_close(sums.only([2, 0]).losses(x, None), sums.losses(x, None)[[2, 0]])


def test_a_client_of_whom_nothing_is_drawn_has_zero_sums():
    for name in MODELS:
        made = bound(name, clients(LOSSES[name]))
        nobody = torch.zeros(28, dtype=torch.bool)
        x = torch.ones(made.dimension, dtype=torch.float64)
        assert not made.sums.gradients(x, nobody).any()
        assert not made.sums.losses(x, nobody).any()


finite = st.floats(-1e3, 1e3, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["squared", "logistic", "softmax"]),
    X=arrays(np.float64, (6, 4), elements=finite),
    labels=arrays(np.int64, 6, elements=st.integers(0, 1)),
    scale=st.floats(0.01, 100),
    clip=st.floats(0.01, 10),
    gone=st.integers(0, 5),
)
def test_one_record_moves_no_sum_by_more_than_the_clip(name, X, labels, scale, clip, gone):
    kept = np.arange(6) != gone
    x = None
    found = []
    for rows in (np.arange(6), np.flatnonzero(kept)):
        made = bound(name, {"a": (X[rows], labels[rows])}, clip, clip)
        x = scale * torch.linspace(-1, 1, made.dimension, dtype=torch.float64)
        found.append((made.sums.losses(x, None), made.sums.gradients(x, None)))
    (loss, gradient), (other_loss, other_gradient) = found
    assert float((gradient - other_gradient).norm()) <= clip * (1 + 1e-9)
    assert abs(float(loss - other_loss)) <= clip * (1 + 1e-9)


def test_a_record_without_a_finite_gradient_is_bounded_as_well():
    for name in MODELS:
        made = bound(name, clients(LOSSES[name]))
        x = torch.full((made.dimension,), 1e308, dtype=torch.float64)
        gradient, loss = made.sums.gradients(x, None), made.sums.losses(x, None)
        assert bool(
            (gradient.norm(dim=1) <= 0.7 * torch.tensor([9.0, 5.0, 14.0], dtype=torch.float64) * (1 + 1e-9)).all()
        )
        assert bool((loss <= 0.9 * torch.tensor([9.0, 5.0, 14.0], dtype=torch.float64) * (1 + 1e-9)).all())


def test_rows_longer_than_the_radius_are_scaled_to_it():
    data = clients("softmax")
    made = bound("softmax", data, radius=1.5)
    A = np.concatenate([np.hstack([X, np.ones((len(X), 1))]) for X, _ in data.values()])
    lengths = np.linalg.norm(A, axis=1)
    expected = A * np.minimum(1, 1.5 / lengths)[:, None]
    np.testing.assert_allclose(made.sums.rows.A.numpy(), expected, rtol=1e-14)
    assert (lengths > 1.5).any()
    known = made.constants()
    np.testing.assert_allclose(known.smoothness, 0.5 * 1.5**2 + 0.02)


def test_no_gradient_needs_clipping_at_the_lengths_that_the_radius_promises():
    for loss, length in (("logistic", 1.0), ("softmax", 2**0.5)):
        data = clients(loss)
        x = None
        found = []
        for clip in (1.5 * length, 1e9):
            made = bound(loss, data, clip, radius=1.5)
            x = 5 * torch.linspace(-1, 1, made.dimension, dtype=torch.float64)
            found.append(made.sums.gradients(x, None))
        assert torch.equal(*found)
