"""Which answers give a silo away: everything that is tested about their numbers, question by question.

Tests of convexity (`consistency`, `sizes`) are for convex losses and answers over all samples, seen as they are: not
masked, and without noise; that of an absurd size is for every answer. Numbers that are not finite are not judged here:
`checks` is about those.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.deploy.coordinator.consistency import KEPT, Consistency, Shape
from scaffpd.deploy.coordinator.opening import Facts
from scaffpd.deploy.coordinator.sizes import (
    absurd,
    rates,
    usual_gradients,
    usual_updates,
    wrong_curvature,
    wrong_diagonal,
    wrong_proximal,
    wrong_update,
)
from scaffpd.deploy.protocol.setup import Setup, linear
from scaffpd.deploy.protocol.wire import Array
from scaffpd.federation import LocalPlan, ProximalPlan, Vector

Got = Mapping[int, Mapping[str, Array]]
Verdicts = dict[int, str]
NUMBERS = 2e7  # of all answers that are kept, about; a few of every silo's always are
quiet = np.errstate(over="ignore", invalid="ignore")  # what overflows is larger than any bound
STEADY = 1.0001  # times 1/L_i may local steps be, to be gradient steps that descend


def absurd_facts(facts: Facts, outlier: float) -> Verdicts:
    """Who has said something absurd when the agreement was made.

    L_i and f_i go with the squares of features and targets, gradients and `outlier` with the features themselves.
    """
    known, found = facts.constants, Verdicts()
    for what, values in (("smoothness L_i", known.smoothness), ("loss at the agreement's point", facts.probes)):
        sizes = dict(enumerate(values.tolist()))
        for i, median in absurd(sizes, sizes, outlier**2).items():
            found[i] = f"its {what} is {sizes[i]:.3g}, and the median of the others' {median:.3g} (absurd size)"
    for i, (L, mu) in enumerate(zip(known.smoothness, known.strong_convexity, strict=True)):
        if known.convex and mu > L * (1 + 1e-3):
            found.setdefault(i, f"it says μ_i = {mu:.6g} and L_i = {L:.6g}, which is less (constants)")
    return found


class Judge:
    """What the members of a segment have said so far, and whether the next answer goes with it.

    Args:
        facts: what they said when the agreement was made.
        setup: the agreement.
        outlier: how many times larger than the others' an answer may be.
    """

    def __init__(self, facts: Facts, setup: Setup | None, outlier: float) -> None:
        self.known, self.outlier, self.probes = facts.constants, outlier, facts.probes
        self.usual = usual_gradients(facts.constants, facts.probes)
        hidden = facts.constants.noisy or (setup is not None and bool(setup.secure))
        self.histories = _histories(facts, setup) if facts.constants.convex and not hidden else {}

    @quiet
    def gradients(self, x: Tensor, batch_size: int | None, got: Got) -> Verdicts:
        """L_i and c_i."""
        losses = {i: float(parts["scalars"][0]) for i, parts in got.items()}
        found = self._absurd("gradient", _norms(got, "c"), self.usual) | self._absurd_losses(losses)
        if batch_size is not None:
            return found
        point = _double(x)
        for i in self._convex(got, found):
            history, scalars = self.histories[i], got[i]["scalars"]
            told = float(scalars[1]), float(scalars[2])
            new = history.shape.claim(point, losses[i], np.asarray(got[i]["c"], dtype=np.float64), told)
            if (why := history.trouble(new)) is not None:
                found[i] = why
        return found

    @quiet
    def losses(self, x: Tensor, batch_size: int | None, got: Got) -> Verdicts:
        """L_i alone, as `losses` asks for it or `evaluate` on the training rows."""
        losses = {i: float(parts["scalars"][0]) for i, parts in got.items()}
        found, point = self._absurd_losses(losses), _double(x)
        for i in self._convex(got, found) if batch_size is None else ():
            if (why := self.histories[i].trouble(self.histories[i].shape.claim(point, losses[i]))) is not None:
                found[i] = why
        return found

    @quiet
    def updates(self, corrected: bool, correction: Tensor | None, plan: LocalPlan, x: Tensor, got: Got) -> Verdicts:
        """d_i; `corrected` says that steps started where c_i = ∇f_i(x) is known, over all samples."""
        c = None if correction is None else _double(correction)
        length = 0.0 if c is None else float(np.linalg.norm(c))
        usual, found = usual_updates(self.known, self.usual, plan, length), Verdicts()
        for part in ("d", "snapshot") if plan.snapshot is not None else ("d",):
            found |= self._absurd("update", _norms(got, part), usual)
        if c is None or not corrected or plan.batch_size is not None or plan.prox:
            return found
        eta = rates(self.known, plan)
        for i in self._convex(got, found):
            if eta[i] * self.known.smoothness[i] <= STEADY:
                shape, d = self.histories[i].shape, np.asarray(got[i]["d"], dtype=np.float64)
                error = self.histories[i].slack(_double(x))
                if (why := wrong_update(shape, d, c, float(eta[i]), plan.steps, error)) is not None:
                    found[i] = why
        return found

    @quiet
    def proximal(self, x: Tensor, batch_size: int | None, correction: Tensor, plan: ProximalPlan, got: Got) -> Verdicts:
        """d_i of a local model that was solved."""
        found, c, D = Verdicts(), _double(correction), _double(plan.metric)
        for i in self._convex(got, found) if batch_size is None else ():
            shape, d = self.histories[i].shape, np.asarray(got[i]["d"], dtype=np.float64)
            error = self.histories[i].slack(_double(x))
            if (why := wrong_proximal(d, c, plan.pull, D, shape.l2 or 0.0, error)) is not None:
                found[i] = why
        return found

    @quiet
    def further(self, batch_size: int | None, V: Array | None, got: Got) -> Verdicts:
        """VᵀH_iV, or diag H_i where there is no V."""
        found = Verdicts()
        for i in self._convex(got, found) if batch_size is None else ():
            shape, parts = self.histories[i].shape, got[i]
            if V is None:
                why = wrong_diagonal(shape, np.asarray(parts["diagonal"], dtype=np.float64))
            else:
                why = wrong_curvature(shape, parts["curvature"], np.asarray(V, dtype=np.float64))
            if why is not None:
                found[i] = why
        return found

    def _convex(self, got: Got, found: Verdicts) -> list[int]:
        """Those whose answers are finite and not absurd, where losses are convex."""
        finite = [i for i, parts in got.items() if all(_finite(name, array) for name, array in parts.items())]
        return [i for i in finite if i in self.histories and i not in found]

    def _absurd(self, what: str, sizes: dict[int, float], usual: Vector) -> Verdicts:
        found = absurd(sizes, {i: float(usual[i]) for i in sizes}, self.outlier)
        return {
            i: f"its {what} has norm {sizes[i]:.3g}, and the median of the others' {median:.3g} (absurd size)"
            for i, median in found.items()
        }

    def _absurd_losses(self, losses: dict[int, float]) -> Verdicts:
        if self.known.noisy:  # noise may have left hardly anything of somebody's loss
            return {}
        sizes = {i: abs(loss) for i, loss in losses.items() if np.isfinite(loss)}
        found = absurd(sizes, {i: float(self.probes[i]) for i in sizes}, self.outlier**2)
        return {
            i: f"its loss is {losses[i]:.3g}, and the median of the others' {median:.3g} (absurd size)"
            for i, median in found.items()
        }


def _histories(facts: Facts, setup: Setup | None) -> dict[int, Consistency]:
    """An empty history for everybody, but for the loss at the agreement's arbitrary point."""
    known, d = facts.constants, len(facts.start)
    l2 = None if setup is None or setup.model.get("kind", "linear") != "linear" else float(linear(setup.model).l2)
    point = (np.random.default_rng(0).standard_normal(d) / np.sqrt(d)).astype(facts.start.dtype).astype(np.float64)
    kept = int(np.clip(NUMBERS / (d * len(known.samples)), 2, KEPT))
    epsilon, out = float(np.finfo(facts.start.dtype).eps), {}
    for i, (L, mu) in enumerate(zip(known.smoothness, known.strong_convexity, strict=True)):
        shape = Shape(float(L), float(mu), int(known.samples[i]), d, epsilon, l2)
        out[i] = Consistency(shape, shape.claim(point, float(facts.probes[i])), kept)
    return out


def _double(x: Tensor) -> NDArray[np.float64]:
    return x.detach().to(torch.float64).numpy()


def _finite(name: str, array: Array) -> bool:
    return bool(np.all(np.isfinite(array[:1] if name == "scalars" else array)))


def _norms(got: Got, part: str) -> dict[int, float]:
    """Of the finite ones."""
    with np.errstate(over="ignore"):
        norms = {i: float(np.linalg.norm(parts[part].astype(np.float64))) for i, parts in got.items()}
    return {i: norm for i, norm in norms.items() if np.all(np.isfinite(got[i][part]))}
