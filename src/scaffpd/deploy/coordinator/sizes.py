r"""How large an honest answer can be: beside the others', and by what convexity allows.

Beside the others' an answer of silo i is absurd where it is more than `outlier` times as large as the median, over the
others j, of what j has answered or could have: ‖c_j‖ and its usual size √(2 L_j f_j) at a point that nobody has chosen
(a gradient of a smooth loss f ≥ 0 is never larger). So that others who are at their optimum accuse nobody.

Corrected local steps on a convex f_i with η L_i ≤ 1 are gradient steps on h = f_i − ⟨c_i − c, ·⟩ from ∇h(x) = c. Such
steps are not expansive and each lowers h by at least (η/2)‖∇h‖², so that J of them have

    ‖d_i‖ ≤ J η ‖c‖,    ⟨c, d_i⟩ ≥ (μ_i/2)‖d_i‖² + ‖d_i‖²/(2 J η):

an update is no longer than that, and never points the wrong way.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from scaffpd.deploy.coordinator.consistency import LARGER, Shape
from scaffpd.federation import Constants, LocalPlan, Vector

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


def rates(constants: Constants, plan: LocalPlan) -> Vector:
    """η_i of a plan."""
    L = constants.expected_smoothness(plan.batch_size)
    if plan.rate is not None:
        return np.full(len(L), plan.rate)
    return np.divide(plan.scale, L, out=np.zeros(len(L)), where=L > 0)


def usual_updates(constants: Constants, usual: Vector, plan: LocalPlan, correction: float) -> Vector:
    """J η_i (usual ‖c_i‖ + ‖c‖); more where local steps are so long that they diverge."""
    eta = rates(constants, plan)
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
