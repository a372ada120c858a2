"""Ways to cut one dataset into clients: by labels, by sizes, by a column, and test rows to go with them."""

from scaffpd.data.partition.groups import natural
from scaffpd.data.partition.inputs import Indices
from scaffpd.data.partition.labels import dirichlet, shards
from scaffpd.data.partition.matching import like_training
from scaffpd.data.partition.sizes import quantity_skew, thinned

__all__ = ["Indices", "dirichlet", "like_training", "natural", "quantity_skew", "shards", "thinned"]
