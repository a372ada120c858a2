r"""Tests of silos' answers: their format, their size beside the others', and whether they can all be true.

**Values and gradients.** Answers (x_i, f_i, g_i) are those of some μ-strongly convex, L-smooth function if and only if
for all pairs (Taylor, Hendrickx and Glineur 2017, "Smooth strongly convex interpolation and exact worst-case
performance of first-order methods", Theorem 4), with h = f − (μ/2)‖·‖², which is convex and (L − μ)-smooth,

    f_i ≥ f_j + ⟨g_j, x_i − x_j⟩ + (μ/2)‖x_i − x_j‖² + ‖g_i − g_j − μ(x_i − x_j)‖² / (2(L − μ)).

L and μ are what the silo said when the agreement was made. No test of pairs is stronger: answers that pass it are the
truth about some such function. An answer without a gradient has to lie between the bounds of those that have one,

    f_j + ⟨g_j, x − x_j⟩ + (μ/2)‖x − x_j‖² ≤ f(x) ≤ f_j + ⟨g_j, x − x_j⟩ + (L/2)‖x − x_j‖²,

and a linear model's losses are never negative: with l2 known, h = f − (l2/2)‖·‖² ≥ 0 and ‖∇h‖² ≤ 2(L − l2) h.

**Anchors.** Any function passes these tests if it is multiplied by a number: a liar's a·f_i + b moves λ, and the model.
So losses are held against what they are for any rows. At x = 0 logistic loss is log 2 and softmax loss log K; with the
agreed bound T_i on the mean ‖a‖² of a silo's rows (its sums over columns, or declared ranges), h = f_i − (l2/2)‖·‖² has

    h(0) = ℓ(0),    ‖∇h(0)‖ ≤ |ℓ'(0)| √T_i,    ‖∇h‖ ≤ max |ℓ'| √T_i,    |h(x) − ℓ(0)| ≤ max |ℓ'| √T_i ‖x‖,
    L_i ≤ curvature·T_i + l2.

Nobody is asked for f_i(0): it is an answer that all later ones have to be consistent with.

**Sizes.** An answer of silo i is absurd where it is more than `outlier` times as large as the median, over the others
j, of what j has answered or could have: ‖c_j‖ and its usual size √(2 L_j f_j) at a point that nobody has chosen (a
gradient of a smooth loss f ≥ 0 is never larger). So others who are at their optimum accuse nobody.

**Updates.** Corrected local steps on a convex f_i with η L_i ≤ 1 are gradient steps on h = f_i − ⟨c_i − c, ·⟩ from
∇h(x) = c. Such steps are not expansive and each lowers h by at least (η/2)‖∇h‖², so that J of them have

    ‖d_i‖ ≤ J η ‖c‖,    ⟨c, d_i⟩ ≥ (μ_i/2)‖d_i‖² + ‖d_i‖²/(2 J η):

an update is no longer than that, and never points the wrong way.

Tests of convexity are for convex losses and answers over all samples, neither masked nor noisy, of one model for all;
that of an absurd size is for every answer.
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

from scaffpd.config.model_file import Setup, linear
from scaffpd.deploy.agreement import Facts
from scaffpd.deploy.messages import Array, Message
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

Shapes = Mapping[str, tuple[int, ...]]
HUGE = np.float64(1e100)  # from here on products of two numbers overflow sooner or later, and nothing can be compared
SCALARS = "scalars"  # float64 whatever the model's numbers are; the first is a loss or a size, and finite


def troubles(answers: Mapping[str, Message], shapes: Shapes, wide: Collection[str], like: Tensor) -> dict[str, str]:
    """Why some silos' answers cannot be used: parts that are not `wide` (float64) have the format of x.

    Numbers that are not finite are a silo's fault as long as others have finite ones; where nobody has, the run is
    diverging, and the training loop will say so.
    """
    malformed = {name: why for name, answer in answers.items() if (why := _malformed(answer, shapes, wide, like))}
    infinite = {name: why for name, answer in answers.items() if name not in malformed and (why := _infinite(answer))}
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
    """Bounds on rounding may be infinite and an accuracy unknown: only the first scalar has to be a number."""
    for name, array in answer.arrays.items():
        if not np.all(np.abs(array[:1] if name == SCALARS else array) <= HUGE):
            return f"its {name!r} has an entry that is NaN, infinite or beyond {HUGE:g}"
    return None


KEPT = 8  # answers of a silo that a new one is compared with
LARGER = 1.05  # L_i is found by a silo in its own number format, by power iteration where it is large
EPSILON = float(np.finfo(np.float64).eps)


class Claim(NamedTuple):
    """One answer of a silo."""

    x: Vector  # where it was asked
    loss: float  # f(x)
    gradient: Vector | None  # ∇f(x), where it has told it
    loose: float  # how far off rounding may have put the loss
    slack: float  # and, in norm, the gradient
    size: float  # ‖∇f(x)‖


@dataclass(frozen=True)
class LossAnchor:
    """What a silo's loss without its regulariser is, whatever its rows are."""

    loss: float | None  # h(0); `None` where it depends on the targets
    start: float  # a bound on ‖∇h(0)‖
    slope: float  # a bound on ‖∇h‖ everywhere
    bend: float  # a bound on L_i − l2
    exact: bool = True  # whether h(0) is that, or at most that (of models that are each silo's own)

    def off(self, distance: float, rest: float, loose: float) -> str | None:
        """Why h(x) cannot be `rest` at this distance from zero, where it may be off by `loose`."""
        if self.loss is None:
            return None
        far = self.slope * distance if distance else 0.0
        room = loose + far * (1 + 1e-6)
        if rest > self.loss + room or (self.exact and rest < self.loss - room):
            where = f"{distance:.3g} from x = 0, where it is {self.loss:.6g} for any rows" if distance else "at x = 0"
            most = f"{self.loss:.6g}" if not distance else f"{max(self.loss - far, 0):.6g} to {self.loss + far:.6g}"
            return f"the loss is {rest:.6g} {where}, and rows as agreed give {most} (loss at zero)"
        return None


def anchors(facts: Facts, setup: Setup | None) -> list[LossAnchor | None]:
    """Return what every silo's loss has to be; `None` for networks, silos' own cohorts and noisy answers."""
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
class Shape:
    """What is known of a silo's loss before the first round."""

    smoothness: float  # L, as the silo has said
    strong_convexity: float  # μ, likewise
    samples: int  # n, likewise
    dimension: int  # d
    epsilon: float  # of the model's number format
    l2: float | None  # the regulariser of a linear model, whose loss is not negative; `None` for any other convex loss
    anchor: LossAnchor | None = None  # what the loss is whatever the rows are

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


def contradicts_itself(shape: Shape, new: Claim) -> str | None:
    """Why one answer cannot be true, by itself: f − (l2/2)‖·‖² is negative, or too small for its gradient."""
    if shape.l2 is None:
        return None
    square = float(new.x @ new.x)
    rest, loose = new.loss - shape.l2 / 2 * square, new.loose + _arithmetic(shape, new, square)
    if rest < -loose:
        what = "is negative" if new.loss < 0 else f"is below its own regulariser, {shape.l2 / 2 * square:.6g}"
        return f"the loss {new.loss:.6g} {what} (sign of the loss)"
    anchor, distance = shape.anchor, square**0.5
    if anchor is not None and (found := anchor.off(distance, rest, loose)) is not None:
        return found
    if new.gradient is None:
        return None
    size = float(np.linalg.norm(new.gradient - shape.l2 * new.x))
    if anchor is not None and size > (most := (anchor.slope if square else anchor.start) * (1 + 1e-6) + new.slack):
        return f"its gradient has norm {size:.6g}, and rows as agreed allow {most:.6g} (length of rows)"
    most = (2 * max(shape.steepness - shape.l2, 0.0) * (max(rest, 0.0) + loose)) ** 0.5 + new.slack
    if size > most * (1 + 1e-6):
        what = f"its gradient has norm {size:.6g}"
        return f"{what}, and a loss of {new.loss:.6g} allows {most:.6g} (size of the gradient)"
    return None


def contradict_each_other(shape: Shape, one: Claim, two: Claim) -> str | None:
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
    slack, sums = one.slack + two.slack, 8 * EPSILON * len(apart) ** 0.5 * (terms[0] + abs(terms[1]) + terms[2])
    return size / room, ((2 * size**0.5 + slack) * slack + sums) / room


def _arithmetic(shape: Shape, claim: Claim, square: float) -> float:
    """What the sums of the test itself may be off, for a way of that squared length."""
    terms = abs(claim.loss) + claim.size * square**0.5 + shape.steepness * square
    return float(16 * EPSILON * len(claim.x) ** 0.5 * terms)


def _beside(there: Claim, error: float) -> str:
    return f"beside its loss {there.loss:.8g} and gradient elsewhere; rounding explains {error:.1g} (consistency)"


class Consistency:
    """One silo's last answers over all samples, beside its loss at an arbitrary point, told with the agreement.

    A new answer is compared with `kept` of either sort, with a gradient and without.
    """

    def __init__(self, shape: Shape, probe: Claim, kept: int = KEPT) -> None:
        self.shape, self._probe = shape, probe
        self._points, self._values = deque[Claim](maxlen=kept), deque[Claim](maxlen=kept)
        self._known = [probe]
        if shape.anchor is not None and shape.anchor.loss is not None:
            self._known.append(Claim(np.zeros_like(probe.x), shape.anchor.loss, None, 0.0, 0.0, 0.0))

    def trouble(self, new: Claim) -> str | None:
        """Say why the answer contradicts itself or earlier ones; `None`, and it is remembered, where it does not."""
        earlier = (*self._known, *self._points, *self._values)
        found = contradicts_itself(self.shape, new)
        found = found or next(filter(None, (contradict_each_other(self.shape, new, old) for old in earlier)), None)
        if found is None:
            (self._values if new.gradient is None else self._points).append(new)
        return found

    def slack(self, x: Vector) -> float:
        """How far off rounding may put a gradient near x."""
        last = self._points[-1] if self._points else self._probe
        return 4 * self.shape.rounding(x, last.loss)[1]


FEWEST = 3  # silos that it takes for a median of the others
ROOM = 1.05  # what rounding may add to a bound that holds exactly, over many steps

Sizes = Mapping[int, float]


def absurd(sizes: Sizes, usual: Sizes, outlier: float) -> dict[int, float]:
    """Who is more than `outlier` times as large as the median of the others, and that median."""
    if len(sizes) < FEWEST:
        return {}
    found = {}
    for i, size in sizes.items():
        median = float(np.median([max(sizes[j], usual[j]) for j in sizes if j != i]))
        if size > outlier * median > 0:
            found[i] = median
    return found


def usual_gradients(constants: Constants, probes: Vector) -> Vector:
    """√(2 max_j L_ij f_i) at the agreement's arbitrary point."""
    sizes: Vector = np.sqrt(2 * np.maximum(constants.steepest, constants.smoothness) * np.maximum(probes, 0.0))
    return sizes


def influence_shares(facts: Facts, most: float) -> Vector:
    """s_i = min(1, `most`·(median of the others' sizes)/size_i), for the usual size √(2 L_i f_i) of a gradient."""
    sizes: Vector = np.sqrt(2 * facts.constants.smoothness * np.maximum(facts.probes, 0.0))
    others = [float(np.median(np.delete(sizes, i))) if len(sizes) > 1 else size for i, size in enumerate(sizes)]
    return np.array(
        [min(1.0, most * median / size) if size > 0 else 1.0 for size, median in zip(sizes, others, strict=True)]
    )


def rates(constants: Constants, plan: LocalPlan) -> Vector:
    """η_i of a plan."""
    L = constants.expected_smoothness(plan.batch_size)
    if plan.rate is not None:
        return np.full(len(L), plan.rate)
    return np.divide(plan.scale, L, out=np.zeros(len(L)), where=L > 0)


def usual_updates(constants: Constants, usual: Vector, plan: LocalPlan, correction: float) -> Vector:
    """J η_i (usual ‖c_i‖ + ‖c‖); more where local steps are so long that they diverge."""
    eta = rates(constants, plan)  # J is the largest, where clients differ in it
    steep = float(np.max(eta * constants.expected_smoothness(plan.batch_size), initial=0.0)) - 1
    with np.errstate(over="ignore"):
        growth = np.float64(max(steep, 1.0)) ** plan.steps
    sizes: Vector = plan.steps * eta * (usual + correction) * growth
    return sizes


def wrong_update(shape: Shape, d: Vector, c: Vector, rate: float, steps: int, error: float) -> str | None:
    """Why d cannot be the outcome of corrected local steps; `error` is that of a gradient, by rounding."""
    size, length, reach = float(np.linalg.norm(d)), float(np.linalg.norm(c)), rate * steps
    most = ROOM * reach * (length + error)
    if size > most:
        return f"its update has norm {size:.6g}, and {steps} local steps reach {most:.6g} (length of the update)"
    along, off = float(c @ d), error * reach * (2 * length + error)
    least = (shape.strong_convexity / 2 + 1 / (2 * reach)) * size * size / LARGER**2 if reach > 0 else 0.0
    if along < least - off - (ROOM - 1) * least:
        return f"its update has ⟨c, d⟩ = {along:.6g}, and local steps give {least:.6g} (direction of the update)"
    return None


def wrong_proximal(d: Vector, c: Vector, pull: float, metric: Vector, l2: float, error: float) -> str | None:
    """Why d cannot come near (∇²f_i + βD)⁻¹c: accelerated steps stay within (1 + √2)‖c‖_{D⁻¹}/m, m = β + l2/max D."""
    bend = pull + l2 / float(metric.max())
    size = float(np.sqrt(np.sum(metric * d**2)))
    length = float(np.sqrt(np.sum(c**2 / metric))) + error / float(metric.min()) ** 0.5
    if bend > 0 and size > (most := ROOM * (1 + 2**0.5) * length / bend):
        return f"its local solution has norm {size:.6g}, and its model allows {most:.6g} (length of the update)"
    return None


def wrong_curvature(shape: Shape, Q: NDArray[np.float64], V: NDArray[np.float64]) -> str | None:
    """Why Q cannot be VᵀHV for μI ⪯ H ⪯ LI."""
    gram = V.T @ V
    if float(np.abs(Q).max()) > (most := 2 * shape.steepness * float(np.trace(gram))):
        return f"its curvature has entries above {most:.6g}, which its L_i allows (curvature)"
    room = 64 * shape.epsilon * (shape.samples**0.5 + shape.dimension**0.5) * min(shape.dimension, shape.samples)
    room *= shape.steepness * float(np.trace(gram))
    half = (Q + Q.T) / 2
    low = float(np.linalg.eigvalsh(half - shape.strong_convexity * gram)[0])
    high = float(np.linalg.eigvalsh(shape.steepness * gram - half)[0])
    if low < -room or high < -room:
        what = f"{-low:.2g} below μ" if low < -room else f"{-high:.2g} above L"
        return f"its curvature is {what}, as it has told them (curvature)"
    return None


def wrong_diagonal(shape: Shape, diagonal: Vector) -> str | None:
    """Why it cannot be diag H for μI ⪯ H ⪯ LI."""
    room = 64 * shape.epsilon * (shape.samples**0.5 + shape.dimension**0.5) * shape.steepness
    low, high = float(diagonal.min()), float(diagonal.max())
    if low < shape.strong_convexity - room or high > shape.steepness + room:
        told = f"μ = {shape.strong_convexity:.6g} and L = {shape.smoothness:.6g}"
        return f"its curvatures go from {low:.6g} to {high:.6g}, outside {told} (curvature)"
    return None


Got = Mapping[int, Mapping[str, Array]]
Verdicts = dict[int, str]
Doubles = Mapping[str, NDArray[np.float64]]
NUMBERS = 2e7  # of all answers that are kept, about; a few of every silo's always are
quiet = np.errstate(over="ignore", invalid="ignore")  # what overflows is larger than any bound
COARSE = 0.25  # of the loss at zero: by so much a silo's own quantum may round losses where vectors are masked
STEADY = 1.0001  # times 1/L_i may local steps be, to be gradient steps that descend


def too_large(what: str, sizes: Sizes, usual: Sizes, outlier: float) -> Verdicts:
    """Accuse those who are absurd beside the others; `what` says what has the size."""
    return {
        i: f"its {what} {sizes[i]:.3g}, and the median of the others' {median:.3g} (absurd size)"
        for i, median in absurd(sizes, usual, outlier).items()
    }


def absurd_facts(facts: Facts, outlier: float, setup: Setup | None = None) -> Verdicts:
    """Accuse those who have said something absurd when the agreement was made.

    L_i and f_i go with the squares of features and targets, gradients and `outlier` with the features themselves.
    """
    return _absurd_beside_others(facts, outlier) | _absurd_for_any_rows(facts, setup)


def _absurd_for_any_rows(facts: Facts, setup: Setup | None) -> Verdicts:
    """L_i, and the loss at the agreement's point, beside what rows as agreed can give."""
    found, point = Verdicts(), probe_point(facts)
    distance, l2 = float(np.linalg.norm(point)), 0.0 if setup is None else float(setup.model.get("l2", 0.0))
    told = zip(anchors(facts, setup), facts.constants.smoothness, facts.probes, strict=True)
    for i, (anchor, L, probe) in enumerate(told):
        if anchor is None:
            continue
        if (most := anchor.bend + l2) * (1 + 1e-6) < L:
            found[i] = f"it says L_i = {L:.6g}, and rows as agreed allow {most:.6g} (length of rows)"
        elif (why := anchor.off(distance, probe - l2 / 2 * distance**2, COARSE * (anchor.loss or 0))) is not None:
            found[i] = why
    return found


def probe_point(facts: Facts) -> NDArray[np.float64]:
    """The arbitrary point at which silos tell their loss when the agreement is made."""
    d = len(facts.start)
    point = (np.random.default_rng(0).standard_normal(d) / np.sqrt(d)).astype(facts.start.dtype)
    return np.asarray(point, dtype=np.float64)


def _absurd_beside_others(facts: Facts, outlier: float) -> Verdicts:
    known, found = facts.constants, Verdicts()
    for what, values in (("smoothness L_i is", known.smoothness), ("loss at the agreement's point is", facts.probes)):
        sizes = dict(enumerate(values.tolist()))
        found |= too_large(what, sizes, sizes, outlier**2)
    for i, (L, mu) in enumerate(zip(known.smoothness, known.strong_convexity, strict=True)):
        if known.convex and mu > L * (1 + 1e-3):
            found.setdefault(i, f"it says μ_i = {mu:.6g} and L_i = {L:.6g}, which is less (constants)")
    return found


class Judge:
    """Compares every answer with what the members of a segment have said so far.

    An answer may be `outlier` times larger than the others'.
    """

    def __init__(self, facts: Facts, setup: Setup | None, outlier: float) -> None:
        self.known, self.outlier = facts.constants, outlier
        self.probes = dict(enumerate(facts.probes.tolist()))
        self.usual = usual_gradients(facts.constants, facts.probes)
        hidden = facts.constants.noisy or (setup is not None and bool(setup.secure or "strength" in setup.model))
        self.anchors, self.l2 = anchors(facts, setup), 0.0 if setup is None else float(setup.model.get("l2", 0.0))
        self.histories = _histories(facts, setup, self.anchors) if facts.constants.convex and not hidden else {}

    @quiet
    def verdicts(self, question: Question, got: Got) -> Verdicts:
        """Who has answered this question with something that cannot be true; questions without a test accuse nobody."""
        if isinstance(question, GradientsAt):
            return self._gradients(question, got)
        if isinstance(question, Losses):
            return self.losses(question.x, question.batch_size, got)
        if isinstance(question, Scores):
            return self.losses(question.x, None, got) if question.split == "train" else {}
        if isinstance(question, LocalSteps):
            return self._updates(question, got)
        if isinstance(question, ProximalSteps | Curvature | Diagonal) and question.at.batch_size is None:
            return self._judged(got, {}, partial(self._second_order, question))
        return {}

    def _gradients(self, question: GradientsAt, got: Got) -> Verdicts:
        """L_i and c_i."""

        def test(known: Consistency, i: int, parts: Doubles) -> str | None:
            loss, *told = map(float, parts["scalars"])
            return known.trouble(known.shape.claim(point, loss, parts["c"], (told[0], told[1])))

        found, point = self._absurd("gradient has norm", got, "c", self.usual), _double(question.x)
        found |= self._absurd_losses(got)
        return found if question.batch_size is not None else self._judged(got, found | self._off(point, got), test)

    @quiet
    def losses(self, x: Tensor, batch_size: int | None, got: Got) -> Verdicts:
        """L_i alone, as `Losses` asks for it or `Scores` on the training rows."""
        found, point = self._absurd_losses(got), _double(x)
        if batch_size is not None:
            return found

        def test(known: Consistency, i: int, parts: Doubles) -> str | None:
            return known.trouble(known.shape.claim(point, float(parts["scalars"][0])))

        return self._judged(got, found | self._off(point, got), test)

    def _off(self, x: Vector, got: Got) -> Verdicts:
        """Losses that no rows give, of those without a history: masked sums, and models of silos' own."""
        found, square = Verdicts(), float(x @ x)
        for i in got.keys() - self.histories.keys():
            anchor, loss = self.anchors[i], float(got[i]["scalars"][0])
            if anchor is not None and np.isfinite(loss):
                loose = COARSE * (anchor.loss or 0.0)
                if (why := anchor.off(square**0.5, loss - self.l2 / 2 * square, loose)) is not None:
                    found[i] = why
        return found

    def _updates(self, question: LocalSteps, got: Got) -> Verdicts:
        """d_i; it is bounded where steps started from a c_i = ∇f_i(x) over all samples."""
        at, plan, correction = question.at, question.plan, question.correction
        c = np.zeros(1) if correction is None else _double(correction)
        usual, found = usual_updates(self.known, self.usual, plan, float(np.linalg.norm(c))), Verdicts()
        for part in question.shapes(0):
            found |= self._absurd("update has norm", got, part, usual)
        corrected = isinstance(at, GradientsAt) and at.batch_size is None and same_point(at.x, question.x)
        if correction is None or not corrected or plan.batch_size is not None or plan.prox or plan.each is not None:
            return found
        eta, point = rates(self.known, plan), _double(question.x)

        def test(known: Consistency, i: int, parts: Doubles) -> str | None:
            if eta[i] * self.known.smoothness[i] > STEADY:
                return None
            return wrong_update(known.shape, parts["d"], c, float(eta[i]), plan.steps, known.slack(point))

        return self._judged(got, found, test)

    @staticmethod
    def _second_order(
        question: ProximalSteps | Curvature | Diagonal, known: Consistency, i: int, parts: Doubles
    ) -> str | None:
        """d_i of a local model that was solved, VᵀH_iV or diag H_i."""
        if isinstance(question, Diagonal):
            return wrong_diagonal(known.shape, parts["diagonal"])
        if isinstance(question, Curvature):
            return wrong_curvature(known.shape, parts["curvature"], _double(question.V))
        c, D, plan = _double(question.correction), _double(question.plan.metric), question.plan
        slack = known.slack(_double(question.at.x))
        return wrong_proximal(parts["d"], c, plan.pull, D, known.shape.l2 or 0.0, slack)

    def _judged(self, got: Got, found: Verdicts, test: Callable[[Consistency, int, Doubles], str | None]) -> Verdicts:
        """Test the answers that are finite and not absurd, where losses are convex."""
        for i, parts in got.items():
            if i in self.histories and i not in found and all(_finite(name, array) for name, array in parts.items()):
                doubles = {name: np.asarray(array, dtype=np.float64) for name, array in parts.items()}
                if (why := test(self.histories[i], i, doubles)) is not None:
                    found[i] = why
        return found

    def _absurd(self, what: str, got: Got, part: str, usual: Vector) -> Verdicts:
        finite = {i: parts[part].astype(np.float64) for i, parts in got.items() if _finite(part, parts[part])}
        sizes = {i: float(np.linalg.norm(vector)) for i, vector in finite.items()}
        return too_large(what, sizes, dict(enumerate(usual.tolist())), self.outlier)

    def _absurd_losses(self, got: Got) -> Verdicts:
        if self.known.noisy:  # noise may have left hardly anything of somebody's loss
            return {}
        losses = {i: abs(float(parts["scalars"][0])) for i, parts in got.items()}
        finite = {i: size for i, size in losses.items() if np.isfinite(size)}
        return too_large("loss has size", finite, self.probes, self.outlier**2)


def _histories(facts: Facts, setup: Setup | None, known_of: list[LossAnchor | None]) -> dict[int, Consistency]:
    """An empty history for everybody, but for the loss at the agreement's arbitrary point."""
    known, d, point = facts.constants, len(facts.start), probe_point(facts)
    l2 = None if setup is None or setup.model.get("kind", "linear") != "linear" else float(linear(setup.model).l2)
    kept = int(np.clip(NUMBERS / (d * len(known.samples)), 2, KEPT))
    epsilon, out = float(np.finfo(facts.start.dtype).eps), {}
    for i, (L, mu) in enumerate(zip(known.smoothness, known.strong_convexity, strict=True)):
        shape = Shape(float(L), float(mu), int(known.samples[i]), d, epsilon, l2, known_of[i])
        out[i] = Consistency(shape, shape.claim(point, float(facts.probes[i])), kept)
    return out


def _double(x: Tensor) -> NDArray[np.float64]:
    return x.detach().to(torch.float64).numpy()


def _finite(name: str, array: Array) -> bool:
    return bool(np.all(np.isfinite(array[:1] if name == "scalars" else array)))
