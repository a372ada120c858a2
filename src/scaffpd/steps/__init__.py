"""Step rules for primal-dual methods: chosen by hand, by the paper's theory, or by nobody at all."""

from scaffpd.steps.auto import Auto
from scaffpd.steps.base import Fixed, StepRule
from scaffpd.steps.theory import Theory

__all__ = ["Auto", "Fixed", "StepRule", "Theory"]
