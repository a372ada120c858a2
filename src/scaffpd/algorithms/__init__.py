"""Algorithms on the `Federation` interface: one paper, one file."""

from scaffpd.algorithms.scaff_pd import ScaffPD

__all__ = ["ScaffPD"]
