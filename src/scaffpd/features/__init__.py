"""Images as rows of numbers for linear models: gradients or features of a frozen network."""

from scaffpd.features.backbones import (
    BACKBONES,
    Backbone,
    EfficientNetLite0,
    ResNet18Trunk,
    backbone,
    trunk,
)
from scaffpd.features.extract import features
from scaffpd.features.per_sample import Entk

__all__ = [
    "BACKBONES",
    "Backbone",
    "EfficientNetLite0",
    "Entk",
    "ResNet18Trunk",
    "backbone",
    "features",
    "trunk",
]
