"""Gradients of single samples, layer by layer, against torch.func and plain automatic differentiation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from feature_cases import (
    CASES,
    FALLBACKS,
    Grouped,
    Shared,
    Tokens,
    efficientnet,
    images,
    mlp,
    restless,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

from scaffpd.errors import InputError
from scaffpd.features import Backbone, EfficientNetLite0, Entk, ResNet18Trunk, layers


def reference(trunk, x, w):
    """All gradients of all samples, (B, total), in the order of named_parameters() and then w."""
    values = {name: p.detach() for name, p in trunk.named_parameters()}

    def score(values, w, image):
        return functional_call(trunk, values, (image[None],))[0] @ w

    found, heads = vmap(grad(score, argnums=(0, 1)), in_dims=(None, None, 0))(values, w, x)
    return torch.cat([g.reshape(len(x), -1) for g in found.values()] + [heads], 1)


@pytest.fixture(params=["picked", "full"])
def way(request, monkeypatch):
    """Every layer by picking, or by one product of matrices."""
    monkeypatch.setattr(layers, "MOVES", 0 if request.param == "picked" else 1e12)
    return request.param


@pytest.mark.parametrize("case", CASES)
def test_all_coordinates_of_known_layers(case, way):
    torch.manual_seed(0)
    make, shape = CASES[case]
    trunk = Backbone.of(restless(make())).trunk.double()
    x = images(5, *shape).double()
    ours = Entk(trunk, x, 10**6)
    assert ours.method == "layers"
    assert ours.coordinates == ours.total
    torch.testing.assert_close(ours(x), reference(trunk, x, ours.w), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("case", FALLBACKS)
def test_other_networks_fall_back_and_are_as_right(case):
    torch.manual_seed(0)
    make, shape = FALLBACKS[case]
    trunk = Backbone.of(make()).trunk
    x = images(5, *shape)
    ours = Entk(trunk, x, 40)
    assert ours.method == "vmap"
    assert ours.why[0].startswith("layers: ")
    torch.testing.assert_close(
        ours(x), reference(trunk, x, ours.w)[:, ours.chosen], rtol=1e-5, atol=1e-6
    )
    loop = Entk(trunk, x, 40, method="loop")
    torch.testing.assert_close(ours(x), loop(x), rtol=1e-5, atol=1e-6)
    assert ours.room > 0


def test_a_network_that_vmap_cannot_take_goes_one_by_one():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(12))

        def forward(self, x):
            x = x.flatten(1)
            return x * self.w if float(x.sum()) > 0 else x * self.w * 2

    x = images(4, 3, 2, 2)
    ours = Entk(Backbone.of(Branches()).trunk, x)
    assert ours.method == "loop"
    assert ours(x).shape == (4, 24)


@pytest.mark.sample(1)
@pytest.mark.cover(1)
@pytest.mark.parametrize("network", ["resnet", "efficientnet"])
def test_the_two_networks(network, way):
    torch.manual_seed(0)
    layout = torch.contiguous_format if way == "picked" else torch.channels_last
    backbone = (
        efficientnet() if network == "efficientnet" else Backbone.of(ResNet18Trunk(), size=32)
    )
    trunk = restless(backbone.trunk).double().to(memory_format=layout)
    x = images(2, 3, 32, 32).double().contiguous(memory_format=layout)
    ours = Entk(trunk, x, 1500, seed=3)
    assert ours.method == "layers"
    expected = reference_of_used(trunk, x, ours)
    torch.testing.assert_close(
        ours(x), expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max())
    )


def reference_of_used(trunk, x, ours):
    return Entk(trunk, x, ours.coordinates, seed=3, method="vmap")(x)


def test_single_precision():
    torch.manual_seed(0)
    trunk = Backbone.of(ResNet18Trunk(), size=32).trunk
    x = images(3, 3, 32, 32)
    ours = Entk(trunk, x, 4000)
    expected = reference(trunk, x, ours.w)[:, ours.chosen]
    assert (ours(x) - expected).norm() <= 1e-5 * expected.norm()


def test_the_classifier_is_no_part_of_it():
    trunk = efficientnet().trunk
    ours = Entk(trunk, images(2, 3, 32, 32), 10)
    assert not [name for name in ours.parameters if "_fc" in name]
    assert (
        ours.total == sum(p.numel() for p in EfficientNetLite0().parameters()) - 1281 * 1000 + 1280
    )


def test_the_head_is_seeded_and_of_unit_size():
    trunk = Backbone.of(ResNet18Trunk(), size=32).trunk
    x = images(2, 3, 32, 32)
    a, b, c = (Entk(trunk, x, 100, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a.w, b.w)
    assert not torch.equal(a.w, c.w)
    assert float(a.w.norm()) == pytest.approx(1, abs=0.2)
    np.testing.assert_array_equal(a.chosen, b.chosen)
    assert (np.diff(a.chosen) > 0).all()
    assert (a.chosen != c.chosen).any()


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 3),
    ins=st.integers(1, 2),
    outs=st.integers(1, 3),
    kernel=st.tuples(*[st.integers(1, 3)] * 2),
    stride=st.tuples(*[st.integers(1, 3)] * 2),
    padding=st.tuples(*[st.integers(0, 2)] * 2),
    dilation=st.tuples(*[st.integers(1, 2)] * 2),
    picked=st.booleans(),
    kept=st.integers(1, 200),
)
def test_any_convolution(groups, ins, outs, kernel, stride, padding, dilation, picked, kept):
    conv = nn.Conv2d(groups * ins, groups * outs, kernel, stride, padding, dilation, groups)
    trunk = Backbone.of(nn.Sequential(conv, nn.Tanh(), nn.Flatten())).trunk.double()
    x = images(2, groups * ins, 7, 8).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "MOVES", 0 if picked else 1e12)
        ours = Entk(trunk, x, kept)
        assert ours.method == "layers"
        found = ours(x)
    torch.testing.assert_close(
        found, reference(trunk, x, ours.w)[:, ours.chosen], rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    "padding", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}]
)
def test_paddings_without_a_rule_fall_back(padding):
    trunk = Backbone.of(nn.Sequential(nn.Conv2d(3, 2, 3, **padding), nn.Flatten())).trunk
    x = images(2, 3, 5, 5)
    ours = Entk(trunk, x, 30)
    assert ours.method == "vmap"
    torch.testing.assert_close(
        ours(x), reference(trunk, x, ours.w)[:, ours.chosen], rtol=1e-5, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a processor without bfloat16
@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("make", "shape"), [(ResNet18Trunk, (3, 16, 16)), (Grouped, (3, 17, 14)), (Tokens, (3, 4, 4))]
)
def test_bfloat16_is_near(make, shape, way):
    torch.manual_seed(0)
    trunk = restless(Backbone.of(make()).trunk)
    x = images(3, *shape)
    exact = Entk(trunk, x, 500)
    rough = Entk(trunk, x, 500, precision="bfloat16")
    gap = (exact(x) - rough(x)).norm() / exact(x).norm()
    assert 1e-5 < gap < 0.1


def test_what_cannot_work():
    x = images(2, 3, 2, 2)
    with pytest.raises(InputError, match="no parameters"):
        Entk(Backbone.of(nn.Flatten()).trunk, x)
    with pytest.raises(InputError, match="cannot take images of shape"):
        Entk(Backbone.of(nn.Linear(5, 2)).trunk, x)
    with pytest.raises(InputError, match=r"must have the shape \(1, dim\)"):
        Entk(Backbone.of(nn.Conv2d(3, 2, 1)).trunk, x)
    with pytest.raises(InputError, match="did you mean 'bfloat16'"):
        Entk(Backbone.of(mlp()).trunk, x, precision="bfloat")
    with pytest.raises(InputError, match="did you mean 'layers'"):
        Entk(Backbone.of(mlp()).trunk, x, method="layer")
    with pytest.raises(InputError, match="coordinates >= 1"):
        Entk(Backbone.of(mlp()).trunk, x, 0)
    with pytest.raises(InputError, match="cannot be computed sample by sample"):
        Entk(Backbone.of(Shared()).trunk, x, method="layers")


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv2d(2, 6, 3), (1, 2, 7, 8)),
        (nn.LayerNorm(6), (1, 5, 6)),
        (nn.Linear(4, 6), (1, 5, 4)),
    ],
)
def test_the_storage_of_a_bias_is_all_that_is_picked(layer, x):
    x = torch.zeros(x)
    y = layer(x)
    assert layers.rule_for(layer, "bias", torch.tensor([0, 2, 5]), x, y).work == y.numel() // 2
