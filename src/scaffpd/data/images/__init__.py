"""Datasets of images, read from the layouts in which people keep them."""

from scaffpd.data.images.loaders import cifar10, cifar100, tiny_imagenet
from scaffpd.data.images.pictures import Images, Pictures

__all__ = ["Images", "Pictures", "cifar10", "cifar100", "tiny_imagenet"]
