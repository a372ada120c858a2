"""Models with parameters x: linear models, networks and personal models."""

from scaffpd.models.linear import Coefficients, Linear
from scaffpd.models.module import Augment, LocalAdam, LocalSGD, Module
from scaffpd.models.personal import Personal, personalise

__all__ = [
    "Augment",
    "Coefficients",
    "Linear",
    "LocalAdam",
    "LocalSGD",
    "Module",
    "Personal",
    "personalise",
]
