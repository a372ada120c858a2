r"""`Personal`: clients that share a model x and each have a personal model near it.

    F_i(x) = min_u f_i(u) + (γ_i/2)‖u − x‖²,    γ_i = strength/n_i,    ∇F_i(x) = γ_i(x − u_i)

takes the place of f_i(x), and everything else is unchanged: objectives, methods, runtimes and the certificate, with
L_F = Lγ/(L + γ) and μ_F = μγ/(μ + γ). u_i stays with its client; a server that sees single gradients could form it,
u_i = x − c_i/γ_i, and one that sees masked sums cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.errors import InputError, positive, unknown
from scaffpd.federation import Constants, LocalPlan, ProximalPlan, Vector
from scaffpd.models import envelope
from scaffpd.models.envelope import (
    Anchor,
    PersonalPoint,
    RotatedPoint,
    RotatedTargets,
    SpectralPoint,
)
from scaffpd.models.glm import LinearOracle
from scaffpd.models.layout import PaddedBlock
from scaffpd.models.linear import Linear
from scaffpd.models.local_steps import LocalModel, pace
from scaffpd.models.module import Module
from scaffpd.models.network_oracle import ModuleOracle
from scaffpd.models.newton import LossHessian, NewtonPoint, portions
from scaffpd.models.numerics import Draws, parallel_map, streams
from scaffpd.models.oracle import (
    ClientData,
    Displacements,
    Oracle,
    StackedDisplacements,
    StackedPoint,
    read_features,
    read_labels,
    shift,
)
from scaffpd.models.quadratic import Gain, Profile, QuadraticOracle, RotatedSteps
from scaffpd.models.wide import SpectralFunction, WideOracle

Columns = str | int | Sequence[str | int] | None
INNER = 30  # most gradient steps of a personal network


@dataclass(frozen=True)
class Personal:
    r"""Personal models: u_i = argmin_u f_i(u) + (γ_i/2)‖u − x‖² around a shared model x, γ_i = strength/n_i.

    Give it to a `Cohort` in the place of the model; `train` finds x for your objective and bounds its suboptimality,
    for x and all u_i together. `Result.personal[i]` is client i's model, `Cohort.personal(x)` all of them by name,
    and `evaluate` scores each client's own. strength → ∞ is one model for all, strength → 0 everyone alone; a
    client with few rows relies on the others, one with many hardly does.

    With differential privacy, train x with `Private(model)` and let every client call `personalise(x, X, y, model)`
    afterwards: a model that stays at the client costs no ε.

    Args:
        model: `Linear(...)`, or `Module(...)`, trained by at most 30 gradient steps per client and
            without a certificate.
        strength: κ in γ_i = κ/n_i, with n_i rows at client i.
        columns: the features with personal coefficients, by name (of data frames) or number, and "intercept"; of a
            network the layers, by name ("fc" is a personal head). All of them if not given. The others are shared.
    """

    model: Linear | Module
    strength: float
    columns: Columns = None

    def __post_init__(self) -> None:
        if type(self.model).__name__ == "Private":
            raise InputError(
                "personal-take-private",
                "Personal does not take Private(...): train x with Private(model), then make each client's own model "
                "with personalise(x, X, y, Personal(model, ...)), which stays there and costs no ε.",
            )
        if not isinstance(self.model, Linear | Module):
            raise InputError(
                "personal-model-such",
                f"Personal needs a model such as Linear(...) or Module(...), got {self.model!r}.",
            )
        if cast(object, self.strength) == "auto":
            raise InputError(
                "personal-takes-number",
                "Personal takes a number for strength, such as 100; `sp.choose(...)` finds one by folds.",
            )
        positive("Personal", "strength", self.strength)
        if self.columns is not None:
            given = [self.columns] if isinstance(self.columns, str | int) else list(self.columns)
            if not given:
                raise InputError(
                    "personal-least-column",
                    "Personal needs at least one column in columns=, or none given for all of them.",
                )
            object.__setattr__(self, "columns", tuple(given))

    def oracle(self, data: ClientData, like: Oracle | None = None) -> Oracle:
        """Bind to the clients' checked data; held-out rows are scored with the models of the training rows."""
        if isinstance(training := cast(Any, like), Envelopes):
            return cast(Oracle, HeldOutModels(self.model.oracle(data, training.inner), training))
        if self.columns is not None and isinstance(self.model, Linear):
            data = replace(data, features=[np.asarray(x) for x in data.features])
        inner = self.model.oracle(data, like)
        sizes = torch.tensor([len(x) for x in data.features])
        gamma = float(self.strength) / sizes.to(inner.start())
        if isinstance(inner, ModuleOracle):
            return cast(
                Oracle, PersonalModuleOracle(inner, Anchor(inner.l2, gamma, self._layers(inner)))
            )
        assert isinstance(inner, LinearOracle)
        own = (
            None
            if self.columns is None
            else self._own(data, inner.rows.A.shape[1]).to(gamma.device)
        )
        return cast(Oracle, bound(inner, Anchor(inner.l2, gamma, own)))

    def _layers(self, inner: ModuleOracle) -> Tensor | None:
        """Mark the entries of x that belong to personal layers."""
        if self.columns is None:
            return None
        function = inner.function
        chosen = cast(tuple[Any], self.columns)
        inside = [
            [name == layer or name.startswith(f"{layer}.") for name in function.names]
            for layer in chosen
        ]
        for layer, found in zip(chosen, inside, strict=True):
            if not any(found[: len(function.parameters)]):
                raise unknown(
                    "layer",
                    str(layer),
                    {name.rpartition(".")[0] or name: 0 for name in function.parameters},
                )
        own = torch.tensor([any(found) for found in zip(*inside, strict=True)])
        return torch.repeat_interleave(own, torch.tensor(function.sizes))[: inner.dimension].to(
            inner.device
        )

    def _own(self, data: ClientData, features: int) -> Tensor:
        """Mark the personal features."""
        intercept = cast(Linear, self.model).intercept
        own = torch.zeros(features, dtype=torch.bool)
        for column in cast(tuple[str | int], self.columns):
            own[_number(column, data.columns, features - intercept, intercept)] = True
        return own


def _number(column: Any, names: Sequence[str] | None, features: int, intercept: bool) -> int:
    if isinstance(column, str):
        if column in (names or []):
            return list(names or []).index(column)
        if column == "intercept" and intercept:
            return features
        if column == "intercept":
            raise InputError(
                "personal-columns-intercept",
                "Personal has columns='intercept', but the model has none: write Linear(intercept=True).",
            )
        if names is None:
            raise InputError(
                "personal-column-clients",
                f"Personal has column {column!r}, but the clients' features have no names: give numbers.",
            )
        raise unknown("column", column, [*names, *(["intercept"] if intercept else [])])
    if (
        isinstance(column, bool)
        or not hasattr(column, "__index__")
        or not 0 <= int(column) < features
    ):
        raise InputError(
            "personal-columns-names",
            f"Personal needs columns from 0 to {features - 1}, names or 'intercept', got {column!r}.",
        )
    return int(column)


def personalise(x: Any, X: Any, y: Any, model: Personal) -> NDArray[np.float64]:
    """Compute a client's own model from the shared x and its rows, without a run: argmin_u f(u) + (κ/2n)‖u − x‖².

    Nothing leaves the client, so it costs no ε if x was trained privately. Without rows it is x.

    Args:
        x: the shared model, such as `Result.x`.
        X: the client's features.
        y: its labels.
        model: the `Personal(...)` that x was trained with.
    """
    if not isinstance(model, Personal):
        raise InputError(
            "personalise-personal-trained",
            f"personalise needs the Personal(...) that x was trained with, got {model!r}.",
        )
    shared = torch.as_tensor(np.asarray(x))
    if len(X) == 0:
        return np.array(x)
    columns = [str(column) for column in X.columns] if hasattr(X, "columns") else None
    features = read_features("client", X)
    labels = read_labels("client", y, len(features))
    data = ClientData([features], [labels], ["client"], torch.device("cpu"), shared.dtype, columns)
    oracle = cast(Any, model.oracle(data, cast(Oracle, SimpleNamespace(dimension=len(shared)))))
    if shared.shape != (oracle.dimension,):
        raise InputError(
            "shape-model-parameters",
            f"x has shape {tuple(shared.shape)}, but the model has {oracle.dimension} parameters here.",
        )
    return np.asarray(oracle.own(shared)[0])


class Envelopes:
    """N clients with personal models.

    Args:
        inner: the same clients with f_i.
        anchor: γ_i, l2 and the personal columns.
    """

    def __init__(self, inner: Any, anchor: Anchor) -> None:
        self.inner = inner
        self.anchor = anchor
        self.names = inner.names
        self.dimension = inner.dimension
        self.most_rows = inner.most_rows
        self._known: Constants | None = None

    def start(self) -> Tensor:
        """Return x⁰."""
        return cast(Tensor, self.inner.start())

    def contents(self) -> list[Tensor]:
        """Return the data."""
        return cast(list[Tensor], self.inner.contents())

    def constants(self) -> Constants:
        """Return L_F = Lγ/(L + γ) and μ_F = μγ/(μ + γ); if columns are shared, L_F = L."""
        if self._known is None:
            known = self.inner.constants()
            g = self.anchor.gamma.double().cpu().numpy()
            L, mu, steepest = (
                h * g / (h + g) for h in (known.smoothness, known.strong_convexity, known.steepest)
            )
            if self.anchor.own is not None:
                L = known.smoothness
                steepest = known.steepest
            self._known = replace(known, smoothness=L, strong_convexity=mu, steepest=steepest)
        return self._known

    def only(self, clients: list[int]) -> Self:
        """Select some of the clients."""
        return type(self)(self.inner.only(clients), self.anchor.only(clients))

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> Any:
        """Evaluate F_i and ∇F_i at x; for minibatches, the envelope of their mean loss."""
        raise NotImplementedError

    def losses(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> Tensor:
        """Return F_i(x)."""
        return cast(Tensor, self.evaluate(x, batch_size, key).losses)

    def own(self, x: Tensor) -> Tensor:
        """Return u_i(x), (N, d)."""
        return cast(Tensor, self.evaluate(x).models())

    def scores(self, x: Tensor) -> tuple[Vector, Vector]:
        """Return f_i(u_i) and accuracy of u_i, the client's own model."""
        return own_scores(self.inner, self.own(x))

    def rates(self, plan: LocalPlan) -> Tensor:
        """Return η_i; 0 if the loss is flat."""
        if plan.rate is not None:
            return torch.full_like(self.anchor.gamma, plan.rate)
        L = torch.from_numpy(self.constants().expected_smoothness(plan.batch_size)).to(
            self.anchor.gamma
        )
        return torch.where(L > 0, plan.scale / L, 0)


class PersonalOracle(Envelopes):
    """Personal linear models: inner solves by Newton's method."""

    inner: LinearOracle

    def __init__(self, inner: LinearOracle, anchor: Anchor) -> None:
        super().__init__(inner, anchor)
        self.outputs = inner.outputs
        self._last: tuple[Tensor, int, PersonalPoint] | None = None

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> PersonalPoint:
        """Evaluate F_i and ∇F_i at x; for minibatches, the envelope of their mean loss."""
        if batch_size is not None:
            return self._batch(x, Draws(key, streams(self.names, x.device)).uniform(batch_size))
        if self._last is None or self._last[0] is not x or self._last[1] != x._version:
            self._last = x, x._version, self._point(x)
        return self._last[2]

    def _point(self, x: Tensor, start: Tensor | None = None) -> PersonalPoint:
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
        self,
        x: Tensor,
        at: PersonalPoint | Tensor | None,
        correction: Tensor | None,
        plan: LocalPlan,
    ) -> Displacements:
        """Take J local steps of every client, each with the gradient at its own point; v carries over between steps."""
        each = x.new_zeros(len(self.names), len(x))
        rates = self.rates(plan)[:, None]
        pull = each + shift(at, correction)
        v = None
        draws = Draws(plan.key, streams(self.names, x.device))
        b = plan.batch_size
        for t in range(plan.steps):
            at_own = x - each
            go = plan.makes(t, x) * rates
            point = (
                PersonalOracle._point(self, at_own, v)
                if b is None
                else self._batch(at_own, draws.uniform(b), v)
            )
            each = each + go * (point.each() + pull - plan.prox * each)
            v = cast(NewtonPoint, point).v
        return StackedDisplacements(each)

    def proximal_steps(
        self, at: PersonalPoint, correction: Tensor, plan: ProximalPlan
    ) -> Displacements:
        """Return (∇²F_i + βD)⁻¹c exactly, from a step of u_i alone.

        (H_i + γβD/(γ + βD)) e = γc/(γ + βD) and d = (c + γe)/(γ + βD); shared columns have d = e, where γ = ∞.
        """
        c = correction.view(-1, self.outputs)
        pull = plan.pull * plan.metric.view(-1, self.outputs)[:, :1]
        gamma = self.anchor.per_feature(self.anchor.gamma, float("inf"))
        free = 1 / (gamma + pull)
        share = torch.where(torch.isfinite(gamma), gamma / (gamma + pull), 1)
        out = c.new_empty(len(self.names), *c.shape)

        def work(block: PaddedBlock) -> None:
            who, (A, y) = block.clients, at.rows.of(block)
            z = block.of(at.residual)  # squared loss has the same curvature everywhere
            bowl = LossHessian(
                at.loss, A, y, block.of(at.z) if isinstance(at, NewtonPoint) else z, block.weight
            )
            e = bowl.solver(self.inner.l2 + share[who] * pull)((share[who] * c)[..., None])[..., 0]
            out[who] = free[who] * c + share[who] * e

        parallel_map(work, portions(at.rows, self.dimension), c.device)
        return StackedDisplacements(out.flatten(1))


class RotatedOracle(RotatedSteps, PersonalOracle):
    """Personal models for squared loss, all columns: all answers and full-gradient local steps in closed form."""

    targets: RotatedTargets | None = None

    def rotated(self) -> RotatedTargets:
        """Return every client's rows in its own basis, computed at first use."""
        if self.targets is None:
            self.targets = envelope.rotate_targets(cast(QuadraticOracle, self.inner).compressed)
        return self.targets

    def only(self, clients: list[int]) -> Self:
        """Select some of the clients, without another decomposition."""
        chosen = super().only(clients)
        chosen.targets = None if self.targets is None else self.targets.only(clients)
        return chosen

    def _point(self, x: Tensor, start: Tensor | None = None) -> PersonalPoint:
        return RotatedPoint(self.rotated(), self.anchor, x)

    @property
    def _whole(self) -> Any:
        return self.rotated().data.rows

    def _enveloped(self, phi: Profile) -> Profile:
        """Replace h by hγ/(h + γ) in ϕ."""
        gamma = self.anchor.gamma
        return lambda h, i: phi(h * gamma[i] / (h + gamma[i]), i)

    def _function(self, phi: Profile) -> Any:
        return Gain(self.rotated().data, self.inner.l2, self._enveloped(phi))


class PersonalWideOracle(RotatedOracle):
    """Personal models for squared loss on a table's wide rows, in the space of a client's samples."""

    inner: WideOracle

    def _point(self, x: Tensor, start: Tensor | None = None) -> PersonalPoint:
        return SpectralPoint(self.inner, self.anchor, x)

    def double(self) -> PersonalWideOracle:
        """Convert to double precision."""
        return PersonalWideOracle(
            self.inner.double(), Anchor(self.anchor.l2, self.anchor.gamma.double())
        )

    def _function(self, phi: Profile) -> Any:
        return SpectralFunction(
            self.inner.spectrum, self.inner.l2, self._enveloped(phi), self.inner.rough
        )

    @property
    def _whole(self) -> Any:
        return self.inner.rows

    def _common(self, phi: Any, c: Tensor) -> Displacements:
        return self.inner._common(phi, c)

    def _general(self, phi: Any, first: Tensor) -> Displacements:
        return self.inner._general(phi, first)

    def proximal_steps(
        self, at: PersonalPoint, correction: Tensor, plan: ProximalPlan
    ) -> Displacements:
        """Solve by the spectrum if D is constant, else client by client."""
        D = plan.metric
        if at.rows is self.inner.rows and bool((D[0] == D).all()):
            return self._common(self._function(lambda h, _: 1 / (h + plan.pull * D[0])), correction)
        pull = plan.pull * D.view(-1, self.outputs)[:, 0]
        c = correction.view(-1, self.outputs)
        gamma = self.anchor.gamma[:, None]
        share = gamma / (gamma + pull)
        e = self.inner.metric_steps(
            at.rows, share[..., None] * c, self.inner.l2 + share * pull
        ).each()
        e = e.view(len(share), *c.shape)
        return StackedDisplacements(
            (c / (gamma + pull)[..., None] + share[..., None] * e).flatten(1)
        )


def bound(inner: LinearOracle, anchor: Anchor) -> PersonalOracle:
    """Return the fastest oracle for this problem."""
    if isinstance(inner, WideOracle):
        return PersonalWideOracle(inner, anchor)
    closed = isinstance(inner, QuadraticOracle) and anchor.own is None
    return (RotatedOracle if closed else PersonalOracle)(inner, anchor)


def own_scores(inner: Oracle, U: Tensor) -> tuple[Vector, Vector]:
    """Return f_i(u_i) and accuracy on the rows of `inner`, for personal models U, (N, d)."""
    if not isinstance(inner, LinearOracle):
        pairs = [inner.only([i]).scores(u) for i, u in enumerate(U)]
        return np.concatenate([loss for loss, _ in pairs]), np.concatenate(
            [right for _, right in pairs]
        )
    rows = inner.rows
    layout = inner.rows.layout
    z = envelope.own_predictions(rows, U.view(len(U), -1, inner.outputs))
    loss = layout.segment_sum(
        inner.loss.value(z, rows.y) * rows.share
    ) + inner.l2 / 2 * U.square().sum(1)
    right = inner.loss.correct(z, rows.y)
    accuracy = torch.full_like(loss, float("nan"))
    if right is not None:
        accuracy = layout.segment_sum(right.to(rows.share)) / layout.sizes
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

    def norms(self) -> Tensor:
        """Return ‖c_i‖² per client."""
        return self.gradients.square().sum(1)

    def refuse(self, *asked: Any) -> Any:
        """Refuse questions about second derivatives."""
        raise InputError(
            "personal-networks-second",
            "Personal networks have no second derivatives: use ScaffPD or another method of gradients.",
        )

    restriction = curvatures = diagonal = diagonals = refuse


class PersonalModuleOracle(Envelopes):
    """Personal networks: proximal local training (Ditto, pFedMe), without a certificate."""

    inner: ModuleOracle

    def evaluate(
        self, x: Tensor, batch_size: int | None = None, key: tuple[int, ...] = (0,)
    ) -> NetworkPoint:
        """Evaluate F_i and γ_i(x − u_i) at x."""
        draws = [
            self.inner._draw(i, batch_size, Draws(key, [name])) for i, name in enumerate(self.names)
        ]
        return self._trained(x.expand(len(draws), -1), draws)

    def _trained(self, X: Tensor, draws: list[Tensor | None]) -> NetworkPoint:
        """Take accelerated steps on f_i(u) + (γ/2)‖u − x_i‖², from every client's x_i; shared layers do not move.

        The gradient of F_i is γ(x − u) in personal layers, and that of f_i at u in shared ones.
        """
        losses = X.new_empty(len(X))
        steps = torch.empty_like(X)
        L = self.inner.constants().smoothness
        own = self.anchor.own
        gradients = torch.empty_like(X)
        for i, (x, rows, gamma) in enumerate(
            zip(X, draws, self.anchor.gamma.tolist(), strict=True)
        ):
            plan = ProximalPlan(gamma, torch.ones_like(x), INNER)
            go = pace(plan, L[[i]], 0.0)
            whole = partial(self.inner.gradient, i, rows=rows)
            personal = whole if own is None else partial(_within, whole, own)
            model = LocalModel(personal, x, float(whole(x)[0]), torch.zeros_like(x), plan)
            steps[i] = model.approach(float(go.rates[0]), float(go.momenta[0]), go.steps)
            losses[i], gradients[i] = model.descent(steps[i])[0], gamma * steps[i]
            if own is not None:
                gradients[i] = torch.where(own, gradients[i], whole(x - steps[i])[1])
        return NetworkPoint(X[0], losses, steps, gradients)

    def local_updates(
        self,
        x: Tensor,
        at: NetworkPoint | Tensor | None,
        correction: Tensor | None,
        plan: LocalPlan,
    ) -> StackedDisplacements:
        """Take J local steps of every client, each after its own training."""
        each = x.new_zeros(len(self.names), len(x))
        rates = self.rates(plan)[:, None]
        pull = each + shift(at, correction)
        draws = [Draws(plan.key, [name]) for name in self.names]
        for t in range(plan.steps):
            go = plan.makes(t, x) * rates
            rows = [self.inner._draw(i, plan.batch_size, own) for i, own in enumerate(draws)]
            each = each + go * (self._trained(x - each, rows).gradients + pull - plan.prox * each)
        return StackedDisplacements(each)

    def proximal_steps(
        self, at: Any, correction: Tensor, plan: ProximalPlan
    ) -> StackedDisplacements:
        """Refuse: personal networks have no second derivatives."""
        return at.refuse()  # type: ignore[no-any-return]


def _within(gradient: Any, own: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return a loss and its gradient, zero outside of personal layers."""
    loss, g = gradient(u)
    return loss, torch.where(own, g, 0)


def lowest(oracle: Any) -> Tensor:
    """Return min_u f_i(u) of every client with a linear model, to the accuracy of its arithmetic."""
    inner = oracle.inner if isinstance(oracle, PersonalOracle) else oracle
    if not isinstance(inner, LinearOracle):
        raise InputError(
            "clients-own-optima",
            "The clients' own optima are known for Linear models only: give offset= as numbers.",
        )
    squared = isinstance(inner, QuadraticOracle | WideOracle)
    if inner.l2 == 0 and not squared:
        raise InputError(
            "clients-own-optima",
            "The clients' own optima need l2 > 0: without it a loss may have no minimum.",
        )
    return bound(inner, Anchor(inner.l2, torch.zeros_like(inner.smoothness))).losses(inner.start())
