r"""Networks that turn images into features: two with ImageNet weights on disk, and any other.

h(x) = features of the last layer but one,    x: normalised images (B, 3, size, size)

The attributes of the two networks are named like the keys of their weight files.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.datasets import data_root
from experiments.images.loading import Folder
from scaffpd.errors import unknown

# EfficientNet-Lite0: (blocks, kernel, stride of the first block, expansion, channels out) of every
# stage.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM = 32
WIDTH = 1280
CLASSES = 1000


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0: inverted bottlenecks with ReLU6, no squeeze-and-excitation, TensorFlow's
    "same" padding.
    """

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = nn.Conv2d(3, STEM, 3, 2, bias=False)
        self._bn0 = _norm(STEM)
        blocks = []
        channels = STEM
        for repeats, kernel, stride, expansion, out in STAGES:
            for k in range(repeats):
                blocks.append(
                    InvertedBottleneck(channels, out, kernel, stride if k == 0 else 1, expansion)
                )
                channels = out
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = nn.Conv2d(channels, WIDTH, 1, bias=False)
        self._bn1 = _norm(WIDTH)
        self._fc = nn.Linear(WIDTH, CLASSES)

    def forward_features(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W), normalised, to features (B, 1280)."""
        x = functional.relu6(self._bn0(_same(self._conv_stem, x)))
        for block in self._blocks:
            x = block(x)
        return functional.relu6(self._bn1(self._conv_head(x))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of the 1,000 classes of ImageNet."""
        logits: Tensor = self._fc(self.forward_features(x))
        return logits


class InvertedBottleneck(nn.Module):
    """Expand by 1 × 1, convolve every channel by itself, project by 1 × 1; add the input if shapes
    agree.
    """

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.expands = expansion > 1
        if self.expands:
            self._expand_conv = nn.Conv2d(channels, wide, 1, bias=False)
            self._bn0 = _norm(wide)
        padding = kernel // 2 if stride == 1 else 0
        self._depthwise_conv = nn.Conv2d(
            wide, wide, kernel, stride, padding, groups=wide, bias=False
        )
        self._bn1 = _norm(wide)
        self._project_conv = nn.Conv2d(wide, out, 1, bias=False)
        self._bn2 = _norm(out)
        self.skips = stride == 1 and channels == out

    def _get_name(self) -> str:
        return "Block"  # its name in the digests of cached tables

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, H, W) to (B, out, ⌈H / stride⌉, ⌈W / stride⌉)."""
        y = functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = functional.relu6(self._bn1(_same(self._depthwise_conv, y)))
        y = self._bn2(self._project_conv(y))
        out: Tensor = x + y if self.skips else y
        return out


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _same(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve to ⌈n / stride⌉ positions a side; an odd zero is padded at the end, as in
    TensorFlow.
    """
    if conv.stride != (1, 1):
        sides = zip(x.shape[2:], conv.kernel_size, conv.stride, strict=True)
        total = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in sides]
        (top, left), (height, width) = (total[0] // 2, total[1] // 2), total
        x = functional.pad(x, (left, width - left, top, height - top))
    y: Tensor = conv(x)
    return y


class ResNet18Trunk(nn.Module):
    """ResNet-18 up to its third stage; batch norms are folded into the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3)
        self.layer1 = nn.Sequential(Residual(64, 64, 1), Residual(64, 64, 1))
        self.layer2 = nn.Sequential(Residual(64, 128, 2), Residual(128, 128, 1))
        self.layer3 = nn.Sequential(Residual(128, 256, 2), Residual(256, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W), normalised, to features (B, 256)."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 3, 2, 1)
        features: Tensor = self.layer3(self.layer2(self.layer1(x)))
        return features.mean((2, 3))


class Residual(nn.Module):
    """Residual block relu(conv2(relu(conv1(x))) + x), x convolved by 1 × 1 if shapes differ."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1)
        if channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride))
        self.shrinks = channels != out

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, H, W) to (B, out, H / stride, W / stride)."""
        y = self.conv2(functional.relu(self.conv1(x)))
        return functional.relu(y + (self.downsample(x) if self.shrinks else x))


Features = Callable[[nn.Module, Tensor], Tensor]
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LITE = (127 / 255,) * 3, (128 / 255,) * 3  # (x - 127) / 128 for x in 0..255
WEIGHTS = {
    "efficientnet-lite0": "efficientnet_lite0_imagenet.npz",
    "resnet18-layer3": "resnet18_imagenet_to_layer3_bnfolded.npz",
}
BACKBONES = tuple(WEIGHTS)


class Trunk(nn.Module):
    """Network up to its features: forward(x) = function(module, x)."""

    def __init__(self, module: nn.Module, function: Features) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Map normalised images to features (B, dim)."""
        return self.function(self.module, x)


def trunk(module: nn.Module, features: str | Features | None = None) -> Trunk:
    """Copy a network up to its features, in evaluation mode and without gradients.

    Args:
        module: maps normalised images to outputs.
        features: the name of the head ("fc", "classifier.1"), which is removed; or a function
            (module, x) → (B, dim); or None if the module's output already is (B, dim).
    """
    own = copy.deepcopy(module).eval().requires_grad_(False)
    for part in own.modules():
        if getattr(part, "inplace", False) is True:  # would overwrite values that derivatives need
            part.inplace = False
    if isinstance(features, str):
        *path, last = features.split(".")
        setattr(own.get_submodule(".".join(path)), last, nn.Identity())
    return Trunk(own, features if callable(features) else nn.Module.__call__).eval()


@dataclass(frozen=True, eq=False)
class Backbone:
    """Network in evaluation mode, with the format of its input.

    Attributes:
        name: name in tables and cache folders.
        trunk: normalised images (B, 3, size, size) ↦ features (B, dim).
        size: pixels a side to which images are resized.
        mean, std: per channel, of images in [0, 1]; the input is (x - mean) / std.
    """

    name: str
    trunk: Trunk = field(repr=False)
    size: int = 224
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.trunk.parameters()).device

    @property
    def digest(self) -> str:
        """Hash of the architecture and the weights."""
        sha = hashlib.sha256(repr(self.trunk.module).encode())
        for name, value in self.trunk.module.state_dict().items():
            sha.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return sha.hexdigest()

    def to(self, device: str | torch.device) -> Backbone:
        """Return a copy on another device."""
        return replace(self, trunk=copy.deepcopy(self.trunk).to(device))

    def preprocess(self, images: Tensor) -> Tensor:
        """Turn uint8 (B, h, w, 3) into normalised float (B, 3, size, size), on the same device.

        Resizing is bilinear, corners not aligned; smoothed first (antialias) only if an image
        shrinks.
        """
        x = images.permute(0, 3, 1, 2).float().contiguous()
        if tuple(x.shape[2:]) != (self.size, self.size):
            shrinks = max(x.shape[2:]) > self.size
            x = functional.interpolate(
                x, (self.size, self.size), mode="bilinear", antialias=shrinks
            )
        mean, std = (
            torch.tensor(v, device=x.device).view(1, 3, 1, 1) * 255 for v in (self.mean, self.std)
        )
        return (x - mean) / std


def forward_features(module: nn.Module, x: Tensor) -> Tensor:
    """Return EfficientNet's features."""
    assert isinstance(module, EfficientNetLite0)
    return module.forward_features(x)


def backbone(
    name: str = "efficientnet-lite0",
    folder: Folder = None,
    size: int = 224,
    random: bool = False,
) -> Backbone:
    """Load a network with ImageNet weights from `folder` (or SCAFFPD_DATA); `random` leaves them as
    drawn.
    """
    if name not in BACKBONES:
        raise unknown("backbone", name, BACKBONES)
    lite = name == BACKBONES[0]
    network = EfficientNetLite0() if lite else ResNet18Trunk()
    if not random:
        place = data_root(folder, "weights") / "weights" / WEIGHTS[name]
        with np.load(place, allow_pickle=False) as arrays:
            # num_batches_tracked is the only thing that the files lack
            network.load_state_dict(
                {key: torch.from_numpy(arrays[key].astype(np.float32)) for key in arrays.files}
                | {k: v for k, v in network.state_dict().items() if k.endswith("_tracked")}
            )
    body = trunk(network, forward_features if lite else None)
    return Backbone(name, body, size, *(LITE if lite else IMAGENET))
