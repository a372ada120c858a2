"""Step rules for primal-dual methods: fixed, from the paper's theory, or adaptive."""

from scaffpd.algorithms.steps.nonconvex import Nonconvex
from scaffpd.algorithms.steps.rules import Auto, Fixed, StepRule
from scaffpd.algorithms.steps.theory import Theory

__all__ = ["Auto", "Fixed", "Nonconvex", "StepRule", "Theory"]
