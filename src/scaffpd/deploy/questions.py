"""The questions that silos answer; an algorithm says which of them it asks, and a silo answers no others.

A silo that has agreed to federated averaging will not hand out a gradient. `evaluate` (a loss, an accuracy, a count) is
part of every run.
"""

from __future__ import annotations

from scaffpd.algorithms.base import CURVATURE as CURVATURE
from scaffpd.algorithms.base import DIAGONAL as DIAGONAL
from scaffpd.algorithms.base import GRADIENTS as GRADIENTS
from scaffpd.algorithms.base import LOSSES as LOSSES
from scaffpd.algorithms.base import PROXIMAL as PROXIMAL
from scaffpd.algorithms.base import UPDATES as UPDATES

EVALUATE = "evaluate"
SPENT = "spent"  # (ε, δ) so far
PROJECT = "project"  # ⟨c_i, v⟩: a scalar in place of a vector, for servers that do not see c_i
CARD, MEET, OPEN, MASKED, REVEAL, SIZES = "card", "meet", "open", "masked", "reveal", "sizes"  # see `mask_messages`
SECRET = frozenset({CARD, MEET, OPEN, MASKED, REVEAL, SIZES})
