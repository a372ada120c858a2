r"""Personal models by Newton's method: v of `envelope.py`, for any loss and personal columns P,

    min_v (1/m_i) Σ_j ℓ(z_j + ⟨a_j, v⟩, y_j) + ((l2 + γ_i)/2)‖v‖²,    z = A_i D_i x.

A step solves (A_PᵀWA_P + l2 + γ_i) s = ∇_v by Cholesky, in features or in samples, or by
conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.models.envelope import Anchor, PersonalPoint
from scaffpd.models.layout import PaddedBlock
from scaffpd.models.losses import Loss, Squared
from scaffpd.models.numerics import SAFE, gamma, norm_above, regularised
from scaffpd.models.point import steepness
from scaffpd.models.quadratic import Compressed
from scaffpd.models.samples import StackedSamples, product
from scaffpd.models.threads import parallel_map

DENSE = 300  # most unknowns for Newton steps by Cholesky; above that, by conjugate gradients
TOGETHER = 2**24  # numbers in the matrices of clients that are solved together
NEWTON = 60
HALVINGS = 40


class LossHessian:
    """Hessian AᵀWA of n clients' mean losses, for samples A, predictions z and targets y."""

    def __init__(self, loss: Loss, A: Tensor, y: Tensor, z: Tensor, weight: Tensor) -> None:
        self.loss = loss
        self.A = A
        self.y = y
        self.z = z
        self.weight = weight
        self.even = z.shape[2] == 1 or isinstance(loss, Squared)  # W is a number for every sample

    def bent(self, T: Tensor) -> Tensor:
        """Return W T for T (n, m, k, c)."""
        return self.weight[..., None, None] * self.loss.bend(self.z, self.y, T)

    def times(self, V: Tensor) -> Tensor:
        """Return AᵀWA V for V (n, features, k, c)."""
        T = (self.A @ V.flatten(2)).view(*self.z.shape, V.shape[3])
        return (self.A.mT @ self.bent(T).flatten(2)).view_as(V)

    def solver(self, e: Tensor, goal: Tensor | float = 1e-10) -> Callable[[Tensor], Tensor]:
        """Return B ↦ (AᵀWA + diag(e))⁻¹B, exact or up to a goal.

        e is (n, features or 1, 1), B (n, features, k, c).
        """
        n, m, features = self.A.shape
        k = self.z.shape[2]
        e = e.expand(n, features, 1)
        if self.even and min(m, features) <= 4 * DENSE:
            R = self.A * (self.weight * self.loss.bends(self.z, self.y)[..., 0]).sqrt()[..., None]
            solve = regularised(R, e)
            return lambda B: solve(B.flatten(2)).view(B.shape)
        if features * k <= DENSE:
            H = self.matrix() + torch.diag_embed(e.expand(n, features, k).reshape(n, -1))
            L = torch.linalg.cholesky_ex(H)[0]
            return lambda B: torch.cholesky_solve(B.reshape(*H.shape[:2], -1), L).view(B.shape)
        return lambda B: self._conjugate(e[..., None], B, goal)

    def matrix(self) -> Tensor:
        """Return AᵀWA as (n, features·k, features·k), output by output."""
        (n, _, features), k = self.A.shape, self.z.shape[2]
        W = self.bent(
            torch.eye(k, dtype=self.z.dtype, device=self.z.device).expand(*self.z.shape, k)
        )
        H = self.A.new_empty(n, features, k, features, k)
        for a in range(k):
            for b in range(a + 1):
                H[:, :, a, :, b] = (self.A * W[..., a, b, None]).mT @ self.A
                H[:, :, b, :, a] = H[:, :, a, :, b]
        return H.view(n, features * k, features * k)

    def _conjugate(self, e: Tensor, B: Tensor, goal: Tensor | float) -> Tensor:
        """Solve by conjugate gradients, for all clients and columns at once."""

        def inner(a: Tensor, b: Tensor) -> Tensor:
            return (a * b).sum((1, 2), keepdim=True)

        solution = torch.zeros_like(B)
        left = B.clone()
        ahead = left / e
        size = inner(left, left / e)
        goal = goal**2 * size
        for _ in range(10 * DENSE):
            if bool((size <= goal).all()):
                break
            turned = self.times(ahead) + e * ahead
            bottom = inner(ahead, turned)
            step = torch.where(bottom > 0, size / torch.where(bottom > 0, bottom, 1), 0)
            solution = solution + step * ahead
            left = left - step * turned
            last = size
            size = inner(left, left / e)
            ahead = (
                left / e + torch.where(last > 0, size / torch.where(last > 0, last, 1), 0) * ahead
            )
        return solution


class NewtonPoint(PersonalPoint):
    """Personal models for any loss and columns: v by Newton's method from `start` (u = x)."""

    def __init__(
        self,
        rows: StackedSamples,
        loss: Loss,
        anchor: Anchor,
        x: Tensor,
        outputs: int,
        start: Tensor | None = None,
        compressed: Compressed | None = None,
        minibatch: bool = False,
    ) -> None:
        fine = None if x.ndim > 1 or minibatch else rows if compressed is None else compressed.fine
        super().__init__(rows, loss, anchor, x, outputs, fine)
        first = ((1 - anchor.factors) * self.X).expand(len(anchor.gamma), -1, outputs)
        self.v = (anchor.part(first.mT).mT if start is None else start).clone()
        self.compressed = compressed
        self.predictions, self.off = self.shrunk(), torch.empty_like(self.tie.gamma)
        self.z, values = self.predictions.to(x.dtype, copy=True), torch.empty_like(self.tie.gamma)

        def work(block: PaddedBlock) -> None:
            A, y = rows.of(block)
            who = block.clients
            own = anchor.part(A)
            near = CorrectionProblem(
                loss, own, y, block.of(self.z), block.weight, anchor.stiffness[who]
            )
            v, p, value, off = near.solve(self.v[who])
            self.v[who] = v
            block.put(self.z, p)
            if fine is not None and x.dtype != torch.float64:
                p, value, off = self._again(block, v.double())
            block.put(self.predictions, p)
            values[who] = value
            self.off[who] = off

        parallel_map(work, portions(rows, self.v[0].numel()), x.device)
        self.slopes = loss.residual(self.predictions, rows.y if fine is None else fine.exact[0])
        self.losses = values + (0 if compressed is None else compressed.constant) + self.ridge()

    def _again(self, block: PaddedBlock, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return predictions, value and the remaining gradient at v, in double precision."""
        assert self.fine is not None
        y, share = self.fine.exact
        A = self.tie.part(self.fine.of(block)[0].double())
        weight = block.of(share) * (block.weight > 0)
        stiff = self.tie.stiffness[block.clients]
        near = CorrectionProblem(
            self.loss, A, block.of(y), block.of(self.predictions), weight, stiff
        )
        value, p = near.value(v)
        return p, value, near.gradient(v, p)[0].flatten(1).norm(dim=1)

    def bend(self, T: Tensor) -> Tensor:
        """Return the stack m_i S_i T_i: m(W T − W A_P (A_PᵀWA_P + l2 + γ)⁻¹A_PᵀW T)."""
        out = torch.zeros_like(T)

        def work(block: PaddedBlock) -> None:
            A, bowl = self._bowl(block)
            bent = bowl.bent(block.of(T))
            solve = bowl.solver(self.anchor.stiffness[block.clients][:, None, None])
            own = (A.mT @ bent.flatten(2)).view(len(A), A.shape[2], *T.shape[1:])
            less = bowl.bent((A @ solve(own).flatten(2)).view_as(bent))
            weight = block.weight[..., None, None]
            block.put(out, (bent - less) / torch.where(weight > 0, weight, 1))

        parallel_map(work, portions(self.rows, self.v[0].numel()), T.device)
        return out

    def _bowl(self, block: PaddedBlock) -> tuple[Tensor, LossHessian]:
        rows, y = self.rows.of(block)
        A = self.anchor.part(rows)
        return A, LossHessian(self.loss, A, y, block.of(self.z), block.weight)

    def diagonals(self) -> Tensor:
        """Return diag H_i: D²(diag AᵀWA − rows of (AᵀWA_P)(…)⁻¹(A_PᵀWA)) + ridges."""
        if not isinstance(self.loss, Squared):
            raise InputError(
                "diagonal-unknown",
                "The diagonal of a personal Hessian is known for squared loss only; take D = I.",
            )
        out = self.x.new_empty(len(self.losses), self.rows.A.shape[1], 1)
        for block in self.rows.blocks:
            A = self.rows.of(block)[0]
            own = self._bowl(block)
            W = 2 * block.weight[..., None]
            cross = own[0].mT @ (W * A)  # (n, personal, features)
            solve = own[1].solver(self.anchor.stiffness[block.clients][:, None, None])
            less = (cross * solve(cross[:, :, None])[:, :, 0]).sum(1)
            out[block.clients] = ((W * A.square()).sum(1) - less)[..., None]
        each = self.anchor.factors**2 * out + self.anchor.ridges
        return each.expand(-1, -1, self.outputs).flatten(1)

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the errors of arithmetic, where rows multiply x and v, and of Newton's method."""
        length = norm_above(self.v.flatten(1), 1)
        size = norm_above(self.x, 0) + length
        stiff = self.tie.stiffness
        loss, gradient = self.enveloped(size)
        off = SAFE * self.off + gradient + gamma(self.v[0].numel() + 16) * stiff * length
        if self.compressed is not None:  # like `CompressedPoint.rounding`, at u
            more = self.compressed.off(size)
            loss = loss + gamma(self.outputs**2 + 8) * self.compressed.constant + more[0]
            gradient = gradient + more[1]
            off = off + more[1]
        steep = (
            steepness(self.loss, self.fine) * self.fine.levers[2] if self.fine is not None else off
        )
        seen = (
            2 * self.tie.keep if self.anchor.own is None else 2 + steep / stiff
        )  # shared features see v by A
        return loss + SAFE * off.square() / (2 * stiff), gradient + SAFE * seen * off


class CorrectionProblem:
    """Inner problem min_v Σ_j w_j ℓ(z_j + ⟨a_j, v⟩, y_j) + (stiffness/2)‖v‖² of a few clients."""

    def __init__(
        self, loss: Loss, A: Tensor, y: Tensor, z: Tensor, weight: Tensor, stiffness: Tensor
    ) -> None:
        self.loss = loss
        self.A = A
        self.y = loss.dense(y, z.shape[2], A.dtype)
        self.z = z
        self.weight = weight
        self.targets = y
        self.stiff = stiffness[:, None, None]
        self.lengths = A.norm(dim=2)

    def value(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective and the predictions."""
        p = self.z + product(self.A, v)
        return (self.loss.value(p, self.targets) * self.weight).sum(1) + (
            self.stiff * v.square()
        ).sum((1, 2)) / 2, p

    def gradient(self, v: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the derivative in v, and the weighted residuals."""
        r = self.weight[..., None] * self.loss.residual(p, self.y)
        return product(self.A.mT, r) + self.stiff * v, r

    def solve(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return v, predictions, value and gradient norm, by Newton steps, halved to descend.

        If the predicted decrease of a step is below rounding, take it as it is; two such steps are
        enough.
        """
        (value, p), epsilon = self.value(v), torch.finfo(v.dtype).eps
        whole = torch.zeros_like(value, dtype=torch.long)
        first = None
        for k in range(NEWTON + 1):
            gradient, r = self.gradient(v, p)
            size = gradient.flatten(1).norm(dim=1)
            terms = (self.lengths * r.norm(dim=2)).sum(1) + self.stiff[:, 0, 0] * v.flatten(1).norm(
                dim=1
            )
            if k == NEWTON or bool(
                ((size <= epsilon * terms) | (whole >= 2) | ~torch.isfinite(size)).all()
            ):
                break
            first = size if first is None else first
            goal = (size / first.clamp_min(torch.finfo(v.dtype).tiny)).clamp(1e-10, 0.1)[
                :, None, None, None
            ]
            step = LossHessian(self.loss, self.A, self.y, p, self.weight).solver(self.stiff, goal)(
                gradient[..., None]
            )[..., 0]
            slope = (gradient * step).sum((1, 2))
            near = slope <= max(1e-9, 100 * epsilon) * (1 + value.abs())
            whole += near
            v, p, value = self._descend(v, value, step, torch.where(near, -torch.inf, slope))
        return v, p, value, size

    def _descend(
        self, v: Tensor, value: Tensor, step: Tensor, slope: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        length = torch.ones_like(value)
        for _ in range(HALVINGS):
            ahead = v - length[:, None, None] * step
            new, p = self.value(ahead)
            descends = new <= value - 1e-4 * length * slope
            if bool(descends.all()):
                break
            length = torch.where(descends, length, length / 2)
        return ahead, p, new


def portions(rows: StackedSamples, unknowns: int) -> list[PaddedBlock]:
    """Return the blocks of rows, cut so that matrices of all clients' unknowns are small."""
    n = max(1, TOGETHER // unknowns**2)
    return [
        block
        if len(block.clients) <= n
        else PaddedBlock(block.clients[k : k + n], block.rows[k : k + n], block.weight[k : k + n])
        for block in rows.blocks
        for k in range(0, len(block.clients), n)
    ]
