r"""The dispersion α of counts with the variance μ + αμ², by likelihood, from sums over clients.

    α ← argmax Σ_i Σ_rows log NB(y; E e^{⟨a, u_i⟩}, 1/α),    u_i the modes of the evidence at α

(a negative binomial of size 1/α). The means depend little on α, so that two or three turns settle
it. Where counts vary no more than their means α is 0, and they are Poisson's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from scaffpd.algorithms.evidence import Evidence, ModePoint
from scaffpd.federation import Vector
from scaffpd.federation.modes import Dispersions

LEAST = 1e-4  # a smaller α is none
MOST = 1e3
POINTS = 64
TURNS = 5
CLOSE = 0.01  # change of log α between two turns at which to stop


def dispersion(modes: Callable[[float], tuple[Evidence, ModePoint]]) -> float:
    """Return α, given what finds the modes for one."""
    alpha = LEAST
    grid = np.geomspace(LEAST, MOST, POINTS)
    for _ in range(TURNS):
        problem, point = modes(alpha)
        question = Dispersions(point.question, torch.from_numpy(grid))
        sums = problem.federation.ask(question).added("likelihood", problem.weights)
        before, alpha = alpha, _highest(np.log(grid), sums.double().cpu().numpy())
        if alpha <= LEAST:
            return 0.0
        if abs(np.log(alpha / before)) < CLOSE:
            break
        grid = alpha * np.geomspace(0.8, 1.25, POINTS)
    return alpha


def _highest(t: Vector, values: Vector) -> float:
    """Return e^t at the top of the parabola through the highest value and its neighbours."""
    k = int(np.argmax(values))
    if not 0 < k < len(t) - 1:
        return float(np.exp(t[k]))
    a, b, c = values[k - 1 : k + 2]
    return float(np.exp(t[k] + (t[k] - t[k - 1]) * (a - c) / (2 * (a - 2 * b + c))))
