"""All clients of a linear model at one x: losses, gradients, curvature, and bounds on rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from scaffpd.federation import Restriction, Vector
from scaffpd.models.losses import Loss, Softmax, concordance
from scaffpd.models.numerics import (
    LEAST,
    SAFE,
    SHORT,
    SINGLE,
    UNIT,
    array,
    gamma,
    norm_above,
    product,
    quiet,
    root_above,
    squares,
)
from scaffpd.models.samples import Levers, Reach, StackedSamples
from scaffpd.models.weighted_loss import Weighted

PIECE = {"cpu": 2**18, "cuda": 2**26}  # numbers of a piece of A
# Vectors that a server adds up in double precision, one by one.
CLIENTS = 2**13


class Ridge:
    """The regulariser ½ Σ_j l2_j x_j², with one l2 for all of x or one for every entry.

    Errors are bounded in its metric, in which coordinates count by s_j = √(l2_j/min l2): sums
    ⟨a, x⟩ err by ‖a/s‖‖s ∘ x‖, and errors of gradients g are ‖g/s‖. Where l2 goes with the scales
    of the columns, that hides no small column behind a large one.

    Args:
        l2: a number, or a tensor in double precision with an entry for each of x.
    """

    def __init__(self, l2: float | Tensor) -> None:
        self.l2 = l2
        self.even = not isinstance(l2, Tensor)
        self._levers: dict[tuple[int, bool], tuple[StackedSamples, Levers]] = {}
        self.least, self.most = (
            (float(l2.min()), float(l2.max())) if isinstance(l2, Tensor) else (l2, l2)
        )

    def times(self, x: Tensor) -> Tensor:
        """Return l2 ∘ x along the last axis, in the format of x."""
        return (self.l2 * x).to(x.dtype)

    def half(self, x: Tensor) -> Tensor:
        return squares(x, self.l2) / 2

    @cached_property
    def scale(self) -> Tensor | float:
        if not isinstance(self.l2, Tensor) or self.least == 0:
            return 1.0
        return (self.l2 / self.least).sqrt()

    def length(self, x: Tensor) -> Tensor:
        """Return ‖s ∘ x‖ along the last axis, from above."""
        return root_above(squares(self.scale * x.double()), x.shape[-1])

    def levers(self, rows: StackedSamples, columns: bool = False) -> Levers:
        """Return the factors of rounding errors of rows a/s; computed once.

        With `columns`, rows multiply x as a/t, for the columns' own `scales` t.
        """
        key = (id(rows), columns)
        if key not in self._levers:
            norms = rows.row_norms
            if isinstance(self.scale, Tensor):
                own = self.scale.view(rows.A.shape[1], -1)[:, 0]
                norms = rows.products.norms(1 / own)
            plain = rows.products.norms(1 / rows.scales) if columns else norms
            self._levers[key] = rows, Levers.of(rows, norms, plain)
        return self._levers[key][1]

    def rounding(
        self, x: Tensor, clients: int, length: Tensor | float
    ) -> tuple[Tensor, Tensor | float]:
        """Bound the errors of `half`, and of l2 ∘ x in a sum over clients, for ‖s ∘ x‖ ≤ length."""
        d = len(x)
        additions = d if d <= SHORT else 2 * math.isqrt(d) + 4  # as in `squares`
        penalty = SAFE * gamma(additions + 8) * self.half(x) + d * LEAST * (1 + self.most)
        pull = self.least * length  # ‖l2 ∘ x / s‖, for l2 = least · s²
        if self.least == 0:
            pull = norm_above(self.times(x.double()), 0)
        return penalty, SAFE * (gamma(clients + CLIENTS + 8) + rounded(x)) * pull

    def gram(self, V: Tensor) -> Tensor:
        return V.mT @ self.times(V.mT).mT

    def shaped(self, x: Tensor) -> Tensor:
        """Return l2 in the format of x, (features, outputs), or one number as (1, 1)."""
        return (
            self.l2.view(x.shape).to(x)
            if isinstance(self.l2, Tensor)
            else x.new_full((1, 1), self.l2)
        )

    def vector(self) -> Vector | None:
        """Return l2 of every entry of x; `None` if it is one number."""
        return self.l2.cpu().numpy() if isinstance(self.l2, Tensor) else None


class LinearPoint:
    """L_i and c_i = A_iᵀ r_i / m_i + l2 ∘ x, held as residuals r and never as N vectors.

    With `fine` rows, which have the same losses, L_i and c_i are computed in double precision for
    any format of x: differences of losses near the optimum are below single precision.
    """

    def __init__(
        self,
        rows: StackedSamples,
        loss: Loss,
        ridge: Ridge,
        x: Tensor,
        outputs: int,
        fine: StackedSamples | None = None,
        constant: Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.loss = loss
        self.ridge = ridge
        self.x = x
        self.outputs = outputs
        self.fine = fine
        self.penalty = ridge.half(x)
        self.predictions, values = self._evaluated()
        self.z = self.predictions.to(x.dtype)
        self.losses = values + self.penalty + (0 if constant is None else constant)
        # what losses have been counted from, whose rounding they have
        self.level = 0.0 if constant is None else (-constant).clamp_min(0)

    def packed(self) -> Tensor:
        """Return what a `RecalledPoint` is made of, as one vector."""
        found = self.predictions, self.slopes, self.losses, *self.rounding()
        return torch.cat([part.flatten() for part in found])

    def _evaluated(self) -> tuple[Tensor, Tensor]:
        p = self.shared()
        if self.fine is None:
            value = self.loss.value(p, self.rows.y) * self.rows.share
            return p, self.rows.layout.segment_sum(value)
        y, share = self.fine.exact
        return p, self.fine.layout.total(self.loss.value(p, y) * share)

    def shared(self) -> Tensor:
        """Return the predictions A x of one x for all clients, or A_i x_i for x (N, d)."""
        X = self.x.view(*self.x.shape[:-1], -1, self.outputs)
        if X.ndim == 3:
            return self.rows.along(X)
        if self.fine is None:
            return self.rows.times(X)
        return self.fine.products.times(X.to(self.fine.share.dtype))

    @cached_property
    def slopes(self) -> Tensor:
        """Derivatives r = ∂ℓ/∂z, sample by sample, in the format of the predictions."""
        y = self.rows.y if self.fine is None else self.fine.exact[0]
        return self.loss.residual(self.predictions, y)

    @cached_property
    def residual(self) -> Tensor:
        return self.slopes.to(self.x.dtype)

    def sum(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i c_i = Aᵀ(w ∘ r) + (Σ w) l2 ∘ x by one matrix product, for any N."""
        if self.fine is None:
            out = self.rows.transposed(self._weighted(weights) * self.residual).flatten()
            return out + weights.sum() * self.ridge.times(self.x)
        return self.added(weights.double(), self.slopes, self.x)

    def added(self, weights: Tensor, slopes: Tensor, x: Tensor) -> Tensor:
        """Return the sum for the derivatives at any x."""
        assert self.fine is not None
        scaled = self.fine.layout.scaled(slopes, weights * self.fine.shares)
        out = self.fine.products.transposed(scaled).flatten()
        return (out + weights.sum() * self.ridge.times(x.double())).to(x.dtype)

    def _weighted(self, weights: Tensor) -> Tensor:
        return (weights[self.rows.layout.owner] * self.rows.share)[:, None]

    def _along(self, V: Tensor) -> Tensor:
        """Return T = A V, the change of the predictions along V's columns: (rows, outputs, k)."""
        k = V.shape[1]
        features = self.rows.A.shape[1]
        return self.rows.times(V.reshape(features, self.outputs * k)).view(*self.z.shape, k)

    def norms(self, scale: Tensor | None = None) -> Tensor:
        squares = self._vectors().square()
        return squares.sum(1) if scale is None else squares @ scale

    def restriction(self, V: Tensor, weights: Tensor, metric: Tensor) -> Restriction[Tensor]:
        """Return Vᵀc_i = Σ_j T_jᵀr_j / m_i + Vᵀ(l2 ∘ x), (N, k), with T = A V, and
        Σ_i w_i VᵀH_iV = Σ_j (w/m) T_jᵀ ℓ''_j T_j + (Σ w) Vᵀl2 V.
        """
        T = self._along(V)
        each = (self.residual[..., None] * T).sum(1) * self.rows.share[:, None]
        slopes = self.rows.layout.segment_sum(each) + self.ridge.times(self.x) @ V
        bent = self._weighted(weights)[..., None] * self.bend(T)
        inner = T.flatten(0, 1).mT @ bent.flatten(0, 1)
        curvature = inner + weights.sum() * self.ridge.gram(V)
        return Restriction(slopes, curvature, self.norms(1 / metric))

    def bend(self, T: Tensor) -> Tensor:
        return self.loss.bend(self.z, self.rows.y, T)

    def curvatures(self, V: Tensor) -> Tensor:
        """Return every client's VᵀH_iV = Σ_j T_jᵀ ℓ''_j T_j / m_i + Vᵀl2 V, (N, k, k), T = A V.

        For V = I and one output A is T, and ℓ'' ≥ 0 makes it a square.
        """
        k = V.shape[1]
        features = self.rows.A.shape[1]
        if self.outputs == 1 and V.shape == (k, k) and torch.equal(V, torch.eye(k).to(V)):
            out = V.new_empty(len(self.rows.layout), k, k)
            bends = self.loss.bends(self.z, self.rows.y)
            for block in self.rows.blocks:
                root = (block.weight[..., None] * block.of(bends)).sqrt()
                R = self.rows.of(block)[0] * root
                out[block.clients] = R.mT @ R
            out.diagonal(dim1=1, dim2=2).add_(self.ridge.times(torch.ones_like(self.x)))
            return out
        out = self.ridge.gram(V).repeat(len(self.rows.layout), 1, 1)
        for block in self.rows.blocks:
            z = block.of(self.z)
            A, y = self.rows.of(block)
            T = (A @ V.reshape(features, self.outputs * k)).view(*z.shape, k)
            bent = block.weight[..., None, None] * self.loss.bend(z, y, T)
            out[block.clients] += T.flatten(1, 2).mT @ bent.flatten(1, 2)
        if self._softmax and V.shape == (k, k) and torch.equal(V, torch.eye(k).to(V)):
            self._gauge(out)
        return out

    def _gauge(self, H: Tensor) -> None:
        """Bend common changes of all outputs, which change no loss of a softmax without a ridge."""
        k = self.outputs
        free = (self.ridge.times(torch.ones_like(self.x))[::k] == 0).nonzero()[:, 0].tolist()
        for j in free:
            own = H[:, j * k : (j + 1) * k, j * k : (j + 1) * k]
            own += own.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] / k**2

    @property
    def _softmax(self) -> bool:
        return isinstance(getattr(self.loss, "inner", self.loss), Softmax)

    def hessian(self, weights: Tensor) -> Tensor:
        """Return Σ_i w_i H_i = Aᵀ diag(w ℓ''/m) A + (Σ w) diag(l2), (d, d), in double precision."""
        A = self.rows.A
        k = self.outputs
        w = self._weighted(weights.to(A)).double()
        softmax = self._softmax
        if k == 1 or self.loss.even:
            bends = self.loss.bends(self.z, self.rows.y)[:, :1]
            H = torch.kron(gram(self.rows, w * bends), torch.eye(k).to(w))
        else:
            W = self.bend(torch.eye(k).to(self.z).expand(*self.z.shape, k))
            if softmax:  # p(1 − p) would lose the digits of 1 − p
                diagonal = W.diagonal(dim1=1, dim2=2)
                diagonal -= W.sum(2)
            H = w.new_empty(A.shape[1], k, A.shape[1], k)
            for a in range(k):
                for b in range(a + 1):
                    H[:, a, :, b] = gram(self.rows, w * W[:, a, b, None], a == b)
                    H[:, b, :, a] = H[:, a, :, b]
            H = H.view(len(self.x), -1)
            if softmax:
                self._gauge(H[None])
        H.diagonal().add_(weights.double().sum() * self.ridge.times(torch.ones_like(w[:1, 0])))
        return H

    def widths(self, root: Tensor, weights: Tensor | None) -> Tensor:
        """Return R max_j ‖v_j‖_{(root rootᵀ)⁻¹}: v_j = a_j, or all (e_k − e_l)⊗a_j of a softmax."""
        R = concordance(self.loss)
        layout = self.rows.layout
        found = torch.full((len(layout),), R, dtype=torch.float64, device=root.device)
        if R == 0 or math.isinf(R) or not self.known:
            return found if R == 0 else found.fill_(math.inf)
        A = self.rows.A
        far = root.new_empty(len(A))
        step = max(PIECE.get(A.device.type, PIECE["cuda"]) // len(root), 1)
        for k in range(0, len(A), step):
            far[k : k + step] = self._reach(root, A[k : k + step].double())
        wide = self.loss.widening(self.predictions, self.rows.y)
        seen = layout.segment_max(SAFE * R * far * wide)
        return seen if weights is None else torch.where(weights.to(seen) > 0, seen, 0.0)

    def _reach(self, root: Tensor, A: Tensor) -> Tensor:
        """Return the longest ‖root⁻¹v‖ of every row."""
        solved = []
        for a in range(self.outputs):
            rows = root.new_zeros(len(root), len(A))
            rows[a :: self.outputs] = A.mT
            solved.append(torch.linalg.solve_triangular(root, rows, upper=False))
        pairs = [one - other for one, other in combinations(solved, 2)] or solved
        return torch.stack([far.norm(dim=0) for far in pairs]).amax(0)

    @property
    def known(self) -> bool:
        """Whether predictions are so exact that curvature is known to a part in 10⁴."""
        if self.fine is None:
            return False
        single = 0.0 if self.z.dtype == torch.float64 else SINGLE * float(self.z.abs().max())
        return bool(_off(self.fine, self.reach) + single < 1e-4)

    def times(self, V: Tensor, weights: Tensor) -> Tensor:
        bent = self._weighted(weights)[..., None] * self.bend(self._along(V))
        out = self.rows.transposed(bent.flatten(1)).reshape(V.shape)
        return out + weights.sum() * self.ridge.times(V.mT).mT

    def diagonal(self, weights: Tensor) -> Tensor:
        return weights @ self.diagonals()

    def diagonals(self) -> Tensor:
        bends = self.loss.bends(self.z, self.rows.y)
        out = bends.new_empty(len(self.rows.layout), self.rows.A.shape[1], self.outputs)
        for block in self.rows.blocks:
            A, _ = self.rows.of(block)
            own = block.weight[..., None] * block.of(bends)
            out[block.clients] = product(A.square().mT, own)
        return out.flatten(1) + self.ridge.times(torch.ones_like(self.x))

    def rounding(self) -> tuple[Tensor, Tensor]:
        """Bound the rounding errors of L_i and c_i, in the metric of the ridge, for stored data."""
        return self.ridged(*self.arithmetic(() if self.fine is None else self.reach))

    def ridged(self, loss: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        penalty, pull = self.ridge.rounding(self.x, len(self.rows.layout), self.size)
        return loss + penalty, gradient + pull

    @cached_property
    def size(self) -> Tensor | float:
        """‖s ∘ x‖ from above; on a GPU without waiting for it."""
        size = self.ridge.length(self.x)
        return size if size.is_cuda else float(size)

    @cached_property
    def reach(self) -> tuple[Reach, ...]:
        """Bounds on Σ_k |a_jk||x_k|: the sum of the products of lengths.

        Rows are a/s and the vector s ∘ x; where columns or ridges are unlike, a/t and t ∘ x for the
        columns' own scales t, if that is less.
        """
        assert self.fine is not None
        reach = Reach(self.size, self.ridge.levers(self.fine))
        if self.ridge.even and self.fine.alike:
            return (reach,)
        X = self.fine.scales[:, None] * self.x.double().view(-1, self.outputs)
        levers = self.ridge.levers(self.fine, columns=True)
        other = Reach(root_above(squares(X.flatten()), len(self.x)), levers)
        less, more = ((size**2 * levers.flat).sum() for size, levers in (other, reach))
        return (other,) if bool(less < more) else (reach,)

    @quiet
    def arithmetic(self, reach: Sequence[Reach]) -> tuple[Tensor, Tensor]:
        """Bound the errors of sums, if rows multiply vectors that reach so far.

        The error of a sum of n products is at most γ_n times the sum of their sizes (worst case:
        any order, any signs). With a relative error v and an absolute error o of ℓ, w and j of r
        (`Loss.accuracy`), m rows of a client, M of all, and means over a client's rows:

            δz = γ_d Σ ‖a‖‖x‖
            δL = mean (‖r‖(1 + w) + j)δz + (curvature/2) mean δz² + (v + γ_{2√m})L + o
            δc = mean ‖a‖(curvature δz + (w + γ_M)‖r‖ + j)

        The code does not halve δz² in δL, which leaves room for products of errors.
        """
        fine = self.fine
        if fine is None:
            unknown = torch.full_like(self.losses, float("inf"))
            return unknown, unknown
        value, offset, slope, jump = (UNIT * error for error in self.loss.accuracy(self.outputs))
        features = fine.A.shape[1]
        tiny = LEAST * features * self.outputs * len(reach)
        # a number per client: on a CPU NumPy takes a tenth of the time of torch for them
        curvature = array(self.steepness(reach))
        relative = UNIT * SAFE * array(fine.layout.additions) + (value + tiny + 8 * UNIT * SAFE)
        loss = relative * (abs(array(self.losses)) + array(self.level))
        loss = loss + (offset + curvature * tiny**2 + 2 * tiny + len(fine.A) * LEAST)
        for size, levers in reach:
            k = gamma(features + 4) * array(size)
            loss = loss + ((1 + slope) * k) * array(self._pulls(levers.plain))
            loss = loss + (curvature * len(reach) * (k * k)) * array(levers.flat)
            if jump:
                loss = loss + (jump * k) * array(levers.across)
        return torch.as_tensor(SAFE * loss).to(self.losses), self.slope_error(reach)

    @quiet
    def slope_error(self, reach: Sequence[Reach]) -> Tensor:
        assert self.fine is not None
        _, _, slope, jump = (UNIT * error for error in self.loss.accuracy(self.outputs))
        curvature = array(self.steepness(reach))
        rows, features = self.fine.A.shape
        tiny = LEAST * features * self.outputs * len(reach)
        sums = gamma(rows + 4) + gamma(CLIENTS)
        levers = reach[0].levers
        gradient = (slope + sums + rounded(self.x)) * array(self._pulls(levers.each))
        gradient = gradient + array(levers.mean) * (curvature * tiny + 2 * jump)
        for size, levers in reach:
            k = gamma(features + 4) * array(size)
            gradient = gradient + (curvature * k) * array(levers.cross)
        least = LEAST if rounded(self.x) == 0 else 2.0**-126
        underflow: float = rows * least * (features * self.outputs) ** 0.5
        return torch.as_tensor(SAFE * gradient + underflow).to(self.losses)

    def steepness(self, reach: Sequence[Reach]) -> Tensor | float:
        """Bound ∂²ℓ/∂z² of every client's samples between exact and computed predictions.

        Where it has no bound everywhere it is less than twice as large anywhere within log 2.
        """
        assert self.fine is not None
        y = self.fine.exact[0]
        if self.loss.smooth and self.loss.fastest == 1:
            weights = self.loss.steepness(y) if isinstance(self.loss, Weighted) else None
            layout = self.fine.layout
            return self.loss.curvature if weights is None else layout.segment_max(weights)
        off = _off(self.fine, reach)
        bends = 2 * self.fine.layout.segment_max(self.loss.bends(self.predictions, y)[..., 0])
        found: Tensor = torch.where(off * self.loss.fastest < 0.5, bends, torch.inf)
        return found

    def _pulls(self, each: Tensor) -> Tensor:
        """Return every client's mean of ‖a_j‖‖r_j‖, for ‖a_j‖/m_i."""
        assert self.fine is not None
        return self.fine.layout.segment_sum(self._sizes * each)

    @cached_property
    def _sizes(self) -> Tensor:
        """‖r_j‖ from above."""
        return norm_above(self.slopes, 1)

    def each(self) -> Tensor:
        """Return the c_i themselves, (N, d), for stochastic local steps; they stay with clients."""
        if self.fine is None:
            return self._vectors()
        own = self.fine.each(self.fine.exact[1][:, None] * self.slopes).flatten(1)
        return own.add_(self.ridge.times(self.x.double())).to(self.x.dtype)

    def _vectors(self) -> Tensor:
        """Return the c_i in the format of x, as lengths need them."""
        own = self.rows.each(self.rows.share[:, None] * self.residual).flatten(1)
        return own.add(self.ridge.times(self.x))


def rounded(x: Tensor) -> float:
    """Rounding of vectors and weights in the format of x: λ_i, r_i, c_i, l2 x and their sum."""
    return 0.0 if x.dtype == torch.float64 else 4 * SINGLE


def gram(rows: StackedSamples, w: Tensor, positive: bool = True) -> Tensor:
    """Return Aᵀ diag(w) A in double precision, in pieces that stay in a cache.

    With positive weights both factors are one matrix, and BLAS computes half of the product.
    """
    A = rows.A
    if A.is_cuda:
        return (w * A).mT @ A.to(w)
    root = (w.sqrt() if positive else w).numpy()
    if rows.cells is not None and rows.cells.pays(len(A)):
        return rows.cells.gram(w[:, 0])
    out = np.zeros((A.shape[1],) * 2)
    step = max(PIECE["cpu"] // A.shape[1], 1)
    for k in range(0, len(A), step):
        right = A[k : k + step].to(rows.share.dtype).numpy()
        part = root[k : k + step] * right
        out += part.T @ (part if positive else right)
    return torch.from_numpy(out)


def _off(rows: StackedSamples, reach: Sequence[Reach]) -> Tensor:
    """Bound the errors of predictions."""
    each = [size * (levers.plain / rows.exact[1]).max() for size, levers in reach]
    return torch.as_tensor(gamma(rows.A.shape[1] + 4) * sum(each))
