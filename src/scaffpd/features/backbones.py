r"""Networks that turn images into features: two that come with weights on disk, and anybody's own.

h(x) = features of the last layer but one,    x: normalised images (B, 3, size, size)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from scaffpd.errors import InputError, count, unknown
from scaffpd.features.networks import EfficientNetLite0, ResNet18Trunk
from scaffpd.features.weights import digest, load

Features = Callable[[nn.Module, Tensor], Tensor]
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LITE = (127 / 255,) * 3, (128 / 255,) * 3  # (x - 127) / 128 for x in 0..255
SMALLEST = 8  # pixels a side


class Trunk(nn.Module):
    """A network up to its features: forward(x) = function(module, x)."""

    def __init__(self, module: nn.Module, function: Features) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images to features (B, dim)."""
        return self.function(self.module, x)


def trunk(module: nn.Module, features: str | Features | None = None) -> Trunk:
    """A copy of any network up to its features, in evaluation mode and without gradients; see `Backbone.of`."""
    if not isinstance(module, nn.Module):
        raise InputError(f"A network needs to be a torch.nn.Module, got {type(module).__name__}.")
    own = copy.deepcopy(module).eval().requires_grad_(False)
    _own_statistics(own)
    _out_of_place(own)
    if isinstance(features, str):
        _behead(own, features)
    return Trunk(own, features if callable(features) else _call).eval()


@dataclass(frozen=True, eq=False)
class Backbone:
    """A network in evaluation mode, and what its input looks like.

    Attributes:
        name: what it is called in tables and cache folders.
        trunk: normalised images (B, 3, size, size) ↦ features (B, dim).
        size: pixels a side to which images are resized.
        mean, std: per channel, of images in [0, 1]; the input is (x - mean) / std.
        digest: of the architecture and the weights.
    """

    name: str
    trunk: Trunk = field(repr=False)
    size: int = 224
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    digest: str = field(default="", repr=False)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        features: str | Callable[[nn.Module, Tensor], Tensor] | None = None,
        *,
        name: str | None = None,
        size: int = 224,
        mean: Sequence[float] = IMAGENET[0],
        std: Sequence[float] = IMAGENET[1],
    ) -> Backbone:
        """Any network; a copy of it is kept, in evaluation mode and without gradients.

        Args:
            module: maps normalised images (B, 3, size, size) to outputs.
            features: the name of the head ("fc", "classifier.1"), which is taken away; or a function (module, x) →
                (B, dim); or None where the module's output already is (B, dim).
            name: by default that of the class.
            size: pixels a side.
            mean: per channel, of images in [0, 1].
            std: likewise.
        """
        if count("Backbone.of", "size", size) < SMALLEST:
            raise InputError(f"Backbone.of needs a size of at least {SMALLEST} pixels, got {size}.")
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise InputError("Backbone.of needs three means and three deviations above zero, one per colour.")
        own = trunk(module, features)
        title = name or type(module).__name__
        return cls(title, own, size, tuple(map(float, mean)), tuple(map(float, std)), digest(own.module))

    @property
    def module(self) -> nn.Module:
        """The network itself."""
        return self.trunk.module

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.trunk.parameters()).device

    def to(self, device: str | torch.device) -> Backbone:
        """The same on another device."""
        return replace(self, trunk=copy.deepcopy(self.trunk).to(device))

    def features(self, x: Tensor) -> Tensor:
        """h(x), (B, dim), of normalised images."""
        features: Tensor = self.trunk(x)
        return features

    def preprocess(self, images: Tensor) -> Tensor:
        """uint8 (B, h, w, 3) to normalised float (B, 3, size, size), on the device on which the images are.

        Bilinear, corners not aligned; smoothed first (antialias) only where an image shrinks.
        """
        x = images.permute(0, 3, 1, 2).float().contiguous()
        if tuple(x.shape[2:]) != (self.size, self.size):
            shrinks = max(x.shape[2:]) > self.size
            x = functional.interpolate(x, (self.size, self.size), mode="bilinear", antialias=shrinks)
        mean, std = (torch.tensor(v, device=x.device).view(1, 3, 1, 1) * 255 for v in (self.mean, self.std))
        return (x - mean) / std


def backbone(
    name: str = "efficientnet-lite0", folder: str | os.PathLike[str] | None = None, size: int = 224
) -> Backbone:
    """A network with ImageNet weights from `folder` (or the folder that SCAFFPD_DATA names)."""
    if name == "efficientnet-lite0":
        network = load(EfficientNetLite0(), "efficientnet_lite0_imagenet.npz", folder)
        return Backbone.of(network, _efficientnet, name=name, size=size, mean=LITE[0], std=LITE[1])
    if name == "resnet18-layer3":
        network = load(ResNet18Trunk(), "resnet18_imagenet_to_layer3_bnfolded.npz", folder)
        return Backbone.of(network, name=name, size=size)
    raise unknown("backbone", name, BACKBONES)


BACKBONES = ("efficientnet-lite0", "resnet18-layer3")


def _call(module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = module(x)
    return output


def _efficientnet(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, EfficientNetLite0)
    return module.forward_features(x)


def _behead(module: nn.Module, head: str) -> None:
    *path, last = head.split(".")
    try:
        owner = module.get_submodule(".".join(path))
        owner.get_submodule(last)
    except AttributeError:
        children = [name for name, _ in module.named_children()]
        raise unknown("head", head, children) from None
    setattr(owner, last, nn.Identity())


def _own_statistics(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None:
            raise InputError(
                f"Backbone layer {name!r} is a batch norm without running statistics, so that features would "
                "depend on an image's neighbours: set track_running_stats=True."
            )


def _out_of_place(module: nn.Module) -> None:
    """Activations that overwrite their input would overwrite what derivatives need."""
    for part in module.modules():
        if getattr(part, "inplace", False) is True:
            part.inplace = False  # type: ignore[assignment]
