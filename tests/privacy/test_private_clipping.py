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
        return torch.nn.functional.binary_cross_entropy_with_logits(
            z[0], z.new_tensor(float(label))
        )
    return torch.nn.functional.cross_entropy(z[None], torch.tensor([int(label)]))


def naive(name, data, x, clip, loss_clip, taken):
    """Clipped sums by a loop over records."""
    losses = []
    gradients = []
    for i, (X, y) in enumerate(data.values()):
        u = x if x.ndim == 1 else x[i]
        loss = torch.zeros((), dtype=torch.float64)
        gradient = torch.zeros_like(u)
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


def bound(name, data, clip=0.7, loss_clip=0.9, noise=1.0, **more):
    model = network() if name == "network" else linear(LOSSES[name])
    more = more or {"smoothness": 1.0}
    return oracle(
        sp.Private(model, noise=noise, clip=clip, loss_clip=loss_clip, secret=3, **more), data
    )


@pytest.mark.cover(1)
@pytest.mark.parametrize("noise", [0.0, 1.0], ids=["plain", "units"])
@pytest.mark.parametrize("own", [False, True], ids=["one point", "own points"])
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums_are_those_of_a_loop_over_records(name, own, noise):
    """To the last digits where they are plain numbers; a unit off per record and factor where they are counted."""
    data = clients(LOSSES[name])
    made = bound(name, data, noise=noise)
    sums = made.sums
    d = made.dimension
    near = {"rtol": 1e-11, "atol": 1e-12 if noise == 0 else 14 * 2.0**-18}
    torch.manual_seed(1)
    x = torch.randn((3, d) if own else d, dtype=torch.float64)
    taken = [torch.rand(len(y)) < 0.6 for _, y in data.values()]
    everyone = [torch.ones(len(y), dtype=torch.bool) for _, y in data.values()]
    for drawn, inside in ((None, everyone), (torch.cat(taken), taken)):
        losses, gradients = naive(name, data, x, 0.7, 0.9, inside)
        torch.testing.assert_close(sums.gradients(x, drawn) * made.clips[0].unit, gradients, **near)
        if not own:
            torch.testing.assert_close(sums.losses(x, drawn) * made.clips[1].unit, losses, **near)


@pytest.mark.parametrize("name", MODELS)
def test_some_clients_have_the_sums_they_have_among_all(name):
    data = clients(LOSSES[name])
    sums = bound(name, data).sums
    d = bound(name, data).dimension
    x = torch.linspace(-1, 1, d, dtype=torch.float64)
    torch.testing.assert_close(
        sums.only([2, 0]).gradients(x, None), sums.gradients(x, None)[[2, 0]]
    )
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
    """In whole numbers, with no room for rounding: floating point has no part in the sensitivity."""
    made = bound(name, {"a": (X, labels)}, clip, clip)
    x = scale * torch.linspace(-1, 1, made.dimension, dtype=torch.float64)
    others = torch.arange(6) != gone
    f = made.clips[0].bits
    for ask in (made.sums.gradients, made.sums.losses):
        moved = (ask(x, None) - ask(x, others)).flatten().tolist()
        assert all(part == int(part) for part in moved)
        assert sum(int(part) ** 2 for part in moved) <= 4**f


def test_sums_are_whole_numbers_whatever_the_order_of_the_records():
    """A permutation of the records changes nothing, not even a last digit."""
    data = clients("softmax")
    x = torch.linspace(-1, 1, 15, dtype=torch.float64)
    order = {name: (X[::-1].copy(), y[::-1].copy()) for name, (X, y) in data.items()}
    for ask in ("gradients", "losses"):
        one, other = (getattr(bound("softmax", rows).sums, ask)(x, None) for rows in (data, order))
        assert torch.equal(one, one.trunc())
        assert torch.equal(one, other)


def test_a_sample_of_a_network_is_computed_in_the_same_company():
    """The records that are drawn have the same parts, to the last digit, whoever else is drawn."""
    data = clients("softmax", sizes=(9,))
    sums = bound("network", data).sums
    x = torch.linspace(-1, 1, bound("network", data).dimension, dtype=torch.float64)
    each = torch.cat([sums.gradients(x, torch.arange(9) == j) for j in range(9)])
    some = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool)
    assert torch.equal(sums.gradients(x, some)[0], each[some].sum(0))


@pytest.mark.parametrize(
    ("noise", "samples", "bits"), [(1.0, 100, 40), (900.0, 100, 39), (0.5, 2**20, 32)]
)
def test_units_leave_room_for_sums_and_noise(noise, samples, bits):
    from scaffpd.privacy.mechanism import Clip
    from scaffpd.privacy.noise import LARGEST_SIGMA

    clip = Clip.of(3.0, noise, samples)
    assert clip.bits == bits
    assert samples * 2**bits <= 2**52
    assert noise * 2**bits < clip.sigma(noise) <= LARGEST_SIGMA
    assert Clip.of(3.0, 0.0, samples).unit == 1.0


def test_a_record_without_a_finite_gradient_is_bounded_as_well():
    for name in MODELS:
        made = bound(name, clients(LOSSES[name]))
        x = torch.full((made.dimension,), 1e308, dtype=torch.float64)
        most = torch.tensor([9.0, 5.0, 14.0], dtype=torch.float64) * 2.0 ** made.clips[0].bits
        assert bool((made.sums.gradients(x, None).norm(dim=1) <= most).all())
        assert bool((made.sums.losses(x, None) <= most).all())


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
            made = bound(loss, data, clip, noise=0.0, radius=1.5)
            x = 5 * torch.linspace(-1, 1, made.dimension, dtype=torch.float64)
            found.append(made.sums.gradients(x, None))
        assert torch.equal(*found)
