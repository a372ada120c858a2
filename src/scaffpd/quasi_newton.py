r"""A limited-memory BFGS model of the inverse Hessian of a function, from points at which its gradient is known.

From pairs (s_k, y_k) of steps and of changes of the gradient, oldest first, and a diagonal matrix H_0,

    H_{k+1} = (I − s_k y_kᵀ/ρ_k) H_k (I − y_k s_kᵀ/ρ_k) + s_k s_kᵀ/ρ_k,        ρ_k = ⟨s_k, y_k⟩

(J. Nocedal, "Updating quasi-Newton matrices with limited storage", 1980). With q_K = v and q_k = q_{k+1} − α_k y_k,
α_k = ⟨s_k, q_{k+1}⟩/ρ_k, the recursion shows vᵀHv as a sum of squares,

    vᵀHv = Σ_k ρ_k α_k² + q_0ᵀH_0q_0,

which gives CᵀHC a factor (`InverseHessian.factor`) that costs one loop and loses no digits.

A BFGS update spoils what older pairs say, except where the new one is conjugate to them, ⟨s_j, y_k⟩ = 0. `conjugated`
makes them so, newest to oldest; of a quadratic function, H is then exact on the span of all steps. Of another function
the y_k do not belong to one matrix, and pairs whose asymmetry max_j |⟨s_j, y_k⟩ − ⟨s_k, y_j⟩|/√(ρ_j ρ_k) is large stay
as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ASYMMETRY = 0.1  # from here on, a pair is not conjugated
LOST = 1e-5  # a step with less than this share outside the span of the newer ones is rounding
STEEP = 1e-10  # ρ below this share of ‖s‖‖y‖ is rounding


@dataclass(frozen=True)
class Pairs:
    """Steps and changes of the gradient, oldest first.

    Attributes:
        steps: s_k, (K, d).
        changes: y_k, (K, d).
    """

    steps: Tensor
    changes: Tensor

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def curvatures(self) -> Tensor:
        """ρ_k, (K,)."""
        return (self.steps * self.changes).sum(1)


@dataclass(frozen=True)
class InverseHessian:
    """H.

    Attributes:
        pairs: (s_k, y_k).
        initial: the diagonal of H_0, (d,).
    """

    pairs: Pairs
    initial: Tensor

    def apply(self, v: Tensor) -> Tensor:
        """Hv."""
        q, alphas = self._down(v[None])
        out, rho = self.initial * q[0], self.pairs.curvatures
        for k, (s, y) in enumerate(zip(self.pairs.steps, self.pairs.changes, strict=True)):
            out = out + (alphas[k] - y @ out / rho[k]) * s
        return out

    def factor(self, C: Tensor) -> Tensor:
        """E with EᵀE = CᵀHC for vectors c_1 … c_N, given as rows: ⟨c_i, Hc_j⟩ is the product of two columns of E."""
        q, alphas = self._down(C)
        return compact(torch.cat([self.pairs.curvatures.sqrt()[:, None] * alphas, (self.initial.sqrt() * q).mT]))

    def _down(self, C: Tensor) -> tuple[Tensor, Tensor]:
        """q_0 for every row of C, (N, d), and the α_k, (K, N)."""
        q, rho = C.clone(), self.pairs.curvatures
        alphas = C.new_empty(len(rho), len(C))
        for k in reversed(range(len(rho))):
            alphas[k] = q @ self.pairs.steps[k] / rho[k]
            q.addr_(alphas[k], self.pairs.changes[k], alpha=-1)
        return q, alphas


def compact(E: Tensor) -> Tensor:
    """A matrix R with RᵀR = EᵀE and no more rows than columns."""
    return E if len(E) <= E.shape[1] else torch.linalg.qr(E, mode="r")[1]


def conjugated(pairs: Pairs, convexity: float, smoothness: float) -> Pairs:
    """The pairs that are of use, made conjugate newest to oldest as far as they are symmetric.

    A μ-strongly convex and L-smooth function has ρ ≥ μ‖s‖² and ‖y‖² ≤ Lρ. These tell what rounding, or a Hessian that
    changes, has made of a pair.
    """
    found: list[tuple[Tensor, Tensor]] = []
    basis = _Conjugate(pairs.steps.new_empty(2, *pairs.steps.shape))
    for s, y in zip(pairs.steps.flip(0), pairs.changes.flip(0), strict=True):
        rho, size = float(s @ y), float(s @ s)
        if not rho > max(0.5 * convexity * size, STEEP * (size * float(y @ y)) ** 0.5):
            continue
        if basis.asymmetry(s, y, rho) < ASYMMETRY:
            rest, change = basis.remainder(s, y)
            left, along = float(rest @ rest), float(rest @ change)
            if left < LOST**2 * size:
                continue
            if along >= 0.9 * convexity * left and 0 < float(change @ change) <= 2 * smoothness * along:
                basis.add(rest, change, along)
                s, y = rest, change
        found.append((s, y))
    if not found:
        return Pairs(pairs.steps[:0], pairs.changes[:0])
    return Pairs(*(torch.stack(vectors) for vectors in zip(*reversed(found), strict=True)))


class _Conjugate:
    """Pairs that are conjugate to each other: the first rows of a (2, K, d) buffer."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.rho, self.n = buffer, buffer.new_empty(buffer.shape[1]), 0

    def add(self, s: Tensor, y: Tensor, rho: float) -> None:
        self.buffer[0, self.n], self.buffer[1, self.n], self.rho[self.n] = s, y, rho
        self.n += 1

    def asymmetry(self, s: Tensor, y: Tensor, rho: float) -> float:
        S, Y = self.buffer[:, : self.n]
        return float(((Y @ s - S @ y).abs() / (self.rho[: self.n] * rho).sqrt()).max()) if self.n else 0.0

    def remainder(self, s: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(s, y) without its part along the others; twice, to make up for rounding."""
        S, Y = self.buffer[:, : self.n]
        for _ in range(2):
            share = (Y @ s) / self.rho[: self.n]
            s, y = s - share @ S, y - share @ Y
        return s, y
