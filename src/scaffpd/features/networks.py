"""Two convolutional networks, written out so that their weights need no other package.

Attributes are named as the keys of the weight files are.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

# EfficientNet-Lite0: (blocks, kernel, stride of the first block, expansion, channels out) of every stage.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, WIDTH, CLASSES = 32, 1280, 1000


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0: inverted bottlenecks with ReLU6, no squeeze-and-excitation, TensorFlow's "same" padding."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = nn.Conv2d(3, STEM, 3, 2, bias=False)
        self._bn0 = _norm(STEM)
        blocks, channels = [], STEM
        for repeats, kernel, stride, expansion, out in STAGES:
            for k in range(repeats):
                blocks.append(Block(channels, out, kernel, stride if k == 0 else 1, expansion))
                channels = out
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = nn.Conv2d(channels, WIDTH, 1, bias=False)
        self._bn1 = _norm(WIDTH)
        self._fc = nn.Linear(WIDTH, CLASSES)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W), normalised, to features (B, 1280)."""
        x = functional.relu6(self._bn0(_same(self._conv_stem, x)))
        for block in self._blocks:
            x = block(x)
        return functional.relu6(self._bn1(self._conv_head(x))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the 1,000 classes of ImageNet."""
        logits: Tensor = self._fc(self.forward_features(x))
        return logits


class Block(nn.Module):
    """Expand by 1 × 1, convolve every channel by itself, project by 1 × 1; plus the input where shapes agree."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide, self.expands = channels * expansion, expansion > 1
        if self.expands:
            self._expand_conv = nn.Conv2d(channels, wide, 1, bias=False)
            self._bn0 = _norm(wide)
        padding = kernel // 2 if stride == 1 else 0
        self._depthwise_conv = nn.Conv2d(wide, wide, kernel, stride, padding, groups=wide, bias=False)
        self._bn1 = _norm(wide)
        self._project_conv = nn.Conv2d(wide, out, 1, bias=False)
        self._bn2 = _norm(out)
        self.skips = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) to (B, out, ⌈H / stride⌉, ⌈W / stride⌉)."""
        y = functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = functional.relu6(self._bn1(_same(self._depthwise_conv, y)))
        y = self._bn2(self._project_conv(y))
        out: Tensor = x + y if self.skips else y
        return out


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _same(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """⌈n / stride⌉ positions a side; the odd one of the zeros goes behind, as in TensorFlow."""
    if conv.stride != (1, 1):
        sides = zip(x.shape[2:], conv.kernel_size, conv.stride, strict=True)
        total = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in sides]
        (top, left), (height, width) = (total[0] // 2, total[1] // 2), total
        x = functional.pad(x, (left, width - left, top, height - top))
    y: Tensor = conv(x)
    return y


class ResNet18Trunk(nn.Module):
    """ResNet-18 up to its third stage; every batch norm is folded into the convolution before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3)
        self.layer1 = nn.Sequential(Residual(64, 64, 1), Residual(64, 64, 1))
        self.layer2 = nn.Sequential(Residual(64, 128, 2), Residual(128, 128, 1))
        self.layer3 = nn.Sequential(Residual(128, 256, 2), Residual(256, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W), normalised, to features (B, 256)."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 3, 2, 1)
        features: Tensor = self.layer3(self.layer2(self.layer1(x)))
        return features.mean((2, 3))


class Residual(nn.Module):
    """relu(conv2(relu(conv1(x))) + x), x convolved by 1 × 1 where shapes differ."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1)
        if channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride))
        self.shrinks = channels != out

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) to (B, out, H / stride, W / stride)."""
        y = self.conv2(functional.relu(self.conv1(x)))
        return functional.relu(y + (self.downsample(x) if self.shrinks else x))
