r"""Personal linear models of N clients: their own corrections v to the shared x.

    F_i(x) = min_v (1/m_i) Σ_j ℓ(⟨a_j, x + v⟩, y_j) + ½ Σ_k γ_ik v_k² + ½ Σ_k l2_k x_k²

v lives on the personal features P; on the others γ = ∞, and u = x. With v = s ∘ w and
s_ik = γ_ik^−½, the rows ã = s_i ∘ a_P make all penalties alike:

    min_w (1/m_i) Σ_j ℓ(z_j + ⟨ã_j, w⟩, y_j) + ½‖w‖²,    z = A_i x
    ∇F_i  = A_iᵀ r_i/m_i + l2 ∘ x,        r = ∂ℓ/∂z at the client's own predictions p = A_i u_i
    ∇²F_i = A_iᵀ S_i A_i + diag(l2),      S_i = W − W Ã_i (Ã_iᵀW Ã_i + I)⁻¹ Ã_iᵀW,   W = ∂²ℓ/∂z²/m_i

F_i is a function of A_i x like f_i, and most answers are those of a `LinearPoint` at p. ∇F_i is
computed as the gradient of the mean loss at u_i: γ_i(x − u_i) would cancel for large γ_i. w is
found by Newton's method, started at u = x, so that an answer depends on the question alone. A step
solves (ÃᵀWÃ + I) s = ∇_w by Cholesky, in features or in samples, or by conjugate gradients.

What a residual ε = ‖∇_w‖ changes: as W averaged between ŵ and w is some W̄ ⪰ 0 with
(ÃᵀW̄Ã + I)(ŵ − w) = ∇_w,

    0 ≤ F̂ − F ≤ ε²/2,    ‖∇F̂ − ∇F‖ = ‖AᵀW̄Ã(ŵ − w)‖ ≤ ½ √λ_max(AᵀW̄A) ε,

and at most √(max_k γ_ik) ε if all features are personal. Errors of gradients are in the metric of
the ridge (`Ridge`): there columns, and √γ_ik, are divided by s_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.models.corrections import CorrectionProblem
from scaffpd.models.curvature import LossHessian
from scaffpd.models.execution import parallel_map
from scaffpd.models.losses import Loss, Squared, concordance
from scaffpd.models.numerics import SAFE, SINGLE, UNIT, gamma, norm_above
from scaffpd.models.point import LinearPoint, Ridge, rounded
from scaffpd.models.quadratic import Compressed
from scaffpd.models.samples import Levers, PaddedBlock, Reach, StackedSamples

TOGETHER = 2**24  # numbers in the matrices of clients that are solved together
COLUMNS = 2**24  # numbers in the products of all rows with some columns


@dataclass(frozen=True)
class Anchor:
    """What ties personal models to x.

    Attributes:
        gamma: γ_ik, (N, features), in double precision; ∞ for shared features.
    """

    gamma: Tensor
    _levers: list[tuple[Levers, tuple[Levers, Levers, Levers]]] = field(
        default_factory=list, repr=False
    )

    @cached_property
    def own(self) -> Tensor | None:
        """Which features are personal; `None` for all."""
        finite = torch.isfinite(self.gamma).all(0)
        return None if bool(finite.all()) else finite

    @cached_property
    def scale(self) -> Tensor:
        """s_ik = γ_ik^−½ of the personal features, (N, P)."""
        return (self.gamma if self.own is None else self.gamma[:, self.own]).rsqrt()

    def only(self, who: list[int]) -> Anchor:
        return Anchor(self.gamma[who])

    def part(self, A: Tensor, who: Tensor) -> Tensor:
        """Return Ã, the scaled personal columns, of some clients' A."""
        own = A if self.own is None else A[..., self.own]
        return own * self.scale[who].to(A.dtype)[:, None]

    def spread(self, w: Tensor) -> Tensor:
        """Return v = s ∘ w at all features, (N, features, k); zero at shared ones."""
        v = self.scale.to(w)[..., None] * w
        if self.own is None:
            return v
        out = w.new_zeros(len(w), len(self.own), w.shape[2])
        out[:, self.own] = v
        return out

    def levers(self, rows: StackedSamples, plain: Levers) -> tuple[Levers, Levers, Levers]:
        """Return the factors of rounding errors where Ã multiplies w: of Aᵀr, and of Ãᵀr; and those
        of Ãᵀr where A, with its lengths in `plain`, multiplies x. Computed once.
        """
        if self._levers and self._levers[0][0] is plain:
            return self._levers[0][1]
        norms = torch.zeros_like(rows.exact[1])

        def work(block: PaddedBlock) -> None:
            A = rows.of(block)[0].double()
            block.put(norms, norm_above(self.part(A, block.clients), 2))

        parallel_map(work, rows.blocks, norms.device)
        each, shared = (share / rows.exact[1] for share in (plain.each, plain.plain))
        pairs = (each, norms), (norms, norms), (norms, shared)
        own, tied, across = (Levers.of(rows, *pair) for pair in pairs)
        self._levers[:] = [(plain, (own, tied, across))]
        return self._levers[0][1]


class NewtonPoint(LinearPoint):
    """Personal models of all clients at one x, or of each at its own, (N, d), from `start` (w = 0).

    With fine rows everything that a certificate needs is in double precision.
    """

    def __init__(
        self,
        rows: StackedSamples,
        loss: Loss,
        anchor: Anchor,
        ridge: Ridge,
        x: Tensor,
        outputs: int,
        start: Tensor | None = None,
        compressed: Compressed | None = None,
        minibatch: bool = False,
        level: Tensor | None = None,
    ) -> None:
        self.anchor = anchor
        self.compressed = compressed
        shape = (*anchor.scale.shape, outputs)
        self.w = x.new_zeros(shape) if start is None else start.clone()
        fine = None if x.ndim > 1 or minibatch else rows if compressed is None else compressed.fine
        constant = level if compressed is None else compressed.constant
        super().__init__(rows, loss, ridge, x, outputs, fine, constant)

    def _evaluated(self) -> tuple[Tensor, Tensor]:
        """Solve for w; return predictions p and the inner problems' values."""
        shared = self.shared()
        z = shared.to(self.x.dtype)
        predictions = torch.empty_like(shared)
        exact = self.fine is not None and self.x.dtype != torch.float64
        values = shared.new_empty(len(self.w))
        self.off = torch.empty_like(values)

        def work(block: PaddedBlock) -> None:
            A, y = self.rows.of(block)
            who = block.clients
            A = self.anchor.part(A, who)
            near = CorrectionProblem(self.loss, A, y, block.of(z), block.weight)
            w, p, value, off = near.solve(self.w[who])
            self.w[who] = w
            if exact:
                p, value, off = self._again(block, w.double(), shared)
            block.put(predictions, p)
            values[who] = value
            self.off[who] = off

        parallel_map(work, portions(self.rows, self.w[0].numel()), z.device)
        return predictions, values

    def _again(self, block: PaddedBlock, w: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return predictions, value and the remaining gradient at w, in double precision."""
        assert self.fine is not None
        y, share = self.fine.exact
        A = self.anchor.part(self.fine.of(block)[0].double(), block.clients)
        weight = block.of(share) * (block.weight > 0)
        near = CorrectionProblem(self.loss, A, block.of(y), block.of(z), weight)
        value, p = near.value(w)
        return p, value, near.gradient(w, p)[0].flatten(1).norm(dim=1)

    def bend(self, T: Tensor) -> Tensor:
        """Return the stack m_i S_i T_i: m(W T − W Ã (ÃᵀWÃ + I)⁻¹ÃᵀW T)."""
        out = torch.zeros_like(T)

        def work(block: PaddedBlock) -> None:
            A, bowl = self._bowl(block)
            bent = bowl.bent(block.of(T))
            own = (A.mT @ bent.flatten(2)).view(len(A), A.shape[2], *T.shape[1:])
            less = bowl.bent((A @ bowl.solver()(own).flatten(2)).view_as(bent))
            weight = block.weight[..., None, None]
            block.put(out, (bent - less) / torch.where(weight > 0, weight, 1))

        parallel_map(work, portions(self.rows, self.w[0].numel()), T.device)
        return out

    def _bowl(self, block: PaddedBlock) -> tuple[Tensor, LossHessian]:
        rows, y = self.rows.of(block)
        A = self.anchor.part(rows, block.clients)
        return A, LossHessian(self.loss, A, y, block.of(self.z), block.weight)

    def hessian(self, weights: Tensor) -> Tensor:
        d = len(self.x)
        step = max(COLUMNS // len(self.rows.A), 1)
        eye = torch.eye(d).to(self.x)
        H = torch.cat([self.times(part.mT, weights.to(eye)) for part in torch.split(eye, step)], 1)
        H = ((H + H.mT) / 2).double()
        if self._softmax:
            self._gauge(H[None])
        return H

    def curvatures(self, V: Tensor) -> Tensor:
        """Return every client's VᵀH_iV = T_iᵀS_iT_i + Vᵀl2 V, (N, k, k)."""
        T = self._along(V)
        bent = self.bend(T)
        out = self.ridge.gram(V).repeat(len(self.w), 1, 1)
        for block in self.rows.blocks:
            some = (block.weight[..., None, None] * block.of(bent)).flatten(1, 2)
            out[block.clients] += block.of(T).flatten(1, 2).mT @ some
        return out

    def diagonals(self) -> Tensor:
        """Return diag H_i: diag AᵀWA − rows of (AᵀWÃ)(…)⁻¹(ÃᵀWA) + l2."""
        if not isinstance(self.loss, Squared):
            raise InputError(
                "diagonal-unknown",
                "The diagonal of a personal Hessian is known only for squared loss; take D = I.",
            )
        out = self.x.new_empty(len(self.losses), self.rows.A.shape[1], 1)
        for block in self.rows.blocks:
            A = self.rows.of(block)[0]
            own, bowl = self._bowl(block)
            W = 2 * block.weight[..., None]
            cross = own.mT @ (W * A)  # (n, personal, features)
            less = (cross * bowl.solver()(cross[:, :, None])[:, :, 0]).sum(1)
            out[block.clients] = ((W * A.square()).sum(1) - less)[..., None]
        each = out.expand(-1, -1, self.outputs).flatten(1)
        return each + self.ridge.times(torch.ones_like(self.x))

    def widths(self, root: Tensor, weights: Tensor | None) -> Tensor:
        """Return R max_j √(aᵀ(∇²G)⁻¹_{u_i u_i}a), of the Hessian of all of (x, u_1 … u_N) at once:

        (∇²G)⁻¹ in p = ⟨a, x⟩ + ⟨ã, w⟩ is tᵀ(root rootᵀ)⁻¹t + ãᵀM⁻¹ã/λ_i with M = ÃᵀWÃ + I and
        t = a − AᵀWÃM⁻¹ã; of a softmax that for all (e_k − e_l)⊗a.
        """
        R = concordance(self.loss)
        found = root.new_full((len(self.w),), 0.0 if R == 0 else math.inf)
        if R == 0 or math.isinf(R) or weights is None or not self.known:
            return found
        k = self.outputs

        def work(block: PaddedBlock) -> None:
            A, bowl = self._bowl(block)
            rows, y = self.rows.of(block)
            solve = bowl.solver()
            lam = weights.to(root)[block.clients, None]
            far = root.new_zeros(A.shape[:2])
            for one, other in combinations(range(k), 2) if k > 1 else [(0, 0)]:
                signs = A.new_zeros(k, 1)
                signs[other], signs[one] = -1.0, 1.0
                back = solve(A.mT[:, :, None] * signs)  # M⁻¹ãᵀ
                own = (A.mT * (back * signs).sum(2)).sum(1)
                bent = bowl.times(back, rows)
                t = rows.mT[:, :, None] * signs - bent
                each = beyond(root, t.flatten(1, 2), own, lam)
                far = torch.maximum(far, torch.where(block.weight > 0, each, 0.0))
            found[block.clients] = (
                SAFE * R * (far * self.loss.widening(block.of(self.predictions), y)).amax(1)
            )

        parallel_map(work, portions(self.rows, self.w[0].numel()), root.device)
        return found

    def models(self) -> Tensor:
        return self.x + self.anchor.spread(self.w).flatten(1)

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the errors of arithmetic, where rows multiply x and v, and of Newton's method.

        Rounded s_ik are those of other γ_ik, by a few units: a residual of as many units of w.
        """
        if self.fine is None:
            return self.arithmetic(())
        plain, reach, off = self._residual()
        loss, gradient = self.arithmetic(reach)
        n = self.x.numel() + max(self.rows.layout.lengths)
        unit = UNIT if rounded(self.x) == 0 else SINGLE
        loss = loss + SAFE * (gamma(n + 16) + 4 * unit) * (self.losses.abs() + self.level)
        if self.compressed is not None:  # like `CompressedPoint.rounding`, at u
            more = self.compressed.off(reach)
            loss = loss + gamma(self.outputs**2 + 8) * self.compressed.constant + more[0]
            gradient = gradient + more[1]
        # predictions at ŵ are ‖ã‖ε away at most
        between = (*reach, Reach(off.max() / gamma(self.fine.A.shape[1] + 4), reach[1].levers))
        seen = (self.steepness(between) * plain.square).sqrt() / 2
        if self.anchor.own is None:
            scale = self.ridge.scale
            metric = scale.view(-1, self.outputs)[:, 0] if isinstance(scale, Tensor) else scale
            seen = torch.minimum(seen, (self.anchor.gamma.sqrt() / metric).amax(1))
        return self.ridged(loss + SAFE * off.square() / 2, gradient + SAFE * seen * off)

    def excess(self) -> Tensor:
        """Bound F̂ − F of Newton's method: how far every client's own problem is from solved."""
        return SAFE * self._residual()[2].square() / 2

    def _residual(self) -> tuple[Levers, tuple[Reach, Reach], Tensor]:
        """Return the factors for x, how far x and w reach, and ε from above."""
        assert self.fine is not None
        ((size, plain),) = self.reach
        length = norm_above(self.w, (1, 2))
        own, tied, across = self.anchor.levers(self.fine, plain)
        inside = Reach(size, across), Reach(length, tied)
        off = SAFE * self.off + self.slope_error(inside) + gamma(self.w[0].numel() + 16) * length
        if self.compressed is not None:
            off = off + self.compressed.off(inside)[1]
        return plain, (Reach(size, plain), Reach(length, own)), off


def beyond(root: Tensor, t: Tensor, own: Tensor, lam: Tensor) -> Tensor:
    """Return √(tᵀ(root rootᵀ)⁻¹t + own/λ_i) of every row; 0 of clients without weight."""
    solved = torch.linalg.solve_triangular(root, t.double(), upper=False)
    return torch.where(lam > 0, solved.square().sum(1) + own.double() / lam, 0.0).sqrt()


def portions(rows: StackedSamples, unknowns: int) -> list[PaddedBlock]:
    """Return the blocks of rows, cut so that matrices of all clients' unknowns are small."""
    n = max(1, TOGETHER // max(1, unknowns**2))
    return [
        block
        if len(block.clients) <= n
        else PaddedBlock(block.clients[k : k + n], block.rows[k : k + n], block.weight[k : k + n])
        for block in rows.blocks
        for k in range(0, len(block.clients), n)
    ]
