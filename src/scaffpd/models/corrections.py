"""The inner problem of personal models: what a client adds to the shared one."""

from __future__ import annotations

import torch
from torch import Tensor

from scaffpd.descent import newton
from scaffpd.models.cells import Cells, along, back
from scaffpd.models.curvature import LossHessian
from scaffpd.models.losses import Loss


class CorrectionProblem:
    """Inner problem min_v Σ_j w_j ℓ(z_j + ⟨a_j, v⟩, y_j) + ½‖v‖² of a few clients."""

    def __init__(self, loss: Loss, A: Tensor | Cells, y: Tensor, z: Tensor, weight: Tensor) -> None:
        self.loss = loss
        self.A = A
        self.y = loss.dense(y, z.shape[2], z.dtype)
        self.z = z
        self.weight = weight
        self.targets = y

    def value(self, v: Tensor) -> tuple[Tensor, Tensor]:
        p = self.z + along(self.A, v)
        mean = (self.loss.value(p, self.targets) * self.weight).sum(1)
        return mean + v.square().sum((1, 2)) / 2, p

    def gradient(self, v: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        r = self.weight[..., None] * self.loss.residual(p, self.y)
        return back(self.A, r) + v, r

    def solve(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return v, predictions, value and gradient norm, by Newton's method.

        A problem is done, too, where the gradient is the rounding of its terms.
        """
        A = self.A
        assert isinstance(A, Tensor)
        number = torch.finfo(v.dtype)
        lengths = A.norm(dim=2)
        first: Tensor | None = None

        def step(v: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal first
            gradient, r = self.gradient(v, p)
            size = gradient.flatten(1).norm(dim=1)
            terms = (lengths * r.norm(dim=2)).sum(1) + v.flatten(1).norm(dim=1)
            going = (size > number.eps * terms) & torch.isfinite(size)
            if not bool(going.any()):
                return v, torch.zeros_like(size)
            first = size if first is None else first
            goal = (size / first.clamp_min(number.tiny)).clamp(1e-10, 0.1)
            bowl = LossHessian(self.loss, A, self.y, p, self.weight)
            s = bowl.solver(goal=goal[:, None, None, None])(gradient[..., None])[..., 0]
            return s, torch.where(going, (gradient * s).sum((1, 2)), 0.0)

        v, value, p = newton(v, self.value, step)
        return v, p, value, self.gradient(v, p)[0].flatten(1).norm(dim=1)
