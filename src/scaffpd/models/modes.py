r"""The clients' own modes around x, and what strengths by evidence need of them (`ModesAt`).

In v = T^{-½}(u − x), with S = T^½ (0 for a shared coefficient), client i minimises
Σ_rows ℓ(⟨a, x + S v⟩, y)/s + ½‖v‖². With H_i its Hessian in u, the minimum is a function of x with
gradient Aᵀℓ'/s and Hessian Q_i (`curvature.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from scaffpd.descent import newton
from scaffpd.federation.modes import ModesAt, ModeSquares
from scaffpd.federation.questions import Question, Vectors
from scaffpd.models.cells import Cells, along, back
from scaffpd.models.corrections import CorrectionProblem
from scaffpd.models.curvature import FewRows, LossHessian, ManyRows
from scaffpd.models.execution import parallel_map
from scaffpd.models.glm import LinearOracle
from scaffpd.models.quadratic import QuadraticOracle
from scaffpd.models.quadrature import NODES, Posterior, Rows
from scaffpd.models.samples import CACHE, PaddedBlock, StackedSamples
from scaffpd.models.weighted_loss import Weighted

THIRD = 1e-4  # step of the difference that third derivatives of a loss are taken by
# Decrease of a Newton step, in nats a row, after which the curvature is still known.
STALE = 1e-6
# Numbers of all clients' matrices up to which they are stored between two questions.
STORED = 2**27
Near = ManyRows | FewRows | Posterior
# Blocks whose sums of matrices are in memory at a time.
TOGETHER = 16


class Solved(NamedTuple):
    """A block's clients near their modes.

    Attributes:
        v: (n, q, copies).
        p, r: predictions, and weighted ∂ℓ/∂z.
        value: what is minimised.
        near: its curvature.
        step, slope: the next Newton step is v − step; it would gain slope/2.
    """

    v: Tensor
    p: Tensor
    r: Tensor
    value: Tensor
    near: ManyRows | FewRows
    step: Tensor
    slope: Tensor


class ModeRows:
    """Rows of a linear model's clients in double precision; of squared loss, the compressed ones.

    Args:
        inner: the clients.
        coupled: the coefficients of a feature that a Hessian couples: those of a softmax, else 1.
    """

    def __init__(self, inner: LinearOracle, coupled: int) -> None:
        few = inner.compressed if isinstance(inner, QuadraticOracle) else None
        self.rows: StackedSamples = inner.rows if few is None else few.fine
        self.loss = inner.loss
        self.outputs = inner.outputs
        self.coupled = coupled
        self.sizes = inner.rows.layout.sizes.double()
        if isinstance(inner.loss, Weighted):  # whole numbers count equal rows
            self.sizes = torch.tensor(inner.loss.totals).to(self.sizes)
        # what compressed rows leave out of Σ ℓ
        self.rest = torch.zeros_like(self.sizes) if few is None else few.constant * self.sizes

    def of(self, block: PaddedBlock) -> tuple[Tensor | Cells, Tensor, Tensor]:
        """Return features, targets and weights n_i·share of a block's rows.

        Features of a client are cells where that is faster.
        """
        A, y = self.rows.of(block)
        weight = block.weight.double() * self.sizes[block.clients][:, None]
        y = y.double() if y.is_floating_point() else y
        cells = self.rows.cells
        if cells is None or len(A) > 1 or self.coupled > 1 or not cells.pays(A.shape[1]):
            return A.double(), y, weight
        first = int(block.rows[0, 0])
        return cells.part(first, first + A.shape[1]), y, weight

    def solve(
        self,
        samples: tuple[Tensor | Cells, Tensor, Tensor],
        z: Tensor,
        S: Tensor,
        v: Tensor,
        close: float,
        before: Near | None = None,
    ) -> Solved:
        """Minimise Σ_rows w ℓ(z + ⟨a, S v⟩, y) + ½‖v‖² by Newton's method, from v (n, q, copies).

        S is (1 or n, q). A client is done when its `slope` is no more than `close`. With many rows
        the first step takes the curvature `before`, and one after a small step the last one.
        """
        A, y, weight = samples
        shape = v.shape
        v = v.reshape(len(y), -1, self.outputs)
        scaled = A.scaled(S[0]) if isinstance(A, Cells) else A * S[:, None, :: self.coupled]
        problem = CorrectionProblem(self.loss, scaled, y, z, weight)
        # such a client is by itself in every block
        large = len(y) == 1 and y.shape[1] * self.rows.A.shape[1] >= CACHE
        near: ManyRows | FewRows | None = None
        if large and isinstance(before, ManyRows) and not self.loss.quadratic:
            near = ManyRows(before.H, S)
        borrowed = near is not None
        found: tuple[Tensor, Tensor, ManyRows | FewRows, Tensor, Tensor] | None = None

        def step(v: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal near, borrowed, found
            gradient, r = problem.gradient(v, p)
            used = self.factor(A, y, weight, p, S) if near is None else near
            borrowed = borrowed and near is not None
            s = used.solve(gradient.reshape(shape)).view(v.shape)
            slope = (gradient * s).sum((1, 2))
            lasting = large and not borrowed and bool(slope <= STALE * weight.sum())
            near = used if lasting or self.loss.quadratic else None
            if borrowed and not bool(slope > close):
                return step(v, p)  # by its own curvature is a client done
            found = v, r, used, s.view(shape), slope
            return s, slope

        v, value, p = newton(v, problem.value, step, close)
        if found is None or found[0] is not v:
            step(v, p)
        assert found is not None
        return Solved(v.reshape(shape), p, found[1], value, *found[2:])

    def factor(
        self, A: Tensor | Cells, y: Tensor, weight: Tensor, p: Tensor, S: Tensor
    ) -> ManyRows | FewRows:
        if isinstance(A, Cells):
            return ManyRows(A.gram((weight * self.loss.bends(p, y)[..., 0])[0])[None], S)
        return LossHessian(self.loss, A, y, p, weight).factor(S)


class ClientModes:
    """All clients at one x, τ and s, in double precision."""

    ahead: Tensor

    def __init__(self, inner: LinearOracle, at: ModesAt, start: ClientModes | None) -> None:
        self.samples = ModeRows(inner, at.outputs)
        self.loss = inner.loss
        self.blocks = self.samples.rows.blocks
        self._begin(self.samples.rows, at, start)
        parallel_map(self._solve, self.blocks, self.v.device)
        self.value[:, 0] += self.samples.rest / self.scale
        self.value[:, 2] = self.samples.sizes

    def _begin(self, rows: StackedSamples, at: ModesAt, start: ClientModes | None) -> None:
        """Start at the u_i of an earlier answer, or at x."""
        self.scale = at.scale
        self.close = at.close
        self.S = at.tau.double().sqrt().repeat_interleave(at.outputs)
        self.X = at.x.double().view(len(at.tau), -1)
        n = len(rows.layout)
        q = len(self.S)
        self.v = self.X.new_zeros(n, q, self.X.numel() // q)
        self._stored: dict[int | None, Near] | None = {}
        if start is not None:  # the same u_i, and their matrices until there are others
            near = torch.where(self.S > 0, start.S / self.S, 0)
            self.v = start.ahead * near[:, None]
            self._stored = start._stored or {}
            start._stored = None
        self.ahead = self.v  # after the Newton step of x, once that is known
        differing = int((self.S > 0).sum())
        self.means = at.means and differing > 0
        # a few coefficients that differ are integrated over, more of them to first order
        self.integrated = at.means and differing in NODES
        self.shift = torch.zeros_like(self.v)  # from modes to means
        self.value = self.v.new_zeros(n, 3)
        self.gradient = self.v.new_zeros(n, self.X.numel())
        if sum(min(m, q) for m in rows.layout.lengths) * q * 3 > STORED:
            self._stored = None

    def _rows(self, block: PaddedBlock) -> tuple[Tensor | Cells, Tensor, Tensor]:
        """Return features, targets and the weights n_i·share/s of a block's rows."""
        A, y, weight = self.samples.of(block)
        return A, y, weight / self.scale

    def _solve(self, block: PaddedBlock) -> None:
        who = block.clients
        A, y, weight = self._rows(block)
        before = (self._stored or {}).get(block.number)
        found = self.samples.solve(
            (A, y, weight), along(A, self.X), self.S[None], self.v[who], self.close, before
        )
        near = found.near
        self.v[who] = found.v
        self.gradient[who] = back(A, found.r).flatten(1)
        self.value[who, 0] = found.value
        if self.integrated:
            posterior = self._posterior(block, y, weight, found.p, near)
            self.value[who, 0] = posterior.value
            self.gradient[who] = posterior.gradient
            self.shift[who] = posterior.mean[..., None]
            if self._stored is not None:
                self._stored[block.number] = posterior
            return
        if self.means:
            self._mean(block, y, weight, found.p, near)
        copies = self.v.shape[2]
        self.value[who, 1] = 2 * copies * near.L.diagonal(dim1=1, dim2=2).log().sum(1)
        if self._stored is not None:
            self._stored[block.number] = near

    def _posterior(
        self,
        block: PaddedBlock,
        y: Tensor,
        weight: Tensor,
        p: Tensor,
        near: ManyRows | FewRows,
    ) -> Posterior:
        A = self.samples.rows.of(block)[0].double()
        rows = Rows(A, y, weight, p)
        return Posterior(self.loss, rows, self.S, self.v[block.clients, :, 0], near.each())

    def _mean(
        self,
        block: PaddedBlock,
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
        A = self.samples.rows.of(block)[0].double()
        up, down = (self.loss.bends(p + e, y)[..., 0] for e in (THIRD, -THIRD))
        scaled = A * self.S
        leverage = (scaled * near.solve(scaled.mT).mT).sum(2)
        k = A.mT @ (weight * (up - down) / (4 * THIRD) * leverage)[..., None]
        z = near.solve(self.S[:, None] * k)
        curved = weight * self.loss.bends(p, y)[..., 0]
        pulled = A.mT @ (curved[..., None] * (scaled @ z))
        self.shift[who] = -z
        self.gradient[who] += (k - pulled)[..., 0]

    def _near(self, block: PaddedBlock) -> Near:
        if self._stored is not None:
            return self._stored[block.number]
        A, y, weight = self._rows(block)
        u = self.X + (self.S[:, None] * self.v[block.clients]).view(len(y), *self.X.shape)
        p = along(A, u)
        near = self.samples.factor(A, y, weight, p, self.S[None])
        return self._posterior(block, y, weight, p, near) if self.integrated else near

    def modes(self) -> dict[str, Vectors]:
        q = len(self.S)
        eye = torch.eye(len(self.v), dtype=torch.float64, device=self.v.device)
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

        blocks = self.blocks
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

        parallel_map(work, self.blocks, self.v.device)
        self.ahead = moved
        squares = (moved + self.shift).square().sum(2)
        return _held(torch.stack([squares, self.v.shape[2] * chance], 1))

    def dispersed(self, grid: Tensor) -> Vectors:
        """Return every client's log likelihood of its counts for each α: with k = 1/α and the mean
        μ, log Γ(y + k)/Γ(k) y! + k log k/(k + μ) + y log μ/(k + μ).
        """
        found = self.v.new_zeros(len(self.v), len(grid))
        k = 1 / grid.to(found)

        def work(block: PaddedBlock) -> None:
            A, targets, weight = self._rows(block)
            u = self.X + (self.S[:, None] * self.v[block.clients]).view(len(targets), *self.X.shape)
            rate, E = targets[..., :1], targets[..., 1:2]
            if isinstance(self.loss, Weighted):  # whose weights have exposures in them
                weight = weight * targets[..., -1] / E[..., 0]
            y = rate * E
            mu = E * along(A, u).exp()
            each = (y + k).lgamma() - k.lgamma() - (y + 1).lgamma()
            each = each - k * torch.log1p(mu / k) + torch.special.xlogy(y, mu / (k + mu))
            found[block.clients] = (weight[..., None] * each).sum(1)

        parallel_map(work, self.blocks, self.v.device)
        return _held(found)

    def own(self, C: Tensor, step: Tensor, L: Tensor) -> Vectors:
        q = len(self.S)
        found = self.v.new_empty(len(self.v), 2, len(L))
        eye = torch.eye(q, dtype=torch.float64, device=self.v.device)

        def work(block: PaddedBlock) -> None:
            who = block.clients
            near = self._near(block)
            J = near.change
            K = eye - self.S[:, None] * J
            moved = self.v[who] + self.shift[who] - J @ step.view(q, -1)
            found[who, 0] = (self.X.view(q, -1) + step.view(q, -1) + self.S[:, None] * moved)[
                ..., 0
            ] @ L.mT
            V = self.S[:, None] * near.covariance * self.S
            found[who, 1] = ((L @ (V + K @ C @ K.mT)) * L).sum(2)

        parallel_map(work, self.blocks, self.v.device)
        return _held(found)

    def information(self, C: Tensor, step: Tensor, groups: Tensor) -> Vectors:
        """Return the answer to `ModeInformation`."""
        q, families = len(C), groups.to(C)

        def total(weights: Tensor) -> Tensor:
            found = C.new_zeros(q * q * (1 + len(groups)) + len(groups) ** 2)
            for block in self.blocks:
                w = weights[block.clients, None, None]
                Q = self._near(block).each()
                g = (self.gradient[block.clients] + Q @ step.flatten())[..., None]
                # of every group: Σ_i Q_i E_g Q_i
                pairs = [((w * Q * own) @ Q).sum(0) for own in families]
                overlap = (w * Q * (Q - 2 * Q @ C @ Q)).sum(0)
                found += torch.cat(
                    [
                        (w * g * g.mT).sum(0).flatten(),
                        *(part.flatten() for part in pairs),
                        (families @ overlap @ families.mT).flatten(),
                    ]
                )
            return found

        eye = torch.eye(len(self.v), dtype=torch.float64, device=self.v.device)
        shape = (q * q * (1 + len(groups)) + len(groups) ** 2,)
        each = lambda: torch.stack([total(one) for one in eye])
        return Vectors(total, each, shape=shape, double_weights=True)

    def squares(self, at: Question) -> Vectors:
        """Return the answer to `ModeSquares`."""
        assert isinstance(at, ModeSquares)
        C, L, families = at.C, at.L.to(at.C), at.groups.to(at.C)
        parts = []
        for block in self.blocks:
            Q = self._near(block).each()
            g = self.gradient[block.clients] + Q @ at.step.flatten()
            turned = Q @ C @ Q
            found = [
                ((L @ Q) ** 2 @ families.mT).flatten(1),
                g**2 @ families.mT,
                turned.diagonal(dim1=1, dim2=2) @ families.mT,
                (families @ (Q * (Q - 2 * turned)) @ families.mT).flatten(1),
                (g @ L.mT) ** 2 if at.robust else g[:, :0],
            ]
            parts.append((block.clients, torch.cat(found, 1)))
        each = C.new_empty(len(self.v), parts[0][1].shape[1])
        for who, own in parts:
            each[who] = own
        return _held(each)


def _held(each: Tensor) -> Vectors:
    """Return a handle on one tensor per client, (N, …)."""

    def total(weights: Tensor) -> Tensor:
        return (weights @ each.flatten(1)).view(each.shape[1:])

    return Vectors(total, lambda: each, shape=tuple(each.shape[1:]), double_weights=True)
