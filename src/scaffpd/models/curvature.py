r"""Curvature of n clients' mean losses, H = AᵀWA, plus the identity in scaled columns.

With S = T^½ (0 for a shared coefficient), in features where a client has many rows, and else in
samples (H = RᵀR, K = R S):

    M = I + S H S = LLᵀ,   Z = L⁻¹S H,   J = M⁻¹S H = L⁻ᵀZ,   Q = H − H S J = H − ZᵀZ
    G = I + K Kᵀ,    J = KᵀG⁻¹R,    Q = RᵀG⁻¹R,    log det G = log det M
    1 − V_jj/τ_j = S_j J_jj,   (B C Bᵀ)_jj/τ_j = (J C Jᵀ)_jj,   v moves by −J δ with x by δ
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from scaffpd.models.losses import Loss

DENSE = 300  # most unknowns for Newton steps by Cholesky; above that, by conjugate gradients


class ManyRows:
    """A client's curvature in the space of features: H (n, q, q); S is (1 or n, q)."""

    def __init__(self, H: Tensor, S: Tensor) -> None:
        self.S = S
        self.H = H
        M = S[..., None] * H * S[:, None]
        M.diagonal(dim1=1, dim2=2).add_(1)
        self.L = torch.linalg.cholesky_ex(M)[0]

    def solve(self, B: Tensor) -> Tensor:
        return torch.cholesky_solve(B, self.L)

    @cached_property
    def half(self) -> Tensor:
        half: Tensor = torch.linalg.solve_triangular(
            self.L, self.S[..., None] * self.H, upper=False
        )
        return half

    @cached_property
    def change(self) -> Tensor:
        J: Tensor = torch.linalg.solve_triangular(self.L.mT, self.half, upper=True)
        return J

    @property
    def covariance(self) -> Tensor:
        """M⁻¹ = T^{-½}VT^{-½}."""
        return torch.cholesky_inverse(self.L)

    @property
    def freedom(self) -> Tensor:
        return 1 - self.covariance.diagonal(dim1=1, dim2=2)

    def each(self) -> Tensor:
        """Return Q_i."""
        return self.H - self.half.mT @ self.half

    def curvature(self, weights: Tensor) -> Tensor:
        w = weights[:, None, None]
        return (w * self.H).sum(0) - (w * self.half).flatten(0, 1).mT @ self.half.flatten(0, 1)

    def spread(self, C: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Return the change of v, (n, q, r), and 1 − (V + BCBᵀ)_jj/τ_j, (n, q)."""
        J = self.change
        chance = (_turned(J, C) * J).sum(2)
        return -(J @ step), self.S * J.diagonal(dim1=1, dim2=2) - chance


class FewRows:
    """A client's curvature in the space of samples: R (n, m, q) with H = RᵀR; S is (1 or n, q)."""

    def __init__(self, R: Tensor, S: Tensor) -> None:
        self.R = R
        self.K = R * S[:, None]
        G = self.K @ self.K.mT
        G.diagonal(dim1=1, dim2=2).add_(1)
        self.L = torch.linalg.cholesky_ex(G)[0]

    def solve(self, B: Tensor) -> Tensor:
        return B - self.K.mT @ torch.cholesky_solve(self.K @ B, self.L)

    @property
    def change(self) -> Tensor:
        return self.K.mT @ torch.cholesky_solve(self.R, self.L)

    @property
    def covariance(self) -> Tensor:
        """M⁻¹ = I − KᵀG⁻¹K."""
        eye = torch.eye(self.K.shape[2]).to(self.K)
        return eye - self.K.mT @ torch.cholesky_solve(self.K, self.L)

    def each(self) -> Tensor:
        """Return Q_i."""
        return self.R.mT @ torch.cholesky_solve(self.R, self.L)

    @property
    def freedom(self) -> Tensor:
        return (torch.cholesky_solve(self.K, self.L) * self.K).sum(1)

    def curvature(self, weights: Tensor) -> Tensor:
        Z: Tensor = torch.linalg.solve_triangular(self.L, self.R, upper=False)
        return (weights[:, None, None] * Z).flatten(0, 1).mT @ Z.flatten(0, 1)

    def spread(self, C: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        Z = torch.cholesky_solve(self.R, self.L)
        chance = (_turned(Z, C) @ Z.mT) @ self.K
        return -(self.K.mT @ (Z @ step)), self.freedom - (chance * self.K).sum(1)


class LossHessian:
    """Hessian AᵀWA of n clients' mean losses, for samples A, predictions z and targets y."""

    def __init__(self, loss: Loss, A: Tensor, y: Tensor, z: Tensor, weight: Tensor) -> None:
        self.loss = loss
        self.A = A
        self.y = y
        self.z = z
        self.weight = weight
        self.even = z.shape[2] == 1 or loss.even  # W is a number for every sample

    def bent(self, T: Tensor) -> Tensor:
        return self.weight[..., None, None] * self.loss.bend(self.z, self.y, T)

    def times(self, V: Tensor) -> Tensor:
        """Return AᵀWA V for V (n, features, k, c)."""
        T = (self.A @ V.flatten(2)).view(*self.z.shape, V.shape[3])
        return (self.A.mT @ self.bent(T).flatten(2)).view_as(V)

    def factor(self, S: Tensor) -> ManyRows | FewRows:
        """Return S Aᵀ W A S + I in the smaller of rows and features, for S (1 or n, q).

        q are the features, or the features of all outputs where these are not alike.
        """
        if S.shape[1] > self.A.shape[2]:
            return ManyRows(self.matrix(), S)
        R = self.A * (self.weight * self.loss.bends(self.z, self.y)[..., 0]).sqrt()[..., None]
        return FewRows(R, S) if R.shape[1] < R.shape[2] else ManyRows(R.mT @ R, S)

    def solver(
        self, e: Tensor | None = None, goal: Tensor | float = 1e-10
    ) -> Callable[[Tensor], Tensor]:
        """Return B ↦ (AᵀWA + diag(e))⁻¹B, exact or up to a goal.

        e is (n, features or 1, 1), ones if not given; B (n, features, k, c).
        """
        n, m, features = self.A.shape
        k = 1 if self.even else self.z.shape[2]
        e = (self.A.new_ones(n, 1, 1) if e is None else e).expand(n, features, 1)
        if features * k > DENSE and not (self.even and min(m, features) <= 4 * DENSE):
            return lambda B: self._conjugate(e[..., None], B, goal)
        S = e.rsqrt().expand(n, features, k).reshape(n, -1)
        near = self.factor(S)
        S = S[..., None]  # (H + E)⁻¹ = S (S H S + I)⁻¹ S with E = S⁻²

        def solve(B: Tensor) -> Tensor:
            columns = B.shape[2] * B.shape[3] // k  # outputs that are alike are more columns
            return (S * near.solve(S * B.reshape(n, S.shape[1], columns))).view(B.shape)

        return solve

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


def _turned(Z: Tensor, C: Tensor) -> Tensor:
    """Return Z_i C by one product; a batched one would copy C for every client."""
    return (Z.reshape(-1, Z.shape[2]) @ C).view(Z.shape)
