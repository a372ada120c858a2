"""Step rules for primal-dual methods: fixed, from the paper's theory, or adaptive."""

from scaffpd.steps.auto import Auto
from scaffpd.steps.base import Fixed, Schedule, StepRule, Theory
from scaffpd.steps.nonconvex import Nonconvex

__all__ = ["Auto", "Fixed", "Nonconvex", "Schedule", "StepRule", "Theory"]
