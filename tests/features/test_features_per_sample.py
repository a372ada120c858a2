"""Gradients of single samples, layer by layer, against torch.func and plain automatic differentiation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from scaffpd.errors import InputError
from scaffpd.features import Backbone, EfficientNetLite0, Entk, ResNet18Trunk, rules


def reference(trunk, x, w):
    """All gradients of all samples, (B, total), in the order of named_parameters() and then w."""
    values = {name: p.detach() for name, p in trunk.named_parameters()}

    def score(values, w, image):
        return functional_call(trunk, values, (image[None],))[0] @ w

    found, heads = vmap(grad(score, argnums=(0, 1)), in_dims=(None, None, 0))(values, w, x)
    return torch.cat([g.reshape(len(x), -1) for g in found.values()] + [heads], 1)


def images(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def restless(module):
    """Batch norms with statistics and weights that are not the initial ones."""
    random = torch.Generator().manual_seed(1)
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.running_mean.copy_(0.3 * torch.randn(part.num_features, generator=random))
            part.running_var.copy_(0.5 + torch.rand(part.num_features, generator=random))
        if isinstance(part, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)):
            part.weight.data.copy_(1 + 0.2 * torch.randn(part.weight.shape, generator=random))
            part.bias.data.copy_(0.2 * torch.randn(part.bias.shape, generator=random))
    return module


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.b = nn.Conv2d(8, 12, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1), groups=4)
        self.norm = nn.GroupNorm(3, 12)
        self.c = nn.Conv2d(12, 12, 5, padding=2, groups=12, bias=False)
        self.d = nn.Conv2d(12, 6, 1, stride=2)
        self.batch = nn.BatchNorm2d(6)

    def forward(self, x):
        x = torch.tanh(self.norm(self.b(torch.relu(self.a(x)))))
        return self.batch(self.d(functional.pad(self.c(x), (0, 1, 0, 1)))).sigmoid().flatten(1)


class Tokens(nn.Module):
    def __init__(self, attention=False):
        super().__init__()
        self.embed = nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7)) if attention else None

    def forward(self, x):
        tokens = self.norm(self.embed(x.reshape(len(x), -1, 12)))
        weights = (self.mix(tokens) @ tokens.mT / 3).softmax(-1)
        out = tokens + weights @ tokens
        return (out if self.scale is None else self.scale * out).mean(1)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.b = nn.Linear(12, 12)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x.flatten(1))))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 12)

    def forward(self, x):
        return self.a(torch.tanh(self.a(x.flatten(1))))


class Besides(nn.Module):
    """A weight that its layer uses, and somebody else too."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 12)

    def forward(self, x):
        return torch.tanh(self.a(x.flatten(1))) @ self.a.weight


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.BatchNorm1d(9), nn.ReLU(inplace=True), nn.Linear(9, 4))


def efficientnet():
    return Backbone.of(EfficientNetLite0(), lambda net, x: net.forward_features(x), size=32)


CASES = {
    "mlp": (mlp, (3, 2, 2)),
    "grouped": (Grouped, (3, 17, 14)),
    "tokens": (Tokens, (3, 4, 4)),
}
FALLBACKS = {
    "unknown layer": (lambda: Tokens(attention=True), (3, 4, 4)),
    "shared": (Shared, (3, 2, 2)),
    "called twice": (Twice, (3, 2, 2)),
    "used besides": (Besides, (3, 2, 2)),
}


@pytest.fixture(params=["picked", "full"])
def way(request, monkeypatch):
    """Every layer by picking, or by one product of matrices."""
    monkeypatch.setattr(rules, "MOVES", 0 if request.param == "picked" else 1e12)
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
    torch.testing.assert_close(ours(x), reference(trunk, x, ours.w)[:, ours.chosen], rtol=1e-5, atol=1e-6)
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


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("network", ["efficientnet", "resnet"])
def test_the_two_networks(network, layout, way):
    torch.manual_seed(0)
    backbone = efficientnet() if network == "efficientnet" else Backbone.of(ResNet18Trunk(), size=32)
    trunk = restless(backbone.trunk).double().to(memory_format=layout)
    x = images(3, 3, 32, 32).double().contiguous(memory_format=layout)
    ours = Entk(trunk, x, 1500, seed=3)
    assert ours.method == "layers"
    expected = reference_of_used(trunk, x, ours)
    torch.testing.assert_close(ours(x), expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


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
    assert ours.total == sum(p.numel() for p in EfficientNetLite0().parameters()) - 1281 * 1000 + 1280


def test_the_head_is_seeded_and_of_unit_size():
    trunk, x = Backbone.of(ResNet18Trunk(), size=32).trunk, images(2, 3, 32, 32)
    a, b, c = (Entk(trunk, x, 100, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a.w, b.w)
    assert not torch.equal(a.w, c.w)
    assert float(a.w.norm()) == pytest.approx(1, abs=0.2)
    np.testing.assert_array_equal(a.chosen, b.chosen)
    assert (np.diff(a.chosen) > 0).all()
    assert (a.chosen != c.chosen).any()


@settings(max_examples=25, deadline=None)
@given(
    groups=st.integers(1, 3), ins=st.integers(1, 2), outs=st.integers(1, 3), kernel=st.tuples(*[st.integers(1, 3)] * 2),
    stride=st.tuples(*[st.integers(1, 3)] * 2), padding=st.tuples(*[st.integers(0, 2)] * 2),
    dilation=st.tuples(*[st.integers(1, 2)] * 2), picked=st.booleans(), kept=st.integers(1, 200),
)  # fmt: skip
def test_any_convolution(groups, ins, outs, kernel, stride, padding, dilation, picked, kept):
    conv = nn.Conv2d(groups * ins, groups * outs, kernel, stride, padding, dilation, groups)
    trunk = Backbone.of(nn.Sequential(conv, nn.Tanh(), nn.Flatten())).trunk.double()
    x = images(2, groups * ins, 7, 8).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "MOVES", 0 if picked else 1e12)
        ours = Entk(trunk, x, kept)
        assert ours.method == "layers"
        found = ours(x)
    torch.testing.assert_close(found, reference(trunk, x, ours.w)[:, ours.chosen], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("padding", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}])
def test_paddings_without_a_rule_fall_back(padding):
    trunk = Backbone.of(nn.Sequential(nn.Conv2d(3, 2, 3, **padding), nn.Flatten())).trunk
    x = images(2, 3, 5, 5)
    ours = Entk(trunk, x, 30)
    assert ours.method == "vmap"
    torch.testing.assert_close(ours(x), reference(trunk, x, ours.w)[:, ours.chosen], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("make", "shape"), [(ResNet18Trunk, (3, 32, 32)), (Grouped, (3, 17, 14)), (Tokens, (3, 4, 4))])
def test_bfloat16_is_near(make, shape, way):
    torch.manual_seed(0)
    trunk, x = restless(Backbone.of(make()).trunk), images(3, *shape)
    exact, rough = Entk(trunk, x, 500), Entk(trunk, x, 500, precision="bfloat16")
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
