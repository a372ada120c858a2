r"""`Personal`: clients that share a model x and each have a personal model near it.

    F_i(x) = min_u f_i(u) + (γ_i/2)‖u − x‖²,    γ_i = strength/n_i,    ∇F_i(x) = γ_i(x − u_i)

takes the place of f_i(x), and everything else is unchanged: objectives, methods, runtimes and the
certificate, with L_F = Lγ/(L + γ) and μ_F = μγ/(μ + γ). u_i stays with its client; a server that
sees single gradients could form it, u_i = x − c_i/γ_i, and one that sees masked sums cannot.

Linear models are solved for by Newton's method (`envelope.py`, `newton.py`), networks by a few
gradient steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Self, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from scaffpd.errors import InputError, positive, unknown
from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Vector
from scaffpd.federation.modes import ModesAt
from scaffpd.models.arrays import read_features, read_labels
from scaffpd.models.draws import Draws, streams
from scaffpd.models.envelope import Anchor, own_predictions
from scaffpd.models.glm import LinearOracle
from scaffpd.models.layout import PaddedBlock
from scaffpd.models.linear import Linear
from scaffpd.models.modes import ClientModes
from scaffpd.models.module import Module
from scaffpd.models.network_oracle import ModuleOracle
from scaffpd.models.newton import LossHessian, NewtonPoint, portions
from scaffpd.models.oracle import (
    ClientData,
    Oracle,
    StackedDisplacements,
    StackedPoint,
    refuse_curvature,
    shift,
)
from scaffpd.models.quadratic import QuadraticOracle
from scaffpd.models.threads import parallel_map

INNER = 30  # most gradient steps of a personal network
REACH = 2  # of REACH/q accelerated steps, which shrink the distance to u_i by about e^−REACH


@dataclass(frozen=True)
class Personal:
    r"""Personal models u_i = argmin_u f_i(u) + (γ_i/2)‖u − x‖² around a shared x, γ_i = κ/n_i.

    Give it to a `Cohort` in the place of the model; `train` finds x for your objective and bounds
    its suboptimality, for x and all u_i together. `Result.personal[i]` is client i's model,
    `Cohort.personal(x)` all of them by name, and `evaluate` scores each client's own. strength → ∞
    is one model for all, strength → 0 everyone alone; a client with few rows relies on the others,
    one with many hardly does.

    With differential privacy, train x with `Private(model)` and let every client call
    `personalise(x, X, y, model)` afterwards: a model that stays at the client costs no ε.

    Args:
        model: `Linear(...)`, or `Module(...)`, trained by at most 30 gradient steps per client and
            without a certificate.
        strength: κ in γ_i = κ/n_i, with n_i rows at client i.
        columns: the features with personal coefficients, by name (of data frames) or number, and
            "intercept"; of a network the layers, by name ("fc" is a personal head). All of them if
            not given. The others are shared.
    """

    model: Linear | Module
    strength: float
    columns: str | int | Sequence[str | int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, Linear | Module):
            raise InputError(
                "personal-of-what",
                f"Personal needs Linear(...) or Module(...), got {self.model!r}: with privacy, "
                "train x with Private(model), and then personalise(x, X, y, Personal(model, ...)), "
                "which costs no ε.",
            )
        positive("Personal", "strength", self.strength)
        if self.columns is not None and not self._columns:
            raise InputError("no-personal-column", "Personal needs at least one column.")

    @property
    def _columns(self) -> list[str | int]:
        columns = self.columns
        if columns is None:
            return []
        return [columns] if isinstance(columns, str | int) else list(columns)

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        """Bind to the clients' data; models of the training rows score held-out rows."""
        training: object = like
        if isinstance(training, Envelopes):
            inner = self.model.oracle(data, cast(Oracle, training.inner))
            return cast(Oracle, HeldOutModels(inner, training))
        data = replace(data, features=[np.asarray(x) for x in data.features])
        inner = self.model.oracle(data, like)
        sizes = torch.tensor([len(x) for x in data.features])
        gamma = float(self.strength) / sizes.to(inner.start())
        own: Tensor | None = None
        if isinstance(inner, ModuleOracle):
            if self.columns is not None:
                own = self._layers(inner).to(gamma.device)
            return cast(Oracle, PersonalModuleOracle(inner, Anchor(inner.l2, gamma, own)))
        assert isinstance(inner, LinearOracle)
        if self.columns is not None:
            own = self._features(data, inner.rows.A.shape[1]).to(gamma.device)
        return cast(Oracle, PersonalOracle(inner, Anchor(inner.l2, gamma, own)))

    def _layers(self, inner: ModuleOracle) -> Tensor:
        """Mark the entries of x that belong to personal layers."""
        names = list(inner.function.parameters)
        own = torch.zeros(len(names), dtype=torch.bool)
        for layer in self._columns:
            inside = [name == layer or name.startswith(f"{layer}.") for name in names]
            if not any(inside):
                known = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
                raise unknown("layer", str(layer), known)
            own |= torch.tensor(inside)
        return own.repeat_interleave(torch.tensor(inner.function.sizes))

    def _features(self, data: ClientData, width: int) -> Tensor:
        """Mark the personal features; the intercept is the last one."""
        intercept = cast(Linear, self.model).intercept
        features = width - intercept
        names = list(data.columns or [])
        own = torch.zeros(width, dtype=torch.bool)
        for column in self._columns:
            whole = isinstance(column, int | np.integer) and not isinstance(column, bool)
            if column in names:
                own[names.index(str(column))] = True
            elif column == "intercept" and intercept:
                own[features] = True
            elif whole and 0 <= int(column) < features:
                own[int(column)] = True
            else:
                known = [*(names or [f"0 to {features - 1}"]), *["intercept"][: int(intercept)]]
                raise unknown("column", column, known)
        return own


def personalise(
    x: ArrayLike | Tensor, X: ArrayLike, y: ArrayLike, model: Personal
) -> NDArray[np.float64]:
    """Compute a client's own model from x and its rows alone: argmin_u f(u) + (κ/2n)‖u − x‖².

    Nothing leaves the client, so it costs no ε if x was trained privately. Without rows it is x.

    Args:
        x: the shared model, such as `Result.x`.
        X: the client's features.
        y: its labels.
        model: the `Personal(...)` that x was trained with.
    """
    if not isinstance(model, Personal):
        raise InputError(
            "not-personal",
            f"personalise needs the Personal(...) that x was trained with, got {model!r}.",
        )
    shared = torch.as_tensor(np.asarray(x))
    features = read_features("client", X) if np.shape(X)[0] else None
    if features is None:
        return np.array(x)
    columns = [str(column) for column in X.columns] if hasattr(X, "columns") else None
    labels = read_labels("client", y, len(features))
    data = ClientData([features], [labels], ["client"], torch.device("cpu"), shared.dtype, columns)
    oracle = model.oracle(data, cast(Oracle, SharedModel(len(shared))))
    if shared.shape != (oracle.dimension,):
        raise InputError(
            "wrong-length",
            f"x has shape {tuple(shared.shape)}, but the model has {oracle.dimension} parameters.",
        )
    return np.asarray(cast(Envelopes, oracle).own(shared)[0])


@dataclass(frozen=True)
class SharedModel:
    """The shared model as a single client sees it: its length says how many classes there are."""

    dimension: int


class Envelopes:
    """N clients with personal models.

    Args:
        inner: the same clients with f_i.
        anchor: γ_i, l2 and the personal columns.
    """

    def __init__(self, inner: LinearOracle | ModuleOracle, anchor: Anchor) -> None:
        self.inner = inner
        self.anchor = anchor
        self.names = inner.names
        self.dimension = inner.dimension
        self.most_rows = inner.most_rows
        self._known: Constants | None = None

    def start(self) -> Tensor:
        """Return x⁰."""
        return self.inner.start()

    def contents(self) -> list[Tensor]:
        """Return the data."""
        return self.inner.contents()

    def constants(self) -> Constants:
        """Return L_F = Lγ/(L + γ) and μ_F = μγ/(μ + γ); if columns are shared, L_F = L."""
        if self._known is None:
            known = self.inner.constants()
            g = self.anchor.gamma.double().cpu().numpy()

            def tied(h: Vector) -> Vector:
                return np.asarray(h * g / (h + g))

            known = replace(known, strong_convexity=tied(known.strong_convexity))
            if self.anchor.own is None:
                L = tied(known.smoothness)
                known = replace(known, smoothness=L, steepest=tied(known.steepest))
            self._known = known
        return self._known

    def only(self, clients: list[int]) -> Self:
        """Select some of the clients."""
        return type(self)(self.inner.only(clients), self.anchor.only(clients))

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> NewtonPoint | NetworkPoint:
        """Evaluate F_i and ∇F_i at x; for minibatches, the envelope of their mean loss."""
        raise NotImplementedError

    def losses(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> Tensor:
        """Return F_i(x)."""
        return self.evaluate(x, batch_size, key).losses

    def own(self, x: Tensor) -> Tensor:
        """Return u_i(x), (N, d)."""
        return self.evaluate(x).models()

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return f_i(u_i) and accuracy of u_i, the client's own model."""
        return own_scores(self.inner, self.own(x))

    def _rates(self, plan: LocalPlan) -> Tensor:
        """Return η_i, (N, 1); 0 if the loss is flat."""
        if plan.rate is not None:
            return torch.full_like(self.anchor.gamma, plan.rate)[:, None]
        L = torch.from_numpy(self.constants().expected_smoothness(plan.batch_size))
        L = L.to(self.anchor.gamma)[:, None]
        return torch.where(L > 0, plan.scale / L, 0)


class PersonalOracle(Envelopes):
    """Personal linear models: inner solves by Newton's method."""

    inner: LinearOracle

    def __init__(self, inner: LinearOracle, anchor: Anchor) -> None:
        super().__init__(inner, anchor)
        self.outputs = inner.outputs
        self._last: tuple[Tensor, int, NewtonPoint] | None = None

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> NewtonPoint:
        """Evaluate F_i and ∇F_i at x; for minibatches, the envelope of their mean loss."""
        if batch_size is not None:
            return self._batch(x, Draws(key, streams(self.names, x.device)).uniform(batch_size))
        if self._last is None or self._last[0] is not x or self._last[1] != x._version:
            self._last = x, x._version, self._point(x)
        return self._last[2]

    def _point(self, x: Tensor, start: Tensor | None = None) -> NewtonPoint:
        """Evaluate F_i, on compressed rows if there are any."""
        few = self.inner.compressed if isinstance(self.inner, QuadraticOracle) else None
        rows = self.inner.rows if few is None else few.rows
        return NewtonPoint(rows, self.inner.loss, self.anchor, x, self.outputs, start, few)

    def _batch(self, x: Tensor, uniform: Tensor, start: Tensor | None = None) -> NewtonPoint:
        rows = self.inner.rows.take(self.inner.rows.layout.minibatch(uniform))
        return NewtonPoint(
            rows, self.inner.loss, self.anchor, x, self.outputs, start, minibatch=True
        )

    def local_updates(
        self, x: Tensor, at: NewtonPoint | Tensor | None, correction: Tensor | None, plan: LocalPlan
    ) -> StackedDisplacements:
        """Take J local steps of every client; v carries over from step to step."""
        each = x.new_zeros(len(self.names), len(x))
        rates = self._rates(plan)
        pull = each + shift(at, correction)
        v: Tensor | None = None
        draws = Draws(plan.key, streams(self.names, x.device))
        for _ in range(plan.steps):
            if plan.batch_size is None:
                point = self._point(x - each, v)
            else:
                point = self._batch(x - each, draws.uniform(plan.batch_size), v)
            v = point.v
            each = each + rates * (point.each() + pull - plan.prox * each)
        return StackedDisplacements(each)

    def proximal_steps(
        self, at: NewtonPoint, correction: Tensor, plan: ProximalPlan
    ) -> StackedDisplacements:
        """Return (∇²F_i + βD)⁻¹c exactly, from a step of u_i alone.

        (H_i + γβD/(γ + βD)) e = γc/(γ + βD) and d = (c + γe)/(γ + βD); shared columns have d = e,
        where γ = ∞.
        """
        c = correction.view(-1, self.outputs)
        pull = plan.pull * plan.metric.view(-1, self.outputs)[:, :1]
        gamma = self.anchor.per_feature(self.anchor.gamma, float("inf"))
        free = 1 / (gamma + pull)
        share = torch.where(torch.isfinite(gamma), gamma / (gamma + pull), 1)
        out = c.new_empty(len(self.names), *c.shape)

        def work(block: PaddedBlock) -> None:
            who = block.clients
            A, y = at.rows.of(block)
            bowl = LossHessian(at.loss, A, y, block.of(at.z), block.weight)
            solve = bowl.solver(self.inner.l2 + share[who] * pull)
            e = solve((share[who] * c)[..., None])[..., 0]
            out[who] = free[who] * c + share[who] * e

        parallel_map(work, portions(at.rows, self.dimension), c.device)
        return StackedDisplacements(out.flatten(1))


def own_scores(inner: Oracle | LinearOracle | ModuleOracle, U: Tensor) -> tuple[Vector, Vector]:
    """Return f_i(u_i) and accuracy on the rows of `inner`, for personal models U, (N, d)."""
    if not isinstance(inner, LinearOracle):
        pairs = [inner.only([i]).scores(u) for i, u in enumerate(U)]
        losses, shares = zip(*pairs, strict=True)
        return np.concatenate(losses), np.concatenate(shares)
    rows = inner.rows
    z = own_predictions(rows, U.view(len(U), -1, inner.outputs))
    loss = rows.layout.segment_sum(inner.loss.value(z, rows.y) * rows.share)
    loss = loss + inner.l2 / 2 * U.square().sum(1)
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
        """Return f_i(u_i) and accuracy, with u_i from the training rows."""
        return own_scores(self.inner, self.training.own(x))


class NetworkPoint(StackedPoint):
    """Personal networks: F_i and its gradient after inexact training, from d_i = x − u_i."""

    def __init__(self, x: Tensor, losses: Tensor, steps: Tensor, gradients: Tensor) -> None:
        super().__init__(x, losses, gradients)
        self.steps = steps

    def models(self) -> Tensor:
        """Return u_i, (N, d)."""
        return self.x - self.steps


class PersonalModuleOracle(Envelopes):
    """Personal networks: proximal local training (pFedMe), without a certificate."""

    inner: ModuleOracle

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> NetworkPoint:
        """Evaluate F_i and γ_i(x − u_i) at x."""
        rows = self.inner.drawn(batch_size, Draws(key, self.inner.streams))
        return NetworkPoint(x, *self._trained(x.expand(len(rows), -1), rows))

    def _trained(self, X: Tensor, rows: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
        """Return F_i, x_i − u_i and ∇F_i, by accelerated steps on f_i(u) + (γ/2)‖u − x_i‖².

        The gradient of F_i is γ(x − u) in personal layers, and that of f_i at u in shared ones,
        which do not move. f_i need not be convex and L_i is an estimate: a client whose value is
        above that at x_i, or is no number, returns to its lowest point at half the rate. Every
        client has a number of steps of its own, ⌈REACH/q⌉ with q² = γ/(L + γ), so that its model
        does not depend on the others.
        """
        gamma = self.anchor.gamma[:, None]
        L = torch.from_numpy(self.inner.constants().smoothness).to(gamma)[:, None]
        rate = 1 / (L + gamma)
        q = (gamma * rate).sqrt()
        momentum = (1 - q) / (1 + q)
        count = (REACH / q).ceil().clamp_max(INNER)
        own = (
            torch.ones_like(X[0], dtype=torch.bool) if self.anchor.own is None else self.anchor.own
        )
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
        return lowest[:, 0], best, torch.where(own, gamma * best, slope)

    def local_updates(
        self,
        x: Tensor,
        at: NetworkPoint | Tensor | None,
        correction: Tensor | None,
        plan: LocalPlan,
    ) -> StackedDisplacements:
        """Take J local steps of every client, each after its own training."""
        each = x.new_zeros(len(self.names), len(x))
        rates = self._rates(plan)
        pull = each + shift(at, correction)
        draws = Draws(plan.key, self.inner.streams)
        for _ in range(plan.steps):
            rows = self.inner.drawn(plan.batch_size, draws)
            each = each + rates * (self._trained(x - each, rows)[2] + pull - plan.prox * each)
        return StackedDisplacements(each)

    def proximal_steps(self, *_: object) -> NoReturn:
        """Refuse: personal networks have no second derivatives."""
        refuse_curvature()


def client_modes(oracle: Oracle, at: ModesAt, start: ClientModes | None) -> ClientModes:
    """Solve for the clients' own modes around x, for strengths by evidence."""
    inner = oracle.inner if isinstance(oracle, PersonalOracle) else oracle
    if not isinstance(inner, LinearOracle):
        raise InputError(
            "evidence-of-linear-models",
            "Strengths are known from the data for Linear models only: give l2 and strength as "
            "numbers.",
        )
    return ClientModes(inner, at, start)


def lowest(oracle: Oracle) -> Tensor:
    """Return min_u f_i(u) of every client with a linear model: F_i for γ = 0."""
    inner = oracle.inner if isinstance(oracle, PersonalOracle) else oracle
    if not isinstance(inner, LinearOracle) or inner.l2 == 0:
        raise InputError(
            "own-optima-unknown",
            "The clients' own optima are known for Linear models with l2 > 0, where every loss has "
            "a minimum: give offset= as numbers.",
        )
    free = Anchor(inner.l2, torch.zeros_like(inner.smoothness))
    return PersonalOracle(inner, free).losses(inner.start())
