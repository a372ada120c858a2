r"""Local steps of counts, whose ℓ'' = e^z has no bound, by the curvature where they are.

Within log 2 of every z it at most doubles, so that a step of

    s = min(η, log 2/max_j |⟨a_j, G⟩|, 1/(2 max_j ‖a_j‖² ℓ''_j + l2 + μ))

along G = c − (l2 + μ) d + A_iᵀ(ℓ'(x − d) − r₀)/m_i, at the client's own point, goes down. In the
space of samples d = p c + A_iᵀR, and A_i G needs the inner products K_i = A_i A_iᵀ alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scaffpd.models.local_problem import LocalProblem
from scaffpd.models.losses import Loss

DOUBLED = math.log(2)


def careful_step(
    problem: LocalProblem,
    who: Tensor,
    A: Tensor,
    y: Tensor,
    z: Tensor,
    r: Tensor | None,
    share: Tensor,
    D: Tensor,
) -> Tensor:
    """Return the displacements after a step that is as short as the clients' curvature asks for.

    Args:
        problem: where the steps started.
        who: the clients.
        A: their samples.
        y: their targets.
        z: their predictions at x.
        r: derivatives there; `None` for minibatches.
        share: of the samples in a client's mean, 0 for padding, (n, m, 1).
        D: displacements before, (n, 1, features).
    """
    c = problem.c if problem.c.ndim == 2 else problem.c[who]
    hold = problem.l2 + problem.plan.prox
    there = z - A @ D.mT
    change = problem.loss.residual(there, y)
    change = share * (change if r is None else change - r)
    G = c.mT - hold * D + change.mT @ A
    moved = (A @ G.mT).abs()
    bend = problem.loss.bends(there, y) * A.square().sum(2, keepdim=True)
    far, steep = (torch.where(share > 0, t, 0).amax(1, keepdim=True) for t in (moved, bend))
    safe = torch.minimum(DOUBLED / far, 1 / (2 * steep + hold.max()))
    return D + torch.minimum(problem.rates[who], safe) * G


def careful_loop(
    loss: Loss,
    K: Tensor,
    y: Tensor,
    Z: Tensor,
    P: Tensor,
    r: Tensor,
    share: Tensor,
    rates: Tensor,
    hold: Tensor,
) -> Tensor:
    """Return R and p after all steps, (n, k, m + 1).

    Args:
        loss: ℓ.
        K: the inner products with a minus sign, (n, m, m).
        y: the targets, (n, ·, m).
        Z: A x, (n, k, m).
        P: A c, (n, k, m).
        r: r₀, (n, k, m).
        share: of the samples in a client's mean, 0 for padding, (n, 1, m).
        rates: η, (n, 1, 1).
        hold: l2 + μ for every step, (J, 1, 1).
    """
    R, moved = torch.zeros_like(Z), torch.zeros_like(Z)
    p = torch.zeros_like(rates)
    lengths = -K.diagonal(dim1=1, dim2=2)[:, None]
    inside = share > 0
    for own in hold:
        there = Z - moved
        change = share * (loss.across(there, y) - r)
        ahead = P - own * moved - change @ K
        bend = loss.bends(there.mT, y.mT).mT * lengths
        far, steep = (torch.where(inside, t, 0).amax((1, 2), True) for t in (ahead.abs(), bend))
        s = torch.minimum(rates, torch.minimum(DOUBLED / far, 1 / (2 * steep + own)))
        R += s * (change - own * R)
        p += s * (1 - own * p)
        moved += s * ahead
    return torch.cat([R, p.expand(-1, R.shape[1], 1)], 2)
