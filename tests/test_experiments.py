"""One smoke test each: images from pixels to tables, synthetic figures, and gradients of single
images.
"""

import csv

import numpy as np
import pytest
import torch

from cases.refusals import refuses

pytest.importorskip("matplotlib")

from experiments.images import __main__ as images
from experiments.images import plans, study
from experiments.images.entk import Entk
from experiments.images.loading import Images, Pictures
from experiments.images.networks import Backbone, backbone, trunk
from experiments.images.partition import divided, like_training, thinned
from experiments.images.small_networks import ResNet8
from experiments.synthetic import __main__ as synthetic


def pictures(classes, each, seed):
    """Every class has a colour of its own, blurred by noise."""
    random = np.random.default_rng(seed)
    y = np.repeat(np.arange(classes), each)
    colours = np.random.default_rng(0).uniform(20, 235, (classes, 3))
    x = colours[y][:, None, None] + random.normal(0, 15, (len(y), 32, 32, 3))
    return Pictures(x.clip(0, 255).astype(np.uint8), y)


MADE = Images("made", pictures(10, 60, 1), pictures(10, 8, 2), tuple("abcdefghij"))


def light(name="", folder=None, size=16):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, stride=3),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 16, 1),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
        )
        return Backbone("light", trunk(layers), size)


def test_from_images_to_a_table(tmp_path, monkeypatch):
    monkeypatch.setitem(study.LOADERS, "cifar10", lambda folder: MADE)
    monkeypatch.setattr(study, "backbone", light)
    monkeypatch.setattr(plans, "PER_CLASS", {"cifar10": (60, 8)})
    small = ["--small", "--size", "16", "--rounds", "3", "--tune", "2", "--seeds", "2", "--quiet"]
    where = ["--device", "cpu", "--cache", str(tmp_path / "cache")]
    out = tmp_path / "out"
    plan = plans.Plan("cifar10", "cifar10", 4, (0.5,), l2=1e-2, coordinates=300)
    monkeypatch.setitem(plans.PLANS, "cifar10", plan)
    assert images.main(["cifar10", *small, *where, "--out", str(out)]) == 0
    with (out / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == list(plans.METHODS)
    assert max(float(row["average"]) for row in rows) > 0.5
    assert (out / "README.md").exists()
    with refuses("small-in-results"):
        images.main(["cifar10", *small, "--out", str(tmp_path / "results" / "cifar10")])


@pytest.mark.parametrize("name", ["efficientnet-lite0", "resnet18-layer3", "own layers"])
def test_gradients_of_single_images_are_those_of_autograd(name):
    torch.manual_seed(0)
    net = trunk(ResNet8(10, 8), "fc") if name == "own layers" else backbone(name, random=True).trunk
    x = torch.randn(3, 3, 32, 32)
    found = Entk(net, x, 400, seed=1)
    assert (found.rules is None) == (name == "own layers")  # by layers, or by torch.func
    parameters = dict(net.named_parameters())
    for p in parameters.values():
        p.requires_grad_()
    rows = found(x)
    for row, image in zip(rows, x, strict=True):
        h = net(image[None])[0]
        used = torch.autograd.grad(h @ found.w, list(parameters.values()), allow_unused=True)
        whole = torch.cat([g.flatten() for g in used if g is not None] + [h])
        expected = whole[torch.from_numpy(found.chosen)].detach()
        torch.testing.assert_close(
            row, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max())
        )


def test_synthetic_figures(tmp_path):
    assert synthetic.main(["--quick", "--out", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.png"))) == 4


def test_images_are_divided_as_published():
    """Balanced clients have at most their part and one label."""
    y = np.random.default_rng(0).integers(0, 12, 400)
    parts = divided(y, 6, 0.05, 3, 1, balanced=True)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(400))
    assert max(map(len, parts)) < 400 / 6 + np.bincount(y).max()
    thin = thinned([np.arange(100 * i, 100 * i + 100) for i in range(20)])
    assert sorted(map(len, thin)) == [30] * 6 + [100] * 14
    y_test = np.repeat(np.arange(12), 20)
    for own, drawn in zip(parts, like_training(parts, y, y_test), strict=True):
        p = np.bincount(y[own], minlength=12) / len(own)
        assert len(drawn) == int(20 / p.max() + 1e-9)
        assert np.abs(np.bincount(y_test[drawn], minlength=12) - len(drawn) * p).max() < 1
