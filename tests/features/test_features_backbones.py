"""Networks with weights on disk: found, checked, and right about two photographs."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from scaffpd.errors import InputError
from scaffpd.features import BACKBONES, Backbone, EfficientNetLite0, ResNet18Trunk, backbone
from scaffpd.features.backbones import _same

FILES = {
    "efficientnet-lite0": "efficientnet_lite0_imagenet.npz",
    "resnet18-layer3": "resnet18_imagenet_to_layer3_bnfolded.npz",
}
DATA = os.environ.get("SCAFFPD_DATA", "")
with_weights = pytest.mark.skipif(
    not (DATA and (Path(DATA) / "weights").is_dir()), reason="SCAFFPD_DATA has no folder of weights"
)


def write(folder, network, name="resnet18-layer3", **changed):
    arrays = {k: v.numpy() for k, v in network.state_dict().items() if "num_batches" not in k}
    arrays = {k: v.astype(np.float16) if v.ndim > 1 else v for k, v in arrays.items()} | changed
    (folder / "weights").mkdir(exist_ok=True)
    path = folder / "weights" / FILES[name]
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


@with_weights
def test_the_photographs_that_scikit_learn_carries():
    from sklearn.datasets import load_sample_images

    network = backbone("efficientnet-lite0", DATA)
    for image, expected in zip(
        load_sample_images().images, (698, 985), strict=True
    ):  # palace, daisy
        side = min(image.shape[:2])
        top, left = ((n - side) // 2 for n in image.shape[:2])
        square = torch.tensor(image[top : top + side, left : left + side])[None]
        assert int(network.module(network.preprocess(square)).argmax()) == expected


@with_weights
@pytest.mark.parametrize(("name", "dim"), [("efficientnet-lite0", 1280), ("resnet18-layer3", 256)])
def test_the_files(name, dim):
    network = backbone(name, DATA, size=32)
    assert network.features(torch.zeros(2, 3, 32, 32)).shape == (2, dim)
    assert network.digest == backbone(name, DATA, size=64).digest


def test_reading_what_was_written(tmp_path, monkeypatch):
    torch.manual_seed(0)
    network = ResNet18Trunk()
    write(tmp_path, network)
    monkeypatch.setenv("SCAFFPD_DATA", str(tmp_path))
    read = backbone("resnet18-layer3", size=32)
    for mine, theirs in zip(network.parameters(), read.module.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-6)
        assert not theirs.requires_grad
    assert not read.module.training
    assert read.size == 32


def test_shortcuts_are_added():
    """Where convolutions are zero, a residual block passes on what the shortcut brings."""
    network = ResNet18Trunk()
    plain = network.layer1[0]
    shrinking = network.layer2[0]
    for conv in (plain.conv2, shrinking.conv2):
        nn.init.zeros_(conv.weight)
        nn.init.zeros_(conv.bias)
    x = torch.rand(2, 64, 8, 8)
    torch.testing.assert_close(plain(x), x)
    torch.testing.assert_close(shrinking(x), shrinking.downsample(x).relu())


def test_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("SCAFFPD_DATA", raising=False)
    with pytest.raises(InputError, match="is not part of the package"):
        backbone()
    with pytest.raises(InputError, match="There is no file"):
        backbone("resnet18-layer3", tmp_path)
    with pytest.raises(InputError, match="did you mean 'efficientnet-lite0'"):
        backbone("efficientnet-lite", tmp_path)


@pytest.mark.parametrize("size", [0, 100, 5_000_000])
def test_truncated(size, tmp_path):
    path = write(tmp_path, ResNet18Trunk())
    os.truncate(path, size)
    with pytest.raises(InputError, match="not a complete file"):
        backbone("resnet18-layer3", tmp_path)


def test_other_weights(tmp_path):
    write(tmp_path, ResNet18Trunk(), **{"conv1.bias": None})
    with pytest.raises(
        InputError, match=r"lacks 'conv1.bias': it holds weights of another network"
    ):
        backbone("resnet18-layer3", tmp_path)
    write(tmp_path, ResNet18Trunk(), extra=np.zeros(3))
    with pytest.raises(InputError, match="has an unknown 'extra'"):
        backbone("resnet18-layer3", tmp_path)
    write(tmp_path, ResNet18Trunk(), **{"conv1.bias": np.zeros(3)})
    with pytest.raises(InputError, match=r"shape \(3,\) in place of \(64,\)"):
        backbone("resnet18-layer3", tmp_path)
    shutil.copy(
        write(tmp_path, ResNet18Trunk()), tmp_path / "weights" / FILES["efficientnet-lite0"]
    )
    with pytest.raises(InputError, match="another network"):
        backbone("efficientnet-lite0", tmp_path)


@pytest.mark.parametrize("inside", [False, True])
def test_checksums(inside, tmp_path):
    path = write(tmp_path, ResNet18Trunk())
    base = tmp_path / "weights" if inside else tmp_path
    line = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(base).as_posix()}\n"
    (base / "SHA256SUMS").write_text(f"{'0' * 64}  other\n{line}")
    backbone("resnet18-layer3", tmp_path)
    (base / "SHA256SUMS").write_text(line.replace(line[:4], "0123"))
    with pytest.raises(InputError, match="is damaged or another file"):
        backbone("resnet18-layer3", tmp_path)


@pytest.mark.parametrize("size", [7, 8, 32, 33])
@pytest.mark.parametrize("kernel", [3, 5])
def test_same_padding_centres_as_tensorflow_does(size, kernel):
    """⌈n/2⌉ outputs; the window of output j starts at 2 j - ⌊total/2⌋."""
    conv = nn.Conv2d(1, 1, kernel, 2, bias=False)
    conv.weight.data.fill_(1)
    x = torch.arange(float(size)).expand(1, 1, size, size)
    y = _same(conv, x)[0, 0]
    assert y.shape == ((size + 1) // 2,) * 2
    total = max((len(y) - 1) * 2 + kernel - size, 0)
    first = [2 * j - total // 2 for j in range(len(y))]
    inside = [sum(n for n in range(a, a + kernel) if 0 <= n < size) for a in first]
    rows = [sum(1 for n in range(a, a + kernel) if 0 <= n < size) for a in first]
    torch.testing.assert_close(
        y.detach(), torch.tensor(rows)[:, None] * torch.tensor(inside, dtype=torch.float32)
    )


def test_any_network_without_its_head():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(), nn.Linear(4 * 36, 2)
    )
    for features in ("4", lambda module, x: module[:4](x)):
        trunk = Backbone.of(net, features, size=8)
        x = torch.randn(2, 3, 8, 8)
        torch.testing.assert_close(trunk.features(x), torch.relu(net[0](x)).flatten(1).detach())
    assert net[1].inplace  # the caller's own network is left alone
    assert net.training
    assert len(net) == 5
    assert isinstance(net[4], nn.Linear)
    with pytest.raises(InputError, match="Unknown head 'fc'"):
        Backbone.of(net, "fc")
    with pytest.raises(InputError, match=r"needs to be a torch\.nn\.Module"):
        Backbone.of(3)
    with pytest.raises(InputError, match="at least 8 pixels"):
        Backbone.of(net, size=4)
    with pytest.raises(InputError, match=r"depend on an image.s neighbours"):
        Backbone.of(nn.BatchNorm2d(3, track_running_stats=False))
    with pytest.raises(InputError, match="three means"):
        Backbone.of(net, mean=(0.5,))


def test_digests_tell_weights_and_architectures():
    torch.manual_seed(0)
    a = nn.Linear(3, 3)
    b = nn.Linear(3, 3)
    digests = {
        Backbone.of(net).digest for net in (a, b, nn.Sequential(a), nn.Linear(3, 3, bias=False))
    }
    assert len(digests) == 4
    assert Backbone.of(a).digest == Backbone.of(a).digest


def test_preprocessing():
    net = Backbone.of(nn.Flatten(), size=8, mean=(0, 0.5, 1), std=(1, 0.5, 2))
    flat = torch.full((2, 5, 7, 3), 255, dtype=torch.uint8)
    x = net.preprocess(flat)
    assert x.shape == (2, 3, 8, 8)
    torch.testing.assert_close(x[0, :, 0, 0], torch.tensor([1.0, 1.0, 0.0]))
    same = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    torch.testing.assert_close(net.preprocess(same)[:, 0], same[..., 0] / 255)
    stripes = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    stripes[:, ::2] = 200
    shrunk = net.preprocess(stripes)[0, 0] * 255
    assert (shrunk[2:6, 2:6] - 100).abs().max() < 15  # smoothed, not picked


def test_names():
    assert set(BACKBONES) == set(FILES)
    assert EfficientNetLite0().eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)
