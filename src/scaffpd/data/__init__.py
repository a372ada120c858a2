"""Data sets whose rows belong to clients, and ways to cut one data set into clients."""

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
from scaffpd.data.partition import dirichlet, natural, quantity_skew, shards
from scaffpd.data.silos import Silos

__all__ = [
    "Silos",
    "adult",
    "beijing_air",
    "breast_cancer",
    "diabetes",
    "digits",
    "dirichlet",
    "heart_disease",
    "natural",
    "quantity_skew",
    "school",
    "shards",
    "synthetic",
]
