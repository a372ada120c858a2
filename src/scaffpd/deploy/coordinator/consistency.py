r"""Whether a silo's answers can all be true: values and gradients of one smooth, strongly convex function.

Answers (x_i, f_i, g_i) are those of some μ-strongly convex, L-smooth function if and only if for all pairs (Taylor,
Hendrickx and Glineur 2017, "Smooth strongly convex interpolation and exact worst-case performance of first-order
methods", Theorem 4), with h = f − (μ/2)‖·‖², which is convex and (L − μ)-smooth,

    f_i ≥ f_j + ⟨g_j, x_i − x_j⟩ + (μ/2)‖x_i − x_j‖² + ‖g_i − g_j − μ(x_i − x_j)‖² / (2(L − μ)).

L and μ are what the silo said when the agreement was made. No test of pairs is stronger: answers that pass it are the
truth about some such function. An answer without a gradient has to lie between the bounds of those that have one,

    f_j + ⟨g_j, x − x_j⟩ + (μ/2)‖x − x_j‖² ≤ f(x) ≤ f_j + ⟨g_j, x − x_j⟩ + (L/2)‖x − x_j‖²,

and a linear model's losses are never negative: with l2 known, h = f − (l2/2)‖·‖² ≥ 0 and ‖∇h‖² ≤ 2(L − l2) h.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scaffpd.federation import Vector

KEPT = 8  # answers of a silo that a new one is compared with
LARGER = 1.05  # L_i is found by a silo in its own number format, by power iteration where it is large
DOUBLE = float(np.finfo(np.float64).eps)


class Claim(NamedTuple):
    """One answer of a silo.

    Attributes:
        x: where it was asked.
        loss: f(x).
        gradient: ∇f(x), where it has told it.
        loose: how far off rounding may have put the loss.
        slack: and, in norm, the gradient.
        size: ‖∇f(x)‖.
    """

    x: Vector
    loss: float
    gradient: Vector | None
    loose: float
    slack: float
    size: float


@dataclass(frozen=True)
class Shape:
    """What is known of a silo's loss before the first round.

    Attributes:
        smoothness: L, as the silo has said.
        strong_convexity: μ, likewise.
        samples: n, likewise.
        dimension: d.
        epsilon: of the model's number format.
        l2: the regulariser of a linear model, whose loss is not negative; `None` for any other convex loss.
    """

    smoothness: float
    strong_convexity: float
    samples: int
    dimension: int
    epsilon: float
    l2: float | None

    @property
    def steepness(self) -> float:
        """L with what its own computation may have been off."""
        return LARGER * self.smoothness

    def rounding(self, x: Vector, loss: float) -> tuple[float, float]:
        """Bounds on the errors of f(x) and ∇f(x) by the number format alone, whatever the silo says about them.

        The clients' own bounds (see `LinearPoint.rounding`) with what the coordinator knows: curvature·mean ‖a‖² ≤ T =
        min(d, n) L, curvature·mean ‖y‖² ≤ Y = 4f + 2T‖x‖² + ¼ and mean ‖r‖² ≤ 2 curvature f, for ℓ ≥ 0 is smooth.
        """
        f, size = max(loss, 0.0), float(np.linalg.norm(x))
        share = 4 * self.epsilon * (self.samples**0.5 + self.dimension**0.5)
        T = min(self.dimension, self.samples) * self.steepness
        E = share * (T**0.5 * size + (4 * f + 2 * T * size * size + 0.25) ** 0.5)
        value = 2 * (2 * f) ** 0.5 * E + E * E + share * f
        return value, 2 * T**0.5 * E + 2 * share * (2 * f * T) ** 0.5 + share * self.steepness * size

    def claim(
        self, x: Vector, loss: float, gradient: Vector | None = None, told: tuple[float, float] = (np.inf, np.inf)
    ) -> Claim:
        """An answer, with the bounds on rounding that the silo has told, as far as those are credible."""
        most, size = self.rounding(x, loss), 0.0 if gradient is None else float(np.linalg.norm(gradient))
        loose, slack = (2 * min(bound, max(said, 0.0)) for bound, said in zip(most, told, strict=True))
        return Claim(x, loss, gradient, loose, slack, size)


def alone(shape: Shape, new: Claim) -> str | None:
    """Why one answer cannot be true, by itself: f − (l2/2)‖·‖² is negative, or too small for its gradient."""
    if shape.l2 is None:
        return None
    square = float(new.x @ new.x)
    rest, loose = new.loss - shape.l2 / 2 * square, new.loose + _arithmetic(shape, new, square)
    if rest < -loose:
        what = "is negative" if new.loss < 0 else f"is below its own regulariser, {shape.l2 / 2 * square:.6g}"
        return f"the loss {new.loss:.6g} {what} (sign of the loss)"
    if new.gradient is None:
        return None
    size = float(np.linalg.norm(new.gradient - shape.l2 * new.x))
    most = (2 * max(shape.steepness - shape.l2, 0.0) * (max(rest, 0.0) + loose)) ** 0.5 + new.slack
    if size > most * (1 + 1e-6):
        what = f"its gradient has norm {size:.6g}"
        return f"{what}, and a loss of {new.loss:.6g} allows {most:.6g} (size of the gradient)"
    return None


def together(shape: Shape, one: Claim, two: Claim) -> str | None:
    """Why two answers cannot both be true; in both directions."""
    way = one.x - two.x
    square = float(way @ way)
    slopes = [0.0 if claim.gradient is None else float(claim.gradient @ way) for claim in (one, two)]
    bent, error = _bent(shape, one, two, slopes[0] - slopes[1], square)
    for here, there, slope in ((one, two, slopes[1]), (two, one, -slopes[0])):
        if there.gradient is None:
            continue
        tangent = there.loss + slope
        low, high = tangent + shape.strong_convexity / 2 * square + bent, np.inf
        if here.gradient is None:
            high = tangent + shape.steepness / 2 * square
        off = error + one.loose + two.loose + there.slack * square**0.5 + _arithmetic(shape, there, square)
        if here.loss < low - off:
            return f"the loss {here.loss:.8g} is {low - here.loss:.2g} too small {_beside(there, off)}"
        if here.loss > high + off:
            return f"the loss {here.loss:.8g} is {here.loss - high:.2g} too large {_beside(there, off)}"
    return None


def _bent(shape: Shape, one: Claim, two: Claim, along: float, square: float) -> tuple[float, float]:
    """‖g_i − g_j − μ(x_i − x_j)‖²/(2(L − μ)) and what rounding may add to it; nothing without both gradients."""
    if one.gradient is None or two.gradient is None:
        return 0.0, 0.0
    apart, mu = one.gradient - two.gradient, shape.strong_convexity
    terms = float(apart @ apart), 2 * mu * along, mu * mu * square
    size, room = max(terms[0] - terms[1] + terms[2], 0.0), 2 * max(shape.steepness - mu, 1e-30)
    slack, sums = one.slack + two.slack, 8 * DOUBLE * len(apart) ** 0.5 * (terms[0] + abs(terms[1]) + terms[2])
    return size / room, ((2 * size**0.5 + slack) * slack + sums) / room


def _arithmetic(shape: Shape, claim: Claim, square: float) -> float:
    """What the sums of the test itself may be off, for a way of that squared length."""
    terms = abs(claim.loss) + claim.size * square**0.5 + shape.steepness * square
    return float(16 * DOUBLE * len(claim.x) ** 0.5 * terms)


def _beside(there: Claim, error: float) -> str:
    return f"beside its loss {there.loss:.8g} and gradient elsewhere; rounding explains {error:.1g} (consistency)"


class Consistency:
    """One silo's last answers over all samples.

    Args:
        shape: what it has said about its loss.
        probe: the loss at an arbitrary point that it has told with that.
        kept: how many answers of either sort, with a gradient and without, a new one is compared with.
    """

    def __init__(self, shape: Shape, probe: Claim, kept: int = KEPT) -> None:
        self.shape, self._probe = shape, probe
        self._points, self._values = deque[Claim](maxlen=kept), deque[Claim](maxlen=kept)

    def trouble(self, new: Claim) -> str | None:
        """Why the answer contradicts itself or those before; `None`, and it is kept, where it does not."""
        if (why := alone(self.shape, new)) is not None:
            return why
        found = (together(self.shape, new, old) for old in self._before())
        if (why := next((why for why in found if why is not None), None)) is not None:
            return why
        (self._values if new.gradient is None else self._points).append(new)
        return None

    def slack(self, x: Vector) -> float:
        """How far off rounding may put a gradient near x."""
        last = self._points[-1] if self._points else self._probe
        return 4 * self.shape.rounding(x, last.loss)[1]

    def _before(self) -> Iterator[Claim]:
        yield self._probe
        yield from self._points
        yield from self._values
