"""Networks for images of 32 × 32 pixels that train in minutes: two convolutions, and the smallest
ResNet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def two_convolutions(classes: int = 10) -> nn.Module:
    """Two convolutions and a linear layer, 34,122 parameters for ten classes."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, classes),
    )


class Block(nn.Module):
    """Two convolutions with group norm, and a way around them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.GroupNorm(out // 8, out),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.GroupNorm(out // 8, out),
        )
        around = channels != out or stride != 1
        self.around: nn.Module = (
            nn.Conv2d(channels, out, 1, stride, bias=False) if around else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """relu(around(x) + norm(conv(relu(norm(conv(x))))))."""
        inner = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(self.around(x) + self.norm2(self.conv2(inner)))


class ResNet8(nn.Module):
    """The smallest residual network of He et al. (2016) for 32 × 32 pixels, with group norm; takes
    bytes.
    """

    def __init__(
        self, classes: int, width: int = 16, mean: Sequence[float] = (0,) * 3, std: Any = (255,) * 3
    ) -> None:
        super().__init__()
        self.first, self.norm = (
            nn.Conv2d(3, width, 3, 1, 1, bias=False),
            nn.GroupNorm(max(1, width // 8), width),
        )
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.fc = nn.Linear(4 * width, classes)
        self.mean: Tensor
        self.std: Tensor
        for name, value in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32).view(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, h, w), 0 to 255, to one output per class."""
        x = nn.functional.relu(
            self.norm(self.first((x.to(self.mean.dtype) - self.mean) / self.std))
        )
        return self.fc(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


def resnet8_of_floats(classes: int = 10) -> nn.Module:
    """A ResNet-8 for images that have been scaled already."""
    return ResNet8(classes, 16, (0.0,) * 3, (1.0,) * 3)


NETWORKS = {"cnn": two_convolutions, "resnet": resnet8_of_floats}
TITLES = {"cnn": "two convolutions", "resnet": "ResNet-8, group norm"}
