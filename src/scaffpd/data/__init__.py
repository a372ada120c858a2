"""Datasets whose rows belong to clients, and ways to cut one dataset into clients."""

from typing import TYPE_CHECKING, Any

from scaffpd.data.datasets import (
    adult,
    beijing_air,
    breast_cancer,
    diabetes,
    digits,
    school,
    synthetic,
)
from scaffpd.data.heart_disease import heart_disease
from scaffpd.data.partition import dirichlet, like_training, natural, quantity_skew, shards, thinned
from scaffpd.data.silos import Silos
from scaffpd.data.table import Selection, Table

if TYPE_CHECKING:
    from scaffpd.data.image_loaders import cifar10, cifar100, tiny_imagenet
    from scaffpd.data.images import Images, Pictures

__all__ = [
    "Images",
    "Pictures",
    "Selection",
    "Silos",
    "Table",
    "adult",
    "beijing_air",
    "breast_cancer",
    "cifar10",
    "cifar100",
    "diabetes",
    "digits",
    "dirichlet",
    "heart_disease",
    "like_training",
    "natural",
    "quantity_skew",
    "school",
    "shards",
    "synthetic",
    "thinned",
    "tiny_imagenet",
]
__dir__ = __all__.copy  # the image loaders among them


def __getattr__(name: str) -> Any:
    """Import the image loaders at first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from scaffpd.data import image_loaders, images

    return getattr(images if hasattr(images, name) else image_loaders, name)
