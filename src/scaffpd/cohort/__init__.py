"""Clients in this process."""

from scaffpd.cohort.cohort import Cohort, Model

__all__ = ["Cohort", "Model"]
