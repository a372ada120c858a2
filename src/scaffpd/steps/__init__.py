"""Step rules for primal-dual methods: chosen by hand, by the paper's theory, or by nobody at all."""

from scaffpd.steps.auto import Auto
from scaffpd.steps.base import Fixed, Schedule, StepRule, Theory
from scaffpd.steps.nonconvex import Nonconvex

__all__ = ["Auto", "Fixed", "Nonconvex", "Schedule", "StepRule", "Theory"]
