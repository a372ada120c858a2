"""Features on a GPU: the same as on the CPU, in every layout, and to rounding in every precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from feature_cases import FALLBACKS, Grouped, images, restless
from test_features_extract import Net, pictures

from scaffpd.features import Backbone, EfficientNetLite0, Entk, ResNet18Trunk, compute, features

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def network(name):
    torch.manual_seed(0)
    if name == "efficientnet":
        backbone = Backbone.of(EfficientNetLite0(), lambda net, x: net.forward_features(x), size=64)
    else:
        backbone = Backbone.of({"resnet": ResNet18Trunk, "grouped": Grouped}[name](), size=64)
    restless(backbone.trunk)
    return backbone


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["efficientnet", "resnet", "grouped"])
def test_gradients_are_those_of_the_cpu(name, layout):
    backbone = network(name)
    x = images(6, 3, 64, 64)
    here = Entk(backbone.trunk.double(), x.double(), 3000)
    there = backbone.to("cuda").trunk.to(memory_format=layout)
    y = x.double().cuda().contiguous(memory_format=layout)
    ours = Entk(there, y, 3000)
    assert ours.method == "layers"
    expected = here(x.double())
    torch.testing.assert_close(
        ours(y).cpu(), expected, rtol=1e-8, atol=1e-11 * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    ("precision", "error"), [("float32", 2e-3), ("tf32", 0.1), ("bfloat16", 0.5)]
)
def test_precisions(precision, error):
    backbone = network("resnet")
    x = images(6, 3, 64, 64)
    expected = Entk(backbone.trunk, x, 3000)(x)
    found = Entk(backbone.to("cuda").trunk, x.cuda(), 3000, precision=precision)(x.cuda()).cpu()
    assert (found - expected).norm() <= error * expected.norm()


@pytest.mark.parametrize("case", FALLBACKS)
def test_fallbacks(case):
    torch.manual_seed(0)
    make, shape = FALLBACKS[case]
    backbone = Backbone.of(make())
    x = images(5, *shape)
    here = Entk(backbone.trunk, x, 40)
    there = Entk(backbone.to("cuda").trunk, x.cuda(), 40)
    assert there.method == "vmap"
    torch.testing.assert_close(there(x.cuda()).cpu(), here(x), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("chunk", [None, 9])
def test_tables(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(compute, "SAMPLE", 20)
    net = Backbone.of(Net(), "fc", size=12)
    some = pictures()
    here = features(some, net, coordinates=200, dtype="float32")
    there = features(
        some, net, coordinates=200, dtype="float32", device="cuda", chunk=chunk, cache=tmp_path
    )
    np.testing.assert_allclose(there.values, here.values, rtol=1e-2, atol=1e-2)
    assert there.key == features(some, net, coordinates=200, dtype="float32", cache=tmp_path).key


def test_too_large_a_chunk_is_cut():
    net = network("efficientnet")
    ours = Entk(net.to("cuda").trunk, images(2, 3, 64, 64).cuda(), 1000)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours(images(64, 3, 64, 64).cuda())
    assert torch.cuda.max_memory_allocated() - before <= 64 * ours.room + 64 * 3 * 64 * 64 * 4
