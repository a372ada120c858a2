"""Clients in this process."""

from scaffpd.cohort.cohort import Cohort, ModelSpec

__all__ = ["Cohort", "ModelSpec"]
