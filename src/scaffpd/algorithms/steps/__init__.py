"""Step rules for primal-dual methods: fixed, from the paper's theory, or adaptive."""

from scaffpd.algorithms.steps.auto import Auto
from scaffpd.algorithms.steps.base import Fixed, Schedule, StepRule, Theory
from scaffpd.algorithms.steps.nonconvex import Nonconvex

__all__ = ["Auto", "Fixed", "Nonconvex", "Schedule", "StepRule", "Theory"]
