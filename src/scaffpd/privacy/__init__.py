"""Differential privacy of single records: answers are clipped, noised, and counted against a budget."""

from scaffpd.privacy.accountant import Spent
from scaffpd.privacy.private import Private

__all__ = ["Private", "Spent"]
