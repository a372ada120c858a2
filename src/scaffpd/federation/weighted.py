r"""Questions whose clients compute their own weights, for `MinimaxSums`: even losses leave a client
only in sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.federation.clients import EvaluatedPoint
from scaffpd.federation.plans import LocalPlan, Vector
from scaffpd.federation.questions import ClientSide, GradientsAt, Question, Reply, Vectors
from scaffpd.objectives.base import Objective
from scaffpd.objectives.separable import Separable


@dataclass(frozen=True, eq=False)
class WeightRule:
    """Rule by which clients compute their own weights from their own losses, with thresholds common
    to all.

    Attributes:
        objective: the objective, which has a `separable` form.
        levels: the thresholds ν.
        delta: δ, the penalty on leaving the centre.
        centre: the number under which clients store the centre; 0 is the prior.
        mass: Σ of the weights that they store under that number; the centre is those over it.
        name: the number under which to store these weights; 0 to forget them.
    """

    objective: Objective
    levels: tuple[float, ...]
    delta: float = 0.0
    centre: int = 0
    mass: float = 1.0
    name: int = 0


SUMMARY = 6  # numbers that go with λ_i c_i: see `Response`


@dataclass(frozen=True, eq=False)
class WeightedQuestion(Question):
    """Question whose clients compute their own weights: nothing of a single client leaves, not even
    its loss.

    Attributes:
        at: the point x.
        rule: the rule for the weights.
    """

    kind = "weighted"

    at: GradientsAt
    rule: WeightRule

    @property
    def sent(self) -> Tensor | None:
        """Return the point x."""
        return self.at.x

    def down(self, d: int) -> int:
        """Count thresholds, δ and the centre's mass."""
        return len(self.rule.levels) + 2

    def losses(self, clients: ClientSide) -> tuple[EvaluatedPoint, Separable, Vector, Vector]:
        """Return the point, the objective's form, L_i, and the centre."""
        point = clients.point(self.at)
        form = clients.form(self.rule.objective)
        about = self.rule
        centre = clients.centre(about.centre) / about.mass if about.centre else form.prior
        return point, form, point.losses.double().cpu().numpy(), centre

    def weights(self, clients: ClientSide) -> Vector:
        """Return λ_i at the first threshold."""
        _, form, losses, centre = self.losses(clients)
        return form.weights(losses, self.rule.levels[0], self.rule.delta, centre)


@dataclass(frozen=True, eq=False)
class Thresholds(WeightedQuestion):
    """For sums: p_i L_i, p_i L_i², and for every ν λ_i(ν) and max_l (L_i − ν) l − ψ_i(l) − (δ/2)(l
    − m_i)².
    """

    kind = "thresholds"
    vectors = ("masses",)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Return the shape: two numbers, and two for every threshold."""
        return {"masses": (2 + 2 * len(self.rule.levels),)}

    def answer(self, clients: ClientSide) -> Reply:
        """Compute all numbers from L_i."""
        _, form, losses, centre = self.losses(clients)
        rows = [form.prior * losses, form.prior * losses**2]
        for nu in self.rule.levels:
            rows += [
                made(losses, nu, self.rule.delta, centre) for made in (form.weights, form.conjugate)
            ]
        return Reply({}, {"masses": _stacked(np.stack(rows, 1))})


@dataclass(frozen=True, eq=False)
class Response(WeightedQuestion):
    """For sums: λ_i c_i and the terms of a certificate.

    The numbers are λ_i; λ_i (L_i − b_i), from below; the moment of ψ (`Separable.moment`); ψ_i*(L_i
    − ν), from above; λ_i μ_i; and λ_i times the bound on the rounding error of c_i.
    """

    kind = "response"
    vectors = ("weighted",)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a vector and the numbers."""
        return {"weighted": (d + SUMMARY,)}

    def answer(self, clients: ClientSide) -> Reply:
        """Answer, and store λ_i if it has a name."""
        point, form, losses, centre = self.losses(clients)
        about = self.rule
        nu = self.rule.levels[0]
        weights = form.weights(losses, nu, about.delta, centre)
        if about.name:
            clients.keep(about.name, weights)
        e, error = (bound.double().cpu().numpy() for bound in point.rounding())
        e = e * (1 + 1e-12) + 1e-15 * (np.abs(losses) + np.abs(form.offset))
        numbers = [
            weights,
            weights * (losses - form.offset - e),
            form.moment(weights),
            form.conjugate(losses + e, nu, 0.0, centre),
            weights * clients.moduli(),
            weights * error * (1 + 1e-12),
        ]
        summary = np.stack(numbers, 1)

        def each() -> Tensor:
            c = point.each().double().cpu()
            return torch.cat([torch.from_numpy(weights)[:, None] * c, torch.from_numpy(summary)], 1)

        made = Vectors(
            lambda w: w.double().cpu() @ each(),
            each,
            shape=(len(self.at.x) + SUMMARY,),
            double_weights=True,
        )
        return Reply(
            {},
            {
                "weighted": replace(
                    made, unweighted=lambda: (point.each(), weights), hides_size=True
                )
            },
        )


@dataclass(frozen=True, eq=False)
class WeightedSteps(WeightedQuestion):
    """For sums: λ_i d_i with d_i = x − u_{i,J} after J local steps from x."""

    kind = "weighted_steps"
    vectors = ("weighted_d",)

    correction: Tensor
    plan: LocalPlan

    @property
    def sent(self) -> None:
        """Return `None`: clients have answered at x."""

    def down(self, d: int) -> int:
        """Count the correction too."""
        return d + super().down(d)

    def answer(self, clients: ClientSide) -> Reply:
        """Take the local steps of `LocalSteps`, weighted."""
        made = self.weights(clients)
        done = clients.local_updates(self.at.x, self.at, self.correction, self.plan)
        weights = torch.from_numpy(made).to(self.at.x)

        def each() -> Tensor:
            return weights[:, None] * done.each()

        held = Vectors(lambda w: done.sum(w.to(weights) * weights), each)
        return Reply(
            {},
            {"weighted_d": replace(held, unweighted=lambda: (done.each(), made), hides_size=True)},
        )


def _stacked(rows: NDArray[np.float64]) -> Vectors:
    """Wrap numbers of every client, (n, k), that leave in sums only."""
    table = torch.from_numpy(rows)
    return Vectors(
        lambda w: w.double().cpu() @ table,
        lambda: table,
        shape=rows.shape[1:],
        double_weights=True,
        hides_size=True,
    )
