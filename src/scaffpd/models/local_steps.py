r"""The local steps of linear models, all clients at once: hand-batched, in place, with the data in the cache.

A displacement d_i = x − u_i is held output by output, D (n, k, features), because batched BLAS is fastest (by up to six
times, for matrices this small) at products of row-major matrices from the left:

    predictions  A_i u_i = A_i (x − Dᵀ),       gradients  A_iᵀ (w ∘ r) = ((w ∘ r)ᵀ A_i)ᵀ.

A piece of work is a few clients whose samples fit into a core's cache: they make all their J steps before the next
piece is looked at, so that the samples come from memory once and not J times. Pieces are independent of each other, and
each core takes the next one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scaffpd.models.losses import Loss


class Surroundings:
    """Some clients around x: how their gradients change, A_iᵀ W_i (r(x − d) − r(x)), with buffers that are reused.

    Args:
        loss: ℓ.
        A: (n, m, features), the samples.
        y: (n, m, ·), the targets.
        z: (n, m, k), the predictions at x.
        r: (n, m, k), the derivatives ∂ℓ/∂z there.
        weight: (n, m), W_i.
    """

    def __init__(self, loss: Loss, A: Tensor, y: Tensor, z: Tensor, r: Tensor, weight: Tensor) -> None:
        self.loss, self.A, self.y = loss, A, loss.dense(y, z.shape[2], A.dtype)
        self.z, self.r = z.mT.contiguous(), r.mT.contiguous()
        self.weight, self.products = weight[:, None], Products(A, z.shape[2])

    def change(self, D: Tensor) -> Tensor:
        """W (r(x − D) − r(x)), (n, k, m), for D (n, k, features)."""
        z = torch.sub(self.z, self.products.along(D), out=self.products.out)
        return self.loss.residual(z.mT, self.y).mT.sub_(self.r).mul_(self.weight)


class Products:
    """D A_iᵀ, (n, k, m), in buffers that the next product overwrites.

    One row goes from the left as it is; several are turned, which costs less than a product with Aᵀ does.
    """

    def __init__(self, A: Tensor, k: int) -> None:
        n, m, features = A.shape
        self.A, self.out = A, A.new_empty(n, k, m)
        self.own = A.new_empty((n, 1, features) if k == 1 else (n, features, k))
        self.turned = A.new_empty(n, m, k if k > 1 else 0)

    def along(self, D: Tensor) -> Tensor:
        """D A_iᵀ for D (n, k, features); a view where k > 1."""
        if D.shape[1] == 1:
            return torch.bmm(D, self.A.mT, out=self.out)
        return torch.bmm(self.A, self.own.copy_(D.mT), out=self.turned).mT

    def at(self, X: Tensor, D: Tensor) -> Tensor:
        """(X − D) A_iᵀ for X (k, features)."""
        if D.shape[1] == 1:
            return torch.bmm(torch.sub(X, D, out=self.own), self.A.mT, out=self.out)
        torch.bmm(self.A, torch.sub(X.mT, D.mT, out=self.own), out=self.turned)
        return self.out.copy_(self.turned.mT)


def full_steps(near: Surroundings, push: Tensor, keep: Tensor, steps: int) -> Tensor:
    """J steps d ← (1 − η(l2 + μ)) d + η c + A_iᵀ (η/m_i)(r(x − d) − r(x)) from d = 0, (n, k, features).

    Args:
        near: the clients, with weights η/m_i.
        push: η c, (n, k, features): c is the first corrected gradient g_i(x) − c_i + c.
        keep: 1 − η(l2 + μ), (n, 1, 1).
        steps: J.
    """
    D = push.clone(memory_format=torch.contiguous_format)
    for _ in range(steps - 1):
        change = near.change(D)
        torch.addcmul(push, keep, D, out=D).baddbmm_(change, near.A)
    return D


def proximal_steps(near: Surroundings, c: Tensor, stay: Tensor, rate: Tensor, momentum: Tensor, steps: int) -> Tensor:
    """J accelerated steps d⁺ = e + D⁻¹(c + ∇f_i(x − e) − ∇f_i(x) − βD e)/(L_i + β),  e = d + momentum (d − d_prev).

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
        gradient = torch.addcmul(c, stay, e, value=-1).baddbmm_(near.change(e), near.A)
        last, d = d, torch.addcmul(e, rate, gradient)
        e = d + momentum * (d - last)
    return d
