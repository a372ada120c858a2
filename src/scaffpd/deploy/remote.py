r"""`Remote`: silos behind a transport as a `Federation`. Algorithms and the training loop cannot tell it from a cohort.

A round of Scaff-PD is two exchanges: x down and (L_i, c_i) up; c down and d_i up. x is sent whole also where a cohort
counts on clients to form it from what they have, and so are the columns of V. Sums and scalars such as ⟨c_i, v⟩ need no
exchange, for the c_i are here. A silo that does not answer has a row as well, by the rule of `membership`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.cohort import SPLITS
from scaffpd.cohort.answers import ClientAnswers, ClientSelection, CohortMemory, TrafficLedger, inner_products
from scaffpd.deploy import messages
from scaffpd.deploy.agreement import Facts
from scaffpd.deploy.byzantine import Judge, Shapes, Verdicts, rates, troubles
from scaffpd.deploy.membership import Lost, Membership, accuse
from scaffpd.deploy.messages import CURVATURE, DIAGONAL, Array, batch_values, plan_values
from scaffpd.deploy.session import SiloRequest
from scaffpd.errors import InputError, unknown
from scaffpd.federation import (
    Clients,
    ClientScores,
    Constants,
    LocalPlan,
    ProximalPlan,
    Restriction,
    Vector,
    same_point,
)


class RemoteGradients(ClientAnswers):
    """`Gradients` of silos: c_i and L_i are here.

    Attributes:
        x: where they were asked.
        batch: the minibatch's size and key; all samples where the size is `None`.
        stale: the numbers of silos for which earlier answers stand in.
    """

    def __init__(
        self,
        asked: ClientSelection,
        remote: Remote,
        x: Tensor,
        batch: tuple[int | None, tuple[int, ...]],
        vectors: Tensor,
        scalars: NDArray[np.float64],
        stale: list[int],
    ) -> None:
        super().__init__(asked)
        self.remote, self.x, self.batch, self.stale = remote, x, batch, stale
        self._vectors = vectors
        self.losses, *self._rounding = np.ascontiguousarray(self._spread(torch.from_numpy(scalars)).T)

    @property
    def rounding(self) -> tuple[Vector, Vector]:
        """Bounds on the errors of L_i and c_i; infinite for a silo whose answer is an earlier one."""
        loss, gradient = (part.copy() for part in self._rounding)
        loss[self.stale] = gradient[self.stale] = np.inf
        return loss, gradient

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i c_i."""
        return self._weights(weights) @ self._vectors

    def each(self) -> Tensor:
        """The c_i."""
        return self._vectors

    def project(self, direction: Tensor) -> Vector:
        """⟨c_i, v⟩ per silo; nothing is sent, the c_i are here."""
        return self._spread(self._vectors @ direction)

    def norms(self) -> Vector:
        """‖c_i‖² per silo; nothing is sent."""
        return self._spread(self._vectors.square().sum(1))

    def gram(self) -> NDArray[np.float64]:
        """⟨c_i, c_j⟩; nothing is sent."""
        return inner_products(self._vectors, self.chosen, self.asked.n)

    def restriction(self, V: Tensor, weights: Vector, metric: Tensor) -> Restriction:
        """One exchange: V down, VᵀH_iV up. A silo that does not answer bends like the mean of the others."""
        k = V.shape[1]
        got = self.remote.further(CURVATURE, self, {"metric": metric}, {"V": V.numpy()}, up=k * k + k + 1)
        Q = self._average({i: parts["curvature"] for i, parts in got.items()}, self._weights(weights))
        slopes, sizes = self._vectors @ V, (self._vectors.square() / metric).sum(1)
        bend = Q.double().numpy()
        return Restriction(self._spread(slopes), (bend + bend.T) / 2, self._spread(sizes))

    def diagonal(self, weights: Vector) -> Tensor:
        """One exchange: a vector up."""
        return self._average(self._diagonals(), self._weights(weights))

    def diagonals(self) -> Tensor:
        """One exchange: a vector up; the mean of the others for a silo that does not answer."""
        got = self._diagonals()
        mean: Array = np.mean(list(got.values()), axis=0)
        rows: list[Array] = [got.get(i, mean) for i in self.chosen]
        return self._tensor(np.stack(rows))

    def _diagonals(self) -> dict[int, Array]:
        got = self.remote.further(DIAGONAL, self, {}, {}, up=len(self.asked.like))
        return {i: parts["diagonal"] for i, parts in got.items()}

    def _average(self, got: Mapping[int, Array], weights: Tensor) -> Tensor:
        """Σ w_i M_i, where those who did not answer have the weighted mean of those who did."""
        there = [j for j, i in enumerate(self.chosen) if i in got]
        total, heard = float(weights.sum()), float(weights[there].sum())
        stack = self._tensor(np.stack([got[self.chosen[j]] for j in there]))
        if heard == 0:
            return stack.mean(0) * total
        mixed: Tensor = torch.tensordot(weights[there], stack, dims=1)
        return mixed if len(there) == len(weights) else mixed * (total / heard)

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.asked.like)


class RemoteUpdates(ClientAnswers):
    """`Updates` of silos: the d_i are here.

    Attributes:
        vectors: d_i, (n, d), with something in the rows of absent silos.
        snapshots: the same after t' steps.
        skipped: rows that averages leave out: absent silos, where there is no correction that could stand in.
    """

    def __init__(self, asked: ClientSelection, vectors: Tensor, snapshots: Tensor | None, skipped: list[int]) -> None:
        super().__init__(asked)
        self.vectors, self.snapshots, self.skipped = vectors, snapshots, skipped

    def sum(self, weights: Vector) -> Tensor:
        """Σ_i w_i d_i."""
        return self._mixed(self.vectors, weights)

    def each(self) -> Tensor:
        """The d_i."""
        return self.vectors

    def norms(self) -> Vector:
        """‖d_i‖² per silo; nothing is sent."""
        return self._spread(self.vectors.square().sum(1))

    def snapshot(self, weights: Vector) -> Tensor:
        """Σ_i w_i (x − u_{i,t'})."""
        if self.snapshots is None:
            raise InputError("There is no snapshot: the plan asked for none.")
        return self._mixed(self.snapshots, weights)

    def _mixed(self, vectors: Tensor, weights: Vector) -> Tensor:
        """Σ w_i v_i over those who answered, scaled up to the weight of all."""
        w = self._weights(weights)
        if not self.skipped:
            return w @ vectors
        heard = w.clone()
        heard[self.skipped] = 0
        if float(heard.sum()) == 0:
            return w @ vectors  # rows of the skipped hold the mean of the others
        return (heard @ vectors) * (w.sum() / heard.sum())


class Remote(TrafficLedger):
    """N silos; implements `Federation`.

    Args:
        membership: the members and how they are reached.
        facts: what they said when the agreement was made.

    Attributes:
        stood_in: whether anything has stood in for an absent silo so far.
    """

    def __init__(self, membership: Membership, facts: Facts) -> None:
        super().__init__(membership.members, torch.from_numpy(np.array(facts.start)))
        self.membership, self.facts = membership, facts
        self.judge = Judge(facts, membership.session.setup, membership.policy.outlier)
        self._last: dict[int, tuple[Tensor, Tensor, NDArray[np.float64]]] = {}  # y_i, c_i and L_i of the last answer
        self.stood_in = False
        self._scores: dict[tuple[int, str], NDArray[np.float64]] = {}
        self._told_constants = False

    @property
    def absent(self) -> int:
        """How many members do not answer at present."""
        return len(self.membership.absent)

    @property
    def fingerprint(self) -> str:
        """Of the agreement and of what silos say about their losses: other data has other constants."""
        known, setup = self.facts.constants, self.membership.session.setup
        numbers = (known.smoothness, known.strong_convexity, known.steepest, known.samples, self.facts.probes)
        words = [f"{value:.6e}" for part in numbers for value in part]
        about = (tuple(self.names), "" if setup is None else setup.digest, words)
        return hashlib.sha256(repr(about).encode()).hexdigest()

    def constants(self) -> Constants:
        """What silos said when the agreement was made."""
        self.count(exchanges=not self._told_constants, up=0 if self._told_constants else 4 * len(self.names))
        self._told_constants = True
        return self.facts.constants

    def start(self) -> Tensor:
        """The default x⁰."""
        return self._like

    def memory(self) -> CohortMemory:
        """A zero vector for every silo."""
        return CohortMemory(self._like.new_zeros(len(self.names), self.dimension))

    def losses(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: tuple[int, ...] = (0,),
        clients: Clients = None,
        alone: bool = True,
    ) -> Vector:
        """One exchange: x down, L_i up; the last known loss of a silo that does not answer."""
        chosen = self._chosen(clients)
        self.count(exchanges=alone, down=self._send(x, chosen), up=len(chosen))
        got = self._ask(messages.LOSSES, chosen, {"x": x}, batch_values(batch_size, key), shapes={"scalars": (1,)})
        self.accuse(self.judge.losses(x, batch_size, got))
        out = np.full(len(self.names), np.nan)
        for i in chosen:
            if i in got:
                out[i] = got[i]["scalars"][0]
                if batch_size is None:
                    self._scores.setdefault((i, "train"), np.array([out[i], np.nan, 0.0]))[0] = out[i]
            else:
                out[i] = self._known_loss(i, x)
        return out

    def gradients(
        self,
        x: Tensor,
        batch_size: int | None = None,
        key: tuple[int, ...] = (0,),
        clients: Clients = None,
        alone: bool = True,
        coefficients_sent: int | None = None,
    ) -> RemoteGradients:
        """One exchange: x down; c_i, L_i and the bounds on their rounding errors up."""
        chosen = self._chosen(clients)
        self.count(exchanges=alone, down=self._send(x, chosen), up=(self.dimension + 3) * len(chosen))
        shapes = {"c": (self.dimension,), "scalars": (3,)}
        got = self._ask(messages.GRADIENTS, chosen, {"x": x}, batch_values(batch_size, key), shapes)
        self.accuse(self.judge.gradients(x, batch_size, got))
        self._last |= {i: (x, torch.from_numpy(parts["c"]), parts["scalars"]) for i, parts in got.items()}
        seen = [self._last[i][1:] if i in got else self._bound(i, x) for i in chosen]
        vectors, scalars = torch.stack([c for c, _ in seen]), np.stack([s for _, s in seen])
        stale = [i for i in chosen if i not in got]
        return RemoteGradients(self._asked(chosen), self, x, (batch_size, key), vectors, scalars, stale)

    def _bound(self, i: int, x: Tensor) -> tuple[Tensor, NDArray[np.float64]]:
        """The gradient and the value of f̃_i at x, from the last answer of a silo that gives none now."""
        self._need([] if i in self._last else [i])
        y, c, scalars = self._last[i]
        mu, way = float(self.facts.constants.strong_convexity[i]), x - y
        loss = scalars[0] + float(c @ way) + mu / 2 * float(way @ way)
        self.stood_in = True
        return c + mu * way, np.array([loss, *scalars[1:]])

    def local_updates(
        self, x: Tensor, at: Any, correction: Tensor | None, plan: LocalPlan, clients: Clients = None
    ) -> RemoteUpdates:
        """One exchange: x (to whom it has not been sent) and the correction down, d_i up."""
        chosen = self._chosen(clients)
        vectors, values, own = {"x": x}, {"plan": plan_values(plan)}, {}
        if isinstance(at, RemoteGradients):
            vectors, values = {**vectors, "at": at.x}, {**values, **batch_values(*at.batch)}
        if isinstance(at, CohortMemory):
            c = torch.zeros_like(x) if correction is None else correction
            own = {i: {"correction": c - at.vectors[i]} for i in chosen}
        elif correction is not None:
            vectors["correction"] = correction
        corrections = len(chosen) * self.dimension * (correction is not None or isinstance(at, CohortMemory))
        again = 2 if plan.snapshot is not None else 1
        self.count(exchanges=1, down=self._send(x, chosen) + corrections, up=again * len(chosen) * self.dimension)
        shapes = {"d": (self.dimension,)} | ({} if plan.snapshot is None else {"snapshot": (self.dimension,)})
        got = self._ask(messages.UPDATES, chosen, vectors, values, shapes, own=own)
        corrected = isinstance(at, RemoteGradients) and at.batch[0] is None and same_point(at.x, x)
        self.accuse(self.judge.updates(corrected, correction, plan, x, got))
        return self._updates(chosen, got, self._frozen(correction, plan), plan.snapshot)

    def _frozen(self, correction: Tensor | None, plan: LocalPlan) -> Callable[[int], Tensor] | None:
        """d_i = (1 − (1 − η_i μ_i)^J)/μ_i c: what local steps on f̃_i come to."""
        if correction is None:
            return None
        eta, mu = rates(self.facts.constants, plan), self.facts.constants.strong_convexity

        def stand_in(i: int) -> Tensor:
            bend = min(eta[i] * mu[i], 1.0)
            length = eta[i] * plan.steps if bend < 1e-12 else (1 - (1 - bend) ** plan.steps) / mu[i]
            return float(length) * correction

        return stand_in

    def proximal_steps(self, at: Any, correction: Tensor, plan: ProximalPlan) -> RemoteUpdates:
        """One exchange: the correction and β down, d_i up; an absent silo's Hessian is taken for L_i I."""
        chosen, known = at.chosen, self.facts.constants
        L = known.smoothness if at.batch[0] is None else known.steepest
        self.count(exchanges=1, down=len(chosen) * (self.dimension + 1), up=len(chosen) * self.dimension)
        vectors = {"at": at.x, "correction": correction, "metric": plan.metric}
        steepest = float(max(plan.steepest, L[chosen].max()))
        values = {"pull": plan.pull, "limit": plan.limit, "steepest": steepest, **batch_values(*at.batch)}
        got = self._ask(messages.PROXIMAL, chosen, vectors, values, {"d": (self.dimension,)})
        self.accuse(self.judge.proximal(at.x, at.batch[0], correction, plan, got))
        return self._updates(chosen, got, lambda i: correction / (L[i] + plan.pull * plan.metric), None)

    def _updates(
        self,
        chosen: list[int],
        got: Mapping[int, Mapping[str, Array]],
        stand_in: Callable[[int], Tensor] | None,
        snapshot: int | None,
    ) -> RemoteUpdates:
        """All d_i, with the rule's rows for those who did not answer."""

        def stack(part: str) -> Tensor:
            mean = torch.from_numpy(np.mean([parts[part] for parts in got.values()], axis=0))
            rest = (lambda i: mean) if stand_in is None else stand_in
            return torch.stack([torch.from_numpy(got[i][part]) if i in got else rest(i) for i in chosen])

        self.stood_in |= len(got) < len(chosen)
        if not got:  # nobody who was drawn is there: the round makes no step
            nothing = self._like.new_zeros(len(chosen), self.dimension)
            return RemoteUpdates(self._asked(chosen), nothing, nothing if snapshot else None, [])
        skipped = [j for j, i in enumerate(chosen) if i not in got] if stand_in is None else []
        return RemoteUpdates(self._asked(chosen), stack("d"), stack("snapshot") if snapshot else None, skipped)

    def further(
        self, kind: str, at: RemoteGradients, vectors: Mapping[str, Tensor], arrays: Mapping[str, Array], up: int
    ) -> dict[int, Mapping[str, Array]]:
        """Another question about a point that silos have answered at."""
        k = arrays["V"].shape[1] if "V" in arrays else 0
        shapes: Shapes = (
            {"curvature": (k, k), "slopes": (k,), "scalars": (1,)} if k else {"diagonal": (self.dimension,)}
        )
        self.count(exchanges=1, down=k * self.dimension * len(at.chosen), up=up * len(at.chosen))
        got = self._ask(kind, at.chosen, {"at": at.x, **vectors}, batch_values(*at.batch), shapes, arrays=arrays)
        self.accuse(self.judge.further(at.batch[0], arrays.get("V"), got))
        return got

    def evaluate(self, x: Tensor | NDArray[np.float64], split: str = "train", complete: bool = True) -> ClientScores:
        """Per-silo loss, accuracy and sample counts; the last known ones of a silo that does not answer.

        Where it has never given any, there is no going on without it; or, unless they must be `complete`, NaN.
        """
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        point = torch.as_tensor(x).to(self._like)
        chosen = [i for i in self._everyone if split == "train" or self.facts.tested[i]]
        if not chosen:
            raise InputError("No silo has held rows out: there is nothing to test on.")
        got = self._ask(messages.EVALUATE, chosen, {"x": point}, {"split": split}, {"scalars": (3,)})
        if split == "train":
            self.accuse(self.judge.losses(point, None, got))
        self._scores |= {(i, split): parts["scalars"] for i, parts in got.items()}
        self.stood_in |= split == "train" and len(got) < len(chosen)
        self._need(i for i in chosen if complete and (i, split) not in self._scores)
        nothing = np.array([np.nan, np.nan, 0.0])
        table = np.stack([self._scores.get((i, split), nothing) for i in self._everyone])
        counts: NDArray[np.int64] = table[:, 2].astype(np.int64)
        return ClientScores(tuple(self.names), table[:, 0], table[:, 1], counts)

    def _ask(
        self,
        kind: str,
        chosen: Sequence[int],
        vectors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        shapes: Shapes,
        own: Mapping[int, Mapping[str, Tensor]] | None = None,
        arrays: Mapping[str, Array] | None = None,
    ) -> dict[int, Mapping[str, Array]]:
        """One exchange; the checked arrays of those who answered, by their numbers."""
        names = {self.names[i]: i for i in chosen}
        personal = {self.names[i]: parts for i, parts in (own or {}).items()}
        question = SiloRequest(kind, values, vectors, personal, arrays or {})
        replies = self.membership.ask(question, list(names), lambda answers: troubles(answers, shapes, self._like))
        return {names[name]: answer.arrays for name, answer in replies.items()}

    def accuse(self, verdicts: Verdicts) -> None:
        """Answers that give a silo away are not used, nor is the silo any more."""
        accuse({self.names[i]: why for i, why in verdicts.items()}, self.membership.round, self.membership.record)

    def _known_loss(self, i: int, x: Tensor) -> float:
        """The lower bound of a silo's loss where there is one, or else the last loss that it gave."""
        if i in self._last:
            return float(self._bound(i, x)[1][0])
        self._need([] if (i, "train") in self._scores else [i])
        self.stood_in = True
        return float(self._scores[i, "train"][0])

    def _need(self, numbers: Any) -> None:
        lacking = [self.names[i] for i in numbers]
        if lacking:
            raise Lost(lacking)

    def channel(self, share: float, quantum: float) -> Any:
        """The same silos with masked vectors; share and quantum are what each silo's own file says."""
        from scaffpd.deploy.secure import SiloChannel  # needs a package that plain sums do not

        return SiloChannel(self)

    def __repr__(self) -> str:
        return f"Remote federation of {len(self.names)} silos, {self.dimension} parameters"
