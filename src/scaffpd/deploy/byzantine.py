r"""Test silos' answers: their format, their size compared with the others', and their consistency.

**Values and gradients.** Answers (x_i, f_i, g_i) are those of some μ-strongly convex, L-smooth function if and only if
for all pairs (Taylor, Hendrickx and Glineur 2017, "Smooth strongly convex interpolation and exact worst-case
performance of first-order methods", Theorem 4), with h = f − (μ/2)‖·‖², which is convex and (L − μ)-smooth,

    f_i ≥ f_j + ⟨g_j, x_i − x_j⟩ + (μ/2)‖x_i − x_j‖² + ‖g_i − g_j − μ(x_i − x_j)‖² / (2(L − μ)).

L and μ are what the silo reported with the agreement. No test of pairs is stronger: answers that pass it belong to some
such function. An answer without a gradient has to lie between the bounds of those that have one,

    f_j + ⟨g_j, x − x_j⟩ + (μ/2)‖x − x_j‖² ≤ f(x) ≤ f_j + ⟨g_j, x − x_j⟩ + (L/2)‖x − x_j‖²,

and a linear model's losses are never negative: with l2 known, h = f − (l2/2)‖·‖² ≥ 0 and ‖∇h‖² ≤ 2(L − l2) h.

**Anchors.** A multiple of an honest function passes these tests as well: a·f_i + b shifts λ, and with it the model. So
losses are compared with values that hold for any rows. At x = 0 logistic loss is log 2 and softmax loss log K; with the
agreed bound T_i on the mean ‖a‖² of a silo's rows (its sums over columns, or declared ranges), h = f_i − (l2/2)‖·‖² has

    h(0) = ℓ(0),    ‖∇h(0)‖ ≤ |ℓ'(0)| √T_i,    ‖∇h‖ ≤ max |ℓ'| √T_i,    |h(x) − ℓ(0)| ≤ max |ℓ'| √T_i ‖x‖,
    L_i ≤ curvature·T_i + l2.

f_i(0) is never asked for; it acts as an earlier answer with which all later ones have to be consistent.

**Sizes.** An answer of silo i is an outlier if it is more than `outlier` times as large as the median over the others
j of the larger of ‖c_j‖ and √(2 L_j f_j) at a fixed arbitrary point (the gradient of a smooth loss f ≥ 0 never exceeds
that). So silos at their own optimum, whose gradients vanish, do not make an honest silo an outlier.

**Updates.** Corrected local steps on a convex f_i with η L_i ≤ 1 are gradient steps on h = f_i − ⟨c_i − c, ·⟩ from
∇h(x) = c. Such steps are nonexpansive and each lowers h by at least (η/2)‖∇h‖², so J of them satisfy

    ‖d_i‖ ≤ J η ‖c‖,    ⟨c, d_i⟩ ≥ (μ_i/2)‖d_i‖² + ‖d_i‖²/(2 J η).

The tests of convexity apply to a shared model with convex losses, and to answers over all samples that are neither
masked nor noisy; the test of sizes applies to every answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.deploy.messages import Array, Facts, Message
from scaffpd.federation import Constants, LocalPlan, Vector, same_point
from scaffpd.federation.questions import (
    Curvature,
    Diagonal,
    GradientsAt,
    LocalSteps,
    Losses,
    ProximalSteps,
    Question,
    Scores,
)
from scaffpd.models.losses import loss_named
from scaffpd.run.settings.model_file import Setup, linear

Shapes = Mapping[str, tuple[int, ...]]
HUGE = np.float64(1e100)  # larger numbers are refused: products of two would overflow
SCALARS = "scalars"  # always float64; the first is a loss or a size, and finite


def troubles(
    answers: Mapping[str, Message], shapes: Shapes, wide: Collection[str], like: Tensor
) -> dict[str, str]:
    """Return why some silos' answers cannot be used; parts that are not `wide` (float64) need the format of x.

    Numbers that are not finite are a silo's fault if others have finite ones; if nobody has, the run is diverging, and
    the training loop reports that.
    """
    malformed = {
        name: why
        for name, answer in answers.items()
        if (why := _malformed(answer, shapes, wide, like))
    }
    infinite = {
        name: why
        for name, answer in answers.items()
        if name not in malformed and (why := _infinite(answer))
    }
    everybody = len(infinite) > 1 and len(malformed) + len(infinite) == len(answers)
    return malformed if everybody else malformed | infinite


def _malformed(answer: Message, shapes: Shapes, wide: Collection[str], like: Tensor) -> str | None:
    if set(answer.arrays) != set(shapes):
        return "its answer has other parts than were asked for"
    for name, shape in shapes.items():
        array = answer.arrays[name]
        if array.shape != shape:
            return f"its {name!r} has shape {array.shape}, not {shape}"
        if array.dtype != (np.float64 if name in wide else like.numpy().dtype):
            return f"its {name!r} holds {array.dtype}"
    return None


def _infinite(answer: Message) -> str | None:
    """Name the part that is not finite; of scalars only the first has to be, since rounding bounds may be infinite."""
    for name, array in answer.arrays.items():
        if not np.all(np.abs(array[:1] if name == SCALARS else array) <= HUGE):
            return f"its {name!r} has an entry that is NaN, infinite or beyond {HUGE:g}"
    return None


KEPT = 8  # answers of a silo that a new one is compared with
LARGER = 1.05  # tolerance for L_i, which a silo computes in its own number format, by power iteration if it is large
EPSILON = float(np.finfo(np.float64).eps)


class Claim(NamedTuple):
    """One answer of a silo."""

    x: Vector  # where it was asked
    loss: float  # f(x)
    gradient: Vector | None  # ∇f(x), if it was asked for
    loose: float  # bound on the rounding error of the loss
    slack: float  # bound on that of the gradient, in norm
    size: float  # ‖∇f(x)‖


@dataclass(frozen=True)
class LossAnchor:
    """Data-independent bounds on a silo's unregularised loss h."""

    loss: float | None  # h(0); `None` where it depends on the targets
    start: float  # a bound on ‖∇h(0)‖
    slope: float  # a bound on ‖∇h‖ everywhere
    bend: float  # a bound on L_i − l2
    exact: bool = True  # whether h(0) equals `loss`; for personal models it is at most `loss`

    def off(self, distance: float, rest: float, loose: float) -> str | None:
        """Say why h(x) cannot be `rest` ± `loose` at this distance from zero."""
        if self.loss is None:
            return None
        far = self.slope * distance if distance else 0.0
        room = loose + far * (1 + 1e-6)
        if rest > self.loss + room or (self.exact and rest < self.loss - room):
            where = (
                f"{distance:.3g} from x = 0, where it is {self.loss:.6g} for any rows"
                if distance
                else "at x = 0"
            )
            most = (
                f"{self.loss:.6g}"
                if not distance
                else f"{max(self.loss - far, 0):.6g} to {self.loss + far:.6g}"
            )
            return f"the loss is {rest:.6g} {where}, and rows as agreed give {most} (loss at zero)"
        return None


def anchors(facts: Facts, setup: Setup | None) -> list[LossAnchor | None]:
    """Return every silo's anchor; `None` for networks, silos' own cohorts and noisy answers."""
    n = len(facts.probes)
    if setup is None or setup.model.get("kind", "linear") != "linear" or facts.constants.noisy:
        return [None] * n
    model = linear(setup.model)
    loss = loss_named(model.loss)
    value, start = loss.at_zero(model.classes) or (None, np.inf)
    squares = np.full(n, np.inf) if facts.squares is None else facts.squares
    curvature = loss.curvature if loss.per_target == 0 else np.inf
    exact = "strength" not in setup.model
    return [
        LossAnchor(value, start * T**0.5, loss.slope * T**0.5, curvature * T, exact)
        for T in map(float, LARGER * squares)
    ]


@dataclass(frozen=True)
class LossBounds:
    """Constants of a silo's loss, known before the first round."""

    smoothness: float  # L, as the silo reported it
    strong_convexity: float  # μ, likewise
    samples: int  # n, likewise
    dimension: int  # d
    epsilon: float  # of the model's number format
    l2: (
        float | None
    )  # the regulariser of a linear model, whose loss is not negative; `None` for any other convex loss
    anchor: LossAnchor | None = None  # data-independent bounds

    @property
    def steepness(self) -> float:
        """L with the tolerance for its own computation."""
        return LARGER * self.smoothness

    def rounding(self, x: Vector, loss: float) -> tuple[float, float]:
        """Bound the rounding errors of f(x) and ∇f(x) by the number format, without trusting the silo.

        These are the clients' own bounds (see `LinearPoint.rounding`) in known terms: curvature·mean ‖a‖² ≤ T =
        min(d, n) L, curvature·mean ‖y‖² ≤ Y = 4f + 2T‖x‖² + ¼ and mean ‖r‖² ≤ 2 curvature f, as ℓ ≥ 0 is smooth.
        """
        f = max(loss, 0.0)
        size = float(np.linalg.norm(x))
        share = 4 * self.epsilon * (self.samples**0.5 + self.dimension**0.5)
        T = min(self.dimension, self.samples) * self.steepness
        E = share * (T**0.5 * size + (4 * f + 2 * T * size * size + 0.25) ** 0.5)
        value = 2 * (2 * f) ** 0.5 * E + E * E + share * f
        return value, 2 * T**0.5 * E + 2 * share * (
            2 * f * T
        ) ** 0.5 + share * self.steepness * size

    def claim(
        self,
        x: Vector,
        loss: float,
        gradient: Vector | None = None,
        told: tuple[float, float] = (np.inf, np.inf),
    ) -> Claim:
        """Return an answer with the silo's own rounding bounds, as far as those are credible."""
        most = self.rounding(x, loss)
        size = 0.0 if gradient is None else float(np.linalg.norm(gradient))
        loose, slack = (
            2 * min(bound, max(said, 0.0)) for bound, said in zip(most, told, strict=True)
        )
        return Claim(x, loss, gradient, loose, slack, size)


def contradicts_itself(shape: LossBounds, new: Claim) -> str | None:
    """Say why one answer is impossible by itself: f − (l2/2)‖·‖² is negative, or too small for its gradient."""
    if shape.l2 is None:
        return None
    square = float(new.x @ new.x)
    rest = new.loss - shape.l2 / 2 * square
    loose = new.loose + _arithmetic(shape, new, square)
    if rest < -loose:
        what = (
            "is negative"
            if new.loss < 0
            else f"is below its own regulariser, {shape.l2 / 2 * square:.6g}"
        )
        return f"the loss {new.loss:.6g} {what} (sign of the loss)"
    anchor = shape.anchor
    distance = square**0.5
    if anchor is not None and (found := anchor.off(distance, rest, loose)) is not None:
        return found
    if new.gradient is None:
        return None
    size = float(np.linalg.norm(new.gradient - shape.l2 * new.x))
    if anchor is not None and size > (
        most := (anchor.slope if square else anchor.start) * (1 + 1e-6) + new.slack
    ):
        return f"its gradient has norm {size:.6g}, and rows as agreed allow {most:.6g} (length of rows)"
    most = (2 * max(shape.steepness - shape.l2, 0.0) * (max(rest, 0.0) + loose)) ** 0.5 + new.slack
    if size > most * (1 + 1e-6):
        what = f"its gradient has norm {size:.6g}"
        return f"{what}, and a loss of {new.loss:.6g} allows {most:.6g} (size of the gradient)"
    return None


def contradict_each_other(shape: LossBounds, one: Claim, two: Claim) -> str | None:
    """Say why two answers cannot both be true, tested in both directions."""
    way = one.x - two.x
    square = float(way @ way)
    slopes = [
        0.0 if claim.gradient is None else float(claim.gradient @ way) for claim in (one, two)
    ]
    bent, error = _bent(shape, one, two, slopes[0] - slopes[1], square)
    for here, there, slope in ((one, two, slopes[1]), (two, one, -slopes[0])):
        if there.gradient is None:
            continue
        tangent = there.loss + slope
        low = tangent + shape.strong_convexity / 2 * square + bent
        high = np.inf
        if here.gradient is None:
            high = tangent + shape.steepness / 2 * square
        off = (
            error
            + one.loose
            + two.loose
            + there.slack * square**0.5
            + _arithmetic(shape, there, square)
        )
        if here.loss < low - off:
            return (
                f"the loss {here.loss:.8g} is {low - here.loss:.2g} too small {_beside(there, off)}"
            )
        if here.loss > high + off:
            return f"the loss {here.loss:.8g} is {here.loss - high:.2g} too large {_beside(there, off)}"
    return None


def _bent(
    shape: LossBounds, one: Claim, two: Claim, along: float, square: float
) -> tuple[float, float]:
    """Return ‖g_i − g_j − μ(x_i − x_j)‖²/(2(L − μ)) and its rounding bound; zero without both gradients."""
    if one.gradient is None or two.gradient is None:
        return 0.0, 0.0
    apart = one.gradient - two.gradient
    mu = shape.strong_convexity
    terms = float(apart @ apart), 2 * mu * along, mu * mu * square
    size = max(terms[0] - terms[1] + terms[2], 0.0)
    room = 2 * max(shape.steepness - mu, 1e-30)
    slack = one.slack + two.slack
    sums = 8 * EPSILON * len(apart) ** 0.5 * (terms[0] + abs(terms[1]) + terms[2])
    return size / room, ((2 * size**0.5 + slack) * slack + sums) / room


def _arithmetic(shape: LossBounds, claim: Claim, square: float) -> float:
    """Bound the rounding errors of the test's own sums; `square` is the squared distance of the points."""
    terms = abs(claim.loss) + claim.size * square**0.5 + shape.steepness * square
    return float(16 * EPSILON * len(claim.x) ** 0.5 * terms)


def _beside(there: Claim, error: float) -> str:
    return f"beside its loss {there.loss:.8g} and gradient elsewhere; rounding explains {error:.1g} (consistency)"


class Consistency:
    """One silo's last answers over all samples, with the loss at an arbitrary point that came with the agreement.

    A new answer is compared with the last `kept` with a gradient and the last `kept` without.
    """

    def __init__(self, shape: LossBounds, probe: Claim, kept: int = KEPT) -> None:
        self.shape = shape
        self._probe = probe
        self._points, self._values = deque[Claim](maxlen=kept), deque[Claim](maxlen=kept)
        self._known = [probe]
        if shape.anchor is not None and shape.anchor.loss is not None:
            self._known.append(
                Claim(np.zeros_like(probe.x), shape.anchor.loss, None, 0.0, 0.0, 0.0)
            )

    def trouble(self, new: Claim) -> str | None:
        """Say why the answer contradicts itself or earlier ones; otherwise store it and return `None`."""
        earlier = (*self._known, *self._points, *self._values)
        found = contradicts_itself(self.shape, new)
        found = found or next(
            filter(None, (contradict_each_other(self.shape, new, old) for old in earlier)), None
        )
        if found is None:
            (self._values if new.gradient is None else self._points).append(new)
        return found

    def slack(self, x: Vector) -> float:
        """Bound the rounding error of a gradient near x."""
        last = self._points[-1] if self._points else self._probe
        return 4 * self.shape.rounding(x, last.loss)[1]


FEWEST = 3  # fewest silos for a median of the others
ROOM = 1.05  # tolerance for rounding over many steps

Sizes = Mapping[int, float]


def absurd(sizes: Sizes, usual: Sizes, outlier: float) -> dict[int, float]:
    """Return the outliers, each with the median of the others that it exceeds `outlier` times."""
    if len(sizes) < FEWEST:
        return {}
    found = {}
    for i, size in sizes.items():
        median = float(np.median([max(sizes[j], usual[j]) for j in sizes if j != i]))
        if size > outlier * median > 0:
            found[i] = median
    return found


def usual_gradients(constants: Constants, probes: Vector) -> Vector:
    """Return √(2 max_j L_ij f_i) at the agreement's arbitrary point, a bound on ‖c_i‖ there."""
    sizes: Vector = np.sqrt(
        2 * np.maximum(constants.steepest, constants.smoothness) * np.maximum(probes, 0.0)
    )
    return sizes


def influence_shares(facts: Facts, most: float) -> Vector:
    """Return s_i = min(1, `most`·(median of the others' sizes)/size_i), where a size is √(2 L_i f_i)."""
    sizes: Vector = np.sqrt(2 * facts.constants.smoothness * np.maximum(facts.probes, 0.0))
    others = [
        float(np.median(np.delete(sizes, i))) if len(sizes) > 1 else size
        for i, size in enumerate(sizes)
    ]
    return np.array(
        [
            min(1.0, most * median / size) if size > 0 else 1.0
            for size, median in zip(sizes, others, strict=True)
        ]
    )


def rates(constants: Constants, plan: LocalPlan) -> Vector:
    """Return η_i of a plan."""
    L = constants.expected_smoothness(plan.batch_size)
    if plan.rate is not None:
        return np.full(len(L), plan.rate)
    return np.divide(plan.scale, L, out=np.zeros(len(L)), where=L > 0)


def usual_updates(
    constants: Constants, usual: Vector, plan: LocalPlan, correction: float
) -> Vector:
    """Return J η_i (usual ‖c_i‖ + ‖c‖), or more if local steps are so long that they diverge."""
    eta = rates(constants, plan)  # J is the largest if clients differ in it
    steep = float(np.max(eta * constants.expected_smoothness(plan.batch_size), initial=0.0)) - 1
    with np.errstate(over="ignore"):
        growth = np.float64(max(steep, 1.0)) ** plan.steps
    sizes: Vector = plan.steps * eta * (usual + correction) * growth
    return sizes


def wrong_update(
    shape: LossBounds, d: Vector, c: Vector, rate: float, steps: int, error: float
) -> str | None:
    """Say why d cannot come from corrected local steps; `error` bounds a gradient's rounding error."""
    size = float(np.linalg.norm(d))
    length = float(np.linalg.norm(c))
    reach = rate * steps
    most = ROOM * reach * (length + error)
    if size > most:
        return f"its update has norm {size:.6g}, and {steps} local steps reach {most:.6g} (length of the update)"
    along = float(c @ d)
    off = error * reach * (2 * length + error)
    least = (
        (shape.strong_convexity / 2 + 1 / (2 * reach)) * size * size / LARGER**2
        if reach > 0
        else 0.0
    )
    if along < least - off - (ROOM - 1) * least:
        return f"its update has ⟨c, d⟩ = {along:.6g}, and local steps give {least:.6g} (direction of the update)"
    return None


def wrong_proximal(
    d: Vector, c: Vector, pull: float, metric: Vector, l2: float, error: float
) -> str | None:
    """Say why d cannot approximate (∇²f_i + βD)⁻¹c: steps stay within (1 + √2)‖c‖_{D⁻¹}/m, m = β + l2/max D."""
    bend = pull + l2 / float(metric.max())
    size = float(np.sqrt(np.sum(metric * d**2)))
    length = float(np.sqrt(np.sum(c**2 / metric))) + error / float(metric.min()) ** 0.5
    if bend > 0 and size > (most := ROOM * (1 + 2**0.5) * length / bend):
        return f"its local solution has norm {size:.6g}, and its model allows {most:.6g} (length of the update)"
    return None


def wrong_curvature(
    shape: LossBounds, Q: NDArray[np.float64], V: NDArray[np.float64]
) -> str | None:
    """Say why Q cannot be VᵀHV for μI ⪯ H ⪯ LI."""
    gram = V.T @ V
    if float(np.abs(Q).max()) > (most := 2 * shape.steepness * float(np.trace(gram))):
        return f"its curvature has entries above {most:.6g}, which its L_i allows (curvature)"
    room = (
        64
        * shape.epsilon
        * (shape.samples**0.5 + shape.dimension**0.5)
        * min(shape.dimension, shape.samples)
    )
    room *= shape.steepness * float(np.trace(gram))
    half = (Q + Q.T) / 2
    low = float(np.linalg.eigvalsh(half - shape.strong_convexity * gram)[0])
    high = float(np.linalg.eigvalsh(shape.steepness * gram - half)[0])
    if low < -room or high < -room:
        what = f"{-low:.2g} below μ" if low < -room else f"{-high:.2g} above L"
        return f"its curvature is {what}, as it has told them (curvature)"
    return None


def wrong_diagonal(shape: LossBounds, diagonal: Vector) -> str | None:
    """Say why it cannot be diag H for μI ⪯ H ⪯ LI."""
    room = 64 * shape.epsilon * (shape.samples**0.5 + shape.dimension**0.5) * shape.steepness
    low = float(diagonal.min())
    high = float(diagonal.max())
    if low < shape.strong_convexity - room or high > shape.steepness + room:
        told = f"μ = {shape.strong_convexity:.6g} and L = {shape.smoothness:.6g}"
        return f"its curvatures go from {low:.6g} to {high:.6g}, outside {told} (curvature)"
    return None


Got = Mapping[int, Mapping[str, Array]]
Verdicts = dict[int, str]
Doubles = Mapping[str, NDArray[np.float64]]
NUMBERS = 2e7  # about how many numbers of earlier answers are stored; a few answers of every silo always are
quiet = np.errstate(over="ignore", invalid="ignore")  # an overflow exceeds any bound
COARSE = 0.25  # share of the loss at zero by which a silo's own quantum may round losses if vectors are masked
STEADY = 1.0001  # local steps up to this multiple of 1/L_i count as descent steps


def too_large(what: str, sizes: Sizes, usual: Sizes, outlier: float) -> Verdicts:
    """Accuse the outliers; `what` names the quantity in the sentence."""
    return {
        i: f"its {what} {sizes[i]:.3g}, and the median of the others' {median:.3g} (absurd size)"
        for i, median in absurd(sizes, usual, outlier).items()
    }


def absurd_facts(facts: Facts, outlier: float, setup: Setup | None = None) -> Verdicts:
    """Accuse silos whose reports with the agreement are outliers or impossible.

    L_i and f_i scale with the squares of features and targets, so they may be `outlier`² times larger.
    """
    return _absurd_beside_others(facts, outlier) | _absurd_for_any_rows(facts, setup)


def _absurd_for_any_rows(facts: Facts, setup: Setup | None) -> Verdicts:
    """Accuse silos whose L_i, or loss at the agreement's point, no rows within the agreed bounds can give."""
    found = Verdicts()
    point = probe_point(facts)
    distance = float(np.linalg.norm(point))
    l2 = 0.0 if setup is None else float(setup.model.get("l2", 0.0))
    told = zip(anchors(facts, setup), facts.constants.smoothness, facts.probes, strict=True)
    for i, (anchor, L, probe) in enumerate(told):
        if anchor is None:
            continue
        if (most := anchor.bend + l2) * (1 + 1e-6) < L:
            found[i] = (
                f"it says L_i = {L:.6g}, and rows as agreed allow {most:.6g} (length of rows)"
            )
        elif (
            why := anchor.off(distance, probe - l2 / 2 * distance**2, COARSE * (anchor.loss or 0))
        ) is not None:
            found[i] = why
    return found


def probe_point(facts: Facts) -> NDArray[np.float64]:
    """Return the arbitrary point at which silos report their loss with the agreement."""
    d = len(facts.start)
    point = (np.random.default_rng(0).standard_normal(d) / np.sqrt(d)).astype(facts.start.dtype)
    return np.asarray(point, dtype=np.float64)


def _absurd_beside_others(facts: Facts, outlier: float) -> Verdicts:
    known = facts.constants
    found = Verdicts()
    for what, values in (
        ("smoothness L_i is", known.smoothness),
        ("loss at the agreement's point is", facts.probes),
    ):
        sizes = dict(enumerate(values.tolist()))
        found |= too_large(what, sizes, sizes, outlier**2)
    for i, (L, mu) in enumerate(zip(known.smoothness, known.strong_convexity, strict=True)):
        if known.convex and mu > L * (1 + 1e-3):
            found.setdefault(
                i, f"it says μ_i = {mu:.6g} and L_i = {L:.6g}, which is less (constants)"
            )
    return found


class Judge:
    """Compare every answer with the earlier ones of a segment's members.

    An answer may be up to `outlier` times larger than the others'.
    """

    def __init__(self, facts: Facts, setup: Setup | None, outlier: float) -> None:
        self.known = facts.constants
        self.outlier = outlier
        self.probes = dict(enumerate(facts.probes.tolist()))
        self.usual = usual_gradients(facts.constants, facts.probes)
        hidden = facts.constants.noisy or (
            setup is not None and bool(setup.secure or "strength" in setup.model)
        )
        self.anchors, self.l2 = (
            anchors(facts, setup),
            0.0 if setup is None else float(setup.model.get("l2", 0.0)),
        )
        self.histories = (
            _histories(facts, setup, self.anchors) if facts.constants.convex and not hidden else {}
        )

    @quiet
    def verdicts(self, question: Question, got: Got) -> Verdicts:
        """Return the silos whose answers to this question cannot be true; none if the question has no test."""
        if isinstance(question, GradientsAt):
            return self._gradients(question, got)
        if isinstance(question, Losses):
            return self.losses(question.x, question.batch_size, got)
        if isinstance(question, Scores):
            return self.losses(question.x, None, got) if question.split == "train" else {}
        if isinstance(question, LocalSteps):
            return self._updates(question, got)
        if (
            isinstance(question, ProximalSteps | Curvature | Diagonal)
            and question.at.batch_size is None
        ):
            return self._judged(got, {}, partial(self._second_order, question))
        return {}

    def _gradients(self, question: GradientsAt, got: Got) -> Verdicts:
        """Test L_i and c_i."""

        def test(known: Consistency, i: int, parts: Doubles) -> str | None:
            loss, *told = map(float, parts["scalars"])
            return known.trouble(known.shape.claim(point, loss, parts["c"], (told[0], told[1])))

        found = self._absurd("gradient has norm", got, "c", self.usual)
        point = _double(question.x)
        found |= self._absurd_losses(got)
        return (
            found
            if question.batch_size is not None
            else self._judged(got, found | self._off(point, got), test)
        )

    @quiet
    def losses(self, x: Tensor, batch_size: int | None, got: Got) -> Verdicts:
        """Test L_i alone, as `Losses` asks for it or `Scores` on the training rows."""
        found = self._absurd_losses(got)
        point = _double(x)
        if batch_size is not None:
            return found

        def test(known: Consistency, i: int, parts: Doubles) -> str | None:
            return known.trouble(known.shape.claim(point, float(parts["scalars"][0])))

        return self._judged(got, found | self._off(point, got), test)

    def _off(self, x: Vector, got: Got) -> Verdicts:
        """Test losses against anchors alone, for silos without a history: masked sums and personal models."""
        found = Verdicts()
        square = float(x @ x)
        for i in got.keys() - self.histories.keys():
            anchor = self.anchors[i]
            loss = float(got[i]["scalars"][0])
            if anchor is not None and np.isfinite(loss):
                loose = COARSE * (anchor.loss or 0.0)
                if (why := anchor.off(square**0.5, loss - self.l2 / 2 * square, loose)) is not None:
                    found[i] = why
        return found

    def _updates(self, question: LocalSteps, got: Got) -> Verdicts:
        """Test d_i; it is bounded if the steps started from c_i = ∇f_i(x) over all samples."""
        at = question.at
        plan = question.plan
        correction = question.correction
        c = np.zeros(1) if correction is None else _double(correction)
        usual = usual_updates(self.known, self.usual, plan, float(np.linalg.norm(c)))
        found = Verdicts()
        for part in question.shapes(0):
            found |= self._absurd("update has norm", got, part, usual)
        corrected = (
            isinstance(at, GradientsAt) and at.batch_size is None and same_point(at.x, question.x)
        )
        if (
            correction is None
            or not corrected
            or plan.batch_size is not None
            or plan.prox
            or plan.each is not None
        ):
            return found
        eta = rates(self.known, plan)
        point = _double(question.x)

        def test(known: Consistency, i: int, parts: Doubles) -> str | None:
            if eta[i] * self.known.smoothness[i] > STEADY:
                return None
            return wrong_update(
                known.shape, parts["d"], c, float(eta[i]), plan.steps, known.slack(point)
            )

        return self._judged(got, found, test)

    @staticmethod
    def _second_order(
        question: ProximalSteps | Curvature | Diagonal, known: Consistency, i: int, parts: Doubles
    ) -> str | None:
        """Test d_i of proximal steps, VᵀH_iV or diag H_i."""
        if isinstance(question, Diagonal):
            return wrong_diagonal(known.shape, parts["diagonal"])
        if isinstance(question, Curvature):
            return wrong_curvature(known.shape, parts["curvature"], _double(question.V))
        c = _double(question.correction)
        D = _double(question.plan.metric)
        plan = question.plan
        slack = known.slack(_double(question.at.x))
        return wrong_proximal(parts["d"], c, plan.pull, D, known.shape.l2 or 0.0, slack)

    def _judged(
        self, got: Got, found: Verdicts, test: Callable[[Consistency, int, Doubles], str | None]
    ) -> Verdicts:
        """Apply a test to the answers that are finite and no outliers, if losses are convex."""
        for i, parts in got.items():
            if (
                i in self.histories
                and i not in found
                and all(_finite(name, array) for name, array in parts.items())
            ):
                doubles = {
                    name: np.asarray(array, dtype=np.float64) for name, array in parts.items()
                }
                if (why := test(self.histories[i], i, doubles)) is not None:
                    found[i] = why
        return found

    def _absurd(self, what: str, got: Got, part: str, usual: Vector) -> Verdicts:
        finite = {
            i: parts[part].astype(np.float64)
            for i, parts in got.items()
            if _finite(part, parts[part])
        }
        sizes = {i: float(np.linalg.norm(vector)) for i, vector in finite.items()}
        return too_large(what, sizes, dict(enumerate(usual.tolist())), self.outlier)

    def _absurd_losses(self, got: Got) -> Verdicts:
        if self.known.noisy:  # noise may leave hardly anything of a loss
            return {}
        losses = {i: abs(float(parts["scalars"][0])) for i, parts in got.items()}
        finite = {i: size for i, size in losses.items() if np.isfinite(size)}
        return too_large("loss has size", finite, self.probes, self.outlier**2)


def _histories(
    facts: Facts, setup: Setup | None, known_of: list[LossAnchor | None]
) -> dict[int, Consistency]:
    """Return a history per silo that holds only the loss at the agreement's arbitrary point."""
    known = facts.constants
    d = len(facts.start)
    point = probe_point(facts)
    l2 = (
        None
        if setup is None or setup.model.get("kind", "linear") != "linear"
        else float(linear(setup.model).l2)
    )
    kept = int(np.clip(NUMBERS / (d * len(known.samples)), 2, KEPT))
    epsilon = float(np.finfo(facts.start.dtype).eps)
    out = {}
    for i, (L, mu) in enumerate(zip(known.smoothness, known.strong_convexity, strict=True)):
        shape = LossBounds(float(L), float(mu), int(known.samples[i]), d, epsilon, l2, known_of[i])
        out[i] = Consistency(shape, shape.claim(point, float(facts.probes[i])), kept)
    return out


def _double(x: Tensor) -> NDArray[np.float64]:
    return x.detach().to(torch.float64).numpy()


def _finite(name: str, array: Array) -> bool:
    return bool(np.all(np.isfinite(array[:1] if name == "scalars" else array)))
