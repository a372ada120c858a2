r"""Adaptive Gauss-Hermite quadrature of one client's likelihood over what may differ.

    −log ∫ exp(−Φ(v)) dv/(2π)^{p/2},    Φ(v) = Σ_rows ℓ(⟨a, x + S v⟩, y)/s + ½‖v‖²

at nodes v_k = v̂ + L⁻ᵀt_k around the mode v̂, with M = LLᵀ = ∇²Φ(v̂) and products t_k of Hermite's
(Liu & Pierce 1994, "A note on Gauss-Hermite quadrature"). With posterior weights π_k ∝
ω_k exp(‖t_k‖²/2 − Φ(v_k)), and g_k = Aᵀℓ'(v_k)/s,

    ∇ = E g,    ∇² = E[AᵀWA] − Cov g,    v moves with x by −J δ for J = Cov(v, g).

It is one number per client, so all of this is a sum over clients. Labels in few rows a client need
it: modes and Laplace's approximation are too near to x, and x to 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scaffpd.models.losses import Loss

NODES = {1: 15, 2: 11, 3: 7}  # of each of the coefficients that differ; more are not integrated
TOGETHER = 2**21  # predictions in memory at a time
LEAST = 0.3  # of Laplace's Hessian: less is an error of the quadrature


class Rows(NamedTuple):
    """Some clients' rows: features (n, m, q), targets, weights (n, m), and predictions at v̂."""

    A: Tensor
    y: Tensor
    weight: Tensor
    z: Tensor


class Posterior:
    """Moments of v for some clients, in the place of the curvature at their modes.

    Attributes:
        value: −log of the integrals, (n,).
        gradient: in x, (n, q).
        Q: the Hessians in x, (n, q, q).
        mean: E v − v̂, (n, q).
        covariance: of v; of a shared coefficient the prior's.
        change: J, (n, q, q).

    Args:
        near: Laplace's Hessians in x, (n, q, q).
    """

    def __init__(self, loss: Loss, rows: Rows, S: Tensor, v: Tensor, near: Tensor) -> None:
        own = torch.nonzero(S).flatten()
        t, log = nodes(len(own))
        t, log = t.to(v), log.to(v)
        A = rows.A
        B = A[:, :, own] * S[own]
        W = rows.weight * loss.bends(rows.z, rows.y)[..., 0]
        M = (B * W[..., None]).mT @ B
        M.diagonal(dim1=1, dim2=2).add_(1)
        L = torch.linalg.cholesky(M)
        moved = torch.linalg.solve_triangular(L.mT, t.mT.expand(len(L), -1, -1), upper=True)
        parts = torch.split(torch.arange(len(t)), max(1, TOGETHER // rows.weight.numel()))

        def outputs(k: Tensor) -> Tensor:
            z: Tensor = rows.z + (B @ moved[:, :, k]).permute(2, 0, 1)[..., None]
            return z

        at = v[:, own] + moved.mT.movedim(1, 0)  # (nodes, n, p)
        total = [(rows.weight * loss.value(outputs(k), rows.y)).sum(2) for k in parts]
        logs = log[:, None] - torch.cat(total) - at.square().sum(2) / 2
        top = torch.logsumexp(logs, 0)
        self.value = L.diagonal(dim1=1, dim2=2).log().sum(1) - top
        share = (logs - top).exp()
        curved = torch.zeros_like(rows.weight)
        slopes = []
        for k in parts:
            z = outputs(k)
            r = rows.weight * loss.residual(z, rows.y)[..., 0]
            slopes.append(A.mT @ r.permute(1, 2, 0))
            curved += (share[k][..., None] * loss.bends(z, rows.y)[..., 0]).sum(0)
        g = torch.cat(slopes, 2)  # (n, q, nodes)
        pi = share.mT[:, None]
        self.gradient = (pi * g).sum(2)
        g = g - self.gradient[..., None]
        Q = (A * (rows.weight * curved)[..., None]).mT @ A - (pi * g) @ g.mT
        self.Q: Tensor = _bounded(Q, LEAST * near)
        u = moved - (pi * moved).sum(2, keepdim=True)
        self.mean = torch.zeros_like(v)
        self.mean[:, own] = (pi * moved).sum(2)
        q = len(S)
        self.covariance = torch.eye(q).to(v).repeat(len(v), 1, 1)
        self.covariance[:, own[:, None], own] = (pi * u) @ u.mT
        self.change = v.new_zeros(len(v), q, q)
        self.change[:, own] = (pi * u) @ g.mT

    def each(self) -> Tensor:
        """Return Q_i."""
        return self.Q

    def curvature(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i Q_i."""
        total: Tensor = torch.tensordot(weights, self.Q, 1)
        return total

    def spread(self, C: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change of v, and 1 − (V + BCBᵀ)_jj/τ_j, as `ManyRows` does."""
        J = self.change
        certain = self.covariance.diagonal(dim1=1, dim2=2) + ((J @ C) * J).sum(2)
        by_chance: Tensor = 1 - certain
        return -(J @ step), by_chance


def _bounded(Q: Tensor, least: Tensor) -> Tensor:
    """Return Q where it is above a bound from below, and else the nearest that is.

    Where rows decide little and a deviation is large, the difference that Q is cancels.
    """
    more = Q - least
    slack = 1e-12 * Q.diagonal(dim1=1, dim2=2).sum(1) + torch.finfo(Q.dtype).tiny
    bad = torch.linalg.cholesky_ex(more + slack[:, None, None] * torch.eye(Q.shape[1]).to(Q))[1] > 0
    if bool(bad.any()):
        bends, V = torch.linalg.eigh(more[bad])
        Q = Q.clone()
        Q[bad] = least[bad] + (V * bends.clamp_min(0)[:, None]) @ V.mT
    return Q


@lru_cache
def nodes(p: int) -> tuple[Tensor, Tensor]:
    """Return the nodes of a product rule, (K, p), and log ω_k + ‖t_k‖²/2."""
    t, weight = np.polynomial.hermite_e.hermegauss(NODES[p])
    log = np.log(weight / weight.sum()) + t * t / 2
    points, logs = (np.array(np.meshgrid(*[one] * p)).reshape(p, -1) for one in (t, log))
    return torch.from_numpy(points.T.copy()), torch.from_numpy(logs.sum(0))
