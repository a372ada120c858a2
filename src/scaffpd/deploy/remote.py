r"""`Remote`: silos behind a transport as a `Federation`, used by algorithms like a cohort.

A round of Scaff-PD is two exchanges: x down and (L_i, c_i) up; c down and d_i up. Scalars such as
⟨c_i, v⟩ are computed here from the c_i.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.deploy.messages import Array
from scaffpd.deploy.session import Session, SiloRequest, troubles
from scaffpd.errors import InputError
from scaffpd.federation import Constants, Federation, Vector
from scaffpd.federation.questions import (
    Curvature,
    GradientsAt,
    LocalSteps,
    Project,
    ProximalSteps,
    Question,
    Reply,
    Scores,
    Vectors,
)

Parts = Mapping[str, Array]


@dataclass(frozen=True)
class Facts:
    """The silos' reports with the agreement."""

    names: tuple[str, ...]
    constants: Constants  # of their losses
    start: Array = field(repr=False)  # x⁰
    probes: Vector  # f_i at one arbitrary point, which identifies the data
    tested: NDArray[np.int64]  # how many rows each has held out


class RemoteChannel:
    """A `Channel` to silos behind a transport."""

    work = float("inf")
    absent = 0  # the run waits for a silo that does not answer
    keeps = True
    here = False
    account = None

    def __init__(self, session: Session, facts: Facts) -> None:
        self.session = session
        self.facts = facts
        self.names = facts.names
        self.like = torch.from_numpy(np.array(facts.start))
        # c_i of the questions that are still in use
        self._answers: WeakKeyDictionary[GradientsAt, dict[tuple[int, ...], Tensor]] = (
            WeakKeyDictionary()
        )

    @property
    def fingerprint(self) -> str:
        """Digest of the agreement and of the silos' constants, which change with their data."""
        known = self.facts.constants
        setup = self.session.setup
        columns = (known.smoothness, known.strong_convexity, known.steepest, known.samples)
        words = [f"{value:.6e}" for part in (*columns, self.facts.probes) for value in part]
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
        """Make one exchange."""
        if isinstance(question, Project):
            slopes = self._gradients(question.at, chosen) @ question.direction
            return Reply({"slope": lambda: slopes})
        if isinstance(question, Scores):
            return self.scores(question)
        return self._reply(question, chosen, self._exchange(question, chosen))

    def _exchange(self, question: Question, chosen: Sequence[int]) -> list[Parts]:
        """Return the checked answers of the chosen silos."""
        names = [self.names[i] for i in chosen]
        shapes = question.shapes(len(self.like))
        if question.scalars:
            shapes["scalars"] = (len(question.scalars),)
        formats = {
            part: self.like.numpy().dtype
            for part in question.vectors
            if shapes.get(part) == self.like.shape
        }
        answers = self.session.ask(
            self.request(question, chosen), names, lambda got: troubles(got, shapes, formats)
        )
        return [answers[name].arrays for name in names]

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
            known = self.facts.constants
            L = known.smoothness if question.at.batch_size is None else known.steepest
            steepest = max(question.plan.steepest, float(L[list(chosen)].max()))
            question = replace(question, plan=replace(question.plan, steepest=steepest))
        return SiloRequest.of(question, own)

    def _gradients(self, at: GradientsAt, chosen: Sequence[int]) -> Tensor:
        """Return the stored c_i of these silos."""
        stored = self._answers.get(at, {})
        if tuple(chosen) not in stored:
            raise InputError(
                "gradients-not-asked",
                "This question is about gradients that these silos have not been asked for.",
            )
        return stored[tuple(chosen)]

    def _reply(self, question: Question, chosen: Sequence[int], rows: Sequence[Parts]) -> Reply:
        """Stack the parts of all silos."""
        numbers: dict[str, Callable[[], Tensor]] = {}
        vectors = {}
        for part in question.shapes(len(self.like)):
            if part in question.vectors:
                stack = torch.from_numpy(np.stack([row[part] for row in rows])).to(self.like)
                vectors[part] = Vectors(
                    partial(_mixed, stack), partial(itself, stack), double_weights=True
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

    def scores(self, question: Scores) -> Reply:
        """Return loss, accuracy and count per silo; NaN for a silo without held-out rows."""
        everyone = range(len(self.names))
        chosen = [i for i in everyone if question.split == "train" or self.facts.tested[i]]
        if not chosen:
            raise InputError(
                "no-held-out-rows", "No silo has held rows out: there is nothing to test on."
            )
        rows: list[Parts] = [{"scalars": np.array([np.nan, np.nan, 0.0])} for _ in everyone]
        for i, parts in zip(chosen, self._exchange(question, chosen), strict=True):
            rows[i] = parts
        return self._reply(question, everyone, rows)


def itself(stack: Tensor) -> Tensor:
    """Return numbers that are already here."""
    return stack


def _mixed(stack: Tensor, weights: Tensor) -> Tensor:
    """Return Σ w_i v_i, added up in double precision."""
    mixed: Tensor = torch.tensordot(weights.double(), stack.double(), dims=1)
    return mixed.to(stack.dtype)


class Remote(Federation):
    """N silos behind a transport; for `SecureAggregation` over a `MaskedRemote` channel."""

    channel: RemoteChannel

    def __init__(
        self, session: Session, facts: Facts, channel: type[RemoteChannel] = RemoteChannel
    ) -> None:
        super().__init__(channel(session, facts))

    def __repr__(self) -> str:
        return f"Remote federation of {len(self.names)} silos, {self.dimension} parameters"
