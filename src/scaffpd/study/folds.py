r"""Rows that clients leave out of training in turn, and clients that train by themselves.

Alone, a client solves argmin_u Σ_j ℓ_j(u) + (κ_i/2)‖u‖², κ_i the largest that is within one
standard error of the best on its own folds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms import Fair
from scaffpd.data.silos import checked_seed, enough_rows, fold_numbers
from scaffpd.errors import InputError, count
from scaffpd.federation import Federation, Vector
from scaffpd.federation.questions import ClientSide, Question, Reply
from scaffpd.models import Linear, Module, Personal
from scaffpd.models.losses import loss_named
from scaffpd.objectives import Excess, Objective
from scaffpd.training.cohort import Cohort, Pair, named_pairs

FOLDS = 3
TOL = 1e-4  # of the mean loss at x⁰: models whose folds differ at all differ by much more
RIDGES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # κ_i of a model alone
Group = tuple[int, ...]
AnyModel = Linear | Module | Personal


def base_of(model: AnyModel) -> Linear | Module:
    """Return the model that is, or could be, personal."""
    return model.model if isinstance(model, Personal) else model


def with_strengths(model: AnyModel, l2: float, kappa: float) -> AnyModel:
    """Return the model with this regulariser and this κ; one model for all if κ is infinite."""
    base = replace(base_of(model), l2=l2)
    return base if math.isinf(kappa) else Personal(base, kappa, getattr(model, "columns", None))


def with_classes(model: AnyModel, pairs: Sequence[Pair]) -> AnyModel:
    """Return the model with its number of classes: a fold, or a group, may not have all of them."""
    base = base_of(model)
    if not isinstance(base, Linear) or base.loss != "softmax" or base.classes is not None:
        return model
    base = replace(base, classes=max(2, 1 + max(int(np.max(np.asarray(y))) for _, y in pairs)))
    return replace(model, model=base) if isinstance(model, Personal) else base


def among(objective: Objective, group: Group) -> Objective:
    """Return the objective with the prior of some of the clients, and a cap that so few can meet."""
    if isinstance(objective, Excess):
        return Excess(among(objective.objective, group), objective.offset)
    changes: dict[str, object] = {}
    if objective.prior is not None:
        changes["prior"] = objective.prior[list(group)]
    cap = getattr(objective, "cap", None)
    if cap is not None:
        changes["cap"] = max(cap, 1 / len(group))
    return objective.with_arguments(**changes) if changes else objective


@dataclass(frozen=True)
class Folds:
    """Clients in this process, and the rows that each of them leaves out in turn."""

    pairs: list[Pair]
    names: list[str]
    model: AnyModel
    numbers: list[NDArray[np.int64]]
    folds: int
    device: str = "cpu"

    @classmethod
    def of(
        cls,
        clients: Any,
        model: AnyModel,
        names: Sequence[str] | None = None,
        folds: int = FOLDS,
        seed: int = 0,
    ) -> Folds:
        """Check what was given, and cut the folds."""
        if isinstance(clients, Federation):
            raise InputError(
                "choose-without-rows",
                "choose needs the clients' rows, to leave some out: give a list of pairs (X, y).",
            )
        if count("choose", "folds", folds) < 2:
            raise InputError(
                "one-fold", "choose needs folds >= 2: one to leave out, and others to train on."
            )
        pairs, known = named_pairs(clients, names)
        for name, (_, y) in zip(known, pairs, strict=True):
            enough_rows(f"Client {name!r}", len(y), folds)
        seed = checked_seed("choose", seed)
        numbers = [
            fold_numbers(name, y, folds, seed) for name, (_, y) in zip(known, pairs, strict=True)
        ]
        return cls(pairs, known, with_classes(model, pairs), numbers, folds)

    @classmethod
    def where_possible(
        cls, pairs: Sequence[Pair], model: AnyModel, names: Sequence[str], seed: int
    ) -> tuple[Folds, Group]:
        """Cut folds of the clients that have rows enough for them, and return their numbers."""
        who = tuple(i for i, (_, y) in enumerate(pairs) if len(y) >= FOLDS)
        if not who:
            raise InputError(
                "too-few-rows-for-folds", f"nobody has the {FOLDS} training rows that folds need."
            )
        chosen = [pairs[i] for i in who], with_classes(model, pairs), [names[i] for i in who]
        return cls.of(*chosen, FOLDS, seed), who

    def rows(self, fold: int, out: bool) -> list[Pair]:
        """Return every client's rows in a fold (`out`), or all others."""
        chosen = [np.flatnonzero((number == fold) == out) for number in self.numbers]
        return [
            (_some(X, own), _some(y, own)) for (X, y), own in zip(self.pairs, chosen, strict=True)
        ]

    def scale(self) -> float:
        """Return Σ‖a‖²/(n d), for which every client gives two numbers; 1 for networks."""
        if isinstance(base_of(self.model), Module):
            return 1.0
        features = (np.asarray(X) for X, _ in self.pairs)
        squares, size = np.sum(
            [(np.square(a, dtype=np.float64).sum(), a.size) for a in features], axis=0
        )
        return float(squares / size) if 0 < squares < math.inf else 1.0

    def method(self, goal: Objective) -> Fair:
        """Return the algorithm that trains for an objective."""
        return Fair(goal)

    def tolerance(self, clients: Federation, l2: float) -> float | None:
        """Return the certified gap to train to, a small share of the first loss; `None` where
        nothing can be proven.
        """
        if l2 == 0 or isinstance(base_of(self.model), Module):
            return None
        return TOL * float(clients.losses(clients.start()).mean())

    def clients(self, fold: int, l2: float, kappa: float) -> Cohort:
        """Bind the clients without a fold, and that fold as held-out rows."""
        model = with_strengths(self.model, l2, kappa)
        held = self.rows(fold, True)
        return Cohort(self.rows(fold, False), model, self.names, self.device, test=held)


@dataclass(frozen=True, eq=False)
class HeldOutLoss(Question):
    """Mean loss on rows that a client leaves out of training, without the regulariser, for
    `choose`.
    """

    kind = "held_out_loss"
    scalars: ClassVar[tuple[str, ...]] = ("loss",)
    loss = "loss"

    x: Tensor
    l2: float

    def answer(self, clients: ClientSide) -> Reply:
        """Return f_i(u_i) − (l2/2)‖u_i‖² on held-out rows, with u_i = x if there is one model for
        all.
        """
        own = clients.own(self.x)
        models = self.x[None] if own is None else own
        regulariser = self.l2 / 2 * models.double().square().sum(1).cpu()
        found = (
            torch.from_numpy(np.asarray(clients.scores(self.x, "test")[0], dtype=np.float64))
            - regulariser
        )
        return Reply({"loss": lambda: found})


def held_out_losses(clients: Federation, x: Vector, l2: float) -> Vector:
    """Return every client's mean loss on its held-out rows, without the regulariser."""
    return clients.ask(HeldOutLoss(torch.as_tensor(x).to(clients.start()), l2)).numbers("loss")


def _some(values: Any, rows: NDArray[np.int64]) -> Any:
    return values.iloc[rows] if hasattr(values, "iloc") else values[rows]


def answered(model: Linear, z: Vector, y: NDArray[Any]) -> tuple[Vector, Vector | None]:
    """Return the loss of every row with outputs z, and whether the label is right; `None` for
    regression.
    """
    loss = loss_named(model.loss)
    outputs = torch.from_numpy(np.ascontiguousarray(z))
    target = torch.from_numpy(
        np.asarray(loss.encode([y], ["held-out rows"], model.classes).arrays[0])
    )
    hit = loss.correct(outputs, target)
    return loss.value(outputs, target).numpy(), None if hit is None else hit.double().numpy()


class AloneFits(NamedTuple):
    """Clients by themselves: their models, their κ_i, and the mean losses of these on folds, (N,
    K).
    """

    models: list[Vector]
    ridges: tuple[float, ...]
    losses: Vector


def fit_alone(folds: Folds) -> AloneFits:
    """Train every client by itself, with the largest κ_i within one standard error of the best.

    The error is that of the mean of paired differences over all of the client's rows, each left out
    once.
    """
    model = folds.model
    assert isinstance(model, Linear)
    clients = range(len(folds.names))
    tried = []
    for kappa in RIDGES:
        held: list[list[Vector]] = [[] for _ in clients]
        for k in range(folds.folds):
            models = _ridge(model, folds.rows(k, False), kappa)
            for own, u, (X, y) in zip(held, models, folds.rows(k, True), strict=True):
                own.append(answered(model, model.outputs(u, X), y)[0])
        tried.append(held)
    best = [_simplest(np.stack([np.concatenate(held[i]) for held in tried])) for i in clients]
    fitted = {k: _ridge(model, folds.pairs, RIDGES[k]) for k in set(best)}
    losses = np.array([[part.mean() for part in tried[k][i]] for i, k in enumerate(best)])
    own = [fitted[k][i] for i, k in enumerate(best)]
    return AloneFits(own, tuple(RIDGES[k] for k in best), losses)


def _ridge(model: Linear, pairs: Sequence[Pair], kappa: float) -> Vector:
    """Solve argmin_u Σ_j ℓ_j(u) + (κ/2)‖u‖² of every client: a personal model whose shared one is
    zero.
    """
    cohort = Cohort(pairs, Personal(replace(model, l2=0.0), kappa))
    return np.asarray(cohort.own_models(0 * cohort.start()))


def _simplest(losses: Vector) -> int:
    """Return the last row of losses whose mean is within one standard error of the best, by paired
    differences.
    """
    above = losses - losses[losses.mean(1).argmin()]
    return int(
        np.flatnonzero(above.mean(1) <= above.std(1, ddof=1) / math.sqrt(losses.shape[1]))[-1]
    )
