r"""`Remote`: silos behind a transport as a `Federation`, used by algorithms and the training loop like a cohort.

A round of Scaff-PD is two exchanges: x down and (L_i, c_i) up; c down and d_i up. Scalars such as ⟨c_i, v⟩ are computed
here from the c_i. The row of a silo that does not answer follows from the rule of `session`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.deploy.byzantine import Judge, Verdicts, rates, troubles
from scaffpd.deploy.messages import Array, Facts
from scaffpd.deploy.session import Lost, Membership, Quarantined, SiloRequest
from scaffpd.errors import InputError
from scaffpd.federation import Constants, Federation, Vector
from scaffpd.federation.questions import (
    Curvature,
    GradientsAt,
    LocalSteps,
    Losses,
    Project,
    ProximalSteps,
    Question,
    Reply,
    Scores,
    Vectors,
)

Parts = Mapping[str, Array]
Rows = dict[int, Parts]


class RemoteChannel:
    """A `Channel` to silos behind a transport."""

    work = float("inf")
    keeps = True
    here = False
    account: Any = None

    def __init__(self, membership: Membership, facts: Facts) -> None:
        self.membership, self.facts, self.names = membership, facts, tuple(membership.members)
        self.like = torch.from_numpy(np.array(facts.start))
        self.judge = Judge(facts, membership.session.setup, membership.policy.outlier)
        self.stood_in = False  # whether a bound has replaced an absent silo so far
        self._last: dict[
            int, tuple[Tensor, Parts]
        ] = {}  # a silo's last gradient: where, and its parts
        self._scores: dict[tuple[int, str], NDArray[np.float64]] = {}
        self._losses: dict[int, float] = {}  # the last losses over all samples
        self._answers: WeakKeyDictionary[GradientsAt, dict[tuple[int, ...], Tensor]] = (
            WeakKeyDictionary()
        )  # c_i

    @property
    def absent(self) -> int:
        """Number of absent members."""
        return len(self.membership.absent)

    @property
    def fingerprint(self) -> str:
        """Digest of the agreement and of the silos' constants, which change with their data."""
        known = self.facts.constants
        setup = self.membership.session.setup
        numbers = (
            known.smoothness,
            known.strong_convexity,
            known.steepest,
            known.samples,
            self.facts.probes,
        )
        words = [f"{value:.6e}" for part in numbers for value in part]
        about = (tuple(self.names), "" if setup is None else setup.digest, words)
        return hashlib.sha256(repr(about).encode()).hexdigest()

    def constants(self) -> Constants:
        """Return the constants that silos reported with the agreement."""
        return self.facts.constants

    def start(self) -> Tensor:
        """Return the default x⁰."""
        return self.like

    def own(self, x: Tensor) -> None:
        """Do nothing: a silo makes its personal model itself."""

    def ask(self, question: Question, chosen: Sequence[int]) -> Reply:
        """Make one exchange, and fill the rows of silos that do not answer."""
        if isinstance(question, Project):
            slopes = self._gradients(question.at, chosen) @ question.direction
            return Reply({"slope": lambda: slopes})
        if isinstance(question, Scores):
            return self.scores(question)
        got = self.exchange(question, chosen)
        if isinstance(question, Losses):
            self._remember(question, got)
        return self._complete(question, chosen, got)

    def exchange(self, question: Question, chosen: Sequence[int]) -> Rows:
        """Return the checked answers of the silos present, by their numbers."""
        names = {self.names[i]: i for i in chosen}
        shapes = question.shapes(len(self.like))
        if question.scalars:
            shapes["scalars"] = (len(question.scalars),)
        wide = {
            part
            for part in shapes
            if part not in question.vectors or shapes[part] != self.like.shape
        }
        request = self.request(question, chosen)
        replies = self.membership.ask(
            request, list(names), lambda a: troubles(a, shapes, wide, self.like)
        )
        got: Rows = {names[name]: answer.arrays for name, answer in replies.items()}
        self.accuse(self.judge.verdicts(question, got))
        return got

    def request(self, question: Question, chosen: Sequence[int]) -> SiloRequest:
        """Return the question as a message, with the values that only the coordinator knows.

        A vector that the coordinator stores for a silo is subtracted from that silo's correction.
        """
        own: dict[str, dict[str, Tensor]] = {}
        if isinstance(question, LocalSteps) and isinstance(question.at, Tensor):
            c = torch.zeros_like(question.x) if question.correction is None else question.correction
            own = {
                self.names[i]: {"correction": c - row}
                for i, row in zip(chosen, question.at, strict=True)
            }
            question = replace(question, at=None, correction=None)
        if isinstance(question, ProximalSteps):
            steepest = max(
                question.plan.steepest, float(self._steepness(question)[list(chosen)].max())
            )
            question = replace(question, plan=replace(question.plan, steepest=steepest))
        request = SiloRequest.of(question, own)
        if isinstance(question, LocalSteps) and question.plan.each is not None:
            each = dict(zip((self.names[i] for i in chosen), question.plan.each, strict=True))
            request = replace(
                request, values={**request.values, "plan": {**request.values["plan"], "each": each}}
            )
        return request

    def _steepness(self, question: ProximalSteps) -> Vector:
        """Return L_i, or that of the steepest sample for Hessians over minibatches."""
        known = self.facts.constants
        return known.smoothness if question.at.batch_size is None else known.steepest

    def _remember(self, question: Losses, got: Rows) -> None:
        """Store the last answers, which bound a silo's loss while it is absent."""
        for i, parts in got.items():
            if isinstance(question, GradientsAt):
                self._last[i] = question.x, parts
            if question.batch_size is None:
                self._losses[i] = float(parts["scalars"][0])

    def _gradients(self, at: GradientsAt, chosen: Sequence[int]) -> Tensor:
        """Return the stored c_i of these silos."""
        held = self._answers.get(at, {})
        if tuple(chosen) not in held:
            raise InputError(
                "question-about-gradients",
                "This question is about gradients that these silos have not been asked for.",
            )
        return held[tuple(chosen)]

    def _complete(self, question: Question, chosen: Sequence[int], got: Rows) -> Reply:
        """Return the answers of all, with the rule's rows for absent silos."""
        self.stood_in |= len(got) < len(chosen)
        shapes = question.shapes(len(self.like))
        stand_in = self._stand_in(question, chosen)
        if not got and isinstance(
            question, LocalSteps | ProximalSteps
        ):  # without any answer the round makes no step
            nothing = {part: np.zeros(shape) for part, shape in shapes.items()}
            return self._reply(question, chosen, [nothing] * len(chosen), [])
        made_up = {i: stand_in(i) for i in chosen if i not in got}
        skipped = [j for j, i in enumerate(chosen) if i in made_up and made_up[i] is None]
        mean: dict[str, Array] = {}
        if skipped:  # left out of averages, as if they had not been drawn
            self._need(chosen if not got else [])
            mean = {
                part: np.mean([parts[part] for parts in got.values()], axis=0) for part in shapes
            }
            mean |= {"scalars": np.full(len(question.scalars), np.nan)}
        return self._reply(
            question, chosen, [got.get(i) or made_up[i] or mean for i in chosen], skipped
        )

    def _reply(
        self, question: Question, chosen: Sequence[int], rows: Sequence[Parts], skipped: list[int]
    ) -> Reply:
        """Stack the parts of all silos."""
        numbers: dict[str, Callable[[], Tensor]] = {}
        vectors = {}
        for part in question.shapes(len(self.like)):
            if part in question.vectors:
                stack = torch.from_numpy(np.stack([row[part] for row in rows])).to(self.like)
                vectors[part] = Vectors(
                    partial(_mixed, stack, skipped), partial(itself, stack), double_weights=True
                )
        if isinstance(question, Curvature):  # slopes are computed from the stored c_i
            c = self._gradients(question.at, chosen)
            numbers = {
                "slopes": lambda: c @ question.V,
                "size": lambda: (c.square() / question.metric).sum(1),
            }
        elif question.scalars:
            table = torch.from_numpy(np.stack([row["scalars"] for row in rows]))
            numbers = {
                name: partial(itself, table[:, j]) for j, name in enumerate(question.scalars)
            }
        if isinstance(question, GradientsAt):
            self._answers.setdefault(question, {})[tuple(chosen)] = vectors["c"].each()
        return Reply(numbers, vectors)

    # --- replacements for silos that do not answer

    def _stand_in(self, question: Question, chosen: Sequence[int]) -> Callable[[int], Parts | None]:
        """Return the rule that replaces a silo's part; a part of `None` is left out of averages."""
        if isinstance(question, GradientsAt):
            return lambda i: self._bound(i, question.x)
        if isinstance(question, Losses):
            return lambda i: {"scalars": np.array([self._known_loss(i, question.x)])}
        if isinstance(question, LocalSteps) and question.correction is not None:
            return self._frozen(question, chosen)
        if isinstance(question, ProximalSteps):
            L = self._steepness(question)
            plan = question.plan
            return lambda i: {"d": (question.correction / (L[i] + plan.pull * plan.metric)).numpy()}
        return lambda i: None

    def _frozen(self, question: LocalSteps, chosen: Sequence[int]) -> Callable[[int], Parts]:
        """Return the rule d_i = (1 − (1 − η_i μ_i)^J)/μ_i c, the result of local steps on f̃_i."""
        eta = rates(self.facts.constants, question.plan)
        mu = self.facts.constants.strong_convexity
        c = question.correction
        plan = question.plan
        assert c is not None

        def stand_in(i: int) -> Parts:
            steps = plan.of(chosen.index(i))
            bend = min(eta[i] * mu[i], 1.0)
            length = eta[i] * steps if bend < 1e-12 else (1 - (1 - bend) ** steps) / mu[i]
            d = (float(length) * c).numpy()
            return {"d": d, "snapshot": d}

        return stand_in

    def _bound(self, i: int, x: Tensor) -> Parts:
        """Return gradient and value of f̃_i at x, from the last answer of an absent silo."""
        self._need([] if i in self._last else [i])
        y, parts = self._last[i]
        mu = float(self.facts.constants.strong_convexity[i])
        way = x - y
        c = torch.from_numpy(parts["c"])
        loss = parts["scalars"][0] + float(c @ way) + mu / 2 * float(way @ way)
        return {"c": (c + mu * way).numpy(), "scalars": np.array([loss, np.inf, np.inf])}

    def _known_loss(self, i: int, x: Tensor) -> float:
        """Return the lower bound of a silo's loss if there is one, otherwise its last loss."""
        if i in self._last:
            return float(self._bound(i, x)["scalars"][0])
        scored = self._scores.get((i, "train"))
        known = self._losses.get(i, None if scored is None else float(scored[0]))
        self._need([i] if known is None else [])
        return float(known or 0.0)

    def _need(self, numbers: Iterable[int]) -> None:
        lacking = [self.names[i] for i in numbers]
        if lacking:
            raise Lost(lacking)

    # --- evaluation and accusations

    def scores(self, question: Scores, complete: bool = True) -> Reply:
        """Return loss, accuracy and sample count per silo; of an absent silo the last known ones.

        If it has never sent any, return NaN, or with `complete` raise `Lost`.
        """
        split = question.split
        everyone = range(len(self.names))
        chosen = [i for i in everyone if split == "train" or self.facts.tested[i]]
        if not chosen:
            raise InputError(
                "silo-held-rows", "No silo has held rows out: there is nothing to test on."
            )
        got = self.exchange(question, chosen)
        self._scores |= {(i, split): parts["scalars"] for i, parts in got.items()}
        self.stood_in |= split == "train" and len(got) < len(chosen)
        self._need(i for i in chosen if complete and (i, split) not in self._scores)
        nothing = np.array([np.nan, np.nan, 0.0])
        rows = [{"scalars": self._scores.get((i, split), nothing)} for i in everyone]
        return self._reply(question, everyone, rows, [])

    def accuse(self, verdicts: Verdicts) -> None:
        """Quarantine the accused silos and end the segment."""
        Quarantined.accuse(self.names, verdicts, self.membership.round, self.membership.record)


def itself(stack: Tensor) -> Tensor:
    """Return numbers that are already here."""
    return stack


def _mixed(stack: Tensor, skipped: list[int], weights: Tensor) -> Tensor:
    """Return Σ w_i v_i over the silos that answered, rescaled to the weight of all; skipped rows hold their mean."""
    heard = weights.clone()
    heard[skipped] = 0
    there = float(heard.sum())
    if skipped and there != 0:
        weights = heard * (float(weights.sum()) / there)
    mixed: Tensor = torch.tensordot(weights.double(), stack.double(), dims=1)
    return mixed.to(stack.dtype)


class Remote(Federation):
    """N silos behind a transport; for `SecureAggregation` over a `MaskedRemote` channel."""

    channel: RemoteChannel

    def __init__(
        self, membership: Membership, facts: Facts, channel: type[RemoteChannel] = RemoteChannel
    ) -> None:
        super().__init__(channel(membership, facts))

    def __repr__(self) -> str:
        return f"Remote federation of {len(self.names)} silos, {self.dimension} parameters"
