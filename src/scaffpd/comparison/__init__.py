"""Many methods on one problem: the same partitions, starts, rounds and tuning budget, and a table of who is served."""

from scaffpd.comparison.compete import compare
from scaffpd.comparison.problem import Problem
from scaffpd.comparison.tables import Comparison

__all__ = ["Comparison", "Problem", "compare"]
