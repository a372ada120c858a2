r"""A client's own model of a step −e from x, and the accelerated local steps that approach its minimum:

ϕ_i(e) = f_i(x − e) − ⟨c − c_i, e⟩ + (β/2)‖e‖²_D,    −∇ϕ_i(e) = ∇f_i(x − e) − c_i + c − βD e.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation import ProximalPlan, Vector

ROUNDING = 100  # units in the last place by which two sums over samples may differ


class Pace(NamedTuple):
    """How accelerated steps approach a client's model, (L_i + β)-smooth and μ-strongly convex in the metric D.

    Attributes:
        rates: 1/(L_i + β) per client; 0 where a model is flat.
        momenta: (1 − q_i)/(1 + q_i) per client, q_i² = μ/(L_i + β).
        steps: J = ⌈2/q_i⌉ of the slowest client, here or elsewhere, at most the plan's limit.
    """

    rates: Vector
    momenta: Vector
    steps: int


def pace(plan: ProximalPlan, smoothness: Vector, l2: float) -> Pace:
    """With L_i/min D for L_i, and μ = l2/max D + β, which is what is known of the curvature from below."""
    L = np.append(smoothness, plan.steepest) / float(plan.metric.min()) + plan.pull
    mu = l2 / float(plan.metric.max()) + plan.pull
    q = np.sqrt(np.minimum(np.divide(mu, L, out=np.ones_like(L), where=L > 0), 1))
    rates = np.divide(1, L, out=np.zeros_like(L), where=L > 0)
    steps = int(min(plan.limit, np.ceil(2 / max(q.min(), 1e-9))))
    return Pace(rates[:-1], ((1 - q) / (1 + q))[:-1], steps)


class LocalModel:
    """The model ϕ of one client whose f_i is known by its values and gradients only.

    Args:
        evaluate: u → f_i(u) and ∇f_i(u).
        x: where the steps start.
        loss: f_i(x) = ϕ(0).
        push: c − c_i.
        plan: β and D.
    """

    def __init__(
        self,
        evaluate: Callable[[Tensor], tuple[Tensor, Tensor]],
        x: Tensor,
        loss: float,
        push: Tensor,
        plan: ProximalPlan,
    ) -> None:
        self.evaluate, self.x, self.push, self.pull, self.metric = evaluate, x, push, plan.pull, plan.metric
        self.level = loss + ROUNDING * torch.finfo(x.dtype).eps * (1 + abs(loss))

    def descent(self, e: Tensor) -> tuple[float, Tensor]:
        """ϕ(e) and −∇ϕ(e)."""
        loss, gradient = self.evaluate(self.x - e)
        pulled = self.pull * self.metric * e
        return float(loss - self.push @ e + pulled @ e / 2), gradient + self.push - pulled

    def approach(self, rate: float, momentum: float, steps: int) -> Tensor:
        """Accelerated steps from e = 0 to a point that is not above ϕ(0), but for rounding.

        L_i may be an estimate from elsewhere and ϕ need not be convex, so a point with ϕ(e) > ϕ(0), or without a value,
        sends the steps back to the lowest point so far, without momentum and at half the rate. Where ϕ is convex and
        L_i right this does not happen. Losses are bounded below, so that with β > 0 the set {ϕ ≤ ϕ(0)} is bounded, and
        so is the answer.
        """
        d = e = best = torch.zeros_like(self.x)
        lowest = self.level
        for _ in range(steps):
            value, downhill = self.descent(e)
            if not value <= self.level:
                d = e = best
                rate /= 2
                continue
            if value < lowest:
                lowest, best = value, e
            last, d = d, e + rate / self.metric * downhill
            e = d + momentum * (d - last)
        return d if self.descent(d)[0] <= self.level else best
