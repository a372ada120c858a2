r"""Squared losses in their clients' own eigenvectors: one decomposition for every l2, personal or
not; exact optima.

Client i's loss (s/m)‖A x − Y‖² has the Hessian Σ_r h_r v_r v_rᵀ. With the rows v_r of all clients
stacked in W, z = W x and b = W (2s/m) AᵀY, everything that this study needs is of one form, a
number w per row and w⁰ off the client's rows:

    f_i(x) = k_i + (w⁰_i/2)‖x‖² + Σ_{r of i} ½ (w_r − w⁰_i) z_r² − b_r z_r

    one model:   w = h + l2,            b as it is,          w⁰ = l2
    a model of one's own, F_i(x) = min_u f_i(u) + (γ_i/2)‖u − x‖²,  H = h + l2:
                 w = Hγ/(H + γ),    b γ/(H + γ),    w⁰ = l2 γ/(l2 + γ),    k − Σ ½ b²/(H + γ)

J local steps are ϕ(w) on every row (`local_gain`), so that the package's algorithms run on these
clients by two matrix products a question whatever J is. The weighted problem is one Cholesky
factorisation, and Newton's method on λ ↦ min_x finds the saddle point, with its duality gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.equilibrium import equilibrium as answer
from scaffpd.algorithms.saddle import solve_saddle
from scaffpd.federation import Constants, Federation, LocalPlan, Vector, same_point
from scaffpd.models.local_steps import local_gain
from scaffpd.models.numerics import gamma
from scaffpd.objectives.base import Objective
from scaffpd.training.cohort import LocalChannel, Split

TARGETS = (
    "one-hot",
    "tct",
)  # e_y with factor 1, as in `Linear`; e_y − 1/C with factor 1/2, as in TCT
# of the largest eigenvalue: rows below are left out, they are not orthogonal to the others
LEAST = 1e-9
NEWTON = 40
HALVINGS = 12


@dataclass(frozen=True)
class Spectra:
    """The decomposed losses of N clients, without any l2.

    Attributes:
        W: (R, d), orthonormal rows of every client, one client after the other.
        h: (R,), their eigenvalues.
        b: (R, C), W (2s/m) AᵀY.
        k: (N,), the losses at zero.
        lengths: rows of every client.
        samples: n_i.
    """

    W: Tensor
    h: Tensor
    b: Tensor
    k: Tensor
    lengths: tuple[int, ...]
    samples: tuple[int, ...]

    @cached_property
    def owner(self) -> Tensor:
        """The client of every row."""
        return torch.repeat_interleave(torch.tensor(self.lengths, device=self.W.device))

    def total(self, rows: Tensor) -> Tensor:
        """Σ over the rows of every client of (R,)."""
        return torch.zeros_like(self.k).index_add_(0, self.owner, rows)

    def largest(self, rows: Tensor) -> Tensor:
        """The largest of every client's rows."""
        return torch.stack([part.max() for part in torch.split(rows, self.lengths)])

    def each(self, q: Tensor) -> Tensor:
        """W_iᵀ q_i of every client, (N, d, C)."""
        pairs = zip(torch.split(self.W, self.lengths), torch.split(q, self.lengths), strict=True)
        return torch.stack([own.mT @ part for own, part in pairs])

    def within(self, v: Tensor) -> Tensor:
        """W_i v_i for every client's own v_i (N, d, C)."""
        return torch.cat(
            [own @ part for own, part in zip(torch.split(self.W, self.lengths), v, strict=True)]
        )

    def only(self, chosen: Sequence[int]) -> Spectra:
        """The same for some of the clients."""
        ends = np.cumsum([0, *self.lengths])
        rows = torch.cat([torch.arange(ends[i], ends[i + 1], device=self.W.device) for i in chosen])
        lengths, samples = (tuple(t[i] for i in chosen) for t in (self.lengths, self.samples))
        return Spectra(
            self.W[rows], self.h[rows], self.b[rows], self.k[list(chosen)], lengths, samples
        )


def decompose(
    clients: Sequence[tuple[Tensor, Tensor]], classes: int, targets: str = "one-hot"
) -> Spectra:
    """Decompose every client's loss on its rows (features, labels): by features or by samples,
    whichever are fewer.
    """
    scale, shift = (1.0, 0.0) if targets == "one-hot" else (0.5, 1 / classes)
    parts = []
    k = []
    own = [
        (A.double(), torch.nn.functional.one_hot(y, classes).to(A.device, torch.float64) - shift)
        for A, y in clients
    ]
    grams = [
        (A.mT @ A if len(A) >= A.shape[1] else A @ A.mT) * (2 * scale / len(A)) for A, _ in own
    ]
    for (A, Y), (h, U) in zip(own, eigenvectors(grams), strict=True):
        factor = 2 * scale / len(A)
        keep = h > LEAST * h[-1]
        U = U[:, keep].mT
        h = h[keep]
        k.append(factor / 2 * Y.square().sum())
        if len(A) >= A.shape[1]:
            parts.append((U, h, U @ (factor * A.mT @ Y)))
        else:
            root = h.sqrt()[:, None]
            parts.append((factor**0.5 / root * (U @ A), h, factor**0.5 * root * (U @ Y)))
    W, h, b = (torch.cat(part) for part in zip(*parts, strict=True))
    return Spectra(
        W, h, b, torch.stack(k), tuple(len(p[1]) for p in parts), tuple(len(y) for _, y in clients)
    )


_together: dict[
    tuple[str, int], bool
] = {}  # whether a batch of matrices of this size is decomposed faster


def eigenvectors(grams: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Eigenvalues, ascending, and eigenvectors; on a GPU those of equal size in one batch, where
    that was faster.
    """
    out: list[Any] = [None] * len(grams)
    for size in {len(G) for G in grams}:
        which = [i for i, G in enumerate(grams) if len(G) == size]
        key = grams[0].device.type, size
        if len(which) > 1 and key[0] == "cuda" and size > 1:
            some = torch.stack([grams[i] for i in which])
            if key not in _together:
                _together[key] = _seconds(
                    lambda some=some: torch.linalg.eigh(some[:2])
                ) < 2 * _seconds(lambda some=some: torch.linalg.eigh(some[0]))
            if _together[key]:
                h, U = torch.linalg.eigh(some)
                for k, i in enumerate(which):
                    out[i] = h[k], U[k]
                continue
        for i in which:
            out[i] = torch.linalg.eigh(grams[i])
    return out


def _seconds(work: Callable[[], Any]) -> float:
    """How long something takes on a GPU, the second time."""
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Quadratics:
    """Losses of the form at the top of this file: `spectra` with w, b, w⁰ and k for one l2,
    personal or not.
    """

    spectra: Spectra
    w: Tensor
    b: Tensor
    off: Tensor
    k: Tensor

    @classmethod
    def shared(cls, spectra: Spectra, l2: float) -> Quadratics:
        """One model for all."""
        return cls(spectra, spectra.h + l2, spectra.b, torch.full_like(spectra.k, l2), spectra.k)

    @classmethod
    def personal(cls, spectra: Spectra, l2: float, pull: Tensor) -> Quadratics:
        """A model of every client's own, held to x by γ_i."""
        H = spectra.h + l2
        g = pull[spectra.owner]
        k = spectra.k - spectra.total((spectra.b.square() / (2 * (H + g))[:, None]).sum(1))
        return cls(
            spectra, H * g / (H + g), spectra.b * (g / (H + g))[:, None], l2 * pull / (l2 + pull), k
        )

    @cached_property
    def above(self) -> Tensor:
        """Take w⁰ off w, by row."""
        return self.w - self.off[self.spectra.owner]

    def losses(self, X: Tensor, z: Tensor) -> Tensor:
        """f_i at X, where z = W X."""
        rows = ((self.above / 2)[:, None] * z - self.b).mul_(z).sum(1)
        return self.k + self.off / 2 * X.square().sum() + self.spectra.total(rows)

    def hessian(self, weights: Tensor) -> Tensor:
        """Σ λ_i ∇²f_i for one output, (d, d)."""
        W = self.spectra.W
        H = (W * (weights[self.spectra.owner] * self.above)[:, None]).mT @ W
        H.diagonal().add_(weights @ self.off)
        return H

    def minimum(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """argmin_x Σ λ_i f_i(x), and the Cholesky factor of its Hessian."""
        L = torch.linalg.cholesky(self.hessian(weights))
        pulled = self.spectra.W.mT @ (weights[self.spectra.owner][:, None] * self.b)
        return torch.cholesky_solve(pulled, L), L

    def gradients(self, X: Tensor, z: Tensor) -> Tensor:
        """∇f_i at X of every client, (N, d, C)."""
        return self.off[:, None, None] * X + self.spectra.each(self.above[:, None] * z - self.b)


class SpectralOracle:
    """These losses behind the questions of first order that the methods of the study ask; an
    `Oracle`.
    """

    most_rows = None

    def __init__(self, losses: Quadratics, names: Sequence[str]) -> None:
        self.q, self.names = losses, list(names)
        self.shape = losses.spectra.W.shape[1], losses.b.shape[1]
        self.dimension = self.shape[0] * self.shape[1]
        self._last: tuple[Tensor, Tensor] | None = None
        self.smoothness = torch.maximum(losses.spectra.largest(losses.w), losses.off)

    def start(self) -> Tensor:
        """Zero."""
        return self.q.b.new_zeros(self.dimension)

    def contents(self) -> list[Tensor]:
        """Everything that the losses depend on."""
        return [self.q.spectra.W, self.q.w, self.q.b, self.q.off, self.q.k]

    def constants(self) -> Constants:
        """L_i and μ_i."""
        L, mu = (t.double().cpu().numpy() for t in (self.smoothness, self.q.off))
        return Constants(L, mu, True, L, np.array(self.q.spectra.samples), quadratic=True)

    def only(self, clients: list[int]) -> SpectralOracle:
        """The same for some of the clients."""
        q = self.q
        part = self.q.spectra.only(clients)
        ends = np.cumsum([0, *q.spectra.lengths])
        rows = torch.cat([torch.arange(ends[i], ends[i + 1], device=q.w.device) for i in clients])
        own = Quadratics(part, q.w[rows], q.b[rows], q.off[clients], q.k[clients])
        return SpectralOracle(own, [self.names[i] for i in clients])

    def along(self, x: Tensor) -> Tensor:
        """Return z = W x; that of the last x is remembered."""
        if self._last is None or not same_point(self._last[0], x):
            self._last = x, self.q.spectra.W @ x.view(self.shape)
        return self._last[1]

    def losses(self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = ()) -> Tensor:
        """f_i(x)."""
        return self.q.losses(x.view(self.shape), self.along(x))

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = ()
    ) -> SpectralPoint:
        """All clients at x."""
        return SpectralPoint(self, x)

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """f_i(x); accuracies are counted on rows, not here."""
        found = self.losses(x).cpu().numpy()
        return found, np.full(len(found), np.nan)

    def local_updates(
        self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan
    ) -> SpectralUpdates:
        """d_i = ϕ(H_i)(∇f_i(x) − c_i + c), with μ of FedProx in the eigenvalues."""
        q = self.q
        s = self.q.spectra
        rate = (
            (plan.scale / self.smoothness)
            if plan.rate is None
            else torch.full_like(self.smoothness, plan.rate)
        )
        phi = local_gain(q.w + plan.prox, rate[s.owner], plan.steps)[:, None]
        base = local_gain(q.off + plan.prox, rate, plan.steps)
        c = None if correction is None else correction.view(self.shape)
        if isinstance(at, SpectralPoint) and same_point(at.x, x) and c is not None:
            return SpectralUpdates(s, (phi - base[s.owner][:, None]) * (s.W @ c), [(base, c)])
        z = self.along(x)
        X = x.view(self.shape)
        rows = phi * (q.w[:, None] * z - q.b) - (base * q.off)[s.owner][:, None] * z
        parts = [(base * q.off, X)]
        if at is not None or c is not None:
            kept = (
                0.0
                if at is None
                else (at if isinstance(at, Tensor) else at.each()).view(-1, *self.shape)
            )
            v = (0.0 if c is None else c) - kept
            v = v.expand(len(s.k), *self.shape)
            rows = rows + (phi - base[s.owner][:, None]) * s.within(v)
            parts = [*parts, (base, v)]
        return SpectralUpdates(s, rows, parts)


class SpectralPoint:
    """All clients at one x."""

    def __init__(self, oracle: SpectralOracle, x: Tensor) -> None:
        self.q, self.x, self.X, self.z = oracle.q, x, x.view(oracle.shape), oracle.along(x)
        self.losses = self.q.losses(self.X, self.z)

    @cached_property
    def rows(self) -> Tensor:
        """(w − w⁰) z − b."""
        return self.q.above[:, None] * self.z - self.q.b

    def sum(self, weights: Tensor) -> Tensor:
        """Σ λ_i c_i."""
        s = self.q.spectra
        return (
            (weights @ self.q.off) * self.X + s.W.mT @ (weights[s.owner][:, None] * self.rows)
        ).flatten()

    def each(self) -> Tensor:
        """The c_i, (N, d)."""
        return self.q.gradients(self.X, self.z).flatten(1)

    def norms(self) -> Tensor:
        """‖c_i‖²: on the rows (w z − b)², off them (w⁰ x)²."""
        s = self.q.spectra
        z2 = self.z.square().sum(1)
        inside = (self.rows + self.q.off[s.owner][:, None] * self.z).square().sum(1)
        return s.total(inside) + self.q.off.square() * (
            self.X.square().sum() - s.total(z2)
        ).clamp_min(0)

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the arithmetic, for the losses as they were decomposed.

        z is off by at most γ_d |W||x|, of norm √R_i γ_d ‖x‖; that moves L_i by the slope and c_i by
        the curvature. Sums over rows and outputs err by γ_n of their absolute terms.
        """
        q = self.q
        s = self.q.spectra
        d, C = self.X.shape
        long = torch.tensor(s.lengths, device=s.W.device, dtype=torch.float64)
        off = gamma(d + 4) * long.sqrt() * self.X.norm() * 1.01
        top = s.largest(q.above.abs())
        slope = s.total(self.rows.square().sum(1)).sqrt()
        size = ((q.above.abs() / 2)[:, None] * self.z.square() + (q.b * self.z).abs()).sum(1)
        count = gamma(int(long.max()) + C + d * C + 16)
        loss = count * (q.k.abs() + s.total(size) + q.off * self.X.square().sum()) + off * (
            slope + top * off
        )
        add = gamma(int(long.sum()) + 8) * long.sqrt() * (slope + q.off * self.X.norm())
        return 1.01 * loss, 1.01 * (top * off + add + 4 * gamma(8) * q.off * self.X.norm()) * 1.5


class SpectralUpdates:
    """d_i = Σ over parts of a_i v (one v, or every client's own) + W_iᵀ q_i."""

    def __init__(
        self, spectra: Spectra, rows: Tensor, parts: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self.s = spectra
        self.rows = rows
        self.parts = parts

    def sum(self, weights: Tensor) -> Tensor:
        """Σ λ_i d_i."""
        out = self.s.W.mT @ (weights[self.s.owner][:, None] * self.rows)
        for a, v in self.parts:
            out += (weights @ a) * v if v.ndim == 2 else torch.tensordot(weights * a, v, 1)
        return out.flatten()

    def each(self) -> Tensor:
        """The d_i, (N, d)."""
        return (self.s.each(self.rows) + sum(a[:, None, None] * v for a, v in self.parts)).flatten(
            1
        )


def federation(losses: Quadratics) -> Federation:
    """These clients, for the package's algorithms."""
    names = [f"client {i}" for i in range(len(losses.k))]
    oracle = SpectralOracle(losses, names)
    counts = np.array(losses.spectra.samples)
    split = Split(oracle, counts, (oracle.shape[0],), None)  # type: ignore[arg-type]
    return Federation(LocalChannel(names, "spectral", split, None))


@dataclass(frozen=True)
class Optimum:
    """A model with its weights, and what is proven: the duality gap, or of an equilibrium its two
    parts together.
    """

    X: Tensor
    weights: Vector
    gap: float


def _dual(
    q: Quadratics, objective: Objective, weights: Vector
) -> tuple[float, float, Tensor, Tensor, Vector]:
    """min_x Σ λ_i f_i(x) − ψ(λ), the gap at that x, x, the Cholesky factor and the losses."""
    lam = torch.tensor(weights).to(q.k)
    X, L = q.minimum(lam)
    losses = q.losses(X, q.spectra.W @ X).cpu().numpy()
    value = float(losses @ weights) - objective.value(weights)
    return value, objective.support(losses) - value, X, L, losses


def dual_value(q: Quadratics, objective: Objective, weights: Vector) -> float:
    """min_x Σ λ_i f_i(x) − ψ(λ): no model has a smaller value, so what a model is above it bounds
    its distance.
    """
    return _dual(q, objective, weights)[0]


def saddle(
    q: Quadratics, objective: Objective, tol: float = 1e-7, start: Vector | None = None
) -> Optimum:
    """min_x max_{λ∈Λ} Σ λ_i f_i(x) − ψ(λ) by Newton's method on λ, to a duality gap of `tol`.

    The dual function has the gradient f_i(x(λ)) and the Hessian −⟨c_i, H(λ)⁻¹ c_j⟩ at x(λ) = argmin
    Σ λ_i f_i.
    """
    weights = objective.weights(len(q.k)) if start is None else start
    value, gap, X, L, losses = _dual(q, objective, weights)
    best = Optimum(X, weights, gap)
    for _ in range(NEWTON):
        if best.gap <= tol:
            break
        C = q.gradients(X, q.spectra.W @ X)
        half = torch.linalg.solve_triangular(L, C.movedim(0, 1).flatten(1), upper=False)
        half = half.view(len(L), len(C), -1).movedim(0, 1).flatten(1)
        E = _root((half @ half.mT).cpu().numpy())
        aim = solve_saddle(objective, losses, E, weights, 0.1 * tol).weights
        for k in range(HALVINGS):
            tried = weights + 0.5**k * (aim - weights)
            found = _dual(q, objective, tried)
            if found[0] > value:
                break
        else:
            break
        weights, (value, gap, X, L, losses) = tried, found
        if gap < best.gap:
            best = Optimum(X, weights, gap)
    return best


def _root(K: Any) -> Any:
    """A matrix E with EᵀE = K."""
    values, vectors = np.linalg.eigh((K + K.T) / 2)
    return np.sqrt(values.clip(0))[:, None] * vectors.T


def equilibrium(
    q: Quadratics, objective: Objective, held_out: Callable[[Tensor], Vector], tol: float = 1e-5
) -> Optimum:
    """λ answers losses on rows kept aside (`scaffpd.objectives.excess`); `gap` is what another
    answer would gain.
    """
    start: Vector | None = None

    def solve(goal: Objective) -> tuple[Optimum, Vector, Vector, Vector]:
        nonlocal start
        found = saddle(q, goal, 0.01 * tol, start)
        start = found.weights
        return (
            found,
            start,
            q.losses(found.X, q.spectra.W @ found.X).cpu().numpy(),
            held_out(found.X),
        )

    found, gain, _ = answer(objective, len(q.k), solve, tol)
    return replace(found, gap=gain)


def own_models(spectra: Spectra, l2: float, pull: Tensor, X: Tensor) -> Tensor:
    """u_i = argmin f_i(u) + (γ_i/2)‖u − x‖², (N, d, C); γ = 0 is every client alone."""
    H = spectra.h + l2
    g = pull[spectra.owner]
    z = spectra.W @ X
    keep = pull / (l2 + pull)
    rows = (spectra.b + g[:, None] * z) / (H + g)[:, None] - keep[spectra.owner][:, None] * z
    return keep[:, None, None] * X + spectra.each(rows)


def fine_tuned(spectra: Spectra, l2: float, X: Tensor, steps: int) -> Tensor:
    """u_i after so many gradient steps of rate 1/L_i from x, (N, d, C)."""
    q = Quadratics.shared(spectra, l2)
    oracle = SpectralOracle(q, [str(i) for i in range(len(q.k))])
    moved = oracle.local_updates(X.flatten(), None, None, LocalPlan(steps))
    return X - moved.each().view(len(q.k), *X.shape)


def with_weights(best: Optimum, q: Quadratics) -> Optimum:
    """The minimum on other rows for the weights that were found."""
    return replace(best, X=q.minimum(torch.tensor(best.weights).to(q.k))[0])
