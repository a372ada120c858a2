"""Differential privacy of single records: answers are clipped, noised and counted."""

from scaffpd.federation import Spent
from scaffpd.privacy.private import LOCAL_STEPS, LOSS_SHARE, RADIUS, ROUNDS, Private, private_ridge

__all__ = ["LOCAL_STEPS", "LOSS_SHARE", "RADIUS", "ROUNDS", "Private", "Spent", "private_ridge"]
