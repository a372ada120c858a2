"""Models with parameters x: linear models, networks and personal models."""

from scaffpd.models.linear import Coefficients, Linear
from scaffpd.models.module import Module
from scaffpd.models.personal import Personal, personalise, regulariser

__all__ = [
    "Coefficients",
    "Linear",
    "Module",
    "Personal",
    "personalise",
    "regulariser",
]
