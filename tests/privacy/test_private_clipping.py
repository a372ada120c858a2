"""Clipped sums: against a loop over records by autograd, and that no record moves them by more than
the clip."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.func import functional_call

import scaffpd as sp
from cases.private import SIZES, clients, linear, network, oracle
from scaffpd.privacy.mechanism import Clip
from scaffpd.privacy.noise import LARGEST_SIGMA

LOSSES = {"squared": "squared", "logistic": "logistic", "softmax": "softmax", "network": "softmax"}


def value(name, x, a, label):
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
        target = z.new_tensor(float(label))
        return torch.nn.functional.binary_cross_entropy_with_logits(z[0], target)
    return torch.nn.functional.cross_entropy(z[None], torch.tensor([int(label)]))


def naive(name, data, x, clip, loss_clip):
    losses = []
    gradients = []
    for i, (X, y) in enumerate(data.values()):
        u = x if x.ndim == 1 else x[i]
        loss = torch.zeros((), dtype=torch.float64)
        gradient = torch.zeros_like(u)
        for a, label in zip(torch.as_tensor(X), y, strict=True):
            leaf = u.clone().requires_grad_()
            one = value(name, leaf, a, label)
            g = torch.autograd.grad(one, leaf)[0]
            loss += one.detach().clamp(0, loss_clip)
            gradient += g * min(1.0, clip / float(g.norm()))
        losses.append(loss)
        gradients.append(gradient)
    return torch.stack(losses), torch.stack(gradients)


def bound(name, data, clip=0.7, loss_clip=0.9, **more):
    model = network() if name == "network" else linear(LOSSES[name])
    more = more or {"smoothness": 1.0}
    return oracle(sp.Private(model, clip=clip, loss_clip=loss_clip, secret=3, **more), data)


@pytest.mark.cover(1)
@pytest.mark.parametrize("own", [False, True], ids=["one point", "own points"])
@pytest.mark.parametrize("name", LOSSES)
def test_clipped_sums_are_those_of_a_loop_over_records(name, own):
    data = clients(LOSSES[name])
    made = bound(name, data)
    torch.manual_seed(1)
    x = torch.randn((3, made.dimension) if own else made.dimension, dtype=torch.float64)
    losses, gradients = naive(name, data, x, 0.7, 0.9)
    # a unit off per record and factor: 14 records, and factors of 20 binary digits each
    near = {"rtol": 1e-11, "atol": 14 * 2.0**-18}
    torch.testing.assert_close(made.sums.gradients(x) * made.clips[0].unit, gradients, **near)
    if not own:
        torch.testing.assert_close(made.sums.losses(x) * made.clips[1].unit, losses, **near)
        some = made.sums.only([2, 0])
        assert torch.equal(some.gradients(x), made.sums.gradients(x)[[2, 0]])
        assert torch.equal(some.losses(x), made.sums.losses(x)[[2, 0]])


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
    """In whole numbers, with no room for rounding, and in whatever order the records are."""
    others = np.flatnonzero(np.arange(6) != gone)[::-1].copy()
    whole = bound(name, {"a": (X, labels)}, clip, clip)
    less = bound(name, {"a": (X[others], labels[others])}, clip, clip)
    x = scale * torch.linspace(-1, 1, whole.dimension, dtype=torch.float64)
    for ask in ("gradients", "losses"):
        with_it, without = (getattr(made.sums, ask)(x).flatten() for made in (whole, less))
        moved = (with_it - without).tolist()
        assert all(part == int(part) for part in moved)
        assert sum(int(part) ** 2 for part in moved) <= 4 ** whole.clips[0].bits


@pytest.mark.parametrize("name", LOSSES)
def test_a_record_without_a_finite_gradient_is_bounded_as_well(name):
    made = bound(name, clients(LOSSES[name]))
    x = torch.full((made.dimension,), 1e308, dtype=torch.float64)
    most = torch.tensor(SIZES, dtype=torch.float64) * 2.0 ** made.clips[0].bits
    assert bool((made.sums.gradients(x).norm(dim=1) <= most).all())
    assert bool((made.sums.losses(x) <= most).all())


@pytest.mark.parametrize(
    ("noise", "samples", "bits"), [(1.0, 100, 40), (900.0, 100, 39), (0.5, 2**20, 32)]
)
def test_units_leave_room_for_sums_and_noise(noise, samples, bits):
    clip = Clip.of(3.0, noise, samples)
    assert clip.bits == bits
    assert samples * 2**bits <= 2**52
    assert noise * 2**bits < clip.sigma(noise) <= LARGEST_SIGMA


@pytest.mark.parametrize(("loss", "length"), [("logistic", 1.0), ("softmax", 2**0.5)])
def test_a_radius_shortens_rows_and_bounds_gradients(loss, length):
    data = clients(loss)
    made = bound(loss, data, radius=1.5)
    A = np.concatenate([np.hstack([X, np.ones((len(X), 1))]) for X, _ in data.values()])
    lengths = np.linalg.norm(A, axis=1)
    expected = A * np.minimum(1, 1.5 / lengths)[:, None]
    np.testing.assert_allclose(made.sums.rows.A.numpy(), expected, rtol=1e-14)
    assert (lengths > 1.5).any()
    curvature = 0.25 if loss == "logistic" else 0.5
    np.testing.assert_allclose(made.constants().smoothness, curvature * 1.5**2 + 0.02)
    x = 5 * torch.linspace(-1, 1, made.dimension, dtype=torch.float64)
    loose = bound(loss, data, 10.0, radius=1.5)
    tight = bound(loss, data, 1.5 * length, radius=1.5)
    found = [o.sums.gradients(x) * o.clips[0].unit for o in (loose, tight)]
    torch.testing.assert_close(*found, rtol=0, atol=14 * 10 * 2.0**-18)
