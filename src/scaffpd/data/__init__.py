"""Datasets whose rows live with clients, and ways to cut one dataset into clients."""

from scaffpd.data.datasets import adult, beijing_air, breast_cancer, diabetes, digits, school, synthetic
from scaffpd.data.heart_disease import heart_disease
from scaffpd.data.image_loaders import cifar10, cifar100, tiny_imagenet
from scaffpd.data.images import Images, Pictures
from scaffpd.data.partition import dirichlet, like_training, natural, quantity_skew, shards, thinned
from scaffpd.data.silos import Silos
from scaffpd.data.table import Selection, Table

__all__ = [
    "Images", "Pictures", "Selection", "Silos", "Table", "adult", "beijing_air", "breast_cancer",
    "cifar10", "cifar100", "diabetes", "digits", "dirichlet", "heart_disease", "like_training", "natural",
    "quantity_skew", "school", "shards", "synthetic", "thinned", "tiny_imagenet",
]  # fmt: skip
