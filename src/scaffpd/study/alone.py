r"""Models that clients train by themselves, with the ridge of their own evidence, all at once.

    u_i ~ N(0, Ω_i),   Ω_i = diag(ω_ig),      ω_ig ← ‖u_i‖²_g / Σ_{j∈g} (1 − V_jj/ω_ig)
                                              σ_i² ← RSS_i/(n_i − all degrees of freedom)

is the evidence of `algorithms/evidence.py` for one client and τ = 0: first one ω_i for all groups,
and one per group where that gains a nat each. What a column can explain is measured on everybody's
rows, as columns are scaled by all: on its own rows, a column that hardly varies there would get a
large variance, and answers that are far off where it does vary. The intercept is free for numbers.
For labels it is N(0, 4), which is near Laplace's rule (ones + 1)/(rows + 2): a client that has seen
one label only does not know that there is no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Self

import numpy as np
import torch

from scaffpd.algorithms.climb import LARGEST, Climb, Families
from scaffpd.algorithms.evidence import FLAT, INTERCEPT, ROUGH, START, WORTH, Evidence
from scaffpd.models import Linear
from scaffpd.models.envelopes import PersonalOracle
from scaffpd.models.execution import limit_threads, parallel_map
from scaffpd.models.glm import LinearOracle
from scaffpd.models.modes import ModeRows
from scaffpd.models.newton import Anchor, NewtonPoint, portions
from scaffpd.models.point import Ridge
from scaffpd.models.samples import PaddedBlock
from scaffpd.phases import tell
from scaffpd.training.cohort import Cohort, Pair
from scaffpd.training.metrics import Array
from scaffpd.training.settling import groups_of

CLOSE = 0.1  # slope of a Newton step, in nats, at which a mode may stop


class _Own(Climb):
    """The fixed points of a block's clients, each with its own variances."""

    problem: Evidence

    def __init__(self, problem: Evidence, rows: ModeRows, block: PaddedBlock, counts: bool) -> None:
        self.rows = rows
        self.who = block.clients
        self.samples, self.y, self.weight = rows.of(block)
        self.n = rows.sizes[self.who].numpy(force=True)
        wide = np.array(problem.groups) == INTERCEPT
        intercept = FLAT if problem.squared else LARGEST if counts else START[1]
        omega = np.where(wide, intercept * problem.unit, START[1] * problem.share)
        shape = len(self.who), len(problem.groups)
        self.joined, self.single = (
            np.broadcast_to(np.where(wide, -1, own), shape) for own in (problem.joined, problem.own)
        )
        scale = np.full(len(self.who), 2 * problem.noise if problem.squared else 1.0)
        super().__init__(problem, np.tile(omega, (len(self.who), 1)), scale)
        self.targets = self.n * problem.copies
        self.u = self.weight.new_zeros(len(self.who), shape[1] * rows.coupled, problem.copies)

    def chosen(self) -> Self:
        """Find all variances: one for all groups, or one per group where that is worth it."""
        more = len(np.unique(self.single)) - len(np.unique(self.joined))
        rough = max(ROUGH[0], ROUGH[1] * more)
        self.started(self.joined).run(rough)
        if more:
            other = copy(self).started(self.single)
            other.run(rough)
            gains = other.evidence - self.evidence > WORTH * more
            self.variances = np.where(gains[:, None], other.variances, self.variances)
            self.scale = np.where(gains, other.scale, self.scale)
            self.u[gains] = other.u[gains]
            self.started(np.where(gains[:, None], self.single, self.joined)).run(ROUGH[0])
        return self

    def started(self, families: Families) -> Self:
        """Begin with other families, and all rounds."""
        self.rounds = 0
        return super().started(families)

    def answer(self) -> None:
        """Take one more Newton step from near the modes, as the evidence counts it."""
        copies = self.problem.copies
        scale = torch.from_numpy(self.scale).to(self.weight)
        S = torch.from_numpy(np.sqrt(self.variances)).to(scale)
        S = S.repeat_interleave(self.rows.coupled, 1)
        weight = self.weight / scale[:, None]
        z = weight.new_zeros(*weight.shape, self.rows.outputs)
        samples = self.samples, self.y, weight
        found = self.rows.solve(samples, z, S, self.u / S[..., None], CLOSE)
        v = found.v - found.step
        self.u = S[..., None] * v
        inside = copies * found.near.L.diagonal(dim1=1, dim2=2).log().sum(1)
        value = found.value - found.slope / 2 + self.rows.rest[self.who] / scale
        size = v.square().sum(2)
        self.residual = (2 * value - size.sum(1)).numpy(force=True)
        self.size, self.freedom = (
            part.view(len(self.n), -1, self.rows.coupled).sum(2).numpy(force=True)
            for part in (size, copies * found.near.freedom)
        )
        self.evidence = -(value + inside).numpy(force=True)
        if self.problem.squared:
            self.evidence -= self.targets / 2 * np.log(np.pi * self.scale)


def fit_alone(model: Linear, pairs: Sequence[Pair]) -> tuple[Array, Array]:
    """Train every client by itself, with the ridge of its own evidence.

    Return the models, (clients, d), and each client's proven gap.
    """
    cohort = Cohort(pairs, replace(model, l2=1.0), settle=False)
    inner = cohort.channel.train.oracle
    assert isinstance(inner, LinearOracle)
    width = cohort.channel.train.shape[0]
    with limit_threads(inner.rows.A.numel()):
        problem = Evidence(cohort, groups_of(model, width), model.loss)
        rows = ModeRows(inner, problem.coupled)
        omega = problem.zero().new_empty(len(cohort.names), len(problem.groups))
        scale = omega.new_empty(len(omega))

        done: list[PaddedBlock] = []
        tell("Training every client alone", 0.0)

        def work(block: PaddedBlock) -> None:
            fit = _Own(problem, rows, block, not model.smooth).chosen()
            omega[block.clients], scale[block.clients] = (
                torch.from_numpy(found).to(omega) for found in (fit.variances, fit.scale)
            )
            done.append(block)
            tell("Training every client alone", len(done) / len(blocks))

        blocks = portions(rows.rows, len(problem.groups) * problem.coupled)
        parallel_map(work, blocks, omega.device)
        anchor = Anchor((scale / rows.sizes)[:, None] / omega)
        point = PersonalOracle(inner, Ridge(0.0), anchor).evaluate(inner.start())
        assert isinstance(point, NewtonPoint)
        return point.models().numpy(force=True), point.excess().numpy(force=True)
