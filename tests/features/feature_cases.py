"""Networks of every kind of layer, and some that no rule of a layer covers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from scaffpd.features import Backbone, EfficientNetLite0


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
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 9), nn.BatchNorm1d(9), nn.ReLU(inplace=True), nn.Linear(9, 4)
    )


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
