r"""What methods share that ask for full gradients of all clients: how a run begins, its certificate, and the
frame of the centralised references.

Off the simplex (q-FFL, Nash) the model steps along Σ λ_i c_i / S with S = Σ λ_i, so that its step length does not
depend on S; on the simplex S = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor

from scaffpd.algorithms.base import check_finite, check_settings, safe_dual_rate, steepest
from scaffpd.certificate import certify, no_certificate
from scaffpd.federation import Constants, Federation, Gradients, Vector
from scaffpd.objectives.base import Objective


@dataclass(frozen=True, kw_only=True)
class CentralState:
    """A pair (x, λ) with the clients' answers at x.

    Attributes:
        x: x^r.
        weights: λ^r.
        losses: L(x^r).
        rounds: rounds made.
        seed: of the run; nothing here is random.
        constants: L_i and μ_i.
        server_rate: τ.
        dual_rate: σ.
        certificate: the proven gap of (x, weights).
        floor: the part of it that is rounding.
        accepted: every step is taken.
        at: the clients' answers at x; asked for anew when a run is resumed.
    """

    x: Tensor
    weights: Vector
    losses: Vector
    rounds: int
    seed: int
    constants: Constants
    server_rate: float
    dual_rate: float
    certificate: float = np.inf
    floor: float = np.inf
    accepted: bool = True
    at: Gradients = field(repr=False, metadata={"transient": True})


State = TypeVar("State", bound=CentralState)
Proven = TypeVar("Proven", bound=Any)  # any state with a certificate


@dataclass(frozen=True)
class CentralMethod:
    """A method that asks every client for its full gradient.

    Args:
        objective: (Λ, ψ), such as `ChiSquare(rho=0.1)`.
        server_rate: τ; left out, 1/(2 max_i L_i).
        dual_rate: σ; left out, 0.45/(K² τ) with K the coupling of x and λ at x⁰.
    """

    knobs: ClassVar[tuple[str, ...]] = ("server_rate", "dual_rate")

    objective: Objective
    server_rate: float | None = field(default=None, kw_only=True)
    dual_rate: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_settings(self)

    def automatic(self, federation: Federation) -> dict[str, float]:
        """The rates that are used where none are given."""
        at = federation.gradients(federation.start())
        server_rate, dual_rate = self._rates(federation.constants(), at)
        return {"server_rate": server_rate, "dual_rate": dual_rate}

    def uncertified(self, state: CentralState) -> str | None:
        """Why nothing is proven about the result, or `None`."""
        return no_certificate(True, state.constants, state.weights)

    def init(self, federation: Federation, seed: int = 0, x0: Tensor | None = None) -> CentralState:
        """The clients' answers at x⁰; λ⁰ is the objective's prior."""
        x, constants, at = open_run(self.objective, federation, x0)
        server_rate, dual_rate = self._rates(constants, at)
        return self._certified(CentralState(
            x=x, weights=self.objective.start(at.losses), losses=at.losses, rounds=0, seed=seed,
            constants=constants, server_rate=server_rate, dual_rate=dual_rate, at=at,
        ))  # fmt: skip

    def resume(self, federation: Federation, state: State) -> State:
        """A state read from disk, with the clients' answers at x asked for again."""
        return replace(state, at=federation.gradients(state.x))

    def _rates(self, constants: Constants, at: Gradients) -> tuple[float, float]:
        tau = self.server_rate or 1 / (2 * steepest(constants.smoothness))
        return tau, self.dual_rate or safe_dual_rate(self.objective, at, at.losses, tau)

    def _moved(self, federation: Federation, state: State, x: Tensor, weights: Vector) -> State:
        at = federation.gradients(x)
        return self._certified(replace(state, x=x, weights=weights, losses=at.losses, at=at, rounds=state.rounds + 1))

    def _certified(self, state: State) -> State:
        return certified(self, state, state.at)


def descent(at: Gradients, weights: Vector) -> Tensor:
    """Σ (λ_i/S) c_i with S = Σ λ_i, which is 1 on the simplex."""
    return at.sum(weights / (float(weights.sum()) or 1.0))


def open_run(objective: Objective, federation: Federation, x0: Tensor | None) -> tuple[Tensor, Constants, Gradients]:
    """x⁰, what is known of the clients, and their answers there; a sentence where nothing can come of it."""
    x = federation.start() if x0 is None else x0
    objective.weights(len(federation.names))
    constants, at = federation.constants(), federation.gradients(x)
    check_finite(at.losses, federation.names)
    objective.check(at.losses, federation.names)
    return x, constants, at


def certified(method: Any, state: Proven, at: Any, c: Tensor | None = None) -> Proven:
    """The state with the proven gap of its (x, λ), at whose x the clients answered `at`; c is Σ λ_i c_i, if known."""
    if method.uncertified(state):
        return replace(state, certificate=np.inf, floor=np.inf)
    size = float((at.sum(state.weights) if c is None else c).norm())
    mu = state.constants.strong_convexity
    proof = certify(method.objective, state.losses, state.weights, size, mu, at.rounding)
    return replace(state, certificate=proof.gap, floor=proof.floor)
