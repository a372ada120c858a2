"""What a private run takes where nothing is said: measured on small tables at ε = 4 (docs/training.md)."""

from __future__ import annotations

ROUNDS = 30  # every round is a release of a gradient and a loss
LOCAL_STEPS = 1  # the first local gradient is known already; every further one is a release
RADIUS = 3.0  # R, of rows whose columns have deviation one
LOSS_SHARE = 0.3  # of the budget, for losses
