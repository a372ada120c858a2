r"""The clients' own modes around x, and what strengths by evidence need of them (`ModesAt`).

In v = T^{-½}(u − x), with S = T^½ (0 for a shared coefficient), client i minimises
Σ_rows ℓ(⟨a, x + S v⟩, y)/s + ½‖v‖². With H_i = RᵀR its Hessian in u, the minimum is a function of
x with gradient Aᵀℓ'/s and Hessian Q_i, in features where a client has many rows, and else in
samples (K = R S):

    M = I + S H S,   J = M⁻¹S H,    Q = H − H S J
    G = I + K Kᵀ,    J = KᵀG⁻¹R,    Q = RᵀG⁻¹R,    log det G = log det M
    1 − V_jj/τ_j = S_j J_jj,   (B C Bᵀ)_jj/τ_j = (J C Jᵀ)_jj,   v moves by −J δ with x by δ
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from scaffpd.federation.modes import ModesAt
from scaffpd.federation.questions import Vectors
from scaffpd.models.execution import parallel_map
from scaffpd.models.glm import LinearOracle
from scaffpd.models.newton import LossHessian
from scaffpd.models.quadratic import QuadraticOracle
from scaffpd.models.samples import PaddedBlock, StackedSamples
from scaffpd.models.weighted_loss import Weighted

NEWTON = 50
SMALL = 32  # columns up to which a product is faster as a whole
THIRD = 1e-4  # step of the difference that third derivatives of a loss are taken by
HALVINGS = 30
# Decrease of a Newton step, relative to the minimum, that rounding may hide.
ROUNDING = 1e-12
# Numbers of all clients' matrices up to which they are stored between two questions.
STORED = 2**27
# Blocks whose sums of matrices are in memory at a time.
TOGETHER = 16


class ManyRows:
    """A client's curvature in the space of features: H (n, q, q)."""

    def __init__(self, H: Tensor, S: Tensor) -> None:
        self.S = S
        self.H = H
        M = S[:, None] * H * S
        M.diagonal(dim1=1, dim2=2).add_(1)
        self.L = torch.linalg.cholesky_ex(M)[0]

    def solve(self, B: Tensor) -> Tensor:
        """Return M⁻¹B."""
        return torch.cholesky_solve(B, self.L)

    @cached_property
    def change(self) -> Tensor:
        """J = M⁻¹SH."""
        return torch.cholesky_solve(self.S[:, None] * self.H, self.L)

    def curvature(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i Q_i."""
        w = weights[:, None, None]
        SH = (w * self.S[:, None] * self.H).flatten(0, 1)
        return (w * self.H).sum(0) - SH.mT @ self.change.flatten(0, 1)

    def spread(self, C: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change of v, (n, q, r), and 1 − (V + BCBᵀ)_jj/τ_j, (n, q)."""
        J = self.change
        chance = (_turned(J, C) * J).sum(2)
        return -(J @ step), self.S * J.diagonal(dim1=1, dim2=2) - chance


class FewRows:
    """A client's curvature in the space of samples: R (n, m, q) with H = RᵀR."""

    def __init__(self, R: Tensor, S: Tensor) -> None:
        self.R = R
        self.K = R * S
        G = self.K @ self.K.mT
        G.diagonal(dim1=1, dim2=2).add_(1)
        self.L = torch.linalg.cholesky_ex(G)[0]

    def solve(self, B: Tensor) -> Tensor:
        """Return M⁻¹B = B − KᵀG⁻¹KB."""
        return B - self.K.mT @ torch.cholesky_solve(self.K @ B, self.L)

    @property
    def change(self) -> Tensor:
        """J = KᵀG⁻¹R."""
        return self.K.mT @ torch.cholesky_solve(self.R, self.L)

    def curvature(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i Q_i."""
        Z: Tensor = torch.linalg.solve_triangular(self.L, self.R, upper=False)
        return (weights[:, None, None] * Z).flatten(0, 1).mT @ Z.flatten(0, 1)

    def spread(self, C: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change of v, (n, q, r), and 1 − (V + BCBᵀ)_jj/τ_j, (n, q)."""
        Z = torch.cholesky_solve(self.R, self.L)
        chance = (_turned(Z, C) @ Z.mT) @ self.K
        own = torch.cholesky_solve(self.K, self.L)
        return -(self.K.mT @ (Z @ step)), ((own - chance) * self.K).sum(1)


class ClientModes:
    """All clients at one x, τ and s, in double precision."""

    ahead: Tensor

    def __init__(self, inner: LinearOracle, at: ModesAt, start: ClientModes | None) -> None:
        few = inner.compressed if isinstance(inner, QuadraticOracle) else None
        self.rows: StackedSamples = inner.rows if few is None else few.fine
        self.loss = inner.loss
        self.outputs = inner.outputs
        self.coupled = at.outputs
        self.scale = at.scale
        self.close = at.close
        self.sizes = inner.rows.layout.sizes.double()
        if isinstance(inner.loss, Weighted):  # whole numbers count equal rows
            self.sizes = torch.tensor(inner.loss.totals).to(self.sizes)
        self.S = at.tau.double().sqrt().repeat_interleave(at.outputs)
        self.X = at.x.double().view(len(at.tau), -1)
        n = len(self.sizes)
        q = len(self.S)
        self.v = self.X.new_zeros(n, q, self.X.numel() // q)
        if start is not None:  # the same u_i, whose matrices are not needed any more
            near = torch.where(self.S > 0, start.S / self.S, 0)
            self.v = start.ahead * near[:, None]
            start.release()
        self.ahead = self.v  # after the Newton step of x, once that is known
        self.means = at.means
        self.shift = torch.zeros_like(self.v)  # from modes to means
        self.value = self.v.new_zeros(n, 3)
        self.gradient = self.v.new_zeros(n, self.X.numel())
        self._stored: dict[int | None, ManyRows | FewRows] | None = {}
        if sum(min(m, q) for m in self.rows.layout.lengths) * q * 3 > STORED:
            self._stored = None
        parallel_map(self._solve, self.rows.blocks, self.v.device)
        if few is not None:
            self.value[:, 0] += few.constant * self.sizes / self.scale
        self.value[:, 2] = self.sizes

    def release(self) -> None:
        """Free the matrices."""
        self._stored = None

    def _solve(self, block: PaddedBlock) -> None:
        """Find u_i by Newton's method."""
        who = block.clients
        A, y, weight = self._rows(block)
        z = A @ self.X
        v = self.v[who]

        def value(v: Tensor) -> tuple[Tensor, Tensor]:
            p = z + A @ (self.S[:, None] * v).view(len(A), -1, self.outputs)
            penalty = v.square().sum((1, 2)) / 2
            return (self.loss.value(p, y) * weight).sum(1) + penalty, p

        now, p = value(v)
        for _ in range(NEWTON):
            r = weight[..., None] * self.loss.residual(p, y)
            gradient = self.S[:, None] * (A.mT @ r).view(v.shape) + v
            near = self._factor(A, y, weight, p)
            step = near.solve(gradient)
            slope = (gradient * step).sum((1, 2))
            # A client that is done stays where it is: its answer does not depend on the others.
            done = ~(slope > self.close)
            if bool(done.all()):
                break
            length = torch.where(done, 0.0, 1.0)
            for _ in range(HALVINGS):
                ahead = v - length[:, None, None] * step
                new, p = value(ahead)
                down = done | (new <= now - 1e-4 * length * slope) | (slope < ROUNDING * now.abs())
                if bool(down.all()):
                    break
                length = torch.where(down, length, length / 2)
            v = ahead
            now = new
        self.v[who] = v
        self.gradient[who] = (A.mT @ r).flatten(1)
        self.value[who, 0] = now
        if self.means:
            self._mean(block, A, y, weight, p, near)
        copies = self.v.shape[2]
        self.value[who, 1] = 2 * copies * near.L.diagonal(dim1=1, dim2=2).log().sum(1)
        if self._stored is not None:
            self._stored[block.number] = near

    def _mean(
        self,
        block: PaddedBlock,
        A: Tensor,
        y: Tensor,
        weight: Tensor,
        p: Tensor,
        near: ManyRows | FewRows,
    ) -> None:
        r"""Go from modes to means, and from Φ to Φ + ½ log det M.

        With k = ½ Σ_rows ℓ‴ (aᵀVa) a, half of the gradient of the determinant, the mean of u is its
        mode − Vk to first order (Tierney & Kadane 1986), and the gradient in x grows by
        (I − B)ᵀk = k − HSM⁻¹Sk. Modes of labels are too near to x, and x to 0.
        """
        who = block.clients
        up, down = (self.loss.bends(p + e, y)[..., 0] for e in (THIRD, -THIRD))
        scaled = A * self.S
        leverage = (scaled * near.solve(scaled.mT).mT).sum(2)
        k = A.mT @ (weight * (up - down) / (4 * THIRD) * leverage)[..., None]
        z = near.solve(self.S[:, None] * k)
        curved = weight * self.loss.bends(p, y)[..., 0]
        pulled = A.mT @ (curved[..., None] * (scaled @ z))
        self.shift[who] = -z
        self.gradient[who] += (k - pulled)[..., 0]

    def _rows(self, block: PaddedBlock) -> tuple[Tensor, Tensor, Tensor]:
        """Return features, targets and the weights n_i·share/s of a block's rows."""
        A, y = self.rows.of(block)
        weight = block.weight.double() * (self.sizes[block.clients] / self.scale)[:, None]
        return A.double(), y.double() if y.is_floating_point() else y, weight

    def _factor(self, A: Tensor, y: Tensor, weight: Tensor, p: Tensor) -> ManyRows | FewRows:
        if self.coupled > 1:
            y = self.loss.dense(y, self.outputs, A.dtype)
            return ManyRows(LossHessian(self.loss, A, y, p, weight).matrix(), self.S)
        R = A * (weight * self.loss.bends(p, y)[..., 0]).sqrt()[..., None]
        return FewRows(R, self.S) if R.shape[1] < R.shape[2] else ManyRows(_gram(R), self.S)

    def _near(self, block: PaddedBlock) -> ManyRows | FewRows:
        """Return the matrices of a block, at its u_i if they are not stored."""
        if self._stored is not None:
            return self._stored[block.number]
        A, y, weight = self._rows(block)
        u = self.X + (self.S[:, None] * self.v[block.clients]).view(len(A), *self.X.shape)
        return self._factor(A, y, weight, A @ u)

    def modes(self) -> dict[str, Vectors]:
        """Return the parts of the answer to `ModesAt`."""
        q = len(self.S)
        eye = torch.eye(len(self.sizes), dtype=torch.float64, device=self.v.device)
        return {
            "value": _held(self.value),
            "gradient": _held(self.gradient),
            "curvature": Vectors(
                self._curvature,
                lambda: torch.stack([self._curvature(one) for one in eye]),
                shape=(q, q),
                double_weights=True,
            ),
        }

    def _curvature(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i Q_i."""
        q = len(self.S)
        total = self.v.new_zeros(q, q)
        parts = dict[int | None, Tensor]()

        def work(block: PaddedBlock) -> None:
            parts[block.number] = self._near(block).curvature(weights[block.clients])

        blocks = self.rows.blocks
        for k in range(0, len(blocks), TOGETHER):  # always in the same order
            some = blocks[k : k + TOGETHER]
            parallel_map(work, some, self.v.device)
            for block in some:
                total += parts.pop(block.number)
        return total

    def spread(self, C: Tensor, step: Tensor) -> Vectors:
        """Return the answer to `ModeSpread`; the u_i take the step."""
        moved = torch.empty_like(self.v)
        chance = self.v.new_empty(self.v.shape[:2])
        step = step.view(len(C), -1)

        def work(block: PaddedBlock) -> None:
            who = block.clients
            change, chance[who] = self._near(block).spread(C, step)
            moved[who] = self.v[who] + change

        parallel_map(work, self.rows.blocks, self.v.device)
        self.ahead = moved
        squares = (moved + self.shift).square().sum(2)
        return _held(torch.stack([squares, self.v.shape[2] * chance], 1))

    def own(self, C: Tensor, step: Tensor, L: Tensor) -> Vectors:
        """Return the answer to `OwnCoefficients`."""
        q = len(self.S)
        found = self.v.new_empty(len(self.sizes), 2, q)
        eye = torch.eye(q, dtype=torch.float64, device=self.v.device)

        def work(block: PaddedBlock) -> None:
            who = block.clients
            J = self._near(block).change
            K = eye - self.S[:, None] * J
            moved = self.v[who] + self.shift[who] - J @ step.view(q, -1)
            found[who, 0] = (self.X + step.view(q, -1) + self.S[:, None] * moved)[..., 0] @ L.mT
            V = K * self.S.square()  # (H + T⁻¹)⁻¹ = (I − SJ)T
            found[who, 1] = ((L @ (V + K @ C @ K.mT)) * L).sum(2)

        parallel_map(work, self.rows.blocks, self.v.device)
        return _held(found)


def _gram(R: Tensor) -> Tensor:
    """Return R_iᵀR_i; one of the two blocks off the diagonal is the other's transpose."""
    half = R.shape[2] // 2
    if half < SMALL:
        return R.mT @ R
    H = R.new_empty(len(R), R.shape[2], R.shape[2])
    left = R[..., :half]
    H[:, :half, :half] = left.mT @ left
    H[:, half:] = R[..., half:].mT @ R
    H[:, :half, half:] = H[:, half:, :half].mT
    return H


def _turned(Z: Tensor, C: Tensor) -> Tensor:
    """Return Z_i C by one product; a batched one would copy C for every client."""
    return (Z.reshape(-1, Z.shape[2]) @ C).view(Z.shape)


def _held(each: Tensor) -> Vectors:
    """Return a handle on one tensor per client, (N, …)."""

    def total(weights: Tensor) -> Tensor:
        return (weights @ each.flatten(1)).view(each.shape[1:])

    return Vectors(total, lambda: each, shape=tuple(each.shape[1:]), double_weights=True)
