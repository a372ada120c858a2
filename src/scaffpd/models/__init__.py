"""Models: what x parametrises. `Linear` in closed form and by hand-batched gradients, `Module` for any network."""

from scaffpd.models.linear import Coefficients, Linear
from scaffpd.models.module import Module

__all__ = ["Coefficients", "Linear", "Module"]
