r"""The subspace saddle method where only some clients answer in a round, or where they answer from minibatches.

Round, at x with λ, and with what each client i has said last, at its own point x_i and weight λ_i′:
    (0)  the clients of the round, P, answer at x; c = Σ_{i∈P} λ_i c_i(x) + S,  S = Σ_{i∉P} λ_i′ c_i(x_i)
    (1)–(4) as in `SubspaceSaddle`, asked of P. Clients that are absent keep their last losses; of their gradients the
         server knows the sum S only, which pulls on everybody alike: g_i + VᵀS/Σλ. Nothing of c_i lies in V then,
         and the model holds their weights back accordingly. The others stand in for their curvature, and some is
         added in every direction.

Clients keep what they have said last, λ_i′ c_i(x_i), and tell by how much it has changed, so that c costs one vector as
ever; VᵀS follows from their slopes. A round is four exchanges: x goes down, with the columns of V that a client has
missed, and the change of c comes up; the rest is as in `SubspaceSaddle`.

A certificate needs everyone at the same point. So everyone is asked when the model promises a tenth of what it promised
when that was done last; no certificate is claimed in between, nor while a client cannot be reached (`_present` has the
last word on who is there).

With minibatches, all questions of a round are about the same samples, so that the acceptance test compares like with
like. What is left is the noise between rounds: c at x from the last round's samples and from this round's differ by

    ν = ‖c − c′‖² / (‖c‖² + ‖c′‖²),    0 without noise, 1 where there is nothing but noise.

(Where a share of the clients is there, so is that share of ν only: ½ stands for half of the share below.)
From the first round t = 1 with ν > ½ on, every such round raises the damping, 1 + δ ≥ 1 + GROWTH·t, holds the weights
by as much, and x and λ are averages of the rounds since, later ones counting more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaffpd.algorithms.base import CLIENTS, STEPS
from scaffpd.algorithms.saddle import Saddle
from scaffpd.algorithms.subspace_saddle import (
    MOVES,
    Neighbourhood,
    SubspaceSaddle,
    SubspaceSaddleState,
    damped,
    first_damping,
)
from scaffpd.errors import InputError
from scaffpd.federation import Federation, Gradients, Memory, ProximalPlan, Restriction, Vector
from scaffpd.objectives.base import LARGEST

GROWTH = 0.3  # of the damping, for each round of noise
NOISE = 0.5  # ν from which a round is one
SOONER = 0.1  # of the last promise, for the next certificate
CAUTION = 0.1  # what absent clients are taken to curve more than the others, in every direction, as a share of L
FAIR = (
    0.1  # the least weight of a client that is there in local work and curvature, as a share of 1/N
)
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class PartialAnswers:
    """The answers of the clients that are there, with the last words of those that are not.

    Attributes:
        at: the answers at x.
        mask: who is there.
        last: L_i(x_i) of everybody.
        absent: S.
        sizes: ‖c_i‖²_{D⁻¹} of everybody, where it was asked for last.
        size: how large Hessians are in the metric D, roughly.
    """

    at: Gradients
    mask: Mask
    last: Vector
    absent: Tensor
    sizes: Vector
    size: float

    @property
    def losses(self) -> Vector:
        """L_i(x), or L_i(x_i)."""
        return np.where(self.mask, self.at.losses, self.last)

    @property
    def rounding(self) -> tuple[Vector, Vector]:
        """Return the known rounding bounds."""
        return self.at.rounding

    def sum(self, weights: Vector) -> Tensor:
        """Return Σ_{i∈P} w_i c_i(x) + S."""
        return self.at.sum(weights * self.mask) + self.absent

    def pull(self, step: Tensor, weights: Vector) -> Any:
        """Return ⟨S, v⟩/Σλ for a step v, or each column of V: what every client's loss is taken to change by on top."""
        return (self.absent @ step).double().cpu().numpy() / (float(weights.sum()) or 1.0)

    def stand_in(self, weights: Vector) -> Vector:
        """Return weights of the clients that are there, with the sum of all weights: they stand in for the others."""
        if self.mask.all():
            return weights
        total = float(weights.sum()) or 1.0
        own = np.maximum(weights, FAIR * total / len(weights)) * self.mask
        return own * total / float(own.sum())

    def restriction(self, V: Tensor, weights: Vector, metric: Tensor) -> Restriction[Vector]:
        """Ask the clients that are there, and pull each by its share of S as well."""
        seen = self.at.restriction(V, self.stand_in(weights), metric)
        away = self.size * float(weights @ ~self.mask)
        pull = self.pull(V, weights)
        own = np.where(self.mask[:, None], seen.slopes, 0.0)
        unseen = np.where(self.mask, seen.sizes, self.sizes) - (own**2).sum(1)
        slopes = own + pull
        return Restriction(
            slopes, seen.curvature + away * np.eye(len(pull)), unseen + (slopes**2).sum(1)
        )

    def own_sizes(self, around: Neighbourhood, weights: Vector) -> Vector:
        """Return ‖c_i‖²_{D⁻¹}: what was seen, without the others' pull."""
        slopes = around.model.slopes
        own = slopes - self.pull(around.V, weights)
        return np.where(self.mask, around.sizes - (slopes**2).sum(1) + (own**2).sum(1), self.sizes)


@dataclass(frozen=True, kw_only=True)
class SampledState(SubspaceSaddleState):
    """`SubspaceSaddleState`, and what is remembered of clients that do not answer.

    Attributes:
        losses: L_i(x_i), where each client has answered last (from its minibatch, where there is one).
        iterate: where the method stands; x is an average of such points where there is noise.
        mixture: λ there.
        kept: what each client has said last, c_i(x_i); the clients keep it.
        counted: the λ_i′ with which it went into `direction`.
        sizes: ‖c_i‖²_{D⁻¹} where it was asked for last.
        missed: how many of `columns` each client has not been sent.
        checked: the promise when everyone was asked last.
        round_checked: the round of that.
        noisy: t, the rounds of noise so far.
    """

    at: Any = field(repr=False, metadata={"transient": True})
    iterate: Tensor
    mixture: Vector
    kept: Memory = field(repr=False)
    counted: Vector
    sizes: Vector
    missed: Vector
    checked: float = np.inf
    round_checked: int = 0
    noisy: int = 0


@dataclass(frozen=True)
class SampledSubspaceSaddle(SubspaceSaddle):
    """`SubspaceSaddle` for rounds without some of the clients, and for minibatches.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        memory: see `SubspaceSaddle`.
        clients_per_round: how many clients take part in a round, drawn uniformly without replacement; `None` for all.
        batch_size: samples per client and round; `None` for all of them. With minibatches nothing is certified.
    """

    published: ClassVar[str] = ""
    keeps_vectors: ClassVar[bool] = True
    everywhere: ClassVar[bool] = False  # the stale gradients of absent clients lie anywhere

    clients_per_round: int | None = None
    batch_size: int | None = None

    def uncertified(self, state: SubspaceSaddleState) -> str | None:
        """Say why nothing is proven about the result, or return `None`."""
        if self.batch_size is not None:
            return "losses and gradients come from minibatches; leave batch_size out."
        return super().uncertified(state)

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> SampledState:
        """Ask everyone at x⁰; each client keeps what it said."""
        self._check(len(federation.names))
        start = super().init(federation, seed, x0)
        known = {item.name: getattr(start, item.name) for item in fields(start)}
        return SampledState(
            **known,
            iterate=start.x,
            mixture=start.weights,
            kept=federation.memory().replaced(start.at),
            counted=start.weights,
            sizes=start.at.norms() / float(start.metric.min()),
            missed=np.zeros(len(start.weights)),
        )

    def _check(self, everyone: int) -> None:
        if (
            self.clients_per_round is not None
            and not everyone / 2 <= self.clients_per_round <= everyone
        ):
            raise InputError(
                "clients-per-round",
                f"{type(self).__name__} needs clients_per_round between {-(-everyone // 2)} and {everyone}, got "
                f"{self.clients_per_round}: old answers of more than half of the clients are no basis for long steps.",
            )

    def resume(self, federation: Federation, state: SampledState) -> SampledState:  # type: ignore[override]
        """Return the state, which is complete: every round asks anew."""
        return state

    def round(self, federation: Federation, state: SampledState) -> SampledState:  # type: ignore[override]
        """Ask the clients of the round at the iterate, and make one trial point."""
        here, at = self._arrive(federation, state)
        tol = self._accuracy(here)
        around = self._look(federation, replace(here, weights=here.mixture))
        around = self._steady(around, state, here, tol)
        damping = max(here.damping, GROWTH * here.noisy)
        step = around.model.solve(damping, tol)
        y = here.iterate + around.V @ torch.from_numpy(step.z).to(around.V)
        answers = self._answers(
            federation, here, y, at.mask, coefficients_sent=len(step.z) + len(step.weights)
        )
        there = replace(at, at=answers, last=here.losses)
        promised = around.merit - step.value
        gained = -np.inf
        if np.all(np.abs(there.losses) < LARGEST / 4):
            gained = around.merit - around.model.merit(
                there.losses + at.pull(y - here.iterate, here.mixture), tol
            )
        least = first_damping(step, promised, here.size)
        if not gained >= 0.1 * promised - 2 * tol:
            return self._proven(replace(here, accepted=False, damping=max(4 * damping, least)), at)
        return self._taken(
            here, there, around, step, y, promised, damped(damping, gained, promised, least)
        )

    def _arrive(
        self, federation: Federation, state: SampledState
    ) -> tuple[SampledState, PartialAnswers]:
        """Make step (0), and return the state as the clients of the round know it, before the step."""
        everyone = len(federation.names)
        mask = self._present(state, everyone)
        due = self._due(state, everyone)
        state = replace(state, rounds=state.rounds + 1)
        if due or mask.all():
            state = replace(state, checked=state.promise, round_checked=state.rounds)
        answers = self._answers(
            federation, state, state.iterate.clone(), mask
        )  # sent, whoever has it already
        federation.traffic.add(
            down=int(state.missed @ mask) * state.x.numel() * state.x.element_size()
        )
        absent = state.direction - state.kept.sum(state.counted * mask)
        absent = absent if not mask.all() else torch.zeros_like(absent)
        at = PartialAnswers(answers, mask, state.losses, absent, state.sizes, CAUTION * state.size)
        c = at.sum(state.mixture)
        return replace(
            state,
            at=at,
            losses=at.losses,
            direction=c,
            noisy=state.noisy + self._noise(state, c, mask),
            kept=state.kept.replaced(answers),
            counted=np.where(mask, state.mixture, state.counted),
            missed=np.where(mask, 0, state.missed),
        ), at

    def _noise(self, state: SampledState, c: Tensor, mask: Mask) -> bool:
        """Return whether ν > ½, where there are minibatches at all; only clients that are there bring new noise."""
        if self.batch_size is None or not np.any(state.constants.samples > self.batch_size):
            return False
        change = (c - state.direction).square().sum()
        size = c.square().sum() + state.direction.square().sum()
        return float(change) > NOISE * float(mask.mean()) * float(size)

    def _due(self, state: SampledState, everyone: int) -> bool:
        """Return whether a certificate is due: the promise has fallen since the last, and all may have answered."""
        long = state.rounds - state.round_checked >= everyone / (self.clients_per_round or everyone)
        return self.batch_size is None and long and state.promise <= SOONER * state.checked

    def _answers(
        self,
        federation: Federation,
        state: SampledState,
        x: Tensor,
        mask: Mask,
        coefficients_sent: int | None = None,
    ) -> Gradients:
        """Ask the clients of the round at x; all questions of a round are about the same samples."""
        clients = None if mask.all() else np.flatnonzero(mask)
        return federation.gradients(
            x,
            self.batch_size,
            (state.seed, state.rounds, STEPS),
            clients,
            coefficients_sent=coefficients_sent,
        )

    def _present(self, state: SampledState, everyone: int) -> Mask:
        """Choose who takes part in the next round: where a certificate is due, all that can be reached."""
        if self.clients_per_round is None or self._due(state, everyone):
            return np.ones(everyone, dtype=bool)
        random = np.random.default_rng([state.seed, state.rounds + 1, CLIENTS])
        return np.isin(
            np.arange(everyone), random.choice(everyone, self.clients_per_round, replace=False)
        )

    def _held(self, state: SubspaceSaddleState, k: int) -> bool:
        """Return `True`: what is not known of absent clients lies outside V."""
        return True

    def _local_work(self, federation: Federation, state: SubspaceSaddleState, c: Tensor) -> Tensor:
        at = state.at
        assert isinstance(at, PartialAnswers)
        own = at.stand_in(state.weights)
        updates = federation.proximal_steps(at.at, c, ProximalPlan(state.pull, state.metric))
        return updates.sum(own / float(own.sum()))

    def _steady(
        self, around: Neighbourhood, before: SampledState, here: SampledState, tol: float
    ) -> Neighbourhood:
        """Hold weights against the noise of their losses as well."""
        if not here.noisy:
            return around
        spread = float(np.abs(here.losses - before.losses).mean())
        hold = GROWTH * here.noisy * spread / max(float(here.mixture.mean()), 1e-300)
        model = replace(around.model, w=np.sqrt(around.w**2 + hold))
        return replace(around, model=model, merit=model.merit(here.losses, tol))

    def _taken(
        self,
        here: SampledState,
        there: PartialAnswers,
        around: Neighbourhood,
        step: Saddle,
        y: Tensor,
        promised: float,
        damping: float,
    ) -> SampledState:
        """Return the state after a step to y, where the clients of the round have answered."""
        moves = step.weights - here.mixture
        away = around.w * moves
        moving = int(np.count_nonzero(np.abs(moves) > MOVES * step.weights.max()))
        x = y
        weights = step.weights
        if here.noisy > 1:  # averages
            share = 2 / (here.noisy + 1)
            x = here.x + share * (y - here.x)
            weights = here.weights + share * (weights - here.weights)
        columns = self._kept(here, y - here.iterate, around.fresh)
        state = replace(
            here,
            iterate=y,
            mixture=step.weights,
            x=x,
            weights=weights,
            losses=there.losses,
            at=there,
            sizes=there.own_sizes(around, here.mixture),
            direction=there.sum(step.weights),
            kept=here.kept.replaced(there.at),
            counted=np.where(there.mask, step.weights, here.counted),
            pull=around.pull,
            scale=around.scale,
            columns=columns,
            energy=float(away @ away) / around.scale,
            missed=np.where(
                there.mask, 0, np.minimum(here.missed + 1 + len(around.fresh), len(columns))
            ),
            moving=max(here.moving, moving),
            promise=max(promised, 0.0),
            damping=damping,
            accepted=True,
        )
        return self._proven(state, there)

    def _proven(self, state: SampledState, at: PartialAnswers) -> SampledState:
        """Certify the state where everyone has answered at x; an earlier certificate of the same x still holds."""
        if at.mask.all():
            return self._proven_at(state)
        return replace(state, certificate=np.inf, floor=np.inf) if state.accepted else state
