r"""Accelerated primal-dual: Scaff-PD without local steps.

E. Y. Hamedani, N. S. Aybat,
"A Primal-Dual Algorithm with Line Search for General Convex-Concave Saddle Point Problems", 2021, Algorithm 2.1.

    s = (1 + θ_r) L(x^r) − θ_r L(x^{r−1})
    λ^{r+1} = argmin_{λ∈Λ} ψ(λ) − ⟨s, λ⟩ + ‖λ − λ^r‖²/(2σ_r)
    x^{r+1} = x^r − τ_r Σ λ_i^{r+1} ∇f_i(x^r)

After a single local step Δu_i = c for every client, so that the server can take it by itself: the iterates are those of
Scaff-PD with J = 1, for one exchange a round instead of two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from scaffpd.algorithms.base import GRADIENTS
from scaffpd.algorithms.scaff_pd import ScaffPD, ScaffPDState
from scaffpd.federation import Federation
from scaffpd.steps.base import Rates


@dataclass(frozen=True)
class AcceleratedPrimalDual(ScaffPD):
    """The accelerated primal-dual method.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        steps: `Auto()`, `Fixed(...)` or `Theory(...)`.
    """

    published: ClassVar[str] = "APD"
    questions: ClassVar[frozenset[str]] = frozenset({GRADIENTS})

    local_steps: int = field(default=1, init=False, repr=False)
    batch_size: None = field(default=None, init=False, repr=False)
    full_gradients: bool = field(default=True, init=False, repr=False)

    def _local_work(self, federation: Federation, state: ScaffPDState, rates: Rates) -> Tensor:
        """Σ (λ_i/S) η_i c/S: one local step of everybody, made by the server."""
        total, L = float(state.weights.sum()) or 1.0, state.constants.smoothness
        eta = np.full(len(L), rates.local_rate or 0.0)
        if rates.local_rate is None:  # nobody moves where the loss is flat
            eta = np.divide(rates.local_scale, L, out=np.zeros_like(L), where=L > 0)
        return float(state.weights @ eta) / total * (state.direction / total)
