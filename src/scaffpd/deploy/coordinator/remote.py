r"""`Remote`: silos behind a transport as a `Federation`. Algorithms and the training loop cannot tell it from a cohort.

A round of Scaff-PD is two exchanges: x down and (L_i, c_i) up; c down and d_i up. x is sent whole also where a cohort
counts on clients to form it from what they have, and so are the columns of V. Scalars such as ⟨c_i, v⟩ need no
exchange, for the c_i are here. What stands in for a silo that does not answer is `roster`'s rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.cohort.answers import CohortMemory, TrafficLedger
from scaffpd.cohort.cohort import SPLITS
from scaffpd.deploy.coordinator.answers import RemoteGradients, RemoteUpdates
from scaffpd.deploy.coordinator.checks import Shapes, troubles
from scaffpd.deploy.coordinator.events import Lost, accuse
from scaffpd.deploy.coordinator.judge import Judge, Verdicts
from scaffpd.deploy.coordinator.line import Question
from scaffpd.deploy.coordinator.opening import Facts
from scaffpd.deploy.coordinator.roster import Roster
from scaffpd.deploy.protocol import needs
from scaffpd.deploy.protocol.plans import batch_values, plan_values
from scaffpd.deploy.protocol.wire import Array
from scaffpd.errors import InputError, unknown
from scaffpd.federation import Clients, ClientScores, Constants, LocalPlan, ProximalPlan, Vector
from scaffpd.models.oracle import same_point


class Remote(TrafficLedger):
    """N silos; implements `Federation`.

    Args:
        roster: the members and how they are reached.
        facts: what they said when the agreement was made.

    Attributes:
        stood_in: whether anything has stood in for an absent silo so far.
    """

    def __init__(self, roster: Roster, facts: Facts) -> None:
        super().__init__(roster.members, torch.from_numpy(np.array(facts.start)))
        self.roster, self.facts = roster, facts
        self.judge = Judge(facts, roster.line.setup, roster.policy.outlier)
        self._last: dict[int, tuple[Tensor, Tensor, NDArray[np.float64]]] = {}  # y_i, c_i and L_i of the last answer
        self.stood_in = False
        self._scores: dict[tuple[int, str], NDArray[np.float64]] = {}
        self._told_constants = False

    @property
    def absent(self) -> int:
        """How many members do not answer at present."""
        return len(self.roster.absent)

    @property
    def fingerprint(self) -> str:
        """Of the agreement and of what silos say about their losses: other data has other constants."""
        known, setup = self.facts.constants, self.roster.line.setup
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
        got = self._ask(needs.LOSSES, chosen, {"x": x}, batch_values(batch_size, key), shapes={"scalars": (1,)})
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
        told: int | None = None,
    ) -> RemoteGradients:
        """One exchange: x down; c_i, L_i and the bounds on their rounding errors up."""
        chosen = self._chosen(clients)
        self.count(exchanges=alone, down=self._send(x, chosen), up=(self.dimension + 3) * len(chosen))
        shapes = {"c": (self.dimension,), "scalars": (3,)}
        got = self._ask(needs.GRADIENTS, chosen, {"x": x}, batch_values(batch_size, key), shapes)
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
        got = self._ask(needs.UPDATES, chosen, vectors, values, shapes, own=own)
        corrected = isinstance(at, RemoteGradients) and at.batch[0] is None and same_point(at.x, x)
        self.accuse(self.judge.updates(corrected, correction, plan, x, got))
        return self._updates(chosen, got, self._frozen(correction, plan), plan.snapshot)

    def _frozen(self, correction: Tensor | None, plan: LocalPlan) -> Callable[[int], Tensor] | None:
        """d_i = (1 − (1 − η_i μ_i)^J)/μ_i c: what local steps on f̃_i come to."""
        if correction is None:
            return None
        L, mu = self.facts.constants.expected_smoothness(plan.batch_size), self.facts.constants.strong_convexity

        def stand_in(i: int) -> Tensor:
            rate = plan.rate if plan.rate is not None else plan.scale / L[i] if L[i] > 0 else 0.0
            bend = min(rate * mu[i], 1.0)
            length = rate * plan.steps if bend < 1e-12 else (1 - (1 - bend) ** plan.steps) / mu[i]
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
        got = self._ask(needs.PROXIMAL, chosen, vectors, values, {"d": (self.dimension,)})
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
        got = self._ask(needs.EVALUATE, chosen, {"x": point}, {"split": split}, {"scalars": (3,)})
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
        question = Question(kind, values, vectors, personal, arrays or {})
        replies = self.roster.ask(question, list(names), lambda answers: troubles(answers, shapes, self._like))
        return {names[name]: answer.arrays for name, answer in replies.items()}

    def accuse(self, verdicts: Verdicts) -> None:
        """Answers that give a silo away are not used, nor is the silo any more."""
        accuse({self.names[i]: why for i, why in verdicts.items()}, self.roster.round, self.roster.record)

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

    def reach(self, share: float, quantum: float) -> Any:
        """The same silos with masked vectors; share and quantum are what each silo's own file says."""
        from scaffpd.deploy.coordinator.secure_reach import SecureReach  # needs a package that plain sums do not

        return SecureReach(self)

    def __repr__(self) -> str:
        return f"Remote federation of {len(self.names)} silos, {self.dimension} parameters"
