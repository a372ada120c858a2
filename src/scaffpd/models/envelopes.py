"""Clients with personal models (`Personal` has the equations): linear ones, and networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from scaffpd.errors import InputError
from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Vector
from scaffpd.federation.modes import ModesAt
from scaffpd.federation.questions import EvaluatedPoint
from scaffpd.models.cox import CoxModes, CoxOracle, CoxPoint, OwnCoxPoint, refuse_samples
from scaffpd.models.curvature import LossHessian
from scaffpd.models.draws import Draws, streams
from scaffpd.models.execution import parallel_map
from scaffpd.models.glm import LinearOracle
from scaffpd.models.modes import ClientModes
from scaffpd.models.network_oracle import ModuleOracle
from scaffpd.models.newton import Anchor, NewtonPoint, portions
from scaffpd.models.oracle import (
    Held,
    Oracle,
    StackedDisplacements,
    StackedPoint,
    refuse_curvature,
    shift,
    step_sizes,
    stepped,
)
from scaffpd.models.point import LinearPoint, Ridge
from scaffpd.models.quadratic import QuadraticOracle
from scaffpd.models.samples import PaddedBlock

INNER = 30  # most gradient steps of a personal network
ROUGH = 1e-3  # residual of a local model, relative, where it is solved by conjugate gradients
REACH = 2  # of REACH/q accelerated steps, which shrink the distance to u_i by about e^−REACH


class Envelopes(Oracle):
    """N clients with personal models.

    Args:
        inner: the same clients with ℓ_i, without a regulariser.
        ridge: the regulariser, on x.
        ties: the least and the largest γ_ik of every client; ∞ if anything is shared.
        marked: what may be personal; `None` for all.
    """

    def __init__(
        self,
        inner: LinearOracle | CoxOracle | ModuleOracle,
        ridge: Ridge,
        ties: tuple[Tensor, Tensor],
        marked: Tensor | None,
    ) -> None:
        self.inner = inner
        self.ridge = ridge
        self.ties = ties
        self.marked = marked
        self.names = inner.names
        self.dimension = inner.dimension
        self.most_rows = inner.most_rows
        self._known: Constants | None = None

    def start(self) -> Tensor:
        return self.inner.start()

    def contents(self) -> list[Tensor]:
        return self.inner.contents()

    def constants(self) -> Constants:
        """Return L_F = Lγ/(L + γ) + l2 and μ_F = bγ/(b + γ) + l2, with the worst γ for each."""
        if self._known is None:
            known = self.inner.constants()
            least, most = (g.double().cpu().numpy() for g in self.ties)

            def tied(h: Vector, g: Vector) -> Vector:
                return np.asarray(h / (1 + h / g))  # h for g = ∞

            bottom = tied(known.strong_convexity, least)
            self._known = replace(
                known,
                smoothness=tied(known.smoothness, most) + self.ridge.most,
                steepest=tied(known.steepest, most) + self.ridge.most,
                strong_convexity=bottom + self.ridge.least if known.convex else bottom,
                ridge=self.ridge.vector(),
            )
        return self._known

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> NewtonPoint | OwnCoxPoint | NetworkPoint:
        raise NotImplementedError

    def own(self, x: Tensor) -> Tensor:
        return self.evaluate(x).models()

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return ℓ_i(u_i) and accuracy of u_i, the client's own model, without a regulariser."""
        return own_scores(self.inner, self.own(x))

    def _rates(self, plan: LocalPlan) -> Tensor:

        def smoothness() -> Vector:
            return self.constants().expected_smoothness(plan.batch_size)

        return step_sizes(plan, len(self.names), smoothness, self.start())


class PersonalOracle(Envelopes):
    """Personal linear models: inner solves by Newton's method."""

    inner: LinearOracle | CoxOracle

    def __init__(
        self,
        inner: LinearOracle | CoxOracle,
        ridge: Ridge,
        anchor: Anchor,
        marked: Tensor | None = None,
    ) -> None:
        super().__init__(inner, ridge, (anchor.gamma.amin(1), anchor.gamma.amax(1)), marked)
        self.anchor = anchor
        self.outputs = inner.outputs
        self._last: tuple[Tensor, int, NewtonPoint | OwnCoxPoint] | None = None

    def only(self, clients: list[int]) -> Self:
        anchor = self.anchor.only(clients)
        return type(self)(self.inner.only(clients), self.ridge, anchor, self.marked)

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> NewtonPoint | OwnCoxPoint:
        if batch_size is not None:
            return self._batch(x, Draws(key, streams(self.names, x.device)).uniform(batch_size))
        if self._last is None or self._last[0] is not x or self._last[1] != x._version:
            self._last = x, x._version, self._point(x)
        return self._last[2]

    def _point(self, x: Tensor, start: Tensor | None = None) -> NewtonPoint | OwnCoxPoint:
        if isinstance(self.inner, CoxOracle):
            return OwnCoxPoint(self.inner, self.anchor, self.ridge, x, start)
        few = self.inner.compressed if isinstance(self.inner, QuadraticOracle) else None
        rows = self.inner.rows if few is None else few.rows
        bound = (rows, self.inner.loss, self.anchor, self.ridge)
        return NewtonPoint(*bound, x, self.outputs, start, few)

    def _batch(self, x: Tensor, uniform: Tensor, start: Tensor | None = None) -> NewtonPoint:
        if isinstance(self.inner, CoxOracle):
            refuse_samples()
        rows = self.inner.rows.take(self.inner.rows.layout.minibatch(uniform))
        bound = (rows, self.inner.loss, self.anchor, self.ridge)
        return NewtonPoint(*bound, x, self.outputs, start, minibatch=True)

    def local_updates(
        self, x: Tensor, at: Held, correction: Tensor | None, plan: LocalPlan
    ) -> StackedDisplacements:
        w: Tensor | None = None
        draws = Draws(plan.key, streams(self.names, x.device))

        def slopes(U: Tensor) -> Tensor:
            nonlocal w
            if plan.batch_size is None:
                point = self._point(U, w)
            else:
                point = self._batch(U, draws.uniform(plan.batch_size), w)
            w = point.w
            return point.each()

        return stepped(x, shift(at, correction), self._rates(plan), plan, slopes)


def own_scores(
    inner: Oracle | LinearOracle | CoxOracle | ModuleOracle, U: Tensor
) -> tuple[Vector, Vector]:
    """Return ℓ_i(u_i) and accuracy on the rows of `inner`, for personal models U, (N, d)."""
    if isinstance(inner, CoxOracle):
        return inner.own_scores(U)
    if not isinstance(inner, LinearOracle):
        pairs = [inner.only([i]).scores(u) for i, u in enumerate(U)]
        losses, shares = zip(*pairs, strict=True)
        return np.concatenate(losses), np.concatenate(shares)
    rows = inner.rows
    z = rows.along(U.view(len(U), -1, inner.outputs))
    loss = rows.layout.segment_sum(inner.loss.value(z, rows.y) * rows.share)
    right = inner.loss.correct(z, rows.y)
    accuracy = torch.full_like(loss, float("nan"))
    if right is not None:
        accuracy = rows.layout.segment_sum(right.to(rows.share)) / rows.layout.sizes
    return loss.double().cpu().numpy(), accuracy.double().cpu().numpy()


class HeldOutModels:
    """Held-out rows, scored with the personal models of the training rows."""

    def __init__(self, inner: Oracle, training: Envelopes) -> None:
        self.inner = inner
        self.training = training
        self.dimension = inner.dimension

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        return own_scores(self.inner, self.training.own(x))


class NetworkPoint(StackedPoint):
    """Personal networks: F_i and its gradient after inexact training, from d_i = x − u_i."""

    def __init__(self, x: Tensor, losses: Tensor, steps: Tensor, gradients: Tensor) -> None:
        super().__init__(x, losses, gradients)
        self.steps = steps

    def models(self) -> Tensor:
        return self.x - self.steps


class PersonalModuleOracle(Envelopes):
    """Personal networks: proximal local training (pFedMe), without a certificate."""

    inner: ModuleOracle

    def __init__(
        self, inner: ModuleOracle, ridge: Ridge, gamma: Tensor, marked: Tensor | None
    ) -> None:
        most = gamma if marked is None else torch.full_like(gamma, torch.inf)
        super().__init__(inner, ridge, (gamma, most), marked)
        self.gamma = gamma

    def only(self, clients: list[int]) -> Self:
        chosen = self.inner.only(clients)
        return type(self)(chosen, self.ridge, self.gamma[clients], self.marked)

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> NetworkPoint:
        """Evaluate F_i and γ_i(x − u_i) + l2 x at x."""
        rows = self.inner.drawn(batch_size, Draws(key, self.inner.streams))
        return NetworkPoint(x, *self._trained(x.expand(len(rows), -1), rows))

    def _trained(self, X: Tensor, rows: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        """Return F_i, x_i − u_i and ∇F_i, by accelerated steps on ℓ_i(u) + (γ/2)‖u − x_i‖².

        The gradient of F_i is γ(x − u) in personal layers, and that of ℓ_i at u in shared ones,
        which do not move, plus l2 x. ℓ_i need not be convex and L_i is an estimate: a client whose
        value is above that at x_i, or is no number, returns to its lowest point at half the rate.
        Every client has a number of steps of its own, ⌈REACH/q⌉ with q² = γ/(L + γ), so that its
        model does not depend on the others.
        """
        gamma = self.gamma[:, None]
        L = torch.from_numpy(self.inner.constants().smoothness).to(gamma)[:, None]
        rate = 1 / (L + gamma)
        q = (gamma * rate).sqrt()
        momentum = (1 - q) / (1 + q)
        count = (REACH / q).ceil().clamp_max(INNER)
        own = torch.ones_like(X[0], dtype=torch.bool) if self.marked is None else self.marked
        E = last = best = torch.zeros_like(X)
        first = lowest = slope = E[:, :1]
        for t in range(int(count.max()) + 1):
            losses, g = self.inner.sums(X - E, rows)
            values = losses[:, None] + gamma / 2 * E.square().sum(1, keepdim=True)
            if t == 0:
                first = lowest = values
                slope = g
            lower = values < lowest
            lowest = torch.where(lower, values, lowest)
            best = torch.where(lower, E, best)
            slope = torch.where(lower, g, slope)
            good = values <= first
            rate = torch.where(good, rate, rate / 2)
            D = torch.where(good, E + rate * torch.where(own, g - gamma * E, 0), best)
            ahead = torch.where(good, D + momentum * (D - last), best)
            E = torch.where(t < count, ahead, E)
            last = D
        gradients = torch.where(own, gamma * best, slope) + self.ridge.times(X)
        return lowest[:, 0] + self.ridge.half(X).to(X.dtype), best, gradients

    def local_updates(
        self, x: Tensor, at: Held, correction: Tensor | None, plan: LocalPlan
    ) -> StackedDisplacements:
        draws = Draws(plan.key, self.inner.streams)

        def slopes(U: Tensor) -> Tensor:
            return self._trained(U, self.inner.drawn(plan.batch_size, draws))[2]

        return stepped(x, shift(at, correction), self._rates(plan), plan, slopes)


def proximal_steps(
    at: EvaluatedPoint, correction: Tensor, plan: ProximalPlan
) -> StackedDisplacements:
    """Return d_i = (∇²F_i + βD)⁻¹c, from a step of u_i alone.

    With P = βD + l2, (H_i + γP/(γ + P)) e = γc/(γ + P) and d = (c + γe)/(γ + P), for H_i the
    Hessian of ℓ_i; shared columns, and all of one model for all, have γ = ∞ and d = e.
    """
    if isinstance(at, CoxPoint):
        return at.proximal(correction, plan)
    if not isinstance(at, LinearPoint):
        refuse_curvature()
    k = at.outputs
    c = correction.view(-1, k)
    pull = plan.pull * plan.metric.view(-1, k)
    pull = (pull + at.ridge.shaped(pull))[:, :1]
    out = c.new_empty(len(at.rows.layout), *c.shape)
    gamma = out.new_full((len(out), 1, 1), torch.inf)
    if isinstance(at, NewtonPoint):
        gamma = at.anchor.gamma.to(c)[..., None]
    free = 1 / (gamma + pull)
    share = torch.where(torch.isfinite(gamma), gamma / (gamma + pull), 1)

    def work(block: PaddedBlock) -> None:
        who = block.clients
        A, y = at.rows.of(block)
        bowl = LossHessian(at.loss, A, y, block.of(at.z), block.weight)
        solve = bowl.solver(share[who] * pull, ROUGH)
        e = solve((share[who] * c)[..., None])[..., 0]
        out[who] = free[who] * c + share[who] * e

    parallel_map(work, portions(at.rows, len(at.x)), c.device)
    return StackedDisplacements(out.flatten(1))


def client_modes(oracle: object, at: ModesAt, start: ClientModes | None) -> ClientModes:
    """Solve for the clients' own modes around x, for strengths by evidence."""
    inner = oracle.inner if isinstance(oracle, PersonalOracle) else oracle
    if isinstance(inner, CoxOracle):
        return CoxModes(inner, at, start)
    if not isinstance(inner, LinearOracle):
        raise InputError(
            "evidence-not-linear",
            "Only Linear models can estimate strengths from the data: give l2 and strength as "
            "numbers.",
        )
    return ClientModes(inner, at, start)
