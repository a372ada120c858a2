r"""Proximal steps: accelerated ones towards the minimum of a client's model of a step −e from x.

    ϕ_i(e) = f_i(x − e) − ⟨c − c_i, e⟩ + (β/2)‖e‖²_D,    −∇ϕ_i(e) = ∇f_i(x − e) − c_i + c − βD e

In the metric D the model is (L_i + β)-smooth, and strongly convex with μ ≥ min_j l2_j/D_j + β.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation import ProximalPlan, Vector
from scaffpd.models.feature_steps import NearbyGradients


def pace(plan: ProximalPlan, smoothness: Vector, least: float) -> tuple[Vector, Vector, int]:
    """Return step sizes, momenta and number of steps, with L_i/min D for L_i.

    With μ = `least` + β, `least` = min_j l2_j/D_j and q_i² = μ/(L_i + β) these are 1/(L_i + β), 0
    if a model is flat, (1 − q_i)/(1 + q_i), and J = ⌈2/q_i⌉ of the slowest client, here or
    elsewhere, at most the plan's limit.
    """
    L = np.append(smoothness, plan.steepest) / float(plan.metric.min()) + plan.pull
    mu = least + plan.pull
    q = np.sqrt(np.minimum(np.divide(mu, L, out=np.ones_like(L), where=L > 0), 1))
    rates = np.divide(1, L, out=np.zeros_like(L), where=L > 0)
    steps = int(min(plan.limit, np.ceil(2 / max(q.min(), 1e-9))))
    return rates[:-1], ((1 - q) / (1 + q))[:-1], steps


def proximal_steps(
    near: NearbyGradients, c: Tensor, stay: Tensor, rate: Tensor, momentum: Tensor, steps: int
) -> Tensor:
    """Take J steps d⁺ = e + D⁻¹(c + ∇f_i(x − e) − ∇f_i(x) − βD e)/(L_i + β).

    Here e = d + momentum (d − d_prev).

    Args:
        near: the clients, with weights 1/m_i.
        c: the correction, (k, features).
        stay: l2 + βD, (k, features).
        rate: D⁻¹/(L_i + β), (n, k, features).
        momentum: (n, 1, 1).
        steps: J.
    """
    d = e = torch.zeros_like(rate)
    for _ in range(steps):
        gradient = near.products.back(near.change(e), torch.addcmul(c, stay, e, value=-1))
        last = d
        d = torch.addcmul(e, rate, gradient)
        e = d + momentum * (d - last)
    return d
