"""Datasets whose rows live with clients, and ways to cut one dataset into clients."""

from scaffpd.data.adult import adult
from scaffpd.data.heart_disease import heart_disease
from scaffpd.data.partition import dirichlet
from scaffpd.data.partitioned import breast_cancer, digits
from scaffpd.data.silos import Silos
from scaffpd.data.synthetic import badly_scaled, rank_deficient, synthetic
from scaffpd.data.table import Selection, Table

__all__ = [
    "Selection",
    "Silos",
    "Table",
    "adult",
    "badly_scaled",
    "breast_cancer",
    "digits",
    "dirichlet",
    "heart_disease",
    "rank_deficient",
    "synthetic",
]
