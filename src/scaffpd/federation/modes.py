r"""Questions about the clients' own models around x, for strengths by evidence.

    u_i(x) = argmin_u Σ_rows ℓ(⟨a, u⟩, y)/s + ½‖u − x‖²_{T⁻¹},    T = diag(τ)

Everything goes up as a sum over clients: not even a loss is seen by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from scaffpd.federation.border import summed
from scaffpd.federation.questions import ClientSide, Question, Reply, Shapes


@dataclass(frozen=True, eq=False)
class ModesAt(Question):
    """The clients' own modes at x: minima, gradients and Hessians as functions of x."""

    kind = "modes"
    shows = (
        summed("value", "minima of your loss with a pull to a shared point"),
        summed("gradient", "their gradients"),
        summed("curvature", "their Hessians", tables=True),
    )
    symmetric = ("curvature",)

    x: Tensor
    tau: Tensor  # τ_j, one number per feature, the same for all outputs; 0 shares the coefficient
    scale: float = 1.0  # s, what a row's loss is divided by: 1, or 2σ² for squared loss
    # the number of coefficients of a feature that the Hessian couples: those of a softmax, and else
    # 1
    outputs: int = 1
    # the decrease of a client's next Newton step, in nats, at which it may stop
    close: float = 1e-8
    # an earlier question, from whose u_i the clients start; it changes nothing but time
    start: ModesAt | None = None
    # whether u_i are posterior means, not modes, and minima are those of −log of an integral: by
    # quadrature (`models/quadrature.py`) over up to three coefficients that differ, beyond that to
    # first order; for losses with one output, to report and not to predict
    means: bool = False

    def shapes(self, d: int) -> Shapes:
        """Return the shapes of (minimum, log det(I + T^½H_iT^½), n_i), ∇ and ∇²."""
        q = len(self.tau) * self.outputs
        return {"value": (3,), "gradient": (d,), "curvature": (q, q)}

    def down(self, d: int) -> int:
        return len(self.tau) + 1

    def answer(self, clients: ClientSide) -> Reply:
        return Reply({}, clients.modes(self).modes())


@dataclass(frozen=True, eq=False)
class ModeSpread(Question):
    r"""How far the u_i are from x after a Newton step of x, and how far by chance.

    With v_i = T^{-½}(u_i − x) and the posterior covariance C of x: Σ_i v_ij² after the step, and
    Σ_i [1 − (V_i + B_i C B_iᵀ)_jj/τ_j] with V_i = (H_i + T⁻¹)⁻¹, B_i = V_iH_i.
    """

    kind = "spread"
    shows = (summed("spread", "squared distances of your own model from the shared point"),)

    at: ModesAt
    C: Tensor
    step: Tensor

    def shapes(self, d: int) -> Shapes:
        return {"spread": (2, len(self.C))}

    def down(self, d: int) -> int:
        """Count the step; clients can form C from the sums of `ModesAt`."""
        return math.prod(self.step.shape)

    def answer(self, clients: ClientSide) -> Reply:
        return Reply({}, {"spread": clients.modes(self.at).spread(self.C, self.step)})


@dataclass(frozen=True, eq=False)
class Dispersions(Question):
    """How likely counts are at the u_i for dispersions α, whose variances are μ + αμ²."""

    kind = "dispersions"
    shows = (summed("likelihood", "how likely your counts are for each of some dispersions"),)

    at: ModesAt
    grid: Tensor

    def shapes(self, d: int) -> Shapes:
        return {"likelihood": self.grid.shape}

    def down(self, d: int) -> int:
        return len(self.grid)

    def answer(self, clients: ClientSide) -> Reply:
        return Reply({}, {"likelihood": clients.modes(self.at).dispersed(self.grid)})


@dataclass(frozen=True, eq=False)
class OwnCoefficients(ModeSpread):
    r"""L u_i after the step, and the variances of its parts, which stay at the client.

    Cov u_i = V_i + (I − B_i) C (I − B_i)ᵀ: what its own rows leave open, and what x does.
    """

    kind = "own"
    shows = (summed("own", "your own coefficients"),)

    L: Tensor

    def shapes(self, d: int) -> Shapes:
        return {"own": (2, len(self.L))}

    def answer(self, clients: ClientSide) -> Reply:
        return Reply({}, {"own": clients.modes(self.at).own(self.C, self.step, self.L)})


@dataclass(frozen=True, eq=False)
class ModeInformation(ModeSpread):
    r"""What degrees of freedom and robust errors need, with g_i and Q_i the slope and Hessian in x.

    Σ_i g_ig_iᵀ, and for groups g, h of coefficients Σ_i Q_iE_gQ_i and
    Σ_i Σ_{j∈g, k∈h} (Q_i)_jk (Q_i − 2 Q_iCQ_i)_jk.
    """

    kind = "information"
    shows = (summed("information", "products of slopes and Hessians of your own model"),)

    groups: Tensor  # (groups, coefficients), ones for those of a group

    def shapes(self, d: int) -> Shapes:
        q, p = len(self.C), len(self.groups)
        return {"information": (q * q * (1 + p) + p * p,)}

    def answer(self, clients: ClientSide) -> Reply:
        found = clients.modes(self.at).information(self.C, self.step, self.groups)
        return Reply({}, {"information": found})


@dataclass(frozen=True, eq=False)
class ModeSquares(ModeSpread):
    r"""What errors need, of silos: sums of squares, and no product of two slopes.

    For rows l of L and groups g, h of coefficients Σ_i ‖E_gQ_il‖², Σ_i ‖g_i‖²_g, Σ_i tr_g(Q_iCQ_i),
    Σ_i Σ_{j∈g, k∈h} (Q_i)_jk (Q_i − 2 Q_iCQ_i)_jk, and if `robust` Σ_i ⟨l, g_i⟩².
    """

    kind = "squares"
    shows = (summed("squares", "squares of slopes and curvatures of your own model"),)

    groups: Tensor
    L: Tensor
    robust: bool

    def shapes(self, d: int) -> Shapes:
        p, k = len(self.L), len(self.groups)
        return {"squares": (k * (p + 2 + k) + p * self.robust,)}

    def answer(self, clients: ClientSide) -> Reply:
        return Reply({}, {"squares": clients.modes(self.at).squares(self)})
